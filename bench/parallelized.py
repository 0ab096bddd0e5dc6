"""What does `parallelize` cost a model on one rank, and what do its exchanges make of two?

    python bench/parallelized.py --data DIR --event 1012      the largest graph a real event; minutes
    python bench/parallelized.py                              a simulated one
    python bench/parallelized.py --sizes small --networks GCN agnn --repeats 3 --rounds 1 --hidden 16       seconds

One rank takes the same forward and backward pass with a model as it is (bare) and wrapped, on graphs of several sizes.
They take turns: bare, wrapped, bare again, so that a busy moment hits both, and what two equal things differ by is
known. The same on a graph of a dozen nodes, where nothing but Python is left, says what a torch call costs.
Then ranks as processes take steps of the wrapped models, and ranks as threads count what each model exchanges.

The program fails if losses or gradients differ: wrapped from bare, two ranks from one. Models that drop numbers draw
other ones when wrapped; they are compared without.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import cases
import measuring
import on_ranks
import plain_pyg
import psutil
import torch
import torch_geometric.nn as pyg
from measuring import Spread
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.overrides import TorchFunctionMode

from domainpar.events.store import EventStore
from domainpar.nn.adapt.parallelize import Parallel, parallelize
from domainpar.nn.adapt.part import GraphPart, split_graph
from domainpar.nn.agnn import AttentionNetwork
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.training.sampler import samples_of

SIZES: dict[str, dict[str, Any]] = {
    "small": {"hits": 2_000, "phi_slope": 6e-3, "z0": 1000.0, "data": None},
    "middle": {"hits": 20_000, "phi_slope": 6e-4, "z0": 1000.0, "data": None},
    "large": {},
}
"""Flags of each size in place of given ones: 2e3 nodes and 2e4 edges, 2e4 and 2e5, and the event that was asked for."""

TINY_NODES, TINY_EDGES = 12, 36
DROPOUT = 0.5
LIMIT = 0.05
"""What a wrapped model may cost on one rank; the price of Python is below it from some number of edges on."""

LARGEST_DIFFERENCE = {"float32": 1e-4, "float64": 1e-11}
"""Of losses, and of gradients against the largest one of the model."""

SPARE = 1.5
"""Peak of a step over what it keeps for backward, roughly."""

Columns = dict[str, Callable[[dict[str, Any]], str]]


# --- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        layers: Convolutions of torch_geometric's models.
        graph_iters: Iterations of the edge classifiers.
        degrees: How many nodes have 0, 1, 2 ... incoming edges; PNA wants to know.
    """

    node_features: int
    edge_features: int
    hidden: int
    layers: int
    graph_iters: int
    degrees: Tensor
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass(frozen=True)
class Network:
    """One model of the comparison.

    Attributes:
        make: Builds it with torch's generator.
        scores: What it returns a row for.
        edges: The edges its parts compute on.
        takes: Fields of a graph it is called with.
    """

    make: Callable[[Shape], nn.Module]
    scores: Literal["nodes", "edges"] = "nodes"
    edges: Literal["incoming", "incident"] = "incoming"
    takes: tuple[str, ...] = ("x", "edge_index")


def of_pyg(name: str, **options: Any) -> Network:
    """A model of `torch_geometric.nn.models`: convolutions with ReLU, and perhaps norms and dropout, between them."""

    def make(shape: Shape) -> nn.Module:
        further = {"deg": shape.degrees} if name == "PNA" else {}
        model: nn.Module = getattr(pyg, name)(
            shape.node_features, shape.hidden, shape.layers, shape.hidden, **options, **further
        )
        return model

    return Network(make)


