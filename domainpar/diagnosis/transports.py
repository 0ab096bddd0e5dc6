"""What transports bring and how fast: rows between neighbours in a ring, and a sum over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from domainpar.diagnosis.verdicts import Finding, failed, passed, skipped, warned
from domainpar.parallel.transport import Transport

MEBIBYTE = 2**20
SIZES = (MEBIBYTE, 4 * MEBIBYTE, 16 * MEBIBYTE)
SLOW_SECONDS = 1e-3
MOST_REPEATS = 2000
NOT_SENT = -1


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
        send = numbered(transport.rank, num_rows, device)
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
        """Rows that are not what the rank before has sent."""
        expected = numbered(self.origin, len(self.receive), self.receive.device)
        return int((self.receive != expected).sum())


def numbered(rank: int, num_rows: int, device: torch.device) -> Tensor:
    """Rows that no other rank has, int64 [num_rows, 1]."""
    return torch.arange(num_rows, device=device).add_((rank + 1) << 32).unsqueeze(1)


def check_transport(transport: Transport, seconds: float, device: torch.device | str = "cpu") -> Finding:
    """Send rows round, look at what arrives, and measure. *Collective*.

    Args:
        transport: Joins the ranks.
        seconds: Time to take, about.
        device: Where rows lie.
    """
    check, device = f"transport {transport.name}", torch.device(device)
    if transport.size == 1:
        return skipped(check, "one rank alone has nobody to talk to", "start several: mpiexec -n 2 ..., torchrun ...")
    trials = [Ring.of(transport, num_rows, device) for num_rows in (1, MEBIBYTE // 8)]
    for trial in trials:
        trial.exchange()
    wrong = [trial.num_wrong() for trial in trials]
    if _agreed(transport, sum(wrong)):
        return _garbled(check, trials, wrong)
    return _in_words(check, transport, measured(transport, seconds, device))


def _garbled(check: str, trials: list[Ring], wrong: list[int]) -> Finding:
    if not sum(wrong):
        return failed(check, "what arrived here is right, but not on another rank", "see the rank that is named")
    count = sum(len(trial.send) for trial in trials)
    origin = trials[0].transport.name_ranks([trials[0].origin])
    return failed(
        check,
        f"{sum(wrong):,} of {count:,} rows from {origin} arrived changed",
        "use another --transport; look at the network and at the MPI library, and put this into an issue",
        wrong_rows=sum(wrong),
    )


def measured(transport: Transport, seconds: float, device: torch.device) -> dict[str, float]:
    """Medians of the slowest rank: seconds of an exchange of 8 bytes and of a sum, bytes per second. *Collective*."""
    share = seconds / (2 + len(SIZES))
    value = torch.ones(1, dtype=torch.int64, device=device)
    figures = {
        "latency_seconds": _median(transport, Ring.of(transport, 1, device).exchange, share, device),
        "all_reduce_seconds": _median(transport, lambda: transport.all_reduce(value), share, device),
    }
    for size in SIZES:
        taken = _median(transport, Ring.of(transport, size // 8, device).exchange, share, device)
        figures[f"bytes_per_second_{size // MEBIBYTE}_MiB"] = size / taken
    return figures


def _median(transport: Transport, call: Callable[[], None], seconds: float, device: torch.device) -> float:
    """Median seconds of a collective call, on the slowest rank. *Collective*."""

    def timed() -> int:
        began = time.perf_counter_ns()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter_ns() - began

    timed()  # warms up
    estimate = max(_agreed(transport, min(timed() for _ in range(2))), 1)
    repeats = min(max(3, int(seconds * 1e9 / estimate)), MOST_REPEATS)
    transport.barrier()
    taken = sorted(timed() for _ in range(repeats))
    return max(_agreed(transport, taken[repeats // 2]), 1) / 1e9


def _agreed(transport: Transport, value: int) -> int:
    """The largest value of all ranks. *Collective*."""
    largest = torch.tensor([value], dtype=torch.int64)
    transport.all_reduce(largest, "max")
    return int(largest)


def _in_words(check: str, transport: Transport, figures: dict[str, float]) -> Finding:
    rates = ", ".join(
        f"{size // MEBIBYTE} MiB at {figures[f'bytes_per_second_{size // MEBIBYTE}_MiB'] / 1e9:.2f}" for size in SIZES
    )
    told = (
        f"{transport.size} ranks: 8 bytes to a neighbour in {1e6 * figures['latency_seconds']:.0f} us, "
        f"sum over all in {1e6 * figures['all_reduce_seconds']:.0f} us; rows of {rates} GB/s"
    )
    if figures["latency_seconds"] > SLOW_SECONDS:
        return warned(
            check,
            told,
            "slow: do ranks share cores, or a slow interface (GLOO_SOCKET_IFNAME, FI_PROVIDER, UCX_NET_DEVICES)?",
            **figures,
        )
    return passed(check, told, **figures)
