"""From a machine, the work of a network and the sizes of events to seconds, bytes and waiting of every grid of ranks.

With E edges of an event, P ranks, D of them to an event (G = P / D groups), part i of D with e_i local edges, g_i
ghosts and n_i neighbours; latency a and rate w of messages; B events of a step, dealt to groups by their cost:

    part        t_i = b (c + s e_i)            c, s: `Work.seconds`; b: all ranks of a machine are busy
    exchange    x_i = X n_i a + q g_i / w      X exchanges of a step, q bytes of a ghost: `Work`
    event       T(E) = max_i (t_i + x_i), in proportion to E but for b c
    reduction   S = 2 log2(P) a + 2 (P - 1) / P p / w
    step        max over groups of the sum of T over its events, + S + host

Batch parallelism alone is D = 1, domain parallelism alone G = 1, and what Buluc (2021) calls integrated all between.
Waiting is what ranks do not compute of a step. A part on a GPU takes max(operations / R, bytes / M) / u, and a launch
for each kernel. Of another processor than this one seconds go with operations a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from domainpar.nn.memory import ModelSize
from domainpar.tracking.events.forecast import Tiling
from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.planner.machine import Machine
from domainpar.tracking.planner.steps import divisors
from domainpar.tracking.planner.work import STORED, Basis, Events
from domainpar.tracking.training.sampler import deal
from partitioners.quality import Quality, measure

MOST_STEPS = 64
"""Of an epoch, whose events are dealt to groups."""

LAUNCHES_OF_ITERATION, LAUNCHES_OF_TORCH = 36, 272
"""Of a step in own kernels and in plain torch, as counted on a pretended GPU."""

ALIKE = 0.02
"""Predictions that differ by less are one: fewer ranks come first."""


@dataclass(frozen=True)
class Grid:
    """One way to train, and what it is predicted to take.

    Attributes:
        ranks: All of them.
        domain_size: Ranks that share an event.
        partitioner: What makes tiles; `stored`: as they are.
        grouping: How tiles are gathered into parts.
        recompute_every: As of `train`.
        seconds: Of a step.
        exchange: Seconds of it in exchanges of ghosts, on the rank that takes longest.
        reduction: Seconds of it in summing gradients.
        waiting: Share of the time of all ranks in which they do not compute.
        bytes_of_rank: Most memory of a rank: of its GPU, or with that of its bare process.
        bytes_sent: Bytes of rows and gradients that a rank sends in a step, at most.
        fits: Whether there is so much memory.
    """

    ranks: int
    domain_size: int
    partitioner: str
    grouping: str
    recompute_every: int | None
    seconds: float
    exchange: float
    reduction: float
    waiting: float
    bytes_of_rank: int
    bytes_sent: int
    fits: bool

    def as_record(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def grids(
    machine: Machine,
    basis: Basis,
    numbers: Sequence[int],
    groupings: Sequence[str],
    seed: int = 0,
    sizes: Sequence[int] | None = None,
) -> list[Grid]:
    """Every grid of ranks, the best first: those that fit into memory, by seconds of a step.

    Args:
        machine: The machine to predict for; maybe that of the basis.
        basis: What is known.
        numbers: Numbers of ranks to look at.
        groupings: Ways to gather tiles that are compared.
        seed: Of groupings.
        sizes: Ranks that may share an event; None: any number that divides them.
    """
    found = []
    for domain_size in sizes or sorted({size for ranks in numbers for size in divisors(ranks)}):
        for tiling, grouping in ways_to_cut(basis.events.tilings, groupings, domain_size, sizes is not None):
            cut = measure(tiling.edge_index, tiling.parts(domain_size, grouping, seed), domain_size)
            for ranks in (ranks for ranks in numbers if ranks % domain_size == 0):
                for every in basis.work.seconds:
                    found.append(predict(machine, basis, cut, ranks, (tiling.partitioner, grouping), every))
    return sorted(found, key=lambda grid: (not grid.fits, grid.seconds, grid.ranks))


def ways_to_cut(
    tilings: Sequence[Tiling], groupings: Sequence[str], parts: int, in_any_case: bool
) -> Iterator[tuple[Tiling, str]]:
    """Tiles and groupings that are compared for so many parts: an uncut event is the same in all of them."""
    for tiling in tilings if parts > 1 else tilings[:1]:
        if parts <= tiling.tiles.num_tiles or in_any_case:
            yield from ((tiling, grouping) for grouping in (groupings if parts > 1 else groupings[:1]))


def predict(machine: Machine, basis: Basis, cut: Quality, ranks: int, how: tuple[str, str], every: int | None) -> Grid:
    """What one grid takes, of which `cut` has the parts of an event, made by a partitioner and a grouping."""
    work, events, domain_size = basis.work, basis.events, len(cut.owned_nodes)
    nodes = cut.owned_nodes + cut.incident_ghosts
    latency, rate = machine.link(ranks)
    fixed, of_parts = seconds_of_parts(machine, basis, every, cut.incident_edges, nodes)
    busy = 1 + (machine.busy - 1) * (min(ranks, machine.ranks) - 1) / max(machine.ranks - 1, 1)
    exchange = np.zeros(domain_size)
    if domain_size > 1:
        inside = machine.link(domain_size)  # groups are inside machines where they can be
        exchange = work.exchanges * cut.neighbours * inside[0] + work.bytes_of_ghost * cut.incident_ghosts / inside[1]
    of_event = busy * of_parts + exchange
    slowest = max(busy * fixed + float(of_event.max()), 1e-12)  # of an event without edges nothing may be left
    reduction = 0.0
    if ranks > 1:
        rounds = 2 * math.ceil(math.log2(ranks)) * latency
        reduction = rounds + 2 * (ranks - 1) / ranks * work.bytes_of_parameters / rate
    longest, computed = _dealt(events, ranks // domain_size, busy * fixed, float(of_event.max()))
    seconds = longest + reduction + machine.host
    # Work that is spread evenly over all ranks would take this long.
    even = computed / (ranks // domain_size) * (busy * (fixed + of_parts.mean())) / slowest
    scale = events.largest / max(events.edges, 1)
    largest = [(count * scale).astype(np.int64) for count in (nodes, cut.incident_edges)]
    if machine.gpus:
        in_kernels = work.formula is not None
        each = [work.memory[every].bytes_on_gpu(int(n), int(e), in_kernels) for n, e in zip(*largest)]
        held = of_rank = int(max(each))
    else:
        of_rank = work.bare + int(work.memory[every].bytes_of(*largest).max())
        held = of_rank * min(ranks, machine.ranks)
    sent = int(work.bytes_of_ghost * cut.incident_ghosts.max()) if domain_size > 1 else 0
    return Grid(
        ranks=ranks,
        domain_size=domain_size,
        partitioner=how[0],
        grouping=how[1],
        recompute_every=every,
        seconds=float(seconds),
        exchange=float(exchange.max()) * longest / slowest,
        reduction=reduction,
        waiting=float(max(0.0, 1 - even / max(seconds, 1e-12))),
        bytes_of_rank=of_rank,
        bytes_sent=sent + (2 * work.bytes_of_parameters if ranks > 1 else 0),
        fits=held <= machine.memory,
    )


def seconds_of_parts(
    machine: Machine, basis: Basis, every: int | None, edges: IntArray, nodes: IntArray
) -> tuple[float, Any]:
    """Seconds of a rank that do not depend on its part, and those that do, [D], if nothing else runs."""
    work, line = basis.work, basis.work.seconds[every]
    if not machine.gpus:
        slower = basis.here.operations / machine.operations
        return line.fixed * slower, line.of_edge * slower * edges
    again = line.of_edge / max(work.seconds[None].of_edge, 1e-30)  # passes that are computed again
    operations = work.operations.of_edge * edges
    if work.formula is None:  # what torch reads and writes is not known: an operation for each byte
        touched, launches = operations, LAUNCHES_OF_TORCH
    else:
        touched = bytes_touched(work.formula, edges, nodes)
        launches = LAUNCHES_OF_ITERATION * work.formula.graph_iters
    busy = np.maximum(operations / machine.operations, touched / machine.bandwidth) / machine.reached
    return launches * machine.launch, busy * again


def bytes_touched(size: ModelSize, edges: Any, nodes: Any) -> Any:
    """Bytes that own kernels of a GPU read and write in a step.

    Edge states are read and written once, forward and backward; of the two rows of node products that an edge gathers,
    the cache answers 70 %.
    """
    row = size.item_bytes * size.hidden
    forward = edges * row * (2 + 2 + 2 * 0.3) + nodes * row * 12
    backward = edges * row * (4 + 2 + 4 * 0.3) + nodes * row * 16
    return (size.graph_iters + 1) * (forward + backward)


def _dealt(events: Events, groups: int, fixed: float, of_event: float) -> tuple[float, float]:
    """Mean seconds of a step until its last group is done, and of all groups together.

    `fixed`, `of_event`: seconds of the event in full, of which only the second grow with edges.
    """
    longest, computed = [], []
    for samples in events.steps[:MOST_STEPS]:
        of_groups = [
            sum(fixed + of_event * sample.cost / max(events.edges, 1) for sample in hand)
            for hand in deal(samples, groups)
        ]
        longest.append(max(of_groups))
        computed.append(sum(of_groups))
    return float(np.mean(longest)), float(np.mean(computed))


def best(found: Sequence[Grid]) -> Grid | None:
    """The fastest that fits; of those within `ALIKE` of it, that of fewest ranks, then of most of them to an event.

    Last comes that of the store's own tiles: others want a store made anew.
    """
    fitting = [grid for grid in found if grid.fits]
    if not fitting:
        return None
    limit = fitting[0].seconds * (1 + ALIKE)
    alike = [grid for grid in fitting if grid.seconds <= limit]
    return min(
        alike,
        key=lambda grid: (grid.ranks, grid.recompute_every or 0, -grid.domain_size, grid.partitioner != STORED),
    )


def by_ranks(found: Sequence[Grid]) -> Mapping[int, Grid]:
    """The best of each number of ranks, ascending."""
    numbers = sorted({grid.ranks for grid in found})
    of_number = {ranks: [grid for grid in found if grid.ranks == ranks] for ranks in numbers}
    return {ranks: best(these) or these[0] for ranks, these in of_number.items()}
