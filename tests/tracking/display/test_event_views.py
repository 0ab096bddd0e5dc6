"""The event display draws the parts, ghosts and cut edges of the partition, and tracks as they are counted."""

from __future__ import annotations

import base64
import json
from dataclasses import fields, replace

import numpy as np
import pytest
from small_run import ODD, drawn, write_run

from domainpar.tracking.display.event_view import (
    DUPLICATE,
    FAKE_TRACK,
    OF_OTHER,
    OF_TARGET,
    OUTSIDE,
    SHORT,
    SMALL,
    UNLABELLED,
    Split,
    event_view,
    match_tracks,
    split_of,
)
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.events.graph import Particles
from domainpar.tracking.reco.event_scores import FoundTracks
from domainpar.tracking.reco.performance.counts import count_tracks
from domainpar.tracking.reco.performance.lost import REASONS, TrackEdges
from domainpar.tracking.reco.performance.matching import STYLES, TrackCuts
from partitioners import group, number_of_sectors, sectors_of_tiles
from partitioners.quality import measure


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return read_run_files(write_run(tmp_path_factory.mktemp("views")))


@pytest.fixture(scope="module")
def event(files):
    return files.read_event(files.choose_event())


def decoded(view):
    """Facts and arrays as the page gets them."""
    found = json.loads(json.dumps(view.as_json()))
    arrays = {
        name: np.frombuffer(base64.b64decode(array["data"]), SMALL[array["type"]])
        for name, array in found["arrays"].items()
    }
    return found["facts"], arrays


@pytest.mark.parametrize("sectors", [4, "2x3"])
def test_a_naive_run_is_drawn_in_its_own_sectors(tmp_path, sectors):
    files = read_run_files(write_run(tmp_path / "run", naive=sectors))
    event = files.read_event(files.choose_event())
    split = split_of(files, None)
    assert (split.num_parts, split.naive, split.word) == (number_of_sectors(sectors), True, "sector")
    facts, arrays = decoded(event_view(event, split, files.tracking))
    own_sectors = sectors_of_tiles(event.tiles, sectors, event.tile, event.position)
    assert np.array_equal(arrays["part"], own_sectors[event.tile])
    assert facts["parts"] == number_of_sectors(sectors)
    asked = split_of(files, 3)
    assert (asked.num_parts, asked.naive) == (3, False)


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_cut_edges_and_ghosts_are_those_of_the_partition(files, event, num_parts):
    facts, arrays = decoded(event_view(event, Split(num_parts), files.tracking))
    quality = measure(event.edge_index, group(event.tiles, num_parts, "contiguous")[event.tile], num_parts)
    assert facts["cutEdges"] == facts["cutEdgesDrawn"] == quality.cut_edges
    src, dst = arrays["cut"].reshape(-1, 2).T
    part = arrays["part"]
    for one in range(num_parts):  # as the page does
        ghosts = set(dst[(part[src] == one) & (part[dst] != one)]) | set(src[(part[dst] == one) & (part[src] != one)])
        assert len(ghosts) == quality.incident_ghosts[one]
        assert int((part == one).sum()) == quality.owned_nodes[one]


def test_hits_keep_their_names_and_places(files, event):
    facts, arrays = decoded(event_view(event, Split(4), files.tracking))
    assert np.array_equal(arrays["hitId"], event.hit_id)
    assert np.array_equal(np.stack([arrays[axis] for axis in "xyz"], axis=1), event.position)
    some = 17
    assert facts["layers"][arrays["layer"][some]] == f"volume {event.volume[some]}, layer {event.layer[some]}"
    particle = arrays["particle"]
    named = np.array([int(name) for name in facts["particleIds"]])
    assert np.array_equal(named[particle[particle >= 0]], event.particle_id[particle >= 0])
    assert (event.particle_id[particle < 0] == 0).all()


def test_a_particle_without_hits_takes_no_row(tmp_path):
    graph = drawn(6, num_edges=5)
    table = graph.hits.particles
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    absent = {name: np.concatenate([one, one]) for name, one in columns.items() if one is not None}
    absent["particle_id"][0] = 3
    graph = replace(graph, hits=replace(graph.hits, particles=Particles(**absent)))
    files = read_run_files(write_run(tmp_path, [graph]))
    facts, arrays = decoded(event_view(files.read_event(files.choose_event()), Split(2), files.tracking))
    assert facts["particleIds"] == ["7"]
    assert arrays["particle"].tolist() == [0] * 6
    assert arrays["particlePtr"].tolist() == [0, 6]
    assert len(arrays["networkFound"]) == 1
    assert set(arrays["networkParticle"]) == {0}


