"""One rank's part of a graph: its rows, marked, and back."""

import numpy as np
import pytest
import torch
from whole_and_split import ODD, USUAL

from domainpar import World
from domainpar.common.agreement import Refused
from domainpar.nn.adapt.rows import Rows, rows_of
from domainpar.nn.adapt.split import split_graph, split_slices
from domainpar.testing import run_ranks


def parts_of(function, sample=USUAL, num_ranks=4, edges="incoming"):
    """What a function of each rank's part gives."""

    def work(world):
        return function(
            split_graph(
                sample.edge_index, sample.num_nodes, world, edge_policy=edges, partitioner=np.array(sample.assignment)
            )
        )

    return run_ranks(work, num_ranks)


@pytest.mark.parametrize("edges", ["incoming", "incident"])
@pytest.mark.parametrize("name", ["usual", *ODD])
def test_every_node_and_edge_is_owned_once(name, edges):
    sample = ODD.get(name, USUAL)

    def owned(part):
        ids = torch.arange(sample.num_nodes), torch.arange(sample.edge_index.size(1))
        return part.owned_nodes(ids[0]), part.owned_edges(ids[1]), part.node_axis.total, part.edge_axis.total

    found = parts_of(owned, sample, edges=edges)
    assert torch.cat([one[0] for one in found]).sort().values.tolist() == list(range(sample.num_nodes))
    assert torch.cat([one[1] for one in found]).sort().values.tolist() == list(range(sample.edge_index.size(1)))
    assert {one[2:] for one in found} == {(sample.num_nodes, sample.edge_index.size(1))}


@pytest.mark.parametrize("edges", ["incoming", "incident"])
def test_local_ends_are_the_global_ends(edges):
    def ends(part):
        rows = part.edge_index
        return torch.equal(part.local_ids[rows], part.edges(USUAL.edge_index, 1)), rows_of(rows).names is not None

    assert parts_of(ends, edges=edges) == [(True, True)] * 4


def test_rows_of_nodes_are_owned_ones_then_ghosts():
    def lengths(part):
        plan = part.plan
        along = part.nodes(USUAL.series, 1)
        same = torch.equal(along, USUAL.series[:, part.local_ids]) and torch.equal(part.nodes(USUAL.series, -2), along)
        owned = torch.equal(part.owned_nodes(USUAL.series, 1), along[:, : plan.num_owned])
        return same, owned, rows_of(along).dim, len(part.nodes(USUAL.x)) == plan.num_local, plan.num_owned

    found = parts_of(lengths)
    assert [one[:4] for one in found] == [(True, True, 1, True)] * 4
    assert [one[4] for one in found][2:] == [0, 1]


def test_gradients_flow_back_to_the_whole_tensor():
    def gradient(part):
        whole = USUAL.x.clone().requires_grad_()
        part.owned_nodes(whole).sum().backward()
        return whole.grad

    assert torch.equal(torch.stack(parts_of(gradient)).sum(0), torch.ones_like(USUAL.x))


def test_marks_say_what_rows_are():
    def marks(part):
        x = part.nodes(USUAL.x)
        own = part.nodes_from_local(x.detach().clone() * 2)
        weights = part.edges_from_local(torch.ones(part.plan.num_edges))
        constant = part.replicate(torch.ones(3))
        assert isinstance(rows_of(own), Rows)
        return (
            rows_of(own).axis is part.node_axis,
            rows_of(weights).axis is part.edge_axis,
            rows_of(constant) is None,
            rows_of(x).fresh,
        )

    assert parts_of(marks) == [(True,) * 4] * 4


def test_marking_leaves_the_callers_tensor_alone():
    def marked(part):
        own, constant = torch.ones(part.plan.num_local), torch.ones(3)
        part.nodes_from_local(own)
        part.replicate(constant)
        return own.__dict__, constant.__dict__

    assert parts_of(marked) == [({}, {})] * 4


