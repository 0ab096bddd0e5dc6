"""Training steps as ranks of a benchmark take them: timed by phase, profiled; planning before them; and scoring."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from operation_clock import LOOP, OperationClock
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from domainpar.nn.program import set_threads
from domainpar.parallel.halo import CompleteHalo, ask_owners
from domainpar.parallel.local import TileRanges
from domainpar.parallel.world import World
from domainpar.plan import LocalEdges, build_plan
from domainpar.runs.checkpoint import parameters_sha256
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.part_loading import group_tiles
from domainpar.tracking.planner.steps import PRECISIONS, Training
from domainpar.tracking.scoring.scores import EventScores, score_events
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.record import peak_rss_bytes
from domainpar.tracking.training.sampler import Sample, samples_of

Work = Literal["training_steps", "scoring_passes"]
"""What ranks are asked for: a function of this file, and one of `plain_pyg`."""

PHASES = ("load", "forward", "backward", "reduce")


@dataclass(frozen=True)
class Job:
    """Training steps, or passes over an event that score it, that ranks are asked for.

    Attributes:
        store: Its first event is trained on, or scored.
        training: How, and with which network.
        warmup: Steps or passes before the clock starts.
        repeats: Those that count.
        work: Steps or passes.
        events_per_call: Events that a pass scores, the first of the store.
    """

    store: Path
    training: Training
    warmup: int = 1
    repeats: int = 3
    work: Work = "training_steps"
    events_per_call: int = 1

    def trainer(self, world: World, loader: PartLoader | None = None) -> tuple[Trainer, list[Sample]]:
        """A trainer with the job's number of threads, and the sample of each step."""
        set_threads(self.training.threads)
        store = EventStore(self.store)
        return self.training.trainer(store, world, loader), samples_of(store.events()[:1], None)


def sizes(trainer: Trainer, samples: Sequence[Sample]) -> dict[str, int]:
    """Sizes of this rank's part of a sample."""
    plan = trainer.loader.load(samples[0]).graph.plan
    return {
        "owned_nodes": plan.num_owned,
        "ghosts": plan.num_ghosts,
        "owned_edges": int(plan.edge_owned.sum()),
        "local_edges": plan.num_edges,
    }


class PhaseClock:
    """Listens to the marks a step leaves, and so times its phases without a copy of the step's code."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._marks: list[tuple[str, float, float]] = []
        world.presence.mark = self._mark  # type: ignore[method-assign]

    def step(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run one step; returns its record with seconds and seconds without waiting for each phase, on this rank."""
        self._marks.clear()  # of the step before
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
        transports = {id(transport): transport for transport in (self._world.transport, self._world.domain)}.values()
        talked = sum(each.seconds_waiting + each.seconds_exchanging for each in transports)
        self._marks.append((phase, time.perf_counter(), talked))


def training_steps(world: World, job: Job) -> dict[str, Any]:
    """Seconds and memory of each step on this rank. *Collective*."""
    bare = peak_rss_bytes()
    trainer, samples = job.trainer(world)
    clock, steps = PhaseClock(world), []
    for step in range(job.warmup + job.repeats):
        world.transport.barrier()
        cpu = time.process_time()
        record = clock.step(lambda step=step: trainer.step(samples, step))
        steps.append({**record, "cpu": time.process_time() - cpu})
    rank, measured = world.rank, steps[job.warmup :]
    return {
        "losses": [record["loss"] for record in steps],
        "first_step": steps[0]["seconds"],
        **{name: [record[name] for record in measured] for name in ("seconds", "cpu")},
        **{name: [record[f"seconds_{name}"][rank] for record in measured] for name in ("compute", "exchange", "wait")},
        **{name: [record["phases"][name] for record in measured] for name in PHASES},
        **{f"{name}_busy": [record["phases"][f"{name}_busy"] for record in measured] for name in PHASES},
        "halo_bytes": steps[-1]["halo_bytes"][rank],
        **sizes(trainer, samples),
        "bare_rss": bare,
        "peak_rss": peak_rss_bytes(),
        "sha256": parameters_sha256(trainer.model),
    }


