"""Training steps on any layout of ranks: the settings, the steps, and one hash of everything that came of them.

Layouts of the same ranks must end with the same hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from domainpar.common import timeouts
from domainpar.common.agreement import gather
from domainpar.common.words import several
from domainpar.nn.program import set_threads
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.runs.checkpoint import parameters_sha256
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.cost.model import divisors
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.inputs import open_lessons
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.run import make_trainer
from domainpar.tracking.training.sampler import samples_of

SAME_FOR_ALL = ("loss", "grad_norm", "edge_auc_pooled", "edges")


def trained(
    config: TrainConfig, store: EventStore, world: World, num_steps: int, num_events: int | None = None
) -> tuple[Trainer, list[dict[str, Any]]]:
    """Take some steps, each on all of the first events of a store. *Collective*.

    Returns:
        The trainer afterwards, and the record of each step.
    """
    set_threads(config.threads or 1)
    trainer = make_trainer(config, open_lessons(config, store.path, world), world)
    samples = samples_of(store.events()[:num_events], None)
    records = [trainer.step(samples, step) for step in range(num_steps)]
    set_threads(1)
    return trainer, records


def trained_sha256(config: TrainConfig, store: EventStore, world: World, num_steps: int = 2) -> str:
    """One hash of parameters, losses and metrics after some steps. *Collective*."""
    trainer, records = trained(config, store, world, num_steps)
    figures = [[repr(record[name]) for name in SAME_FOR_ALL] for record in records]
    return hashlib.sha256(f"{parameters_sha256(trainer.model)} {json.dumps(figures)}".encode()).hexdigest()


# --- the same training on every layout of some ranks: all must agree -----------------------------------------------

THREAD_RANKS = (1, 2, 3, 8)
OTHER_GROUPINGS: tuple[Literal["metis", "random"], ...] = ("metis", "random")
SMALL = TrainConfig(hidden=16, graph_iters=3, lr=1e-2, lr_schedule="constant", warmup=0, standardise=False)
PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "float64": {"dtype": "float64"}, "bf16": {"precision": "bf16"}}
"""Flags of each precision."""


@dataclass(frozen=True)
class TrainingLayout:
    """A training, and the ranks that do it.

    Attributes:
        name: In words.
        training: How to train.
        ranks: `alone`: each rank by itself, which tells machines that compute differently. `processes`: the ranks in
            domain groups. `threads`: of rank 0; the other ranks wait.
        size: Ranks that share an event.
    """

    name: str
    training: TrainConfig
    ranks: Literal["alone", "processes", "threads"]
    size: int = 1

    def hashes(self, store: EventStore, world: World) -> list[str]:
        """The distinct hashes of the layout's ranks, one if they agree; the same on every rank. *Collective*."""
        if self.ranks == "threads":
            hashes = [""]
            if world.is_root:
                of_threads = partial(trained_sha256, self.training, store)
                hashes = run_threads(of_threads, self.size, timeout=timeouts.SMALL_GRAPH, domain_size=self.size)
            return sorted(set(gather(world.transport, hashes)[0]))
        grid = World.alone() if self.ranks == "alone" else World.over(world.transport, domain_size=self.size)
        hashes = gather(world.transport, trained_sha256(self.training, store, grid))
        if self.ranks == "processes" and grid.domain is not grid.transport:
            grid.domain.close()
        return sorted(set(hashes))


def layouts(world: World) -> Iterator[TrainingLayout]:
    """Every layout, the same on every rank; the most important first."""
    size, together = world.size, world.size > 1
    for flags in PRECISIONS.values():
        training = replace(SMALL, **flags)
        yield TrainingLayout("each rank alone", training, "alone")
        if together:
            yield TrainingLayout(f"{size} ranks as one domain", training, "processes", size)
        yield TrainingLayout("4 threads as ranks", training, "threads", 4)
    for domain_size in divisors(size)[:-1]:
        yield TrainingLayout(f"{size // domain_size} groups of {domain_size}", SMALL, "processes", domain_size)
    for grouping in OTHER_GROUPINGS:
        training = replace(SMALL, grouping=grouping)
        if together:
            yield TrainingLayout(f"{size} ranks with {grouping} parts", training, "processes", size)
        yield TrainingLayout(f"3 threads as ranks with {grouping} parts", training, "threads", 3)
    sparing = replace(SMALL, threads=3, recompute_every=2)
    yield TrainingLayout(f"{several(size, 'rank')} of 3 threads that recompute", sparing, "processes", size)
    for count in THREAD_RANKS:
        name = "1 thread as the only rank" if count == 1 else f"{count} threads as ranks"
        yield TrainingLayout(name, SMALL, "threads", count)
