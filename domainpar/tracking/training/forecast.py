"""The memory of a run before its first step: by formula or measured on a piece of an event, and what is made of it.

Networks without a formula are measured. Two independent sectors of the largest event, of some thousand edges and of
twice as many, are taken through both passes on one rank while every tensor is counted; what one edge more took is what
an edge takes.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from domainpar.common.agreement import Refused, agree, on_root
from domainpar.common.problems import Problem
from domainpar.common.words import byte_size
from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.versions import memory_of
from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.memory import Forecast, MeasuredSize, ModelSize
from domainpar.nn.uncompiled import UncompiledMode, pass_back
from domainpar.parallel.tables import lie_in_files
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.networks.catalogue import said_by
from domainpar.tracking.part_loading import Part, Sector, load_part
from domainpar.tracking.training import scratch
from domainpar.tracking.training.inputs import Lessons
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.memory import Expectation, MemoryMeter
from domainpar.tracking.training.sampler import Sample

EDGES_OF_A_PIECE = 4_000
GAPS = 1.5
"""Memory that the C library takes for torch's tables where it keeps what is freed, over their own (`allocator`); 1.5 to
1.7 times was seen of `acorn2`, `resin` and `gcn`."""

OF_TORCH = 48 * 2**20
"""Code and buffers of torch that a process touches in its first steps; 35 to 60 MiB were seen."""


def expected_memory(
    config: TrainConfig, trainer: Trainer, lessons: Lessons, memory: MemoryMeter, step: int
) -> Expectation | None:
    """The memory that the largest event will take; None if no event can be read or the network not run. *Collective*.

    Its part is loaded, and kept for its step.
    """
    found = _largest(trainer, lessons, step)
    try:
        return (
            None if found is None else _expected(config, trainer, lessons, memory, found, trainer.model.recompute_every)
        )
    except Refused:  # it cannot be run: its first step says why, with all that is said of a step
        return None


def choose_recompute(
    config: TrainConfig, trainer: Trainer, lessons: Lessons, memory: MemoryMeter
) -> Expectation | None:
    """Hold a run to its `--memory-limit`: set how much it recomputes and where its tables lie. *Collective*.

    `--recompute-every auto` takes the way that recomputes least of those that fit. Where none fits, tables lie in files
    if there is a `--scratch`. Without a limit there is what is free.

    Raises:
        Refused: On all ranks alike, if no way fits, with the least that would; or if files will not do.
    """
    if config.scratch is not None:
        agree(trainer.world.transport, scratch.refusal(Path(config.scratch), trainer))
    found = _largest(trainer, lessons, 0)
    if found is None:
        return None
    model, is_auto = trainer.model, config.recompute_every == "auto"
    expectation: Expectation | None = None
    recomputing = model.ways_to_recompute if is_auto else (model.recompute_every,)
    for in_files, every in product((False,) if config.scratch is None else (False, True), recomputing):
        way = _expected(config, trainer, lessons, memory, found, every, in_files)
        # Of ways that do not fit, the least of all is to be told.
        if expectation is None or way.fits(config.memory_limit) or way.largest < expectation.largest:
            expectation = way
        if way.fits(config.memory_limit):
            break
    assert expectation is not None
    model.recompute(expectation.size.recompute_every)
    problem = None
    if config.scratch is not None and expectation.size.in_files:
        problem = scratch.shortage(Path(config.scratch), expectation)
        lie_in_files(Path(config.scratch))
    if config.memory_limit is not None and not expectation.fits(config.memory_limit):
        share = expectation.shares[expectation.fullest]
        saves = not is_auto and model.recompute_every is None
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


def _largest(trainer: Trainer, lessons: Lessons, step: int) -> Sample | None:
    """The largest sample that can be read and is loaded; None, on all ranks alike, if there is none. *Collective*."""
    world = trainer.world
    world.mark("load", step)
    readable = [sample for sample in lessons.train if sample.record.event not in lessons.store.unreadable]
    if not readable:
        return None
    sample = max(readable, key=lambda sample: sample.cost)
    # Groups of ranks load it each for itself; one that must leave it out leaves all without a prediction.
    missing = world.step_boundary(torch.tensor([int(trainer.loader.load(sample) is None)], dtype=torch.int64))
    return None if missing[0] else sample


def _expected(
    config: TrainConfig,
    trainer: Trainer,
    lessons: Lessons,
    memory: MemoryMeter,
    sample: Sample,
    every: int | None,
    in_files: bool = False,
) -> Expectation:
    """What all ranks will hold if segments have so many iterations, and tables lie in files or not. *Collective*."""
    size = memory_size(config, trainer, lessons, sample, every)
    if isinstance(size, ModelSize):
        size = replace(size, in_files=in_files)
    if trainer.model.size is None:
        memory.forget_peak()  # of the piece
    part = trainer.loader.load(sample)
    assert part is not None
    return memory.expect(size, part, trainer.loader.kept_edges(lessons.train + lessons.val), trainer.world)


def memory_size(config: TrainConfig, trainer: Trainer, lessons: Lessons, sample: Sample, every: int | None) -> Forecast:
    """The memory of a rank by its part, if segments have so many iterations. *Collective*.

    By formula where the network has one, else measured on pieces of the sample's event.
    """
    model, world = trainer.model, trainer.world
    if model.size is not None:
        return replace(model.size, recompute_every=every, offloaded=config.offload)
    world.mark("measure", 0)
    of_edge, fixed = on_root(world.transport, lambda: _measured(trainer, lessons, sample, every))
    # Stages have tables of their own, and torch has its own allocator on a GPU.
    of_torch = not config.is_bitwise and world.device.type == "cpu"
    gaps = GAPS if of_torch and config.way_with_freed_memory == "keep" else 1.0
    return MeasuredSize(of_edge * gaps, int(fixed * gaps) + (OF_TORCH if of_torch else 0), every)


def _measured(trainer: Trainer, lessons: Lessons, sample: Sample, every: int | None) -> tuple[float, int]:
    """Bytes of an edge, and those that do not grow with edges, while a network takes both passes."""
    record, world = sample.record, trainer.world

    def on_piece(ranks: World, wanted: int) -> tuple[int, int]:
        number = min(max(record.num_edges // wanted, 1), record.num_tiles)
        with lessons.store.open(record) as event:
            sector = Sector(number // 2, number)
            part = load_part(event, ranks.domain, sector=sector, device=world.device, dtype=trainer.loader.dtype)
        return part.graph.num_edges, _peak(trainer.model, part, every)

    # Statistics over ranks take more than on one. Two share the piece, as threads, where ranks share an event.
    num_ranks = 2 if world.domain.size > 1 and world.device.type == "cpu" else 1
    (few, low), (many, high) = (
        max(run_threads(on_piece, num_ranks, num_ranks * wanted), key=lambda found: found[1])
        for wanted in (EDGES_OF_A_PIECE, 2 * EDGES_OF_A_PIECE)
    )
    if many <= few or high <= low:  # an event of one small tile
        return high / max(many, 1), 0
    of_edge = (high - low) / (many - few)
    return of_edge, max(int(low - few * of_edge), 0)


def _peak(model: EdgeClassifier, part: Part, every: int | None) -> int:
    """The most bytes of tensors at once in both passes over a part. *Collective*."""
    model = copy.deepcopy(model)  # running means stay as they are
    model.recompute(every)
    counted, gradients = _Tensors(), model.gradients()
    try:
        with counted:
            tensors = model.read(part.graph, part.halo, 1).tensors
            pass_back(tensors, [torch.ones_like(tensor) for tensor in tensors])
    except Exception as error:  # a user's own code may raise anything
        raise ValueError(f"the network cannot be run on a piece of an event: {said_by(error)}") from error
    del gradients
    return counted.peak


class _Tensors(UncompiledMode):
    """Counts the memory of tensors that are made while it is on.

    Attributes:
        peak: The most bytes that were there at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = set(map(memory_of, _with_memory((args, kwargs or {}))))
        if function.overloadpacket is torch.ops.aten.set_:  # a table into memory of our own: `empty_table`
            known = set()
        for tensor in _with_memory(result):
            address = memory_of(tensor)
            if address not in known and address not in self._alive:
                size = tensor.untyped_storage().nbytes()
                self._alive.add(address)
                self._now += size
                self.peak = max(self.peak, self._now)
                weakref.finalize(tensor.untyped_storage(), self._gone, address, size)
        return result

    def _gone(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self._now -= size


def _with_memory(values: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(values) if tensor.layout is torch.strided]
