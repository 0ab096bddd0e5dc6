"""Pieces of one helix become one track, pieces of two do not, whatever they are called and in whatever order."""

from __future__ import annotations

import math

import numpy as np
import pytest

from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.track_pieces import REACH, stitch

FIELD = 2.0
BARREL = (32.0, 72.0, 116.0, 172.0, 260.0, 360.0, 500.0, 660.0)
DISKS = (600.0, 700.0, 820.0, 960.0, 1120.0, 1320.0, 1500.0)


def fly(arcs, pt=1.0, charge=1, phi=0.3, eta=0.4, start=(0.0, 0.0, 2.0)):
    """Points on a helix after so much arc in the transverse plane, [n, 3]; positive charges turn clockwise."""
    arcs, rho = np.asarray(arcs, float), charge * GEV_PER_TESLA_MM * FIELD / pt
    x = (np.sin(phi) - np.sin(phi - rho * arcs)) / rho
    y = (np.cos(phi - rho * arcs) - np.cos(phi)) / rho
    return np.stack([x, y, math.sinh(eta) * arcs], axis=1) + start


def through_barrel(pt=1.0, charge=1, phi=0.3, eta=0.4, z0=2.0, radii=BARREL):
    rho = GEV_PER_TESLA_MM * FIELD / pt
    return fly(2 * np.arcsin(rho * np.asarray(radii) / 2) / rho, pt, charge, phi, eta, (0, 0, z0))


def through_disks(pt=1.0, charge=1, phi=0.3, eta=2.5, z0=2.0, planes=DISKS):
    return fly((np.asarray(planes) - z0) / math.sinh(eta), pt, charge, phi, eta, (0, 0, z0))


def bare(position, field=FIELD):
    """Hits on no known surface."""
    return TrackHits(np.asarray(position), np.zeros(len(position), int), np.zeros(len(position), int), field)


def stitched(*pieces, field=FIELD):
    """Track of each piece after stitching; its hits are all on that."""
    track_id = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    found = stitch(track_id, bare(np.concatenate(pieces), field))
    assert all(len(set(found[track_id == piece])) == 1 for piece in range(len(pieces)))
    return [int(found[track_id == piece][0]) for piece in range(len(pieces))]


def cut_event(seed=0, num_tracks=150, noise=40):
    """Many helices with a little error, each cut in two or three with a hit lost here and there, and noise."""
    rng = np.random.default_rng(seed)
    hits, tracks, count = [], [], 0
    for _ in range(num_tracks):
        pt, charge, phi = rng.uniform(0.5, 5), rng.choice([-1, 1]), rng.uniform(-np.pi, np.pi)
        if rng.random() < 0.5:
            points = through_barrel(pt, charge, phi, rng.uniform(-1, 1), rng.normal(0, 30))
        else:
            points = through_disks(pt, charge, phi, rng.uniform(2.2, 2.8), rng.normal(0, 30))
        cut = rng.integers(2, 6)
        hits.append(points + rng.normal(0, 0.03, points.shape))
        tracks.append(np.where(np.arange(len(points)) < cut, count, count + 1))
        count += 2
    hits.append(rng.normal(0, 300, (noise, 3)))
    tracks.append(np.full(noise, -1))
    return np.concatenate(hits), np.concatenate(tracks)


def groups(track_id):
    """The sets of hits that share a track."""
    return {frozenset(np.flatnonzero(track_id == track).tolist()) for track in np.unique(track_id[track_id >= 0])}


