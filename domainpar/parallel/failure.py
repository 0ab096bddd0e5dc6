"""How a rank fails: what it prints, how it ends the others, and with which exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from domainpar import timeouts
from domainpar.agreement import Refused
from domainpar.parallel.places import is_a_command
from domainpar.parallel.presence import Presence
from domainpar.parallel.transport import RankMissing, RanksFailed
from domainpar.problems import Problem, Where, error_text, expected

IN_A_COMMAND = "see the board above; --timeout gives ranks more time to come"
IN_A_PROGRAM = (
    "every rank makes every call, so look for one that this rank skips, or makes alone (if world.is_root); with "
    "DOMAINPAR_CHECK_CALLS=1 in the environment the first call that differs is named; World.session(timeout=...) gives "
    "ranks more time to come"
)
DOCTOR = "python -m domainpar.doctor, started the same way, tells what of this machine works"


@contextmanager
def guard(presence: Presence) -> Iterator[None]:
    """Around the work of a program: an error on one rank ends all of them, at once and with one message.

    What all ranks refused together (`agree`) is printed by rank 0 and becomes exit code 2. Any other error is printed
    with its rank and aborts the whole job with exit code 1.
    """
    try:
        yield
    except Refused as refused:
        if presence.transport.rank == 0:
            write_error(refused.text)
        presence.close()
        raise SystemExit(2) from None
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        fail(presence, error)
        raise


def fail(presence: Presence, error: BaseException) -> None:
    """Say why this rank fails, unless another one has, and end all of them. On processes this does not return."""
    marks = presence.marks
    if isinstance(error, RanksFailed):
        time.sleep(timeouts.REPORT * (marks is not None and marks.between_processes))
    elif marks is None or marks.claim_failure():
        problem = expected(error)
        write_error(report(problem or error, presence.where(problem)))
    else:  # one failure makes others, which would only hide it
        time.sleep(timeouts.REPORT)
    presence.transport.abort(exit_code(error))


def report(error: BaseException, where: Where) -> str:
    """Text printed when a rank fails: the traceback where it helps, then one line and a hint.

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
    own = {str(Path(__file__).with_name(name)) for name in ("failure.py", "world.py", "launch.py")}
    while trace is not None and trace.tb_frame.f_code.co_filename in own | {contextlib.__file__}:
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
