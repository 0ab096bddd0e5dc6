"""Tables of numbers in CSV files, plain or gzipped, an event and a kind of table each: what is wrong is named."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from domainpar.common.problems import EventPlace, Problem

SUFFIXES = (".csv", ".csv.gz")


class MissingColumns(Problem):
    """A file lacks columns; `found` are those that it has."""

    found: Sequence[str] = ()


def events_with(directory: Path, part: str) -> list[str]:
    """The events of a directory that have a table, sorted: `000001001` for `event000001001-hits.csv.gz`.

    Raises:
        Problem: If the directory does not exist.
    """
    if not directory.is_dir():
        raise Problem(f"{directory} is not a directory", "give the one that holds the CSV files")
    return sorted({
        path.name.removesuffix(f"-{part}{suffix}").removeprefix("event")
        for suffix in SUFFIXES
        for path in directory.glob(f"event*-{part}{suffix}")
    })  # fmt: skip


def find(directory: Path, event_id: str, part: str) -> Path | None:
    """The file with a table of an event; None where there is none.

    Raises:
        Problem: If it is there both plain and gzipped.
    """
    candidates = [directory / f"event{event_id}-{part}{suffix}" for suffix in SUFFIXES]
    files = [path for path in candidates if path.is_file()]
    if len(files) > 1:
        what = f"{part} are there twice, as {' and as '.join(path.name for path in files)}"
        raise Problem(what, "remove one of the two", event=event_id, file=files[0])
    return files[0] if files else None


def columns_of(path: Path, event_id: str) -> list[str]:
    """The columns of a file.

    Raises:
        Problem: If it cannot be read.
    """
    return _columns(_content(path, event_id), path, event_id)


def read_table(
    path: Path,
    event_id: str,
    needed: Mapping[str, type[Any]],
    optional: Mapping[str, type[Any]],
    unique: Sequence[str] = (),
) -> pd.DataFrame:
    """The wanted columns of a CSV file; others are left alone, whatever they hold.

    Args:
        path: The file.
        event_id: Name of the event.
        needed: The columns that must be there, and their types; uint64 are ids, which keep every digit.
        optional: Those that may be there.
        unique: Columns that together never repeat.

    Raises:
        MissingColumns: With those found.
        Problem: If the file cannot be read, a row has more or fewer fields than the first line, a value is missing, not
            finite or no whole number where one is needed, or what is unique repeats.
    """
    place = EventPlace(event_id, path)
    content = _content(path, event_id)
    columns = _columns(content, path, event_id)
    if missing := [name for name in needed if name not in columns]:
        what = f"no column {', '.join(missing)}; found {columns}, expected {list(needed)}"
        problem = MissingColumns(what, _why_missing(columns, missing), event=event_id, file=path)
        problem.found = columns
        raise problem
    fields = [line.count(b",") + 1 for line in content.splitlines() if line]
    if len(bad := np.flatnonzero(np.array(fields[1:]) != fields[0])):
        what = (
            f"row {bad[0]} has {fields[1 + bad[0]]} fields, and the first line has {fields[0]} ({len(bad)} such rows)"
        )
        raise place.problem(what, "is it truncated, or is a comma too many in it?")
    types = {name: kind for name, kind in {**needed, **optional}.items() if name in columns}
    # Ids are not asked for as such: pandas would take 1e17 for one, which has lost its digits.
    asked = {name: kind for name, kind in types.items() if kind is not np.uint64}
    try:
        # index_col: else a row with one field too many would silently shift all columns by one.
        table = pd.read_csv(io.BytesIO(content), usecols=list(types), dtype=asked, index_col=False)
    except (UnicodeDecodeError, pd.errors.ParserError) as error:
        raise place.problem(f"cannot be read, {type(error).__name__}: {error}", _why_unreadable(path)) from error
    except (ValueError, OverflowError) as error:
        raise place.problem(f"a column holds what is not a number, or an empty field: {error}") from error
    _check_values(table, types, place)
    keys = table[list(unique)]
    if unique and len(repeated := keys[keys.duplicated(keep=False)]):
        first = repeated.sort_values(list(unique)).iloc[0]
        at = np.flatnonzero((keys == first).all(axis=1))[:2].tolist()
        what = f"{len(repeated.drop_duplicates())} values of {', '.join(unique)} appear more than once"
        raise place.problem(f"{what}, the first is {', '.join(map(str, first))} in rows {at}")
    return table


def _content(path: Path, event_id: str) -> bytes:
    """The bytes of a file, unpacked."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return bytes(file.read())
    except (OSError, EOFError, zlib.error) as error:
        what = f"cannot be read, {type(error).__name__}: {error}"
        raise Problem(what, _why_unreadable(path), event=event_id, file=path) from error


def _columns(content: bytes, path: Path, event_id: str) -> list[str]:
    try:
        return [str(name) for name in pd.read_csv(io.BytesIO(content), nrows=0).columns]
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        what = f"cannot be read, {type(error).__name__}: {error}"
        raise Problem(what, _why_unreadable(path), event=event_id, file=path) from error


def _check_values(table: pd.DataFrame, types: Mapping[str, type[Any]], place: EventPlace) -> None:
    """Refuse what is no id in columns of ids, and in the others what is not finite."""
    for name in table.columns:
        values = table[name].to_numpy()
        if types[name] is np.uint64:
            if len(values) and (values.dtype.kind not in "iu" or values.min() < 0):
                digits = [str(value).removesuffix(".0") for value in values]
                odd = [not text.isdecimal() or int(text) >= 2**64 for text in digits]
                row = odd.index(True) if True in odd else 0
                what = f"column {name} holds what is no id, a whole number of 64 bits: {values[row]} in row {row}"
                raise place.problem(what, "is the row damaged, or did a program make decimal numbers of the ids?")
            table[name] = values.astype(np.uint64)
        elif len(bad := np.flatnonzero(~np.isfinite(values))):
            raise place.problem(
                f"column {name} holds {len(bad)} values that are empty or not finite, "
                f"the first is {values[bad[0]]} in row {bad[0]}"
            )


def _why_unreadable(path: Path) -> str:
    """A hint, from the first bytes of a file, on why it is no CSV."""
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except OSError:
        return "is it truncated?"
    gzipped = head == b"\x1f\x8b"
    if not head:
        return "the file is empty; without a truth or particles file the event is read without them"
    if gzipped != (path.suffix == ".gz"):
        return f"it is {'' if gzipped else 'not '}gzipped, and its name says otherwise: rename it"
    if head in (b"\xff\xfe", b"\xfe\xff"):
        return f"it is written in UTF-16: iconv -f UTF-16 -t UTF-8 {path.name} > as_utf8.csv"
    return "is it truncated?"


def _why_missing(found: Sequence[str], missing: Sequence[str]) -> str:
    """A hint, from the names of the columns that are there, on why others are not."""
    first = found[0] if found else ""
    other = next((mark for mark in (";", "\t", "|") if mark in first), None)
    if first.startswith("#"):
        return "the first line is a comment: remove it, the names of the columns come first"
    if other is not None:
        return f"columns are separated by {other!r} here; write commas"
    if set(missing) <= {name.strip() for name in found}:
        return "there are blanks around names in the first line; remove them"
    return ""
