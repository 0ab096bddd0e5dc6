"""The status of a rank for the others: its marks, the call that it waits in, its signs of life, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from domainpar.common import faults, timeouts
from domainpar.common.agreement import Refused
from domainpar.common.problems import Problem, Where, as_problem, error_text, nobody_reads
from domainpar.common.words import PROGRESS_LOG
from domainpar.parallel.board import Life, Mark, SideChannel
from domainpar.parallel.errors import RankMissing, RanksFailed
from domainpar.parallel.launcher import Kind, detect
from domainpar.parallel.places import in_words, is_a_command, line_of_user, where
from domainpar.parallel.transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LAUNCHERS = ("mpiexec", "mpirun", "hydra", "orterun", "prterun", "prted", "orted", "torchrun", "slurmstepd")
IN_A_COMMAND = "see the status of all ranks above; --timeout gives ranks more time to come"
IN_A_PROGRAM = (
    "every rank makes every call, so look for one that this rank skips, or makes alone (if world.is_root); with "
    "DOMAINPAR_CHECK_CALLS=1 in the environment the first call that differs is named; World.session(timeout=...) gives "
    "ranks more time to come"
)
DOCTOR = "python -m domainpar.doctor, started the same way, tells what of this machine works"


class RankStatus:
    """The status of this rank on the board, from its first mark until it closes its transports.

    Args:
        transport, domain: Join all ranks, and the ranks that share this one's event; may be the same object.
        marks: The side channel; None where there is none.

    Attributes:
        host: Name of this machine.
        last_mark: The last phase that this rank began.
        stop_watching: Ends this rank's watcher.
        closed: Whether `close` was called.
    """

    def __init__(self, transport: Transport, domain: Transport, marks: SideChannel | None) -> None:
        self.transport, self.domain, self.marks = transport, domain, marks
        self.transports = [transport] if domain is transport else [transport, domain]
        self.host = platform.node()
        self.last_mark: Mark | None = None
        self.stop_watching: Callable[[], None] = lambda: None
        self.closed = self._ends = False

    def mark(self, phase: str, step: int, event: str | None = None) -> None:
        """Write a `Mark` of what this rank is about to do; when a deadline passes, the last of every rank is shown."""
        self.last_mark = Mark(step, phase, event, round(time.time(), 3))
        PROGRESS_LOG.phase = phase
        for transport in self.transports:
            transport.doing = f"step {step}, {phase}"
        faults.at(phase, step)
        if self.marks is not None:
            self.marks.post(self.transport.rank, self.last_mark)

    def look(self, beat: int) -> Life:
        """What this rank is doing, as its watcher shows it to the others; called from the watcher's thread."""
        # Numbers that the rank's own thread may change meanwhile: the next beat shows them as they are then.
        calls = sum(transport.num_calls for transport in self.transports)
        for transport in self.transports:
            if (waits := transport.waits()) is not None:
                return Life(beat, calls, round(time.monotonic() - waits[0], 2), waits[1])
        return Life(beat, calls)

    def end_if_late(self) -> None:
        """End all ranks if others keep a GPU of this one waiting for longer than it may; for the watcher's thread."""
        for transport in self.transports:
            if not self._ends and (seen := transport.late()) is not None:
                self._ends = True
                # In a separate thread: meanwhile the watcher must go on to write signs of life.
                threading.Thread(target=self._end, args=(transport, seen), daemon=True).start()

    def _end(self, transport: Transport, seen: str) -> None:
        fail(self, transport.missing(seen))

    def where(self, problem: Problem | None = None) -> Where:
        """The place of this rank, for an error: that of the problem, completed from the last mark."""
        where = _marked(Where(rank=self.transport.rank, size=self.transport.size, host=self.host), self.last_mark)
        if problem is not None:
            where = replace(where, event=problem.event or where.event, file=problem.file)
        return where

    def close(self, compare: bool = True) -> None:
        """Meet once more, then give back what the transports hold; *collective*. A second call does nothing.

        Args:
            compare: Whether to compare what ranks hold; not after they have found that it differs.

        Raises:
            Refused: On all ranks alike, or another Problem, if compared values differ; call it again with False.
        """
        if self.closed:
            return
        faults.reach("close")
        if compare:
            self._meet("compare")  # who waits in another call is named here
            for transport in self.transports:
                for compare_all in transport.before_close:
                    compare_all()
        self.closed = True
        self._meet("leave")
        self.stop_watching()  # not earlier: until all have come, one may still fail
        for transport in reversed(self.transports):  # the group before the whole that it was split from
            transport.close()
        if self.marks is not None:  # last: until its group has ended, NCCL's own watchdog looks at the store
            self.marks.leave(self.transport.deadline)

    def _meet(self, why: str) -> None:
        """Wait until all ranks close, but not if one waits in a call that this rank will never make."""
        if self.marks is None:
            return
        own_calls = self.look(0).calls
        waiting: list[tuple[int, Life]] = []

        def hopeless(lives: Sequence[Life | None]) -> bool:
            # Numbers of calls can be compared only with ranks that share events with this one.
            sharing = [(rank, lives[rank]) for rank in self.domain.world_ranks]
            waiting[:] = [
                (rank, life)
                for rank, life in sharing
                if life is not None and life.calls > own_calls and (life.waiting or 0.0) > timeouts.PATIENCE
            ]
            return bool(waiting)

        with self.transport.waiting("close"):
            if self.marks.meet(why, self.transport.deadline, hopeless):
                return
            if not waiting:
                self.transport.raise_timeout()
            rank, life = waiting[0]
            raise self.transport.missing(
                f"it is in {in_words(*where()) or 'close'} and makes no more calls, but "
                f"{self.transport.name_ranks([rank])} waits for it in {life.place or life.doing}",
                [self.transport.rank],
                known=True,
            )


