"""Phrases of the sentences that commands print."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from domainpar.limits import cores_here


def several(count: int, what: str) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def between(counts: Sequence[int], what: str) -> str:
    """`854,270 to 1,224,025 hits`, or `1 hit` when all are equal. Needs at least one count."""
    least, most = min(counts), max(counts)
    return several(most, what) if least == most else f"{least:,} to {several(most, what)}"


def some_of(names: Sequence[str], most: int = 8) -> str:
    """`a, b, c`, or the first of many: `a, b, c and 97 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def on_ranks() -> list[str]:
    """The words that start a command on the ranks of this machine, 8 at most; none where there is one core."""
    cores = len(cores_here())
    return [its_mpiexec(), "-n", str(min(8, cores))] if cores > 1 else []


def this_python() -> str:
    """This Python, as it is typed: `python` if the shell finds it, else its path."""
    return _what_to_type("python") or sys.executable


def its_mpiexec() -> str:
    """The `mpiexec` beside this Python, as it is typed; `mpiexec` where there is none."""
    return _what_to_type("mpiexec") or "mpiexec"


def _what_to_type(program: str) -> str | None:
    """A program of this Python's folder: its name if the shell would find it there, else its path; None without it."""
    here = Path(sys.executable).with_name(program)
    if not here.exists():
        return None
    path = shutil.which(program)
    if path is not None and Path(path).parent.samefile(here.parent):
        return program
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)
