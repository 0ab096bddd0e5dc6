"""What the ranks of a benchmark do. Processes import it by name, so it is a file of its own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from domainpar.events.store import EventStore, StoredEvent
from domainpar.nn import blocks, tilewise
from domainpar.nn.catalogue import ON_STAGES, build_model
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.team import set_threads
from domainpar.parallel.halo import CompleteHalo, ask_owners
from domainpar.parallel.local import TileRanges
from domainpar.parallel.part_loading import group_tiles
from domainpar.parallel.world import World
from domainpar.plan import LocalEdges, build_plan
from domainpar.training.checkpoint import parameters_sha256
from domainpar.training.loop import Trainer
from domainpar.training.parts import PartLoader
from domainpar.training.record import peak_rss_bytes
from domainpar.training.sampler import samples_of
from domainpar.training.schedule import Schedule
from domainpar.training.targets import EdgeClasses

DTYPES = {"float32": torch.float32, "float64": torch.float64}
PRODUCTS = ("multiply", "outer")
KERNELS = (*PRODUCTS, "norm_forward", "norm_backward", "add_pairs")
PHASES = ("load", "forward", "backward", "reduce")


@dataclass(frozen=True)
class StepSettings:
    """What a rank is asked to train: the network, and how it is split.

    Attributes:
        threads: Threads of each rank.
        network: Further keywords of `build_model`.
    """

    store: Path
    model: str = "interaction"
    hidden: int = 64
    graph_iters: int = 4
    dtype: str = "float32"
    grouping: str = "contiguous"
    seed: int = 0
    warmup: int = 1
    repeats: int = 3
    threads: int = 1
    network: Mapping[str, Any] = field(default_factory=dict)


def add_network_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which network is trained."""
    parser.add_argument("--model", choices=ON_STAGES, default="interaction")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--graph-iters", type=int, default=4)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")


def make_model(settings: StepSettings) -> InteractionNetwork:
    """The network with its initial weights."""
    store = EventStore(settings.store)
    return build_model(
        settings.model,
        len(store.feature_names),
        len(store.edge_feature_names),
        hidden=settings.hidden,
        graph_iters=settings.graph_iters,
        seed=settings.seed,
        dtype=DTYPES[settings.dtype],
        **settings.network,
    )


def make_trainer(settings: StepSettings, world: World, loader: PartLoader | None = None) -> Trainer:
    """A trainer as `domainpar.train` makes it, at its default flags but for the settings."""
    store, dtype = EventStore(settings.store), DTYPES[settings.dtype]
    model = make_model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    loader = loader or PartLoader(store, world, grouping=settings.grouping, dtype=dtype, seed=settings.seed)
    return Trainer(model, optimizer, loader, world, EdgeClasses(), Schedule(1e-3, "constant", 0, 1, 1))


class PhaseClock:
    """Listens to the marks a step leaves, and so times its phases without a copy of the step's code."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._marks: list[tuple[str, float, float]] = []
        world.presence.mark = self._mark  # type: ignore[method-assign]

    def step(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run one step; returns its record with seconds and seconds without waiting for each phase, on this rank."""
        self._marks.clear()
        record = run()
        # The record says where the last phase ends: before ranks met to make the record.
        compute, *talked = (record[f"seconds_{name}"][self._world.rank] for name in ("compute", "exchange", "wait"))
        marks = [*self._marks, ("end", self._marks[0][1] + compute + sum(talked), sum(talked))]
        phases: dict[str, Any] = {}
        for (name, began, talked_before), (_, ended, talked_by_then) in pairwise(marks):
            phases[name] = phases.get(name, 0.0) + ended - began
            busy = ended - began - (talked_by_then - talked_before)
            phases[f"{name}_busy"] = phases.get(f"{name}_busy", 0.0) + busy
        return {**record, "phases": phases}

    def _mark(self, phase: str, step: int, event: str | None = None) -> None:
        transports = {id(one): one for one in (self._world.transport, self._world.domain)}.values()
        talked = sum(one.seconds_waiting + one.seconds_exchanging for one in transports)
        self._marks.append((phase, time.perf_counter(), talked))


