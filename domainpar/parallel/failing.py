"""How a rank fails: what it refuses, what it prints, with which exit code it ends."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from domainpar.parallel.places import is_a_command
from domainpar.parallel.transport import RankMissing
from domainpar.problems import Problem, Where, error_text

IN_A_COMMAND = "see the board above; --timeout gives ranks more time to come"
IN_A_PROGRAM = (
    "every rank makes every call, so look for one that this rank skips, or makes alone (if world.is_root); with "
    "DOMAINPAR_CHECK_CALLS=1 in the environment the first call that differs is named; World.session(timeout=...) gives "
    "ranks more time to come"
)
DOCTOR = "python -m domainpar.doctor, started the same way, tells what of this machine works"


class Refused(Exception):
    """The work was refused before it began, by all ranks alike; the text is for the user, the exit code is 2.

    Attributes:
        problem: What is wrong, of which event and file, and what to do.
        rank: The rank that found it, if one alone did.
        size: Ranks of the run.
    """

    def __init__(
        self,
        what: str,
        hint: str = "",
        *,
        event: str | None = None,
        file: str | None = None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        self.problem, self.rank, self.size = Problem(what, hint, event=event, file=file), rank, size
        super().__init__(what)

    def __str__(self) -> str:
        return self.text.removeprefix("domainpar: error: ").rstrip()

    @property
    def text(self) -> str:
        """As it is printed."""
        of = self.problem
        return error_text(of.what, Where(event=of.event, file=of.file, rank=self.rank, size=self.size), of.hint)


class NobodyServes(Refused):
    """Rank 0, which would print what is wrong, cannot be met: every rank says so itself."""


def report(error: BaseException, where: Where) -> str:
    """What is printed when a rank fails: the traceback where it helps, then one line and a hint.

    Args:
        error: What went wrong.
        where: The rank, and where it was.
    """
    if isinstance(error, KeyboardInterrupt):
        return error_text("interrupted; ending all ranks", where)
    if isinstance(error, RankMissing):
        return _report_missing(error, where.size or 1)
    if isinstance(error, Problem):
        return error_text(error.what, where, error.hint)
    trace = "".join(traceback.format_exception(type(error), error, _without_own_frames(error)))
    what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"\n--- rank {where.rank} of {where.size} failed ---\n{trace}{error_text(what, where, DOCTOR)}"


def _report_missing(error: RankMissing, size: int) -> str:
    """The report of a rank that did not come: whom the others wait for, where it was, and what all were doing."""
    where, hint = Where(), IN_A_COMMAND if is_a_command() else IN_A_PROGRAM
    if error.first:
        entry = error.first[0]
        where = Where(None, entry.rank, size, entry.host or None)
        if entry.mark is not None:
            where = replace(where, event=entry.mark.event, step=entry.mark.step, phase=entry.mark.phase)
    frames = f"rank {error.first[0].rank} is at:\n{error.frames}" if error.frames else ""
    board = f"{error.board}\n" if error.board else ""
    return f"\n{board}{frames}{error_text(error.what, where, hint)}"


def _without_own_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the caller's own code on."""
    trace = error.__traceback__
    own = (__file__, str(Path(__file__).with_name("world.py")), contextlib.__file__)
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def exit_code(error: BaseException) -> int:
    """130 where somebody interrupted it, its own where the program chose one, else 1."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1


def write_error(text: str) -> None:
    """Write to standard error in one piece: lines of other ranks cannot come between, and no buffer can be lost."""
    sys.stdout.flush()
    os.write(2, text.encode(errors="replace"))
