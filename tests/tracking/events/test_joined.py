"""Several events read as one: ids count on from event to event, and no edge joins two."""

from __future__ import annotations

import numpy as np
import pytest
from random_events import random_assignment, random_event

from domainpar.tracking.events.store import JoinedEvents, StoredEvent, event_file_name, write_event

SIZES = ((3, 40, 120, 5), (4, 30, 0, 3), (5, 50, 160, 4))
"""Seed, nodes, edges and tiles of each."""


@pytest.fixture
def events(tmp_path):
    opened = []
    for seed, nodes, edges, tiles in SIZES:
        graph = random_event(seed, nodes, edges)
        path = tmp_path / event_file_name(graph.hits.event_id)
        write_event(path, graph, random_assignment(seed, nodes, tiles), tiles)
        opened.append(StoredEvent(path))
    yield opened
    for event in opened:
        event.close()


def test_rows_in_any_order_are_those_of_their_events(events):
    joined, random = JoinedEvents(events), np.random.default_rng(1)
    for kind, name in (("nodes", "features"), ("nodes", "hit_id"), ("edges", "features"), ("edges", "label")):
        count = getattr(joined, f"num_{kind}")
        rows = [getattr(one, f"read_{kind}")(name, np.arange(getattr(one, f"num_{kind}"))) for one in events]
        whole = np.concatenate(rows)
        for ids in (np.arange(count), random.permutation(count), random.integers(count, size=20), np.zeros(0, int)):
            found = getattr(joined, f"read_{kind}")(name, ids)
            assert found.dtype == whole.dtype
            assert np.array_equal(found, whole[ids])


def test_edges_of_a_part_are_those_of_its_tiles_in_each_event(events):
    joined = JoinedEvents(events)
    nodes, edges = np.arange(joined.num_nodes), np.arange(joined.num_edges)
    event_of_node = np.repeat(np.arange(3), [one.num_nodes for one in events])
    ends = []
    for number, one in enumerate(events):
        own = np.arange(one.num_edges)
        ends.append([one.read_edges(end, own) + nodes[event_of_node == number][0] for end in ("src", "dst")])
    src, dst = np.concatenate(ends, axis=1)
    tile_of_node = np.repeat(np.arange(joined.num_tiles), np.diff(joined.node_ptr))
    for tiles in (np.arange(12), np.array([1, 4, 5, 9]), np.array([6]), np.zeros(0, int)):
        ends_in, starts_in = np.isin(tile_of_node[dst], tiles), np.isin(tile_of_node[src], tiles)
        for policy, wanted in (("incoming", ends_in), ("incident", ends_in | starts_in)):
            edge_ids, found_src, found_dst = joined.read_part_edges(tiles, policy)
            assert np.array_equal(edge_ids, edges[wanted])
            assert np.array_equal(found_src, src[wanted])
            assert np.array_equal(found_dst, dst[wanted])


def test_tiles_count_on_and_none_joins_two_events(events):
    joined = JoinedEvents(events)
    tiles, event_of_tile = joined.tile_graph(), np.repeat(np.arange(3), [5, 3, 4])
    assert joined.num_tiles == tiles.num_tiles == 12
    assert (joined.node_ptr[-1], joined.edge_ptr[-1]) == (joined.num_nodes, joined.num_edges) == (120, 280)
    assert np.array_equal(event_of_tile[tiles.src_tile], event_of_tile[tiles.dst_tile])
    for number, one in enumerate(events):
        own, expected = event_of_tile == number, one.tile_graph()
        joining, first = own[tiles.src_tile], np.flatnonzero(own)[0]
        assert np.array_equal(tiles.node_counts[own], expected.node_counts)
        assert np.array_equal(tiles.edge_counts[own], expected.edge_counts)
        assert np.array_equal(tiles.src_tile[joining] - first, expected.src_tile)
        assert np.array_equal(tiles.dst_tile[joining] - first, expected.dst_tile)
        assert np.array_equal(tiles.joining[joining], expected.joining)
        assert tiles.src_tile.dtype == expected.src_tile.dtype


def test_labels_are_there_only_if_all_have_them_and_messages_name_all(events, tmp_path):
    assert JoinedEvents(events).has_labels
    graph = random_event(9, 20, 30, labels=False)
    write_event(tmp_path / "none.zarr.zip", graph, random_assignment(9, 20, 2), 2)
    with StoredEvent(tmp_path / "none.zarr.zip") as without:
        joined = JoinedEvents([events[0], without])
        assert not joined.has_labels
        assert joined.event_id == joined.place.event == f"{events[0].event_id}, {without.event_id}"
