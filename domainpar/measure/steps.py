"""Training steps on any layout of ranks: the settings, the steps, and one hash of everything that came of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from domainpar.events.store import EventStore
from domainpar.nn.catalogue import ON_STAGES
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.team import set_threads
from domainpar.parallel.world import World
from domainpar.training.checkpoint import parameters_sha256
from domainpar.training.loop import Schedule, Trainer
from domainpar.training.parts import PartLoader
from domainpar.training.sampler import samples_of

PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}
SAME_FOR_ALL = ("loss", "grad_norm", "edge_auc", "edges")


@dataclass(frozen=True)
class Training:
    """A built-in network and how it is trained. The last three attributes change no bit.

    Attributes:
        model: One of `ON_STAGES`.
        hidden: Width of states.
        graph_iters: Iterations.
        precision: `float32`, `float64`, or `bf16`: edge states and their products in bfloat16, all else in float32.
        dropout: Share of the edge states' numbers that is dropped.
        seed: Of the first weights and of random groupings.
        rate: Learning rate.
        grouping: How tiles are gathered into parts.
        threads: Threads of a rank.
        recompute_every: As of `train`.
    """

    model: str = "interaction"
    hidden: int = 64
    graph_iters: int = 4
    precision: str = "float32"
    dropout: float = 0.0
    seed: int = 0
    rate: float = 1e-3
    grouping: str = "contiguous"
    threads: int = 1
    recompute_every: int | None = None

    def network(self, store: EventStore) -> InteractionNetwork:
        """The network with its first weights."""
        return ON_STAGES[self.model](
            len(store.feature_names),
            len(store.edge_feature_names),
            hidden=self.hidden,
            graph_iters=self.graph_iters,
            seed=self.seed,
            dtype=PRECISIONS[self.precision],
            products=torch.bfloat16 if self.precision == "bf16" else None,
            recompute_every=self.recompute_every,
            dropout=self.dropout,
        )

    def trainer(self, store: EventStore, world: World, loader: PartLoader | None = None) -> Trainer:
        """The network and all that trains it, as `train` makes them."""
        network, dtype = self.network(store).to(world.device), PRECISIONS[self.precision]
        return Trainer(
            model=network,
            optimizer=torch.optim.AdamW(network.parameters(), lr=self.rate, weight_decay=0.01),
            loader=loader or PartLoader(store, world, grouping=self.grouping, dtype=dtype, seed=self.seed),
            world=world,
            schedule=Schedule(self.rate, "constant", 0, 1, 1),
        )


def trained(
    training: Training, store: EventStore, world: World, num_steps: int, num_events: int | None = None
) -> tuple[Trainer, list[dict[str, Any]]]:
    """Take some steps, each on all of the first events of a store. *Collective*.

    Returns:
        The trainer afterwards, and the record of each step.
    """
    set_threads(training.threads)
    trainer = training.trainer(store, world)
    samples = samples_of(store.events()[:num_events], None)
    records = [trainer.step(samples, step) for step in range(num_steps)]
    set_threads(1)
    return trainer, records


def trained_sha256(training: Training, store: EventStore, world: World, num_steps: int = 2) -> str:
    """One hash of parameters, losses and metrics after some steps. *Collective*."""
    trainer, records = trained(training, store, world, num_steps)
    figures = [[repr(record[name]) for name in SAME_FOR_ALL] for record in records]
    return hashlib.sha256(f"{parameters_sha256(trainer.model)} {json.dumps(figures)}".encode()).hexdigest()
