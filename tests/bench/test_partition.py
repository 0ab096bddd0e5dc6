import numpy as np
import partition
import pytest
import short_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from random_events import events

from domainpar.plan import build_plans, select_edges


def test_every_shape_and_grouping_is_measured(tmp_path):
    flags = "--hits 3000 --tiles 16 --parts 2 3 --repeats 1 --shapes phi phi-eta metis --groupings contiguous metis"
    partition.main([*flags.split(), "--results", str(tmp_path / "lines.jsonl")])
    rows, (tiles, parts) = short_runs.lines(tmp_path)
    shapes = ["phi 16", "phi-eta 16x1", "phi-eta 8x2", "phi-eta 4x4", "phi-eta 2x8", "phi-eta 1x16", "metis 16"]
    assert [line[0] for line in tiles["cells"]] == shapes
    assert len(parts["cells"]) == len(shapes) * 2 * 2
    assert len(rows) == 2 * len(shapes) * (1 + 2 * 2)  # two events
    grouped = [row for row in rows if "grouping" in row]
    assert all(row["plan_seconds"]["median"] > 0 and row["grouping_seconds"]["median"] > 0 for row in grouped)


@pytest.mark.parametrize("seed", range(5))
def test_what_others_ask_for_is_what_their_plans_say(seed):
    generator = np.random.default_rng(seed)
    edge_index, owner = generator.integers(0, 40, (2, 150)), generator.integers(0, 4, 40)
    for plan in build_plans(edge_index, owner, 4, "incident"):
        edges = select_edges(edge_index, owner, plan.part, "incident")
        asked = partition.asked_of(edges, owner, plan.part, 4)
        assert [len(ids) for ids in asked] == plan.send_counts.tolist()
        assert np.array_equal(np.concatenate(asked), plan.owned_ids[plan.send_rows])


@settings(max_examples=150)
@given(events(), st.integers(1, 6), st.integers(0, 99))
def test_tile_counts_agree_with_those_of_plain_loops(event, num_tiles, seed):
    tile = np.random.default_rng(seed).integers(0, num_tiles, event.num_nodes)
    edges = [(src, dst) for src, dst in event.edge_index.T.tolist()]
    joining, touched, src_pairs = partition.tile_counts(event.edge_index, tile, num_tiles)
    assert joining == sum(tile[src] != tile[dst] for src, dst in edges)
    assert src_pairs == len({(tile[dst], src) for src, dst in edges})
    for k in range(num_tiles):
        touching = {tile[node] for edge in edges for node in edge if k in tile[list(edge)]}
        assert touched[k] == len(touching - {k})


def test_a_tile_is_free_of_ghosts_when_no_edge_leaves_its_part():
    edges, tile = np.array([[0, 1, 1, 2, 2, 4, 5], [1, 3, 4, 3, 3, 4, 0]]), np.array([0, 0, 1, 2, 2, 3])
    assert partition.tiles_without_ghosts(edges, tile, np.array([0, 0, 0, 1])).tolist() == [False, True, True, False]
    assert partition.tiles_without_ghosts(edges, tile, np.zeros(4, int)).all()
