"""Some training steps on a small event, to one hash: what must not depend on ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from domainpar.events.store import EventStore
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.team import set_threads
from domainpar.parallel.world import World
from domainpar.training.checkpoint import parameters_sha256
from domainpar.training.loop import Trainer
from domainpar.training.parts import PartLoader
from domainpar.training.sampler import samples_of
from domainpar.training.schedule import Schedule

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}
SAME_FOR_ALL = ("loss", "grad_norm", "edge_auc", "edges")


@dataclass(frozen=True)
class Way:
    """How to train: what must change no bit, but for the precision.

    Attributes:
        precision: `float32`, `float64` or `bf16` (edge states and their products).
        grouping: How tiles are gathered into parts.
        threads: Threads of a rank.
        recompute_every: As of `train`.
        hidden, graph_iters: Size of the network.
    """

    precision: str = "float32"
    grouping: str = "contiguous"
    threads: int = 1
    recompute_every: int | None = None
    hidden: int = 16
    graph_iters: int = 3


def make_trainer(way: Way, store: EventStore, world: World) -> Trainer:
    """A built-in network and all that trains it."""
    model = InteractionNetwork(
        len(store.feature_names),
        len(store.edge_feature_names),
        hidden=way.hidden,
        graph_iters=way.graph_iters,
        dtype=DTYPES[way.precision],
        products=torch.bfloat16 if way.precision == "bf16" else None,
        recompute_every=way.recompute_every,
    ).to(world.device)
    return Trainer(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loader=PartLoader(store, world, grouping=way.grouping, dtype=DTYPES[way.precision]),
        world=world,
        schedule=Schedule(1e-2, "constant", 0, 100, 10),
    )


def trained_sha256(way: Way, store: EventStore, world: World, num_steps: int = 2) -> str:
    """One hash of parameters, losses and metrics after some steps on all events of a store. *Collective*."""
    set_threads(way.threads)
    trainer = make_trainer(way, store, world)
    samples = samples_of(store.events(), None)
    told = [_told(trainer.step(samples, step)) for step in range(num_steps)]
    set_threads(1)
    return hashlib.sha256(f"{parameters_sha256(trainer.model)} {json.dumps(told)}".encode()).hexdigest()


def _told(record: dict[str, Any]) -> list[str]:
    return [repr(record[name]) for name in SAME_FOR_ALL]


def same_on_all(sha256: str, world: World) -> Sequence[str]:
    """The hash of every rank. *Collective*."""
    return [text.decode() for text in world.transport.all_gather(sha256.encode())]
