import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import fault
from random_graphs import random_topology, ring, topologies

from partitioners import Eta, Phi, PhiEta, TileGraph, Topology, number_along_phi, number_of_sectors, sectors_of_tiles
from partitioners.sectors import eta_of, phi_of

NO_EDGES = np.zeros((2, 0), np.int64)


def detector(num_nodes: int, seed: int = 0) -> Topology:
    """Nodes at random around the beam axis, with edges."""
    rng = np.random.default_rng(seed)
    return Topology(rng.integers(0, num_nodes, (2, 4 * num_nodes)), num_nodes, rng.normal(0, 300, (num_nodes, 3)))


def lowest_and_highest(values, assignment, num_blocks):
    members = [values[assignment == block] for block in range(num_blocks)]
    return [(block.min(), block.max()) for block in members if len(block)]


@pytest.mark.parametrize(("partitioner", "coordinate"), [(Phi(), phi_of), (Eta(), eta_of)])
def test_slices_follow_their_coordinate_without_overlap(partitioner, coordinate):
    topology = detector(500)
    ranges = lowest_and_highest(coordinate(topology.position), partitioner(topology, 16), 16)
    assert len(ranges) == 16
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


@pytest.mark.parametrize("partitioner", [Phi(), Eta(), PhiEta(), PhiEta(4)])
def test_blocks_differ_by_less_than_the_costs_of_three_nodes(partitioner):
    topology = detector(2000)
    costs = topology.costs()
    per_block = np.bincount(partitioner(topology, 32), costs, 32)
    assert per_block.max() - per_block.min() < 3 * costs.max()


def test_costs_not_nodes_are_balanced():
    hub = np.stack([np.zeros(90, np.int64), np.arange(1, 91)])  # node 0 costs 91, the others 2 or 1
    topology = Topology(hub, 182, ring(182).position)
    assert np.bincount(Phi()(topology, 2)).tolist() == [46, 136]


@pytest.mark.parametrize("partitioner", [Phi(), Eta(), PhiEta()])
@pytest.mark.parametrize("num_blocks", [1, 2, 7, 64])
@settings(max_examples=25)
@given(topology=topologies(positions=True))
def test_every_node_gets_a_block_that_exists(partitioner, num_blocks, topology):
    assignment = partitioner(topology, num_blocks)
    assert assignment.dtype == np.int32
    assert assignment.shape == (topology.num_nodes,)
    assert ((assignment >= 0) & (assignment < num_blocks)).all()


