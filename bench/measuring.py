"""Shared by all benchmarks: the origin of a figure, its timing, its JSON line, its table."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from domainpar import __version__
from domainpar.diagnosis.machine_checks import cpu_model, installed
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "torch-geometric", "numpy", "numba", "pymetis", "mpi4py", "mpich")

# glibc hands large blocks back to the system when they are freed, and page faults follow. `keep` tells it not to; by
# the environment, so it holds for processes that start afterwards.
ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "keep": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)},
}
ALLOCATORS_IN_WORDS = {
    "default": "the C library's own, as people run it: large blocks that are freed go back to the system, and come "
    "again as zeroed pages, a fault each",
    "keep": "what is freed stays with the process, for the next step",
}


def in_turns(
    calls: Mapping[str, Callable[[], object]], transport: Transport, repeats: int, inner: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call on this rank, one value a turn after one to warm up; all ranks begin together. *Collective*.

    Args:
        calls: By name; they take turns, so that a busy moment of the machine hits all alike.
        transport: Joins the ranks.
        repeats: Turns.
        inner: Calls in a row that one value is the mean of.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            transport.barrier()
            began = time.perf_counter()
            for _ in range(inner):
                call()
            if turn:  # the first warms up
                seconds[name].append((time.perf_counter() - began) / inner)
    return seconds


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The largest value over ranks, repetition by repetition; `ranks[r]` are those of rank r."""
    return [max(values) for values in zip(*ranks, strict=True)]


def allocators_in_words(names: Iterable[str]) -> str:
    """What each setting means, a line each."""
    lines = []
    for name in names:
        variables = " ".join(f"{key}={value}" for key, value in ALLOCATORS[name].items())
        lines.append(f"allocator {name}: {ALLOCATORS_IN_WORDS[name]}" + (f" ({variables})" if variables else ""))
    return "\n".join(lines)


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing: median, smallest and largest."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, form: str = "{:.3f}", unit: float = 1.0) -> str:
        median, low, high = (form.format(unit * value) for value in (self.median, self.low, self.high))
        return f"{median} [{low}, {high}]"


def timed(call: Callable[[], Any], repeats: int) -> Spread:
    """Seconds of a call of one process, after one to warm up."""
    return Spread.of(in_turns({"": call}, World.alone().transport, repeats)[""])


def run(file: str) -> None:
    """Run a benchmark as a module of its own name, so that other processes find by it what ranks are asked to do."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends its ranks
    sys.exit(import_module(Path(file).stem).main())


Row = dict[str, Any]
Columns = Mapping[str, Callable[[Any], str]]
"""Columns of a table: the heading, and the text of a row."""


def of(name: str, form: str = "{:.3f}", unit: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
    """A column of a spread's medians, in some unit; empty where there is none."""
    return lambda row: form.format(unit * row[name].median) if row.get(name) is not None else ""


def mean(name: str, form: str) -> Callable[[Sequence[Row]], str]:
    """A column of means over rows that are alike; times are medians, in ms."""

    def read(rows: Sequence[Row]) -> str:
        values = [row[name] for row in rows if name in row]
        numbers = [1e3 * value.median if isinstance(value, Spread) else value for value in values]
        return form.format(statistics.fmean(numbers)) if numbers else "-"

    return read


def alike(rows: Sequence[Row], *names: str) -> list[list[Row]]:
    """Rows about the same thing, of different events or seeds, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def ranks_of(row: Mapping[str, Any]) -> str:
    """A column of numbers of ranks, with a star where there are more threads than cores."""
    return f"{row['ranks']}" + (" *" if row["ranks"] * row.get("threads", 1) > (os.cpu_count() or 1) else "")


class Results:
    """The JSON lines of one benchmark, each with all that is needed to judge it later, and its tables.

    Args:
        bench: Name of the benchmark.
        options: Its flags, kept in every line.
    """

    def __init__(self, bench: str, options: argparse.Namespace) -> None:
        self.rows: list[dict[str, Any]] = []
        unseen = None if sys.stdout.isatty() else 160  # a pipe or a file has no width of its own
        self.console = Console(width=options.width or unseen)
        self._path: Path = options.results
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.open("a").close()  # what cannot be written says so before hours of measuring
        flags = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        self._about = {"bench": bench, **provenance(), "flags": flags}
        self.console.print(f"{bench}: {describe(self._about)}")

    def add(self, **row: Any) -> None:
        """Keep one measurement. A `Spread` becomes an object with its four numbers, NaN null."""
        self.rows.append(row)
        self._keep({name: as_json(value) for name, value in row.items()})

    def show(self, title: str, columns: Columns, rows: Sequence[Any], note: str = "") -> None:
        """Print some rows; each column says how it reads a row. The table is kept too, as it was printed."""
        cells = [[read(row) for read in columns.values()] for row in rows]
        self._keep({"table": {"title": title, "headings": list(columns), "cells": cells, "note": note}})
        table = Table(title=title, caption=Text(note), title_justify="left", caption_justify="left")
        for heading in columns:
            table.add_column(heading, justify="left" if heading == next(iter(columns)) else "right")
        for line in cells:
            table.add_row(*map(Text, line))  # as Text: brackets are no markup
        self.console.print(table)

    def end(self) -> None:
        self.console.print(f"{len(self.rows)} JSON lines added to {self._path}")

    def _keep(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({**self._about, **line}) + "\n")


def as_json(value: Any) -> Any:
    if isinstance(value, Spread):
        return vars(value)
    return None if isinstance(value, float) and math.isnan(value) else value


def provenance() -> dict[str, Any]:
    """Everything that figures depend on besides the code: machine, versions, environment, load, commit, time."""
    packages = {name: installed(name) for name in PACKAGES}
    return {
        "commit": commit(),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"},
        "versions": {"python": platform.python_version(), "domainpar": __version__, **packages},
        "environment": environment(),
        "load_average": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def describe(about: Mapping[str, Any]) -> str:
    """One line for people: on what, with what, and how busy the machine was before."""
    machine, versions = about["machine"], about["versions"]
    settings = " ".join(f"{name}={value}" for name, value in about["environment"].items()) or "no allocator settings"
    return (
        f"commit {about['commit']}, {machine['cpu']}, {machine['cores']} cores, torch {versions['torch']}, "
        f"{settings}, load {about['load_average']:.1f} before it began"
    )


def environment() -> dict[str, str]:
    """The variables that change what is measured: threads and the C allocator."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "LD_PRELOAD", "GLIBC_TUNABLES")
    return {name: value for name, value in os.environ.items() if name in names or name.startswith("MALLOC_")}


@contextmanager
def allocator(name: str) -> Iterator[None]:
    """Processes that start inside have this allocator setting; the program itself keeps its own."""
    before = {key: os.environ.get(key) for key in ALLOCATORS[name]}
    os.environ.update(ALLOCATORS[name])
    try:
        yield
    finally:
        for key, value in before.items():
            # What was not set before must be gone again, not empty.
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def commit() -> str:
    """The commit of the source, with a + where files differ from it; 'unknown' outside a repository."""
    command = ["git", "describe", "--always", "--dirty=+"]
    try:
        asked = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"
