"""Figures of wrapped models: against bare ones on one rank, and on several ranks, with what those exchange."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cases
import measuring
import psutil
import torch
from compared import NETWORKS, Runner, difference, gradient_of, largest, make, tiny_graph
from measuring import Row, Spread
from on_ranks import Job
from plain_pyg import read_event
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Data

from domainpar.measure.rates import slowest
from domainpar.nn.adapt.parallelize import Parallel
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.adapt.split import split_graph
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.planner.steps import Training

LIMIT = 0.05
"""Share of a step that wrapping may cost on one rank; Python costs less from some number of edges on."""

SPARE = 1.5
"""Peak of a step over what it keeps for backward, roughly."""


def runners_of(name: str, graph: Data, sizes: Any, world: World) -> dict[str, Runner]:
    """The model bare and wrapped, with the same weights."""
    network = NETWORKS[name]
    part = split_graph(graph.edge_index, graph.num_nodes, world, edges=network.edges)
    return {
        "bare": Runner.bare(make(name, graph, sizes), network, graph),
        "wrapped": Runner.wrapped(make(name, graph, sizes), network, graph, part, world),
    }


@dataclass
class InTurns:
    """Steps of one model, bare, wrapped, and bare again.

    Attributes:
        turns: Of each turn, the figures of its three steps.
        difference: Of the outcomes, bare and wrapped.
        same_bits: Whether there is none at all.
    """

    difference: float
    same_bits: bool
    turns: list[dict[str, dict[str, float]]] = field(default_factory=list)

    def of(self, which: str, name: str) -> list[float]:
        return [turn[which][name] for turn in self.turns]

    def cost(self, name: str) -> Spread:
        """The share that wrapping adds: of each turn, against the mean of the two bare steps around."""
        around = [(turn["bare"][name] + turn["again"][name]) / 2 for turn in self.turns]
        return Spread.of([wrapped / bare - 1 for wrapped, bare in zip(self.of("wrapped", name), around)])

    def resolved(self) -> float:
        """Difference of two equal steps, median over turns."""
        pairs = zip(self.of("again", "total"), self.of("bare", "total"))
        return statistics.median(abs(again / bare - 1) for again, bare in pairs)

    def added(self, name: str) -> float:
        """Seconds that wrapping adds, median over turns."""
        three = zip(self.of("wrapped", name), self.of("bare", name), self.of("again", name))
        return statistics.median(wrapped - (bare + again) / 2 for wrapped, bare, again in three)


def in_turns(runners: dict[str, Runner], drops: bool, repeats: int) -> InTurns:
    """Steps of the network as it is, wrapped, and as it is again, in turns, after one to warm up."""
    bare, wrapped = runners["bare"], runners["wrapped"]
    theirs, mine = bare.outcome(drops), wrapped.outcome(drops)  # these warm up, too
    outcome = InTurns(difference(mine, theirs), mine[0] == theirs[0] and torch.equal(mine[1], theirs[1]))
    for turn in range(repeats + 1):
        steps = {"bare": bare.step(), "wrapped": wrapped.step(), "again": bare.step()}
        if turn:
            outcome.turns.append(steps)
    return outcome


def kept_bytes(runner: Runner) -> int:
    """Bytes that a step keeps for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # a table that is kept twice, or in part, counts once and whole
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        runner.loss()
    return sum(kept.values())


