"""The samples of each step, a function of (seed, epoch) and never of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from domainpar.tracking.events.store import EventRecord
from domainpar.tracking.part_loading import Sector, all_sectors
from partitioners import Sectors, number_of_sectors

Sampling = Literal["shuffle", "buckets", "budget"]


@dataclass(frozen=True)
class Sample:
    """A whole event, or in naive mode one sector of it; a training step takes some."""

    record: EventRecord
    sector: Sector | None = None

    @property
    def cost(self) -> int:
        """Work to expect, in edges."""
        return self.record.num_edges // self._num_sectors

    @property
    def num_nodes(self) -> int:
        """Nodes, about."""
        return self.record.num_nodes // self._num_sectors

    @property
    def _num_sectors(self) -> int:
        return number_of_sectors(self.sector.of) if self.sector else 1

    @property
    def name(self) -> str:
        """The event, with its sector."""
        sector = f" sector {self.sector.number} of {self.sector.of}" if self.sector else ""
        return f"{self.record.event}{sector}"


def deal(samples: Sequence[Sample], num_groups: int) -> list[list[Sample]]:
    """Deal samples to data groups so that costs balance: the costliest first, each to the least loaded group."""
    of_groups: list[list[Sample]] = [[] for _ in range(num_groups)]
    load = [0] * num_groups
    # Sorting is stable and `index` takes the first: every rank deals alike.
    for sample in sorted(samples, key=lambda sample: -sample.cost):
        group = load.index(min(load))
        of_groups[group].append(sample)
        load[group] += sample.cost
    return of_groups


def samples_of(records: Sequence[EventRecord], sectors: Sectors | None) -> list[Sample]:
    """Every event as one sample, or each of its sectors."""
    return [Sample(record, sector) for record in records for sector in all_sectors(sectors)]


STEPS_OF_A_BUCKET, FEWEST_BUCKETS = 8, 4
"""Steps whose samples are alike in size, and shuffled among each other; fewer where buckets would be few."""


def steps_of_epoch(
    samples: Sequence[Sample],
    per_step: int,
    seed: int,
    epoch: int,
    how: Sampling = "shuffle",
    node_budget: int | None = None,
) -> list[list[Sample]]:
    """Shuffle the samples and cut them into steps: a function of seed and epoch.

    Args:
        per_step: Samples of a step; the last step may be smaller.
        seed, epoch: Decide the order.
        how: `shuffle`. `buckets`: a step takes samples of about one size, so that who computes them ends together.
            `budget`: a step takes samples until their nodes would be more than a budget.
        node_budget: Nodes of a step, with `budget`; a larger sample is a step of its own.
    """
    # A generator of its own for each epoch: a resumed run draws the order that the first one would have.
    random = np.random.default_rng([seed, epoch])
    shuffled = [samples[index] for index in random.permutation(len(samples))]
    if how == "budget":
        assert node_budget is not None
        within: list[list[Sample]] = []
        nodes = 0
        for sample in shuffled:
            nodes += sample.num_nodes
            if not within or nodes > node_budget:
                within.append([])
                nodes = sample.num_nodes
            within[-1].append(sample)
        return within
    if how == "buckets":
        # Of those that make no whole step any size may be left over; sorting keeps the order of equals.
        whole = len(shuffled) // per_step * per_step
        by_size = sorted(shuffled[:whole], key=lambda sample: sample.cost)
        length = per_step * max(1, min(STEPS_OF_A_BUCKET, whole // per_step // FEWEST_BUCKETS))
        buckets = [by_size[first : first + length] for first in range(0, whole, length)]
        mixed = [bucket[index] for bucket in buckets for index in random.permutation(len(bucket))]
        steps = [mixed[first : first + per_step] for first in range(0, whole, per_step)]
        rest = [shuffled[whole:]] if whole < len(shuffled) else []
        return [steps[index] for index in random.permutation(len(steps))] + rest
    return [shuffled[first : first + per_step] for first in range(0, len(shuffled), per_step)]