class Watcher(threading.Thread):
    """Ends this process soon after another rank has announced a failure, or after its launcher or the store has gone.

    MPI can end all processes of a job; a process group cannot, and a rank may not see that the one it waits for is
    gone. It also leaves a sign of life twice a second, with the line that this rank is in. (`store`: a connection of
    its own; `serves`: whether it lives in this process, which then ends last.)
    """

    def __init__(self, store: Store, rank_status: RankStatus, serves: bool) -> None:
        super().__init__(name="watcher", daemon=True)
        self._store, self._status, self._serves = store, rank_status, serves
        self._rank, size = rank_status.transport.rank, rank_status.transport.size
        self._poll = max(timeouts.WATCH_POLL, timeouts.POLL_PER_RANK * size)
        self._stopped = threading.Event()
        self._launchers = launchers_of(detect().kind)
        self._watched = threading.main_thread().ident

    def run(self) -> None:
        """Look again and again, until stopped."""
        beat, next_beat = 0, 0.0
        while not self._stopped.wait(self._poll):
            if not all(_lives(process) for process in self._launchers):
                _end_process(f"what started rank {self._rank} is gone; ending this rank")
            life: Life | None = None
            if time.monotonic() >= next_beat:
                beat, next_beat = beat + 1, time.monotonic() + max(timeouts.BEAT, self._poll)
                frame = sys._current_frames().get(self._watched or 0)  # the innermost one of the main thread
                place = in_words(*where(frame)) or line_of_user(frame, "ours")
                life = self._status.look(beat)._replace(place=place)
                self._status.end_if_late()
            try:
                if life is not None:
                    self._store.set(f"life/{self._rank}", json.dumps(life))
                failed = self._store.check(["failed"])
            except RuntimeError:
                # The server of the store ended without `close`: give this rank time to end by itself, then end it.
                if not self._stopped.wait(timeouts.ORPHAN):
                    _end_process(f"rank 0, which serves the board, is gone; ending rank {self._rank}")
                return
            if failed:  # the rank that serves the store ends last: the others must read of the failure first
                time.sleep(timeouts.LINGER if self._serves else 0.0)
                os._exit(1)

    def stop(self) -> None:
        """Stop looking, before the store goes away."""
        self._stopped.set()
        self.join()


def _end_process(why: str) -> None:
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
    with suppress(psutil.Error):  # one that ends meanwhile, or belongs to another user, is not watched
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


@contextmanager
def guard(rank_status: RankStatus) -> Iterator[None]:
    """Around the work of a program: an error on one rank ends all of them, at once and with one message.

    What all ranks refused together (`agree`) is printed by rank 0 and becomes exit code 2. Any other error is printed
    with its rank and aborts the whole job with exit code 1.
    """
    try:
        yield
    except Refused as refused:
        if rank_status.transport.rank == 0:
            write_error(refused.text)
        rank_status.close(compare=False)
        raise SystemExit(2) from None
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # the program is done, as it says
            raise
        fail(rank_status, error)
        raise


def fail(rank_status: RankStatus, error: BaseException) -> None:
    """Print why this rank fails, unless another one has, and end all of them. On processes this does not return."""
    marks = rank_status.marks
    follows = isinstance(error, RanksFailed)  # the rank that failed says why
    if not follows and (marks is None or marks.claim_failure()) and not nobody_reads(error):
        problem = as_problem(error)
        write_error(report(problem or error, rank_status.where(problem)))
    elif marks is not None and marks.between_processes:
        # One failure causes others, which would only hide it; and a reader that has gone needs no message.
        time.sleep(timeouts.REPORT)
    rank_status.transport.abort(exit_code(error))


def report(error: BaseException, where: Where) -> str:
    """Text printed when a rank fails somewhere: the traceback where it helps, then one line and a hint."""
    if isinstance(error, KeyboardInterrupt):
        return error_text("interrupted; ending all ranks", where)
    if isinstance(error, RankMissing):  # about the rank that did not come, not about this one
        hint, late = IN_A_COMMAND if is_a_command() else IN_A_PROGRAM, Where()
        if error.first:
            entry = error.first[0]
            late = _marked(Where(rank=entry.rank, size=where.size, host=entry.host or None), entry.mark)
        board = f"{error.board}\n" if error.board else ""
        return f"\n{board}{error_text(error.what, late, hint)}"
    if isinstance(error, Problem):
        return error_text(error.what, where, error.hint)
    stack = error.__traceback__  # from the caller's own code on
    own = {contextlib.__file__, *(str(Path(__file__).with_name(name)) for name in ("rank_status.py", "world.py"))}
    while stack is not None and stack.tb_frame.f_code.co_filename in own:
        stack = stack.tb_next
    trace = "".join(traceback.format_exception(type(error), error, stack))
    what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"\n--- rank {where.rank} of {where.size} failed ---\n{trace}{error_text(what, where, DOCTOR)}"


def _marked(where: Where, mark: Mark | None) -> Where:
    return where if mark is None else replace(where, event=mark.event, step=mark.step, phase=mark.phase)


def exit_code(error: BaseException) -> int:
    """130 after an interrupt, the program's own if it chose one, else 1."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1


def write_error(text: str) -> None:
    """Write to standard error in one piece: lines of other ranks cannot come between, and no buffer can be lost."""
    sys.stdout.flush()
    os.write(2, text.encode(errors="replace"))