@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda part: part.nodes(torch.ones(12, 4)), "13 nodes of the whole graph"),
        (lambda part: part.nodes(torch.ones(4, 13), 0), "13 nodes of the whole graph"),
        (lambda part: part.nodes(torch.ones(13), 1), "dimension 1"),
        (lambda part: part.nodes(torch.tensor(1.0)), "dimension 0"),
        (lambda part: part.edges(torch.ones(13, 4)), "40 edges of the whole graph"),
        (lambda part: part.owned_nodes(torch.ones(40)), "13 nodes of the whole graph"),
        (lambda part: part.owned_edges(torch.ones(13)), "40 edges of the whole graph"),
        (lambda part: part.nodes_from_local(torch.ones(14)), "owned nodes and ghosts"),
        (lambda part: part.edges_from_local(torch.ones(41)), "local edges"),
    ],
)
def test_wrong_lengths_are_named(give, text):
    def work(part):
        with pytest.raises(ValueError, match=text):
            give(part)

    parts_of(work)


def test_sums_are_the_same_bits_on_every_rank_and_without_gradient():
    def total(part):
        mine = part.owned_nodes(USUAL.x.clone().requires_grad_()).sum(0)
        found = part.all_reduce(mine)
        assert not found.requires_grad
        return found

    found = parts_of(total)
    assert all(torch.equal(one, found[0]) for one in found)
    assert torch.allclose(found[0], USUAL.x.sum(0))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.complex128, torch.uint8]
)
def test_gather_brings_every_type_and_shape(dtype):
    def gathered(part):
        shapes = [part.gather(torch.full(size, part.index).to(dtype)) for size in ((), (3,), (2, 0), (1, 2))]
        return [
            [one.double().sum().item() if not one.is_complex() else one.real.sum().item() for one in four]
            for four in shapes
        ]

    wanted = [float(rank) if dtype is not torch.bool else float(rank > 0) for rank in range(4)]
    found = parts_of(gathered)
    assert found == [[wanted, [3 * one for one in wanted], [0.0] * 4, [2 * one for one in wanted]]] * 4


def test_a_sum_of_different_lengths_is_not_made_up():
    def total(part):
        return part.all_reduce(torch.ones(part.plan.num_owned))

    with pytest.raises(Exception, match=r"."):
        parts_of(total)


def test_joined_axes_are_the_same_object_for_the_same_pieces():
    def joined(part):
        one = part.joined([part.edge_axis, part.node_axis])
        other = part.joined([part.node_axis, part.edge_axis])
        return (
            one is part.joined([part.edge_axis, part.node_axis]),
            one is not other,
            one.total,
            len(one.keys.unique()) == one.length,
        )

    assert parts_of(joined) == [(True, True, 53, True)] * 4


def test_an_assignment_that_does_not_fit_is_refused_on_all_ranks():
    for assignment in (np.zeros(12, int), np.full(13, 4), np.full(13, -1)):
        with pytest.raises(Exception, match=r"assign|part|node"):
            run_ranks(lambda world, given=assignment: split_graph(USUAL.edge_index, 13, world, partitioner=given), 4)
    with pytest.raises(Exception, match=r"."):
        split_graph(torch.tensor([[0], [13]]), 13, World.alone())


@pytest.mark.parametrize("partitioner", ["metis", "contiguous"])
def test_named_partitioners_split_too(partitioner):
    def owned(world):
        part = split_graph(USUAL.edge_index, 13, world, partitioner=partitioner)
        return part.owned_nodes(torch.arange(13)).tolist(), part.index, part.num_parts

    found = run_ranks(owned, 4)
    assert sorted(node for one in found for node in one[0]) == list(range(13))
    assert [one[1:] for one in found] == [(rank, 4) for rank in range(4)]