def training_steps(world: World, settings: StepSettings) -> dict[str, Any]:
    """Train on the first event of a store, one event a step, and say what each step took on this rank. *Collective*."""
    bare = peak_rss_bytes()
    set_threads(settings.threads)
    trainer = make_trainer(settings, world)
    samples = samples_of(EventStore(settings.store).events()[:1], None)
    clock = PhaseClock(world)
    steps = []
    for step in range(settings.warmup + settings.repeats):
        world.transport.barrier()
        steps.append(clock.step(lambda step=step: trainer.step(samples, step)))
    part = trainer.loader.load(samples[0]).part
    rank, measured = world.rank, steps[settings.warmup :]
    plan = part.graph.plan
    return {
        "losses": [record["loss"] for record in steps],
        "first_step": steps[0]["seconds"],
        "seconds": [record["seconds"] for record in measured],
        **{name: [record[f"seconds_{name}"][rank] for record in measured] for name in ("compute", "exchange", "wait")},
        **{name: [record["phases"][name] for record in measured] for name in PHASES},
        **{f"{name}_busy": [record["phases"][f"{name}_busy"] for record in measured] for name in PHASES},
        "halo_bytes": steps[-1]["halo_bytes"][rank],
        "owned_nodes": plan.num_owned,
        "ghosts": plan.num_ghosts,
        "owned_edges": int(plan.edge_owned.sum()),
        "local_edges": plan.num_edges,
        "bare_rss": bare,
        "peak_rss": peak_rss_bytes(),
        "sha256": parameters_sha256(trainer.model),
    }


def profiled_step(world: World, settings: StepSettings) -> dict[str, Any]:
    """Seconds of one step by torch operation, each without those inside it, the longest first. *Collective*.

    A stage's own function is such an operation: its time is that of Python in it. Kernels are operations here too.
    """
    set_threads(settings.threads)
    trainer = make_trainer(settings, world)
    samples = samples_of(EventStore(settings.store).events()[:1], None)
    for step in range(settings.warmup):
        trainer.step(samples, step)
    with ExitStack() as replaced:
        for module, name in product((blocks, tilewise), KERNELS):
            if hasattr(module, name):
                replaced.enter_context(patch.object(module, name, _recorded(module, name)))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            record = trainer.step(samples, settings.warmup)
    operations = [
        {
            "name": event.key,
            "calls": event.count,
            "seconds": 1e-6 * event.self_cpu_time_total,
            "with_inner": 1e-6 * event.cpu_time_total,
        }
        for event in profiler.key_averages()
    ]
    operations.sort(key=lambda operation: -operation["seconds"])
    return {"seconds": record["seconds"], "operations": operations}


def _recorded(module: ModuleType, name: str) -> Callable[..., None]:
    """A kernel that the profiler sees."""
    plain = getattr(module, name)

    def recorded(*given: Any) -> None:
        with record_function(name):
            plain(*given)

    return recorded


def planning(world: World, store: Path, grouping: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of grouping, of reading a part's edges, of its plan and of the halo made from it. *Collective*."""
    opened = EventStore(store)
    seconds: dict[str, list[float]] = {"grouping": [], "reading": [], "plan": [], "agreeing": []}
    with opened.open(opened.events()[0]) as event:
        for _ in range(repeats + 1):
            for name, value in _plan_once(event, world, grouping).items():
                seconds[name].append(value)
    return {name: values[1:] for name, values in seconds.items()}


def _plan_once(event: StoredEvent, world: World, grouping: str) -> dict[str, float]:
    world.domain.barrier()
    times = [time.perf_counter()]
    part_of_tile = group_tiles(event, world.domain, grouping)
    times.append(time.perf_counter())
    edges = LocalEdges(*event.read_part_edges(np.flatnonzero(part_of_tile == world.domain.rank), "incident"))
    world.domain.barrier()  # else the plan would be charged with waiting for slow readers
    times.append(time.perf_counter())
    owner = TileRanges(event.node_ptr, event.edge_ptr, part_of_tile).node_owner()
    plan = build_plan(edges, owner, world.domain.rank, world.domain.size, "incident", ask_owners(world.domain))
    times.append(time.perf_counter())
    CompleteHalo(plan, world.domain)
    times.append(time.perf_counter())
    return dict(zip(("grouping", "reading", "plan", "agreeing"), np.diff(times).tolist()))
