import numpy as np
import pytest
from hypothesis import given, settings
from random_graphs import topologies

from partitioners import Hilbert, Random, Topology
from partitioners.hilbert import along_curve
from partitioners.quality import measure


def crystal(cells: int = 13, moved: float = 0.0, seed: int = 0) -> Topology:
    """Atoms of a cubic crystal of spacing 1 in an order by chance, each joined to those within 1.5."""
    rng = np.random.default_rng(7)
    sites = np.stack(np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"), -1).reshape(-1, 3)
    sites = sites[rng.permutation(len(sites))]
    number = np.full([cells + 2] * 3, -1)
    number[tuple((sites + 1).T)] = np.arange(len(sites))
    steps = np.stack(np.meshgrid(*[(-1, 0, 1)] * 3, indexing="ij"), -1).reshape(-1, 3)
    edges = []
    for step in steps[np.isin(np.abs(steps).sum(1), (1, 2))]:
        other = number[tuple((sites + 1 + step).T)]
        edges.append(np.stack([other, np.arange(len(sites))])[:, other >= 0])
    shaken = 0.1 * rng.normal(size=sites.shape) + moved * np.random.default_rng(seed).uniform(-1, 1, sites.shape)
    return Topology(np.concatenate(edges, 1), len(sites), sites + shaken)


@pytest.mark.parametrize("cells", [2, 4, 8])
def test_the_curve_visits_every_cell_of_a_cube_and_steps_to_a_neighbour_each_time(cells):
    sites = np.stack(np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"), -1).reshape(-1, 3)
    steps = np.diff(sites[np.argsort(along_curve(sites.astype(np.float32)))], axis=0)
    assert (np.abs(steps).sum(axis=1) == 1).all()


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 64])
@settings(max_examples=25)
@given(topology=topologies(positions=True))
def test_every_node_gets_a_block_that_exists(num_blocks, topology):
    assignment = Hilbert()(topology, num_blocks)
    assert assignment.dtype == np.int32
    assert assignment.shape == (topology.num_nodes,)
    assert ((assignment >= 0) & (assignment < num_blocks)).all()


@pytest.mark.parametrize("num_blocks", [2, 3, 8])
def test_blocks_are_balanced_within_one_node(num_blocks):
    topology = crystal()
    costs = topology.costs()
    per_block = np.bincount(Hilbert()(topology, num_blocks), costs, num_blocks)
    assert abs(per_block - costs.sum() / num_blocks).max() <= costs.max()
    alike = Topology(np.zeros((2, 0), np.int64), topology.num_nodes, topology.position)
    nodes = np.bincount(Hilbert()(alike, num_blocks), minlength=num_blocks)
    assert nodes.max() - nodes.min() <= 1


def test_atoms_that_move_a_little_keep_their_owners_but_for_a_few_at_borders():
    before = Hilbert()(crystal(), 4)
    changed = [(Hilbert()(crystal(moved=moved, seed=1), 4) != before).mean() for moved in (1e-9, 1e-3, 1e-2)]
    assert changed[0] == 0  # though the middle plane of the crystal lies on a border of the curve
    assert 0 < changed[1] < changed[2] < 0.02


def test_edges_that_come_and_go_with_moving_atoms_change_few_owners():
    topology = crystal()
    keep = np.random.default_rng(3).random(topology.num_edges) > 0.05
    fewer = Topology(topology.edge_index[:, keep], topology.num_nodes, topology.position)
    assert (Hilbert()(topology, 4) != Hilbert()(fewer, 4)).mean() < 0.02


def test_blocks_are_compact():
    topology = crystal()
    cut = {name: measure(topology.edge_index, make(topology, 8), 8).cut_share for name, make in (
        ("hilbert", Hilbert()), ("random", Random()))}  # fmt: skip
    assert cut["hilbert"] < 0.25 < 0.8 < cut["random"]  # METIS cuts 0.14


def test_the_order_of_nodes_and_the_unit_of_length_do_not_matter():
    topology = crystal()
    order = np.random.default_rng(5).permutation(topology.num_nodes)
    places = along_curve(topology.position)
    assert np.array_equal(along_curve(topology.position[order]), places[order])
    assert np.array_equal(along_curve(topology.position * 1024), places)