def test_ids_beyond_32_bits_arrive_whole(files, event):
    huge = 2**40 + event.hit_id
    object.__setattr__(event, "hit_id", huge)
    assert np.array_equal(decoded(event_view(event, Split(4), files.tracking))[1]["hitId"], huge)
    object.__setattr__(event, "hit_id", huge - 2**40)


def test_paths_hold_every_hit_once_in_order(files, event):
    facts, arrays = decoded(event_view(event, Split(4), files.tracking))
    rows, ptr = arrays["particleRows"], arrays["particlePtr"]
    assert np.array_equal(np.sort(rows), np.flatnonzero(event.particle_row >= 0))
    assert len(ptr) == len(facts["particleIds"]) + 1
    for number in np.flatnonzero(np.diff(ptr) > 1)[:20]:
        path = rows[ptr[number] : ptr[number + 1]]
        (row,) = np.unique(event.particle_row[path])
        assert str(event.particles.particle_id[row]) == facts["particleIds"][number]
        away = np.linalg.norm(event.position[path] - event.particles.vertex[row], axis=1)
        assert (np.diff(away) >= 0).all()
    assert np.array_equal(np.diff(arrays["networkPtr"]), np.bincount(event.scores.track_id[event.scores.track_id >= 0]))
    assert np.array_equal(np.sort(arrays["networkRows"]), np.flatnonzero(event.scores.track_id >= 0))


def with_tracks(event, network, ckf=None):
    """An event with other tracks of the network, and of the CKF."""
    tracks = {"network": network, "ckf": ckf or event.scores.tracks["ckf"]}
    return replace(event, scores=replace(event.scores, tracks=tracks))


@pytest.mark.parametrize("style", STYLES)
def test_found_missed_and_fake_are_those_of_the_efficiency(event, style):
    rng = np.random.default_rng(5)
    track_id = event.scores.track_id.copy()
    moved = rng.random(len(track_id)) < 0.4  # tracks that share hits of many particles
    track_id[moved] = rng.integers(-1, track_id.max() + 1, int(moved.sum()))
    track_id = np.unique(track_id, return_inverse=True)[1] - int(track_id.min() < 0)
    cuts = TrackCuts(min_hits=4)
    edges = TrackEdges.of(event.edge_index, event.logit, event.logit > -np.inf, 0.5, None)
    matches = match_tracks(event, track_id, cuts, style, None, edges)
    counts = count_tracks(track_id, event.truth, cuts, None, edges).styles[style]
    lost = np.bincount(matches.lost[matches.target & ~matches.found], minlength=len(REASONS))
    assert dict(zip(REASONS, lost.tolist(), strict=True)) == counts.lost
    assert 0 < counts.reconstructed < counts.targets
    assert int(matches.target.sum()) == counts.targets
    assert int((matches.target & matches.found).sum()) == counts.reconstructed
    assert int((matches.kind == FAKE_TRACK).sum()) == counts.fakes > 0
    assert int((matches.kind == UNLABELLED).sum()) == counts.unlabelled
    without = counts.matchable - counts.matched
    assert int((matches.kind == OUTSIDE).sum()) == without - counts.fakes - counts.unlabelled > 0
    assert int((matches.kind != SHORT).sum()) == counts.matchable


