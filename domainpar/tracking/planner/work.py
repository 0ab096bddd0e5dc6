"""What a training step of a network takes on this machine, measured on pieces of an event: seconds, bytes, operations.

Two sectors of the event, of some ten thousand edges and of four times as many, take whole steps on one rank. What one
edge more took, with its share of the nodes, is what an edge takes; what is left does not grow with the event.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from domainpar.nn.flops import counted
from domainpar.nn.memory import Forecast, ModelSize
from domainpar.nn.uncompiled import pass_back
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.forecast import Tiling, tilings_of
from domainpar.tracking.part_loading import Sector, load_part
from domainpar.tracking.planner.machine import Machine, this_machine
from domainpar.tracking.training.forecast import memory_size
from domainpar.tracking.training.inputs import Lessons, open_lessons, steps_of
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.run import make_trainer
from domainpar.tracking.training.sampler import Sample

STORED = "stored"
"""The tiles of the store, whichever partitioner made them."""

EDGES_OF_PIECES = (25_000, 100_000)
SECONDS_OF_A_WAY = 2.0
BYTES_OF_LIMBS, BYTES_OF_SUMS = 16, 8
"""Of a parameter's gradient on the wire: two limbs of an exact sum, or a float64."""


@dataclass(frozen=True)
class Line:
    """What grows with the edges of a part: `fixed + edges * of_edge`."""

    fixed: float
    of_edge: float

    @classmethod
    def through(cls, few: tuple[float, float], many: tuple[float, float]) -> Line:
        """The line through two measured points (edges, value), of which neither number is negative."""
        if many[0] <= few[0] or many[1] <= few[1]:
            return cls(0.0, many[1] / max(many[0], 1))
        slope = (many[1] - few[1]) / (many[0] - few[0])
        return cls(0.0, many[1] / many[0]) if slope * few[0] > few[1] else cls(few[1] - slope * few[0], slope)


@dataclass(frozen=True)
class Work:
    """A network's step of one event on one rank of this machine.

    Attributes:
        seconds: By how often it computes again (`--recompute-every`).
        memory: Bytes of a rank, likewise.
        operations: Floating-point operations.
        exchanges: Exchanges of rows in a step, both ways.
        bytes_of_ghost: Bytes that a rank sends in a step, for each ghost.
        bytes_of_parameters: Of the gradients of a step on the wire.
        bare: Bytes of a process before it has an event.
        formula: Sizes of a network on stages, whose kernels on GPUs have a formula; None of others.
    """

    seconds: Mapping[int | None, Line]
    memory: Mapping[int | None, Forecast]
    operations: Line
    exchanges: int
    bytes_of_ghost: float
    bytes_of_parameters: int
    bare: int
    formula: ModelSize | None


@dataclass(frozen=True, eq=False)
class Events:
    """The events of an epoch, one of them in full.

    Attributes:
        name: Name of that event.
        tilings: That event in the tiles of the store, and in others that are compared with them.
        edges: Its edges.
        largest: Edges of the largest event.
        steps: Samples of some steps of an epoch.
    """

    name: str
    tilings: Sequence[Tiling]
    edges: int
    largest: int
    steps: Sequence[Sequence[Sample]]


@dataclass(frozen=True, eq=False)
class Basis:
    """What predictions are made from.

    Attributes:
        here: This machine.
        work: What a step takes on it.
        events: The events.
        steps_per_epoch: Steps of an epoch.
    """

    here: Machine
    work: Work
    events: Events
    steps_per_epoch: int


def basis_of(
    config: TrainConfig,
    store: Path,
    alone: World,
    seconds: float = SECONDS_OF_A_WAY,
    partitioners: Sequence[str] = (),
) -> Basis:
    """All that predictions are made from: this machine, the network's work on it, and the events.

    Args:
        config: The training.
        store: Its events.
        alone: A world of one rank.
        seconds: Time to repeat each step in, about.
        partitioners: Of tiles that are compared with those of the store.
    """
    lessons = open_lessons(config, store, alone)
    trainer = make_trainer(config, lessons, alone)
    bare = int(psutil.Process().memory_info().rss)  # when all is loaded but events, as in a run
    sample = max(lessons.train, key=lambda sample: sample.cost)
    work = measure_work(config, trainer, lessons, sample, bare, seconds)
    events = events_of(lessons, sample, steps_of(config, lessons.train, 0), partitioners, config.seed)
    return Basis(this_machine(), work, events, lessons.steps_per_epoch)


