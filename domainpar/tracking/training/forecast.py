"""The memory of a run before its first step: by formula or weighed on pieces of an event, and what is made of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from domainpar.common.agreement import Refused, agree, on_root
from domainpar.common.problems import Problem
from domainpar.common.words import byte_size
from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.memory import DATA_BYTES, LOADING_BYTES, ModelSize
from domainpar.parallel.tables import lie_in_files
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.cost import pieces, scratch
from domainpar.tracking.cost.memory import Expectation, MemoryMeter, Size
from domainpar.tracking.cost.pieces import Line
from domainpar.tracking.events.store import EventRecord, EventStore
from domainpar.tracking.training.inputs import TrainingData
from domainpar.tracking.training.loop import Trainer, kept_on_host
from domainpar.tracking.training.network import DTYPES
from domainpar.tracking.training.sampler import Sample

GAPS = 1.5
"""Memory that the C library takes for torch's tables where it keeps what is freed, over their own (`allocator`); 1.5 to
1.7 times was seen of `acorn2` and of two networks of the examples."""

OF_TORCH = 48 * 2**20
"""Code and buffers of torch that a process touches in its first steps; 35 to 60 MiB were seen."""


def expected_memory(
    config: TrainConfig, trainer: Trainer, training_data: TrainingData, memory: MemoryMeter, step: int
) -> Expectation | None:
    """The memory that the largest event will take; None if no event can be read or the network not run. *Collective*.

    Its part is loaded, and kept for its step.
    """
    found = _largest(trainer, training_data, step)
    try:
        return (
            None
            if found is None
            else _expected(config, trainer, training_data, memory, found, trainer.model.recompute_every)
        )
    except Refused:  # it cannot be run: its first step says why, with all that is said of a step
        return None


def choose_recompute(
    config: TrainConfig, trainer: Trainer, training_data: TrainingData, memory: MemoryMeter
) -> Expectation | None:
    """Hold a run to its `--memory-limit`: set how much it recomputes and where its tables lie. *Collective*.

    `--recompute-every auto` takes the way that recomputes least of those that fit. Where none fits, tables lie in files
    if there is a `--scratch`. Without a limit there is what is free.

    Raises:
        Refused: On all ranks alike, if no way fits, with the least that would; or if files will not do.
    """
    if config.scratch is not None:
        refusal = scratch.refusal(Path(config.scratch), trainer.world.device, trainer.model.size is not None)
        agree(trainer.world.transport, refusal)
    found = _largest(trainer, training_data, 0)
    if found is None:
        return None
    model, is_auto = trainer.model, config.recompute_every == "auto"
    expectation: Expectation | None = None
    recomputing = model.ways_to_recompute if is_auto else (model.recompute_every,)
    for in_files, every in product((False,) if config.scratch is None else (False, True), recomputing):
        way = _expected(config, trainer, training_data, memory, found, every, in_files)
        # Of ways that do not fit, the least of all is to be told.
        if expectation is None or way.fits(config.memory_limit) or way.largest < expectation.largest:
            expectation = way
        if way.fits(config.memory_limit):
            break
    assert expectation is not None
    model.recompute(expectation.recompute_every)
    problem = None
    if config.scratch is not None and expectation.in_files:
        problem = scratch.shortage(Path(config.scratch), expectation)
        lie_in_files(Path(config.scratch))
    if config.memory_limit is not None and not expectation.fits(config.memory_limit):
        share = expectation.shares[expectation.fullest]
        saves = not is_auto and model.recompute_every is None and model.ways_to_recompute[1:]
        files = "--scratch DIR on a disk, " if config.scratch is None and model.size is not None else ""
        problem = Problem(
            f"--memory-limit {config.memory_limit:g} GiB: event {expectation.sample} will take "
            f"{byte_size(expectation.largest)} on rank {expectation.fullest}, {byte_size(share.bare)} of the bare "
            f"process included, for {share.edges:,} edges",
            f"{'--recompute-every auto, ' if saves else ''}{files}more ranks, a smaller --hidden or fewer "
            "--graph-iters",
        )
    agree(trainer.world.transport, problem)
    return expectation


def _largest(trainer: Trainer, training_data: TrainingData, step: int) -> Sample | None:
    """The sample that will take most, of those that can be read, once it is loaded; None, on all ranks alike, if there
    is none. *Collective*."""
    world = trainer.world
    world.mark("load", step)
    readable = [sample for sample in training_data.train if sample.record.event not in training_data.store.unreadable]
    if not readable:
        return None
    size, ranks = trainer.model.size, world.domain.size

    def bytes_of(sample: Sample) -> int:
        nodes, edges = np.array([sample.num_nodes]) // ranks, np.array([sample.cost]) // ranks
        return sample.cost if size is None else int(size.bytes_of(nodes, edges)[0])

    # Not that of most edges: stages keep their layers where these are few, so that a smaller event may take more.
    sample = max(readable, key=bytes_of)
    # Groups of ranks load it each for itself; one that must leave it out leaves all without a prediction.
    missing = world.step_boundary(torch.tensor([int(trainer.loader.load(sample) is None)], dtype=torch.int64))
    return None if missing[0] else sample


def _expected(
    config: TrainConfig,
    trainer: Trainer,
    training_data: TrainingData,
    memory: MemoryMeter,
    sample: Sample,
    every: int | None,
    in_files: bool = False,
) -> Expectation:
    """What all ranks will hold if segments have so many iterations, and tables lie in files or not. *Collective*."""
    size = memory_size(config, trainer, training_data, sample, every)
    if isinstance(size, ModelSize):
        size = replace(size, in_files=in_files)
    if trainer.model.size is None:
        memory.forget_peak()  # of the piece
    part = trainer.loader.load(sample)
    assert part is not None
    kept = trainer.loader.kept(training_data.train + training_data.val)
    return memory.expect(size, part.name, part.graph, trainer.world, kept, every, trainer.model.ways_to_recompute)


def memory_size(
    config: TrainConfig, trainer: Trainer, training_data: TrainingData, sample: Sample, every: int | None
) -> Size:
    """The memory of a rank by its part, if segments have so many iterations. *Collective*.

    By formula where the network has one, else by a line through two pieces of the sample's event.
    """
    keeps_freed = config.allocator in ("auto", "keep")
    where = training_data.store, sample.record, trainer.world
    return size_of(config, trainer.model, *where, every=every, keeps_freed=keeps_freed)


def size_of(
    config: TrainConfig,
    model: EdgeClassifier,
    store: EventStore,
    record: EventRecord,
    world: World,
    *,
    every: int | None = None,
    keeps_freed: bool = True,
    trains: bool = True,
) -> Size:
    """The memory of a rank that trains a network, or scores events with it, by its part. *Collective*.

    Args:
        config: How the network is trained.
        model: The network.
        store, record: An event whose pieces are weighed where there is no formula.
        world: The ranks.
        every: Iterations of a segment that is computed again in backward.
        keeps_freed: Whether the C library keeps the memory that is freed.
        trains: Whether there is a backward pass.
    """
    if model.size is not None:
        return replace(model.size, recompute_every=every, trains=trains)
    world.mark("measure", 0)
    # Statistics over ranks take more than on one. Two share the piece, as threads, where ranks share an event.
    ranks = 2 if world.domain.size > 1 and world.device.type == "cpu" else 1
    how: dict[str, Any] = {"every": every, "ranks": ranks, "device": world.device, "trains": trains}
    how |= {"dtype": DTYPES[config.dtype], "around": kept_on_host if config.offload else nullcontext}

    def weigh() -> tuple[tuple[int, int], tuple[int, int]]:
        few, many = pieces.weighed(model, store, record, **how)
        return (few.edges, few.bytes), (many.edges, many.bytes)

    tensors = Line.through(*on_root(world.transport, weigh))
    # Stages have tables of their own, and torch has its own allocator on a GPU.
    of_torch = not config.is_bitwise and world.device.type == "cpu"
    gaps = GAPS if of_torch and keeps_freed else 1.0
    of_data = DATA_BYTES if trains else LOADING_BYTES
    return Line(tensors.fixed * gaps + (OF_TORCH if of_torch else 0), tensors.of_edge * gaps + of_data)
