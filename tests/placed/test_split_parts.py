"""Parts of a graph, of which every rank was given the whole or a slice: rows, gradients, and who has to give what."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from marks import slow
from torch import nn
from torch_geometric.nn import GATConv, GCNConv
from whole_and_split import ODD, USUAL

from domainpar import World, parallelize, split_graph, split_slices
from domainpar.common.agreement import Refused
from domainpar.parallel.errors import RanksDiffer
from domainpar.parallel.thread_ranks import ThreadTransport
from domainpar.testing import run_ranks


def on_parts(function, sample=USUAL, num_ranks=4):
    """What a function of each rank's part gives."""

    def work(world):
        owner = np.array(sample.assignment) % world.size
        return function(split_graph(sample.edge_index, sample.num_nodes, world, partitioner=owner))

    return run_ranks(work, num_ranks)


@pytest.mark.parametrize("name", ["usual", *ODD])
def test_every_node_and_edge_is_held_once_and_comes_back_in_its_place(name):
    sample = ODD.get(name, USUAL)

    def held(part):
        x, e = part.nodes(sample.x), part.edges(sample.columns, -1)
        back = [part.whole(x), part.whole(e), part.whole(part.edge_index)]
        return len(x.local), e.local.size(1), all(map(torch.equal, back, (sample.x, sample.columns, sample.edge_index)))

    nodes, some_edges, same = zip(*on_parts(held, sample))
    assert (sum(nodes), sum(some_edges)) == (sample.num_nodes, sample.edge_index.size(1))
    assert all(same)


def test_the_whole_of_rows_goes_to_one_rank_or_to_all():
    def whole(part):
        x = part.nodes(USUAL.series, 1)
        return part.whole(x * 2), part.whole(x, rank=2), part.whole(x.mean(), rank=0)

    for rank, (of_all, of_one, mean) in enumerate(on_parts(whole)):
        assert torch.equal(of_all, USUAL.series * 2)
        assert (of_one is None) == (rank != 2)
        assert (mean is None) == (rank != 0)
        assert of_one is None or torch.equal(of_one, USUAL.series)


def test_rows_of_ones_own_become_those_of_the_graph():
    def from_local(part):
        mine = USUAL.x[part.local_ids]
        x = part.nodes_from_local(mine)
        e = part.edges_from_local(USUAL.e[part.plan.edge_ids])
        return part.whole(x), part.whole(x[part.edge_index[0]]), part.whole(e), part.ranks.num_exchanges

    for x, ends, e, exchanges in on_parts(from_local):
        assert torch.equal(x, USUAL.x)
        assert torch.equal(ends, USUAL.x[USUAL.edge_index[0]])
        assert torch.equal(e, USUAL.e)
        assert exchanges == 0, "ghosts were given, too"


def test_gradients_flow_back_to_the_whole_tensor_on_every_rank():
    def gradient(part):
        x = USUAL.x.clone().requires_grad_()
        (part.nodes(x)[part.edge_index[0]] ** 2).sum().backward()
        whole = torch.ones(13, 4, dtype=torch.float64, requires_grad=True)
        (part.whole(part.nodes(USUAL.x) * part.nodes(whole)).sin().sum()).backward()
        return x.grad, whole.grad

    degrees = torch.bincount(USUAL.edge_index[0], minlength=13)[:, None]
    for of_nodes, through_whole in on_parts(gradient):
        torch.testing.assert_close(of_nodes, 2 * USUAL.x * degrees)
        torch.testing.assert_close(through_whole, USUAL.x * USUAL.x.cos())


