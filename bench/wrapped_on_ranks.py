"""Wrapped models on ranks: the steps they take, and what they exchange. Processes import what they do by name."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import measuring
import on_ranks
from compared_models import NETWORKS, make, stored_graph
from compared_steps import Runner, difference, gradient_of, largest
from measuring import Spread

from domainpar.events.store import EventStore
from domainpar.nn.adapt.parallelize import Parallel
from domainpar.nn.adapt.part import GraphPart, split_graph
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.training.sampler import samples_of


@dataclass(frozen=True)
class Job:
    """What ranks are asked to do.

    Attributes:
        store: Where the event lies.
        networks: The models, by name.
    """

    store: Path
    networks: tuple[str, ...]
    hidden: int
    layers: int
    graph_iters: int
    dtype: str = "float32"
    seed: int = 0
    repeats: int = 0


def on_ranks_steps(world: World, job: Job) -> dict[str, dict[str, Any]]:
    """Steps of every model on this rank's part of the event, and what they exchange. *Collective*."""
    graph = stored_graph(job.store, job.dtype)
    modules = {name: make(name, graph.shape(job)) for name in job.networks}
    world.transport.barrier()  # where ranks are threads: nobody draws weights while others look at torch's generator
    parts: dict[str, GraphPart] = {}
    found = {}
    for name, module in modules.items():
        network = NETWORKS[name]
        if network.edges not in parts:
            parts[network.edges] = split_graph(graph.edge_index, graph.num_nodes, world, edges=network.edges)
        part = parts[network.edges]
        runner = Runner.wrapped(module, network, graph, part, world)
        found[name] = {**counts_of(runner, part, world, "dropout" in name), **steps_of(runner, world, job.repeats)}
        found[name]["ghosts"], found[name]["owned"] = part.plan.num_ghosts, part.plan.num_owned
    return found


def counts_of(runner: Runner, part: GraphPart, world: World, drops: bool) -> dict[str, Any]:
    """One step, forward and backward: what it exchanges and sums, loss and gradient of the whole. *Collective*."""
    assert isinstance(runner.model, Parallel)
    transport = world.transport
    part.num_exchanges = part.num_sums = 0
    runner.model.train(not drops)
    runner.model.zero_grad()
    began = transport.num_exchanges
    loss = runner.loss()
    between = transport.num_exchanges
    loss.backward()
    ended = transport.num_exchanges
    runner.model.sum_gradients()
    runner.model.train()
    return {
        "exchanges": part.num_exchanges,
        "sums": part.num_sums,
        "sent_forward": between - began,
        "sent_backward": ended - between,
        "outcome": (float(part.sum(loss)), gradient_of(runner.model)),
    }


def steps_of(runner: Runner, world: World, repeats: int) -> dict[str, list[float]]:
    """Seconds of this rank's steps, gradients summed. *Collective*."""
    assert isinstance(runner.model, Parallel)
    times: dict[str, list[float]] = {"total": [], "forward": [], "backward": [], "sum": []}
    for _ in range(repeats):
        world.transport.barrier()
        step = runner.step()
        step["sum"] = measuring.seconds_of(runner.model.sum_gradients)
        step["total"] += step["sum"]
        for name, kept in times.items():
            kept.append(step[name])
    return times


def several_ranks(results: measuring.Results, case: cases.Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps on each number of ranks, in rounds: a row for each model and number."""
    names = ("hidden", "layers", "graph_iters", "dtype", "seed", "repeats")
    job = Job(case.store, tuple(options.networks), **{name: getattr(options, name) for name in names})
    runs: dict[int, list[list[dict[str, dict[str, Any]]]]] = {ranks: [] for ranks in options.ranks}
    for _ in range(options.rounds):
        for ranks, of_ranks in runs.items():
            how = {"transport": options.transport, "timeout": options.timeout}
            of_ranks.append(run_ranks(on_ranks_steps, ranks, job, **how))
    rows = [row_of(name, ranks, runs, options) for name in options.networks for ranks in options.ranks]
    for row in rows:
        results.add(measured="ranks", case=case.name, **row)
    return rows


def row_of(
    name: str,
    ranks: int,
    runs: dict[int, list[list[dict[str, dict[str, Any]]]]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """A row of the table on several ranks: seconds of the slowest rank, speed-up over the fewest ranks."""

    def slowest(ranks: int, what: str) -> list[list[float]]:
        return [measuring.slowest([rank[name][what] for rank in run]) for run in runs[ranks]]

    first = [statistics.median(times) for times in slowest(options.ranks[0], "total")]
    here = [statistics.median(times) for times in slowest(ranks, "total")]
    of_ranks = [rank[name] for rank in runs[ranks][0]]
    reference = runs[options.ranks[0]][0][0][name]["outcome"]
    phases = ("total", "forward", "backward", "sum")
    return {
        "network": name,
        "ranks": ranks,
        **{phase: Spread.of([t for times in slowest(ranks, phase) for t in times]) for phase in phases},
        "speed_up": Spread.of([one / mine for one, mine in zip(first, here)]),
        "exchanges": of_ranks[0]["exchanges"],
        "sums": of_ranks[0]["sums"],
        "ghosts_share": sum(rank["ghosts"] for rank in of_ranks) / sum(rank["owned"] for rank in of_ranks),
        "difference": largest(difference(run[0][name]["outcome"], reference) for run in runs[ranks]),
    }


def staged_steps(world: World, settings: on_ranks.StepSettings) -> tuple[int, int]:
    """Exchanges of a built-in network, forward and backward. *Collective*."""
    trainer = on_ranks.make_trainer(settings, world)
    trainer.step(samples_of(EventStore(settings.store).events()[:1], None), 0)
    forward, backward = trainer.exchanges
    return int(forward), int(backward)


def exchanges(results: measuring.Results, case: cases.Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What two ranks send each other in a step: a row for each model, and for the built-in network."""
    iters = {"hidden": 16, "graph_iters": options.count_iters, "dtype": "float64"}
    job = Job(case.store, tuple(options.networks), layers=options.layers, **iters)
    (whole,), split = run_ranks(on_ranks_steps, 1, job), run_ranks(on_ranks_steps, 2, job)
    rows = []
    for name, network in NETWORKS.items():
        if name in options.networks:
            counts = {what: split[0][name][what] for what in ("exchanges", "sums", "sent_forward", "sent_backward")}
            steps = f"{options.count_iters} iterations" if network.scores == "edges" else f"{options.layers} layers"
            apart = difference(split[0][name]["outcome"], whole[name]["outcome"])
            rows.append({"network": name, "form": "wrapped", "steps": steps, **counts, "difference": apart})
    for name in ("interaction", "interaction-node-first"):
        settings = on_ranks.StepSettings(case.store, model=name, **iters)
        ((forward, backward), *_) = run_ranks(staged_steps, 2, settings)
        steps = f"{options.count_iters} iterations"
        counts = {"exchanges": forward, "sums": 0, "sent_forward": forward, "sent_backward": backward}
        rows.append({"network": name, "form": "stages", "steps": steps, **counts, "difference": None})
    for row in rows:
        results.add(measured="exchanges", case=case.name, **row)
    return rows
