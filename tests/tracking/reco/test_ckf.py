"""The helix-following finder: what it finds in simulated events, and what it does not depend on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.ckf.detector_layout import trackml
from domainpar.tracking.reco.ckf.finder import SEARCHES, find_tracks
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.perigee import fit_perigees


def find(event, rows=slice(None), **changes):
    columns = (event.position, event.volume, event.layer, event.module)
    searches = [replace(search, **changes) for search in SEARCHES]
    return find_tracks(TrackHits.of(*(column[rows] for column in columns)), searches=searches)


@pytest.fixture(scope="module")
def event():
    return simulate_event(4321, 12_000)


@pytest.fixture(scope="module")
def found(event):
    return find(event)


def matches(track_id, event):
    """Matched pairs of track and particle, each with more than half of the other's hits; and the number of tracks."""
    on = track_id >= 0
    pairs, shared = np.unique(np.stack([track_id[on], event.particle_id[on]]), axis=1, return_counts=True)
    track, particle = pairs
    of_track, of_particle = np.bincount(track_id[on]), np.bincount(event.particle_id)
    good = (particle > 0) & (2 * shared > of_track[track]) & (2 * shared > of_particle[particle])
    return track[good], particle[good], len(of_track)


def same_tracks(first, second):
    """Share of the hits whose tracks hold the same hits in both."""
    both = np.stack([first, second], axis=1)
    _, place, count = np.unique(both, axis=0, return_inverse=True, return_counts=True)
    mine = np.unique(first, return_inverse=True, return_counts=True)
    yours = np.unique(second, return_inverse=True, return_counts=True)
    whole = count[place.reshape(-1)]
    return np.mean((whole == mine[2][mine[1]]) & (whole == yours[2][yours[1]]))


def test_nearly_all_particles_from_the_beam_are_found_and_few_tracks_are_fakes(event, found):
    particles = event.particles
    target = (particles.pt > 1) & (particles.nhits >= 5) & (np.hypot(*particles.vertex[:, :2].T) < 2)
    track, particle, count = matches(found, event)
    assert np.isin(particles.particle_id[target], particle).mean() > 0.96
    assert 1 - len(np.unique(track)) / count < 0.03
    assert event.weight[found >= 0].sum() > 0.75


def test_tracks_hold_nearly_all_hits_of_their_particles(event, found):
    track, particle, _ = matches(found, event)
    inside = np.isin(found, track)
    whole = np.bincount(event.particle_id)[particle].sum()
    assert inside.sum() > 0.93 * whole


def test_tracks_are_numbered_by_their_first_hit_without_a_gap(found):
    tracks, first = np.unique(found[found >= 0], return_index=True)
    assert np.array_equal(tracks, np.arange(len(tracks)))
    assert (np.diff(first) > 0).all()
    assert found.dtype == np.int64


def test_the_order_of_hits_does_not_matter(event, found):
    rows = np.random.default_rng(0).permutation(len(event))
    again = np.empty_like(found)
    again[rows] = find(event, rows)
    assert same_tracks(again, found) == 1


def test_the_same_event_gives_the_same_tracks(event, found):
    assert np.array_equal(find(event), found)


@pytest.mark.parametrize("angle", [0.7, 3.0])
def test_tracks_turn_with_the_detector(event, angle):
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    columns = event.volume, event.layer, event.module
    table = TrackHits.of(event.position, *columns).table
    position, errors = event.position.astype(float), np.sqrt(np.stack([table["var_u"], table["var_v"]], axis=1))
    found, again = (
        find_tracks(
            TrackHits.of(position @ by.T, *columns, measured=np.hstack([table["u"] @ by.T, table["v"] @ by.T, errors]))
        )
        for by in (np.eye(3), turn)
    )
    # Rounding may decide otherwise where two ways are equally good.
    assert same_tracks(again, found) > 0.995


def on_own_track(found, event):
    """Whether each hit of a particle that was found lies on the track of most of its hits; false for all others."""
    own = np.zeros(len(found), bool)
    for particle in np.unique(event.particle_id[(event.particle_id > 0) & (found >= 0)]):
        mine = event.particle_id == particle
        own[mine] = found[mine] == np.bincount(found[mine & (found >= 0)]).argmax()
    return own


def hits_beside(event):
    """How many hits the particle of each hit has on its surface; 0 for noise."""
    at = np.stack([event.particle_id, event.volume, event.layer], axis=1)
    _, place, counts = np.unique(at, axis=0, return_inverse=True, return_counts=True)
    return np.where(event.particle_id > 0, counts[place.reshape(-1)], 0)


def test_hits_on_four_overlapping_modules_of_a_disk_are_all_found(event, found):
    own, four = on_own_track(found, event), hits_beside(event) == 4
    found_ones = four & np.isin(event.particle_id, event.particle_id[own])
    assert found_ones.sum() > 20
    assert own[found_ones].mean() > 0.9  # 0.75 if three are the most


def test_both_hits_of_a_track_that_flies_along_a_barrel_are_found_though_it_scatters_between_them():
    spot = BeamSpot(0.0, 55.0)
    event = simulate_event(4, 20_000, beam_spot=spot)
    found = find_tracks(TrackHits.of(event.position, event.volume, event.layer, event.module), spot)
    own, momentum = on_own_track(found, event), np.append(event.particles.pt, 0)[event.particle_id - 1]
    innermost = (event.volume == 8) & (event.layer == 2) & (np.abs(event.position[:, 2]) > 250)
    both = innermost & (hits_beside(event) == 2) & (momentum > 0.5) & np.isin(event.particle_id, event.particle_id[own])
    assert both.sum() > 15
    assert own[both].mean() > 0.95


