"""Training steps of the attention network in each form, each run in a process of its own, forms in turns."""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch
from attention_forms import FORMS, logits_of
from heptrkx_sectors import Divided, Graph
from measuring import Spread
from torch.nn import functional as F

from domainpar.nn.published import AttentionNetwork
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.training.record import peak_rss_bytes

GB = 1e9
LARGEST_DIFFERENCE = 1e-5
"""Of the first loss of two forms, relative."""

STEP_BYTES = 90
"""Peak of a float32 step per edge, hidden unit and iteration, roughly, without dense matrices."""


@dataclass(frozen=True, eq=False)
class Job:
    """What one process is asked for."""

    graph: Graph
    form: str
    true_weight: float
    hidden: int
    graph_iters: int
    seed: int
    repeats: int
    warmup: int = 2


class Trainer:
    """heptrkx's loss and optimiser."""

    def __init__(self, job: Job) -> None:
        graph = job.graph
        self._x, self._label = torch.from_numpy(graph.features), torch.from_numpy(graph.label)
        self._weight = torch.where(self._label > 0, job.true_weight, 1.0)
        self._network = AttentionNetwork(3, hidden=job.hidden, graph_iters=job.graph_iters, seed=job.seed)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=1e-3, weight_decay=1e-5)
        began = time.perf_counter()
        self._ends = FORMS[job.form].make(torch.from_numpy(graph.edge_index), graph.num_nodes, torch.float32)
        self.seconds_to_make = time.perf_counter() - began

    def step(self) -> dict[str, float]:
        """One training step: its loss, and seconds of forward, backward and all of it."""
        times = [time.perf_counter()]
        self._optimizer.zero_grad()
        logits = logits_of(self._network, self._x, self._ends)
        loss = F.binary_cross_entropy_with_logits(logits, self._label, weight=self._weight)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self._optimizer.step()
        times.append(time.perf_counter())
        forward, backward, _ = np.diff(times).tolist()
        return {"loss": loss.item(), "seconds": times[-1] - times[0], "forward": forward, "backward": backward}


def training_steps(world: World, job: Job) -> dict[str, Any]:
    """Times and peak memory of some steps in this process."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    pair = Graph(job.graph.features[:2], np.array([[0], [1]]), np.ones(1, np.float32))
    Trainer(replace(job, graph=pair)).step()  # all code is loaded before memory is looked at
    bare = peak_rss_bytes()
    trainer = Trainer(job)
    steps = [trainer.step() for _ in range(job.warmup + job.repeats)]
    return {
        "first_loss": steps[0]["loss"],
        "making": trainer.seconds_to_make,
        **{name: [step[name] for step in steps[job.warmup :]] for name in ("seconds", "forward", "backward")},
        "above_bare": peak_rss_bytes() - bare,
    }


def graphs_to_step(divided: dict[str, list[Divided]], whole: bool) -> Iterator[tuple[str, str, Graph]]:
    """(set, which graph, graph): the sector with the number of edges nearest to the mean, and the whole event."""
    for name, events in divided.items():
        sectors = [sector for event in events for sector in event.sectors if sector.num_edges]
        if not sectors:
            raise SystemExit(f"set {name}: no sector has an edge; take events with more hits.")
        mean = statistics.mean(sector.num_edges for sector in sectors)
        yield name, "sector", min(sectors, key=lambda sector: abs(sector.num_edges - mean))
        if whole:
            yield name, "whole", events[0].whole


def problem_of(form: str, graph: Graph, options: argparse.Namespace) -> str | None:
    """Why a form is not run on a graph; None if it is."""
    needed = FORMS[form].dense_bytes(graph, options.graph_iters)
    if needed > options.dense_gb * GB:
        return f"does not fit: {needed / GB:.3g} GB"
    needed += STEP_BYTES * graph.num_edges * options.hidden * options.graph_iters
    free = psutil.virtual_memory().available
    return f"not run: needs some {needed / GB:.0f} GB, {free / GB:.0f} are free" if needed > free else None


def steps_in_turns(graph: Graph, true_weight: float, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What each round says of each form that fits."""
    names = ("hidden", "graph_iters", "seed", "repeats")
    how = {name: getattr(options, name) for name in names}
    runs: dict[str, list[dict[str, Any]]] = {
        form: [] for form in options.forms if problem_of(form, graph, options) is None
    }
    for _ in range(options.rounds):
        for form, found in runs.items():
            job = Job(graph, form, true_weight, **how)
            found += run_ranks(training_steps, 1, job, transport="gloo", timeout=options.timeout)
    return runs


def figures_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds and memory of one form, over its processes."""
    together = {name: Spread.of([t for run in runs for t in run[name]]) for name in ("seconds", "forward", "backward")}
    making = Spread.of([run["making"] for run in runs])
    return {**together, "making": making, "above_bare": max(run["above_bare"] for run in runs)}


def refuse_if_losses_differ(runs: dict[str, list[dict[str, Any]]]) -> float:
    """The largest relative difference of the first loss.

    Raises:
        SystemExit: If forms do not compute the same network.
    """
    if not runs:
        return 0.0
    losses = np.array([found[0]["first_loss"] for found in runs.values()])
    difference = float((losses.max() - losses.min()) / losses.min())  # numpy's: NaN if any is
    if not difference <= LARGEST_DIFFERENCE:
        raise SystemExit(f"first losses differ by {difference:.1e} between forms: {dict(zip(runs, losses.tolist()))}")
    return difference
