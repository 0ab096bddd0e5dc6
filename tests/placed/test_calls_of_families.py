"""The tables of each family of calls: what is exact, whole and split, and what is refused in which words."""

from pathlib import Path
from types import ModuleType
from typing import Any

import test_each_row
import test_indexing
import test_matrix_products
import test_pointwise
import test_random
import test_reductions
import test_scatters
import test_views
from whole_and_split import cases, check, refusals

FAMILIES = {
    "each row": test_each_row,
    "indexing": test_indexing,
    "matrix products": test_matrix_products,
    "pointwise": test_pointwise,
    "random": test_random,
    "reductions": test_reductions,
    "scatters": test_scatters,
    "views": test_views,
}


def test_each_file_with_such_tables_is_here_or_runs_them_itself():
    files = [file for file in Path(__file__).parent.glob("test_*.py") if "\nEXACT = {" in file.read_text()]
    elsewhere = {file.stem for file in files if "@cases(EXACT)" not in file.read_text()}
    assert elsewhere == {family.__name__ for family in FAMILIES.values()}


def of_each(families: dict[str, ModuleType], table: str) -> dict[str, Any]:
    return {f"{name}: {call}": case for name, family in families.items() for call, case in vars(family)[table].items()}


@cases(of_each(FAMILIES, "EXACT"))
def test_calls_that_have_an_exact_form_are_exact(function, more):
    check(function, **more)


@refusals(of_each(FAMILIES, "REFUSED"))
def test_calls_that_have_none_are_refused(function, text, more):
    check(function, refused=text, **more)
