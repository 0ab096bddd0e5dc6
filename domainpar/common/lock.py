"""Locks: one run or one preparation at a time in a directory. A lock names its process and machine."""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from domainpar.common import timeouts
from domainpar.common.problems import Problem

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")
WHOLE_MACHINE = "pid:[4026531836]"  # Linux's own number of the PID namespace that is no container's

SAME_START = 2.0  # seconds; the clock of a machine may be set right while a process runs

_MOST_OF_A_LOCK = 10_000  # bytes


@dataclass(frozen=True)
class Purpose:
    """Kind of work that a directory is locked for.

    Attributes:
        lock: Name of the lock's file.
        name: Its name in messages.
        flag: The flag that names its directory.
    """

    lock: str
    name: str
    flag: str


RUN = Purpose("run.lock", "run", "--out")
STORE = Purpose("store.lock", "preparation", "--store")


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host: Its machine.
        pid: Its process there.
        started: When that process started, in seconds since 1970: numbers of processes are used again.
        job: Its SLURM job; empty without one.
        restart: Number of times that SLURM had requeued that job.
        key: Tells two locks of the same process apart.
        boot: The start of its machine, by the number that Linux gives it; empty where nothing tells.
        processes: The PID namespace that its number is from: containers count for themselves, under one host name or
            several.
    """

    host: str
    pid: int
    started: float
    job: str
    restart: int
    key: str
    boot: str = ""
    processes: str = ""

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Holder:
        """This process."""
        restart = environ.get("SLURM_RESTART_COUNT", "0")
        boot, processes = "", ""
        with suppress(OSError):
            boot, processes = BOOT_ID.read_text().strip(), os.readlink(PROCESSES)
        return cls(
            host=platform.node(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            job=environ.get("SLURM_JOB_ID", ""),
            restart=int(restart) if restart.isdecimal() else 0,
            key=uuid.uuid4().hex,
            boot=boot,
            processes=processes,
        )

    def seen_by(self, other: Holder) -> bool:
        """Whether this holder's number means something to another process: same machine, and no wall of a container."""
        if self.host != other.host:
            return False
        return not self.boot or (self.boot, self.processes) == (other.boot, other.processes)  # none in earlier locks

    def gone_for(self, other: Holder) -> str | None:
        """Why this holder cannot be at work any more, as far as another process can tell; None if it may be."""
        if self.seen_by(other):
            return None if _runs(self.pid, self.started) else f"process {self.pid} on {self.host} is gone"
        # A reboot, not another machine of this name: that would be a run from before this machine's start.
        of_machines = {self.processes, other.processes} == {WHOLE_MACHINE}
        if self.host == other.host and self.boot != other.boot and of_machines and self.started < psutil.boot_time():
            return f"{self.host} was started anew since"
        if self.job and self.job == other.job and self.restart < other.restart:
            return f"SLURM has requeued job {self.job} since"
        return None

    def __str__(self) -> str:
        job = f" of SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on host {self.host}{job}"


@dataclass(frozen=True)
class Claim:
    """A lock that is held.

    Attributes:
        path: Its file.
        key: That of its holder.
        note: A sentence on the lock that was taken over; empty if there was none.
    """

    path: Path
    key: str
    note: str = ""

    @classmethod
    def take(cls, directory: Path, work: Purpose, holder: Holder | None = None) -> Claim:
        """Claim a directory for work of this process. Of several that try at once, exactly one succeeds.

        Raises:
            Problem: If another process holds it for such work, or may hold it.
            OSError: If the lock cannot be written.
        """
        mine, path = holder or Holder.here(), directory / work.lock
        if _made(path, mine):
            return cls(path, mine.key)
        holder, content = _read(path)
        if content == b"":  # it was given back just now
            return cls.take(directory, work, mine)
        reason = holder.gone_for(mine) if holder is not None else None
        if reason is None:
            raise _held(path, work, holder, mine)
        _take_over(path, work, content, mine)
        return cls(path, mine.key, f"{path} was left by an earlier {work.name}: {reason}; taken over")

    def release(self) -> None:
        """Give the directory back, unless somebody else holds it by now."""
        with suppress(FileNotFoundError):
            holder, _ = _read(self.path)
            if holder is not None and holder.key == self.key:
                self.path.unlink()


def left_behind(directory: Path, work: Purpose) -> bool:
    """True if no process works in a directory any more, as far as can be seen: no lock, or its holder is gone."""
    holder, content = _read(directory / work.lock)
    return content == b"" or (holder is not None and holder.gone_for(Holder.here()) is not None)


def _runs(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started) < SAME_START
    except psutil.Error:
        return psutil.pid_exists(pid)  # a process of somebody else may be hidden from us


def _made(path: Path, holder: Holder) -> bool:
    """Make a file that holds who holds it; False if there is one."""
    try:
        # O_EXCL: of several processes, on whatever machines, exactly one makes the file.
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, (json.dumps(asdict(holder), sort_keys=True) + "\n").encode())
        os.fsync(descriptor)
    except OSError:
        path.unlink()  # a lock that names nobody would be taken for one that is being filled
        raise
    finally:
        os.close(descriptor)
    return True


def _read(path: Path) -> tuple[Holder | None, bytes]:
    """The holder of a lock and the bytes of its file; no holder if they cannot be read, no bytes without a lock."""
    give_up_at = time.monotonic() + timeouts.LOCK_FILLING
    while True:
        try:
            with path.open("rb") as file:
                content = file.read(_MOST_OF_A_LOCK)
        except FileNotFoundError:
            return None, b""
        with suppress(ValueError, TypeError):  # a lock that is being filled, or is none
            of = Holder(**json.loads(content))
            host, job, key, boot, processes = map(str, (of.host, of.job, of.key, of.boot, of.processes))
            return Holder(host, int(of.pid), float(of.started), job, int(of.restart), key, boot, processes), content
        if time.monotonic() > give_up_at:
            return None, content or b"\n"
        time.sleep(timeouts.ANSWER_POLL)


def _take_over(path: Path, work: Purpose, content: bytes, mine: Holder) -> None:
    """Replace a lock that was left behind. Others that try the same meanwhile are refused."""
    turn = path.with_name(f"{path.name}.takeover")
    if not _made(turn, mine):
        what = f"another {work.name} is taking {path.parent} over right now"
        raise Problem(what, f"start again; if none is, remove {turn}", file=turn)
    try:
        # Only who holds the turn replaces a lock, so that it cannot change between this look and the rename.
        if _read(path)[1] != content:
            what = f"another {work.name} has just taken {path.parent} over"
            raise Problem(what, f"choose another {work.flag}", file=path)
        os.replace(turn, path)
    except BaseException:
        turn.unlink(missing_ok=True)
        raise


def _held(path: Path, work: Purpose, holder: Holder | None, mine: Holder) -> Problem:
    directory = path.parent
    if holder is None:
        what = f"{directory} is locked, but its lock cannot be read"
        hint = f"make sure that no {work.name} works there, then remove {path}"
    elif holder.seen_by(mine):
        what = f"another {work.name} is at work in {directory}: {holder}"
        hint = f"wait for it, stop it, or choose another {work.flag}"
    else:
        unseen, there = f"from host {mine.host} it cannot be seen", f"on {holder.host}"
        if holder.host == mine.host:
            unseen, there = "it is in another container, or on another machine of that name", "there"
        what = f"another {work.name} is, or was, at work in {directory}: {holder}; {unseen}"
        check = f"squeue -j {holder.job}" if holder.job else f"ps -p {holder.pid} {there}"
        hint = f"check with {check}; if it is gone, remove {path}"
    return Problem(what, hint, file=path)
