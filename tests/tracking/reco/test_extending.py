"""Tracks of a network followed through all hits: completed, put right, and left where nothing follows."""

from __future__ import annotations

import numpy as np
import pytest

from domainpar.tracking.events.detector import field_of
from domainpar.tracking.events.graph import surface_numbers, volumes_and_layers
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.targets import target_particles
from domainpar.tracking.reco.ckf.extending import extend_tracks
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.segments import number_tracks

TARGETS = {"pt": [1, float("inf")], "nhits": [7, float("inf")], "radius": [0, 1]}


@pytest.fixture(scope="module")
def event():
    """Hits of an event, and the particle of each that is a target, numbered, int64 [N]; -1 for the others."""
    hits = simulate_event(11, 20_000)
    targets = hits.particles.particle_id[target_particles(hits.particles, TARGETS)]
    of_target = number_tracks(np.where(np.isin(hits.particle_id, targets), hits.particle_id, -1))
    surface = surface_numbers(hits.volume, hits.layer)
    field = field_of({}, hits.volume, hits.layer)
    return TrackHits(hits.position, surface, hits.module, field), of_target


def shares(tracks, of_target):
    """The largest share of the hits of each target that lie on one track."""
    return np.array([
        np.bincount(tracks[(of_target == target) & (tracks >= 0)], minlength=1).max() / np.sum(of_target == target)
        for target in range(of_target.max() + 1)
    ])  # fmt: skip


def some_hits(of_target, hits, places):
    """Tracks of the hits of each target at some places along it, outward."""
    distance = np.sum(hits.position**2, axis=1)
    tracks = np.full(len(of_target), -1)
    for target in range(of_target.max() + 1):
        rows = np.flatnonzero(of_target == target)
        rows = rows[np.argsort(distance[rows])]
        _, first = np.unique(hits.surface[rows], return_index=True)
        tracks[rows[np.sort(first)][places]] = target
    return tracks


@pytest.mark.parametrize("places", [slice(0, 3), slice(-3, None), slice(1, 4)])
def test_three_hits_become_whole_tracks(event, places):
    hits, of_target = event
    begun = some_hits(of_target, hits, places)
    assert shares(begun, of_target).mean() < 0.4
    assert shares(extend_tracks(begun, hits, 3), of_target).mean() > 0.9


def test_a_wrong_hit_falls_off_and_a_right_one_takes_its_place(event):
    hits, of_target = event
    begun = some_hits(of_target, hits, slice(0, 4))
    free = np.flatnonzero(of_target < 0)
    wrong = free[np.argmax(np.sum(hits.position[free] ** 2, axis=1))]
    begun[wrong] = 0
    followed = extend_tracks(begun, hits, 3)
    on = followed[np.flatnonzero((of_target == 0) & (followed >= 0))[0]]
    assert followed[wrong] != on


@pytest.mark.parametrize(("off", "least"), [(0.2, 0.65), (0.4, 0.85)])  # 0.31, 0.56 if outer seeds are not followed
def test_a_false_innermost_hit_beside_the_true_one_gives_way_to_it(event, off, least):
    hits, of_target = event
    begun, distance = some_hits(of_target, hits, slice(0, 6)), np.sum(hits.position**2, axis=1)
    rows = [np.flatnonzero(begun == target) for target in range(of_target.max() + 1)]
    first = np.array([mine[np.argmin(distance[mine])] for mine in rows])
    x, y, z = hits.position[first].T
    turn = off / np.hypot(x, y)
    beside = np.stack([x - turn * y, y + turn * x, z], axis=1)
    columns = [(hits.position, beside), (hits.surface, hits.surface[first]), (hits.module, hits.module[first])]
    more = TrackHits(*(np.concatenate(column) for column in columns), hits.field)
    begun[first] = -1
    followed = extend_tracks(np.append(begun, np.arange(len(first))), more, 3)
    own = [np.bincount(some[some >= 0]).argmax() for some in (followed[mine] for mine in rows)]
    assert np.mean(followed[first] == own) > least


def test_a_track_that_leads_nowhere_stays_as_it_was(event):
    hits, of_target = event
    rows = np.flatnonzero(of_target == 3)
    surfaces = np.unique(hits.surface[rows])[:2]
    begun = np.full(len(of_target), -1)
    begun[rows[np.isin(hits.surface[rows], surfaces)]] = 0  # too few surfaces for a helix
    few = int(np.sum(begun == 0))
    assert extend_tracks(begun, hits, few).tolist() == begun.tolist()
    assert extend_tracks(begun, hits, few + 1).max() == -1


def test_neither_names_of_tracks_nor_the_order_of_hits_matter(event):
    hits, of_target = event
    begun = some_hits(of_target, hits, slice(0, 4))
    followed = extend_tracks(begun, hits, 3)
    rng = np.random.default_rng(0)
    renamed = np.append(rng.permutation(begun.max() + 1) + 5, -1)[begun]
    assert extend_tracks(renamed, hits, 3).tolist() == followed.tolist()
    order = rng.permutation(len(begun))
    turned = TrackHits(hits.position[order], hits.surface[order], hits.module[order], hits.field)
    assert extend_tracks(begun[order], turned, 3).tolist() == number_tracks(followed[order]).tolist()


def test_no_track_leads_to_none_and_what_has_no_positions_or_other_surfaces_is_refused(event):
    hits, of_target = event
    nothing = np.full(len(of_target), -1)
    assert extend_tracks(nothing, hits, 3).tolist() == nothing.tolist()
    with pytest.raises(ValueError, match="have no positions"):
        extend_tracks(nothing, TrackHits(None, hits.surface, hits.module), 3)
    with pytest.raises(ValueError, match="no surface of the TrackML detector"):
        extend_tracks(nothing, TrackHits(hits.position, hits.surface * 0, hits.module), 3)


def test_volume_and_layer_are_those_of_the_number():
    volume, layer = np.array([7, 18, 0, 8]), np.array([2, 12, 0, 4])
    assert [column.tolist() for column in volumes_and_layers(surface_numbers(volume, layer))] == [
        volume.tolist(), layer.tolist()
    ]  # fmt: skip
