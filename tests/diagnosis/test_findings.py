"""One row a check, whatever the ranks found: the worst wins, and says where."""

import json

import pytest

from domainpar.common.models import read_as
from domainpar.diagnosis.finding import (
    Finding,
    Verdict,
    as_record,
    as_text,
    attempted,
    exit_code,
    failed,
    gathered,
    show,
    skipped,
    works,
    write_json,
)
from domainpar.testing import run_ranks

GOOD, ODD, BAD, NONE = (
    works("a", "fine", x=1),
    works("a", "odd", "look"),
    failed("a", "bad", "mend"),
    skipped("a", "-"),
)


def _gathered(world, findings_of_ranks):
    return gathered(findings_of_ranks[world.rank], world)


def merged(*of_ranks):
    """One finding of each rank, as all ranks see them."""
    findings = run_ranks(_gathered, len(of_ranks), [[finding] for finding in of_ranks])
    assert all(rank == findings[0] for rank in findings)
    (row,) = findings[0]
    return row


@pytest.mark.parametrize(
    ("of_ranks", "verdict", "found"),
    [
        ((GOOD, GOOD), Verdict.PASS, "fine"),
        ((GOOD, works("a", "fine too")), Verdict.PASS, "fine"),
        ((BAD, BAD), Verdict.FAIL, "bad"),
        ((GOOD, BAD), Verdict.FAIL, "rank 1: bad"),
        ((ODD, GOOD, BAD, ODD), Verdict.FAIL, "rank 2: bad"),
        ((GOOD, ODD, failed("a", "worse", "mend")), Verdict.FAIL, "rank 2: worse"),
        ((ODD, GOOD), Verdict.WARN, "rank 0: odd"),
        ((NONE, GOOD), Verdict.PASS, "fine"),
        ((NONE, NONE), Verdict.SKIP, "-"),
        ((GOOD, *[BAD] * 6), Verdict.FAIL, "rank 1: bad; rank 2: bad; rank 3: bad; rank 4: bad; and 2 more ranks"),
    ],
)
def test_the_worst_of_all_ranks_wins_and_names_them(of_ranks, verdict, found):
    row = merged(*of_ranks)
    assert (row.check, row.verdict, row.found) == ("a", verdict, found)


def test_a_check_that_only_some_ranks_made_is_kept():
    found = run_ranks(_gathered, 2, [[GOOD], [GOOD, failed("b", "bad", "mend")]])
    assert [(row.check, row.verdict) for row in found[0]] == [("a", "PASS"), ("b", "FAIL")]


@pytest.mark.parametrize(("findings", "code"), [([], 0), ([GOOD, ODD, NONE], 0), ([GOOD, BAD, GOOD], 1)])
def test_only_what_fails_changes_the_exit_code(findings, code):
    assert exit_code(findings) == code


def test_a_check_that_breaks_is_a_check_that_fails():
    def broken():
        raise OSError("no such thing")

    (finding,) = attempted("a", broken)
    assert (finding.verdict, finding.found) == (Verdict.FAIL, "the check itself failed: OSError: no such thing")
    assert attempted("a", lambda: GOOD) == [GOOD]
    assert attempted("a", lambda: None) == []


def test_the_table_holds_every_row_and_what_to_do():
    text = as_text([GOOD, ODD, failed("b", "[red] 1 of 2 rows", "mend it")])
    assert max(len(line) for line in text.splitlines()) <= 118
    for word in ("PASS", "WARN", "FAIL", "fine", "odd", "look", "[red] 1 of 2 rows", "mend it"):
        assert word in text
    assert text.endswith("doctor: 1 PASS, 1 WARN, 1 FAIL, 0 SKIP; exit code 1\n")
    assert "\x1b" not in text


def test_colours_are_for_terminals_that_no_launcher_hands_out(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, coloured in (({}, True), ({"RANK": "0", "WORLD_SIZE": "2"}, False), ({"PMI_SIZE": "x"}, False)):
        with monkeypatch.context() as patch:
            for variable, value in name.items():
                patch.setenv(variable, value)
            show([BAD])
        assert ("\x1b" in capsys.readouterr().out) is coloured, name


def test_the_json_says_the_same(tmp_path):
    write_json(tmp_path / "found.json", as_record([GOOD, BAD]))
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["exit_code"] == 1
    assert read_as(list[Finding], content["checks"]) == [GOOD, BAD]
