"""A thread in each process that reports a sign of life to the other ranks and watches for theirs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from domainpar.common import timeouts
from domainpar.parallel.board import Life
from domainpar.parallel.launcher import Kind, detect
from domainpar.parallel.places import in_words, line_of_user, where
from domainpar.parallel.presence import Presence

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LAUNCHERS = ("mpiexec", "mpirun", "hydra", "orterun", "prterun", "prted", "orted", "torchrun", "slurmstepd")


class Watcher(threading.Thread):
    """Ends this process soon after another rank has announced a failure, or after its launcher or the store has gone.

    MPI can end all processes of a job; a process group cannot, and a rank that waits for one that is gone may not know.
    It also leaves a sign of life twice a second, with the line that this rank is in.
    (`store`: a connection of its own; `serves`: whether it lives in this process, which then ends last.)
    """

    def __init__(self, store: Store, presence: Presence, serves: bool) -> None:
        super().__init__(name="watcher", daemon=True)
        self._store, self._presence, self._serves = store, presence, serves
        self._rank, size = presence.transport.rank, presence.transport.size
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
                frame = sys._current_frames().get(self._watched or 0)  # the innermost one of the main thread
                place = in_words(*where(frame)) or line_of_user(frame, "ours")
                life = self._presence.look(beat)._replace(place=place)
                self._presence.end_if_late()
            try:
                if life is not None:
                    self._store.set(f"life/{self._rank}", json.dumps(life))
                failed = self._store.check(["failed"])
            except RuntimeError:
                # Whoever served the store ended without `close`: give this rank the time to end by itself, then end it.
                if not self._stopped.wait(timeouts.ORPHAN):
                    _end(f"rank 0, which serves the board, is gone; ending rank {self._rank}")
                return
            if failed:  # the rank that serves the store ends last: the others must read of the failure first
                time.sleep(timeouts.LINGER if self._serves else 0.0)
                os._exit(1)

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
