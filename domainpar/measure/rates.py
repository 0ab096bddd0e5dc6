"""Times of calls that ranks make together, and by them how fast a transport is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

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
            if turn:  # the first warms up
                seconds[name].append((time.perf_counter() - began) / inner)
    return seconds


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The largest value over ranks, repetition by repetition; `ranks[r]` are those of rank r."""
    return [max(values) for values in zip(*ranks, strict=True)]


class Ring:
    """Rows that every rank sends to the next one and receives from the one before, numbered so that each is known.

    Attributes:
        transport: Joins the ranks, at least 2.
        origin: The rank that rows come from.
        send, receive: int64 [num_rows, 1].
    """

    def __init__(self, transport: Transport, num_rows: int, device: torch.device) -> None:
        self.transport, self.origin = transport, (transport.rank - 1) % transport.size
        self.send = _numbered(transport.rank, num_rows, device)
        self.receive = torch.full_like(self.send, NOT_SENT)

    def exchange(self) -> None:
        """Send and receive once. *Collective*."""
        size, count = self.transport.size, len(self.send)
        to, origin = [0] * size, [0] * size
        # Of two ranks the next one is the one before: it stands in both lists.
        to[(self.transport.rank + 1) % size], origin[self.origin] = count, count
        self.transport.start(self.send, to, self.receive, origin).finish()

    def num_wrong(self) -> int:
        """Rows that are not those that the rank before has sent."""
        expected = _numbered(self.origin, len(self.receive), self.receive.device)
        return int((self.receive != expected).sum())


def _numbered(rank: int, num_rows: int, device: torch.device) -> Tensor:
    """Rows that no other rank has, int64 [num_rows, 1]."""
    return torch.arange(num_rows, device=device).add_((rank + 1) << 32).unsqueeze(1)  # the rank in the upper half


def transport_rates(transport: Transport, seconds: float, device: torch.device) -> dict[str, float]:
    """Medians of the slowest rank: seconds of an exchange of 8 bytes and of a sum, bytes per second. *Collective*."""
    share = seconds / (2 + len(SIZES))

    def median(call: Callable[[], None]) -> float:
        """Seconds of a call that is repeated for its share of the time."""

        def timed() -> int:
            began = time.perf_counter_ns()
            call()
            if device.type == "cuda":  # calls return before the GPU is done
                torch.cuda.synchronize(device)
            return time.perf_counter_ns() - began

        timed()  # warms up
        # By the slowest rank's estimate, so that all ranks repeat it alike.
        estimate = max(largest_of_ranks(transport, min(timed(), timed())), 1)
        repeats = min(max(3, int(1e9 * share / estimate)), MOST_REPEATS)
        transport.barrier()
        return max(largest_of_ranks(transport, statistics.median_high(timed() for _ in range(repeats))), 1) / 1e9

    value = torch.ones(1, dtype=torch.int64, device=device)
    seconds_of = {
        "latency_seconds": median(Ring(transport, 1, device).exchange),
        "all_reduce_seconds": median(lambda: transport.all_reduce(value)),
    }
    bytes_per_second = {
        f"bytes_per_second_{size // MEBIBYTE}_MiB": size / median(Ring(transport, size // 8, device).exchange)
        for size in SIZES
    }
    return seconds_of | bytes_per_second


def largest_of_ranks(transport: Transport, value: int) -> int:
    """The largest value of all ranks. *Collective*."""
    largest = torch.tensor([value], dtype=torch.int64)
    transport.all_reduce(largest, "max")
    return int(largest)
