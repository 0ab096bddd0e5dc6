"""From the work of a network on this machine, and the sizes of events, to seconds and bytes of every grid of ranks.

With E edges of an event, P ranks, D of them to an event (G = P / D groups), part i of D with e_i local edges, g_i
ghosts and n_i neighbours; latency a and rate w of messages; B events of a step, dealt to groups by their cost:

    part        t_i = b (c + s e_i)            c, s: `Way.seconds`; b: all ranks of a machine are busy
    exchange    x_i = X n_i a + q g_i / w      X exchanges of a step, q bytes of a ghost: `StepWork`
    event       T(E) = max_i (t_i + x_i), in proportion to E but for b c
    reduction   S = 2 log2(P) a + 2 (P - 1) / P p / w
    step        max over groups of the sum of T over its events, + S

Batch parallelism alone is D = 1, domain parallelism alone G = 1, and what Buluc (2021) calls integrated all between.
Waiting is what ranks do not compute of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from domainpar.tracking.cost.cuts import Cut, Tiling
from domainpar.tracking.cost.machine import Machine
from domainpar.tracking.cost.pieces import Line, PartMemory

MOST_STEPS = 64
"""Of an epoch, whose events are dealt to groups."""

ALIKE = 0.02
"""Predictions that differ by less are one: fewer ranks come first."""


class Costly(Protocol):
    """An event, or a sector of it."""

    @property
    def cost(self) -> int:
        """Work to expect, in edges."""


T = TypeVar("T", bound=Costly)


class Way(NamedTuple):
    """A step of one event on one rank, if segments of so many iterations are computed again: seconds and memory."""

    seconds: Line
    memory: PartMemory


@dataclass(frozen=True, eq=False)
class StepWork:
    """What a training asks of this machine: a step of its network, weighed on it, and the events of its steps.

    Attributes:
        here: The machine.
        ways: By how often it computes again (`--recompute-every`).
        exchanges: Exchanges of rows in a step, both ways.
        bytes_of_ghost: Bytes that a rank sends in a step, for each ghost.
        bytes_of_parameters: Of the gradients of a step on the wire.
        bare: Bytes of a process before it has an event.
        event: Name of the event that is looked at in full.
        tiling: That event in the tiles of the store.
        largest: Edges of the largest event.
        steps: Events of some steps of an epoch.
        steps_per_epoch: Steps of an epoch.
    """

    here: Machine
    ways: Mapping[int | None, Way]
    exchanges: int
    bytes_of_ghost: float
    bytes_of_parameters: int
    bare: int
    event: str
    tiling: Tiling
    largest: int
    steps: Sequence[Sequence[Costly]]
    steps_per_epoch: int

    @property
    def edges(self) -> int:
        """Those of the event in full."""
        return int(self.tiling.edge_index.shape[1])


@dataclass(frozen=True)
class Grid:
    """One way to train, and what it is predicted to take.

    Attributes:
        ranks: All of them.
        domain_size: Ranks that share an event.
        grouping: How tiles are gathered into parts.
        recompute_every: As of `train`.
        seconds: Of a step.
        exchange: Seconds of it in exchanges of ghosts, on the rank that takes longest.
        reduction: Seconds of it in summing gradients.
        waiting: Share of the time of all ranks in which they do not compute.
        bytes_of_rank: Most memory of a rank, with that of its bare process.
        bytes_sent: Bytes of rows and gradients that a rank sends in a step, at most.
        fits: Whether there is so much memory.
    """

    ranks: int
    domain_size: int
    grouping: str
    recompute_every: int | None
    seconds: float
    exchange: float
    reduction: float
    waiting: float
    bytes_of_rank: int
    bytes_sent: int
    fits: bool


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def grids(
    machine: Machine, work: StepWork, numbers: Sequence[int], groupings: Sequence[str], seed: int = 0
) -> list[Grid]:
    """Every grid of ranks, the best first: those that fit into memory, by seconds of a step.

    Args:
        machine: The machine of the work.
        work: What is known.
        numbers: Numbers of ranks to look at.
        groupings: Ways to gather tiles that are compared.
        seed: Of groupings.
    """
    found = []
    for domain_size in sorted({size for ranks in numbers for size in divisors(ranks)}):
        if domain_size > work.tiling.tiles.num_tiles:
            continue
        for grouping in groupings[:1] if domain_size == 1 else groupings:
            cut = Cut.of(work.tiling, grouping, domain_size, seed)
            for ranks in (ranks for ranks in numbers if ranks % domain_size == 0):
                found += [predict(machine, work, cut, ranks, every) for every in work.ways]
    return sorted(found, key=lambda grid: (not grid.fits, grid.seconds, grid.ranks))


def predict(machine: Machine, work: StepWork, cut: Cut, ranks: int, every: int | None) -> Grid:
    """What one grid takes, whose events are cut like this one."""
    parts, domain_size, line = cut.quality, cut.num_parts, work.ways[every].seconds
    latency, rate = machine.latency, machine.rate
    fixed, of_parts = line.fixed, line.of_edge * parts.incident_edges
    busy = 1 + (machine.busy - 1) * (ranks - 1) / max(machine.ranks - 1, 1)
    # A whole event has neither neighbours nor ghosts.
    exchange = work.exchanges * parts.neighbours * latency + work.bytes_of_ghost * parts.incident_ghosts / rate
    of_event = busy * of_parts + exchange
    slowest = max(busy * fixed + float(of_event.max()), 1e-12)  # of an event without edges nothing may be left
    reduction = 0.0
    if ranks > 1:
        rounds = 2 * math.ceil(math.log2(ranks)) * latency
        reduction = rounds + 2 * (ranks - 1) / ranks * work.bytes_of_parameters / rate
    longest, computed = _dealt(work, ranks // domain_size, busy * fixed, float(of_event.max()))
    seconds = longest + reduction
    # Work that is spread evenly over all ranks would take this long.
    even = computed / (ranks // domain_size) * (busy * (fixed + of_parts.mean())) / slowest
    scale = work.largest / max(work.edges, 1)
    sizes = parts.owned_nodes, parts.incident_ghosts, parts.incident_edges
    of_rank = work.bare + int(work.ways[every].memory.of(*((count * scale).astype(np.int64) for count in sizes)).max())
    sent = int(work.bytes_of_ghost * parts.incident_ghosts.max())
    return Grid(
        ranks=ranks,
        domain_size=domain_size,
        grouping=cut.grouping,
        recompute_every=every,
        seconds=float(seconds),
        exchange=float(exchange.max()) * longest / slowest,
        reduction=reduction,
        waiting=float(max(0.0, 1 - even / max(seconds, 1e-12))),
        bytes_of_rank=of_rank,
        bytes_sent=sent + (2 * work.bytes_of_parameters if ranks > 1 else 0),
        fits=of_rank * ranks <= machine.memory,
    )


def deal(samples: Sequence[T], num_groups: int) -> list[list[T]]:
    """Hand samples to data groups so that costs balance: the costliest first, each to the least loaded group."""
    hands: list[list[T]] = [[] for _ in range(num_groups)]
    load = [0] * num_groups
    # Sorting is stable and `index` takes the first: every rank deals the same hands.
    for sample in sorted(samples, key=lambda sample: -sample.cost):
        group = load.index(min(load))
        hands[group].append(sample)
        load[group] += sample.cost
    return hands


def _dealt(work: StepWork, groups: int, fixed: float, of_event: float) -> tuple[float, float]:
    """Mean seconds of a step until its last group is done, and of all groups together.

    `fixed`, `of_event`: seconds of the event in full, of which only the second grow with edges.
    """
    longest, computed = [], []
    for samples in work.steps[:MOST_STEPS]:
        of_groups = [
            sum(fixed + of_event * sample.cost / max(work.edges, 1) for sample in hand)
            for hand in deal(samples, groups)
        ]
        longest.append(max(of_groups))
        computed.append(sum(of_groups))
    return float(np.mean(longest)), float(np.mean(computed))


def best(found: Sequence[Grid]) -> Grid | None:
    """The fastest that fits; of those within `ALIKE` of it, that of fewest ranks, then of most of them to an event."""
    fitting = [grid for grid in found if grid.fits]
    if not fitting:
        return None
    limit = fitting[0].seconds * (1 + ALIKE)
    alike = [grid for grid in fitting if grid.seconds <= limit]
    return min(alike, key=lambda grid: (grid.ranks, grid.recompute_every or 0, -grid.domain_size))


def by_ranks(found: Sequence[Grid]) -> Mapping[int, Grid]:
    """The best of each number of ranks, ascending."""
    numbers = sorted({grid.ranks for grid in found})
    of_number = {ranks: [grid for grid in found if grid.ranks == ranks] for ranks in numbers}
    return {ranks: best(these) or these[0] for ranks, these in of_number.items()}
