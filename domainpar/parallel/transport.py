"""The interface of every transport, and their common part: checks, host copies, counters, texts of time-outs."""

from __future__ import annotations

import json
import os
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from domainpar.common import faults
from domainpar.common.agreement import differing_ranks, name_ranks
from domainpar.common.words import some_of
from domainpar.parallel.board import SideChannel, describe, missing
from domainpar.parallel.errors import Garbled, RankMissing, RanksDiffer
from domainpar.parallel.places import in_words, where

Reduction = Literal["sum", "max", "min"]

MAX_MESSAGE_BYTES = 2**31 - 1
"""One message to one rank may not be larger: MPI counts are 32-bit integers."""


CHECK_CALLS = "DOMAINPAR_CHECK_CALLS"
"""Environment variable: with 1, ranks compare their calls before each one. Slow; for finding a rank that skips a call,
which would otherwise wait until its deadline, or take another call's data for its own."""


class Pending(Protocol):
    """An exchange or a sum under way."""

    def progress(self) -> None:
        """Let messages move while this rank computes; call it between pieces of work, as often as you like.

        Some transports (MPI) move large messages only while they are called. Never waits, and takes microseconds beside
        copies of moving rows. Errors that occur here are raised by `finish`.
        """

    def finish(self) -> Tensor:
        """Wait until the buffers may be used again; returns the rows received, or the sums, at each call."""


@dataclass
class Posted:
    """An operation that a transport has begun; `finish` waits for it, once. Most move by themselves meanwhile."""

    finish: Callable[[], None]
    progress: Callable[[], None] = lambda: None


@dataclass
class Message:
    """Rows that travel between this rank and one peer: a view of the caller's buffer or its copy; never empty."""

    peer: int
    rows: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.rows.numel() * self.rows.element_size()

    def as_bytes(self) -> Tensor:
        """The rows as bytes: no transport knows every dtype."""
        return self.rows.view(-1).view(torch.uint8)