def test_groups_of_ranks_may_take_graphs_of_their_own():
    def work(world):
        group = split_graph(USUAL.edge_index, USUAL.num_nodes, world, group="domain")
        return group.num_parts, split_graph(USUAL.edge_index, USUAL.num_nodes, world).num_parts

    assert run_ranks(work, 4, domain_size=2) == [(2, 4)] * 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"edge_index": USUAL.edge_index[:, :20]}, r"edge_index is \(2, 20\) int64, .* on rank 1, but \(2, 40\)"),
        ({"edge_index": USUAL.edge_index.flip(1)}, r"checksum \w+ on rank 1, but \(2, 40\) int64, checksum \w+ on the"),
        ({"edge_index": USUAL.edge_index.int()}, r"edge_index is \(2, 40\) int32, .* on rank 1, but \(2, 40\) int64"),
        ({"num_nodes": 14}, "number of nodes is 14 on rank 1, but 13 on the others"),
        ({"edge_policy": "incident"}, "edge_policy is incident on rank 1, but incoming on the others"),
        ({"partitioner": "contiguous"}, "partitioner is contiguous on rank 1, but metis on the others"),
        ({"partitioner": np.zeros(13, int)}, r"partitioner is \(13,\) int64, .* on rank 1, but metis on the others"),
        ({"position": torch.ones(13, 3)}, r"position is \(13, 3\) float32, .* on rank 1, but None on the others"),
        ({"seed": 1}, "seed is 1 on rank 1, but 0 on the others"),
        ({"edge_policy": "both"}, "edge_policy='both' is no choice; write 'incoming' or, for both ends, 'incident'"),
        ({"edge_index": [[0], [1, 2]]}, "the edge_index of split_graph is to be a tensor, but it is a list"),
    ],
)  # fmt: skip
def test_ranks_that_were_given_different_graphs_are_refused_on_all_of_them(change, text):
    def work(world):
        usual = {"edge_index": USUAL.edge_index, "num_nodes": 13}
        with pytest.raises(Refused, match=text):
            split_graph(**(usual | change if world.rank == 1 else usual), world=world)

    run_ranks(work, 3)


def test_groups_of_ranks_that_were_given_different_graphs_stop_all_groups():
    def work(world):
        graph = USUAL.edge_index[:, : 30 if world.rank == 3 else 40]
        with pytest.raises(Refused, match=r"edge_index is \(2, 30\) .* on rank 3, but \(2, 40\) .* on rank 2"):
            split_graph(graph, 13, world, group="domain")
        split_graph(USUAL.edge_index[:, : 30 + world.data_group], 13, world, group="domain")

    run_ranks(work, 4, domain_size=2)


def test_arrays_and_lists_do_as_well_as_tensors():
    def rows(part):
        return part.nodes(USUAL.x.numpy()), part.owned_edges(USUAL.e.tolist()), part.replicate(np.ones(3))

    def work(world):
        array = np.array(USUAL.assignment)
        return rows(
            split_graph(USUAL.edge_index.numpy(), 13, world, partitioner=array, position=USUAL.x[:, :3].numpy())
        )

    for mine, (nodes, edges, ones) in zip(parts_of(rows), run_ranks(work, 4)):
        assert torch.equal(mine[0], nodes)
        assert torch.equal(mine[1], edges)
        assert torch.equal(ones, torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"what part.nodes takes is to be a tensor, but it is a dict"):
        split_graph(USUAL.edge_index, 13, World.alone()).nodes({})


@pytest.mark.parametrize("weights", [None, USUAL.u, USUAL.mask], ids=["none", "numbers", "mask"])
def test_shares_of_a_mean_add_up_to_the_mean_of_the_whole(weights):
    def share(part):
        own = None if weights is None else part.owned_nodes(weights)
        return part.node_mean_share(part.owned_nodes(USUAL.x), own), part.edge_mean_share(part.owned_edges(USUAL.w))

    whole = USUAL.x.mean(1)
    whole = whole.mean() if weights is None else (whole * weights).sum() / weights.sum()
    for edges in ("incoming", "incident"):
        shares = parts_of(share, edges=edges)
        assert torch.allclose(sum(one[0] for one in shares), whole)
        assert torch.allclose(sum(one[1] for one in shares), USUAL.w.mean())


def test_a_mean_of_what_are_not_the_owned_rows_is_refused():
    part = split_graph(USUAL.edge_index, 13, World.alone())
    with pytest.raises(ValueError, match=r"shape \(\) .* 13 owned nodes"):
        part.node_mean_share(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"shape \(12,\) .* 40 owned edges"):
        part.edge_mean_share(torch.ones(40), torch.ones(12))


@pytest.mark.parametrize("split", [split_graph, split_slices])
def test_parts_have_equal_numbers_of_the_edges_that_they_compute_on(split):
    star = torch.stack([torch.zeros(4999, dtype=torch.int64), torch.arange(1, 5000)])

    def local_edges(world):
        slice_here = star if split is split_graph else star.tensor_split(world.size, 1)[world.rank]
        return split(slice_here, 5000, world).plan.num_edges

    found = run_ranks(local_edges, 3)
    assert sum(found) == 4999
    assert max(found) < 1.05 * 4999 / 3
