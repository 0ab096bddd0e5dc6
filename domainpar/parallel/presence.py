"""A rank as the others see it: its marks, the call that it waits in, and how it leaves."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from domainpar import faults, timeouts
from domainpar.parallel.board import Life, Mark
from domainpar.parallel.places import in_words, where
from domainpar.parallel.side_channel import SideChannel
from domainpar.parallel.transport import Transport
from domainpar.problems import Problem, Where


class Presence:
    """This rank on the board, from its first mark until it closes what it talks over.

    Args:
        transport: Joins all ranks.
        domain: Joins the ranks that share this one's event; may be the same object.
        marks: The side channel; None where there is none.

    Attributes:
        host: Name of this machine.
        last_mark: The last thing this rank said it was about to do.
        stop_watching: Ends this rank's watcher.
        closed: Whether `close` was called.
    """

    def __init__(self, transport: Transport, domain: Transport, marks: SideChannel | None) -> None:
        self.transport, self.domain, self.marks = transport, domain, marks
        self.transports = [transport] if domain is transport else [transport, domain]
        self.host = platform.node()
        self.last_mark: Mark | None = None
        self.stop_watching: Callable[[], None] = lambda: None
        self.closed = False

    def mark(self, phase: str, step: int, event: str | None = None) -> None:
        """Leave a mark of what this rank is about to do; when a deadline passes, the last of every rank is shown.

        Args:
            phase: One word: `load`, `forward`, ...
            step: Number of the step, from 0.
            event: The event it is about, if it is about one.
        """
        self.last_mark = Mark(step, phase, event, round(time.time(), 3))
        for transport in self.transports:
            transport.doing = f"step {step}, {phase}"
        faults.at(phase, step)
        if self.marks is not None:
            self.marks.post(self.transport.rank, self.last_mark)

    def look(self, beat: int) -> Life:
        """The doings of this rank, as its watcher shows them to the others; called from the watcher's thread."""
        calls = sum(transport.num_calls for transport in self.transports)
        for transport in self.transports:
            since = transport.waiting_since
            if since is not None:
                return Life(beat, calls, round(time.monotonic() - since, 2), transport.waiting_in)
        return Life(beat, calls)

    def where(self, problem: Problem | None = None) -> Where:
        """Where this rank is: as far as the problem does not say, where its last mark was."""
        where = Where(rank=self.transport.rank, size=self.transport.size, host=self.host)
        if (mark := self.last_mark) is not None:
            where = replace(where, event=mark.event, step=mark.step, phase=mark.phase)
        if problem is not None:
            where = replace(where, event=problem.event or where.event, file=problem.file)
        return where

    def close(self) -> None:
        """Meet once more, then give back what the transports hold; *collective*. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        faults.reach("close")
        if self.marks is not None:
            with self.transport.waiting("close"):
                self._meet(self.marks)
        self.stop_watching()  # not before: until all have come, one may still fail
        if self.marks is not None:
            self.marks.leave(self.transport.deadline)
        for transport in reversed(self.transports):
            transport.close()

    def _meet(self, marks: SideChannel) -> None:
        """Wait until all ranks close. One that waits in a call that this rank will never make does not."""
        ours = self.look(0).calls
        waiting: list[tuple[int, Life]] = []

        def hopeless(lives: Sequence[Life | None]) -> bool:
            # Only of ranks that share events with this one is it known how many calls they make.
            sharing = [(rank, lives[rank]) for rank in self.domain.world_ranks]
            waiting[:] = [
                (rank, life)
                for rank, life in sharing
                if life is not None and life.calls > ours and (life.waiting or 0.0) > timeouts.PATIENCE
            ]
            return bool(waiting)

        if marks.meet(self.transport.deadline, hopeless):
            return
        if not waiting:
            self.transport.raise_timeout([], doing="close")
        rank, life = waiting[0]
        raise self.transport.missing(
            f"it is in {in_words(*where()) or 'close'} and makes no more calls, but "
            f"{self.transport.name_ranks([rank])} waits for it in {life.place or life.doing}",
            [self.transport.rank],
            known=True,
        )
