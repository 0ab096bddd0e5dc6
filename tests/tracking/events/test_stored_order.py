"""The stored order: a renumbering that keeps the graph, and the relations read off it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from random_events import random_assignment, random_event, tiled_events

from domainpar.tracking.events.stored_order import concatenated_ranges, default_num_tiles, stored_order


@given(tiled_events())
def test_stored_edges_are_the_users_edges_renumbered(case):
    event, assignment, num_tiles = case
    order = stored_order(event.edge_index, assignment, num_tiles)
    assert np.array_equal(np.sort(order.original_row), np.arange(event.num_nodes))
    assert np.array_equal(np.sort(order.original_position), np.arange(event.num_edges))
    there_and_back = order.original_row[np.stack([order.src, order.dst])]
    assert np.array_equal(there_and_back, event.edge_index[:, order.original_position])


@given(tiled_events())
def test_edges_ascend_by_dst_then_src_then_original_position(case):
    event, assignment, num_tiles = case
    order = stored_order(event.edge_index, assignment, num_tiles)
    rows = list(zip(order.dst, order.src, order.original_position))
    assert rows == sorted(rows)


def test_an_event_of_more_nodes_than_the_root_of_the_largest_int32_is_sorted_too():
    """The product of two row numbers is no int32 any more; numbers of nodes and tiles in a file are."""
    event = random_event(4, 50_000, 1_000)
    order = stored_order(event.edge_index, random_assignment(4, 50_000, 300), 300)
    rows = list(zip(order.dst.tolist(), order.src.tolist(), order.original_position.tolist()))
    assert rows == sorted(rows)
    assert order.dst.max() > 46_340
    there_and_back = order.original_row[np.stack([order.src, order.dst])]
    assert np.array_equal(there_and_back, event.edge_index[:, order.original_position])


def test_more_tiles_than_the_root_of_the_largest_int32_are_joined_in_order():
    event = random_event(5, 60_000, 1_000)
    order = stored_order(event.edge_index, np.arange(60_000, dtype=np.int32), 60_000)
    pairs = list(zip(order.src_tile.tolist(), order.dst_tile.tolist()))
    apart = event.edge_index[:, event.edge_index[0] != event.edge_index[1]]
    assert pairs == sorted(set(map(tuple, apart.T.tolist())))
    assert order.joining.sum() == apart.shape[1]


@given(tiled_events())
def test_a_tile_is_a_range_of_nodes_in_original_order_and_of_its_incoming_edges(case):
    event, assignment, num_tiles = case
    order = stored_order(event.edge_index, assignment, num_tiles)
    for tile in range(num_tiles):
        nodes = slice(order.node_ptr[tile], order.node_ptr[tile + 1])
        assert np.array_equal(order.original_row[nodes], np.flatnonzero(assignment == tile))
        into = np.flatnonzero((order.dst >= nodes.start) & (order.dst < nodes.stop))
        assert np.array_equal(into, np.arange(order.edge_ptr[tile], order.edge_ptr[tile + 1]))


@given(tiled_events())
def test_the_index_lists_each_edge_that_joins_two_tiles_once(case):
    event, assignment, num_tiles = case
    order = stored_order(event.edge_index, assignment, num_tiles)
    tile = np.repeat(np.arange(num_tiles), np.diff(order.node_ptr))
    joining = np.flatnonzero(tile[order.src] != tile[order.dst])
    assert np.array_equal(np.sort(order.joining_edges), joining)
    assert np.array_equal(tile[order.src[order.joining_edges]], np.repeat(order.src_tile, order.joining))
    assert np.array_equal(tile[order.dst[order.joining_edges]], np.repeat(order.dst_tile, order.joining))
    pairs = list(zip(order.src_tile, order.dst_tile))
    assert pairs == sorted(set(pairs))


def test_concatenated_ranges_lists_ranges_in_the_order_given():
    assert concatenated_ranges(np.array([5, 0, 9]), np.array([7, 0, 10])).tolist() == [5, 6, 9]
    assert concatenated_ranges(np.array([], int), np.array([], int)).tolist() == []


@pytest.mark.parametrize(
    ("num_edges", "num_tiles"),
    [
        (0, 1),
        (255, 1),
        (1_024, 4),
        (8_000, 32),
        (47_000, 32),
        (300_000, 64),
        (1_185_690, 256),
        (1_500_000, 320),
    ],
)
def test_default_number_of_tiles_makes_good_grids_of_some_4600_edges_and_cuts_small_events_finer(num_edges, num_tiles):
    event = random_event(0, 1000, 0, num_edge_features=0)
    nowhere = np.broadcast_to(np.zeros((2, 1), np.int64), (2, num_edges))
    assert default_num_tiles(replace(event, edge_index=nowhere)) == num_tiles


@given(tiled_events())
def test_default_number_of_tiles_is_at_least_one_and_never_above_nodes(case):
    event, _, _ = case
    assert 1 <= default_num_tiles(event) <= max(1, event.num_nodes)
