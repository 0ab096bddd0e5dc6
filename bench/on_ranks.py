"""Training steps as ranks of a benchmark take them: timed by phase; and passes that score."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from domainpar.measure.forecast import peak_rss_bytes
from domainpar.nn.program import set_threads
from domainpar.parallel.world import World
from domainpar.runs.checkpoint import parameters_sha256
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.catalogue import DTYPES, make_network
from domainpar.tracking.scoring.scores import score_events
from domainpar.tracking.training.inputs import open_training_data
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.run import make_trainer
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
    """

    store: Path
    training: TrainConfig
    warmup: int = 1
    repeats: int = 3
    work: Work = "training_steps"

    def trainer(self, world: World, loader: PartLoader | None = None) -> tuple[Trainer, list[Sample]]:
        """A trainer with the job's number of threads, and the sample of each step."""
        set_threads(self.training.threads or 1)
        training_data = open_training_data(self.training, self.store, world)
        trainer = make_trainer(self.training, training_data, world, self.training)
        trainer.loader = loader or trainer.loader
        return trainer, samples_of(training_data.store.events()[:1], None)


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
        world.rank_status.mark = self._mark  # type: ignore[method-assign]

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
    """Seconds and memory of scoring an event as `infer` does, without tracks and files. *Collective*.

    Returns:
        `seconds` of the network, `whole` with loading the parts and gathering the scores. On rank 0 `logits` [E] in the
        user's order, and the hash of the scores.
    """
    bare = peak_rss_bytes()
    set_threads(job.training.threads or 1)
    store, dtype = EventStore(job.store), DTYPES[job.training.dtype]
    network, seconds = make_network(job.training, store), 0.0

    def timed(graph: Any, halo: Any) -> Tensor:
        world.transport.barrier()  # else it would be charged with waiting for slow readers
        nonlocal seconds
        began = time.perf_counter()
        logits: Tensor = network(graph, halo)
        seconds = time.perf_counter() - began
        return logits

    times = []
    for _ in range(job.warmup + job.repeats):
        world.transport.barrier()
        began = time.perf_counter()
        with store.open(store.events()[0]) as event:
            scores = score_events(timed, [event], world.domain, grouping=job.training.grouping, dtype=dtype)
        times.append((seconds, time.perf_counter() - began))
    figures: dict[str, Any] = {"bare_rss": bare, "peak_rss": peak_rss_bytes(), "first_step": times[0][0]}
    figures["seconds"], figures["whole"] = map(list, zip(*times[job.warmup :]))
    if scores is not None:
        figures["logits"] = scores[0].edge_logit
        figures["sha256"] = hashlib.sha256(scores[0].edge_logit.tobytes() + scores[0].edge_score.tobytes()).hexdigest()
    return figures
