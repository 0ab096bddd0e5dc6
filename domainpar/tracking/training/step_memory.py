"""The memory of a run before its first step: weighed on pieces of an event, and what is made of it."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from domainpar.common.agreement import Refused, agree, on_root
from domainpar.common.problems import Problem
from domainpar.common.words import byte_size
from domainpar.measure.forecast import GAPS, OF_TORCH, Forecast, MemoryMeter, PartMemory, forecast_of
from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.interaction import OnStages
from domainpar.parallel.tables import lie_in_files
from domainpar.parallel.world import World
from domainpar.tracking.config.train import MemoryFlags
from domainpar.tracking.cost import event_pieces as pieces
from domainpar.tracking.cost import scratch
from domainpar.tracking.events.store import EventRecord, EventStore
from domainpar.tracking.training.inputs import TrainingData
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.sampler import Sample

DATA_BYTES = 72
"""Of a local edge of a part that stays in memory from step to step: features, ends, pair, ids, label, class and weight;
and of a node: features, id, degrees, scales, and its pairs."""

LOADING_BYTES = 200
"""Of a local edge while a part is read and planned, and of a node where the event is scored; seen, not derived."""


def expected_memory(
    trainer: Trainer, training_data: TrainingData, memory: MemoryMeter, step: int, keeps_freed: bool
) -> Forecast | None:
    """The memory that the largest event will take; None if no event can be read or the network not run. *Collective*.

    Its part is loaded, and kept for its step.
    """
    try:
        largest = _largest(trainer, training_data, step, keeps_freed)
        if largest is None:
            return None
        return _expected(trainer, training_data, memory, *largest, trainer.model.recompute_every)
    except Refused:  # it cannot be run: its first step says why, with all facts of a step
        return None


def choose_recompute(
    config: MemoryFlags, trainer: Trainer, training_data: TrainingData, memory: MemoryMeter, keeps_freed: bool
) -> Forecast | None:
    """Hold a run to its `--memory-limit`: set how much it recomputes and where its tables lie. *Collective*.

    `--recompute-every auto` takes the way that recomputes least of those that fit. Where none fits, tables lie in files
    if there is a `--scratch`. Without a limit there is what is free.

    Raises:
        Refused: On all ranks alike, if no way fits, with the least that would; or if files will not do.
    """
    on_stages = isinstance(trainer.model, OnStages)
    if config.scratch is not None:
        refusal = scratch.refusal(Path(config.scratch), trainer.world.device, on_stages)
        agree(trainer.world.transport, refusal)
    largest = _largest(trainer, training_data, 0, keeps_freed)
    if largest is None:
        return None
    sample, weights = largest[0], {trainer.model.recompute_every: largest[1]}
    model, is_auto = trainer.model, config.recompute_every == "auto"
    forecast: Forecast | None = None
    recomputing = model.ways_to_recompute if is_auto else (model.recompute_every,)
    for in_files, every in product((False,) if config.scratch is None else (False, True), recomputing):
        if every not in weights:
            where = training_data.store, sample.record, trainer.world, trainer.loader.dtype
            weights[every] = weight_of(model, *where, every=every, keeps_freed=keeps_freed)
        way = _expected(trainer, training_data, memory, sample, weights[every], every, in_files)
        # Of ways that do not fit, the smallest is reported.
        if forecast is None or _fits(way, config.memory_limit) or way.largest < forecast.largest:
            forecast = way
        if _fits(way, config.memory_limit):
            break
    assert forecast is not None
    model.recompute(forecast.recompute_every)
    problem = None
    if config.scratch is not None and forecast.in_files:
        problem = scratch.shortage(Path(config.scratch), forecast)
        lie_in_files(Path(config.scratch))
    if config.memory_limit is not None and not _fits(forecast, config.memory_limit):
        share = forecast.shares[forecast.fullest]
        saves = not is_auto and model.recompute_every is None and model.ways_to_recompute[1:]
        files = "--scratch DIR on a disk, " if config.scratch is None and on_stages else ""
        problem = Problem(
            f"--memory-limit {config.memory_limit:g} GiB: event {forecast.sample} will take "
            f"{byte_size(forecast.largest)} on rank {forecast.fullest}, {byte_size(share.bare)} of the bare "
            f"process included, for {share.edges:,} edges",
            f"{'--recompute-every auto, ' if saves else ''}{files}more ranks, a smaller --hidden or fewer "
            "--graph-iters",
        )
    agree(trainer.world.transport, problem)
    return forecast


def _fits(forecast: Forecast, limit: float | None) -> bool:
    """Whether no rank takes more than `--memory-limit`; without one, whether there is room."""
    return forecast.fits if limit is None else forecast.largest <= limit * 2**30


def _largest(
    trainer: Trainer, training_data: TrainingData, step: int, keeps_freed: bool
) -> tuple[Sample, PartMemory] | None:
    """The sample that will take most, of those that can be read, once it is loaded, with the memory of a step of the
    network as it is; None, on all ranks alike, if there is none. *Collective*.

    Raises:
        Refused: On all ranks alike, if the network cannot be run.
    """
    world, ranks = trainer.world, trainer.world.domain.size
    world.mark("load", step)
    readable = [sample for sample in training_data.train if sample.record.event not in training_data.store.unreadable]
    if not readable:
        return None
    of_most_edges = max(readable, key=lambda sample: sample.cost)
    if not _loaded(trainer, of_most_edges):
        return None
    where, every = (training_data.store, of_most_edges.record, world), trainer.model.recompute_every
    weight = weight_of(trainer.model, *where, trainer.loader.dtype, every=every, keeps_freed=keeps_freed)
    # Not that of most edges: stages keep their layers where these are few, so that a smaller event may take more.
    most = max(readable, key=lambda sample: int(weight.of(sample.num_nodes // ranks, 0, sample.cost // ranks)))
    return (most, weight) if most is of_most_edges or _loaded(trainer, most) else None


def _loaded(trainer: Trainer, sample: Sample) -> bool:
    """Whether all ranks have their parts of a sample. *Collective*."""
    # Groups of ranks load it each for itself; one that must leave it out leaves all without a prediction.
    missing = torch.tensor([int(trainer.loader.load(sample) is None)], dtype=torch.int64)
    return not trainer.world.step_boundary(missing)[0]


def _expected(
    trainer: Trainer,
    training_data: TrainingData,
    memory: MemoryMeter,
    sample: Sample,
    weight: PartMemory,
    every: int | None = None,
    in_files: bool = False,
) -> Forecast:
    """What all ranks will hold by the memory of a step, if tables lie in files or not. *Collective*."""
    memory.forget_peak()  # of the pieces
    part = trainer.loader.load(sample)
    assert part is not None
    graph = part.graph
    owned, ghosts, edges = sizes = graph.num_owned, graph.plan.num_ghosts, graph.num_edges
    kept = trainer.loader.kept(training_data.train + training_data.val)
    of_others = DATA_BYTES * sum(max(all_of - here, 0) for all_of, here in zip(kept, (owned + ghosts, edges)))
    expected = of_tables = int(weight.of(*sizes, len(graph.tiles.pair_rows)))
    if in_files:  # at most what a part is made from, and some rows of tables
        expected = LOADING_BYTES * edges + int(weight.through_files(owned + ghosts, edges))
    leanest = trainer.model.ways_to_recompute[-1]
    return forecast_of(
        trainer.world.transport,
        memory.device,
        sizes,
        expected + of_others,
        memory.bare,
        of_tables * in_files,
        sample=part.name,
        recompute_every=every,
        leaner=None if leanest == every else leanest,
    )


def weight_of(
    model: EdgeClassifier,
    store: EventStore,
    record: EventRecord,
    world: World,
    dtype: torch.dtype,
    *,
    every: int | None = None,
    keeps_freed: bool = True,
    trains: bool = True,
    shared: bool = False,
) -> PartMemory:
    """The memory of a rank that trains a network, or scores events with it, by its part. *Collective*.

    Args:
        model: The network.
        store, record: An event whose pieces are weighed.
        world: The ranks.
        dtype: Type of its parameters.
        every: Iterations of a segment that is computed again in backward.
        keeps_freed: Whether the C library keeps the memory that is freed.
        trains: Whether there is a backward pass.
        shared: Whether ranks will share an event that do not here.

    Raises:
        Refused: On all ranks alike, if the network cannot be run.
    """
    world.mark("measure", 0)
    # A table with room for ghosts is another one, and statistics over ranks take more than on one. Two share the piece,
    # as threads, where ranks share an event.
    ranks = 2 if (shared or world.domain.size > 1) and world.device.type == "cpu" else 1
    how: dict[str, Any] = {"every": every, "ranks": ranks, "device": world.device, "trains": trains, "dtype": dtype}
    weight = on_root(world.transport, lambda: asdict(pieces.weighed(model, store, record, **how)))
    # Stages have tables of their own, and torch has its own allocator on a GPU.
    of_torch = not isinstance(model, OnStages) and world.device.type == "cpu"
    gaps = GAPS if of_torch and keeps_freed else 1.0
    data = DATA_BYTES if trains else LOADING_BYTES
    return PartMemory.from_record(weight).plus(OF_TORCH if of_torch else 0, data, gaps)
