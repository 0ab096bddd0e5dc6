"""A thread in each process that reports a sign of life to the other ranks and watches for theirs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from domainpar.common import timeouts
from domainpar.parallel.board import Life
from domainpar.parallel.launcher import Kind, detect
from domainpar.parallel.places import in_words, lines_of, where

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SHOWN_FRAMES = 6
LAUNCHERS = ("mpiexec", "mpirun", "hydra", "orterun", "prterun", "prted", "orted", "torchrun", "slurmstepd")


class Watcher(threading.Thread):
    """Ends this process soon after another rank has announced a failure, or after its launcher or the store has gone.

    MPI can end all processes of a job; a process group cannot, and a rank that waits for one that is gone may not know.
    It also leaves a sign of life twice a second, and where this rank is, if somebody asks for it.

    Args:
        store: A connection of its own.
        rank: This rank.
        size: Ranks of the run.
        serves: Whether the store lives in this process, which then ends last.
        look: Describes the doings of this rank; called with the number of the beat.
        end_if_late: Called with each beat: may end this process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        serves: bool,
        look: Callable[[int], Life],
        end_if_late: Callable[[], None],
    ) -> None:
        super().__init__(name="watcher", daemon=True)
        self._store, self._rank, self._serves, self._look, self._end_if_late = store, rank, serves, look, end_if_late
        self._poll = max(timeouts.WATCH_POLL, timeouts.POLL_PER_RANK * size)
        self._stopped = threading.Event()
        self._launchers = launchers_of(detect().kind)
        self._watched = threading.main_thread().ident

    def run(self) -> None:
        """Look again and again, until stopped."""
        beat, next_beat = 0, 0.0
        while not self._stopped.wait(self._poll):
            if not all(_lives(process) for process in self._launchers):
                _end(f"what started rank {self._rank} is gone; ending this rank")
            life: Life | None = None
            if time.monotonic() >= next_beat:
                beat, next_beat = beat + 1, time.monotonic() + max(timeouts.BEAT, self._poll)
                life = self._look(beat)._replace(place=in_words(*where(self._frame())))
                self._end_if_late()
            try:
                if life is not None:
                    self._store.set(f"life/{self._rank}", json.dumps(life))
                    if self._store.check([f"wanted/{self._rank}"]) and not self._store.check([f"frames/{self._rank}"]):
                        frame = self._frame()
                        self._store.set(f"frames/{self._rank}", "" if frame is None else lines_of(frame, SHOWN_FRAMES))
                failed = self._store.check(["failed"])
            except RuntimeError:
                # Whoever served the store ended without `close`: give this rank the time to end by itself, then end it.
                if not self._stopped.wait(timeouts.ORPHAN):
                    _end(f"rank 0, which serves the board, is gone; ending rank {self._rank}")
                return
            if failed:  # the rank that serves the store ends last: the others must read of the failure first
                time.sleep(timeouts.LINGER if self._serves else 0.0)
                os._exit(1)

    def _frame(self) -> FrameType | None:
        """The innermost frame of the main thread."""
        return sys._current_frames().get(self._watched or 0)

    def stop(self) -> None:
        """Stop looking, before the store goes away."""
        self._stopped.set()
        self.join()


def _end(why: str) -> None:
    # Not sys.exit, which ends this thread alone; and no cleaning up, which could wait for ranks that are gone.
    os.write(2, f"domainpar: error: {why}\n".encode())
    os._exit(1)


def launchers_of(kind: Kind) -> list[psutil.Process]:
    """The process that started this one, and those above it that belong to a launcher.

    None where there is no launcher: a shell may go while its background jobs stay.
    """
    if kind in ("none", "environment"):
        return []
    starters: list[psutil.Process] = []
    with suppress(psutil.Error):  # one that ends meanwhile, or belongs to somebody else, is not watched
        for process in psutil.Process().parents():
            if starters and not process.name().startswith(LAUNCHERS):
                break
            starters.append(process)
    return starters


def _lives(process: psutil.Process) -> bool:
    """Whether this very process runs; a zombie has ended."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
