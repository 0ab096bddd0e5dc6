"""What ranks feel of each other: the speed of their messages, and of a step while all of them compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from domainpar.measure.rates import largest_of_ranks, transport_rates
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.planner.work import pieces_of, seconds_of_steps
from domainpar.tracking.training.inputs import open_lessons
from domainpar.tracking.training.run import make_trainer

SECONDS_OF_MESSAGES = 1.0


def crowd(world: World, config: TrainConfig, store: Path) -> dict[str, Any]:
    """Latency, rate, and `busy`: the time of a step on all ranks at once over that on one. *Collective*.

    Every rank takes steps of its own, on the same piece of an event; rank 0 takes them alone before.
    """
    torch.set_num_threads(1)
    rates = transport_rates(world.transport, SECONDS_OF_MESSAGES, torch.device("cpu"))
    own = World.alone()
    lessons = open_lessons(config, store, own)
    trainer = make_trainer(config, lessons, own)
    piece = pieces_of(max(lessons.train, key=lambda sample: sample.cost))[-1]
    alone = seconds_of_steps(trainer, piece)[1] if world.is_root else 0.0
    world.transport.barrier()
    together = seconds_of_steps(trainer, piece)[1]
    slowest = largest_of_ranks(world.transport, int(1e9 * together)) / 1e9
    # Only rank 0 has it; the others have 0.
    alone = largest_of_ranks(world.transport, int(1e9 * alone)) / 1e9
    return {**of_rates(rates), "busy": max(1.0, slowest / alone)}


def of_rates(rates: Mapping[str, float]) -> dict[str, Any]:
    """Latency and rate of `Machine`, of what `transport_rates` measured: exchanges are of some MiB at most."""
    return {"latency": rates["latency_seconds"], "rate": rates["bytes_per_second_1_MiB"]}
