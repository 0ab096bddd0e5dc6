import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_topology, ring, topologies

from partitioners import GROUPINGS, Contiguous, Phi, Random, TileGraph, group
from partitioners.quality import imbalance, measure


def ring_of_tiles(num_tiles: int = 64, shuffled: bool = False) -> TileGraph:
    topology = ring(num_tiles * 10)
    tile = Phi()(topology, num_tiles)
    if shuffled:
        tile = np.random.default_rng(0).permutation(num_tiles)[tile]
    return TileGraph.from_assignment(topology.edge_index, tile, num_tiles)


@settings(max_examples=100)
@given(topologies(), st.integers(1, 9), st.integers(0, 99))
def test_a_tile_graph_counts_every_node_and_every_edge_once(topology, num_tiles, seed):
    tile = Random(seed)(topology, num_tiles)
    tiles = TileGraph.from_assignment(topology.edge_index, tile, num_tiles)
    expected = np.zeros((num_tiles, num_tiles), int)
    for src, dst in topology.edge_index.T:
        expected[tile[src], tile[dst]] += 1
    assert tiles.node_counts.sum() == topology.num_nodes
    assert np.array_equal(tiles.edge_counts, expected.sum(axis=0))
    np.fill_diagonal(expected, 0)
    found = np.zeros_like(expected)
    found[tiles.src_tile, tiles.dst_tile] = tiles.joining
    assert np.array_equal(found, expected)
    assert len(tiles.joining) == np.count_nonzero(expected)


@pytest.mark.parametrize("method", GROUPINGS)
@settings(max_examples=60)
@given(topology=topologies(), num_tiles=st.integers(1, 30), num_parts=st.integers(1, 40))
def test_every_tile_gets_a_part_that_exists_and_always_the_same(method, topology, num_tiles, num_parts):
    tiles = TileGraph.from_assignment(topology.edge_index, Random()(topology, num_tiles), num_tiles)
    part = group(tiles, num_parts, method, seed=5)
    assert part.dtype == np.int32
    assert part.shape == (num_tiles,)
    assert ((part >= 0) & (part < num_parts)).all()
    assert np.array_equal(group(tiles, num_parts, method, seed=5), part)


def test_contiguous_parts_are_ranges_of_tiles():
    part = group(ring_of_tiles(), 5, "contiguous")
    assert (np.diff(part) >= 0).all()
    assert np.unique(part).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("method", ["contiguous", "metis"])
def test_parts_of_equal_tiles_cost_the_same(method):
    tiles = ring_of_tiles()
    assert imbalance(np.bincount(group(tiles, 8, method), tiles.costs(), 8).astype(int)) <= 1.02


def test_the_cost_of_a_tile_is_its_incoming_edges_and_its_nodes():
    tiles = TileGraph(np.array([5, 0, 1]), np.array([0, 7, 2]), *[np.zeros(0, np.int64)] * 3)
    assert tiles.costs().tolist() == [5, 7, 3]


def test_metis_finds_neighbours_whatever_their_numbers():
    tiles = ring_of_tiles(shuffled=True)
    by_range, by_metis = group(tiles, 4, "contiguous"), group(tiles, 4, "metis")

    def cut(part):
        return tiles.joining[part[tiles.src_tile] != part[tiles.dst_tile]].sum()

    assert cut(by_metis) == 4
    assert cut(by_range) > 10


def test_metis_cuts_where_few_edges_join():
    # A ring of pairs: 50 edges join the tiles of a pair, one joins pair to pair.
    src, joining = np.arange(16), np.where(np.arange(16) % 2, 1, 50)
    tiles = TileGraph(np.full(16, 10), np.full(16, 60), src, (src + 1) % 16, joining)
    part = group(tiles, 4, "metis")
    assert np.array_equal(part[::2], part[1::2])


def test_metis_is_told_of_the_edges_that_join_two_tiles_in_either_direction(monkeypatch):
    shown = {}

    def record(num_blocks, adjacency, **weights):
        shown.update(starts=adjacency.adj_starts, adjacent=adjacency.adjacent, **weights)
        return 0, [0] * (len(adjacency.adj_starts) - 1)

    monkeypatch.setattr("pymetis.part_graph", record)
    src, dst, joining = np.array([0, 0, 1, 2, 2]), np.array([1, 2, 0, 0, 1]), np.array([5, 3, 7, 1, 2])
    group(TileGraph(np.ones(3, int), np.ones(3, int), src, dst, joining), 2, "metis")
    rows = np.repeat(np.arange(3), np.diff(shown["starts"]))
    found = zip(rows.tolist(), shown["adjacent"].tolist(), shown["eweights"].tolist())
    assert sorted(found) == [(0, 1, 12), (0, 2, 4), (1, 0, 12), (1, 2, 2), (2, 0, 4), (2, 1, 2)]


def test_metis_deals_tiles_without_neighbours_to_the_lightest_parts():
    nothing = np.zeros(0, np.int64)
    part = group(TileGraph(np.full(12, 3), np.full(12, 4), nothing, nothing, nothing), 5, "metis")
    assert sorted(np.bincount(part).tolist()) == [2, 2, 2, 3, 3]


@pytest.mark.parametrize("method", ["contiguous", "metis"])
@pytest.mark.parametrize("num_parts", [6, 9])
def test_more_parts_than_tiles_gives_every_tile_its_own_part(method, num_parts):
    assert len(np.unique(group(ring_of_tiles(6), num_parts, method))) == 6


def test_an_unknown_method_or_no_part_at_all_is_refused():
    with pytest.raises(ValueError, match="'best' .*contiguous, metis, random"):
        group(ring_of_tiles(), 2, "best")
    with pytest.raises(ValueError, match="num_parts is 0"):
        group(ring_of_tiles(), 0)


def test_tiles_that_do_not_exist_are_refused():
    topology = random_topology(0)
    with pytest.raises(ValueError, match="blocks 0 to 7 .*4"):
        TileGraph.from_assignment(topology.edge_index, Contiguous()(topology, 8), 4)


def test_joining_edges_between_parts_are_the_edges_the_parts_cut():
    topology = random_topology(1, 200, 900)
    tile = Contiguous()(topology, 20)
    tiles = TileGraph.from_assignment(topology.edge_index, tile, 20)
    part = group(tiles, 4, "metis")
    between = tiles.joining[part[tiles.src_tile] != part[tiles.dst_tile]].sum()
    assert measure(topology.edge_index, part[tile], 4).cut_edges == between
