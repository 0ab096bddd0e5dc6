"""The board: a status of every rank that all ranks can read, so that the surviving ones can say which is missing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from domainpar.common import timeouts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Answer = TypeVar("Answer")


class Mark(NamedTuple):
    """The last note of a rank on what it is about to do."""

    step: int  # from 0
    phase: str  # one word: `load`, `forward`, ...
    event: str | None = None  # that it works on, if there is one
    posted: float = 0.0  # seconds since 1970 on the clock of that rank

    def __str__(self) -> str:
        of = "" if self.event is None else f" of event {self.event}"
        # Not below 0: the clock of that host may be ahead of this one's.
        return f"step {self.step}, {self.phase}{of}, {max(0.0, time.time() - self.posted):.1f} s ago"


class Life(NamedTuple):
    """A rank as its watcher thread reports it, whatever the rank itself is doing."""

    beat: int  # grows as long as the process lives
    calls: int = 0  # collective calls that it has begun
    waiting: float | None = None  # seconds of waiting for other ranks; None if it does not wait
    doing: str = ""  # the call that it waits in
    place: str = ""  # the user's line, with the call: `model(...) at train.py:41`; else a line of ours


@dataclass(frozen=True)
class Entry:
    """The entry of one rank on the board."""

    rank: int
    host: str = ""  # empty if unknown
    mark: Mark | None = None
    life: Life | None = None  # None without a watcher
    alive: bool | None = None  # whether the watcher reported while the board was read; None if that was not checked

    def __str__(self) -> str:
        host = f" on {self.host}" if self.host else ""
        seen = f"rank {self.rank}{host}: {self.mark or 'no mark yet'}"
        if self.alive is False:
            return f"{seen}; no sign of life: ended, stopped, cut off, or deep in compiled code"
        if self.life is None:  # nobody watches threads
            return seen
        at = f", at {self.life.place}" if self.life.place else ""
        if self.life.waiting is None:
            return f"{seen}; not waiting for others{at}"
        return f"{seen}; waiting for others in {self.life.doing}, {self.life.waiting:.1f} s{at}"


def missing(entries: Sequence[Entry]) -> list[Entry]:
    """The ranks that the others wait for, as far as the board shows; empty if it does not show.

    These are the ranks without a sign of life; else those that do not wait; else those that are behind all others.
    """
    dead = [entry for entry in entries if entry.alive is False]
    if dead:
        return dead
    lives = [(entry, entry.life) for entry in entries if entry.life is not None]
    # A rank that has waited only briefly has just arrived: the others waited for it.
    busy = [entry for entry, life in lives if life.waiting is None or life.waiting < timeouts.PATIENCE]
    if busy or not lives:
        return busy if len(busy) < len(entries) else []
    # All wait: a rank that has begun fewer calls than the others has not reached their call.
    least = min(life.calls for _, life in lives)
    behind = [entry for entry, life in lives if life.calls == least]
    return behind if len(behind) < len(lives) else []


def describe(entries: Sequence[Entry], first: Sequence[Entry] = ()) -> str:
    """The board as text, one line a rank, first the ranks that the others wait for."""
    rest = [entry for entry in entries if entry not in first]
    lines = [f"  {entry}   <- the others wait for it" for entry in first] + [f"  {entry}" for entry in rest]
    return "\n".join(["Last seen:", *lines])


class SideChannel:
    """The board of all ranks in a `torch.distributed` store: readable without the ranks that wrote to it.

    Nothing here raises when the store is lost, which must neither end a run nor hide why it ended.

    Args:
        store: This rank's connection, used by one thread; ranks that are threads of one process share it.
        num_ranks, hosts: Ranks that leave marks, and the host of each.
        serves: Whether the store lives in this process.
        connect: Opens another connection to the store, for another thread; None where ranks share one process.
    """

    def __init__(
        self,
        store: Store,
        num_ranks: int,
        serves: bool = True,
        hosts: Sequence[str] = (),
        connect: Callable[[], Store] | None = None,
    ) -> None:
        self.store, self.num_ranks, self.serves, self.connect = store, num_ranks, serves, connect
        self.hosts = list(hosts) or [""] * num_ranks
        self._lost = False  # not tried again: torch prints a page of C++ frames at every attempt

    @classmethod
    def for_threads(cls, num_ranks: int) -> Self:
        """The channel that ranks of one process share."""
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        return cls(HashStore(), num_ranks)

    @property
    def between_processes(self) -> bool:
        """Whether ranks are processes; the first that ends may end the others."""
        return self.connect is not None

    def post(self, rank: int, mark: Mark) -> None:
        """Replace the mark of a rank."""
        # In this thread, although a lost store may block it: a thread for every phase would cost more than a mark.
        self._unless_lost(lambda: self.store.set(f"mark/{rank}", json.dumps(mark)), None)

    def read(self) -> list[Entry]:
        """State of every rank; empty where the store cannot be reached. Takes a second or two."""

        def all_of_them() -> list[Entry]:
            before = [self._life(rank) for rank in range(self.num_ranks)]
            if any(before):  # else nobody watches
                time.sleep(timeouts.SIGNS_OF_LIFE)
            entries = []
            for rank, life_before in enumerate(before):
                mark, life = self._get(f"mark/{rank}"), self._life(rank)
                alive = None if life is None else life_before is None or life.beat != life_before.beat
                entries.append(Entry(rank, self.hosts[rank], Mark(*json.loads(mark)) if mark else None, life, alive))
            return entries

        return self._in_time(all_of_them, [])

    def _life(self, rank: int) -> Life | None:
        text = self._get(f"life/{rank}")
        return Life(*json.loads(text)) if text else None

    def claim_failure(self) -> bool:
        """Whether the caller is, as far as it can see, the first rank to report a failure; the others print nothing."""
        return self._in_time(lambda: self.store.add("failures", 1) == 1, True)

    def announce_failure(self) -> None:
        """Let the `Watcher` of all other ranks end their processes."""
        self._in_time(lambda: self.store.set("failed", "yes"), None)
        if self.serves:  # the store goes with this process
            time.sleep(timeouts.LINGER)

    def meet(
        self, why: str, deadline: float, hopeless: Callable[[Sequence[Life | None]], bool] = lambda lives: False
    ) -> bool:
        """Wait until every rank wants to compare, or to leave; *collective*. Threads need not: their store lives on.

        gloo needs this: a rank that closes its connections while others still read their last message can cost them
        that message.

        Args:
            why: Another word for each time that they meet.
            deadline: Seconds to wait; False is returned then.
            hopeless: Called now and then with the entries of all ranks; returns whether to give up.
        """
        if not self.between_processes:
            return True
        return self._unless_lost(partial(self._all_in, why, deadline, hopeless), True)

    def leave(self, deadline: float) -> None:
        """Leave for good, after `meet` and once nobody watches any more; *collective*.

        The rank that serves the store waits until all others have left it.
        """
        if self.serves:
            self.meet("left", deadline)
        else:
            self._unless_lost(lambda: self.store.add("left", 1), 0)
        self._lost = self.between_processes  # it may go at any moment: no more requests

    def _all_in(self, counter: str, seconds: float, hopeless: Callable[[Sequence[Life | None]], bool]) -> bool:
        """Count this rank, and wait until all are counted."""
        self.store.add(counter, 1)
        give_up_at = time.monotonic() + seconds
        next_look = time.monotonic() + timeouts.LOOK
        while self.store.add(counter, 0) < self.num_ranks:
            if time.monotonic() > give_up_at:
                return False
            if time.monotonic() > next_look:
                next_look = time.monotonic() + timeouts.LOOK
                if hopeless([self._life(rank) for rank in range(self.num_ranks)]):
                    return False
            time.sleep(timeouts.MEETING_POLL)
        return True

    def _get(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _in_time(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Read the store in a separate thread: a store on a stopped machine never answers."""
        answers: list[Answer] = []
        # A daemon, so that it does not keep alive a process that has given up on it.
        asking = threading.Thread(target=lambda: answers.append(self._unless_lost(ask, otherwise)), daemon=True)
        asking.start()
        asking.join(timeouts.BOARD)
        self._lost = self._lost or not answers
        return answers[0] if answers else otherwise

    def _unless_lost(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        if self._lost:
            return otherwise
        try:
            return ask()
        except RuntimeError:
            self._lost = True
            return otherwise