def events_of(
    lessons: Lessons,
    sample: Sample,
    steps: Sequence[Sequence[Sample]],
    partitioners: Sequence[str] = (),
    seed: int = 0,
) -> Events:
    """The events of some steps, of which one sample's is read, and put into other tiles, too."""
    with lessons.store.open(sample.record) as event:
        edge_ids = np.arange(event.num_edges)
        edge_index = np.stack([event.read_edges(name, edge_ids) for name in ("src", "dst")])
        tile_of_node = np.repeat(np.arange(event.num_tiles), np.diff(event.node_ptr))
        stored = Tiling(STORED, edge_index, event.tile_graph(), tile_of_node)
        return Events(
            name=sample.name,
            tilings=(stored, *tilings_of(event, partitioners, seed)),
            edges=event.num_edges,
            largest=max(one.cost for one in lessons.train + lessons.val),
            steps=steps,
        )


def measure_work(
    config: TrainConfig, trainer: Trainer, lessons: Lessons, sample: Sample, bare: int, seconds: float
) -> Work:
    """Take steps of a network on pieces of a sample, alone on this rank.

    Args:
        config: The training.
        trainer: Its network, in a world of one rank; it is trained a little.
        lessons: Its samples.
        sample: The event to cut pieces from.
        bare: Bytes of the process before.
        seconds: Time to repeat each step in, about.
    """
    model, pieces = trainer.model, pieces_of(sample)
    ways = (None, model.ways_to_recompute[-1]) if model.ways_to_recompute[1:] else (None,)
    # Copies are made before the first step: afterwards a network may know its ranks.
    exchanges, bytes_of_ghost = _exchanged(trainer, lessons, pieces[-1])
    memory = {every: memory_size(config, trainer, lessons, sample, every) for every in ways}
    lines, operations = {}, Line(0.0, 0.0)
    for every in ways:
        model.recompute(every)
        points = [seconds_of_steps(trainer, piece, seconds) for piece in pieces]
        lines[every] = Line.through(*(point[:2] for point in points))
        if every is None:
            operations = Line.through(*((edges, float(flops)) for edges, _, flops in points))
    model.recompute(None)
    of_parameter = BYTES_OF_LIMBS if config.is_bitwise else BYTES_OF_SUMS
    return Work(
        seconds=lines,
        memory=memory,
        operations=operations,
        exchanges=exchanges,
        bytes_of_ghost=bytes_of_ghost,
        bytes_of_parameters=of_parameter * sum(it.numel() for it in model.parameters() if it.requires_grad),
        bare=bare,
        formula=model.size if isinstance(model.size, ModelSize) else None,
    )


def pieces_of(sample: Sample) -> list[Sample]:
    """A smaller and a larger sector of an event: of so many edges, or a quarter and all of a small one."""
    record = sample.record
    numbers = [min(max(record.num_edges // wanted, 1), record.num_tiles) for wanted in EDGES_OF_PIECES]
    if numbers[0] == numbers[1]:
        numbers[0] = min(4 * numbers[1], max(record.num_tiles, 1))
    return [Sample(record, Sector(number // 2, number)) for number in numbers]


def seconds_of_steps(trainer: Trainer, piece: Sample, enough: float = SECONDS_OF_A_WAY) -> tuple[int, float, int]:
    """Local edges of a piece, seconds of a step of it, and operations."""
    trainer.step([piece], 0)  # loads it, and what is compiled
    with counted() as flops:
        trainer.step([piece], 1)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 3 or (time.perf_counter() - began < enough and len(seconds) < 9):
        start = time.perf_counter()
        trainer.step([piece], 2 + len(seconds))
        seconds.append(time.perf_counter() - start)
    part = trainer.loader.load(piece)
    return (part.graph.num_edges if part else 0), statistics.median(seconds), flops.total


def _exchanged(trainer: Trainer, lessons: Lessons, piece: Sample) -> tuple[int, float]:
    """Exchanges of rows in both passes, and bytes sent for each ghost: two ranks as threads share a piece."""

    def share(ranks: World) -> tuple[int, int, int]:
        with lessons.store.open(piece.record) as event:
            part = load_part(event, ranks.domain, sector=piece.sector, dtype=trainer.loader.dtype)
        model = models[ranks.rank]
        gradients, before, sent = model.gradients(), ranks.domain.num_exchanges, ranks.domain.bytes_sent
        tensors = model.read(part.graph, part.halo, 1).tensors
        pass_back(tensors, [torch.ones_like(tensor) for tensor in tensors])
        del gradients
        made = ranks.domain.num_exchanges - before
        return made, ranks.domain.bytes_sent - sent, part.graph.plan.num_ghosts

    # Before threads are there: they share torch's generator.
    models = [copy.deepcopy(trainer.model).cpu() for _ in range(2)]
    of_ranks = run_threads(share, 2, timeout=600.0)
    ghosts = sum(count for _, _, count in of_ranks)
    return of_ranks[0][0], sum(sent for _, sent, _ in of_ranks) / max(ghosts, 1)
