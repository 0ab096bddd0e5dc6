"""What the ranks of `exchange.py` do, and what a message costs by it. Processes import it by name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from domainpar.events.store import EventStore
from domainpar.parallel.halo import AdjointHalo, Halo
from domainpar.parallel.mpi import import_mpi
from domainpar.parallel.part_loading import load_part
from domainpar.parallel.world import World
from domainpar.plan import PartitionPlan

EXCHANGES = ("fill", "gradient", "sum", "extend", "copy")
Seconds = dict[str, list[float]]


@dataclass(frozen=True)
class Price:
    """What talking costs by two numbers, fitted to messages that two ranks send each other at the same time.

    Attributes:
        latency: Seconds of a message without content.
        per_byte: Seconds of each further byte.
    """

    latency: float
    per_byte: float

    @classmethod
    def fit(cls, seconds: Mapping[int, float]) -> Price:
        """The price that comes near to measured messages, relative errors counting alike.

        Args:
            seconds: Of a message of so many bytes; the smallest one is taken as the latency.
        """
        sizes, times = np.array(sorted(seconds)), np.array([seconds[size] for size in sorted(seconds)])
        latency = float(times[0])
        weights = sizes / times**2
        return cls(latency, max(0.0, float((weights * (times - latency)).sum() / (weights * sizes).sum())))

    def exchange(self, messages: int, num_bytes: int) -> float:
        """Seconds of an exchange with so many neighbours, bytes counted in the direction that moves more."""
        return messages * self.latency + num_bytes * self.per_byte

    def all_reduce(self, num_bytes: int, ranks: int) -> float:
        """Seconds of a sum over ranks that is first scattered, then gathered, each in log2(ranks) rounds."""
        return 2 * self._rounds(ranks) + 2 * (ranks - 1) / ranks * num_bytes * self.per_byte

    def all_gather(self, num_bytes: int, ranks: int) -> float:
        """Seconds of gathering so many bytes of each rank, in log2(ranks) rounds."""
        return self._rounds(ranks) + (ranks - 1) * num_bytes * self.per_byte

    def _rounds(self, ranks: int) -> float:
        return math.ceil(math.log2(ranks)) * self.latency


@dataclass
class Traffic:
    """What one rank would put on the wire in a step.

    Attributes:
        exchanges: Neighbours, and bytes in the direction that moves more, of each exchange.
        reduced: Bytes of each sum over all ranks.
        gathered: Bytes that this rank gives to each gathering.
    """

    exchanges: list[tuple[int, int]] = field(default_factory=list)
    reduced: list[int] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)

    def seconds(self, price: Price, ranks: int) -> float:
        return (
            sum(price.exchange(*exchange) for exchange in self.exchanges)
            + sum(price.all_reduce(size, ranks) for size in self.reduced)
            + sum(price.all_gather(size, ranks) for size in self.gathered)
        )


# --- the exchanges of a plan -----------------------------------------------------------------------------------------


def exchanges(world: World, store: Path, grouping: str, width: int, repeats: int, inner: int) -> dict[str, Any]:
    """Seconds of the exchanges on the first event of a store, each the mean of `inner` in a row. *Collective*.

    They take turns with a plain copy of as many bytes as this rank sends and, on MPI, with the same messages sent by
    bare mpi4py.
    """
    opened = EventStore(store)
    with opened.open(opened.events()[0]) as event:
        plan = load_part(event, world.domain, grouping=grouping).halo.plan
    calls = _exchanges_of(plan, world, width)
    times = in_turns(calls, world, repeats, inner)
    world.take_counters()
    calls["fill"]()
    return {
        **times,
        "bytes_sent": world.take_counters().bytes_sent,
        "ghosts": plan.num_ghosts,
        "owned_nodes": plan.num_owned,
        "neighbours": int(((plan.send_counts > 0) | (plan.recv_counts > 0)).sum()),
    }


def in_turns(calls: Mapping[str, Callable[[], object]], world: World, repeats: int, inner: int) -> Seconds:
    """Seconds of each call on this rank, one value a turn; all ranks begin together. *Collective*."""
    seconds: Seconds = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            world.transport.barrier()
            began = time.perf_counter()
            for _ in range(inner):
                call()
            if turn:  # the first one warms up
                seconds[name].append((time.perf_counter() - began) / inner)
    return seconds


def _exchanges_of(plan: PartitionPlan, world: World, width: int) -> dict[str, Callable[[], object]]:
    halo, adjoint = Halo(plan, world.domain), AdjointHalo(plan, world.domain)
    generator = torch.Generator().manual_seed(world.rank)
    owned = torch.randn(plan.num_owned, width, generator=generator)
    ghosts = torch.zeros(plan.num_ghosts, width)
    # In the complete form owners hand out the gradient of the sums at both ends of edges: rows twice as wide.
    gradients, ghost_gradients = torch.cat([owned, owned], 1), torch.cat([ghosts, ghosts], 1)
    sent = np.ones((len(plan.send_rows), width), np.float32)
    copied = np.zeros_like(sent)
    calls: dict[str, Callable[[], object]] = {
        "fill": lambda: halo.fill_ghosts(owned, ghosts),
        "gradient": lambda: halo.fill_ghosts(gradients, ghost_gradients),
        "sum": lambda: halo.sum_to_owners(ghosts),
        "extend": lambda: adjoint.extend(owned),
        "copy": lambda: np.copyto(copied, sent),
    }
    if world.transport.name == "mpi":
        received = np.zeros((plan.num_ghosts, width), np.float32)
        calls["bare"] = _bare_exchange(_blocks(sent, plan.send_counts), _blocks(received, plan.recv_counts))
    return calls


def _blocks(rows: np.ndarray, counts: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Rows of each peer."""
    return np.split(rows, np.cumsum(counts)[:-1])