@fault(22)
def test_hits_on_the_beam_axis_lie_in_the_outer_slices_in_eta():
    position = np.array([[0, 0, 5], [1, 0, 0], [0, 0, -5], [1, 0, 1], [0, 0, 0], [1, 0, -1]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assignment = Eta()(Topology(NO_EDGES, 6, position), 3)
    assert assignment.tolist() == [2, 1, 0, 2, 1, 0]


def test_pseudorapidity_is_that_of_the_polar_angle():
    position = detector(50).position
    theta = np.arctan2(np.hypot(position[:, 0], position[:, 1]), position[:, 2])
    np.testing.assert_allclose(eta_of(position), -np.log(np.tan(theta / 2)), rtol=1e-12, atol=1e-12)


def test_phi_eta_numbers_wedge_by_wedge():
    topology = detector(3000)
    fine, wedges = PhiEta(8)(topology, 32), Phi()(topology, 8)
    assert np.array_equal(fine // 4, wedges)
    eta = eta_of(topology.position)
    for wedge in range(8):
        ranges = lowest_and_highest(eta[wedges == wedge], fine[wedges == wedge] % 4, 4)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    ("num_blocks", "grid"), [(1, (1, 1)), (32, (16, 2)), (64, (32, 2)), (128, (32, 4)), (256, (64, 4)), (7, (7, 1))]
)
def test_the_grid_has_exactly_as_many_blocks_as_asked_for_in_the_measured_aspect(num_blocks, grid):
    assert PhiEta().grid(num_blocks) == grid


def test_a_number_of_wedges_that_does_not_divide_the_blocks_is_refused():
    with pytest.raises(ValueError, match="3 phi wedges do not divide 32 blocks"):
        PhiEta(3)(detector(10), 32)


@pytest.mark.parametrize(("partitioner", "name"), [(Phi(), "phi"), (Eta(), "eta"), (PhiEta(), "phi-eta")])
def test_without_positions_the_error_names_partitioners_that_need_none(partitioner, name):
    topology = random_topology(0, positions=False)
    with pytest.raises(ValueError, match=f"'{name}' needs positions.*metis, contiguous and random"):
        partitioner(topology, 4)


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_numbering_along_phi_sorts_shuffled_wedges_back(seed, num_blocks):
    topology = detector(400, seed)
    wedges = Phi()(topology, num_blocks)
    shuffled = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)[wedges]
    numbered = number_along_phi(shuffled, topology.position, num_blocks)
    if num_blocks > 4:  # fewer wedges are wide enough for their mean to say little
        assert np.array_equal(numbered, wedges)
    assert np.array_equal(number_along_phi(numbered, topology.position, num_blocks), numbered)


@pytest.mark.parametrize("partitioner", [Phi(), Eta(), PhiEta(4)])
def test_numbering_along_phi_keeps_the_order_of_sectors(partitioner):
    topology = detector(600)
    assignment = partitioner(topology, 16)
    assert np.array_equal(number_along_phi(assignment, topology.position, 16), assignment)


def test_numbering_along_phi_keeps_blocks_whole_and_puts_empty_ones_last():
    topology = ring(12)
    assignment = np.array([5, 5, 5, 2, 2, 2, 4, 4, 4, 1, 1, 1])  # blocks 0 and 3 are empty
    numbered = number_along_phi(assignment, topology.position, 6)
    assert numbered.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_block_of_one_node_within_another_one_follows_phi_already():
    phi = np.array([0.0, 1.0, 0.3])  # a slice in eta may have one node
    position = np.stack([np.cos(phi), np.sin(phi), 0 * phi], 1)
    assert number_along_phi(np.array([0, 0, 1]), position, 2).tolist() == [0, 0, 1]
    assert number_along_phi(np.array([1, 1, 0]), position, 2).tolist() == [1, 1, 0]


def test_a_block_across_the_seam_is_numbered_by_its_circular_mean():
    # The plain mean of phi would put the block at +-pi between the other two, at 21 degrees.
    topology = ring(12)
    assignment = np.array([2, 2, 1, 1, 1, 0, 0, 0, 0, 2, 2, 2])
    numbered = number_along_phi(assignment, topology.position, 3)
    assert numbered.tolist() == [2, 2, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


def sectors_of_nodes(topology, tile, sectors, num_tiles=32):
    tiles = TileGraph.from_assignment(topology.edge_index, tile, num_tiles)
    return sectors_of_tiles(tiles, sectors, tile, topology.position)[tile]


def test_a_grid_of_sectors_cuts_phi_first_and_then_eta_into_equal_costs():
    topology = detector(4000)
    tile = PhiEta(8)(topology, 32)
    sector = sectors_of_nodes(topology, tile, "4x2")
    assert set(sector) == set(range(8))
    phi, eta = phi_of(topology.position), eta_of(topology.position)
    wedges = lowest_and_highest(phi, sector // 2, 4)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(wedges))
    for wedge in range(4):
        inner = tile[sector == 2 * wedge] % 4, tile[sector == 2 * wedge + 1] % 4  # slices of the tiles
        assert inner[0].max() < inner[1].min()
        assert np.median(eta[sector == 2 * wedge]) < np.median(eta[sector == 2 * wedge + 1])
    costs = np.bincount(sector, topology.costs(), 8)
    assert costs.max() < 1.05 * costs.min()


def test_a_grid_of_sectors_does_not_depend_on_the_numbers_of_tiles():
    topology = detector(1000)
    tile = PhiEta(8)(topology, 32)
    renumbered = np.random.default_rng(1).permutation(32).astype(np.int32)[tile]
    found = sectors_of_nodes(topology, renumbered, "4x2")
    assert np.array_equal(found, sectors_of_nodes(topology, tile, "4x2"))
    assert not np.array_equal(sectors_of_nodes(topology, renumbered, 8), sectors_of_nodes(topology, tile, 8))


def test_a_number_of_sectors_needs_no_positions_and_a_grid_does():
    topology, tile = ring(64), np.arange(64, dtype=np.int32) // 2
    tiles = TileGraph.from_assignment(topology.edge_index, tile, 32)
    assert sectors_of_tiles(tiles, 4, tile, None).tolist() == (np.arange(32) // 8).tolist()
    with pytest.raises(ValueError, match=r"2x2 .*no positions; ask for 4"):
        sectors_of_tiles(tiles, "2x2", tile, None)


def test_hits_on_the_beam_axis_and_empty_tiles_have_a_sector_too():
    topology = Topology(np.array([[0, 1], [1, 2]]), 4, np.array([[0, 0, 9.0], [0, 0, -9.0], [1, 0, 0], [0, 1, 0]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sector = sectors_of_nodes(topology, np.array([0, 0, 3, 4]), "1x3", num_tiles=6)
    assert ((sector >= 0) & (sector < 3)).all()


def test_a_tile_with_hits_on_both_ends_of_the_beam_axis_lies_in_the_middle():
    position = np.array([[0, 0, 9.0], [0, 0, -9.0], [1, 0, -4], [1, 0, 4]])  # eta inf, -inf, -2.1, 2.1
    topology = Topology(np.zeros((2, 0), np.int64), 4, position)
    assert sectors_of_nodes(topology, np.array([0, 0, 1, 2]), "1x3", num_tiles=3).tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize("sectors", [0, -3, "0x2", "8x", "x2", "8x2x2", "8 x 2", "eight", "8,2", "8X2"])
def test_what_is_no_number_of_sectors_is_refused(sectors):
    with pytest.raises(ValueError, match=f"{sectors}"):
        number_of_sectors(sectors)
