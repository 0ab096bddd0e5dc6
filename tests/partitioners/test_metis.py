import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import fault
from random_graphs import random_topology, ring, topologies

from partitioners import Metis, Phi, Topology
from partitioners.quality import imbalance, measure
from partitioners.sectors import circular_mean, phi_of


def grid(width: int) -> Topology:
    """A square grid of nodes, without positions."""
    ids = np.arange(width * width).reshape(width, width)
    right = np.stack([ids[:, :-1].ravel(), ids[:, 1:].ravel()])
    down = np.stack([ids[:-1].ravel(), ids[1:].ravel()])
    return Topology(np.concatenate([right, down], axis=1), width * width)


@settings(max_examples=100)
@given(topologies(), st.integers(1, 60), st.integers(0, 2**31 - 1))
def test_every_node_gets_a_block_and_the_same_seed_gives_the_same_blocks(topology, num_blocks, seed):
    assignment = Metis(seed)(topology, num_blocks)
    assert assignment.dtype == np.int32
    assert assignment.shape == (topology.num_nodes,)
    assert ((assignment >= 0) & (assignment < num_blocks)).all()
    assert np.array_equal(Metis(seed)(topology, num_blocks), assignment)


def test_another_seed_gives_other_blocks():
    assert not np.array_equal(Metis(0)(grid(30), 16), Metis(1)(grid(30), 16))


def test_blocks_of_a_grid_are_balanced_and_cut_few_edges():
    topology = grid(40)
    assignment = Metis()(topology, 16)
    assert measure(topology.edge_index, assignment, 16).cut_share < 0.12  # squares of 10 x 10 cut 0.077
    assert imbalance(np.bincount(assignment, topology.costs(), 16)) < 1.05


def test_costs_not_nodes_are_balanced():
    square = grid(40)
    corner = square.edge_index[:, (square.edge_index < 400).all(axis=0)]
    topology = Topology(
        np.concatenate([square.edge_index, *[corner] * 9], axis=1), 1600
    )  # a quarter costs 10 times more
    assignment = Metis()(topology, 8)
    assert imbalance(np.bincount(assignment, topology.costs(), 8)) < 1.1
    assert imbalance(np.bincount(assignment)) > 1.5


def test_metis_is_shown_an_undirected_graph_without_self_loops_or_parallel_edges(monkeypatch):
    shown = {}

    def record(num_blocks, adjacency, **weights):
        shown.update(starts=adjacency.adj_starts, adjacent=adjacency.adjacent, **weights)
        return 0, [0] * (len(adjacency.adj_starts) - 1)

    monkeypatch.setattr("pymetis.part_graph", record)
    topology = random_topology(0, 30, 90)
    Metis()(topology, 4)
    expected = np.zeros((30, 30), int)
    for src, dst in topology.edge_index.T[topology.edge_index[0] != topology.edge_index[1]]:
        expected[src, dst] += 1
        expected[dst, src] += 1
    joined = np.flatnonzero(expected.any(axis=0))
    found = np.zeros((len(joined), len(joined)), int)
    rows = np.repeat(np.arange(len(joined)), np.diff(shown["starts"]))
    np.add.at(found, (rows, shown["adjacent"]), shown["eweights"])
    assert np.array_equal(found, expected[np.ix_(joined, joined)])
    assert len(shown["adjacent"]) == np.count_nonzero(expected)
    assert np.array_equal(shown["vweights"], topology.costs()[joined])


def test_directions_self_loops_and_the_order_of_edges_do_not_matter():
    topology = grid(20)
    loops = np.tile(np.arange(400), (2, 1))  # one each: every node costs the same amount more
    turned = np.concatenate([topology.edge_index, loops], axis=1)
    order = np.random.default_rng(0).permutation(turned.shape[1])
    one_way = Metis()(Topology(turned, 400), 8)
    other_way = Metis()(Topology(turned[::-1, order], 400), 8)
    assert np.array_equal(one_way, other_way)


def test_parallel_edges_weigh_as_much_as_there_are():
    # A ring of pairs joined by ten edges: no pair is worth cutting.
    pairs = np.arange(16).reshape(8, 2).T
    between = np.stack([pairs[1], np.roll(pairs[0], -1)])
    assignment = Metis()(Topology(np.concatenate([*[pairs] * 10, between], axis=1), 16), 4)
    assert np.array_equal(assignment[pairs[0]], assignment[pairs[1]])


def test_without_edges_but_with_positions_the_blocks_are_wedges_of_equal_cost():
    topology = Topology(np.zeros((2, 0), np.int64), 100, ring(100).position)
    assert np.array_equal(Metis()(topology, 8), Phi()(topology, 8))


def test_without_edges_and_positions_the_blocks_are_of_equal_size():
    sizes = np.bincount(Metis()(Topology(np.zeros((2, 0), np.int64), 101), 8))
    assert sizes.min() == 12
    assert sizes.max() == 13


def test_nodes_without_edges_go_to_the_lightest_blocks():
    square = grid(20)
    topology = Topology(square.edge_index, 1000)  # 600 nodes without edges, of cost 1
    per_block = np.bincount(Metis()(topology, 7), topology.costs(), 7)
    assert per_block.max() - per_block.min() <= 1


def test_nodes_without_edges_join_blocks_at_their_phi():
    edges = ring(200)
    shuffled = np.random.default_rng(0).permutation(200)
    topology = Topology(edges.edge_index, 400, np.concatenate([edges.position, edges.position[shuffled]]))
    assignment = Metis()(topology, 20)
    assert np.bincount(assignment[200:]).tolist() == [10] * 20
    phi = phi_of(edges.position)
    away = phi[shuffled] - circular_mean(phi, assignment[:200], 20)[assignment[200:]]
    assert np.abs(np.angle(np.exp(1j * away))).max() < 2 * (2 * np.pi / 20)


@fault(26)
def test_a_failure_of_metis_is_an_error_and_never_another_method(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("metis memory error")

    monkeypatch.setattr("pymetis.part_graph", fail)
    with pytest.raises(RuntimeError, match="METIS failed to cut 400 nodes and 760 edges into 8 blocks: metis memory"):
        Metis()(grid(20), 8)


def test_blocks_that_do_not_exist_are_never_passed_on(monkeypatch):
    monkeypatch.setattr("pymetis.part_graph", lambda *args, **options: (0, [8] * 400))
    with pytest.raises(RuntimeError, match=r"METIS .*400 of them outside \[0, 8\)"):
        Metis()(grid(20), 8)


def test_a_graph_too_large_for_this_build_is_refused(monkeypatch):
    monkeypatch.setattr("pymetis.zero_copy_dtype", lambda: np.dtype(np.int8))
    monkeypatch.setattr("pymetis.part_graph", lambda *args, **options: (0, [0] * 400))
    with pytest.raises(ValueError, match="int8 .*graph needs counts up to"):
        Metis()(grid(20), 8)


def test_more_blocks_than_nodes_gives_each_joined_node_its_own():
    topology = random_topology(3, num_nodes=20, num_edges=60)
    src, dst = topology.edge_index
    joined = np.unique(topology.edge_index[:, src != dst])
    assert len(np.unique(Metis()(topology, 50)[joined])) == len(joined)


def test_importing_the_package_loads_neither_metis_nor_torch_nor_domainpar():
    code = (
        "import sys, partitioners; print([m for m in ('pymetis', 'torch', 'numba', 'domainpar') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
