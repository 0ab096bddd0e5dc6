"""Ranks as threads of one process: for fast tests, notebooks and a single rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from domainpar.common import timeouts
from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.transport import Message, Posted, Reduction, Transport

_COMBINE: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


_Letter = TypeVar("_Letter", Tensor, bytes)


class Switchboard:
    """The letter boxes of all ranks of one process. One is shared by all their transports, groups included."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.failure: str | None = None
        # Held while a rank leaves all letters of a call, and by one that fails: it is past each call that all began, of
        # which none may lose a letter.
        self.posting = threading.Lock()
        # One lock a rank: a letter wakes its receiver alone.
        self._arrived = [threading.Condition() for _ in range(num_ranks)]
        self._boxes: list[dict[Hashable, deque[Any]]] = [{} for _ in range(num_ranks)]

    def put(self, receiver: int, key: Hashable, letter: Any) -> None:
        """Leave a letter for a rank."""
        with self._arrived[receiver]:
            self._boxes[receiver].setdefault(key, deque()).append(letter)
            self._arrived[receiver].notify()

    def take(self, receiver: int, key: Hashable, give_up_at: float) -> Any:
        """Wait for a letter.

        Raises:
            RanksFailed: If a rank failed meanwhile.
            TimeoutError: If `give_up_at` (of `time.monotonic`) passed.
        """
        boxes = self._boxes[receiver]
        with self._arrived[receiver]:
            while key not in boxes:
                if self.failure is not None:
                    raise RanksFailed(self.failure)
                remaining = give_up_at - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError
                self._arrived[receiver].wait(remaining)
            letters = boxes[key]
            letter = letters.popleft()
            if not letters:
                del boxes[key]
            return letter

    def fail(self, why: str) -> None:
        """Wake every waiting rank with an error. The first reason stays."""
        with self.posting:
            self.failure = self.failure or why
        for arrived in self._arrived:
            with arrived:
                arrived.notify_all()


class ThreadTransport(Transport):
    """A rank that is a thread of this process.

    Autograd runs CPU backward passes in the thread that asked for them, so exchanges inside them work. On a GPU all
    backward passes of a process share one thread: there, use processes.

    Args:
        switchboard: Shared by all ranks.
        rank: This rank.
        deadline: Seconds to wait for others.
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
        self._switchboard.fail(f"{self.name_ranks([self.rank])} aborted the work (code {code}).")

    def _post(self, outgoing: list[Message], incoming: list[Message], call: int) -> Posted:
        with self._switchboard.posting:
            for message in outgoing:  # a copy: the sender may change its rows before the receiver looks
                self._put(message.peer, call, message.rows.clone())
        return Posted(partial(self._receive, incoming, call))

    def _post_reduction(self, values: Tensor, op: Reduction, call: int) -> Posted:
        own = values.clone()
        self._put_to_all(own, call)
        return Posted(partial(self._reduce, own, values, op, call))

    def _receive(self, incoming: list[Message], call: int) -> None:
        letters = self._take([message.peer for message in incoming], call, Tensor, "an exchange")
        for message, rows in zip(incoming, letters, strict=True):
            if rows.shape != message.rows.shape or rows.dtype != message.rows.dtype:
                raise RuntimeError(
                    f"{self.name_ranks([message.peer])} sent {tuple(rows.shape)} {rows.dtype} where "
                    f"{self.name_ranks([self.rank])} expects {tuple(message.rows.shape)} {message.rows.dtype}; "
                    "the plans of the two ranks do not belong together."
                )
            message.rows.copy_(rows)

    def _reduce(self, own: Tensor, values: Tensor, op: Reduction, call: int) -> None:
        letters = self._take_from_all(own, call, Tensor, "all_reduce")
        for peer, letter in enumerate(letters):
            if letter.shape != values.shape:  # torch would broadcast some of them in silence
                raise RuntimeError(
                    f"{self.name_ranks([peer])} brought {tuple(letter.shape)} to an all_reduce of "
                    f"{tuple(values.shape)} on {self.name_ranks([self.rank])}; the ranks do not make the same calls."
                )
        # Integers: the order does not matter, so every rank may sum by itself.
        values.copy_(reduce(_COMBINE[op], letters))

    def _all_gather(self, payload: bytes, call: int) -> list[bytes]:
        self._put_to_all(payload, call)
        return self._take_from_all(payload, call, bytes, "all_gather")

    def _broadcast(self, payload: bytes, root: int, call: int) -> bytes:
        if self.rank != root:
            return self._take([root], call, bytes, "broadcast")[0]
        self._put_to_all(payload, call)
        return payload

    def _split(self, number: int, members: list[int], world_ranks: list[int], call: int) -> Transport:
        context = (self._context, call)
        return ThreadTransport(self._switchboard, members.index(self.rank), self.deadline, world_ranks, context)

    def _put(self, peer: int, call: int, letter: Any) -> None:
        self._switchboard.put(self.world_ranks[peer], (self._context, self.rank, call), letter)

    def _take(self, peers: Sequence[int], call: int, kind: type[_Letter], doing: str) -> list[_Letter]:
        """The letters of some peers.

        Raises:
            RankMissing: If some did not come before the deadline, naming all of those.
            RuntimeError: If a letter is of another kind, since its sender was in another call.
        """
        give_up_at = time.monotonic() + self.deadline
        letters, missing = [], []
        for peer in peers:
            try:
                key = (self._context, peer, call)
                letter = self._switchboard.take(self.world_ranks[self.rank], key, give_up_at)
            except TimeoutError:
                missing.append(peer)
                continue
            if isinstance(letter, Tensor) != (kind is Tensor):
                numbers, words = "numbers (of an exchange or an all_reduce)", "bytes (of an all_gather or a broadcast)"
                expected, sent = (numbers, words) if kind is Tensor else (words, numbers)
                raise RuntimeError(
                    f"{self.name_ranks([peer])} sent {sent} where {self.name_ranks([self.rank])} expects {expected}; "
                    "the ranks do not make the same calls."
                )
            letters.append(letter)
        if missing:
            self.raise_timeout(missing, doing=doing)
        return letters

    def _put_to_all(self, letter: Any, call: int) -> None:
        """Give every other rank the same letter."""
        with self._switchboard.posting:
            for peer in range(self.size):
                if peer != self.rank:
                    self._put(peer, call, letter)

    def _take_from_all(self, own: _Letter, call: int, kind: type[_Letter], doing: str) -> list[_Letter]:
        """The letters that all ranks gave to all, in the order of ranks, own one included."""
        letters = self._take([peer for peer in range(self.size) if peer != self.rank], call, kind, doing)
        letters.insert(self.rank, own)
        return letters
