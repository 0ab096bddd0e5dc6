"""What `parallelize` costs a model on one rank: wrapped and bare in turns, and what a torch call costs."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import Any

import measuring
import psutil
import torch
from compared_models import NETWORKS, Graph, Shape, make, tiny_graph
from compared_steps import Runner, difference
from measuring import Spread
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from domainpar.nn.adapt.part import split_graph
from domainpar.parallel.world import World

LIMIT = 0.05
"""What a wrapped model may cost on one rank; the price of Python is below it from some number of edges on."""

SPARE = 1.5
"""Peak of a step over what it keeps for backward, roughly."""


def runners_of(name: str, graph: Graph, shape: Shape, world: World) -> dict[str, Runner]:
    """The model bare and wrapped, with the same weights."""
    network = NETWORKS[name]
    part = split_graph(graph.edge_index, graph.num_nodes, world, edges=network.edges)
    return {
        "bare": Runner.bare(make(name, shape), network, graph),
        "wrapped": Runner.wrapped(make(name, shape), network, graph, part, world),
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
        """What wrapping adds, as a share: of each turn, against the mean of the two bare steps around."""
        around = [(turn["bare"][name] + turn["again"][name]) / 2 for turn in self.turns]
        return Spread.of([wrapped / bare - 1 for wrapped, bare in zip(self.of("wrapped", name), around)])

    def resolved(self) -> float:
        """What two equal steps differ by: the larger half of the turns differs by more."""
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
    found = InTurns(difference(mine, theirs), mine[0] == theirs[0] and torch.equal(mine[1], theirs[1]))
    for turn in range(repeats + 1):
        steps = {"bare": bare.step(), "wrapped": wrapped.step(), "again": bare.step()}
        if turn:
            found.turns.append(steps)
    return found


def kept_bytes(runner: Runner) -> int:
    """What a step keeps for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
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


def microseconds_a_call(runners: dict[str, Runner], repeats: int) -> dict[str, Any]:
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
    medians = {name: 1e6 * statistics.median(found) / calls for name, found in seconds.items()}
    added = {name: medians[name] - medians["bare"] for name in ("mode", "wrapped")}
    return {"calls": calls, "call_us": medians["bare"], "mode_us": added["mode"], "watch_us": added["wrapped"]}


def one_rank(
    results: measuring.Results, graphs: dict[str, Graph], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All models on all graphs, wrapped against bare: a row for each, and one for each model on all graphs."""
    world, first = World.alone(), next(iter(graphs.values()))
    tiny, rows, summary = tiny_graph(first), [], []
    for name in options.networks:
        drops = "dropout" in name
        fixed = runners_of(name, tiny, first.shape(options), world)
        times = in_turns(fixed, drops, options.tiny_repeats)
        price = microseconds_a_call(fixed, options.tiny_repeats)
        kept = kept_bytes(runners_of(name, first, first.shape(options), world)["bare"]) / first.num_edges
        row: dict[str, Any] = {"network": name, **price, "fixed": times.added("total"), "costs": {}, "below": None}
        for size, graph in graphs.items():
            needed, free = SPARE * kept * graph.num_edges, psutil.virtual_memory().available
            if needed > free:
                text = (
                    f"{name} on {size}: some {needed / 2**30:.0f} GiB, of which {free / 2**30:.0f} are there: left out"
                )
                results.console.print(text)
                continue
            found = in_turns(runners_of(name, graph, graph.shape(options), world), drops, options.repeats)
            rows.append(figures_of(name, size, graph, found))
            results.add(measured="one rank", **rows[-1])
            results.console.print(f"  {name}, {graph.num_edges:,} edges: {rows[-1]['cost'].median:+.1%}")
            row["costs"][size] = rows[-1]["cost"]
            row["below"] = row["fixed"] / (LIMIT * rows[-1]["bare"].median / graph.num_edges)
        results.add(measured="fixed", **{what: value for what, value in row.items() if what != "costs"})
        summary.append(row)
    return rows, summary


def figures_of(name: str, size: str, graph: Graph, found: InTurns) -> dict[str, Any]:
    """A row of the table on one rank."""
    costs = {f"cost_{phase}": found.cost(phase) for phase in ("forward", "backward", "cpu")}
    return {
        "network": name,
        "size": size,
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "bare": Spread.of(found.of("bare", "total") + found.of("again", "total")),
        "wrapped": Spread.of(found.of("wrapped", "total")),
        "cost": found.cost("total"),
        **costs,
        "resolved": found.resolved(),
        "difference": found.difference,
        "same_bits": found.same_bits,
    }
