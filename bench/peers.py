"""How do other packages split a graph over ranks: do they give the right answer, in what time, bytes and memory?

    PYTHONPATH=FOLDER python bench/peers.py                      an event of TrackML size, two ranks over gloo
    python bench/peers.py --case tiny --hidden 16 --repeats 2    seconds, to see that it runs

Nothing is installed: a peer that cannot be imported is named and left out. Put them into a folder of their own by
`pip install --no-deps --target FOLDER fairchem-core nvidia-physicsnemo anemoi-models` and what these miss (omegaconf,
treelib, six). Of fairchem and PhysicsNeMo the files that split graphs are imported without the rest of the package;
PhysicsNeMo calls the list form of `all_to_all`, which gloo has for equal sizes only, and is given `all_to_all_single`
in its place.

Every system runs the same network of plain torch, two rounds of messages of `--hidden` columns, on the same ranges of
nodes; plan and exchange are its own. Three graphs: an event, whose edges are directed; the same with every edge both
ways; and the event with all nodes on the first rank, so that the others are empty. `loss` and `gradient`: relative
error against float64 undivided. `x bound`: rows sent over the fewest that could be. One rank: the network by itself,
checkpointed and compiled.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cases
import flags
import measuring
import numpy as np
import torch
from measuring import Columns, Row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from domainpar import parallelize, split_graph
from domainpar.common.agreement import gather
from domainpar.measure.forecast import MemoryMeter
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore

Exchange = Callable[[Tensor], Tensor]
GRAPHS = ("directed", "symmetric", "empty ranks")


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph whose edges are sorted by `dst`, and how many nodes, consecutive ones, each rank has."""

    num_nodes: int
    edge_index: Tensor
    sizes: list[int]

    def range_of(self, rank: int) -> tuple[int, int]:
        first = sum(self.sizes[:rank])
        return first, first + self.sizes[rank]

    def own_edges(self, rank: int) -> Tensor:
        """Those that end at a rank's nodes, by global ids."""
        bounds = torch.tensor(self.range_of(rank))
        first, last = torch.searchsorted(self.edge_index[1].contiguous(), bounds).tolist()
        return self.edge_index[:, first:last]

    def owner(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))

    def bound(self) -> int:
        """Rows that have to be sent: each once to each rank that needs it."""
        owner = self.owner()
        src, to = self.edge_index[0], owner[self.edge_index[1]]
        cut = owner[src] != to
        return int(torch.unique(src[cut] * len(self.sizes) + to[cut]).numel())


