"""Memory for time: what backward computes again is what it was, fetched once; and edges in blocks."""

import copy
import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marks import slow
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from whole_and_split import USUAL, cases, check

import domainpar
from domainpar import NotExact, World, in_blocks, parallelize, split_graph
from domainpar.placed.moves import whole
from domainpar.placed.tensor import Placed
from domainpar.testing import run_ranks


def kept(function, *args):
    return checkpoint(function, *args, use_reentrant=False, context_fn=domainpar.kept_ghosts)


def plain(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def reentrant(function, *args):
    return checkpoint(function, *args, use_reentrant=True)


def without(function, *args):
    return function(*args)


class Messages(nn.Module):
    """Edge states, a norm, dropout and a mean over all ranks, in each of three iterations."""

    def __init__(self, again=without, rate=0.3):
        super().__init__()
        self.encoder, self.again = nn.Linear(4, 8), again
        self.edge = nn.ModuleList(nn.Sequential(nn.Linear(20, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(3))
        self.node = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Dropout(rate))

    def step(self, edge, x, edge_index, e):
        src, dst = edge_index
        message = edge(torch.cat([x[src], x[dst], e], 1))
        total = torch.zeros_like(x).index_add(0, dst, message)
        return x + self.node(torch.cat([x - x.mean(0), total], 1))

    def forward(self, x, edge_index, e):
        x = self.encoder(x)
        for edge in self.edge:
            x = self.again(self.step, edge, x, edge_index, e)
        return x


torch.manual_seed(0)  # weights for which rounding is known
NETWORK = Messages().double()


def part_of(world, edge_index=USUAL.edge_index):
    owner = np.minimum(np.array(USUAL.assignment), world.size - 1)
    return split_graph(edge_index, USUAL.num_nodes, world, partitioner=owner)


def learnt(world, network, again):
    """What a step of a network leaves, and how often rows were exchanged."""
    network = parallelize(copy.deepcopy(network), world)
    network.again = again
    part, x = part_of(world), USUAL.x.clone().requires_grad_()
    torch.manual_seed(5)
    result = network(part.nodes(x), part.edge_index, part.edges(USUAL.e))
    result.sin().mean().backward()
    return [whole(result.detach()), x.grad, *(one.grad for one in network.parameters())], part.ranks.num_exchanges


@pytest.mark.parametrize("num_ranks", [slow(1), slow(2), 4])
def test_what_is_computed_again_is_what_it_was_and_drops_the_same(num_ranks):
    expected = run_ranks(learnt, num_ranks, NETWORK, without)
    for again in (kept, plain, reentrant):
        for (tensors, exchanges), (ours, more) in zip(expected, run_ranks(learnt, num_ranks, NETWORK, again)):
            torch.testing.assert_close(ours, tensors, rtol=1e-12, atol=1e-14)
            assert more == exchanges if again is kept else more >= exchanges


def exchanges_of_two_iterations(world, again):
    part = part_of(world)
    x, (src, dst) = part.nodes(USUAL.x).requires_grad_(), part.edge_index
    again(lambda x: read(read(x, src, dst), src, dst), x).sum().backward()
    return part.ranks.num_exchanges


def test_ghosts_of_what_is_made_inside_are_kept_or_fetched_again():
    (once, *_), (as_often, *_), (more, *_) = (
        run_ranks(exchanges_of_two_iterations, 3, it) for it in (without, kept, plain)
    )
    assert once == as_often < more


class Held:
    """Counts the results of layers whose memory somebody holds."""

    def __init__(self, module, kind):
        self._memory = []
        for child in module.modules():
            if isinstance(child, kind):
                child.register_forward_hook(self._note)

    def _note(self, _, given, made):
        local = made.local if isinstance(made, Placed) else made
        self._memory.append(StorageWeakRef(local.untyped_storage()))

    def __call__(self):
        gc.collect()
        return sum(not memory.expired() for memory in self._memory)


def held(world, again, after_backward=False):
    module = parallelize(Messages(again).double(), world)
    count, part = Held(module, nn.ReLU), part_of(world)
    result = module(part.nodes(USUAL.x), part.edge_index, part.edges(USUAL.e)).sum()
    if after_backward:
        result.backward()
        del result
    return count()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_nothing_of_the_edges_is_kept(num_ranks):
    assert run_ranks(held, num_ranks, without) == [3] * num_ranks
    assert run_ranks(held, num_ranks, kept) == [0] * num_ranks
    assert run_ranks(held, num_ranks, without, True) == [0] * num_ranks


def read(x, src, dst):
    """An iteration: edges read nodes and are summed at nodes."""
    return torch.zeros_like(x).index_add(0, dst, x[src].tanh()) + 0.5


def changed_between(x, src, dst):
    x = kept(read, x * 1, src, dst)
    y = x * 2
    x.mul_(3)
    return kept(read, x, src, dst) + y


def changed_through_views(again):
    """Ghosts were read before rows are written by the names of others."""

    def inside(x, src, dst):
        h = read(x, src, dst) * 1
        first = h[src]
        h[:, :2].mul_(2.0)
        h.t().add_(1.0)
        return first * h[src]

    return lambda x, src, dst: again(inside, x, src, dst)


def views(x, src, dst):
    def both(x):
        left, right = read(x, src, dst).chunk(2, 1)
        return torch.stack([left.exp(), right.t().contiguous().t().sigmoid()])

    return read(torch.cat([*kept(both, x).unbind(0)], 1), src, dst)


def written_by_columns(x, src, dst):
    def table(x):
        made = x.new_empty(x.size(0), 4)
        made[:, :2] = x[:, :2].sin()
        made[:, 2:] = read(x, src, dst)[:, 2:]
        return made

    return kept(read, kept(table, x), src, dst).cos()


def recurrent(x, src, dst, net):
    h, c = kept(lambda x: net(read(x, src, dst)), x)
    h, c = kept(lambda h, c: net(read(h, src, dst), (h, c)), h, c)
    return h * c


def gradient_inside(x, src, dst):
    def force(x):
        (slope,) = torch.autograd.grad((read(x, src, dst) ** 3).sum(), x, create_graph=True)
        return slope * x

    return kept(force, read(x, src, dst))


PROGRAMS = {
    "a value changed after it was used": changed_between,
    "rows changed through views": changed_through_views(kept),
    "rows changed through views, in torch's checkpoint": changed_through_views(plain),
    "rows changed through views, in the checkpoint of old": changed_through_views(reentrant),
    "views": views,
    "a table filled column by column": written_by_columns,
    "cells that change columns of one table": (recurrent, {"net": lambda: nn.LSTMCell(4, 4)}),
    "a gradient in the pass": gradient_inside,
    "complex numbers": lambda x, src, dst: kept(
        lambda x: torch.view_as_complex(x[:, :2].contiguous()).exp().abs() * read(x, src, dst)[:, 0], x
    ),
    "dropout inside and outside": (
        lambda x, src, dst: F.dropout(kept(lambda x: read(F.dropout(read(x, src, dst)), src, dst), F.dropout(x))),
        {"against": "alone"},
    ),
    "a checkpoint in another one": lambda x, src, dst: kept(lambda x: kept(read, x * 2, src, dst), read(x, src, dst)),
}


@cases(PROGRAMS)
def test_programs_that_are_hard_to_repeat_are_exact(function, more):
    check(function, **more)


# Edges in blocks


class EdgeNetwork(nn.Module):
    """Reads the nodes itself; dropout falls by the number of an edge."""

    def __init__(self, rate=0.3):
        super().__init__()
        self.rate, self.layers = rate, nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x, edge_index, e):
        both = torch.cat([x[edge_index[0]], x[edge_index[1]], e], 1)
        return F.dropout(self.layers(both), self.rate, self.training)


class Interaction(nn.Module):
    """Two iterations of an interaction network."""

    def __init__(self, edges_per_block=None):
        super().__init__()
        self.edges_per_block, self.edge, self.node = edges_per_block, EdgeNetwork(), nn.Linear(8, 4)

    def forward(self, x, edge_index, e):
        edge = self.edge if self.edges_per_block is None else in_blocks(self.edge, self.edges_per_block)
        for _ in range(2):
            e = e + edge(x, edge_index, e)
            x = x + self.node(torch.cat([x, torch.zeros_like(x).index_add(0, edge_index[1], e)], 1)).tanh()
        return x[edge_index[0]] * e


INTERACTION = Interaction().double()


def step_in_blocks(world, edges_per_block, edge_index):
    module = copy.deepcopy(INTERACTION)
    module.edges_per_block = edges_per_block
    parallelize(module, world)
    part, x = part_of(world, edge_index), USUAL.x.clone().requires_grad_()
    torch.manual_seed(3)
    result = module(part.nodes(x), part.edge_index, part.edges(USUAL.e[: edge_index.size(1)]))
    result.sin().sum().backward()
    assert "edge.layers.0.weight" in module.state_dict(), "made where it is called, it renames nothing"
    return [whole(result.detach()), x.grad, *(one.grad for one in module.parameters())], part.ranks.num_exchanges


@pytest.mark.parametrize("num_ranks", [slow(1), slow(2), 4])
@pytest.mark.parametrize("num_edges", [0, 1, 40])
def test_results_gradients_and_dropout_are_those_of_the_network_itself(num_ranks, num_edges):
    edges = USUAL.edge_index[:, :num_edges]
    expected = run_ranks(step_in_blocks, num_ranks, None, edges)
    for edges_per_block in (1, 3, 1000):
        found = run_ranks(step_in_blocks, num_ranks, edges_per_block, edges)
        for (tensors, exchanges), (ours, more) in zip(expected, found):
            assert more == exchanges
            torch.testing.assert_close(ours, tensors, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("edges_per_block", [1, 4, 1000])
def test_off_the_split_graph_it_does_the_same(edges_per_block):
    results = []
    for size in (None, edges_per_block):
        module = Interaction(size).double().eval()
        module.load_state_dict(INTERACTION.state_dict())
        x = USUAL.x.clone().requires_grad_()
        result = module(x, USUAL.edge_index, USUAL.e)
        result.sin().sum().backward()
        results.append([result.detach(), x.grad, *(one.grad for one in module.parameters())])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def test_of_what_it_makes_of_an_edge_only_the_result_is_kept():
    part = part_of(World.alone())
    for given in ((USUAL.x, USUAL.edge_index, USUAL.e), (part.nodes(USUAL.x), part.edge_index, part.edges(USUAL.e))):
        for edges_per_block, expected in ((None, 2), (3, 0)):
            module = Interaction(edges_per_block).double()
            count = Held(module, nn.ReLU)
            result = module(*given)
            assert count() == expected
            result.sum().backward()


class Combines(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.norm = function, nn.BatchNorm1d(4).double()

    def forward(self, edge_index, e, x):
        return self.function(self.norm, edge_index, e, x)


COMBINES = {
    "mean": lambda norm, ends, e, x: e - e.mean(0),
    "batch norm": lambda norm, ends, e, x: norm(e),
    "softmax": lambda norm, ends, e, x: e.softmax(0),
    "product": lambda norm, ends, e, x: e @ (e.t() @ e),
    "sum at nodes": lambda norm, ends, e, x: torch.zeros_like(x).index_add(0, ends[1], e)[ends[1]],
    "one edge": lambda norm, ends, e, x: e + e[0],
    "how many": lambda norm, ends, e, x: e * e[e[:, 0] > 0].size(0),
    "places": lambda norm, ends, e, x: e * e[e[:, 0] > 0][:1],
    "rows of nodes": lambda norm, ends, e, x: x,
    "rows of nothing": lambda norm, ends, e, x: norm.weight,
    "some edges": lambda norm, ends, e, x: e[e[:, 0] > 0],
    "given nodes": (lambda norm, ends, e, x: e, lambda x, ends, e: (ends, x, x)),
}


@pytest.mark.parametrize("name", COMBINES)
def test_what_combines_edges_or_returns_no_row_for_each_is_refused_on_any_number_of_ranks(name):
    case = COMBINES[name]
    function, given = case if isinstance(case, tuple) else (case, lambda x, ends, e: (ends, e, x))

    def work(world):
        part = part_of(world)
        edge = in_blocks(parallelize(Combines(function), world), 3)
        with pytest.raises(NotExact, match="in_blocks"):
            edge(*given(part.nodes(USUAL.x), part.edge_index, part.edges(USUAL.e)))

    for num_ranks in (1, 3):
        run_ranks(work, num_ranks)


def test_off_the_split_graph_lengths_are_looked_at():
    edge = in_blocks(Combines(lambda norm, ends, e, x: e), 3)
    with pytest.raises(ValueError, match=r"\[5, 7\] edges"):
        edge(torch.zeros(2, 5).long(), torch.zeros(7, 4), torch.zeros(9, 4))
    with pytest.raises(ValueError, match="edges_per_block=0"):
        in_blocks(nn.Identity(), 0)
    with pytest.raises(ValueError, match="the module takes"):
        in_blocks(Combines(lambda norm, ends, e, x: e), 3, whole=["nodes"])


class OfSomeEdges(nn.Module):
    """Edges of a mask, two results, what is no tensor, a number of rows, and a layer inside and outside."""

    def __init__(self, edges_per_block=None):
        super().__init__()
        self.edges_per_block, self.node, self.tanh = edges_per_block, nn.Linear(8, 4), nn.Tanh()

    def forward(self, x, edge_index, e):
        mask = e[:, 0] > 0
        edge_index, e, tanh = edge_index[:, mask], e[mask], self.tanh

        class Two(nn.Module):
            def forward(self, ends, e, factor, nodes):
                both = torch.stack([nodes[ends[0]], tanh(e)], 1).view(e.size(0), -1)
                both[both[:, 0] > 1] = 1.0
                return both * factor, {"sum": both.sum(1) / e.size(0)}["sum"]

        network = Two() if self.edges_per_block is None else in_blocks(Two(), self.edges_per_block, whole=["nodes"])
        both, sums = network(edge_index, e, 0.5, nodes=self.node(torch.cat([x, x], 1)))
        return self.tanh(torch.zeros(x.size(0), 8).to(x).index_add(0, edge_index[1], both * sums.unsqueeze(1)))


def test_some_edges_several_results_and_a_number_of_rows_inside_are_of_the_whole_graph():
    module = OfSomeEdges().double()
    expected = module(USUAL.x, USUAL.edge_index, USUAL.e)

    def work(world):
        mine, part = copy.deepcopy(module), part_of(world)
        mine.edges_per_block = 2
        return whole(parallelize(mine, world)(part.nodes(USUAL.x), part.edge_index, part.edges(USUAL.e)).detach())

    for num_ranks in (1, 3):
        for found in run_ranks(work, num_ranks):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-14)
