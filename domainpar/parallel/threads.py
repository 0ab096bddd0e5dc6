"""Ranks as threads of one process: for fast tests, notebooks and a single rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from domainpar.common import timeouts
from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.transport import Message, Posted, Reduction, Transport

_COMBINE: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip


class Switchboard:
    """The letter boxes of all ranks of one process, which run in turns: each until it waits for a letter.

    Python lets one thread run at a time anyway. In turns, state of the process can belong to the rank that runs: each
    rank finds torch's generator of random numbers as it left it. One switchboard is shared by all transports of a
    process, groups included.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.failure: str | None = None
        self.turn = threading.Lock()  # held by the rank that runs
        # A letter wakes its receiver alone.
        self._arrived = [threading.Condition(self.turn) for _ in range(num_ranks)]
        self._boxes: list[dict[Hashable, deque[Any]]] = [{} for _ in range(num_ranks)]
        self._stopped: dict[int, Hashable] = {}  # ranks that wait, with the key of the letter, or have ended

    def run(self, rank: int, random_state: Tensor, work: Callable[[], None]) -> None:
        """All that a rank does, in its turns; its numbers are drawn from a generator that begins in this state."""
        with self.turn:
            torch.default_generator.set_state(random_state)
            try:
                work()
            finally:
                self._stop(rank, None)

    def put(self, receiver: int, key: Hashable, letter: Any) -> None:
        """Leave a letter for a rank."""
        self._boxes[receiver].setdefault(key, deque()).append(letter)
        if self._stopped.get(receiver) == key:
            del self._stopped[receiver]
            self._arrived[receiver].notify()

    def take(self, receiver: int, key: Hashable, give_up_at: float) -> Any:
        """Wait for a letter; TimeoutError after `give_up_at` (`monotonic`).

        RanksFailed if a rank has failed, once no other can go on: until then, others may raise the same error.
        """
        boxes = self._boxes[receiver]
        if key not in boxes:
            random_state = torch.default_generator.get_state()
            self._stop(receiver, key)
            try:
                while key not in boxes:
                    if self.failure is not None and len(self._stopped) == self.num_ranks:
                        raise RanksFailed(self.failure)
                    if not self._arrived[receiver].wait(max(0.0, give_up_at - time.monotonic())):
                        raise TimeoutError
            finally:
                self._stopped.pop(receiver, None)
                torch.default_generator.set_state(random_state)
        letter = boxes[key].popleft()
        if not boxes[key]:
            del boxes[key]
        return letter

    def _stop(self, rank: int, key: Hashable) -> None:
        self._stopped[rank] = key
        if self.failure is not None and len(self._stopped) == self.num_ranks:
            for arrived in self._arrived:
                arrived.notify()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """A context in which a rank waits for others by other means than letters; other ranks run meanwhile."""
        random_state = torch.default_generator.get_state()
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()
            torch.default_generator.set_state(random_state)


class ThreadTransport(Transport):
    """A rank that is a thread of this process.

    Autograd runs CPU backward passes in the calling thread, so exchanges inside them work. On a GPU all
    backward passes of a process share one thread: there, use processes. All ranks share one switchboard.
    """

    name: ClassVar[str] = "threads"
    takes_cuda: ClassVar[bool] = True

    def __init__(
        self,
        switchboard: Switchboard,
        rank: int,
        deadline: float = timeouts.FIRST_STEP,
        members: Sequence[int] | None = None,
        context: Hashable = (),
    ) -> None:
        members = range(switchboard.num_ranks) if members is None else members
        super().__init__(rank, len(members), deadline, members)
        self._switchboard = switchboard
        self._context = context  # keeps the letters of different groups apart

    def abort(self, code: int) -> None:
        """Make all other ranks raise; returns, so that this one can raise what went wrong."""
        board = self._switchboard
        board.failure = board.failure or f"{self.name_ranks([self.rank])} aborted the work (code {code})."

    def elsewhere(self) -> AbstractContextManager[None]:
        """Let other ranks run."""
        return self._switchboard.elsewhere()

    def _post(self, outgoing: list[Message], incoming: list[Message], call: int) -> Posted:
        for message in outgoing:  # a copy: the sender may change its rows before the receiver looks
            self._put(message.peer, call, message.rows.clone())
        return Posted(partial(self._receive, incoming, call, self.kind))

    def _post_reduction(self, values: Tensor, op: Reduction, call: int) -> Posted:
        own = values.clone()
        for peer in range(self.size):
            if peer != self.rank:
                self._put(peer, call, own)
        return Posted(partial(self._reduce, own, values, op, call, self.kind))

    def _receive(self, incoming: list[Message], call: int, kind: str) -> None:
        letters = self._take([message.peer for message in incoming], call, kind)
        for message, rows in zip(incoming, letters, strict=True):
            if rows.shape != message.rows.shape:
                raise RuntimeError(
                    f"{self.name_ranks([message.peer])} sent {tuple(rows.shape)} {rows.dtype} where "
                    f"{self.name_ranks([self.rank])} expects {tuple(message.rows.shape)} {message.rows.dtype}; "
                    "the plans of the two ranks do not belong together."
                )
            message.rows.copy_(rows)

    def _reduce(self, own: Tensor, values: Tensor, op: Reduction, call: int, kind: str) -> None:
        letters = self._take([peer for peer in range(self.size) if peer != self.rank], call, kind)
        # Integers: the order does not matter, so every rank may sum by itself.
        values.copy_(reduce(_COMBINE[op], letters, own))

    def _split(self, number: int, members: list[int], world_ranks: list[int], call: int) -> Transport:
        context = (self._context, call)
        return ThreadTransport(self._switchboard, members.index(self.rank), self.deadline, world_ranks, context)

    def _put(self, peer: int, call: int, rows: Tensor) -> None:
        self._switchboard.put(self.world_ranks[peer], (self._context, self.rank, call), (self.kind, rows))

    def _take(self, peers: Sequence[int], call: int, kind: str) -> list[Tensor]:
        """The letters of some peers; RankMissing names those that did not come before the deadline."""
        give_up_at = time.monotonic() + self.deadline
        letters, missing = [], []
        for peer in peers:
            try:
                key = (self._context, peer, call)
                theirs, rows = self._switchboard.take(self.world_ranks[self.rank], key, give_up_at)
            except TimeoutError:
                missing.append(peer)
                continue
            if theirs != kind:  # torch would broadcast some in silence
                raise RuntimeError(
                    f"{self.name_ranks([peer])} is in {theirs} where {self.name_ranks([self.rank])} is in {kind}; "
                    "the ranks do not make the same calls."
                )
            letters.append(rows)
        if missing:
            self.raise_timeout(missing)
        return letters