class Network(nn.Module):
    """Two rounds of messages; what carries rows between ranks is given."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rounds = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(2))

    def forward(self, h: Tensor, edge_index: Tensor, exchange: Exchange | None = None, ways: str = "") -> Tensor:
        for linear in self.rounds:
            h = checkpoint(step, h, edge_index, linear, exchange, use_reentrant=False) if ways == "checkpoint" else (
                step(h, edge_index, linear, exchange))  # fmt: skip
        return h


def step(h: Tensor, edge_index: Tensor, linear: nn.Module, exchange: Exchange | None) -> Tensor:
    table = h if exchange is None else exchange(h)
    messages = torch.relu(linear(torch.cat([table[edge_index[0]], h[edge_index[1]]], dim=1)))
    return h + 0.05 * torch.zeros_like(h).index_add(0, edge_index[1], messages)


# --- plans and exchanges of each system: (exchange, local edges, rows this rank sends) --------------------------------


def alone(name: str) -> Any:
    """A module without what its packages import: their `__init__` is not run."""
    if name in sys.modules:
        return sys.modules[name]
    parts = name.split(".")
    spec = importlib.util.find_spec(parts[0])
    if spec is None:
        raise ImportError(f"No module named {parts[0]!r}")
    folders = list(spec.submodule_search_locations or ())
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = folders
        folders = [f"{folder}/{parts[depth]}" for folder in folders]
    return importlib.import_module(name)


Plan = tuple[Exchange, Tensor, int]


def of_domainpar(world: World, graph: Graph) -> Plan:
    owner = graph.owner().numpy()
    part = split_graph(graph.edge_index, graph.num_nodes, world, partitioner=owner)
    return part.halo.extend, torch.from_numpy(part.plan.edge_rows), len(part.plan.send_rows)


def of_fairchem(world: World, graph: Graph) -> Plan:
    a2a = alone("fairchem.core.common.parallelism.graph_parallel_a2a")
    a2a.gp_utils._GRAPH_PARALLEL_GROUP = torch.distributed.group.WORLD
    context = a2a.build_gp_context(graph.own_edges(world.rank), graph.owner(), world.rank, world.size)

    def exchange(h: Tensor) -> Tensor:
        return torch.cat([h, a2a.all_to_all_collect(h, context)])

    return exchange, context.edge_index_local, sum(context.send_splits)


def of_physicsnemo(world: World, graph: Graph) -> Plan:
    module = alone("physicsnemo.nn.module.gnn_layers.distributed_graph")
    torch.distributed.all_to_all = list_all_to_all
    degrees = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    owner = graph.owner()
    made = module.partition_graph_with_id_mapping(
        offsets, graph.edge_index[0], owner, owner, world.size, world.rank, torch.device("cpu")
    )
    dst = torch.repeat_interleave(torch.arange(made.num_local_dst_nodes), made.local_offsets.diff())

    def exchange(h: Tensor) -> Tensor:
        return module.indexed_all_to_all_v(h, made.scatter_indices, made.sizes, True, 0, None)

    sent = sum(count for rank, count in enumerate(made.sizes[world.rank]) if rank != world.rank)
    return exchange, torch.stack([made.local_indices, dst]), sent


def list_all_to_all(received: list[Tensor], sent: list[Tensor], group: Any = None, async_op: bool = False) -> None:
    """The list form with any sizes, which gloo has as one tensor."""
    assert not async_op
    row = sent[0].shape[1:]
    out = sent[0].new_empty(sum(map(len, received)), *row)
    torch.distributed.all_to_all_single(out, torch.cat(sent), list(map(len, received)), list(map(len, sent)), group)
    for place, rows in zip(received, out.split(list(map(len, received)))):
        place.copy_(rows)


def of_anemoi(world: World, graph: Graph) -> Plan:
    halo = importlib.import_module("anemoi.models.distributed.halo")
    graphs = importlib.import_module("anemoi.models.distributed.graph")
    hops = importlib.import_module("anemoi.models.distributed.khop_edges")
    edges = [graph.own_edges(rank).shape[1] for rank in range(world.size)]
    nodes = (graph.num_nodes, graph.num_nodes)
    partition = hops.GraphPartition(nodes, graph.edge_index.shape[1], world.size, graph.sizes, edges)
    group = torch.distributed.group.WORLD
    info = halo.build_halo_info(partition, graph.edge_index, group)
    counts = np.array(gather(world.transport, [info.send_counts, info.recv_counts]))
    for sender, receiver in np.argwhere(counts[:, 0] != counts[:, 1].T)[:1]:
        sends, expects = counts[sender, 0, receiver], counts[receiver, 1, sender]
        raise ValueError(f"plan invalid: rank {sender} sends {sends} rows where rank {receiver} expects {expects}")
    return lambda h: graphs.halo_exchange(h, info, group), info.edge_index_local, sum(info.send_counts)


def of_anemoi_gathering(world: World, graph: Graph) -> Plan:
    graphs = importlib.import_module("anemoi.models.distributed.graph")
    group, sizes = torch.distributed.group.WORLD, graph.sizes
    own = graph.own_edges(world.rank).clone()
    own[1] -= graph.range_of(world.rank)[0]
    # Its gather hands each rank's own slice of the gradient back; a sum over ranks is what the sync form does.
    return lambda h: graphs.sync_tensor(h, 0, sizes, group), own, sizes[world.rank] * (world.size - 1)


SYSTEMS = {
    "domainpar": of_domainpar,
    "fairchem a2a": of_fairchem,
    "PhysicsNeMo": of_physicsnemo,
    "anemoi halo": of_anemoi,
    "anemoi gather": of_anemoi_gathering,
}


# --- measuring -------------------------------------------------------------------------------------------------------


def split_step(world: World, system: str, graph: Graph, hidden: int, repeats: int, expected: dict[str, Any]) -> Row:
    """Plan, exchange and step of one system on this rank. *Collective*."""
    torch.set_num_threads(1)
    meter = MemoryMeter(world.device)
    problem, seconds = "", []
    for _ in range(3):
        world.transport.barrier()
        began = time.perf_counter()
        try:
            exchange, edges, sent = SYSTEMS[system](world, graph)
        except Exception as error:
            problem = str(error) or type(error).__name__
        seconds.append(time.perf_counter() - began)
        if first := next(filter(None, gather(world.transport, problem)), ""):
            return {"problem": first}
    first, last = graph.range_of(world.rank)
    h, weights = (values[first:last] for values in inputs(graph.num_nodes, hidden))
    network = Network(hidden)
    leaf = h.clone().requires_grad_()

    def forward_and_back() -> None:
        exchange(leaf).sum().backward()

    def whole_step() -> Tensor:
        network.zero_grad()
        leaf.grad = None
        loss = (network(leaf, edges, exchange) * weights).sum() / graph.num_nodes
        loss.backward()
        return loss.detach()

    exchanged = [timed(world, forward_and_back) for _ in range(repeats + 2)][2:]
    steps = [timed(world, whole_step) for _ in range(repeats + 1)][1:]
    loss = sum(gather(world.transport, float(whole_step())))
    of_weights = [sum_of(world, one.grad) for one in network.parameters()]
    apart = [relative(leaf.grad, expected["inputs"][first:last], expected["inputs"])]
    apart += [relative(mine, whole, whole) for mine, whole in zip(of_weights, expected["weights"])]
    return {
        "plan": slowest_here(world, seconds[1:]),
        "exchange": slowest_here(world, exchanged),
        "sent": sum(gather(world.transport, sent)),
        **of_steps(world, steps, loss, apart, expected, meter),
    }


def parallelized(world: World, system: str, graph: Graph, hidden: int, repeats: int, expected: dict[str, Any]) -> Row:
    """The same by `parallelize`: the network as it is, which knows nothing of an exchange. *Collective*."""
    torch.set_num_threads(1)
    meter = MemoryMeter(world.device)
    part = split_graph(graph.edge_index, graph.num_nodes, world, partitioner=graph.owner().numpy())
    whole, weights = inputs(graph.num_nodes, hidden)
    leaf = whole.requires_grad_()
    model = parallelize(Network(hidden), world)

    def whole_step() -> Tensor:
        model.zero_grad()
        leaf.grad = None
        out = model(part.nodes(leaf), part.edge_index)
        loss: Tensor = (out * weights).sum() / graph.num_nodes
        loss.backward()
        return loss.detach()

    steps = [timed(world, whole_step) for _ in range(repeats + 1)][1:]
    loss = float(whole_step())
    apart = [relative(leaf.grad, expected["inputs"], expected["inputs"])]
    apart += [relative(mine.grad, of, of) for mine, of in zip(model.parameters(), expected["weights"])]
    return of_steps(world, steps, loss, apart, expected, meter)


def undivided(world: World, system: str, graph: Graph, hidden: int, repeats: int, expected: dict[str, Any]) -> Row:
    """The network by itself on one rank."""
    torch.set_num_threads(1)
    meter = MemoryMeter(world.device)
    network: Any = Network(hidden)
    if system == "compiled":
        network = torch.compile(network, dynamic=False)
    h, weights = inputs(graph.num_nodes, hidden)
    leaf = h.requires_grad_()

    def whole_step() -> Tensor:
        network.zero_grad()
        leaf.grad = None
        loss = (network(leaf, graph.edge_index, None, system) * weights).sum() / graph.num_nodes
        loss.backward()
        return loss.detach()

    steps = [timed(world, whole_step) for _ in range(repeats + 1)][1:]
    loss = float(whole_step())
    apart = [relative(leaf.grad, expected["inputs"], expected["inputs"])]
    return of_steps(world, steps, loss, apart, expected, meter)


def of_steps(
    world: World, steps: list[float], loss: float, apart: list[float], expected: dict[str, Any], meter: MemoryMeter
) -> Row:
    """What every system is asked: seconds of a step, errors, and the bytes of the fullest rank. *Collective*."""
    return {
        "step": slowest_here(world, steps),
        "loss_error": abs(loss - expected["loss"]) / abs(expected["loss"]),
        "gradient_error": max(gather(world.transport, max(apart))),
        "bytes": max(one or 0 for one in meter.taken(world)),
    }


def inputs(num_nodes: int, hidden: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(num_nodes, hidden, generator=draw), torch.randn(num_nodes, hidden, generator=draw)


def expected_of(graph: Graph, hidden: int) -> dict[str, Any]:
    """Loss and gradients of the whole in float64."""
    network = Network(hidden).double()
    leaf, weights = (values.double() for values in inputs(graph.num_nodes, hidden))
    leaf.requires_grad_()
    loss = (network(leaf, graph.edge_index) * weights).sum() / graph.num_nodes
    loss.backward()
    assert leaf.grad is not None
    return {"loss": float(loss.detach()), "inputs": leaf.grad, "weights": [one.grad for one in network.parameters()]}


def timed(world: World, call: Callable[[], Any]) -> float:
    world.transport.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def slowest_here(world: World, seconds: Sequence[float]) -> float:
    """Median over repeats of the slowest rank's seconds."""
    return statistics.median(max(each) for each in zip(*gather(world.transport, list(seconds))))


