"""The time-outs keep the order that they need among each other."""

import ast
from pathlib import Path

import pytest

import domainpar
from domainpar.common import timeouts

SOURCE = Path(timeouts.__file__).read_text()
VALUES = {name: value for name, value in vars(timeouts).items() if name.isupper()}

SHORTER = [
    ("SPIN", "LONGEST_NAP"),
    ("MEETING_POLL", "WATCH_POLL"),
    ("WATCH_POLL", "BEAT"),
    ("FORWARDING", "REPORT"),
    ("LINGER", "REPORT"),
    ("BEAT", "PATIENCE"),
    ("REPORT", "ORPHAN"),
    ("REPORT", "LEAVING"),
    ("SIGNS_OF_LIFE", "BOARD"),
    ("ANSWER_POLL", "LOCK_LOOKED_AT"),
    ("BOARD", "GRACE"),
    ("PATIENCE", "STEP"),
    ("PROBE", "STARTING"),
    ("LAUNCHER_ANSWER", "DOCTOR_REPORT"),
    ("DOCTOR_REPORT", "DOCTOR"),
    ("CONNECT", "JOIN"),
    ("COMPILING", "STEP"),
    ("STEP", "FIRST_STEP"),
]


@pytest.mark.parametrize(("shorter", "longer"), SHORTER)
def test_whoever_must_come_first_has_less_time(shorter, longer):
    assert VALUES[shorter] < VALUES[longer]


def test_a_failure_is_read_by_all_before_the_rank_that_serves_the_store_ends():
    assert timeouts.LINGER >= 3 * timeouts.WATCH_POLL


def test_a_rank_that_lives_has_given_a_sign_between_two_readings():
    assert timeouts.SIGNS_OF_LIFE >= 2 * timeouts.BEAT + timeouts.WATCH_POLL


def test_the_table_is_in_order_and_every_line_says_what_it_is_for():
    body = ast.parse(SOURCE).body
    named = [node.targets[0].id for node in body if isinstance(node, ast.Assign)]
    assert [VALUES[name] for name in named] == sorted(VALUES[name] for name in named)
    texts = [isinstance(node, ast.Expr) for node in body if isinstance(node, (ast.Assign, ast.Expr))][1:]
    assert texts == [False, True] * len(named)


def test_every_time_out_is_used_and_none_has_a_home_of_its_own():
    package = Path(domainpar.__file__).parent
    sources = {path: path.read_text() for path in package.rglob("*.py") if path.name != "timeouts.py"}
    assert [name for name in VALUES if not any(f"timeouts.{name}" in text for text in sources.values())] == []
    ends = ("SECONDS", "DEADLINE", "TIMEOUT")
    own = [
        f"{path.name}: {target.id}"
        for path, text in sources.items()
        if any(f"{end} = " in text for end in ends)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith(ends)
    ]
    assert sorted(own) == ["rank_differences.py: LEAST_SECONDS", "transport_checks.py: SLOW_SECONDS"], (
        "thresholds, not time-outs"
    )
