"""A time limit for the start of MPI, which waits for all ranks without limit and lets no Python code run meanwhile."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

from domainpar.common import timeouts
from domainpar.common.agreement import name_ranks
from domainpar.common.problems import error_text
from domainpar.parallel.launcher import Launcher, detect
from domainpar.parallel.rank_status import launchers_of
from domainpar.parallel.signals import STOP_SIGNALS

CLOCK_MONOTONIC, SIGEV_THREAD = 1, 2  # of Linux


@contextmanager
def limited(launcher: Launcher, seconds: float) -> Iterator[None]:
    """End this process with exit code 2 if the block takes longer, and print which ranks have not come to theirs.

    A copy of this process prints it, as no thread can: mpi4py holds Python's lock. A copy also shows other ranks of the
    host that this one has come. A timer of the C library ends the process. Only on Linux.
    """
    if sys.platform != "linux":
        yield
        return
    starters = launchers_of(launcher.kind)  # of this process: what started the copy is this process
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which the copy does not have: it takes no lock of theirs
        copy = os.fork()
    if copy == 0:
        try:
            # Else the launcher would take the connections of a process that has ended for open.
            os.dup2(reading, 0)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            os.close(1)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            if not select.select([0], [], [], seconds)[0]:  # else the block is over, or the process
                _say(launcher, seconds, starters)
                select.select([0], [], [])  # still a sign to copies that come to this later
        finally:
            os._exit(0)
    os.close(reading)
    # The first host whose ranks end may end the others: those that began somewhat later must print, too.
    stop = _exit_later(1.1 * seconds + timeouts.BOARD, 2)
    try:
        yield
    finally:
        stop()
        os.close(writing)
        os.waitpid(copy, 0)


def _say(launcher: Launcher, seconds: float, starters: Sequence[psutil.Process]) -> None:
    """Print which ranks are missing, if this rank was the first of its host to come."""
    came, here = _seen(launcher, starters)
    if min(came, key=lambda rank: (came[rank], rank)) != launcher.rank:
        return
    late = sorted(here - set(came))
    elsewhere = sorted(set(range(launcher.size or 0)) - here)
    what = f"{name_ranks(late)} did not join" if late else "MPI has not started"
    what += f" within {seconds:g} s; joined on {platform.node()}: {', '.join(map(str, sorted(came)))}"
    what += f"; not seen on this host: {', '.join(map(str, elsewhere))}" if elsewhere else ""
    hint = "look at the output of those that did not; --join-timeout waits longer"
    if not late and not elsewhere:
        what = f"all ranks joined, but MPI has not started within {seconds:g} s"
        hint = "python -m domainpar.doctor, started alone, tries MPI; torchrun works without"
    os.write(2, error_text(what, hint=hint).encode())


def _seen(launcher: Launcher, starters: Sequence[psutil.Process]) -> tuple[dict[int, float], set[int]]:
    """Ranks of this host that wait for MPI, with the start of their wait, and all ranks of this host; for a copy."""
    came = {launcher.rank: psutil.Process().create_time()}
    here = {os.getppid(): launcher.rank}  # by process
    with suppress(psutil.Error):
        for process in [process for top in starters[-1:] for process in top.children(recursive=True)]:
            with suppress(psutil.Error, ValueError):  # one that ends meanwhile, or is no rank
                other = detect(process.environ(), typed=False)
                if (other.kind, other.size) != (launcher.kind, launcher.size):
                    continue
                here[process.pid] = other.rank
                if process.ppid() in here and process.cmdline() == psutil.Process(process.ppid()).cmdline():
                    came[other.rank] = process.create_time()
    return came, set(here.values())


def _exit_later(seconds: float, code: int) -> Callable[[], object]:
    """End this process after a while, whatever it does; returns a function that cancels this."""
    library = ctypes.CDLL(None)
    timer = ctypes.c_void_p()
    leave = ctypes.cast(library._exit, ctypes.c_void_p).value
    # struct sigevent: the value for the function, what to do (in the upper half), the function.
    event = (ctypes.c_uint64 * 8)(code, SIGEV_THREAD << 32, leave or 0)
    whole = int(seconds)
    times = (ctypes.c_long * 4)(0, 0, whole, int(1e9 * (seconds - whole)))
    refused = library.timer_create(CLOCK_MONOTONIC, event, ctypes.byref(timer))
    if refused or library.timer_settime(timer, 0, times, None):
        raise RuntimeError("the C library gives no timer, so that nothing bounds how long MPI may take to start")
    return lambda: library.timer_delete(timer)
