"""Errors in one form: what is wrong, where, and what to do.

domainpar: error: <what> | event <id> | rank <r>/<P> host <h> | file <path> | step <s> phase <p>
hint: <what to do>
"""

from __future__ import annotations

import errno
import re
import select
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Errors that a user can mend, by number: some by more room, others by another place.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PLACE = (
    errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip
_POINTER = b"version https://git-lfs"


class Problem(ValueError):
    """An error about given or found data: what is wrong, in which event and file, and the remedy.

    A Git LFS pointer is reported as such, whatever error its reader met.

    Attributes:
        what: The error, with the values seen, without a full stop.
        hint: The remedy, one line; may be empty.
        event: The event it is about, if it is about one.
        file: The file it is about, if it is about one that `what` does not name.
    """

    def __init__(self, what: str, hint: str = "", *, event: str | None = None, file: str | Path | None = None) -> None:
        if file is not None and _is_pointer(Path(file)):
            what = f"{file} is a Git LFS pointer, and the file that it stands for has not been fetched: git lfs pull"
            hint = f"git -C {Path(file).parent} lfs pull"
        self.what, self.hint, self.event = what, hint, event
        self.file = None if file is None or str(file) in re.split(r"[\s:;,]+", what) else str(file)
        super().__init__(what)

    def __str__(self) -> str:
        # So that code which catches a ValueError and prints it shows everything.
        line = self.what + str(Where(event=self.event, file=self.file))
        return f"{line}\nhint: {self.hint}" if self.hint else line


def _is_pointer(path: Path) -> bool:
    """Whether a file is the pointer that Git LFS leaves in place of a large one."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_POINTER)) == _POINTER
    return False


class NotWritten(Problem):
    """A disk is full, or a place cannot be written: found while work was under way."""


@dataclass(frozen=True)
class EventPlace:
    """An event and, where it was read from one, its file."""

    event: str
    file: str | Path | None = None

    def problem(self, what: str, hint: str = "") -> Problem:
        """An error about this event, to be raised: what is wrong with the values seen, and what to do."""
        return Problem(what, hint, event=self.event, file=self.file)

    def attach_to(self, error: ValueError) -> Problem:
        """Add this event to an error of code that saw its values only."""
        if isinstance(error, Problem):
            return Problem(error.what, error.hint, event=error.event or self.event, file=error.file or self.file)
        return self.problem(str(error).rstrip("."))


@dataclass(frozen=True)
class Where:
    """Place of an error, as far as it is known; printed, the part of an error line behind `what`."""

    event: str | None = None
    rank: int | None = None
    size: int | None = None
    host: str | None = None
    file: str | None = None
    step: int | None = None
    phase: str | None = None

    def __str__(self) -> str:
        rank = None if self.rank is None else f"{self.rank}/{self.size}"
        parts = (
            {"event": self.event},
            {"rank": rank, "host": self.host},
            {"file": self.file},
            {"step": self.step, "phase": self.phase},
        )
        words = (" ".join(f"{name} {value}" for name, value in part.items() if value is not None) for part in parts)
        return "".join(f" | {part}" for part in words if part)


def error_text(what: str, where: Where | None = None, hint: str = "") -> str:
    """An error as every command prints it: one line, and one more with the hint."""
    line = f"domainpar: error: {what.rstrip('.')}{where or ''}\n"
    return line + (f"hint: {hint}\n" if hint else "")


def as_problem(error: BaseException | str, flag: str = "--out") -> Problem | None:
    """An error that a user can mend, as a problem, which is printed without a traceback. None for any other.

    A problem is one; so are OSErrors of full disks and places that cannot be written, where `flag` names another, and
    letters that the encoding of the locale does not have.
    """
    if isinstance(error, Problem):
        return error
    if isinstance(error, UnicodeEncodeError):
        near = error.object[max(0, error.start - 40) : error.end + 20]
        what = f"{near!a} holds letters that {error.encoding}, the encoding of this locale, does not have"
        return Problem(what, "set LC_ALL=C.UTF-8, or PYTHONUTF8=1")
    if not isinstance(error, OSError) or error.errno not in (*_NO_ROOM, *_NO_PLACE):
        return None
    # Not every file lies where the flag says: kernels are kept in the package or the home, some in a temporary folder.
    hint = f"make room there; if {flag} names that place, choose another"
    if error.errno in _NO_PLACE:
        hint = f"if {flag} names that place, choose another; else let it be written"
    elif error.filename is None:
        hint = f"make room where it writes: {flag}, the temporary folder (TMPDIR), the home; df -h tells which is full"
    return NotWritten(f"{error.strerror} (errno {error.errno})", hint, file=error.filename)


def problem_record(error: BaseException | str) -> dict[str, Any]:
    """An error as plain values that can travel between ranks: `what`, `hint`, `event`, `file`."""
    if (problem := as_problem(error)) is not None:
        return {"what": problem.what, "hint": problem.hint, "event": problem.event, "file": problem.file}
    what = error if isinstance(error, str) else str(error) or type(error).__name__
    return {"what": what, "hint": "", "event": None, "file": None}


def nobody_reads(error: BaseException) -> bool:
    """Whether an error says that the reader of our standard output, such as `head`, has ended."""
    with suppress(OSError, ValueError, AttributeError):  # standard output that is no file, or closed
        if isinstance(error, BrokenPipeError):
            poll = select.poll()
            poll.register(sys.stdout.fileno(), 0)
            return any(event & select.POLLERR for _, event in poll.poll(0))
    return False