class OfThisProcess:
    """Part of running ranks: copies of an object that holds it share it, and it cannot be pickled."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or saved, for it belongs to ranks that run now. Of a model of "
            "parallelize(net, world) save model.module.state_dict(), or model.module; of a part save its tensors."
        )


class Transport(OfThisProcess, ABC):
    """The communication of the ranks of one group. It moves bytes and adds integers; no transport ever adds floats.

    All ranks of the group call the same methods in the same order. That includes `start`, also where a rank has nothing
    to send or to receive. Messages between two ranks are matched in that order. Several exchanges and sums may be under
    way, with blocking calls in between, and each rank may finish them in any order. Only one thread of a rank uses a
    transport and what it started.
    """

    name: ClassVar[str] = "?"  # in flags and messages
    takes_cuda: ClassVar[bool] = False  # others get copies on the host
    remedy: ClassVar[str] = "put this into an issue"  # what to do if it transfers wrong numbers

    def __init__(self, rank: int, size: int, deadline: float, world_ranks: Sequence[int] | None = None) -> None:
        # `deadline`: seconds that any call may wait for others; `world_ranks`: what ranks are called in messages.
        self.rank, self.size, self.deadline = rank, size, deadline
        self.world_ranks = list(range(size)) if world_ranks is None else list(world_ranks)
        self.library = "domainpar's own"  # the library that moves its bytes, with its version
        self.board: SideChannel | None = None  # where every rank was last seen; set by the `World`
        self.doing = ""  # what this rank is doing, in words, for the check of calls; set by the `World`
        self.before_close: list[Callable[[], None]] = []  # *collective*: what ranks compare when all of them close
        self.waiting_since: float | None = None  # on the monotonic clock; None if this rank does not wait for others
        self.waiting_in = ""  # the call that it waits in
        self.kind = ""  # of the call that was begun last, in words: on all ranks the same
        self.num_calls = self.num_exchanges = 0  # collective calls begun so far, and those of `start`
        # The caller sets these back: bytes of rows that `start` sent to other ranks; time of packing, copying, posting
        # and in `progress`; time of waiting in `finish` and in all other collective calls.
        self.bytes_sent, self.seconds_exchanging, self.seconds_waiting = 0, 0.0, 0.0
        self._checks_calls = os.environ.get(CHECK_CALLS) == "1"

    def start(
        self, send: Tensor, send_counts: Sequence[int], receive: Tensor, receive_counts: Sequence[int]
    ) -> Pending:
        """Send rows to other ranks and receive rows from them; *collective*, also for ranks that have none.

        Until `finish`, leave both buffers alone. Rows travel unpadded, zero counts send nothing, and autograd does not
        see it.

        Args:
            send, receive: Rows grouped by receiver, and by sender, in the order of ranks; contiguous, any dtype, as
                wide as those of the other side.
            send_counts, receive_counts: Rows for each rank, and from each, length `size`; 0 for this rank itself.

        Raises:
            ValueError: If the counts do not fit the buffers.
            RuntimeError: From here or from `finish`, if another rank sent fewer or more rows than expected, failed, or
                did not answer before the deadline.
        """
        self.num_exchanges += 1  # before anything can fail: ranks count alike
        faults.reach("exchange")
        call = self._next_call(f"an exchange of rows of {tuple(send.shape[1:])} {send.dtype}")
        with self._exchanging():
            outgoing_rows = send.detach().to(self._wire_device(send))
            incoming_rows = wire_rows = receive.detach()
            wire = self._wire_device(receive)
            if wire != receive.device:
                # Pinned: the GPU copies from it without a stop in other memory.
                wire_rows = torch.empty(receive.shape, dtype=receive.dtype, device=wire, pin_memory=wire.type == "cpu")
            outgoing = self._messages("send", outgoing_rows, send_counts)
            incoming = self._messages("receive", wire_rows, receive_counts)
            posted = self._post(outgoing, incoming, call)
            self.bytes_sent += sum(message.num_bytes for message in outgoing)
        return _Exchange(self, posted, wire_rows, incoming_rows, keep=outgoing_rows)

    def start_all_reduce(self, values: Tensor, op: Reduction = "sum") -> Pending:
        """Start to combine int64 values of all ranks; after `finish` all hold the same in place; *collective*.

        Until `finish`, leave the values alone. `finish` may come much later: other sums and exchanges can be started,
        finished and waited for meanwhile.

        Args:
            values: int64, contiguous, any shape, the same on every rank; may be empty.
            op: How the values of the ranks are combined.

        Raises:
            ValueError: If the values are not contiguous int64, or `op` is unknown.
            RuntimeError: From `finish`, if another rank failed or did not come before the deadline.
        """
        if op not in ("sum", "max", "min"):
            raise ValueError(f"all_reduce knows sum, max and min but got {op!r}.")
        if values.dtype != torch.int64 or not values.is_contiguous():
            raise ValueError(
                f"all_reduce takes contiguous int64 values but got {values.dtype}; sums of floats depend on the "
                "number of ranks, so turn them into integers first (integer_sums)."
            )
        call = self._next_call(f"all_reduce ({op}) of {values.numel()} values")
        with self._exchanging():
            wanted = values.detach()
            reduced = wanted.to(self._wire_device(values))
            posted = self._post_reduction(reduced, op, call)
        return _Exchange(self, posted, reduced, wanted, "all_reduce")

    def all_reduce(self, values: Tensor, op: Reduction = "sum") -> None:
        """The same at once, as `start_all_reduce` and `finish`; *collective*."""
        self.start_all_reduce(values, op).finish()

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Give every rank the payload of each rank, in the order of ranks; *collective*. Any sizes, also zero.

        Raises:
            RanksDiffer: On all ranks alike, if their programs are in different calls.
        """
        call = self._next_call("all_gather")
        with self.waiting("all_gather"):
            # With the place of each rank's call: all have gathered, but maybe not for the same purpose.
            letters = self._gather(json.dumps(where()).encode() + b"\n" + payload, call)
        calls, payloads = zip(*(letter.split(b"\n", 1) for letter in letters), strict=True)
        self._check_same([json.loads(text) for text in calls])
        return list(payloads)

    def broadcast(self, payload: bytes | None, root: int = 0) -> bytes:
        """Give every rank the payload of `root`; *collective*. Payloads of other ranks are ignored."""
        if self.rank == root and payload is None:
            raise ValueError(f"rank {root} is the root of a broadcast but has nothing to broadcast.")
        call = self._next_call(f"broadcast from {self.name_ranks([root])}")
        with self.waiting("broadcast"):
            return self._gather(payload if self.rank == root else None, call, [root])[0]

    def _check_sizes(self, sizes: Sequence[int], own: int) -> None:
        """Check the sizes that ranks announce, this one `own`, before memory is allocated for them."""
        if min(sizes) < 0 or sizes[self.rank] != own:
            brought = f"of which {self.name_ranks([self.rank])} brought {own} bytes"
            raise self.garbled(f"sizes, {brought}, came as {some_of([str(size) for size in sizes])}")
        if (size := sum(sizes)) > MAX_MESSAGE_BYTES:
            what = f"{self.kind} of {size} bytes in all ({self.name})"
            raise ValueError(f"{what}; the limit is {MAX_MESSAGE_BYTES}. Send it in pieces.")

    def garbled(self, seen: str) -> Garbled:
        """The error of something that did not arrive as it was sent."""
        return Garbled(f"{seen}: {self.name} ({self.library}) changes what it carries", self.remedy)

    def barrier(self) -> None:
        """Wait until every rank has come here; *collective*."""
        # A sum of one number: barriers of libraries have no deadline, or one of their own.
        self.all_reduce(torch.zeros(1, dtype=torch.int64, device="cpu"))

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        """Form smaller groups and return the transport of the one that this rank is in; *collective*.

        Args:
            groups: Ranks of each new group, ascending; every rank of this transport in exactly one.
        """
        ascending = all(list(group) == sorted(group) for group in groups)
        if not ascending or sorted(rank for group in groups for rank in group) != list(range(self.size)):
            raise ValueError(
                f"groups {[list(group) for group in groups]} should hold each of {self.size} ranks once, ascending."
            )
        number, members = next((i, list(group)) for i, group in enumerate(groups) if self.rank in group)
        call = self._next_call("split")
        with self.waiting("split"):
            child = self._split(number, members, [self.world_ranks[member] for member in members], call)
        child.board = self.board
        return child

    def waits(self) -> tuple[float, str] | None:
        """When this rank began to wait for others, on the monotonic clock, and for what; None if it does not.

        Any thread may ask.
        """
        since = self.waiting_since  # read once: it may become None before the next line
        return None if since is None else (since, self.waiting_in)

    def late(self) -> str | None:
        """Words for a deadline that has passed where the host itself does not wait; any thread may ask."""
        return None

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """Words for some ranks of this group: `rank 3` or `ranks 0, 2`."""
        return name_ranks([self.world_ranks[rank] for rank in ranks])

    @abstractmethod
    def abort(self, code: int) -> None:
        """End the work of all ranks, also of those that wait for this one. May not return."""

    def close(self) -> None:  # most have nothing to give back
        """Give back what the transport holds; *collective*. No other call may follow."""

    @abstractmethod
    def _post(self, outgoing: list[Message], incoming: list[Message], call: int) -> Posted: ...

    @abstractmethod
    def _post_reduction(self, values: Tensor, op: Reduction, call: int) -> Posted: ...

    @abstractmethod
    def _split(self, number: int, members: list[int], world_ranks: list[int], call: int) -> Transport: ...

    def _gather(self, payload: bytes | None, call: int, senders: Sequence[int] | None = None) -> list[bytes]:
        """The payloads of some ranks, all by default; others bring None.

        A sum tells the sizes, and carries payloads that are short; longer ones are exchanged.
        """
        letter = b"" if payload is None else _seal_of(payload) + payload
        own = torch.from_numpy(np.frombuffer(letter, np.uint8).copy())  # a copy: bytes are read-only
        table = torch.zeros(self.size, 1 + _IN_A_SUM // 8, dtype=torch.int64, device="cpu")
        table[self.rank, 0] = len(own)
        if len(own) <= _IN_A_SUM:
            table[self.rank, 1:].view(torch.uint8)[: len(own)] = own
        wire = table.to(self._wire_device(table))
        self._post_reduction(wire, "sum", call).finish()
        table = wire.cpu()
        self._check_sizes(counts := table[:, 0].tolist(), len(letter))
        letters = [row.view(torch.uint8)[:count] for row, count in zip(table[:, 1:], counts)]
        if max(counts) > _IN_A_SUM:
            own = own.to(wire.device)
            letters = list(torch.empty(sum(counts), dtype=torch.uint8, device=wire.device).split(counts))
            letters[self.rank].copy_(own)
            others = [peer for peer in range(self.size) if peer != self.rank]
            outgoing = [Message(peer, own) for peer in others if len(own)]
            incoming = [Message(peer, letters[peer]) for peer in others if counts[peer]]
            self._post(outgoing, incoming, call).finish()
        payloads = []
        for peer in range(self.size) if senders is None else senders:
            letter = letters[peer].cpu().numpy().tobytes()
            payloads.append(letter[_SEAL_BYTES:])
            if letter[:_SEAL_BYTES] != _seal_of(payloads[-1]):  # its readers trust it
                raise self.garbled(
                    f"{len(payloads[-1])} bytes of {self.kind} from {self.name_ranks([peer])} to "
                    f"{self.name_ranks([self.rank])} are not those that were sent"
                )
        return payloads

    def _next_call(self, kind: str) -> int:
        self.num_calls += 1
        if self._checks_calls:
            call, place = where()
            own = json.dumps([f"{kind} (number {self.num_calls}) in {self.doing or call or 'no phase'}", place])
            self.kind = "check of calls"
            with self.waiting(self.kind):
                self._check_same([json.loads(text) for text in self._gather(own.encode(), self.num_calls)])
        self.kind = kind
        return self.num_calls

    def _check_same(self, calls: Sequence[tuple[str, str]]) -> None:
        """Refuse data of another call than this rank's, given the call and the place of every rank."""
        if odd := differing_ranks([name for name, _ in calls]):
            rest = [rank for rank in range(len(calls)) if rank not in odd]
            raise RanksDiffer(
                f"ranks are in different calls: {self.name_ranks(odd)} in {in_words(*calls[odd[0]])}, "
                f"{self.name_ranks(rest)} in {in_words(*calls[rest[0]])}",
                "every rank makes every call: look for one that a rank skips (continue, break, an error it catches) or "
                "makes alone (if world.is_root)",
            )

    def _wire_device(self, rows: Tensor) -> torch.device:
        """The device on which these rows must lie to travel."""
        return torch.device("cpu") if rows.is_cuda and not self.takes_cuda else rows.device

    def _messages(self, verb: str, rows: Tensor, counts: Sequence[int]) -> list[Message]:
        """Cut a buffer at the counts, leaving out peers with nothing."""
        if not rows.is_contiguous():
            raise ValueError(f"the {verb} buffer {tuple(rows.shape)} is not contiguous; pass a block of rows.")
        numbers = [int(count) for count in counts]
        if len(numbers) != self.size or numbers[self.rank] != 0 or min(numbers) < 0 or sum(numbers) != len(rows):
            raise ValueError(
                f"{verb}_counts on {self.name_ranks([self.rank])}: expected {self.size} numbers that add up to the "
                f"{len(rows)} rows of the buffer, with 0 for this rank itself; got {numbers}."
            )
        messages = [Message(peer, of_peer) for peer, of_peer in enumerate(rows.split(numbers))]
        for message in messages:
            if message.num_bytes > MAX_MESSAGE_BYTES:
                raise ValueError(
                    f"{self.name_ranks([self.rank])} would {verb} {message.num_bytes} bytes in one message with "
                    f"{self.name_ranks([message.peer])}; the limit is {MAX_MESSAGE_BYTES}. Use more ranks or fewer "
                    "columns."
                )
        return [message for message in messages if message.num_bytes]  # rows without columns have none

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_exchanging += time.perf_counter() - began

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """A context in which this rank waits for others."""
        began = time.perf_counter()
        self.waiting_in, self.waiting_since = doing, time.monotonic()
        try:
            yield
        finally:
            self.waiting_since = None
            self.seconds_waiting += time.perf_counter() - began

    def elsewhere(self) -> AbstractContextManager[None]:
        """A context around a wait for other ranks by other means, such as the exchange of a host."""
        return nullcontext()

    def raise_timeout(self, silent: Sequence[int] = (), owing: Sequence[int] = ()) -> NoReturn:
        """Raise the error of a deadline that passed in the call that this rank waits in.

        `silent`, as far as they are known, have not sent something; `owing` did not take what was sent to them.
        """
        parts = [f"{self.name_ranks([self.rank])} waited {self.deadline:g} s in {self.waiting_in} ({self.name})"]
        if here := in_words(*where()):
            parts.append(f"it is in {here}")
        if silent:
            parts.append(f"nothing came from {self.name_ranks(silent)}")
        if owing:
            parts.append(f"{self.name_ranks(owing)} did not take what was sent")
        raise self.missing("; ".join(parts), [*silent, *owing])

    def missing(self, seen: str, suspects: Sequence[int] = (), known: bool = False) -> RankMissing:
        """The error that says which rank the others wait for, as far as the board or else the suspects tell.

        Args:
            seen: The observation of this rank, without a full stop.
            suspects: Ranks of this group that it may be.
            known: Whether these are certain, whatever the board says.
        """
        entries = [] if self.board is None else self.board.read()
        first = [] if known else missing(entries)
        first = first or [entries[self.world_ranks[rank]] for rank in suspects if entries]
        return RankMissing(seen, first, describe(entries, first) if entries else "")


@dataclass
class _Exchange:
    """A started exchange or sum: times the wait, and copies what arrived to where it is wanted."""

    transport: Transport
    posted: Posted
    arrived: Tensor
    wanted: Tensor
    doing: str = "an exchange"
    keep: Tensor | None = field(default=None, repr=False)  # the buffer sent from must outlive the exchange
    done: bool = False

    def progress(self) -> None:
        if not self.done:
            with self.transport._exchanging():
                self.posted.progress()

    def finish(self) -> Tensor:
        if not self.done:
            self.done = True  # also if it fails: there is nothing left to wait for
            with self.transport.waiting(self.doing):
                self.posted.finish()
                if self.arrived is not self.wanted:
                    self.wanted.copy_(self.arrived)
                self.keep = None
        return self.wanted


_SEAL_BYTES = 4
_IN_A_SUM = 256
"""Bytes of each rank that travel in the sum of sizes: most payloads are so short that it is all that is needed."""


def _seal_of(payload: bytes) -> bytes:
    """The checksum that stands before a payload, which will be read as sizes, names and numbers of rows."""
    return zlib.crc32(payload).to_bytes(_SEAL_BYTES, "little")
