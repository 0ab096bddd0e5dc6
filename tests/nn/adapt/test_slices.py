"""A graph of which every rank holds a slice: the part is that of the whole graph, rows and gradients too."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from marks import slow
from torch import nn
from torch_geometric.nn import GATConv, GCNConv
from whole_and_split import ODD, USUAL

from domainpar import parallelize, split_graph, split_slices
from domainpar.common.agreement import Refused
from domainpar.nn.adapt.part import GraphPart
from domainpar.parallel.errors import RanksDiffer
from domainpar.testing import run_ranks


def cuts(length, num_ranks):
    """Where slices begin and end: ragged, the first of several empty, as is one in the middle."""
    inner = [0, *[length * sevenths // 7 for sevenths in (1, 1, 3)], *[length] * num_ranks][: num_ranks - 1]
    return [0, *inner, length]


def slice_of(rows, world, dim=0):
    at = cuts(rows.shape[dim], world.size)
    return rows.narrow(dim, at[world.rank], at[world.rank + 1] - at[world.rank])


def both(world, sample=USUAL, edges="incoming", assigned=True):
    """The same part of a graph, from the whole of it and from slices."""
    parts = torch.tensor(sample.assignment, dtype=torch.int64) % world.size
    whole = split_graph(
        sample.edge_index,
        sample.num_nodes,
        world,
        edge_policy=edges,
        partitioner=parts.numpy() if assigned else "contiguous",
    )
    own = slice_of(parts, world) if assigned else None
    sliced = split_slices(
        slice_of(sample.edge_index, world, 1), sample.num_nodes, world, edge_policy=edges, assignment=own
    )
    return whole, sliced


@pytest.mark.parametrize("num_ranks", [slow(1), slow(2), 3, slow(8)])
@pytest.mark.parametrize("edges", ["incoming", "incident"])
@pytest.mark.parametrize("assigned", [True, False], ids=["assigned", "contiguous"])
@pytest.mark.parametrize("name", ["usual", *ODD])
def test_the_plan_is_that_of_the_whole_graph(num_ranks, edges, assigned, name):
    def differences(world):
        whole, sliced = both(world, ODD.get(name, USUAL), edges, assigned)
        pairs = {
            field.name: (getattr(whole.plan, field.name), getattr(sliced.plan, field.name))
            for field in fields(whole.plan)
        }
        return [key for key, (one, other) in pairs.items() if not np.array_equal(one, other)]

    assert run_ranks(differences, num_ranks) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_rows_of_slices_are_those_of_the_whole(num_ranks):
    def same(world):
        whole, sliced = both(world, edges="incident")
        found = []
        for take in ("nodes", "owned_nodes", "edges", "owned_edges"):
            of_nodes = {0: [USUAL.x, USUAL.mask], 1: [USUAL.series]}
            tensors = of_nodes if "nodes" in take else {0: [USUAL.kind], 1: [USUAL.columns]}
            for dim, given in tensors.items():
                for tensor in given:
                    one = getattr(whole, take)(tensor, dim)
                    other = getattr(sliced, take)(slice_of(tensor, world, dim), dim)
                    found.append(one.dtype == other.dtype and torch.equal(one, other) and other.is_contiguous())
        return found

    assert run_ranks(same, num_ranks) == [[True] * 10] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_gradients_flow_back_to_the_slices(num_ranks):
    def gradients(world):
        whole, sliced = both(world, edges="incident")
        found = []
        for part in (whole, sliced):
            x = USUAL.x if part is whole else slice_of(USUAL.x, world)
            leaf = x.clone().requires_grad_()
            rows = part.nodes(leaf)
            weights = torch.arange(rows.numel(), dtype=torch.float64).view_as(rows) + world.rank
            (rows * weights).sum().backward()
            found.append(leaf.grad)
        return found

    of_ranks = run_ranks(gradients, num_ranks)
    assert torch.allclose(torch.cat([sliced for _, sliced in of_ranks]), sum(whole for whole, _ in of_ranks))


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
                loss = part.node_mean_share((out - part.owned_nodes(give(USUAL.x))[:, :2]) ** 2)
                optimizer.zero_grad()
                loss.backward()
                model.reduce_gradients()
                optimizer.step()
            found.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
        return torch.equal(*found), found[0]

    of_ranks = run_ranks(weights, num_ranks)
    assert all(same for same, _ in of_ranks)
    assert all(torch.equal(of_ranks[0][1], other) for _, other in of_ranks)  # all ranks have the same network


def test_slices_may_be_cut_otherwise_in_each_call():
    def rows(world):
        _, part = both(world)
        ends = [cuts(13, 3), [0, 13, 13, 13], [0, 4, 8, 13], cuts(13, 3)]
        slices = [USUAL.x[at[world.rank] : at[world.rank + 1]] for at in ends]
        return [torch.equal(part.owned_nodes(mine), USUAL.x[part.plan.owned_ids]) for mine in slices]

    assert run_ranks(rows, 3) == [[True] * 4] * 3


def test_groups_of_ranks_take_graphs_of_their_own_in_ways_of_their_own():
    def split(world):
        parts = torch.zeros(13, dtype=torch.int64) if world.data_group else None
        at = cuts(40, world.domain.size)
        number = world.domain.rank
        edge_index = USUAL.edge_index[:, at[number] : at[number + 1]]
        own = None if parts is None else parts[:13] if number == 0 else parts[:0]
        part = split_slices(edge_index, 13, world, assignment=own, group="domain")
        return part.num_parts, part.plan.num_owned

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
        ({"edge_policy": "incident"}, "split_slices' edge_policy is incident on rank 1"),
        ({"edge_policy": "both"}, "edge_policy='both' is no choice"),
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
        with pytest.raises(Refused, match="have 12 nodes together where the graph has 13"):
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
        with pytest.raises(RanksDiffer, match=r"rank 1 in part.owned_nodes.* ranks 0, 2 in part.nodes"):
            (part.owned_nodes if world.rank == 1 else part.nodes)(torch.ones(4))

    run_ranks(work, 3)


def test_a_part_of_the_whole_takes_whole_tensors_only():
    def work(world):
        whole, sliced = both(world)
        assert isinstance(whole, GraphPart)
        assert isinstance(sliced, GraphPart)
        with pytest.raises(ValueError, match="13 nodes of the whole graph"):
            whole.nodes(slice_of(USUAL.x, world))

    run_ranks(work, 3)
