"""Edge networks block by block: the numbers of the network itself, whatever the blocks, with the memory of one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from marks import slow
from test_recomputation import Held
from torch import Tensor, nn
from whole_and_split import USUAL

from domainpar import NotExact, World, in_blocks, parallelize, split_graph, verify
from domainpar.testing import run_ranks


class EdgeNetwork(nn.Module):
    """Reads the nodes itself; dropout falls by the number of an edge."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.rate = rate
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        both = torch.cat([x[edge_index[0]], x[edge_index[1]], e], 1)
        return F.dropout(self.layers(both), self.rate, self.training)


class Interaction(nn.Module):
    """Two iterations of an interaction network."""

    def __init__(self, edges_per_block: int | None, edge: type[nn.Module] = EdgeNetwork) -> None:
        super().__init__()
        self.edges_per_block, self.edge, self.node = edges_per_block, edge(), nn.Linear(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        edge = self.edge if self.edges_per_block is None else in_blocks(self.edge, self.edges_per_block)
        for _ in range(2):
            e = e + edge(x, edge_index, e)
            x = x + self.node(torch.cat([x, torch.zeros_like(x).index_add(0, edge_index[1], e)], 1)).tanh()
        return x[edge_index[0]] * e


NETWORK = Interaction(None).double()


def _trained(world: World, edges_per_block, edge_index, every=None, policy="incoming"):
    module = copy.deepcopy(NETWORK)  # made once: ranks may be threads, which share torch's generator
    module.edges_per_block = edges_per_block
    parallel = parallelize(module, world, seed=3, recompute_every=every)
    assignment = torch.tensor(USUAL.assignment).clamp(max=world.size - 1).numpy()
    part = split_graph(edge_index, USUAL.num_nodes, world, partitioner=assignment, edge_policy=policy)
    x, e = USUAL.x.clone().requires_grad_(), USUAL.e[: edge_index.size(1)]
    result = parallel(part.nodes(x), part.edge_index, part.edges(e))
    part.edge_mean_share(result.sin()).backward()
    parallel.reduce_gradients()
    return [result.detach(), x.grad, *(one.grad for one in module.parameters())], part.num_exchanges, module


@pytest.mark.parametrize("num_ranks", [slow(1), slow(2), 4])
def test_results_gradients_and_dropout_are_those_of_the_network_itself(num_ranks):
    for policy in ("incoming", "incident"):
        expected = run_ranks(_trained, num_ranks, None, USUAL.edge_index, None, policy)
        for edges_per_block, every in ((1, None), (3, None), (3, 1), (1000, 2)):
            found = run_ranks(_trained, num_ranks, edges_per_block, USUAL.edge_index, every, policy)
            for (tensors, exchanges, _), (ours, our_exchanges, module) in zip(expected, found):
                assert exchanges == our_exchanges
                torch.testing.assert_close(ours, tensors, rtol=1e-12, atol=1e-14)
                assert "edge.layers.0.weight" in module.state_dict(), "made where it is called, it renames nothing"


@pytest.mark.parametrize("num_edges", [0, 1])
def test_ranks_without_edges_run_a_block_too(num_edges):
    edges = USUAL.edge_index[:, :num_edges]
    expected = run_ranks(_trained, 4, None, edges)
    found = run_ranks(_trained, 4, 2, edges)
    for (tensors, exchanges, _), (ours, our_exchanges, _) in zip(expected, found):
        assert exchanges == our_exchanges
        torch.testing.assert_close(ours, tensors, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("edges_per_block", [1, 4, 1000])
def test_off_the_split_graph_it_does_the_same(edges_per_block):
    results = []
    for size in (None, edges_per_block):
        module = Interaction(size).double().eval()
        module.load_state_dict(NETWORK.state_dict())
        x = USUAL.x.clone().requires_grad_()
        result = module(x, USUAL.edge_index, USUAL.e)
        result.sin().sum().backward()
        results.append([result.detach(), x.grad, *(one.grad for one in module.parameters())])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def _kept(on_a_part: bool, edges_per_block: int | None, every: int | None) -> int:
    module = Interaction(edges_per_block).double()
    held = Held(module, nn.ReLU)
    if not on_a_part:
        result = module(USUAL.x, USUAL.edge_index, USUAL.e)
    else:
        part = split_graph(USUAL.edge_index, USUAL.num_nodes, World.alone())
        parallel = parallelize(module, World.alone(), recompute_every=every)
        result = parallel(part.nodes(USUAL.x), part.edge_index, part.edges(USUAL.e))
    count = held()
    result.sum().backward()
    return count


def test_of_what_it_makes_of_an_edge_only_the_result_is_kept():
    for on_a_part in (False, True):
        assert _kept(on_a_part, None, None) == 2
        assert _kept(on_a_part, 3, None) == 0
    assert _kept(True, 3, 1) == 0


class _Combines(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.norm = function, nn.BatchNorm1d(4).double()

    def forward(self, edge_index, e, x):
        return self.function(self.norm, edge_index, e, x)


COMBINES = {
    "mean": lambda norm, ends, e, x: e - e.mean(0),
    "mean of nodes": lambda norm, ends, e, x: e - x.mean(0),
    "batch norm": lambda norm, ends, e, x: norm(e),
    "softmax": lambda norm, ends, e, x: e.softmax(0),
    "product": lambda norm, ends, e, x: e @ (e.t() @ e),
    "sum at nodes": lambda norm, ends, e, x: torch.zeros_like(x).index_add(0, ends[1], e)[ends[1]],
    "one edge": lambda norm, ends, e, x: e + e[0],
    "how many": lambda norm, ends, e, x: e * e[e[:, 0] > 0].size(0),
    "how many halves": lambda norm, ends, e, x: e * e.view(-1, 2)[e.view(-1, 2)[:, 0] > 0].size(0),
    "places": lambda norm, ends, e, x: e * e[e[:, 0] > 0][:1],
}


def _refused(world: World, function, given=lambda x, ends, e: {"edge_index": ends, "e": e, "x": x}) -> str:
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world, edge_policy="incident")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edge = in_blocks(_Combines(function), 3)

        def forward(self, x, edge_index, e):
            return self.edge(**given(x, edge_index, e))

    try:
        parallelize(Model(), world)(part.nodes(USUAL.x), part.edge_index, part.edges(USUAL.e))
    except NotExact as refused:
        return str(refused)
    return "accepted"


@pytest.mark.parametrize("name", COMBINES)
def test_what_combines_edges_is_refused_on_any_number_of_ranks(name):
    for num_ranks in (1, 3):
        for refused in run_ranks(_refused, num_ranks, COMBINES[name]):
            assert "streamed combines edges" in refused, refused


def _edge_itself(norm, edge_index, e, x):
    return e


GIVEN_WRONGLY = {
    "given a tensor of nodes": (_edge_itself, lambda x, ends, e: {"edge_index": ends, "e": x, "x": x}),
    "the same on every rank": (_edge_itself, lambda x, ends, e: {"edge_index": ends, "e": x.mean(0), "x": x}),
    "that is to stay whole": (_edge_itself, lambda x, ends, e: {"edge_index": ends, "e": e, "x": e}),
    "rows of nodes": (lambda norm, ends, e, x: x,),
    "numbers of rows": (lambda norm, ends, e, x: ends,),
    "rows of nothing": (lambda norm, ends, e, x: norm.weight,),
    "return a row for each edge": (lambda norm, ends, e, x: e[e[:, 0] > 0],),
}


@pytest.mark.parametrize("words", GIVEN_WRONGLY)
def test_what_is_given_or_returned_wrongly_is_refused_by_name(words):
    for num_ranks in (1, 3):
        for refused in run_ranks(_refused, num_ranks, *GIVEN_WRONGLY[words]):
            assert words in refused, refused


def test_off_the_split_graph_lengths_are_looked_at():
    edge = in_blocks(_Combines(_edge_itself), 3)
    with pytest.raises(ValueError, match=r"\[5, 7\] rows"):
        edge(torch.zeros(2, 5).long(), torch.zeros(7, 4), torch.zeros(9, 4))
    with pytest.raises(ValueError, match=r"\['x'\] stays whole"):
        edge(None, None, x=torch.zeros(5, 4))
    with pytest.raises(ValueError, match="changes an argument in place"):
        in_blocks(_Combines(lambda norm, ends, e, x: e.add_(1)), 3)(torch.zeros(2, 5).long(), torch.zeros(5, 4), None)
    with pytest.raises(ValueError, match="edges_per_block=0"):
        in_blocks(nn.Identity(), 0)
    with pytest.raises(ValueError, match="the module takes"):
        in_blocks(_Combines(_edge_itself), 3, whole=["nodes"])


class OfSomeEdges(Interaction):
    """Edges of a mask, two results, numbers of rows, what is no tensor, and a layer inside and outside."""

    def __init__(self, edges_per_block) -> None:
        super().__init__(edges_per_block)
        self.tanh, self.divides = nn.Tanh(), False

    def forward(self, x, edge_index, e):
        mask = e[:, 0] > 0
        edge_index, e, tanh, divides = edge_index[:, mask], e[mask], self.tanh, self.divides

        class Two(nn.Module):
            def forward(self, ends, e, factor, nodes):
                both = torch.stack([nodes[ends[0]], tanh(e)], 1).view(e.size(0), -1)
                both[both[:, 0] > 1] = 1.0
                return both * factor, {"sum": both.sum(1) / (e.size(0) if divides else 1)}

        network = Two() if self.edges_per_block is None else in_blocks(Two(), self.edges_per_block, whole=["nodes"])
        both, more = network(edge_index, e, 0.5, nodes=self.node(torch.cat([x, x], 1)))
        return self.tanh(torch.zeros(x.size(0), 8).to(x).index_add(0, edge_index[1], both * more["sum"].unsqueeze(1)))


def test_verify_finds_it_the_same_whole_and_split():
    for module in (Interaction(3), OfSomeEdges(2), OfSomeEdges(None)):
        found = verify(module.double(), (USUAL.edge_index, USUAL.num_nodes), parts=3, inputs=_inputs)
        assert found.exact, str(found)


def _inputs(part):
    return part.nodes(USUAL.x), part.edge_index, part.edges(USUAL.e)


def _some_edges(world: World, edges_per_block):
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    module = OfSomeEdges(edges_per_block).double()
    module.divides = True
    module.load_state_dict(NETWORK.state_dict())
    return parallelize(module, world)(*_inputs(part)).detach()


def test_a_number_of_rows_inside_is_that_of_the_whole_graph():
    for num_ranks in (1, 3):
        expected = run_ranks(_some_edges, num_ranks, None)
        torch.testing.assert_close(run_ranks(_some_edges, num_ranks, 2), expected, rtol=1e-12, atol=1e-14)


def test_an_edge_index_is_known_by_what_stands_beside_it():
    kinds = torch.tensor([[0, 1, 2], [3, 4, 5]])  # of two edges, three numbers each
    edge = in_blocks(_Combines(lambda norm, kind, e, x: e * kind[:, :1]), 1)
    found = edge(kinds, torch.ones(2, 4), None)
    torch.testing.assert_close(found, kinds[:, :1] * torch.ones(2, 4))
