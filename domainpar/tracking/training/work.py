"""What a training asks of this machine, from steps on pieces of an event."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch

from domainpar.common.agreement import on_root
from domainpar.measure.rates import median_seconds, transport_rates
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.cost.cuts import stored_tiling
from domainpar.tracking.cost.machine import this_machine
from domainpar.tracking.cost.model import StepWork, Way
from domainpar.tracking.cost.pieces import EDGES_OF_PIECES, Line, sectors_of, weighed
from domainpar.tracking.training.forecast import weight_of
from domainpar.tracking.training.inputs import open_lessons, steps_of
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.run import make_trainer
from domainpar.tracking.training.sampler import Sample

SECONDS_OF_MESSAGES, SECONDS_OF_STEPS = 0.5, 2.0
BYTES_OF_LIMBS, BYTES_OF_SUMS = 16, 8
"""Of a parameter's gradient on the wire: two limbs of an exact sum, or a float64."""


def work_of(config: TrainConfig, store: Path, alone: World, seconds: float = SECONDS_OF_STEPS) -> StepWork:
    """All that predictions are made from: a step of the network on this machine, and the events.

    Args:
        config: The training.
        store: Its events.
        alone: A world of one rank.
        seconds: Time to repeat each step in, about.
    """
    training_data = open_lessons(config, store, alone)
    trainer = make_trainer(config, training_data, alone)
    bare = int(psutil.Process().memory_info().rss)  # when all is loaded but events, as in a run
    model, sample = trainer.model, max(training_data.train, key=lambda sample: sample.cost)
    ways = (None, model.ways_to_recompute[-1]) if model.ways_to_recompute[1:] else (None,)
    # All is weighed before the first step: afterwards a network may know its ranks.
    where = training_data.store, sample.record, alone
    memory = {every: weight_of(config, model, *where, every=every, shared=True) for every in ways}
    how: dict[str, Any] = {"ranks": 2, "dtype": trainer.loader.dtype, "sizes": EDGES_OF_PIECES[-1:]}
    (of_two,) = weighed(model, training_data.store, sample.record, **how)
    of_ways = {}
    for every in ways:
        model.recompute(every)
        points = [
            (step()["local_edges"][0], median_seconds(step, seconds, alone.transport, alone.device))
            for step in _steps(trainer, sample)
        ]
        of_ways[every] = Way(Line.through(*points), memory[every])
    model.recompute(None)
    of_parameter = BYTES_OF_LIMBS if config.is_bitwise else BYTES_OF_SUMS
    with training_data.store.open(sample.record) as event:
        tiling = stored_tiling(event)
    return StepWork(
        here=this_machine(),
        ways=of_ways,
        exchanges=of_two.exchanges,
        bytes_of_ghost=of_two.bytes_of_ghost,
        bytes_of_parameters=of_parameter * sum(it.numel() for it in model.parameters() if it.requires_grad),
        bare=bare,
        event=sample.name,
        tiling=tiling,
        largest=max(one.cost for one in training_data.train + training_data.val),
        steps=steps_of(config, training_data.train, 0),
        steps_per_epoch=training_data.steps_per_epoch,
    )


def contention(world: World, config: TrainConfig, store: Path) -> dict[str, Any]:
    """What ranks feel of each other. *Collective*.

    Every rank takes steps of its own, on the same piece of an event; rank 0 takes them alone before.

    Returns:
        Latency and rate of `Machine`, and `busy`: the time of a step on all ranks at once over that on one.
    """
    torch.set_num_threads(1)
    rates = transport_rates(world.transport, 2 * SECONDS_OF_MESSAGES, torch.device("cpu"))
    own = World.alone()
    training_data = open_lessons(config, store, own)
    *_, step = _steps(
        make_trainer(config, training_data, own), max(training_data.train, key=lambda sample: sample.cost)
    )
    alone = on_root(world.transport, lambda: median_seconds(step, SECONDS_OF_STEPS, own.transport, own.device))
    together = median_seconds(step, SECONDS_OF_STEPS, world.transport, own.device)
    return {
        "latency": rates["latency_seconds"],
        "rate": rates["bytes_per_second_1_MiB"],  # exchanges are of some MiB at most
        "busy": max(1.0, together / alone),
    }


def _steps(trainer: Trainer, sample: Sample) -> Iterator[Any]:
    """Training steps on each of the pieces of a sample's event; of one after the other."""
    number = count()
    for sector in sectors_of(sample.record):
        piece = Sample(sample.record, sector)
        yield lambda piece=piece: trainer.step([piece], next(number))
