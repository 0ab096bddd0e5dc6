"""The sources of the table: each has a module that lists and reads by it, and what they share is refused alike."""

from __future__ import annotations

import re

import numpy as np
import pytest

from domainpar.common.problems import Problem
from domainpar.tracking.events.csv_tables import read_table
from domainpar.tracking.events.source_table import SOURCES
from domainpar.tracking.events.sources import find_source, open_source
from domainpar.tracking.events.tables import InputTable, list_files

OF_FILES = [name for name, row in SOURCES.items() if row.gives != "stores" and name != "simulate"]


@pytest.fixture(params=OF_FILES)
def name(request):
    if request.param in ("pyg", "acorn"):
        pytest.importorskip("torch")
    if request.param == "colliderml":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install '.[parquet]')")
    return request.param


def test_each_source_has_files_with_columns_and_says_where_they_are_missed(name, tmp_path):
    assert all(np.dtype(kind) for table in find_source(name).tables for kind in table.types.values())
    with pytest.raises(Problem, match="needs the directory of its files"):
        open_source(name)
    with pytest.raises(Problem, match="nowhere is not a directory"):
        open_source(name, tmp_path / "nowhere")
    with pytest.raises(Problem, match="holds no ") as found:
        open_source(name, tmp_path)
    assert "expected are" in found.value.hint


def test_an_option_that_a_source_has_not_is_refused_with_those_it_has():
    with pytest.raises(ValueError, match="simulate has no option clusters; it has num_hits, seed"):
        open_source("simulate", clusters=True)


TABLE = InputTable(
    "event{}-hits.csv", "hit_id: i8; x, y: f8 mm", "of: u8; by, at: i4", ("hit_id",), (("of",), ("by", "at"))
)


def test_columns_have_names_types_and_units():
    assert list(TABLE.types.items())[:3] == [("hit_id", np.int64), ("x", np.float64), ("y", np.float64)]
    assert (TABLE.must, TABLE.what) == (["hit_id", "x", "y"], "hits")
    assert TABLE.missing(["hit_id", "x", "by"]) == ["y", "at"]
    assert TABLE.missing(["hit_id", "x", "y", "of"], needed=["at"]) == ["at"]


@pytest.mark.parametrize(
    ("file", "what"), [("event{}-hits.csv", "hits"), ("{}.hits.csv", "hits"), ("event{}.csv", "graph")]
)
def test_a_file_is_called_by_its_name_without_that_of_the_event(file, what):
    assert InputTable(file).what == what


def test_files_are_listed_by_the_first_table_and_never_those_of_another(tmp_path):
    for name in ("event7-hits.csv", "event8-hits.csv.gz", "event9_ID.npz", "event9.npz", "event1.npz.gz"):
        (tmp_path / name).touch()
    assert [event for event, _ in list_files(tmp_path, [TABLE])] == ["7", "8"]
    assert [event for event, _ in list_files(tmp_path, [InputTable("event{}.npz"), InputTable("event{}_ID.npz")])] == [
        "9"
    ]


@pytest.mark.parametrize(
    ("ids", "read"),
    [("1,2", [1, 2]), ("1.0,2.", [1, 2]), ("1.000e+00,2e0", [1, 2]), (f"{2**62},0", [2**62, 0])],
)
def test_ids_are_whole_numbers_however_they_are_written(tmp_path, ids, read):
    path = tmp_path / "event1-hits.csv"
    path.write_text("hit_id,x,y,of\n" + "".join(f"{number},0,0,0\n" for number in ids.split(",")))
    assert read_table(TABLE, path, "1")["hit_id"].tolist() == read


@pytest.mark.parametrize("number", ["1.5", "1e3", "9007199254740993.0", "1_0.5", "inf", "x"])
def test_what_has_lost_digits_or_is_no_whole_number_is_no_id(tmp_path, number):
    path = tmp_path / "event1-hits.csv"
    path.write_text(f"hit_id,x,y,of\n{number},0,0,0\n")
    with pytest.raises(Problem, match=re.escape(f"the first: {number} in row 0")):
        read_table(TABLE, path, "1")
