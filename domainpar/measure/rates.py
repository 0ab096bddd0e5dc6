"""Times of collective calls, and the speed of a transport that follows from them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from domainpar.parallel.transport import Transport

MEBIBYTE = 2**20
SIZES = (MEBIBYTE, 4 * MEBIBYTE, 16 * MEBIBYTE)
MOST_REPEATS = 2000


def ring_exchange(transport: Transport, num_rows: int, device: torch.device) -> Callable[[], object]:
    """A call that sends rows, int64 [num_rows, 1], from each of at least 2 ranks to the next; it is *collective*."""
    send = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
    receive, to, origin = torch.empty_like(send), [0] * transport.size, [0] * transport.size
    # Of two ranks the next one is the one before: it stands in both lists.
    to[(transport.rank + 1) % transport.size] = origin[(transport.rank - 1) % transport.size] = num_rows
    return lambda: transport.start(send, to, receive, origin).finish()


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 2) -> float:
    """The fewest seconds of a call on a device, of some; its first time, which warms up, is left out."""
    call()
    return min(_nanoseconds(call, device) for _ in range(repeats)) / 1e9


def _nanoseconds(call: Callable[[], object], device: torch.device) -> int:
    began = time.perf_counter_ns()
    call()
    if device.type == "cuda":  # calls return before the GPU is done
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - began


def median_seconds(call: Callable[[], object], seconds: float, transport: Transport, device: torch.device) -> float:
    """Median seconds, on the slowest rank, of a call that is repeated for so long, three times at least. *Collective*.

    Its first time, which warms up, is left out. It computes on the device; all ranks repeat it alike.
    """
    timed = partial(_nanoseconds, call, device)
    timed()
    # By the slowest rank's estimate, so that all ranks repeat it alike.
    estimate = max(largest_of_ranks(transport, min(timed(), timed())), 1)
    repeats = min(max(3, int(1e9 * seconds / estimate)), MOST_REPEATS)
    transport.barrier()
    return max(largest_of_ranks(transport, statistics.median_high(timed() for _ in range(repeats))), 1) / 1e9


def transport_rates(transport: Transport, seconds: float, device: torch.device) -> dict[str, float]:
    """Medians of the slowest rank: seconds of an exchange of 8 bytes and of a sum, bytes per second. *Collective*."""

    def median(call: Callable[[], object]) -> float:
        return median_seconds(call, seconds / (2 + len(SIZES)), transport, device)

    value = torch.ones(1, dtype=torch.int64, device=device)
    seconds_of = {
        "latency_seconds": median(ring_exchange(transport, 1, device)),
        "all_reduce_seconds": median(lambda: transport.all_reduce(value)),
    }
    bytes_per_second = {
        f"bytes_per_second_{size // MEBIBYTE}_MiB": size / median(ring_exchange(transport, size // 8, device))
        for size in SIZES
    }
    return seconds_of | bytes_per_second


def largest_of_ranks(transport: Transport, value: int) -> int:
    """The largest value of all ranks. *Collective*."""
    largest = torch.tensor([value], dtype=torch.int64)
    transport.all_reduce(largest, "max")
    return int(largest)
