"""Training steps on any layout of ranks, and one hash of everything that came of them: the same in every layout."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from domainpar.common.agreement import gather
from domainpar.nn.program import set_threads
from domainpar.parallel.world import World
from domainpar.runs.checkpoint import parameters_sha256
from domainpar.tracking.config.train import TrainingFlags
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.inputs import open_training_data
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.run import make_trainer
from domainpar.tracking.training.sampler import samples_of

SAME_FOR_ALL = ("loss", "grad_norm", "edge_auc_pooled", "edges")
SMALL = TrainingFlags(hidden=16, graph_iters=3, lr=1e-2, lr_schedule="constant", warmup=0, standardise=False)


def trained(
    config: TrainingFlags, store: EventStore, world: World, num_steps: int, num_events: int | None = None
) -> tuple[Trainer, list[dict[str, Any]]]:
    """Take some steps, each on all of the first events of a store. *Collective*.

    Returns:
        The trainer afterwards, and the record of each step.
    """
    set_threads(config.threads or 1)
    trainer = make_trainer(config, open_training_data(config, store.path, world), world)
    samples = samples_of(store.events()[:num_events], None)
    records = [trainer.step(samples, step) for step in range(num_steps)]
    set_threads(1)
    return trainer, records


def trained_sha256(config: TrainingFlags, store: EventStore, world: World, num_steps: int = 2) -> str:
    """One hash of parameters, losses and metrics after some steps. *Collective*."""
    trainer, records = trained(config, store, world, num_steps)
    figures = [[repr(record[name]) for name in SAME_FOR_ALL] for record in records]
    return hashlib.sha256(f"{parameters_sha256(trainer.model)} {json.dumps(figures)}".encode()).hexdigest()


def distinct_hashes(config: TrainingFlags, store: EventStore, world: World, grid: World) -> list[str]:
    """The distinct hashes of all ranks of a world, each training in its `grid`: one if they agree. *Collective*."""
    return sorted(set(gather(world.transport, trained_sha256(config, store, grid))))
