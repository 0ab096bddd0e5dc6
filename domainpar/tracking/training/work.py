"""Seconds and memory of a training step on each number of this machine's ranks, which run it on pieces of an event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from domainpar.common.limits import memory
from domainpar.measure.forecast import Line, PartMemory
from domainpar.measure.rates import median_seconds
from domainpar.parallel.world import World
from domainpar.tracking.config.train import TrainingFlags
from domainpar.tracking.cost.cuts import Cut, Tiling, stored_tiling
from domainpar.tracking.cost.event_pieces import sectors_of
from domainpar.tracking.training.inputs import TrainingData, open_training_data, steps_of
from domainpar.tracking.training.run import make_trainer
from domainpar.tracking.training.sampler import Sample, deal
from domainpar.tracking.training.step_memory import weight_of

SECONDS_OF_STEPS = 2.0
MOST_STEPS = 64
"""Of an epoch, whose events are dealt to groups."""


@dataclass(frozen=True)
class Estimate:
    """The cost of training on some ranks."""

    ranks: int  # all of them
    domain_size: int  # ranks that share an event
    recompute_every: int | None  # as in `train`
    seconds: float  # of a step
    bytes_of_rank: int  # most memory of a rank, with that of its bare process, for the largest event
    fits: bool  # whether all ranks have so much on this machine


@dataclass(frozen=True, eq=False)
class Work:
    """A training, and the memory of a step on one rank."""

    data: TrainingData  # the events
    largest: Sample  # the event that is looked at in full
    tiling: Tiling  # that event in the tiles of the store
    bare: int  # bytes of a process before it has an event
    memory: Mapping[int | None, PartMemory]  # of a part, by how often it computes again (`--recompute-every`)

    @classmethod
    def of(cls, config: TrainingFlags, store: Path) -> Work:
        """A training as one rank sees it."""
        alone = World.alone()
        data = open_training_data(config, store, alone)
        trainer = make_trainer(config, data, alone)
        trainer.model.exactness(alone.transport)  # loads the kernels
        bare = int(psutil.Process().memory_info().rss)  # when all is loaded but events, as in a run
        largest = max(data.train + data.val, key=lambda sample: sample.cost)
        where = data.store, largest.record, alone, trainer.loader.dtype
        weights = {every: weight_of(trainer.model, *where, every=every, shared=True) for every in ways(trainer)}
        with data.store.open(largest.record) as event:
            return cls(data, largest, stored_tiling(event), bare, weights)

    def estimates(self, config: TrainingFlags, ranks: int, domain_size: int, lines: Sequence[Line]) -> list[Estimate]:
        """What training takes on some ranks, by seconds of a step against the edges of a rank, for each way.

        An event of a step takes as long as its fullest part; the rest of a group's events follow.
        """
        parts = Cut.of(self.tiling, config.grouping, domain_size, config.seed).quality
        sizes = parts.owned_nodes, parts.incident_ghosts, parts.incident_edges
        share = int(parts.incident_edges.max()) / max(self.largest.cost, 1)
        steps = steps_of(config, self.data.train, config.seed, 0)[:MOST_STEPS]
        estimates = []
        for (every, weight), line in zip(self.memory.items(), lines):
            longest = [
                max(
                    sum(line.fixed + line.of_edge * share * sample.cost for sample in of_group)
                    for of_group in deal(samples, ranks // domain_size)
                )
                for samples in steps
            ]
            of_rank = self.bare + int(weight.of(*sizes).max())
            fits = of_rank * ranks <= min(psutil.virtual_memory().total, memory().limit)
            estimates.append(Estimate(ranks, domain_size, every, float(np.mean(longest)), of_rank, fits))
        return estimates


def ways(trainer: Any) -> list[int | None]:
    """To recompute nothing, and as much as takes least memory."""
    every = trainer.model.ways_to_recompute
    return list(dict.fromkeys((every[0], every[-1])))


def step_lines(
    world: World, config: TrainingFlags, store: Path, seconds: float = SECONDS_OF_STEPS
) -> list[list[float]]:
    """Seconds of a step against the edges of a rank, for each way to recompute: `Line`. *Collective*.

    Each group of ranks takes pieces of one event.
    """
    torch.set_num_threads(1)
    data = open_training_data(config, store, world)
    trainer = make_trainer(config, data, world)
    trainer.model.take_from_root(world)
    record, number, lines = max(data.train, key=lambda sample: sample.cost).record, count(), []
    for every in ways(trainer):
        trainer.model.recompute(every)
        points = []
        for sector in sectors_of(record, world.domain.size):
            samples = [Sample(record, sector)] * world.num_data_groups

            def step(samples: Sequence[Sample] = samples) -> Any:
                return trainer.step(samples, next(number))

            edges = max(step()["local_edges"])
            points.append((edges, median_seconds(step, seconds, world.transport, world.device)))
        line = Line.through(*points)
        lines.append([line.fixed, line.of_edge])
    return lines
