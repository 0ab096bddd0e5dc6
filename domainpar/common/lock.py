"""Locks: one run or one preparation at a time in a directory. A lock names its process and machine.

The system holds it (`flock`) and frees it when the process ends in any way. The content of its file is for messages,
and for machines that share the file system but not the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from domainpar.common import timeouts
from domainpar.common.problems import Problem

_MOST_OF_A_LOCK = 10_000  # bytes


@dataclass(frozen=True)
class Purpose:
    """Kind of work that a directory is locked for."""

    lock: str  # name of the lock's file
    name: str  # in messages
    flag: str  # that names its directory


RUN = Purpose("run.lock", "run", "--out")
STORE = Purpose("store.lock", "preparation", "--store")


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, or did."""

    host: str
    pid: int
    job: str  # of SLURM; empty without one
    restart: int  # number of times that SLURM had requeued that job

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Holder:
        """This process."""
        restart = environ.get("SLURM_RESTART_COUNT", "0")
        job, times = environ.get("SLURM_JOB_ID", ""), int(restart) if restart.isdecimal() else 0
        return cls(platform.node(), os.getpid(), job, times)

    @classmethod
    def read(cls, lock: int) -> Holder | None:
        """The holder by the file of a lock, which is open; None if that cannot be read."""
        with suppress(ValueError, TypeError):
            return cls(**json.loads(os.pread(lock, _MOST_OF_A_LOCK, 0)))
        return None

    def gone_for(self, other: Holder) -> str | None:
        """Why this holder, whose lock is free, is not at work any more, for another process; None if it may be."""
        if self.host == other.host:
            return f"process {self.pid} on {self.host} is gone"
        if self.job and self.job == other.job and self.restart < other.restart:
            return f"SLURM has requeued job {self.job} since"
        return None  # some file systems know locks on each machine alone

    def __str__(self) -> str:
        job = f" of SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on host {self.host}{job}"


@dataclass(frozen=True)
class Claim:
    """A lock that this process holds."""

    path: Path
    file: int  # that is open as long as the lock is held
    note: str = ""  # on the lock that was taken over; empty if there was none

    @classmethod
    def take(cls, directory: Path, work: Purpose, holder: Holder | None = None) -> Claim:
        """Claim a directory for work of this process. Of several that try at once, exactly one succeeds.

        Raises:
            Problem: If another process holds it for such work, or may hold it.
            OSError: If the lock cannot be written, or its file system knows no locks.
        """
        mine, path, note = holder or Holder.here(), directory / work.lock, ""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            is_free, before = _locked(file, timeouts.LOCK_LOOKED_AT), Holder.read(file)
            if os.fstat(file).st_size:
                reason = before.gone_for(mine) if before is not None and is_free else None
                note = f"{path} was left by an earlier {work.name}: {reason}; taken over"
                if reason is None:
                    raise _held(path, work, before, mine)
            if not is_free or not path.exists() or not os.path.samestat(os.fstat(file), path.stat()):
                raise Problem(f"another {work.name} has just begun, or ended, in {directory}", "start again", file=path)
            os.ftruncate(file, 0)
            os.pwrite(file, (json.dumps(asdict(mine), sort_keys=True) + "\n").encode(), 0)
            os.fsync(file)
        except BaseException:
            os.close(file)
            raise
        _HELD[file] = claim = cls(path, file, note)
        return claim

    def release(self) -> None:
        """Give the directory back."""
        if _HELD.get(self.file) is self:
            del _HELD[self.file]
            with suppress(FileNotFoundError):  # removed by a user
                if os.path.samestat(os.fstat(self.file), self.path.stat()):
                    self.path.unlink()
            os.close(self.file)


_HELD: dict[int, Claim] = {}
"""The locks of this process, by their files."""


def release(directory: Path, work: Purpose) -> None:
    """Give a directory back, if this process holds it."""
    for claim in list(_HELD.values()):
        if claim.path == directory / work.lock:
            claim.release()


def left_behind(directory: Path, work: Purpose) -> bool:
    """True if no process works in a directory any more, as far as can be seen: no lock, or its holder is gone."""
    try:
        with (directory / work.lock).open("rb") as file:
            holder = Holder.read(file.fileno())
            is_free = holder is not None and _locked(file.fileno(), 0.0, fcntl.LOCK_SH)
            return is_free and holder is not None and holder.gone_for(Holder.here()) is not None
    except FileNotFoundError:
        return True


def _locked(file: int, seconds: float, how: int = fcntl.LOCK_EX) -> bool:
    """Whether the lock of an open file is free, by taking it for a moment."""
    give_up_at = time.monotonic() + seconds
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, how | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(timeouts.ANSWER_POLL)


def _held(path: Path, work: Purpose, holder: Holder | None, mine: Holder) -> Problem:
    directory = path.parent
    if holder is None:
        what = f"{directory} is locked, but its lock cannot be read"
        hint = f"make sure that no {work.name} works there, then remove {path}"
    elif holder.host == mine.host:
        what = f"another {work.name} is at work in {directory}: {holder}"
        hint = f"wait for it, stop it, or choose another {work.flag}"
    else:
        seen = f"from host {mine.host} it cannot be seen"
        what = f"another {work.name} is, or was, at work in {directory}: {holder}; {seen}"
        check = f"squeue -j {holder.job}" if holder.job else f"ps -p {holder.pid} on {holder.host}"
        hint = f"check with {check}; if it is gone, remove {path}"
    return Problem(what, hint, file=path)
