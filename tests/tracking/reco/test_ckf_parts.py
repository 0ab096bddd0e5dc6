"""Parts of the helix-following finder on drawn cases."""

from __future__ import annotations

import numpy as np
import pytest

from domainpar.tracking.events import detector
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.ckf.crossing import next_surface, set_out
from domainpar.tracking.reco.ckf.detector_layout import trackml
from domainpar.tracking.reco.ckf.finder import resolve, scene_of
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import STATE_DTYPE, point


def resolved(*tracks, max_shared=1, min_hits=2, num_hits=10):
    """Track of each hit when candidates are given best first."""
    starts = np.cumsum([0, *(len(track) for track in tracks)])
    rows = np.array([row for track in tracks for row in track], np.int64)
    track_of = np.full(num_hits, -1, np.int64)
    count = resolve(starts, rows, np.arange(len(tracks)), track_of, 0, max_shared, min_hits)
    return track_of.tolist(), count


def test_shared_hits_stay_with_the_better_track():
    assert resolved([0, 1, 2, 3], [3, 4, 5]) == ([0, 0, 0, 0, 1, 1, -1, -1, -1, -1], 2)


def test_a_track_that_lost_too_much_frees_what_it_had():
    assert resolved([0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6]) == ([0, 0, 0, 0, 1, 1, 1, -1, -1, -1], 2)
    assert resolved([0, 1, 2, 3], [3, 4, 5], [4, 5], min_hits=3)[1] == 1


def test_no_candidates_leave_all_hits_free():
    assert resolved() == ([-1] * 10, 0)


def test_ways_run_outward_and_hold_every_surface_once():
    places, ways = trackml().places, trackml().ways
    barrels, minus, plus = (way[way >= 0] for way in ways)
    assert sorted([*barrels, *minus, *plus]) == list(range(len(detector.SURFACES)))
    assert places["is_barrel"][barrels].all()
    assert (np.diff(places["coordinate"][barrels]) > 0).all()
    assert (places["coordinate"][minus] < 0).all()
    assert (np.diff(places["coordinate"][minus]) <= 0).all()
    assert (np.diff(places["coordinate"][plus]) >= 0).all()


def test_the_hits_of_a_simulated_event_lie_within_their_surfaces_extents():
    event = simulate_event(5, 3000)
    hits = TrackHits.of(event.position, event.volume, event.layer, event.module).table
    place = trackml().places[hits["surface"]]
    along = np.where(place["is_barrel"], hits["z"], hits["r"])
    # Corners of flat modules lie a little further out.
    assert ((place["low"] - 1 < along) & (along < place["high"] + 4)).all()
    off = np.where(place["is_barrel"], hits["r"], hits["z"]) - place["coordinate"]
    assert np.abs(off).max() < 6.5


@pytest.mark.parametrize("count", [0, 200])
def test_the_hit_table_is_the_event_by_surface_and_phi(count):
    event = simulate_event(6, 300)
    chosen = slice(0, count)
    position, volume, layer, module = (
        column[chosen] for column in (event.position, event.volume, event.layer, event.module)
    )
    hits, ptr, rows = TrackHits.of(position, volume, layer, module).by_surface()
    assert sorted(rows) == list(range(min(count, len(event))))
    assert ptr[0] == 0
    assert ptr[-1] == len(rows)
    np.testing.assert_array_equal(hits["x"], position[rows, 0])
    for i, surface in enumerate(detector.SURFACES):
        mine = slice(ptr[i], ptr[i + 1])
        assert (volume[rows[mine]] == surface.volume).all()
        assert (layer[rows[mine]] == surface.layer).all()
        assert (np.diff(hits["phi"][mine]) >= 0).all()


@pytest.mark.parametrize(
    ("r", "z", "slope", "there"),
    [(1020.0, 215.0, 0.2, False), (1020.0, 215.0, 8.0, True), (130.0, 1500.0, 11.0, True)],
)
def test_a_track_that_left_the_barrels_flies_on_to_disks_that_are_near_alone(r, z, slope, there):
    hits, ptr, _ = TrackHits.of(np.array([[r, 0.0, z]]), *np.array([[17], [4], [1]])).by_surface()
    scene = scene_of(hits, ptr, np.ones(1, bool), detector.geometry().field, trackml())
    state = np.zeros(1, STATE_DTYPE).view(np.recarray)[0]
    point(state, 0.0)
    state.x, state.z, state.slope, state.k, state.cov[3, 3] = r, z, slope, 1e-6, 1e6
    set_out(state, hits[0], scene, scene.outward)
    target, _ = next_surface(state, scene, scene.outward)
    assert (target >= 0) is there