class Counting(TorchFunctionMode):
    """Counts torch calls, and does nothing to them: what is the least that watching can cost."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def microseconds_a_call(runners: dict[str, Runner], repeats: int) -> Row:
    """Of a forward pass, what a torch call takes: bare, what watching adds, and what a mode that does nothing adds."""
    bare, wrapped = runners["bare"], runners["wrapped"]
    with Counting() as counting:
        bare.loss()
    calls = counting.calls
    seconds: dict[str, list[float]] = {"bare": [], "mode": [], "wrapped": []}
    for _ in range(repeats):
        seconds["bare"].append(measuring.seconds_of(bare.loss))
        with Counting():
            seconds["mode"].append(measuring.seconds_of(bare.loss))
        seconds["wrapped"].append(measuring.seconds_of(wrapped.loss))
    medians = {name: 1e6 * statistics.median(values) / calls for name, values in seconds.items()}
    added = {name: medians[name] - medians["bare"] for name in ("mode", "wrapped")}
    return {"calls": calls, "call_us": medians["bare"], "mode_us": added["mode"], "watch_us": added["wrapped"]}


def one_rank(
    results: measuring.Results, graphs: dict[str, Data], options: argparse.Namespace
) -> tuple[list[Row], list[Row]]:
    """All models on all graphs, wrapped against bare: a row for each, and one for each model on all graphs."""
    world, first = World.alone(), next(iter(graphs.values()))
    tiny, rows, summary = tiny_graph(first), [], []
    for name in options.networks:
        drops = "dropout" in name
        fixed = runners_of(name, tiny, options, world)
        times = in_turns(fixed, drops, options.tiny_repeats)
        price = microseconds_a_call(fixed, options.tiny_repeats)
        kept = kept_bytes(runners_of(name, first, options, world)["bare"]) / first.num_edges
        row: Row = {"network": name, **price, "fixed": times.added("total"), "costs": {}, "below": None}
        for size, graph in graphs.items():
            needed, free = SPARE * kept * graph.num_edges, psutil.virtual_memory().available
            if needed > free:
                there = f"some {needed / 2**30:.0f} GiB, of which {free / 2**30:.0f} are there"
                results.console.print(f"{name} on {size}: {there}: left out")
                continue
            steps = in_turns(runners_of(name, graph, options, world), drops, options.repeats)
            rows.append(
                {
                    "network": name,
                    "size": size,
                    "nodes": graph.num_nodes,
                    "edges": graph.num_edges,
                    "bare": Spread.of(steps.of("bare", "total") + steps.of("again", "total")),
                    "wrapped": Spread.of(steps.of("wrapped", "total")),
                    "cost": steps.cost("total"),
                    **{f"cost_{phase}": steps.cost(phase) for phase in ("forward", "backward", "cpu")},
                    "resolved": steps.resolved(),
                    "difference": steps.difference,
                    "same_bits": steps.same_bits,
                }
            )
            results.add(measured="one rank", **rows[-1])
            results.console.print(f"  {name}, {graph.num_edges:,} edges: {rows[-1]['cost'].median:+.1%}")
            row["costs"][size] = rows[-1]["cost"]
            row["below"] = row["fixed"] / (LIMIT * rows[-1]["bare"].median / graph.num_edges)
        results.add(measured="fixed", **{what: value for what, value in row.items() if what != "costs"})
        summary.append(row)
    return rows, summary


# --- on several ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrappedJob:
    """The steps that ranks are asked for.

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


def on_ranks_steps(world: World, job: WrappedJob) -> dict[str, Row]:
    """Steps of every model on this rank's part of the event, and what they exchange. *Collective*."""
    graph = read_event(job.store, job.dtype)
    modules = {name: make(name, graph, job) for name in job.networks}
    world.transport.barrier()  # where ranks are threads: nobody draws weights while others look at torch's generator
    parts: dict[str, GraphPart] = {}
    figures = {}
    for name, module in modules.items():
        network = NETWORKS[name]
        if network.edges not in parts:
            parts[network.edges] = split_graph(graph.edge_index, graph.num_nodes, world, edges=network.edges)
        part = parts[network.edges]
        runner = Runner.wrapped(module, network, graph, part, world)
        figures[name] = {**counts_of(runner, part, world, "dropout" in name), **steps_of(runner, world, job.repeats)}
        figures[name]["ghosts"], figures[name]["owned"] = part.plan.num_ghosts, part.plan.num_owned
    return figures


def counts_of(runner: Runner, part: GraphPart, world: World, drops: bool) -> Row:
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