# --- what is joined --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("charge", [-1, 1])
@pytest.mark.parametrize("pt", [0.5, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("phi", [0.3, 1.6, np.pi - 0.02, -np.pi + 0.02, -2.0])
@pytest.mark.parametrize("through", [through_barrel, through_disks])
def test_a_helix_cut_in_two_is_one_track(through, phi, pt, charge):
    points = through(pt, charge, phi)
    assert stitched(points[:3], points[3:]) == [0, 0]
    assert stitched(points[4:], points[:3]) == [0, 0]  # a hit is missing between them


@pytest.mark.parametrize("eta", [-2.0, 0.0, 2.0, 3.5])
def test_a_helix_cut_in_three_is_one_track(eta):
    points = fly(np.linspace(30, 330, 11), 1.5, eta=eta)
    assert stitched(points[4:7], points[:3], points[8:]) == [0, 0, 0]


def test_a_displaced_helix_is_joined():
    points = fly(np.linspace(0, 300, 9), 1.0, -1, phi=1.2, start=(60.0, 35.0, -20.0))
    assert stitched(points[:4], points[4:]) == [0, 0]


def test_a_track_of_second_hits_joins_the_track_beside_it():
    arcs = np.array([60.0, 95.0, 130.0, 170.0, 215.0])
    assert stitched(fly(arcs), fly(arcs[1:4] + 3.0)) == [0, 0]
    assert stitched(fly(arcs[:4]), fly(arcs[1:] - 3.0)) == [0, 0]


def test_pieces_that_share_one_surface_are_joined():
    arcs = np.linspace(40, 400, 8)
    assert stitched(fly(arcs[:4]), fly(np.concatenate([[arcs[3] - 2.0], arcs[4:]]))) == [0, 0]


@pytest.mark.parametrize("shift", [-1.5, 1.5])
def test_a_piece_goes_to_the_one_that_fits_best(shift):
    points = through_barrel()
    near = through_barrel(radii=(300.0, 420.0, 580.0, 630.0)) + np.array([0.0, 0.0, shift])
    assert stitched(points[:4], near) == [0, 0]  # alone it would do
    assert stitched(near, points[:4], points[4:]) == [0, 1, 1]
    assert stitched(points[4:], points[:4], near) == [0, 0, 1]


# --- what is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", [{"phi": 0.33}, {"eta": 0.415}, {"z0": 8.0}, {"pt": 0.7}, {"charge": -1}, {"phi": 0.3 + np.pi}]
)
def test_pieces_of_two_particles_that_pass_near_each_other_are_not_joined(other):
    ours, theirs = through_barrel(), through_barrel(**other)
    assert stitched(ours[:4], theirs[4:]) == [0, 1]
    assert stitched(theirs[:4], ours[4:]) == [0, 1]


def test_two_particles_side_by_side_are_two_tracks():
    assert stitched(through_barrel(), through_barrel(phi=0.31)) == [0, 1]
    assert stitched(through_barrel(), through_barrel(eta=0.412)[2:6]) == [0, 1]
    assert stitched(through_disks(), through_disks(phi=0.32)) == [0, 1]


def test_particles_back_to_back_are_not_joined():
    there, back = (through_barrel(1000.0, phi=phi, eta=0.0, z0=0.0) for phi in (0.3, 0.3 - np.pi))
    assert stitched(there[:3], back[3:]) == [0, 1]


@pytest.mark.parametrize("charge", [-1, 1])
def test_an_outer_piece_that_bends_the_other_way_is_not_joined(charge):
    inner = fly(np.linspace(30, 170, 4), 0.7, charge, phi=0.5)
    rho = charge * GEV_PER_TESLA_MM * FIELD / 0.7
    end = {"phi": 0.5 - 170 * rho, "start": inner[-1]}  # it begins where the inner one ends, in the same direction
    arcs = np.linspace(50, 300, 5)
    assert stitched(inner, fly(arcs, 0.7, charge, **end)) == [0, 0]
    assert stitched(inner, fly(arcs, 0.7, -charge, **end)) == [0, 1]
    assert stitched(inner, fly(arcs, 2.0, charge, **end)) == [0, 1]


def test_pieces_that_overlap_without_lying_side_by_side_are_not_joined():
    points = through_barrel(radii=np.linspace(50, 650, 9))
    assert stitched(points[::2], points[1::2]) == [0, 1]
    assert stitched(points[[0, 1, 2, 4]], points[[3, 5, 6, 7]]) == [0, 1]
    assert stitched(points[:4], points[4:]) == [0, 0]


def test_pieces_farther_apart_than_the_reach_are_not_joined():
    for gap, found in ((REACH - 1, [0, 0]), (REACH + 1, [0, 1])):
        arcs = np.append(np.linspace(30, 210, 5), np.linspace(210 + gap, 300 + gap, 3))
        points = fly(arcs, pt=1000.0)
        assert stitched(points[:5], points[5:]) == found


# --- what does not matter, and what stays ----------------------------------------------------------------------------


def test_the_order_of_hits_and_the_names_of_tracks_do_not_matter():
    position, track_id = cut_event()
    found = stitch(track_id, bare(position))
    assert len(groups(found)) < 0.7 * len(groups(track_id))
    rng = np.random.default_rng(1)
    for _ in range(3):
        order = rng.permutation(len(position))
        names = rng.permutation(1000)
        renamed = np.where(track_id >= 0, names[track_id], -1)
        again = np.empty_like(found)
        again[order] = stitch(renamed[order], bare(position[order]))
        assert groups(again) == groups(found)
        np.testing.assert_array_equal(stitch(renamed, bare(position)), found)


@pytest.mark.parametrize("angle", [0.5, 1.9, np.pi, -2.4])
def test_a_rotated_event_has_the_same_tracks(angle):
    position, track_id = cut_event()
    cosine, sine = np.cos(angle), np.sin(angle)
    turned = position @ np.array([[cosine, sine, 0], [-sine, cosine, 0], [0, 0, 1]])
    np.testing.assert_array_equal(stitch(track_id, bare(turned)), stitch(track_id, bare(position)))


@pytest.mark.parametrize("seed", range(3))
def test_stitching_again_changes_nothing(seed):
    position, track_id = cut_event(seed)
    found = stitch(track_id, bare(position))
    np.testing.assert_array_equal(stitch(found, bare(position)), found)


def test_tracks_are_numbered_by_their_first_hit_and_no_hit_leaves_or_enters_one():
    position, track_id = cut_event()
    before = track_id.copy()
    found = stitch(track_id, bare(position))
    np.testing.assert_array_equal(track_id, before)
    np.testing.assert_array_equal(found >= 0, track_id >= 0)
    _, first = np.unique(found[found >= 0], return_index=True)
    assert found.dtype == np.int64
    assert np.all(np.diff(first) > 0)
    assert len(first) == found.max() + 1
    for track in np.unique(track_id[track_id >= 0]):
        assert len(set(found[track_id == track])) == 1  # no piece is cut


def test_tracks_that_have_no_helix_are_left_alone():
    points = through_barrel()
    at_one_place = np.repeat(points[3:4] + 0.5, 4, axis=0)
    assert stitched(points[:2], points[2:5], at_one_place, points[5:]) == [0, 1, 2, 1]


@pytest.mark.parametrize(
    "track_id",
    [[], [-1], [0], [-1, -1, -1, -1], [0, 0, 1, 1], [0, 0, 0, -1]],
    ids=["no hits", "noise, one hit", "one hit", "noise only", "no helix", "one track"],
)
def test_events_without_pieces_stay_as_they_are(track_id):
    position = through_barrel()[: len(track_id)]
    np.testing.assert_array_equal(stitch(np.array(track_id, int), bare(position)), track_id)


@pytest.mark.parametrize("field", [-2.0, np.array([[-3000.0, 2.0], [3000.0, 2.0]])], ids=["reversed", "table"])
def test_the_field_may_point_either_way_or_be_a_table(field):
    position, track_id = cut_event()
    np.testing.assert_array_equal(stitch(track_id, bare(position, field)), stitch(track_id, bare(position)))


def test_a_stronger_field_means_faster_particles_which_scatter_less():
    points = through_barrel(0.5) + np.where(np.arange(8) < 4, 0.0, 1.6)[:, None] * [0, 1, 0]
    assert stitched(points[:4], points[4:], field=2.0) == [0, 0]
    assert stitched(points[:4], points[4:], field=40.0) == [0, 1]
    assert stitched(points[:4], points[4:], field=np.array([[-9.0, 2.0], [9.0, 2.0]])) == [0, 0]
    assert stitched(points[:4], points[4:], field=np.array([[-9.0, 40.0], [9.0, 40.0]])) == [0, 1]


# --- simulated events ------------------------------------------------------------------------------------------------


def test_particles_of_a_simulated_event_cut_in_two_come_together_again():
    hits = simulate_event(3, 6000)
    distance = np.linalg.norm(hits.position.astype(float), axis=1)
    track_id, truth = np.full(len(distance), -1), {}
    long = hits.particles.particle_id[(hits.particles.pt > 0.8) & (hits.particles.nhits >= 8)]
    for particle in long:
        rows = np.flatnonzero(hits.particle_id == particle)
        rows = rows[np.argsort(distance[rows])]
        # Between two surfaces, so that the pieces lie one after the other.
        cut = 3 + int(np.argmax(np.diff(distance[rows])[2:-3]))
        for piece in (rows[:cut], rows[cut:]):
            truth[len(truth)] = int(particle)
            track_id[piece] = len(truth) - 1
    found = stitch(track_id, TrackHits.of(hits.position, hits.volume, hits.layer, hits.module))
    joined = [{truth[track] for track in set(track_id[found == name].tolist())} for name in range(found.max() + 1)]
    assert len(long) > 60
    assert sum(len(particles) > 1 for particles in joined) <= 0.02 * len(long)
    assert len(joined) <= 1.2 * len(long)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_what_does_not_agree_is_refused():
    points = through_barrel()
    with pytest.raises(ValueError, match=r"positions have shape \(8, 2\)"):
        stitch(np.zeros(8, int), bare(points[:, :2]))
    with pytest.raises(ValueError, match=r"track ids have shape \(7,\) for 8 hits"):
        stitch(np.zeros(7, int), bare(points))
    with pytest.raises(ValueError, match="a track id is -2"):
        stitch(np.full(8, -2), bare(points))
    with pytest.raises(ValueError, match=r"the field has shape \(3,\)"):
        stitch(np.zeros(8, int), bare(points, np.ones(3)))


def test_only_hits_on_tracks_need_a_finite_position():
    points = through_barrel()
    points[7] = np.nan
    track_id = np.array([0, 0, 0, 1, 1, 1, 1, -1])
    assert stitch(track_id, bare(points)).tolist() == [0, 0, 0, 0, 0, 0, 0, -1]
    with pytest.raises(ValueError, match="positions are not finite"):
        stitch(np.zeros(8, int), bare(points))
