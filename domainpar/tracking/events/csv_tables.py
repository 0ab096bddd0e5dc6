"""Tables of numbers in CSV files, plain or gzipped: what is wrong is named."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from domainpar.common.problems import EventPlace, Problem
from domainpar.tracking.events.tables import InputTable
from partitioners.topology import IntArray

Frame = pd.DataFrame
_OTHER_MARKS = {";": "';'", "\t": "tabs", "|": "'|'"}
_EXACT = 2**53  # from here on decimal numbers have lost digits of ids
_NOT_READ = (OSError, EOFError, zlib.error, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError)


class MissingColumns(Problem):
    """A file lacks columns; `found` are those that it has."""

    found: Sequence[str] = ()


def read_table(
    table: InputTable, path: Path, event: str, needed: Sequence[str] = (), unique: Sequence[str] = ()
) -> pd.DataFrame:
    """The columns of a table from a CSV file; others are left alone, whatever they hold.

    Args:
        table: The columns and their types.
        path: The file.
        event: Name of the event.
        needed: Optional columns of the table that must be there this time.
        unique: Columns that never repeat together, besides those of the table.

    Raises:
        MissingColumns: With those found.
        Problem: If the file cannot be read, a row has more or fewer fields than the first line, a value is missing, not
            finite or no whole number of its type where one is needed, or what is unique repeats.
    """
    place = EventPlace(event, path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = bytes(file.read())
        columns = [str(name).strip() for name in pd.read_csv(io.BytesIO(content), nrows=0).columns]
        if missing := table.missing(columns, needed):
            what = f"no column {', '.join(missing)}; found {columns}, expected {[*table.must, *needed]}"
            problem = MissingColumns(what, _why_missing(columns, missing), event=event, file=path)
            problem.found = columns
            raise problem
        _check_fields(content, place)
        values = _values(content, columns, {name: kind for name, kind in table.types.items() if name in columns}, place)
    except _NOT_READ as error:
        raise place.problem(f"cannot be read, {type(error).__name__}: {error}", _why_unreadable(path, error)) from error
    keys = values[[name for name in unique or table.unique if name in values]]
    if len(keys.columns) and len(repeated := keys[keys.duplicated(keep=False)]):
        first = repeated.sort_values(list(keys)).iloc[0]
        at = np.flatnonzero((keys == first).all(axis=1))[:2].tolist()
        what = f"{len(repeated.drop_duplicates())} values of {', '.join(keys)} appear more than once"
        raise place.problem(f"{what}, the first is {', '.join(map(str, first))} in rows {at}")
    return values


def in_order_of(hit_id: IntArray, truth: pd.DataFrame, hits: EventPlace, place: EventPlace) -> pd.DataFrame:
    """A table of truth in the order of the hits: two files may be ordered differently.

    Args:
        hit_id: Number of each hit, int64 [N].
        truth: A row a hit, with its `hit_id`.
        hits: The file of the hits.
        place: The file of the table.

    Raises:
        Problem: If a hit has no row, or a row no hit.
    """
    truth_id = truth["hit_id"].to_numpy()
    unknown, unlisted = np.setdiff1d(hit_id, truth_id), np.setdiff1d(truth_id, hit_id)
    if len(unknown) or len(unlisted):
        first = (unknown if len(unknown) else unlisted)[0]
        hint = "one of the two files is truncated or of another event; remove the truth file to go without labels"
        if not len(unknown) and len(hit_id):
            hint = (
                "if these are true points that left no hit, remove their rows from truth; else the hits are truncated"
            )
        raise place.problem(
            f"{len(unknown)} of the {len(hit_id)} hits in {Path(str(hits.file)).name} have no row here "
            f"and {len(unlisted)} rows name no such hit (first: hit_id {first})",
            hint,
        )
    return truth.set_index("hit_id").loc[hit_id]


def _check_fields(content: bytes, place: EventPlace) -> None:
    """Refuse rows with more or fewer fields than the first line, which pandas would fill or shift."""

    def count(line: bytes) -> int:
        return len(next(csv.reader([line.decode("utf-8", "replace")]))) if b'"' in line else line.count(b",") + 1

    lines = [line for line in content.splitlines() if line]
    fields = np.array([count(line) for line in lines])
    if len(bad := np.flatnonzero(fields != fields[0])):
        of_first = f"and the first line has {fields[0]} ({len(bad)} such rows)"
        hint = "is it truncated, or is a comma too many in it?"
        if lines[bad[0]].startswith(b"#"):
            hint = "it is a comment: remove it"
        raise place.problem(f"row {bad[0] - 1} has {fields[bad[0]]} fields, {of_first}", hint)


def _values(content: bytes, columns: Sequence[str], types: dict[str, Any], place: EventPlace) -> pd.DataFrame:
    """The columns of some names with their types."""

    def read(names: Sequence[str], **how: Any) -> pd.DataFrame:
        # index_col: else a row with one field too many would silently shift all columns by one.
        rows = [columns.index(name) for name in names]
        table = pd.read_csv(io.BytesIO(content), usecols=rows, index_col=False, low_memory=False, **how)
        return table.set_axis([columns[row] for row in sorted(rows)], axis=1)

    # No types are passed: pandas would take 1e17 for a whole number, and it has lost its digits.
    table = read(list(types))
    for name in list(table):
        values = table[name].to_numpy()
        if not _fits(values, types[name]):
            texts = read([name], dtype=str, keep_default_na=False)[name]
            values = _numbers(name, texts.tolist(), types[name], place)
        table[name] = values.astype(types[name])
    return table


def _fits(values: np.ndarray[Any, Any], kind: Any) -> bool:
    """Whether numbers that pandas found in a column are of a type as they are."""
    if not np.issubdtype(kind, np.integer):
        return values.dtype.kind in "iufb" and bool(np.isfinite(values).all())
    most = np.iinfo(kind)
    return values.dtype.kind in "iu" and (
        not len(values) or (most.min <= int(values.min()) and int(values.max()) <= most.max)
    )


def _numbers(name: str, texts: Sequence[str], kind: Any, place: EventPlace) -> np.ndarray[Any, Any]:
    """The numbers of a column that is not simply of its type, from what the file says."""
    numbers, bad = [], {}
    for row, text in enumerate(map(str.strip, texts)):
        number, why = _number(name, text, kind)
        numbers.append(number)
        if why is not None:
            bad[row] = text, why
    if bad:
        row, (text, why) = next(iter(bad.items()))
        wanted = {"u": "ids, whole numbers of 64 bits", "f": "finite numbers"}.get(np.dtype(kind).kind)
        wanted = wanted or f"whole numbers of {8 * np.dtype(kind).itemsize} bits"
        what = f"column {name} holds {len(bad)} values that are no {wanted}, the first: {text or 'empty'} in row {row}"
        raise place.problem(what, why)
    return np.array(numbers, kind)


def _number(name: str, text: str, kind: Any) -> tuple[float, str | None]:
    """The number that a field says, and where it is none of a type, a hint."""
    is_id, remove = "particle_id" in name, "write a number, or remove the row: of a hit in all files"
    if "," in text:
        return 0, "write numbers with a decimal point, and thousands without a comma"
    try:
        exact = Decimal(text)
    except InvalidOperation:
        exact = Decimal("NaN")
    if np.dtype(kind).kind == "f":
        return (float(exact), None) if exact.is_finite() else (0, remove)
    if not exact.is_finite() or exact != exact.to_integral_value() or exact.as_tuple().exponent > 0:  # type: ignore[operator]
        made = "did a program make decimal numbers of whole ones? Write every digit (in pandas: astype('Int64'))"
        empty = text.lower() in ("", "na", "nan", "null", "none")
        return 0, ("hits of noise have particle_id 0" if is_id else remove) if empty else made
    number, bounds = int(exact), np.iinfo(kind)
    if not text.lstrip("+-").isdecimal() and abs(number) >= _EXACT:
        return 0, "decimal numbers lose digits from 2^53 on; write ids as whole numbers (in pandas: astype('Int64'))"
    if bounds.min <= number <= bounds.max:
        return number, None
    return (
        0,
        "hits of noise have particle_id 0" if is_id and number < 0 else f"expected are {bounds.min} to {bounds.max}",
    )


def _why_unreadable(path: Path, error: Exception) -> str:
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
    if isinstance(error, UnicodeDecodeError):
        return f"it is not written in UTF-8; if in Latin-1: iconv -f LATIN1 -t UTF-8 {path.name} > as_utf8.csv"
    return "is it truncated?"


def _why_missing(found: Sequence[str], missing: Sequence[str]) -> str:
    """A hint, from the names of the columns that are there, on why others are not."""
    first = found[0] if found else ""
    other = next((name for mark, name in _OTHER_MARKS.items() if mark in first), None)
    if first.startswith("#"):
        return "the first line is a comment: remove it, the names of the columns come first"
    if other is not None:
        return f"columns are separated by {other} here; write commas between them, and decimal points in numbers"
    if others := [name for name in found if name.strip().lower() in missing]:
        return f"names are written in small letters: {', '.join(map(str.lower, others))} for {', '.join(others)}"
    return ""
