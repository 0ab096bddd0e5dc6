"""The files of a source as tables: their names in a folder, their columns with types and units."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from domainpar.common.problems import Problem


@dataclass(frozen=True)
class InputTable:
    """A file of each event, or of all events of a folder, and the columns that are read of it.

    Columns are a text, `hit_id: i8; x, y, z: f8 mm`: names, the type as numpy has it, and the unit. Whole numbers keep
    every digit, also where a file has them as `5.0`.

    Attributes:
        file: Name of the file, with {} for the name of the event: `event{}-hits.csv`. Of several, the first that is
            there is read. A CSV file may be gzipped.
        needed: Columns that must be there.
        optional: Columns that are read where they are there. All others are left alone.
        unique: Columns that together never repeat.
        either: Sets of optional columns of which one must be there.
        only_with: The option of the source without which the file is not read.
    """

    file: str | tuple[str, ...]
    needed: str = ""
    optional: str = ""
    unique: tuple[str, ...] = ()
    either: tuple[tuple[str, ...], ...] = ()
    only_with: str | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The possible names of the file."""
        return (self.file,) if isinstance(self.file, str) else self.file

    @cached_property
    def types(self) -> dict[str, np.dtype]:
        """The type of each column, of those that are needed first."""
        return {name: np.dtype(kind) for name, kind, _ in _parsed(f"{self.needed}; {self.optional}")}

    @cached_property
    def must(self) -> list[str]:
        """The columns that must be there."""
        return [name for name, _, _ in _parsed(self.needed)]

    def missing(self, columns: Sequence[str], needed: Sequence[str] = ()) -> list[str]:
        """The needed columns that are not among some, in order; `needed`: further ones."""
        absent = [name for name in (*needed, *self.must) if name not in columns]
        if self.either and not any(set(names) <= set(columns) for names in self.either):
            absent += [name for name in self.either[-1] if name not in columns]
        return absent

    def event_of(self, path: Path) -> str | None:
        """The name of the event that a file is of; None if it is no file of this table."""
        for name in self.names:
            pattern = re.escape(name).replace(r"\{\}", "(.+)") + (r"(?:\.gz)?" if name.endswith(".csv") else "")
            if "{}" in name and (match := re.fullmatch(pattern, path.name)) is not None:
                return match[1]
        return None

    def find(self, directory: Path, event: str) -> Path | None:
        """The file of an event in a directory; None where there is none.

        Raises:
            Problem: If it is there both plain and gzipped.
        """
        for name in self.names:
            plain = directory / name.format(event)
            there = [path for path in (plain, plain.with_name(f"{plain.name}.gz")) if path.is_file()]
            if len(there) > 1:
                what = f"{self.what} are there twice, as {there[0].name} and as {there[1].name}"
                raise Problem(what, "remove one of the two", event=event, file=there[0])
            if there:
                return there[0]
        return None

    @property
    def what(self) -> str:
        """The file in a word: `hits` of `event{}-hits.csv`."""
        return self.names[0].rpartition(".")[0].removeprefix("event").removeprefix("{}").strip("-_.") or "graph"


def list_files(directory: Path, tables: Sequence[InputTable]) -> list[tuple[str, Path]]:
    """The events of the first table in a directory with their files, sorted by name; no file of the other tables."""
    listed, *others = tables
    found = [(listed.event_of(path), path) for path in sorted(directory.iterdir())]
    return sorted(
        (event, path)
        for event, path in found
        if event is not None and not any(other.event_of(path) is not None for other in others)
    )


def _parsed(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, type and unit of each column of a text."""
    for group in filter(None, map(str.strip, text.split(";"))):
        names, _, kind = group.partition(":")
        dtype, _, unit = kind.strip().partition(" ")
        for name in names.split(","):
            yield name.strip(), dtype, unit