def sum_of(world: World, own: Tensor) -> Tensor:
    total = own.double()
    torch.distributed.all_reduce(total)
    return total


def relative(mine: Tensor, part: Tensor, whole: Tensor) -> float:
    return float((mine.double() - part).abs().max() / whole.abs().max()) if part.numel() else 0.0


def graph_of(case: cases.Case, name: str, ranks: int) -> Graph:
    store = EventStore(case.store)
    with store.open(store.events()[0]) as event:
        ids = np.arange(event.num_edges)
        ends = torch.from_numpy(np.stack([event.read_edges(end, ids).astype(np.int64) for end in ("src", "dst")]))
        nodes = event.num_nodes
    if name == "symmetric":
        ends = torch.cat([ends, ends.flip(0)], dim=1)
    sizes = [nodes // ranks + (rank < nodes % ranks) for rank in range(ranks)]
    if name == "empty ranks":
        sizes = [nodes, *[0] * (ranks - 1)]
    return Graph(nodes, ends[:, ends[1].argsort(stable=True)], sizes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "peers", case="large")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--timeout", type=float, default=300.0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("peers", options)
    case = cases.chosen_case(options)
    for name in options.graphs:
        graph = graph_of(case, name, options.ranks)
        expected, bound = expected_of(graph, options.hidden), graph.bound()
        ways: list[tuple[str, int, Any]] = [(system, options.ranks, split_step) for system in SYSTEMS]
        ways.append(("parallelize", options.ranks, parallelized))
        if name == "directed":
            ways += [(system, 1, undivided) for system in ("eager", "checkpoint", "compiled")]
        rows: list[Row] = []
        for system, ranks, work in ways:
            how: Any = {"transport": "gloo", "timeout": options.timeout}
            try:
                row = run_ranks(work, ranks, system, graph, options.hidden, options.repeats, expected, **how)[0]
            except (RuntimeError, TimeoutError) as error:
                row = {"problem": str(error).strip().splitlines()[-1]}
            row = {"graph": name, "system": system, "ranks": ranks, "bound": bound, **row}
            rows.append(row)
            results.add(**row)
        show(results, name, graph, rows)
    results.end()
    return 0


def show(results: measuring.Results, name: str, graph: Graph, rows: Sequence[Row]) -> None:
    def of(key: str, form: str, unit: float = 1.0) -> Callable[[Row], str]:
        return lambda row: form.format(row[key] * unit) if row.get(key) is not None else ""

    columns: Columns = {
        "system": lambda row: row["system"],
        "ranks": lambda row: str(row["ranks"]),
        "plan ms": of("plan", "{:.3g}", 1e3),
        "exchange ms": of("exchange", "{:.3g}", 1e3),
        "x bound": lambda row: f"{row['sent'] / row['bound']:.3g}" if row.get("sent") and row["bound"] else "",
        "step s": of("step", "{:.3g}"),
        "GiB": of("bytes", "{:.2f}", 2**-30),
        "loss": of("loss_error", "{:.0e}"),
        "gradient": of("gradient_error", "{:.0e}"),
        "": lambda row: row.get("problem", ""),
    }
    note = "exchange: forward and back. GiB: peak of the fullest rank above what it held before its plan."
    title = f"{name}: {graph.num_nodes:,} nodes, {graph.edge_index.shape[1]:,} edges"
    results.show(title, columns, rows, note)


if __name__ == "__main__":
    measuring.run(__file__)