def test_a_surface_gives_a_track_at_most_four_hits_on_as_many_modules(event, found):
    on = found >= 0
    surface = np.stack([found, event.volume, event.layer], axis=1)[on]
    _, counts = np.unique(surface, axis=0, return_counts=True)
    assert counts.max() <= 4
    assert (counts > 1).any()
    _, counts = np.unique(np.column_stack([surface, event.module[on]]), axis=0, return_counts=True)
    assert counts.max() == 1


@pytest.mark.parametrize("min_hits", [5, 9])
def test_every_track_has_the_hits_asked_for(event, min_hits):
    assert np.bincount(find(event, min_hits=min_hits) + 1)[1:].min() >= min_hits


def test_a_momentum_limit_leaves_out_what_lies_far_below_it(event):
    track_id = find(event, min_pt=1.5)
    hits = TrackHits.of(event.position, event.volume, event.layer, event.module)
    over_pt, eta = fit_perigees(hits, track_id, track_id.max() + 1).momenta[:, :2].T
    # At small angles to the beam three hits tell little about momentum.
    central = 1 / np.abs(over_pt[np.abs(eta) < 1])
    assert len(central) > 10
    assert central.min() > 1.3


def barrel_particle(event):
    """Rows of the hits of one particle that crossed all ten barrels, all in the event."""
    for particle in np.flatnonzero(event.particles.pt > 2) + 1:
        rows = np.flatnonzero(event.particle_id == particle)
        layers = np.unique(np.stack([event.volume[rows], event.layer[rows]]), axis=1)
        if (
            layers.shape[1] == 10
            and set(layers[0]) == {8, 13, 17}
            and np.hypot(*event.particles.vertex[particle - 1, :2]) < 1
        ):
            return rows
    raise AssertionError("no such particle; take another seed")


def test_a_particle_alone_is_one_track_of_all_its_hits(event):
    rows = barrel_particle(event)
    assert np.array_equal(find(event, rows), np.zeros(len(rows)))


@pytest.mark.parametrize("missing", [(8, 2), (8, 6), (13, 2), (17, 4)])
def test_a_particle_that_missed_a_surface_is_still_one_track(event, missing):
    rows = barrel_particle(event)
    rows = rows[(event.volume[rows] != missing[0]) | (event.layer[rows] != missing[1])]
    assert np.array_equal(find(event, rows), np.zeros(len(rows)))


def test_holes_may_be_forbidden(event):
    rows = barrel_particle(event)
    rows = rows[(event.volume[rows] != 13) | (event.layer[rows] != 4)]
    outer = (event.volume[rows] == 17) | (event.volume[rows] == 13) & (event.layer[rows] > 4)
    track_id = find(event, rows, max_holes=0)
    assert not set(track_id[outer]) & set(track_id[~outer]) - {-1}


def test_thin_noise_alone_gives_hardly_any_track(event):
    track_id = find(event, event.particle_id == 0)
    assert track_id.max() < 3


@pytest.mark.parametrize("count", [0, 1, 2])
def test_an_event_of_next_to_nothing_has_no_tracks(event, count):
    track_id = find(event, slice(0, count))
    assert np.array_equal(track_id, np.full(count, -1))


def test_hits_on_the_beam_line_and_in_one_place_are_no_track():
    position = np.repeat([[0.0, 0, 0], [31, 5, 1], [70, 11, 2]], 4, axis=0)
    layer = np.repeat([2, 4, 6], 4)
    searches = [replace(search, min_hits=4) for search in SEARCHES]
    track_id = find_tracks(TrackHits.of(position, np.full(12, 8), layer, np.arange(12)), searches=searches)
    assert (track_id == -1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"volume": np.array([8, 8, 99])}, "volume 99 layer 2, which is no surface of the TrackML detector"),
        ({"layer": np.array([2, 3, 2])}, "volume 8 layer 3"),
        ({"module": np.zeros(2, int)}, "module has shape"),
        ({"position": np.zeros((3, 2))}, "positions have shape"),
        ({"position": np.full((3, 3), np.inf)}, "3 positions are not finite"),
    ],
)
def test_what_cannot_be_searched_is_refused(change, message):
    given = {"position": np.zeros((3, 3)), "volume": np.full(3, 8), "layer": np.full(3, 2), "module": np.zeros(3, int)}
    with pytest.raises(ValueError, match=message):
        find_tracks(TrackHits.of(**(given | change)))


def test_searches_go_from_hard_to_soft_and_to_displaced_tracks_last():
    *prompt, displaced = SEARCHES
    assert [search.min_pt for search in prompt] == sorted({search.min_pt for search in prompt}, reverse=True)
    assert {(search.d0, search.everywhere) for search in prompt} == {(2.0, False)}
    assert (displaced.d0, displaced.everywhere, displaced.max_holes) == (20.0, True, 1)
    assert displaced.min_hits > max(search.min_hits for search in prompt)
    layout = trackml()
    assert len(layout.everywhere) > len(layout.prompt)
    assert np.array_equal(layout.everywhere[: len(layout.prompt)], layout.prompt)
