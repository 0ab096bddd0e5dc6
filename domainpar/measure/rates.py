"""Times of collective calls, and the speed of a transport that follows from them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from domainpar.parallel.transport import Transport

MEBIBYTE = 2**20
SIZES = (MEBIBYTE, 4 * MEBIBYTE, 16 * MEBIBYTE)
MOST_REPEATS = 2000
NOT_SENT = -1


class RingExchange:
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


def median_seconds(call: Callable[[], object], seconds: float, transport: Transport, device: torch.device) -> float:
    """Median seconds, on the slowest rank, of a call that is repeated for so long, three times at least. *Collective*.

    Args:
        call: Its first time, which warms up, is left out.
        seconds: Time to repeat it in, about.
        transport: Joins the ranks that repeat it alike.
        device: Where it computes.
    """

    def timed() -> int:
        began = time.perf_counter_ns()
        call()
        if device.type == "cuda":  # calls return before the GPU is done
            torch.cuda.synchronize(device)
        return time.perf_counter_ns() - began

    timed()
    # By the slowest rank's estimate, so that all ranks repeat it alike.
    estimate = max(largest_of_ranks(transport, min(timed(), timed())), 1)
    repeats = min(max(3, int(1e9 * seconds / estimate)), MOST_REPEATS)
    transport.barrier()
    return max(largest_of_ranks(transport, statistics.median_high(timed() for _ in range(repeats))), 1) / 1e9


def transport_rates(transport: Transport, seconds: float, device: torch.device) -> dict[str, float]:
    """Medians of the slowest rank: seconds of an exchange of 8 bytes and of a sum, bytes per second. *Collective*."""

    def median(call: Callable[[], None]) -> float:
        return median_seconds(call, seconds / (2 + len(SIZES)), transport, device)

    value = torch.ones(1, dtype=torch.int64, device=device)
    seconds_of = {
        "latency_seconds": median(RingExchange(transport, 1, device).exchange),
        "all_reduce_seconds": median(lambda: transport.all_reduce(value)),
    }
    bytes_per_second = {
        f"bytes_per_second_{size // MEBIBYTE}_MiB": size / median(RingExchange(transport, size // 8, device).exchange)
        for size in SIZES
    }
    return seconds_of | bytes_per_second


def largest_of_ranks(transport: Transport, value: int) -> int:
    """The largest value of all ranks. *Collective*."""
    largest = torch.tensor([value], dtype=torch.int64)
    transport.all_reduce(largest, "max")
    return int(largest)
