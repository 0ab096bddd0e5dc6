"""The table of faults is whole, its tests exist, its switches are understood, and the page says what it says."""

import ast
from pathlib import Path

import pytest

from domainpar.faults.cases import CASES
from domainpar.faults.page import page
from domainpar.faults.switch import Fault

ROOT = Path(__file__).parents[2]
ALL = [case for cases in CASES.values() for case in cases]


def test_there_are_forty_eight():
    assert [case.number for case in ALL] == list(range(1, 49))


@pytest.mark.parametrize("case", ALL, ids=lambda case: str(case.number))
def test_every_fault_has_a_test_that_exists_or_a_reason(case):
    assert case.tests or case.missing
    for named in case.tests:
        file, _, name = named.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, named


@pytest.mark.parametrize("case", [case for case in ALL if case.inject], ids=lambda case: str(case.number))
def test_every_switch_is_understood(case):
    assert Fault.parse(case.inject)


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "faults.md").read_text() == page(), "python -m domainpar.faults > docs/faults.md"
