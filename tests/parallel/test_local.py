"""One part as tensors: its tiles, the pairs that edges are summed by, and what is refused at the door."""

import drawn
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_events import tiled_events
from tiled import TiledEvent

from domainpar.parallel import local
from domainpar.parallel.local import EDGES, HAS_GHOSTS, NODES, OWNED, PAIRS, TileRanges, find_tiles, localise
from domainpar.plan import build_plans
from domainpar.testing import run_ranks

# Six tiles over the drawn event, two a part: 0, 1 | 2 || 3 | 4, 5 || (none) | 6, 7, 8
NODE_PTR = np.array([0, 2, 3, 4, 6, 6, 9])
EDGE_PTR = np.array([0, 2, 3, 5, 7, 7, 12])
PART_OF_TILE = np.array([0, 0, 1, 1, 2, 2])
RANGES = TileRanges(NODE_PTR, EDGE_PTR, PART_OF_TILE)


def drawn_plan(part):
    return build_plans(drawn.EDGE_INDEX, drawn.ASSIGNMENT, 3, "incident")[part]


# (owned, rows of edges, has ghosts) of each tile, then the pair of each edge, then the node of each pair
DRAWN_TILES = [
    (
        [(True, (0, 2), False), (True, (2, 3), False), (False, (3, 4), True), (False, (4, 5), True)],
        [0, 1, 2, 3, 4],
        [0, 2, 0, 1, 2],
    ),
    ([(True, (0, 2), True), (True, (2, 4), True), (False, (4, 5), True)], [-1, -1, 0, -1, 1], [0, 1]),
    ([(False, (0, 1), True), (True, (1, 6), True)], [0, -1, 1, 2, 2, 3], [0, 0, 1, 2]),
]


@pytest.mark.parametrize("part", [0, 1, 2])
def test_tiles_of_the_drawn_event_are_those_written_out_by_hand(part):
    expected, pair_of_edge, pair_rows = DRAWN_TILES[part]
    tiles = find_tiles(drawn_plan(part), RANGES)
    found = [(bool(row[OWNED]), tuple(row[EDGES]), bool(row[HAS_GHOSTS])) for row in tiles.edges.tolist()]
    assert found == expected
    assert tiles.pair_of_edge.tolist() == pair_of_edge
    assert tiles.pair_rows.tolist() == pair_rows
    rows = [[0, 2], [2, 3]], [[0, 1], [1, 3]], [[0, 3]]  # an empty tile is left out
    assert tiles.ranges_of_nodes.tolist() == rows[part]


@pytest.mark.parametrize(
    ("most_rows", "expected"), [(4096, [(0, 2), (2, 3), (3, 5)]), (1, [(0, 2), (2, 3), (3, 4), (4, 5)])]
)
def test_foreign_tiles_that_follow_each_other_are_computed_together_up_to_a_limit(monkeypatch, most_rows, expected):
    monkeypatch.setattr(local, "FOREIGN_ROWS", most_rows)
    tiles = find_tiles(drawn_plan(0), RANGES)
    pieces = tiles.ranges_of_edges
    assert [tuple(edges) for edges in pieces[:, EDGES].tolist()] == expected
    assert pieces[pieces[:, OWNED] > 0].tolist() == tiles.edges[tiles.edges[:, OWNED] > 0].tolist()
    for columns in (EDGES, PAIRS):
        assert pieces[1:, columns][:, 0].tolist() == pieces[:-1, columns][:, 1].tolist()
    assert pieces[-1, PAIRS][1] == len(tiles.pair_rows)
    assert pieces[-1, HAS_GHOSTS]


def test_owned_tiles_without_an_edge_have_their_turn_too():
    plan = build_plans(np.zeros((2, 0), np.int64), drawn.ASSIGNMENT, 3, "incident")[0]
    tiles = find_tiles(plan, TileRanges(NODE_PTR, 0 * EDGE_PTR, PART_OF_TILE))
    assert tiles.ranges_of_edges.tolist() == [[0, 0, 0, 0, 0, 2, 1, 0], [0, 0, 0, 0, 2, 3, 1, 0]]