class EvolvingEdges(plain_pyg.PlainInteraction):
    """The plain network, but sums at nodes have rows from `x` and not from `len(x)`, which torch does not see."""

    @staticmethod
    def _edge_first(
        edge_stage: plain_pyg.EdgeUpdate,
        node_stage: plain_pyg.NodeUpdate | None,
        x: Tensor,
        edge_index: Tensor,
        e: Tensor,
    ) -> tuple[Tensor, Tensor]:
        e = edge_stage(x, edge_index, e)
        if node_stage is None:
            return x, e
        src, dst = edge_index
        at_dst, at_src = (torch.zeros_like(x).index_add(0, end, e) for end in (dst, src))
        return node_stage.mlp(torch.cat([x, at_dst, at_src], dim=1)), e


def interaction(shape: Shape) -> nn.Module:
    return EvolvingEdges(shape.node_features, shape.edge_features, shape.hidden, shape.graph_iters)


def agnn(shape: Shape) -> nn.Module:
    return AttentionNetwork(shape.node_features, hidden=shape.hidden, graph_iters=shape.graph_iters)


PNA = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]}
NETWORKS = {
    "GCN": of_pyg("GCN"),
    f"GCN, dropout {DROPOUT}": of_pyg("GCN", dropout=DROPOUT),
    "GAT": of_pyg("GAT", heads=4),
    f"GAT, dropout {DROPOUT}": of_pyg("GAT", heads=4, dropout=DROPOUT),
    "GATv2": of_pyg("GAT", heads=4, v2=True),
    "GraphSAGE, BatchNorm": of_pyg("GraphSAGE", norm="batch_norm"),
    "GIN": of_pyg("GIN"),
    "PNA": of_pyg("PNA", **PNA),
    "EdgeCNN": of_pyg("EdgeCNN"),
    "interaction": Network(interaction, "edges", "incident", ("x", "edge_index", "edge_attr")),
    "agnn": Network(agnn, "edges", "incident"),
}
_ONE_AT_A_TIME = threading.Lock()  # ranks may be threads, and torch has one generator


def make(name: str, shape: Shape) -> nn.Module:
    """A model with weights by the seed alone."""
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(shape.seed)
        return NETWORKS[name].make(shape).to(shape.dtype)


# --- graphs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph as users hold it.

    Attributes:
        x: Node features, [N, node features].
        edge_index: `src` and `dst` of each edge, int64 [2, E].
        edge_attr: Edge features, [E, edge features].
        label: 1 for true edges, [E].
    """

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    label: Tensor

    @property
    def num_nodes(self) -> int:
        return len(self.x)

    @property
    def num_edges(self) -> int:
        return len(self.label)

    def shape(self, options: argparse.Namespace | Job) -> Shape:
        degrees = torch.bincount(torch.bincount(self.edge_index[1], minlength=self.num_nodes))
        of = {name: getattr(options, name) for name in ("hidden", "layers", "graph_iters", "seed")}
        widths = self.x.shape[1], self.edge_attr.shape[1]
        return Shape(*widths, degrees=degrees, dtype=on_ranks.DTYPES[options.dtype], **of)


def stored_graph(store: Path, dtype: str) -> Graph:
    """The first event of a store."""
    data = plain_pyg.read_event(on_ranks.StepSettings(store, dtype=dtype))
    return Graph(data.x, data.edge_index, data.edge_attr, data.y)


def tiny_graph(like: Graph) -> Graph:
    """A graph on which torch has next to nothing to do."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(TINY_NODES, (2, TINY_EDGES), generator=generator)
    edge_index[1, :TINY_NODES] = torch.arange(TINY_NODES)
    return Graph(like.x[:TINY_NODES], edge_index, like.edge_attr[:TINY_EDGES], like.label[:TINY_EDGES])


def case_of(size: str, options: argparse.Namespace) -> cases.Case:
    return cases.chosen_case(argparse.Namespace(**{**vars(options), **SIZES[size], "num_events": 1}))


