"""Tables of numbers in CSV files, plain or gzipped, an event and a kind of table each: what is wrong is named."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from domainpar.common.problems import EventPlace, Problem

SUFFIXES = (".csv", ".csv.gz")
_WHOLE = re.compile(r"[+-]?\d+(?P<decimals>\.0*)?")
_OTHER_MARKS = {";": "';'", "\t": "tabs", "|": "'|'"}
_OF_FLOATS = 2**53  # from here on decimal numbers have lost digits of ids


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
        needed: The columns that must be there, and their types; whole numbers keep every digit.
        optional: Those that may be there.
        unique: Columns that together never repeat.

    Raises:
        MissingColumns: With those found.
        Problem: If the file cannot be read, a row has more or fewer fields than the first line, a value is missing, not
            finite or no whole number of its type where one is needed, or what is unique repeats.
    """
    place = EventPlace(event_id, path)
    content = _content(path, event_id)
    columns = _columns(content, path, event_id)
    if missing := [name for name in needed if name not in columns]:
        what = f"no column {', '.join(missing)}; found {columns}, expected {list(needed)}"
        problem = MissingColumns(what, _why_missing(columns, missing), event=event_id, file=path)
        problem.found = columns
        raise problem
    lines = [line for line in content.splitlines() if line]
    fields = np.array([_fields(line) for line in lines])
    if len(bad := np.flatnonzero(fields != fields[0])):
        what = (
            f"row {bad[0] - 1} has {fields[bad[0]]} fields, and the first line has {fields[0]} ({len(bad)} such rows)"
        )
        is_comment = lines[bad[0]].startswith(b"#")
        raise place.problem(
            what, "it is a comment: remove it" if is_comment else "is it truncated, or is a comma too many in it?"
        )
    types = {name: kind for name, kind in {**needed, **optional}.items() if name in columns}

    def read(names: Sequence[str], **how: Any) -> pd.DataFrame:
        # index_col: else a row with one field too many would silently shift all columns by one.
        return pd.read_csv(io.BytesIO(content), usecols=list(names), index_col=False, low_memory=False, **how)

    try:
        # Types are not asked for: pandas would take 1e17 for a whole number, and it has lost its digits.
        table = read(list(types))
        for name, kind in types.items():
            values = table[name].to_numpy()
            if not _fits(values, kind):
                texts = read([name], dtype=str, keep_default_na=False)[name]
                values = _numbers(name, texts.tolist(), kind, place)
            table[name] = values.astype(kind)
    except (UnicodeDecodeError, pd.errors.ParserError) as error:
        raise place.problem(f"cannot be read, {type(error).__name__}: {error}", _why_unreadable(path, error)) from error
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
        raise Problem(what, _why_unreadable(path, error), event=event_id, file=path) from error


def _columns(content: bytes, path: Path, event_id: str) -> list[str]:
    try:
        return [str(name) for name in pd.read_csv(io.BytesIO(content), nrows=0).columns]
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        what = f"cannot be read, {type(error).__name__}: {error}"
        raise Problem(what, _why_unreadable(path, error), event=event_id, file=path) from error


def _fields(line: bytes) -> int:
    """The number of fields of a line."""
    return len(next(csv.reader([line.decode("utf-8", "replace")]))) if b'"' in line else line.count(b",") + 1


def _fits(values: np.ndarray[Any, Any], kind: type[Any]) -> bool:
    """Whether numbers that pandas found in a column are of a type as they are."""
    if not np.issubdtype(kind, np.integer):
        return values.dtype.kind in "iufb" and bool(np.isfinite(values).all())
    most = np.iinfo(kind)
    return values.dtype.kind in "iu" and (
        not len(values) or (most.min <= int(values.min()) and int(values.max()) <= most.max)
    )


def _numbers(name: str, texts: Sequence[str], kind: type[Any], place: EventPlace) -> np.ndarray[Any, Any]:
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


def _number(name: str, text: str, kind: type[Any]) -> tuple[float, str | None]:
    """The number that a field says, and where it is none of a type, a hint."""
    is_id, remove = "particle_id" in name, "write a number, or remove the row: of a hit in all files"
    if "," in text:
        return 0, "write numbers with a decimal point, and thousands without a comma"
    if not np.issubdtype(kind, np.integer):
        try:
            number = float(text)
        except ValueError:
            return 0, remove
        return number, None if np.isfinite(number) else remove
    most = np.iinfo(kind)
    if (whole := _WHOLE.fullmatch(text)) is None:
        made = "did a program make decimal numbers of whole ones? Write every digit (in pandas: astype('Int64'))"
        empty = text.lower() in ("", "na", "nan", "null", "none")
        return 0, ("hits of noise have particle_id 0" if is_id else remove) if empty else made
    number = int(text.partition(".")[0])
    if whole["decimals"] and abs(number) >= _OF_FLOATS:
        return 0, "decimal numbers lose digits from 2^53 on; write ids as whole numbers (in pandas: astype('Int64'))"
    if most.min <= number <= most.max:
        return number, None
    return 0, "hits of noise have particle_id 0" if is_id and number < 0 else f"expected are {most.min} to {most.max}"


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
    if set(missing) <= {name.strip() for name in found}:
        return "there are blanks around names in the first line; remove them"
    if others := [name for name in found if name.strip().lower() in missing]:
        return f"names are written in small letters: {', '.join(map(str.lower, others))} for {', '.join(others)}"
    return ""
