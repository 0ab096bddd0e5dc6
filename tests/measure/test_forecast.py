"""`domainpar.forecast`: the memory of a step of any model on each rank, before the first step."""

import pytest
import torch
import torch_geometric.nn as gnn
from marks import slow
from torch import nn

import domainpar
from domainpar.common.agreement import Refused
from domainpar.measure import forecast as core
from domainpar.measure.forecast import OF_PROCESS, OF_TORCH, MemoryMeter, TensorMeter
from domainpar.measure.pieces import MOMENTS
from domainpar.testing import run_ranks

NODES, EDGES = 3_000, 60_000


def graph(nodes=NODES, edges=EDGES):
    """Each node with edges from some nearby, and features."""
    draw = torch.Generator().manual_seed(1)
    src = torch.randint(0, nodes, (edges,), generator=draw)
    dst = (src + torch.randint(-60, 60, (edges,), generator=draw)) % nodes
    return torch.stack([src, dst]), torch.randn(nodes, 16, generator=draw)


class EdgeMLP(nn.Module):
    """Messages of an MLP on edges, with their own features."""

    def __init__(self):
        super().__init__()
        self.edge, self.node = nn.Linear(2 * 16 + 4, 32), nn.Linear(32, 4)

    def forward(self, x, edge_index, e):
        src, dst = edge_index
        messages = torch.relu(self.edge(torch.cat([x[src], x[dst], e], 1)))
        return self.node(torch.zeros(len(x), 32).index_add(0, dst, messages))


MODELS = {
    "sage": lambda: gnn.GraphSAGE(16, 64, 2, 8),
    "gat": lambda: gnn.GAT(16, 32, 2, 8, v2=True, heads=2),
    "edges": EdgeMLP,
}


def _parts(world, name, owner="contiguous"):
    edge_index, x = graph()
    part = domainpar.split_graph(edge_index, NODES, world, partitioner=owner)
    torch.manual_seed(0)
    model = domainpar.parallelize(MODELS[name](), world)
    arguments = (part.nodes(x), part.edge_index)
    if name == "edges":
        arguments += (part.edges(torch.ones(EDGES, 4)),)
    return model, part, arguments


def _weighed(world, name, trains):
    """Bytes that the forecast has for tensors, and those that they take."""
    model, part, arguments = _parts(world, name)
    with torch.set_grad_enabled(trains):
        found = domainpar.forecast(model, part, *arguments)
        assert all(parameter.grad is None for parameter in model.parameters())
        with TensorMeter("cpu") as meter:
            out = model(*arguments)
            if trains:
                out.square().mean().backward()
    beside = OF_PROCESS + OF_TORCH + trains * MOMENTS * sum(4 * it.numel() for it in model.parameters())
    return (found.shares[world.rank].expected - beside) / core.GAPS / meter.peak, found


@pytest.mark.parametrize("name", ["gat", slow("sage"), "edges"])
@pytest.mark.parametrize(("num_ranks", "trains"), [(1, True), (2, True), slow(3, True), slow(1, False), (3, False)])
def test_what_pieces_take_is_scaled_to_each_part(name, num_ranks, trains):
    of_ranks = run_ranks(_weighed, num_ranks, name, trains, timeout=300.0)
    assert len({found for _, found in of_ranks}) == 1, "the same on every rank"
    for ratio, found in of_ranks:
        assert 0.97 < ratio < 1.05
        assert found.fits
        assert found.check() is found
        assert found.seconds > 0


def _taken(world, name):
    """The forecast of this rank, and its peak above what it held, of resident memory."""
    edge_index, x = graph(30_000, 300_000)
    part = domainpar.split_graph(edge_index, 30_000, world, partitioner="contiguous")
    model = domainpar.parallelize(MODELS[name](), world)
    placed = part.nodes(x)
    found, meter = domainpar.forecast(model, part, placed, part.edge_index), MemoryMeter(world.device)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(placed, part.edge_index).square().mean().backward()
        optimizer.step()
    return found.shares[world.rank].expected, meter.taken(world)[world.rank]


@pytest.mark.slow
def test_two_processes_take_about_what_is_forecast():
    """By tensors the forecast is within a few per cent; the C library and first imports take the rest."""
    for expected, taken in run_ranks(_taken, 2, "sage", transport="gloo", timeout=300.0):
        assert 0.6 < taken / expected < 1.5


def _counted(world, owner):
    model, part, arguments = _parts(world, "edges", owner)
    calls = []

    def counted(name, call):
        return lambda *args, **how: calls.append(name) or call(*args, **how)

    for name in ("all_gather", "all_reduce", "start", "broadcast"):
        setattr(part.transport, name, counted(name, getattr(part.transport, name)))
    state = torch.get_rng_state()
    found = domainpar.forecast(model, part, *arguments)
    assert torch.equal(torch.get_rng_state(), state)
    return calls, found


@pytest.mark.parametrize("alone", [False, True])
def test_every_rank_makes_every_call_also_one_that_owns_nothing(alone):
    owner = torch.full((NODES,), 1).numpy() if alone else "contiguous"
    of_ranks = run_ranks(_counted, 3, owner, timeout=300.0)
    assert len({tuple(calls) for calls, _ in of_ranks}) == 1
    assert of_ranks[0][0]
    assert len({found for _, found in of_ranks}) == 1


def _several_kinds(world):
    edge_index, x = graph()
    kinds = {("a", "to", "b"): edge_index % 1000, ("b", "back", "a"): edge_index.flip(0) % 1000}
    part = domainpar.split_graph(kinds, {"a": 1000, "b": 1000}, world, partitioner="contiguous")
    convolutions = {kind: gnn.SAGEConv((16, 16), 32) for kind in kinds}
    model = domainpar.parallelize(gnn.HeteroConv(convolutions), world)
    features = {kind: part.nodes(x[:1000], kind) for kind in ("a", "b")}
    found = domainpar.forecast(model, part, features, part.edge_index)
    with TensorMeter("cpu") as meter:
        out = model(features, part.edge_index)
        sum(it.square().mean() for it in out.values()).backward()
    return (found.shares[world.rank].expected - OF_PROCESS - OF_TORCH) / core.GAPS / meter.peak


def test_graphs_of_several_kinds_are_forecast():
    assert all(0.9 < ratio < 1.2 for ratio in run_ranks(_several_kinds, 2, timeout=300.0))


def _short(world):
    model, part, arguments = _parts(world, "edges")
    found = domainpar.forecast(model, part, *arguments)
    assert not found.fits
    with pytest.raises(Refused) as refused:
        found.check()
    return str(refused.value), refused.value.hint


def test_what_does_not_fit_is_refused_on_every_rank_with_both_figures(monkeypatch):
    monkeypatch.setattr(core, "free_memory", lambda device: ("n1", 5 * 2**20))
    ((text, hint), other) = run_ranks(_short, 2, timeout=300.0)
    assert (text, hint) == other
    assert "2 ranks on n1 need" in text
    assert "for 60,000 edges, and 5 MiB are free" in text
    assert "more ranks on more machines, or recompute" in hint


def _broken(world):
    model, part, arguments = _parts(world, "edges")
    with pytest.raises(Refused, match="cannot be run on a piece of the graph: TypeError"):
        domainpar.forecast(model, part, *arguments, width=3)
    return True


def test_a_model_that_cannot_be_run_is_refused_on_every_rank():
    assert all(run_ranks(_broken, 2))