# --- one step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Runner:
    """A model, bare or wrapped, with all it is called with.

    Attributes:
        model: The model.
        arguments: Its arguments.
        label: Of the rows that come back; None for scores of nodes, whose squares are the loss.
        num_rows: Rows of the whole graph.
    """

    model: nn.Module
    arguments: tuple[Tensor, ...]
    label: Tensor | None
    num_rows: int

    @classmethod
    def bare(cls, module: nn.Module, network: Network, graph: Graph) -> Runner:
        arguments = tuple(getattr(graph, name) for name in network.takes)
        if network.scores == "nodes":
            return cls(module, arguments, None, graph.num_nodes)
        return cls(module, arguments, graph.label, graph.num_edges)

    @classmethod
    def wrapped(cls, module: nn.Module, network: Network, graph: Graph, part: GraphPart, world: World) -> Runner:
        marked = {"x": part.nodes(graph.x), "edge_index": part.edge_index, "edge_attr": part.edges(graph.edge_attr)}
        arguments, model = tuple(marked[name] for name in network.takes), parallelize(module, world)
        if network.scores == "nodes":
            return cls(model, arguments, None, graph.num_nodes)
        return cls(model, arguments, part.owned_edges(graph.label), graph.num_edges)

    def loss(self) -> Tensor:
        """The forward pass: this rank's share of the mean over all rows."""
        found = self.model(*self.arguments)
        if self.label is None:
            return found.square().sum() / (self.num_rows * found.shape[1])
        return binary_cross_entropy_with_logits(found, self.label, reduction="sum") / self.num_rows

    def step(self) -> dict[str, float]:
        """Seconds of forward and backward, by the clock and of the processor."""
        self.model.zero_grad()
        began_cpu, began = time.process_time(), time.perf_counter()
        loss = self.loss()
        between = time.perf_counter()
        loss.backward()
        ended, ended_cpu = time.perf_counter(), time.process_time()
        return {
            "total": ended - began,
            "forward": between - began,
            "backward": ended - between,
            "cpu": ended_cpu - began_cpu,
        }

    def outcome(self, drops: bool) -> tuple[float, Tensor]:
        """Loss and gradient of a step without dropout, of all parameters in one row."""
        self.model.train(not drops)
        self.model.zero_grad()
        loss = self.loss()
        loss.backward()
        self.model.train()
        return float(loss.detach()), gradient_of(self.model)


def gradient_of(model: nn.Module) -> Tensor:
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    return torch.cat([one.flatten() for one in grads])


