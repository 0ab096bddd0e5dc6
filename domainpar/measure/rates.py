"""Times of calls that ranks make together, and by them how fast a transport is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domainpar.parallel.transport import Transport

MEBIBYTE = 2**20
SIZES = (MEBIBYTE, 4 * MEBIBYTE, 16 * MEBIBYTE)
MOST_REPEATS = 2000
NOT_SENT = -1


def in_turns(
    calls: Mapping[str, Callable[[], object]], transport: Transport, repeats: int, inner: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call on this rank, one value a turn after one to warm up; all ranks begin together. *Collective*.

    Args:
        calls: By name; they take turns, so that a busy moment of the machine hits all alike.
        transport: Joins the ranks.
        repeats: Turns.
        inner: Calls in a row that one value is the mean of.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            transport.barrier()
            began = time.perf_counter()
            for _ in range(inner):
                call()
            if turn:
                seconds[name].append((time.perf_counter() - began) / inner)
    return seconds


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The largest value over ranks, repetition by repetition; `ranks[r]` are those of rank r."""
    return [max(values) for values in zip(*ranks, strict=True)]


@dataclass(frozen=True)
class Ring:
    """Rows that every rank sends to the next one and receives from the one before, numbered so that each is known.

    Attributes:
        transport: Joins the ranks, at least 2.
        send, receive: int64 [num_rows, 1].
    """

    transport: Transport
    send: Tensor
    receive: Tensor

    @classmethod
    def of(cls, transport: Transport, num_rows: int, device: torch.device) -> Ring:
        send = _numbered(transport.rank, num_rows, device)
        return cls(transport, send, torch.full_like(send, NOT_SENT))

    def exchange(self) -> None:
        """Send and receive once. *Collective*."""
        size, rank, count = self.transport.size, self.transport.rank, len(self.send)
        to, origin = [0] * size, [0] * size
        to[(rank + 1) % size], origin[self.origin] = count, count
        self.transport.start(self.send, to, self.receive, origin).finish()

    @property
    def origin(self) -> int:
        """The rank that rows come from."""
        return (self.transport.rank - 1) % self.transport.size

    def num_wrong(self) -> int:
        """Rows that are not those that the rank before has sent."""
        expected = _numbered(self.origin, len(self.receive), self.receive.device)
        return int((self.receive != expected).sum())


def _numbered(rank: int, num_rows: int, device: torch.device) -> Tensor:
    """Rows that no other rank has, int64 [num_rows, 1]."""
    return torch.arange(num_rows, device=device).add_((rank + 1) << 32).unsqueeze(1)


def transport_rates(transport: Transport, seconds: float, device: torch.device) -> dict[str, float]:
    """Medians of the slowest rank: seconds of an exchange of 8 bytes and of a sum, bytes per second. *Collective*."""
    share = seconds / (2 + len(SIZES))
    value = torch.ones(1, dtype=torch.int64, device=device)
    figures = {
        "latency_seconds": _median(transport, Ring.of(transport, 1, device).exchange, share, device),
        "all_reduce_seconds": _median(transport, lambda: transport.all_reduce(value), share, device),
    }
    for size in SIZES:
        median = _median(transport, Ring.of(transport, size // 8, device).exchange, share, device)
        figures[f"bytes_per_second_{size // MEBIBYTE}_MiB"] = size / median
    return figures


def _median(transport: Transport, call: Callable[[], None], seconds: float, device: torch.device) -> float:
    """Median seconds of a collective call, repeated for about some seconds, on the slowest rank. *Collective*."""

    def timed() -> int:
        began = time.perf_counter_ns()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter_ns() - began

    timed()  # warms up
    estimate = max(largest_of_ranks(transport, min(timed(), timed())), 1)
    repeats = min(max(3, int(1e9 * seconds / estimate)), MOST_REPEATS)
    transport.barrier()
    median = statistics.median_high(timed() for _ in range(repeats))
    return max(largest_of_ranks(transport, median), 1) / 1e9


def largest_of_ranks(transport: Transport, value: int) -> int:
    """The largest value of all ranks. *Collective*."""
    largest = torch.tensor([value], dtype=torch.int64)
    transport.all_reduce(largest, "max")
    return int(largest)