def _check_tiles(world, event, grouping):
    part_of_tile = event.grouping(grouping, world.size, seed=1)
    graph = event.part(world.transport, part_of_tile).graph
    plan, tiles = graph.plan, graph.tiles
    src, dst = plan.edge_rows
    tile_of_node = np.repeat(np.arange(event.num_tiles), np.diff(event.order.node_ptr))[plan.local_ids]

    rows = [np.arange(*tile[EDGES]) for tile in tiles.edges]
    np.testing.assert_array_equal(np.concatenate([[], *rows]), np.arange(plan.num_edges))  # each edge once, in order
    assert tiles.edge_ptr.tolist() == [0, *np.cumsum([len(edges) for edges in rows])]
    assert tiles.owned.tolist() == [bool(tile[OWNED]) for tile in tiles.edges]
    for tile, edges, number in zip(tiles.edges, rows, sorted(set(tile_of_node[dst].tolist())), strict=True):
        assert len(edges) > 0
        assert (tile_of_node[dst[edges]] == number).all()
        assert tile[OWNED] == (part_of_tile[number] == plan.part) == plan.edge_owned[edges].all()
        assert tile[HAS_GHOSTS] == any(row >= plan.num_owned for edge in edges for row in (src[edge], dst[edge]))
        nodes = np.arange(*tile[NODES])
        assert (tile_of_node[nodes] == number).all()
        assert (len(nodes) > 0) == tile[OWNED]
        _check_pairs_of(np.arange(*tile[PAIRS]), edges, tiles, src, plan.num_owned)
    assert sum(last - first for first, last in tiles.edges[:, PAIRS]) == len(tiles.pair_rows)

    rows = [np.arange(*nodes) for nodes in tiles.ranges_of_nodes]
    np.testing.assert_array_equal(np.concatenate([[], *rows]), np.arange(plan.num_owned))
    for nodes in rows:
        assert len(nodes) > 0
        assert len(set(tile_of_node[nodes].tolist())) == 1
    turns = [np.arange(*nodes) for nodes in tiles.ranges_of_edges[:, NODES]]  # each owned node has its turn once
    np.testing.assert_array_equal(np.sort(np.concatenate([[], *turns])), np.arange(plan.num_owned))


def _check_pairs_of(of_tile, edges, tiles, src, num_owned):
    """The pairs of a tile: one for each owned node that is the `src` of one of its edges, ascending."""
    pairs = tiles.pair_of_edge.numpy()[edges]
    np.testing.assert_array_equal(pairs == -1, src[edges] >= num_owned)
    rows = tiles.pair_rows.numpy()
    with_owned = edges[pairs >= 0]
    np.testing.assert_array_equal(rows[pairs[pairs >= 0]], src[with_owned])
    np.testing.assert_array_equal(rows[of_tile], np.unique(src[with_owned]))
    assert set(pairs[pairs >= 0]) == set(of_tile)


@given(tiled=tiled_events(), num_ranks=st.integers(1, 4), grouping=st.sampled_from(["ranges", "random", "one part"]))
@settings(max_examples=100)
def test_tiles_of_any_part_hold_its_edges_its_nodes_and_its_pairs(tiled, num_ranks, grouping):
    graph, assignment, num_tiles = tiled
    run_ranks(_check_tiles, num_ranks, TiledEvent.of(graph, assignment, num_tiles, tiny=True), grouping)


def arrays_of(plan):
    """Features, edge features and labels of a part."""
    return np.ones((plan.num_local, 3)), np.ones((plan.num_edges, 2)), np.ones(plan.num_edges, np.uint8)


def test_a_local_graph_holds_rows_of_ends_and_the_data_in_the_type_asked_for():
    plan = drawn_plan(1)
    graph = localise(plan, RANGES, *arrays_of(plan), event_id="drawn", dtype=torch.float64)
    assert torch.stack([graph.src, graph.dst]).tolist() == drawn.INCIDENT[1]["edge_rows"]
    assert (graph.num_owned, graph.num_edges, graph.event_id) == (3, 5, "drawn")
    assert (graph.features.dtype, graph.edge_features.dtype, graph.label.dtype) == (
        torch.float64,
        torch.float64,
        torch.uint8,
    )
    assert localise(plan, RANGES, *arrays_of(plan)[:2], None).label is None


@pytest.mark.parametrize(("which", "name"), list(enumerate(["features", "edge features", "label"])))
def test_arrays_that_do_not_fit_the_plan_are_refused_by_name(which, name):
    plan = drawn_plan(2)
    arrays = list(arrays_of(plan))
    expected = len(arrays[which])
    arrays[which] = arrays[which][:-1]
    with pytest.raises(ValueError, match=f"event e7: {name} has {expected - 1} rows where the plan has {expected}"):
        localise(plan, RANGES, *arrays, event_id="e7")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("which", "name"), list(enumerate(["features", "edge features"])))
def test_values_that_are_not_finite_are_refused_with_their_row(which, name, value):
    plan = drawn_plan(2)
    arrays = arrays_of(plan)
    arrays[which][4, 1] = value
    with pytest.raises(ValueError, match=f"event e7: {name} of local row 4 is not finite"):
        localise(plan, RANGES, *arrays, event_id="e7")