def scoring_passes(world: World, job: Job) -> dict[str, Any]:
    """Seconds and memory of scoring events as `infer` does, without tracks and files. *Collective*.

    Returns:
        `seconds` of the network, `whole` with loading the parts and gathering the scores; the same of calls for one
        event each in `seconds_alone` and `whole_alone`, if there are several. On rank 0 `logits` [E] of all events in
        the user's order, and their hash.

    Raises:
        RuntimeError: If scores of one call differ from those of calls for one event each.
    """
    bare = peak_rss_bytes()
    set_threads(job.training.threads)
    store, dtype = EventStore(job.store), PRECISIONS[job.training.precision]
    records = store.events()[: job.events_per_call]
    network, seconds = job.training.network(store), 0.0

    def timed(graph: Any, halo: Any) -> Tensor:
        world.transport.barrier()  # else it would be charged with waiting for slow readers
        nonlocal seconds
        began = time.perf_counter()
        logits: Tensor = network(graph, halo)
        seconds += time.perf_counter() - began
        return logits

    def passed(per_call: int) -> tuple[float, float, list[EventScores]]:
        """Seconds of the network, and of all, and the scores on rank 0."""
        nonlocal seconds
        scores: list[EventScores] = []
        world.transport.barrier()
        seconds, began = 0.0, time.perf_counter()
        for first in range(0, len(records), per_call):
            with ExitStack() as opened:
                events = [opened.enter_context(store.open(record)) for record in records[first : first + per_call]]
                scores += score_events(timed, events, world.domain, grouping=job.training.grouping, dtype=dtype) or []
        return seconds, time.perf_counter() - began, scores

    figures: dict[str, Any] = {}
    for name, per_call in {"": len(records), "_alone": 1}.items() if len(records) > 1 else [("", 1)]:
        times, scores = [], []
        for _ in range(job.warmup + job.repeats):
            *of_pass, scores = passed(per_call)
            times.append(of_pass)
        figures[f"seconds{name}"], figures[f"whole{name}"] = map(list, zip(*times[job.warmup :]))
        figures = {"bare_rss": bare, "peak_rss": peak_rss_bytes(), "first_step": times[0][0]} | figures
        if scores:
            figures["logits"], of_events = np.concatenate([one.edge_logit for one in scores]), figures.get("sha256")
            bits = b"".join(one.edge_logit.tobytes() + one.edge_score.tobytes() for one in scores)
            figures["sha256"] = hashlib.sha256(bits).hexdigest()
            if of_events not in (None, figures["sha256"]):
                raise RuntimeError(f"the scores of {len(records)} events in one call are not those of calls for each.")
    return figures


def profiled_step(world: World, job: Job) -> dict[str, Any]:
    """Seconds of one step by torch operation, each without those inside it, the longest first. *Collective*.

    A stage's own function is such an operation: its time is that of Python in it. Those of programs are among them.
    """
    trainer, samples = job.trainer(world)
    clock = OperationClock()
    with clock.running():
        for step in range(max(job.warmup, 1)):
            trainer.step(samples, step)
        clock.spent.clear()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            record = trainer.step(samples, max(job.warmup, 1))
    operations = [{"name": name, **spent._asdict(), "with_inner": spent.seconds} for name, spent in clock.spent.items()]
    for event in profiler.key_averages():
        if event.key != LOOP:  # has been taken apart
            times = {"seconds": 1e-6 * event.self_cpu_time_total, "with_inner": 1e-6 * event.cpu_time_total}
            operations.append({"name": event.key, "calls": event.count, **times})
    operations.sort(key=lambda operation: -operation["seconds"])
    return {"seconds": record["seconds"], "operations": operations}


def planning(world: World, store: Path, grouping: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of grouping, of reading a part's edges, of its plan and of the halo made from it. *Collective*."""
    opened, domain = EventStore(store), world.domain
    turns = []
    with opened.open(opened.events()[0]) as event:
        for _ in range(repeats + 1):
            domain.barrier()
            times = [time.perf_counter()]
            part_of_tile = group_tiles(event, domain, grouping)
            times.append(time.perf_counter())
            edges = LocalEdges(*event.read_part_edges(np.flatnonzero(part_of_tile == domain.rank), "incident"))
            domain.barrier()  # else the plan would be charged with waiting for slow readers
            times.append(time.perf_counter())
            owner = TileRanges(event.node_ptr, event.edge_ptr, part_of_tile).node_owner()
            plan = build_plan(edges, owner, domain.rank, domain.size, "incident", ask_owners(domain))
            times.append(time.perf_counter())
            CompleteHalo(plan, domain)
            times.append(time.perf_counter())
            turns.append(np.diff(times))
    # The first turn warms up.
    return dict(zip(("grouping", "reading", "plan", "agreeing"), np.transpose(turns[1:]).tolist()))
