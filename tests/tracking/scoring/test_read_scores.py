"""`domainpar.read_scores`: what infer wrote as arrays and tables, joined with the store where that is known."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from small_run import simulated, tiles_of

import domainpar
from domainpar.common.problems import Problem
from domainpar.infer import infer
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.config import InferConfig, TrainConfig
from domainpar.tracking.events.store import EventStore, StoreError, event_file_name, write_event, write_manifest
from domainpar.train import train

OF_THE_STORE = ("position", "volume", "layer", "module", "particle_id", "label")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two events that differ, a run, and its scores with tracks of sectors."""
    place = tmp_path_factory.mktemp("reading")
    graphs = [simulated(seed) for seed in range(2)]
    records = [
        write_event(place / "store" / event_file_name(graph.hits.event_id), graph, tiles_of(graph), 8)
        for graph in graphs
    ]
    write_manifest(place / "store", records, {})
    world = World.alone()
    small = TrainConfig(hidden=16, graph_iters=1, max_steps=1, mode="naive", sectors=4, out=str(place / "run"))
    train(small, place / "store", world)
    infer(InferConfig(run=str(place / "run"), mode="naive", sectors=4, tracks="cc"), world)
    return place


def test_arrays_are_those_of_the_users_own_files_in_their_order(place):
    graph, scores = simulated(1), domainpar.read_scores(place / "run", "001")
    assert scores.event_id == "001"
    assert (scores.about["mode"], scores.about["sectors"]) == ("naive", 4)
    hits = graph.hits
    expected = {
        **{name: getattr(hits, name) for name in ("hit_id", "position", "volume", "layer", "module", "particle_id")},
        "edge_index": graph.edge_index,
        "label": graph.label,
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(scores, name), values, err_msg=name)
    kinds = {
        "hit_id": np.int64, "edge_index": np.int64, "edge_logit": np.float32, "edge_score": np.float32,
        "edge_scored": np.bool_, "track_id": np.int64, "position": np.float32, "volume": np.int32, "layer": np.int32,
        "module": np.int32, "particle_id": np.int64, "label": np.int8,
    }  # fmt: skip
    assert {name: getattr(scores, name).dtype for name in kinds} == kinds
    assert 0 < np.count_nonzero(~scores.edge_scored) < graph.num_edges
    assert not scores.edge_score[~scores.edge_scored].any()
    assert scores.ckf_track_id is None


@pytest.mark.parametrize("path", ["run/scores", "run/scores/event001.scores.zarr.zip"])
def test_a_directory_of_scores_and_a_file_will_do_as_well(place, path):
    event = None if path.endswith("zip") else "001"
    again, scores = domainpar.read_scores(str(place / path), event), domainpar.read_scores(place / "run", "001")
    for name in ("hit_id", "edge_index", "edge_logit", "track_id", *OF_THE_STORE):
        np.testing.assert_array_equal(getattr(again, name), getattr(scores, name))


def test_tables_hold_a_row_for_each_hit_and_each_edge(place):
    scores = domainpar.read_scores(place / "run", "000")
    hits, edges = scores.to_pandas()
    assert list(hits) == ["hit_id", "x", "y", "z", "volume", "layer", "module", "particle_id", "track_id"]
    assert list(edges) == ["src", "dst", "src_hit_id", "dst_hit_id", "logit", "score", "scored", "label"]
    assert (len(hits), len(edges)) == (len(scores.hit_id), len(scores.edge_logit))
    np.testing.assert_array_equal(hits[["x", "y", "z"]].to_numpy(), scores.position)
    joined = edges.merge(hits, left_on="dst_hit_id", right_on="hit_id")
    np.testing.assert_array_equal(joined.z, scores.position[scores.edge_index[1], 2])


def test_without_the_store_the_scores_are_there_and_it_can_be_named(place, tmp_path):
    (tmp_path / "scores").symlink_to(place / "run" / "scores")
    moved = place / "moved"
    (place / "store").rename(moved)
    try:
        alone = domainpar.read_scores(tmp_path, "000")
        assert [getattr(alone, name) for name in OF_THE_STORE] == [None] * len(OF_THE_STORE)
        hits, edges = alone.to_pandas()
        assert list(hits) == ["hit_id", "track_id"]
        assert list(edges) == ["src", "dst", "src_hit_id", "dst_hit_id", "logit", "score", "scored"]
        named = domainpar.read_scores(tmp_path, "000", store=moved)
        np.testing.assert_array_equal(named.label, simulated(0).label)
    finally:
        moved.rename(place / "store")


def test_what_is_asked_for_and_not_there_is_named(place, tmp_path):
    with pytest.raises(Problem, match=r"several events\nhint: .*000, 001"):
        domainpar.read_scores(place / "run")
    with pytest.raises(Problem, match=r"'7'\nhint: .*000, 001"):
        domainpar.read_scores(place / "run", "7")
    with pytest.raises(Problem, match=r"no scores.json\nhint: .*domainpar.infer --run"):
        domainpar.read_scores(tmp_path)
    with pytest.raises(StoreError, match="No such file"):
        domainpar.read_scores(tmp_path / "event9.scores.zarr.zip")
    record = EventStore(place / "store").records[0]
    (tmp_path / "event0.scores.zarr.zip").symlink_to(place / "store" / record.path)
    with pytest.raises(Problem, match="it is 'domainpar event', not scores"):
        domainpar.read_scores(tmp_path / "event0.scores.zarr.zip")


def test_positions_are_never_taken_from_another_event_of_the_same_name(place, tmp_path):
    other = simulated(2)
    other = replace(other, hits=replace(other.hits, event_id="000"))
    path = tmp_path / "store" / event_file_name("000")
    write_manifest(tmp_path / "store", [write_event(path, other, tiles_of(other), 8)], {})
    with pytest.raises(Problem, match="as it was scored"):
        domainpar.read_scores(place / "run", "000", store=tmp_path / "store")
    told = json.loads((place / "run" / "scores" / "scores.json").read_text())
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "event000.scores.zarr.zip").symlink_to(place / "run" / "scores" / "event000.scores.zarr.zip")
    kept = {"path": "../store", "absolute": str(tmp_path / "gone")}
    (tmp_path / "scores" / "scores.json").write_text(json.dumps({**told, "store": kept}))
    assert domainpar.read_scores(tmp_path, "000").position is None


def test_after_the_first_events_ranks_wait_for_each_other_as_long_as_timeout_says(place, tmp_path):
    flags = {"mode": "naive", "sectors": 4, "timeout": 17.5}

    def deadlines(world):
        infer(InferConfig(run=str(place / "run"), out=str(tmp_path / "scores"), **flags), world)
        return world.transport.deadline, world.domain.deadline

    assert run_ranks(deadlines, 2, domain_size=1) == [(17.5, 17.5)] * 2