def several_ranks(results: measuring.Results, case: cases.Case, options: argparse.Namespace) -> list[Row]:
    """Steps on each number of ranks, in rounds: a row for each model and number."""
    names = ("hidden", "layers", "graph_iters", "dtype", "seed", "repeats")
    job = WrappedJob(case.store, tuple(options.networks), **{name: getattr(options, name) for name in names})
    runs: dict[int, list[list[dict[str, Row]]]] = {ranks: [] for ranks in options.ranks}
    for _ in range(options.rounds):
        for ranks, of_ranks in runs.items():
            how = {"transport": options.transport, "timeout": options.timeout}
            of_ranks.append(run_ranks(on_ranks_steps, ranks, job, **how))
    rows = [row_of(name, ranks, runs, options) for name in options.networks for ranks in options.ranks]
    for row in rows:
        results.add(measured="ranks", case=case.name, **row)
    return rows


def row_of(name: str, ranks: int, runs: dict[int, list[list[dict[str, Row]]]], options: argparse.Namespace) -> Row:
    """A row of the table on several ranks: seconds of the slowest rank, speed-up over the fewest ranks."""

    def times(ranks: int, phase: str) -> list[list[float]]:
        return [slowest([rank[name][phase] for rank in run]) for run in runs[ranks]]

    first = [statistics.median(steps) for steps in times(options.ranks[0], "total")]
    here = [statistics.median(steps) for steps in times(ranks, "total")]
    of_ranks = [rank[name] for rank in runs[ranks][0]]
    reference = runs[options.ranks[0]][0][0][name]["outcome"]
    phases = ("total", "forward", "backward", "sum")
    return {
        "network": name,
        "ranks": ranks,
        **{phase: Spread.of([step for steps in times(ranks, phase) for step in steps]) for phase in phases},
        "speed_up": Spread.of([theirs / mine for theirs, mine in zip(first, here)]),
        "exchanges": of_ranks[0]["exchanges"],
        "sums": of_ranks[0]["sums"],
        "ghosts_share": sum(rank["ghosts"] for rank in of_ranks) / sum(rank["owned"] for rank in of_ranks),
        "difference": largest(difference(run[0][name]["outcome"], reference) for run in runs[ranks]),
    }


def staged_steps(world: World, job: Job) -> tuple[int, int]:
    """Exchanges of a built-in network, forward and backward. *Collective*."""
    trainer, samples = job.trainer(world)
    trainer.step(samples, 0)
    forward, backward = trainer.exchanges
    return int(forward), int(backward)


def exchanges(results: measuring.Results, case: cases.Case, options: argparse.Namespace) -> list[Row]:
    """Exchanges of two ranks in a step: a row for each model, and for the built-in network."""
    iters = {"hidden": 16, "graph_iters": options.count_iters, "dtype": "float64"}
    job = WrappedJob(case.store, tuple(options.networks), layers=options.layers, **iters)
    (whole,), split = run_ranks(on_ranks_steps, 1, job), run_ranks(on_ranks_steps, 2, job)
    rows = []
    for name, network in NETWORKS.items():
        if name in options.networks:
            counts = {what: split[0][name][what] for what in ("exchanges", "sums", "sent_forward", "sent_backward")}
            steps = f"{options.count_iters} iterations" if network.scores == "edges" else f"{options.layers} layers"
            apart = difference(split[0][name]["outcome"], whole[name]["outcome"])
            rows.append({"network": name, "form": "wrapped", "steps": steps, **counts, "difference": apart})
    for name in ("interaction", "interaction-node-first"):
        training = Training(name, hidden=16, graph_iters=options.count_iters, precision="float64")
        ((forward, backward), *_) = run_ranks(staged_steps, 2, Job(case.store, training))
        steps = f"{options.count_iters} iterations"
        counts = {"exchanges": forward, "sums": 0, "sent_forward": forward, "sent_backward": backward}
        rows.append({"network": name, "form": "stages", "steps": steps, **counts, "difference": None})
    for row in rows:
        results.add(measured="exchanges", case=case.name, **row)
    return rows