def difference(mine: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> float:
    """Of two outcomes: of the losses, or of the gradients against the largest one; the larger."""
    of_loss = abs(mine[0] - theirs[0]) / abs(theirs[0])
    of_gradient = float((mine[1] - theirs[1]).abs().max() / theirs[1].abs().max())
    return largest([of_loss, of_gradient])


def largest(values: Iterable[float]) -> float:
    """NaN if one of them is, or if there are none."""
    found = torch.tensor(list(values), dtype=torch.float64)
    return float(found.max()) if len(found) else float("nan")


# --- one rank, wrapped against bare ----------------------------------------------------------------------------------


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


def one_rank(results: measuring.Results, graphs: dict[str, Graph], options: argparse.Namespace) -> float:
    """All models on all graphs, wrapped against bare; returns the largest difference."""
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
    show_one_rank(results, rows, summary, graphs)
    return largest(row["difference"] for row in rows)


def figures_of(name: str, size: str, graph: Graph, found: InTurns) -> dict[str, Any]:
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


def show_one_rank(
    results: measuring.Results,
    rows: Sequence[dict[str, Any]],
    summary: Sequence[dict[str, Any]],
    graphs: dict[str, Graph],
) -> None:
    columns: Columns = {
        "model": lambda row: row["network"],
        "edges": lambda row: f"{row['edges']:,}",
        "bare ms": lambda row: f"{1e3 * row['bare'].median:.1f}",
        "wrapped ms": lambda row: f"{1e3 * row['wrapped'].median:.1f}",
        "cost": lambda row: f"{row['cost'].median:+.1%}",
        "from, to": lambda row: f"{row['cost'].low:+.1%} {row['cost'].high:+.1%}",
        "forward": lambda row: f"{row['cost_forward'].median:+.1%}",
        "backward": lambda row: f"{row['cost_backward'].median:+.1%}",
        "CPU": lambda row: f"{row['cost_cpu'].median:+.1%}",
        "resolved": lambda row: f"{row['resolved']:.1%}",
        "bits": lambda row: "the same" if row["same_bits"] else f"{row['difference']:.0e}",
    }
    note = (
        "Forward and backward, of the same weights in turns. Cost: wrapped over the mean of the bare steps before and "
        "after it, less 1; median over turns, smallest and largest. CPU: the same in seconds of the processor. "
        "Resolved: what two bare steps of one turn differ by, median. Bits: of loss and gradients, or by how much they "
        "differ; of models with dropout, without it."
    )
    results.show("One rank, wrapped against bare", columns, rows, note)

    def cost_at(size: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row['costs'][size].median:+.1%}" if size in row["costs"] else ""

    columns = {
        "model": lambda row: row["network"],
        "calls": lambda row: f"{row['calls']}",
        "us a call": lambda row: f"{row['call_us']:.1f}",
        "+ mode": lambda row: f"{row['mode_us']:.1f}",
        "+ wrapped": lambda row: f"{row['watch_us']:.1f}",
        "fixed ms": lambda row: f"{1e3 * row['fixed']:.2f}",
        **{f"{graphs[size].num_edges:,}": cost_at(size) for size in graphs},
        f"{LIMIT:.0%} at edges": lambda row: "" if row["below"] is None else f"{row['below']:,.0f}",
    }
    note = (
        "Calls: torch calls of a forward pass. Us a call: on a graph of a dozen nodes, bare; what a mode that does "
        "nothing adds; what wrapping adds, with all that happens once a pass. Fixed: what wrapping adds to forward and "
        f"backward there. {LIMIT:.0%} at: the edges on which this is {LIMIT:.0%} of the bare step, by the time an edge "
        "takes on the largest graph; what grows with the graph, as dropout does, is not in it."
    )
    results.show("What it costs by size", columns, summary, note)


# --- several ranks ---------------------------------------------------------------------------------------------------


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


def several_ranks(results: measuring.Results, case: cases.Case, options: argparse.Namespace) -> float:
    """Steps on each number of ranks, in rounds; returns the largest difference from one rank."""
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
    columns: Columns = {
        "model": lambda row: row["network"],
        "ranks": lambda row: f"{row['ranks']}" + (" *" if row["ranks"] > (psutil.cpu_count() or 1) else ""),
        "step ms": lambda row: f"{1e3 * row['total'].median:.1f}",
        "from, to": lambda row: f"{1e3 * row['total'].low:.1f} {1e3 * row['total'].high:.1f}",
        "speed-up": lambda row: f"{row['speed_up'].median:.2f}",
        **{name: lambda row, name=name: f"{1e3 * row[name].median:.1f}" for name in ("forward", "backward", "sum")},
        "exchanges": lambda row: f"{row['exchanges']}",
        "sums": lambda row: f"{row['sums']}",
        "ghosts / owned": lambda row: f"{row['ghosts_share']:.2%}",
        "differ": lambda row: f"{row['difference']:.0e}",
    }
    note = (
        "Wrapped models; ms of the slowest rank, median. Sum: of gradients. Speed-up: over the first number of ranks, "
        "median over rounds. Exchanges, sums: of a forward pass. Differ: loss or gradients from the first line. * more "
        "ranks than cores."
    )
    results.show("Steps on ranks", columns, rows, note)
    return largest(row["difference"] for row in rows)


def row_of(
    name: str,
    ranks: int,
    runs: dict[int, list[list[dict[str, dict[str, Any]]]]],
    options: argparse.Namespace,
) -> dict[str, Any]:
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


# --- what each model exchanges ---------------------------------------------------------------------------------------


def staged_steps(world: World, settings: on_ranks.StepSettings) -> tuple[int, int]:
    """Exchanges of a built-in network, forward and backward. *Collective*."""
    trainer = on_ranks.make_trainer(settings, world)
    trainer.step(samples_of(EventStore(settings.store).events()[:1], None), 0)
    forward, backward = trainer.exchanges
    return int(forward), int(backward)


def exchanges(results: measuring.Results, case: cases.Case, options: argparse.Namespace) -> float:
    """What two ranks send each other in a step of each model; returns the largest difference from one rank."""
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
    columns: Columns = {
        "model": lambda row: row["network"],
        "form": lambda row: row["form"],
        "of": lambda row: row["steps"],
        "exchanges": lambda row: f"{row['exchanges']}",
        "sums": lambda row: f"{row['sums']}",
        "sent forward": lambda row: f"{row['sent_forward']}",
        "backward": lambda row: f"{row['sent_backward']}",
        "differ": lambda row: "" if row["difference"] is None else f"{row['difference']:.0e}",
    }
    note = (
        "Two ranks. Exchanges: how often ghosts are filled in a forward pass; sums: how often something is summed or "
        "compared over ranks. Sent: exchanges that the transport was asked for, forward and backward. Stages: the "
        "built-in network, for comparison. Differ: loss or gradients from one rank, in float64."
    )
    results.show("What a step exchanges", columns, rows, note)
    return largest(row["difference"] for row in rows if row["form"] == "wrapped")


# --- all of it -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(1)
    results = measuring.Results("parallelized", options)
    found = {size: case_of(size, options) for size in options.sizes}
    graphs = {size: stored_graph(case.store, options.dtype) for size, case in found.items()}
    for size, graph in graphs.items():
        text = f"{size}: {found[size].name}, {graph.num_nodes:,} nodes, {graph.num_edges:,} edges"
        results.console.print(f"{text}; hidden {options.hidden}, {options.layers} layers, {options.dtype}")
    first, last = found[options.sizes[0]], found[options.sizes[-1]]
    limit = LARGEST_DIFFERENCE[options.dtype]
    differences = {"wrapped and bare": (one_rank(results, graphs, options), limit)}
    if options.ranks:
        differences["ranks"] = several_ranks(results, last, options), limit
    differences["two ranks and one in float64"] = exchanges(results, first, options), LARGEST_DIFFERENCE["float64"]
    results.end()
    return agree(results, differences)


def agree(results: measuring.Results, differences: dict[str, tuple[float, float]]) -> int:
    """1 if losses or gradients differ by more than rounding."""
    for between, (found, limit) in differences.items():
        verdict = "agree" if found <= limit else "DIFFER"
        results.console.print(f"{between}: losses and gradients {verdict}: {found:.1e}, limit {limit:.0e}")
    return int(not all(found <= limit for found, limit in differences.values()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases.add_flags(parser, case="large")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="`large` is what the flags ask")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="default: all")
    parser.add_argument("--hidden", type=int, default=32, help="width; a wider model costs less, as a share")
    parser.add_argument("--layers", type=int, default=3, help="convolutions of torch_geometric's models")
    parser.add_argument("--graph-iters", type=int, default=4, help="iterations of interaction and agnn")
    parser.add_argument("--dtype", choices=on_ranks.DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=7, help="turns, after one to warm up; steps of a round on ranks")
    parser.add_argument("--tiny-repeats", type=int, default=100, help="turns on the graph of a dozen nodes")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="none: no steps on ranks")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each number of ranks, in fresh processes")
    parser.add_argument("--transport", choices=("mpi", "gloo", "threads"), default="mpi", help="of these ranks")
    parser.add_argument("--count-iters", type=int, default=8, help="iterations in the table of exchanges")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one turn of ranks")
    measuring.add_flags(parser, "parallelized")
    return parser.parse_args(argv)


if __name__ == "__main__":
    import parallelized  # ranks import what they do by name

    sys.exit(parallelized.main())