def _bare_exchange(send: Sequence[np.ndarray], receive: Sequence[np.ndarray]) -> Callable[[], object]:
    """Send and receive blocks, one per rank, with mpi4py alone; empty ones do not travel."""
    mpi = import_mpi()
    comm = mpi.COMM_WORLD

    def call() -> None:
        requests = [comm.Irecv(rows, peer) for peer, rows in enumerate(receive) if rows.size]
        requests += [comm.Isend(rows, peer) for peer, rows in enumerate(send) if rows.size]
        mpi.Request.Waitall(requests)

    return call


# --- messages of a given size ----------------------------------------------------------------------------------------


def messages(world: World, sizes: Sequence[int], repeats: int, inner: int) -> dict[int, Seconds]:
    """Seconds of messages that two ranks send each other, by their bytes. *Collective* over two ranks.

    `exchange` is the transport, both ways at once; `copy` a plain copy of as many bytes. On MPI also `bare`, mpi4py's
    own messages both ways at once, and `one way`, half of a ping and a pong.
    """
    return {size: in_turns(_messages_of(size, world), world, repeats, inner) for size in sizes}


def _messages_of(size: int, world: World) -> dict[str, Callable[[], object]]:
    send, receive = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    counts = [0 if rank == world.rank else size for rank in range(2)]
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    calls: dict[str, Callable[[], object]] = {
        "exchange": lambda: world.transport.start(send, counts, receive, counts).finish(),
        "copy": lambda: np.copyto(target, source),
    }
    if world.transport.name == "mpi":
        nothing = source[:0]
        blocks = [[nothing if rank == world.rank else rows for rank in range(2)] for rows in (source, target)]
        calls["bare"] = _bare_exchange(*blocks)
        calls["ping-pong"] = _ping_pong(world.rank, source, target)
    return calls


def _ping_pong(rank: int, send: np.ndarray, receive: np.ndarray) -> Callable[[], object]:
    comm = import_mpi().COMM_WORLD

    def ping() -> None:
        comm.Send(send, 1)
        comm.Recv(receive, 1)

    def pong() -> None:
        comm.Recv(receive, 0)
        comm.Send(send, 0)

    return ping if rank == 0 else pong