def test_shared_hits_are_drawn_and_counted_on_each_of_their_tracks(files, event):
    on_track = np.flatnonzero(event.scores.track_id >= 0)
    hit = on_track[:: len(on_track) // 20]
    own, first = event.scores.track_id[hit], event.scores.track_id.copy()
    first[hit] = (own + 1) % (own.max() + 1)
    lent = with_tracks(event, FoundTracks(first))  # some hits are on other tracks, at first
    views = [lent, with_tracks(event, FoundTracks(first, np.stack([hit, own], axis=1))), event]
    without, shared, whole = (decoded(event_view(view, Split(4), files.tracking))[1] for view in views)
    assert np.array_equal(shared["networkBestShared"], whole["networkBestShared"])
    assert without["networkBestShared"].sum() < whole["networkBestShared"].sum()
    rows, ptr = shared["networkRows"], shared["networkPtr"]
    for track in range(len(ptr) - 1):
        path = rows[ptr[track] : ptr[track + 1]]
        assert set(path) == set(np.flatnonzero((first == track) | (event.scores.track_id == track)))
        assert (np.diff(np.linalg.norm(event.position[path], axis=1)) >= 0).all()
    assert len(rows) == len(on_track) + len(hit)


def test_the_second_track_of_a_particle_is_a_duplicate():
    event = hand_made(particle=[7] * 8 + [9] * 3 + [0] * 4, targets=[7])
    track_id = np.array([0] * 5 + [1] * 3 + [2] * 3 + [3] * 4)
    matches = match_tracks(event, track_id, TrackCuts(min_hits=3, target={}))
    assert matches.kind.tolist() == [OF_TARGET, DUPLICATE, OF_OTHER, UNLABELLED]
    assert matches.particle.tolist() == [0, 0, 1, -1]
    assert matches.best_track.tolist() == [0, 2]
    assert matches.best_shared.tolist() == [5, 3]
    assert matches.found.tolist() == [True, True]
    assert matches.target.tolist() == [True, False]


def hand_made(particle, targets):
    """As much of an event as the matching looks at."""
    from types import SimpleNamespace

    ids = np.array(particle)
    table = np.unique(ids[ids > 0])
    row = np.where(ids > 0, np.searchsorted(table, ids), -1)
    return SimpleNamespace(
        particle_id=ids,
        truth=SimpleNamespace(particle_id=ids, position=None),
        particles=SimpleNamespace(particle_id=table),
        target=np.isin(table, targets),
        particle_row=row,
    )


@pytest.mark.parametrize(
    ("reason", "logit", "built"),
    [
        ("edges", [1.0] * 3, None),
        ("score", [1.0, 1.0, -np.inf, 1.0, 1.0], None),
        ("score", [1.0, 1.0, 0.1, 1.0, 1.0], None),
        ("builder", [1.0] * 5, None),
        ("quality", [1.0] * 5, np.zeros(6, np.int64)),
    ],
)
def test_each_missed_particle_has_the_reason_of_its_loss(tmp_path, reason, logit, built):
    files = read_run_files(write_run(tmp_path, [drawn(6, num_edges=len(logit))]))
    nothing, event = np.full(6, -1), files.read_event(files.choose_event())
    scores = replace(event.scores, edge_logit=np.array(logit), edge_scored=np.isfinite(logit))
    tracks = FoundTracks(nothing, built_track_id=built)
    event = with_tracks(replace(event, scores=scores), tracks, FoundTracks(nothing))
    facts, arrays = decoded(event_view(event, Split(1), replace(files.tracking, score_cut=0.6)))
    told = {finder: facts["reasons"][arrays[f"{finder}Lost"][0]].split(":")[0] for finder in facts["finders"]}
    assert told == {"network": reason, "ckf": "finder"}


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_events_are_drawn_or_left_out(tmp_path, odd, num_parts):
    files = read_run_files(write_run(tmp_path, [drawn(**odd)]))
    view = event_view(files.read_event(files.choose_event()), Split(num_parts), files.tracking)
    if not odd.get("positions", True):
        assert view is None
        return
    facts, arrays = decoded(view)
    assert len(arrays["x"]) == odd["num_hits"]
    assert facts.get("finders", []) == ["network", "ckf"]
    assert ("networkKind" in arrays) == odd.get("truth", True)


def test_a_target_that_lacks_hits_in_the_event_is_not_among_those_missed(tmp_path):
    files = read_run_files(write_run(tmp_path / "run"))
    event = files.read_event(files.choose_event())
    nhits = dict(zip(*np.unique(event.particle_id, return_counts=True), strict=True))
    with_hits = {int(row) for row in event.particle_row[event.particle_row >= 0]}
    low = {row for row in with_hits if nhits[event.particles.particle_id[row]] < 5}
    assert low
    assert not event.target[list(low)].any()
    counted = replace(event.particles, nhits=np.full_like(event.particles.nhits, 9))  # what a table may count
    truth = replace(event.truth, particles=counted)
    targets = truth.targets_among(counted.particle_id, files.tracking.cuts.target)
    assert np.array_equal(targets, event.target)
