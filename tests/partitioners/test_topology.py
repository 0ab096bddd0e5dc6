import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_topology, topologies

from partitioners import BY_POSITION, PARTITIONERS, SEEDED, Contiguous, Metis, Random, Topology, get_partitioner

NO_EDGES = np.zeros((2, 0), np.int64)


def test_the_cost_of_a_node_is_its_in_and_out_degree_and_one():
    edges = np.array([[0, 0, 2, 2], [1, 1, 2, 0]])  # duplicates count twice, a self-loop as one in and one out
    assert Topology(edges, 4).costs().tolist() == [4, 3, 4, 1]
    assert Topology(edges, 4, edge_policy="incoming").costs().tolist() == [2, 3, 2, 1]  # those that a part computes on


def attached(num_nodes, each, rng):
    """Edges of preferential attachment: every node sends some to nodes drawn by their degree; old ones get many."""
    ends = [0, 1]
    edges = []
    for node in range(2, num_nodes):
        for to in [ends[place] for place in rng.integers(len(ends), size=each)]:
            edges.append((node, to))
            ends += [node, to]
    return np.array(edges).T


@pytest.mark.parametrize("num_blocks", [3, 16])
@pytest.mark.parametrize("name", ["metis", "contiguous"])
@pytest.mark.parametrize("graph", ["out of one node", "preferential attachment"])
def test_edges_are_dealt_evenly_to_parts_that_compute_on_incoming_ones(graph, name, num_blocks):
    if graph == "out of one node":
        edges = np.stack([np.zeros(4999, np.int64), np.arange(1, 5000)])
    else:
        edges = attached(5000, 4, np.random.default_rng(0))[::-1]  # from old nodes, which have many, to new ones
    parts = get_partitioner(name)(Topology(edges, 5000, edge_policy="incoming"), num_blocks)
    per_part = np.bincount(parts[edges[1]], minlength=num_blocks)
    assert per_part.max() / per_part.mean() < 1.06


def test_edges_that_name_no_node_are_refused_with_the_first_bad_one():
    with pytest.raises(ValueError, match="edge 1 .*2 and 3 .*3 nodes"):
        Topology(np.array([[0, 2, 9], [1, 3, 9]]), 3)
    with pytest.raises(ValueError, match="edge 0 joins nodes -1 and 0"):
        Topology(np.array([[-1], [0]]), 3)
    with pytest.raises(ValueError, match=r"shape \(3, 2\)"):
        Topology(np.zeros((3, 2), np.int64), 3)


def test_positions_that_do_not_fit_or_are_not_finite_are_refused():
    with pytest.raises(ValueError, match=r"position .*\(2, 3\); .*3 nodes"):
        Topology(NO_EDGES, 3, np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"position of node 1 is \[0.0, nan, 0.0\] \(2 of 3 nodes"):
        Topology(NO_EDGES, 3, np.array([[0, 0, 0], [0, np.nan, 0], [0, 0, np.inf]]))


@pytest.mark.parametrize("name", PARTITIONERS)
def test_every_name_gives_a_partitioner_that_repeats_itself(name):
    topology = random_topology(0, 300, 900)
    assignment = get_partitioner(name, seed=3)(topology, 6)
    assert assignment.dtype == np.int32
    assert np.unique(assignment).tolist() == list(range(6))
    assert np.array_equal(get_partitioner(name, seed=3)(topology, 6), assignment)


@pytest.mark.parametrize("name", PARTITIONERS)
def test_fewer_than_one_block_is_refused(name):
    with pytest.raises(ValueError, match="num_blocks is 0"):
        get_partitioner(name)(random_topology(0), 0)


@pytest.mark.parametrize("name", PARTITIONERS)
def test_those_that_need_positions_refuse_a_graph_without_them_and_the_others_cut_it(name):
    topology = Topology(NO_EDGES, 3)
    if name in BY_POSITION:
        with pytest.raises(ValueError, match=f"partitioner '{name}' needs positions and this graph has none"):
            get_partitioner(name)(topology, 2)
    else:
        assert len(get_partitioner(name)(topology, 2)) == 3


def test_the_seed_reaches_the_partitioners_that_use_one():
    assert get_partitioner("metis", seed=3) == Metis(3)
    assert get_partitioner("random", seed=3) == Random(3)
    assert SEEDED == ("metis", "random")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'voronoi' .*phi, eta, phi-eta, metis"):
        get_partitioner("voronoi")


@settings(max_examples=50)
@given(topologies(), st.integers(1, 70))
def test_contiguous_blocks_are_ranges_of_ids_in_any_graph(topology, num_blocks):
    assignment = Contiguous()(topology, num_blocks)
    assert assignment.dtype == np.int32
    assert len(assignment) == topology.num_nodes
    assert (np.diff(assignment) >= 0).all()
    assert ((assignment >= 0) & (assignment < num_blocks)).all()


def test_contiguous_blocks_are_of_equal_cost():
    edges = np.random.default_rng(0).integers(0, 500, (2, 8000))  # the first quarter of the ids has them all
    topology = Topology(edges, 2000)
    costs = topology.costs()
    per_block = np.bincount(Contiguous()(topology, 10), costs, 10)
    assert per_block.max() - per_block.min() < 2 * costs.max()


def test_random_blocks_depend_on_the_seed():
    topology = random_topology(0)
    assert not np.array_equal(Random(0)(topology, 5), Random(1)(topology, 5))
