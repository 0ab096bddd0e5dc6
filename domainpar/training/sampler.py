"""The samples of each step, a function of (seed, epoch) and never of the ranks, and their share-out to data groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from domainpar.events.store import EventRecord
from domainpar.parallel.part_loading import Sector


@dataclass(frozen=True)
class Sample:
    """A whole event, or in naive mode one sector of it; a training step takes some."""

    record: EventRecord
    sector: Sector | None = None

    @property
    def cost(self) -> int:
        """Work to expect, in edges."""
        return self.record.num_edges // (self.sector.of if self.sector else 1)

    @property
    def name(self) -> str:
        """The event, with its sector."""
        sector = f" sector {self.sector.number} of {self.sector.of}" if self.sector else ""
        return f"{self.record.event}{sector}"


def samples_of(records: Sequence[EventRecord], num_sectors: int | None) -> list[Sample]:
    """Every event as one sample, or as `num_sectors` samples of their own."""
    if num_sectors is None:
        return [Sample(record) for record in records]
    return [Sample(record, Sector(number, num_sectors)) for record in records for number in range(num_sectors)]


def steps_of_epoch(samples: Sequence[Sample], per_step: int, seed: int, epoch: int) -> list[list[Sample]]:
    """Shuffle the samples and cut them into steps; the last step may be smaller."""
    # A generator of its own for each epoch: a resumed run draws the order that the first one would have.
    order = np.random.default_rng([seed, epoch]).permutation(len(samples))
    shuffled = [samples[index] for index in order]
    return [shuffled[first : first + per_step] for first in range(0, len(shuffled), per_step)]


def deal(samples: Sequence[Sample], num_groups: int) -> list[list[Sample]]:
    """Hand samples to data groups so that costs balance: the costliest first, each to the least loaded group."""
    hands: list[list[Sample]] = [[] for _ in range(num_groups)]
    load = [0] * num_groups
    # Sorting is stable and `index` takes the first: every rank deals the same hands.
    for sample in sorted(samples, key=lambda sample: -sample.cost):
        group = load.index(min(load))
        hands[group].append(sample)
        load[group] += sample.cost
    return hands
