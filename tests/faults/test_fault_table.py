"""docs/faults.md, the page of faults on purpose and the tests belong together: numbers, switches, places, actions."""

import ast
import re
from pathlib import Path

import pytest
from faults.on_purpose import ACTIONS, POINTS, Fault

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ON_PURPOSE = (ROOT / "docs" / "reference" / "fault_switch.md").read_text(encoding="utf-8")
FAULTS = {
    int(number): switch
    for number, switch in re.findall(r"^\| (\d+) \| [^|]+ \| [^|]+ \| (?:`(\S+)`)? *\|$", PAGE, re.MULTILINE)
}


def marked_numbers():
    """The numbers in `@fault(...)` of each test, by `file::name`."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "fault":
                        yield f"{path.name}::{node.name}", [ast.literal_eval(number) for number in call.args]


@pytest.fixture(scope="module")
def marked():
    return dict(marked_numbers())


def table(name):
    """A table of two columns of the page, by its heading."""
    rows = ON_PURPOSE.partition(f"| `{name}` | |\n| --- | --- |\n")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `(\S+)` \| (.*) \|$", rows, re.MULTILINE))


def test_faults_are_numbered_from_one_without_a_gap():
    assert sorted(FAULTS) == list(range(1, len(FAULTS) + 1))


def test_every_fault_of_the_page_has_a_test(marked):
    assert set(FAULTS) - {number for numbers in marked.values() for number in numbers} == set()


def test_every_marked_number_is_on_the_page_and_marks_a_test(marked):
    assert all(name.partition("::")[2].startswith("test_") for name in marked)
    assert {name: numbers for name, numbers in marked.items() if not numbers or set(numbers) - set(FAULTS)} == {}


@pytest.mark.parametrize(("number", "switch"), [pair for pair in FAULTS.items() if pair[1]])
def test_every_switch_of_the_page_is_understood(number, switch):
    assert Fault.parse(switch)


@pytest.mark.parametrize(("name", "known"), [("at=", POINTS), ("do=", ACTIONS)])
def test_the_page_lists_every_place_and_action(name, known):
    assert table(name) == known