@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda part: part.nodes(torch.ones(12, 4)), "13 nodes of the whole graph"),
        (lambda part: part.nodes(torch.ones(4, 13), 0), "13 nodes of the whole graph"),
        (lambda part: part.nodes(torch.ones(13), 1), "dimension 1"),
        (lambda part: part.nodes(torch.tensor(1.0)), "dimension 0"),
        (lambda part: part.edges(torch.ones(13, 4)), "40 edges of the whole graph"),
        (lambda part: part.nodes(part.nodes(torch.ones(13))), "placed already"),
        (lambda part: part.nodes_from_local(torch.ones(14)), "owned nodes and ghosts"),
        (lambda part: part.edges_from_local(torch.ones(41)), "edges of this rank"),
    ],
)
def test_wrong_lengths_are_named(give, text):
    def work(part):
        with pytest.raises(ValueError, match=text):
            give(part)

    on_parts(work)


@pytest.mark.parametrize("partitioner", ["metis", "contiguous"])
def test_named_partitioners_split_too(partitioner):
    def owned(world):
        return split_graph(USUAL.edge_index, 13, world, partitioner=partitioner).plan.owned_ids.tolist()

    assert sorted(node for one in run_ranks(owned, 4) for node in one) == list(range(13))


def test_groups_of_ranks_may_take_graphs_of_their_own():
    def work(world):
        graph = USUAL.edge_index[:, : 30 + world.data_group]
        part = split_graph(graph, 13, world, group="domain")
        with pytest.raises(Refused, match=r"edge_index is \(2, 20\) .* on rank 3, but \(2, 40\) .* on rank 2"):
            split_graph(USUAL.edge_index[:, : 20 if world.rank == 3 else 40], 13, world, group="domain")
        return part.ranks.size, len(part.edge_index[0])

    assert run_ranks(work, 4, domain_size=2) == [(2, 30), (2, 30), (2, 31), (2, 31)]


@pytest.mark.parametrize("split", [split_graph, split_slices])
def test_parts_have_equal_numbers_of_the_edges_that_they_compute_on(split):
    star = torch.stack([torch.zeros(4999, dtype=torch.int64), torch.arange(1, 5000)])

    def local_edges(world):
        slice_here = star if split is split_graph else star.tensor_split(world.size, 1)[world.rank]
        return split(slice_here, 5000, world).plan.num_edges

    found = run_ranks(local_edges, 3)
    assert sum(found) == 4999
    assert max(found) < 1.05 * 4999 / 3


# Slices


