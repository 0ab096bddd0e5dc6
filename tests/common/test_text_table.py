"""Tables are plain lines that fit a terminal: headings are folded, cells never."""

import pytest

from domainpar.common.text_table import text_table

HEADINGS = ("finder", "seconds of a step", "memory of a rank")
ROWS = [("network", "12.5", "310 MiB"), ("a longer name", "3", "1.42 GiB")]


def test_words_begin_at_the_left_and_numbers_end_at_the_right():
    assert text_table(HEADINGS, ROWS, width=80) == [
        "finder         seconds of a step  memory of a rank",
        "network                     12.5           310 MiB",
        "a longer name                  3          1.42 GiB",
    ]


@pytest.mark.parametrize("width", [40, 10])
def test_headings_are_folded_where_they_are_too_wide_and_no_cell_is(width):
    lines = text_table(HEADINGS, ROWS, width=width)
    assert lines[-2:] == ["network           12.5   310 MiB", "a longer name        3  1.42 GiB"]
    assert [line.split() for line in lines[:-2]] == [
        ["seconds", "memory"],
        ["of", "a", "of", "a"],
        ["finder", "step", "rank"],
    ]


def test_what_looks_like_markup_or_colour_is_text(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert text_table(("a", "b"), [("[red]x", "1")], width=80) == ["a       b", "[red]x  1"]


def test_a_table_without_rows_is_its_headings():
    assert text_table(("a", "b"), []) == ["a  b"]
