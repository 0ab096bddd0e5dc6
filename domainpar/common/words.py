"""Phrases for the sentences that commands print, and progress messages of long work."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from domainpar.common import timeouts
from domainpar.common.limits import cores_here


def several(count: int, what: str) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def exactness_text(problem: str | None) -> str:
    """What holds on any number of ranks; `problem`: why bits may depend on them."""
    if problem:
        return f"the same result on any number of ranks up to rounding only: {problem}"
    return "the same bits on any number of ranks (self-test passed)"


def between(counts: Sequence[int], what: str) -> str:
    """`854,270 to 1,224,025 hits`, or `1 hit` when all are equal. Needs at least one count."""
    least, most = min(counts), max(counts)
    return several(most, what) if least == most else f"{least:,} to {several(most, what)}"


def byte_size(count: int) -> str:
    """`310 MiB`, `1.42 GiB`, `2.00 EiB`."""
    for unit, power in (("EiB", 60), ("PiB", 50), ("TiB", 40), ("GiB", 30)):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count / 2**20:.0f} MiB"


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


# --- signs of life ---------------------------------------------------------------------------------------------------


class ProgressLog:
    """Prints what a process is doing whenever it has printed nothing for long, also into a pipe or a file.

    Lines with `WARNING:`, and indented ones after them, are kept: `close` prints them again, where they are seen.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.phase = ""  # of the current work, in a word; empty where it is unknown
        self.silence = timeouts.SILENCE
        self._clock = clock
        self._works: list[Callable[[], str]] = []
        self._began = self._spoke = clock()
        self._warnings: list[str] = []
        self._warned = False  # by the last line

    def say(self, line: str, file: TextIO | None = None) -> None:
        """Print a line beside the progress bar, on standard output or into a file."""
        self._kept(line)
        self._print(line, file)

    def tell(self, *lines: str) -> None:
        """Print lines near the end of a command: warnings among them only when it closes."""
        for line in lines:
            if not self._kept(line):
                self._print(line)

    def close(self, *lines: str) -> None:
        """Print the last lines of a command, with all of its warnings in one block before the very last one."""
        self.tell(*lines[:-1])
        for line in (*dict.fromkeys(self._warnings), *lines[-1:]):
            self._print(line)
        self._warnings.clear()

    def _kept(self, line: str) -> bool:
        """Whether a line is a warning or continues one, which is then kept."""
        goes_on = self._warned and line.startswith("    ")
        self._warned = goes_on or "WARNING: " in line
        if goes_on:
            self._warnings[-1] += f"\n{line}"
        elif self._warned:
            self._warnings.append(line)
        return self._warned

    def _print(self, line: str, file: TextIO | None = None) -> None:
        from tqdm import tqdm

        self.spoke()
        tqdm.write(line, file=file)

    def spoke(self) -> None:
        """Note that something was printed."""
        self._spoke = self._clock()

    def begin(self, work: Callable[[], str]) -> None:
        """Begin a work: a function that returns what it is and its progress, or nothing where a bar shows it."""
        self._works.append(work)
        self.phase = ""

    def end(self, work: Callable[[], str]) -> None:
        """End a work: usually the one begun last, but threads may end in another order."""
        self._works.remove(work)
        self.phase = ""

    @contextmanager
    def doing(self, what: object) -> Iterator[None]:
        """A context around a work, whose text says what it is and its progress."""
        work = what.__str__
        self.begin(work)
        try:
            yield
        finally:
            self.end(work)

    def look(self) -> float:
        """Print the current work if nothing was printed for long; returns the seconds until the next look."""
        if (left := self._spoke + self.silence - self._clock()) > 0:
            return left
        self.spoke()
        if text := self._works[-1]() if self._works else "":
            phase = f" ({self.phase})" if self.phase else ""
            self.say(f"[{self._clock() - self._began:.0f} s] {text}{phase}", sys.stderr)
        return self.silence

    @contextmanager
    def heard(self, what: object) -> Iterator[None]:
        """A context around all work of a process: a thread looks while the others work."""
        self._began = self._spoke = self._clock()
        self._warnings.clear()  # of a command before this one
        ended = threading.Event()

        def speak() -> None:
            while not ended.wait(self.look()):
                pass

        speaker = threading.Thread(target=speak, name="signs of life", daemon=True)
        with self.doing(what):
            speaker.start()
            try:
                yield
            finally:
                ended.set()
                speaker.join()


PROGRESS_LOG = ProgressLog()
"""The log of this process."""


@contextmanager
def progress(what: str, total: int, unit: str, talks: bool, done: int = 0) -> Iterator[Callable[..., object]]:
    """Show the progress of a work on a rank that prints: a bar on a terminal, elsewhere lines of `PROGRESS_LOG`.

    Yields:
        A function to call when `count` more units are done, with a `note` to be shown beside the number.
    """
    from tqdm import tqdm

    note, hidden, (columns, rows) = "", None if talks else True, (None, None)  # tqdm asks the terminal itself
    with suppress(OSError, ValueError):  # it is no terminal
        if not all(os.get_terminal_size(sys.stderr.fileno())):  # one without a size, as in containers
            columns, rows = 80, 24  # with no rows it would show no bar
    with tqdm(total=total, initial=done, desc=what, unit=unit, ncols=columns, nrows=rows, disable=hidden) as bar:

        def advance(count: int = 1, note_now: str = "") -> None:
            nonlocal done, note
            done, note = done + count, note_now and f", {note_now}"
            bar.set_postfix_str(note_now, refresh=False)
            bar.update(count)

        def far() -> str:
            if bar.disable:
                return f"{what}: {done:,} of {several(total, unit)}{note}"
            bar.refresh()  # its seconds go on
            return ""

        if talks:
            PROGRESS_LOG.begin(far)
        try:
            yield advance
        finally:
            if talks:
                PROGRESS_LOG.end(far)