def cuts(length, num_ranks):
    """Where slices begin and end: ragged, the first of several empty, as is one in the middle."""
    inner = [0, *[length * sevenths // 7 for sevenths in (1, 1, 3)], *[length] * num_ranks][: num_ranks - 1]
    return [0, *inner, length]


def slice_of(rows, world, dim=0):
    at = cuts(rows.shape[dim], world.size)
    return rows.narrow(dim, at[world.rank], at[world.rank + 1] - at[world.rank])


def both(world, sample=USUAL, assigned=True):
    """The same part of a graph, from the whole of it and from slices."""
    parts = torch.tensor(sample.assignment, dtype=torch.int64) % world.size
    owner, own = (parts.numpy(), slice_of(parts, world)) if assigned else ("contiguous", None)
    whole = split_graph(sample.edge_index, sample.num_nodes, world, partitioner=owner)
    ends = slice_of(sample.edge_index, world, 1)
    return whole, split_slices(ends, sample.num_nodes, world, assignment=own)


@pytest.mark.parametrize("num_ranks", [slow(1), slow(2), 3, slow(8)])
@pytest.mark.parametrize("assigned", [True, False], ids=["assigned", "contiguous"])
@pytest.mark.parametrize("name", ["usual", *ODD])
def test_the_plan_of_slices_is_that_of_the_whole_graph(num_ranks, assigned, name):
    def differences(world):
        plans = [part.plan for part in both(world, ODD.get(name, USUAL), assigned)]
        return [
            one.name for one in fields(plans[0]) if not np.array_equal(*(getattr(plan, one.name) for plan in plans))
        ]

    assert run_ranks(differences, num_ranks) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_rows_of_slices_and_their_gradients_are_those_of_the_whole(num_ranks):
    def same(world):
        whole, sliced = both(world)
        found = []
        for take, dim, given in [("nodes", 0, USUAL.mask), ("nodes", 1, USUAL.series), ("edges", 1, USUAL.columns)]:
            one, other = getattr(whole, take)(given, dim), getattr(sliced, take)(slice_of(given, world, dim), dim)
            found.append(torch.equal(one.local, other.local) and other.local.is_contiguous())
        gradients = []
        for part, give in ((whole, USUAL.x), (sliced, slice_of(USUAL.x, world))):
            leaf = give.clone().requires_grad_()
            (part.nodes(leaf)[part.edge_index[0]] ** 2).sum().backward()
            gradients.append(leaf.grad)
        return found, torch.allclose(slice_of(gradients[0], world), gradients[1])

    assert run_ranks(same, num_ranks) == [([True] * 3, True)] * num_ranks


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = GCNConv(4, 8), GATConv(8, 2, edge_dim=4)

    def forward(self, x, edge_index, e):
        return self.second(self.first(x, edge_index).relu(), edge_index, e)


@pytest.mark.parametrize("num_ranks", [1, slow(2), 3, slow(8)])
def test_training_from_slices_gives_the_bits_of_training_from_the_whole(num_ranks):
    models = {(rank, way): TwoLayers().double() for rank in range(num_ranks) for way in ("whole", "slices")}

    def weights(world):
        found = []
        for way, part in zip(("whole", "slices"), both(world)):
            give = (lambda rows: rows) if way == "whole" else lambda rows: slice_of(rows, world)
            model = parallelize(models[world.rank, way], world)
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(3):
                out = model(part.nodes(give(USUAL.x)), part.edge_index, part.edges(give(USUAL.e)))
                loss = (out - part.nodes(give(USUAL.x))[:, :2]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            found.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
        return torch.equal(*found), found[0]

    of_ranks = run_ranks(weights, num_ranks)
    assert all(same for same, _ in of_ranks)
    assert all(torch.equal(of_ranks[0][1], other) for _, other in of_ranks)  # all ranks have the same network


def test_gradients_of_gradients_flow_back_to_slices():
    """As those of forces that a network of energies is trained on."""

    def learnt(world):
        rows, edges = ([total * (world.rank + more) // world.size for more in (0, 1)] for total in (13, 40))
        mine = USUAL.edge_index[:, slice(*edges)]
        part, position = split_slices(mine, 13, world), USUAL.x[slice(*rows)].clone().requires_grad_()
        weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        x, (src, dst) = part.nodes(position), part.edge_index
        (force,) = torch.autograd.grad((weight * x[src] ** 2 * x[dst]).sum(), position, create_graph=True)
        (part.nodes(force) ** 2).sum().backward()
        return part.whole(weight.grad)

    (alone,) = run_ranks(learnt, 1)
    assert alone != 0
    for found in run_ranks(learnt, 3):
        torch.testing.assert_close(found, alone)


def test_slices_may_be_cut_otherwise_in_each_call():
    def rows(world):
        _, part = both(world)
        ends = [cuts(13, 3), [0, 13, 13, 13], [0, 4, 8, 13], cuts(13, 3)]
        slices = [USUAL.x[at[world.rank] : at[world.rank + 1]] for at in ends]
        return [torch.equal(part.whole(part.nodes(mine)), USUAL.x) for mine in slices]

    assert run_ranks(rows, 3) == [[True] * 4] * 3


def test_groups_of_ranks_take_slices_of_graphs_of_their_own():
    def split(world):
        parts = torch.zeros(13, dtype=torch.int64) if world.data_group else None
        at, number = cuts(40, world.domain.size), world.domain.rank
        own = None if parts is None else parts[:13] if number == 0 else parts[:0]
        ends = USUAL.edge_index[:, at[number] : at[number + 1]]
        part = split_slices(ends, 13, world, assignment=own, group="domain")
        return part.ranks.size, part.plan.num_owned

    found = run_ranks(split, 4, domain_size=2)
    assert [parts for parts, _ in found] == [2] * 4
    assert [owned for _, owned in found[2:]] == [13, 0]
    assert sum(owned for _, owned in found[:2]) == 13


USUALLY = {"edge_index": USUAL.edge_index[:, :10], "num_nodes": 13}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"edge_index": torch.tensor([[0], [13]])}, r"edge 0 joins nodes 0 and 13"),
        ({"edge_index": torch.ones(2, 3)}, r"dtype float32; pass integers of shape \[2, E\]"),
        ({"edge_index": [[0], [1, 2]]}, "the edge_index of split_slices is to be a tensor, but it is a list"),
        ({"num_nodes": 14}, "split_slices' num_nodes is 14 on rank 1, but 13 on the others"),
        ({"assignment": torch.zeros(4, dtype=torch.int64)}, "assignment is given on rank 1, but None on the others"),
        ({"assignment": torch.full((4,), 3)}, "blocks run from 0 to 2"),
    ],
)
def test_slices_that_do_not_fit_are_refused_on_all_ranks(change, text):
    def work(world):
        with pytest.raises(Refused, match=text):
            split_slices(**(USUALLY | change if world.rank == 1 else USUALLY), world=world)

    run_ranks(work, 3)


def test_assignments_of_too_few_nodes_are_refused():
    def work(world):
        with pytest.raises(Refused, match="12 nodes .*13"):
            split_slices(**USUALLY, world=world, assignment=torch.zeros(4, dtype=torch.int64))

    run_ranks(work, 3)


def four(**options):
    return lambda part: part.nodes(torch.ones(4, 4, **options))


@pytest.mark.parametrize(
    ("here", "others", "text"),
    [
        (lambda part: part.nodes(torch.ones(6, 4)), four(), r"slices of \[4, 6, 4\] rows .* all have 13 nodes of the"),
        (lambda part: part.nodes(torch.ones(4, 3)), four(), r"of \[3\] float32, .* on rank 1, but of \[4\]"),
        (four(dtype=torch.int32), four(), r"int32, cut along dimension 0 on rank 1"),
        (lambda part: part.nodes(torch.tensor(1.0)), four(), r"no dimension 0 to hold nodes"),
        (four(requires_grad=True), four(), "a gradient of part.nodes is asked for on rank 1"),
        (lambda part: part.nodes({}), four(), "what part.nodes takes is to be a tensor"),
    ],
)
def test_slices_of_rows_that_do_not_fit_each_other_are_refused_on_all_ranks(here, others, text):
    def work(world):
        _, part = both(world)
        with pytest.raises(Refused, match=text):
            (here if world.rank == 1 else others)(part)

    run_ranks(work, 3)


def test_ranks_in_different_calls_are_named():
    def work(world):
        _, part = both(world)
        with pytest.raises(RanksDiffer, match=r"rank 1 in part.edges.* ranks 0, 2 in part.nodes"):
            (part.edges if world.rank == 1 else part.nodes)(torch.ones(4))

    run_ranks(work, 3)


def test_a_part_of_the_whole_takes_whole_tensors_only():
    part = split_graph(USUAL.edge_index, 13, World.alone())
    with pytest.raises(ValueError, match="13 nodes of the whole graph"):
        part.nodes(USUAL.x[:5])


def test_a_curve_through_space_gives_the_same_parts_on_every_rank_and_nobody_waits_for_rank_0(monkeypatch):
    position = np.random.default_rng(0).normal(size=(USUAL.num_nodes, 3))

    def owned(world):
        part = split_graph(USUAL.edge_index, USUAL.num_nodes, world, partitioner="hilbert", position=position)
        return part.plan.owned_ids.tolist()

    with pytest.raises(Refused, match="'hilbert' needs positions"):
        run_ranks(lambda world: split_graph(USUAL.edge_index, USUAL.num_nodes, world, partitioner="hilbert"), 2)
    monkeypatch.setattr(ThreadTransport, "broadcast", None)
    for size in (1, 2, 3, 4):
        held = run_ranks(owned, size)
        assert sorted(node for nodes in held for node in nodes) == list(range(USUAL.num_nodes))
        assert all(held)
