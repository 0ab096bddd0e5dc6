"""The field is held against tracks that were found; and momenta in a map of it."""

import numpy as np
import pytest

from domainpar.runs.records import ScoredEvent
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM, geometry
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.field_check import ETAS, FEWEST, RATIOS, field_warning, ratios_of_halves
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.perigee import fit_perigees
from domainpar.tracking.scoring.event_metrics import EventMetrics
from domainpar.tracking.scoring.scorer import Outcome


def bare(position, field):
    """Hits on no known surface."""
    nothing = np.zeros(len(position), int)
    return TrackHits(position, nothing, nothing, field)


@pytest.mark.parametrize("made_in", [2.0, None])
def test_a_field_that_is_not_that_of_the_tracks_is_told_and_that_of_the_tracks_is_not(made_in):
    known = {2.0: Field.of(2.0), None: geometry().field}
    hits = simulate_event(3, 30_000, "3", known[made_in])
    track_id = np.where(hits.particle_id > 0, np.unique(hits.particle_id, return_inverse=True)[1], -1)
    for field in known.values():
        counts = ratios_of_halves(TrackHits.of(hits.position, hits.volume, hits.layer, hits.module, field), track_id)
        assert counts.sum() > 3 * FEWEST
        warning = field_warning([counts], str(field))
        assert bool(warning) == (field is not known[made_in])
        assert not warning or f"the field ({field}) looks wrong" in warning[0]
    assert field_warning([counts // 100], "few") == []


def test_medians_are_told_with_the_number_of_tracks_summed_over_events():
    counts = np.zeros((len(ETAS) - 1, len(RATIOS) - 1), np.int64)
    counts[1, 35] = counts[1, 30] = counts[1, 90] = counts[2, 50] = FEWEST // 2
    assert "a median of 0.71 at |eta| 1.5 to 2 (300 tracks);" in field_warning([counts, counts], "1 T")[0]


def test_few_hits_and_hits_on_no_track_are_left_out():
    position = np.random.default_rng(1).normal(0, 300, (40, 3))
    assert ratios_of_halves(bare(position, Field.of(2.0)), np.arange(40) // 7 % 2 - 1).sum() <= 1
    assert ratios_of_halves(bare(position, Field.of(2.0)), np.full(40, -1)).sum() == 0
    assert ratios_of_halves(bare(position, Field.of(2.0)), np.arange(40) // 5).sum() == 0


def solenoid(k=1 / 2_000):
    """A field without divergence that falls off along z, with its radial part, to the third order of k r."""
    r, z = np.meshgrid(np.linspace(0, 1_200, 121), np.linspace(-3_000, 3_000, 301), indexing="ij")
    bz = 2 * np.cos(k * z) * (1 + (k * r) ** 2 / 4)
    br = np.sin(k * z) * k * r * (1 + (k * r) ** 2 / 8)
    return Field(10.0, -3_000.0, 20.0, bz, br)


def flown(field, pt, slope, charge, radii):
    """Hits at some radii of a particle from the origin, by small steps of the Lorentz force."""
    position, hits, step = np.zeros(3), [], 1.0
    momentum = pt * np.array([1.0, 0.0, slope])
    while len(hits) < len(radii):
        bz, br = (float(of[0]) for of in field.at(position[None]))
        r = max(np.hypot(*position[:2]), 1e-9)
        strength = np.array([br * position[0] / r, br * position[1] / r, bz])
        size = np.linalg.norm(momentum)
        middle = momentum + 0.5 * step * charge * GEV_PER_TESLA_MM * np.cross(momentum / size, strength)
        momentum += step * charge * GEV_PER_TESLA_MM * np.cross(middle / size, strength)
        position = position + step * middle / size
        if np.hypot(*position[:2]) >= radii[len(hits)]:
            hits.append(position)
    return np.array(hits)


@pytest.mark.parametrize("slope", [0.3, 2.0, 4.0])
def test_momenta_are_right_in_a_map_that_changes_along_the_way(slope):
    field, radii = solenoid(), np.linspace(30, min(900, 2_600 / slope), 9)
    position = flown(field, 1.5, slope, -1, radii)
    for rows in (slice(None), slice(5), slice(4, None)):
        fits = fit_perigees(bare(position[rows], field), np.zeros(len(position[rows]), np.int64), 1)
        assert 1 / fits.momenta[0, 0] == pytest.approx(-1.5, rel=0.03)
    assert ratios_of_halves(bare(position, field), np.zeros(9, np.int64)).sum() == (
        ETAS[0] < np.arcsinh(slope) < ETAS[-1]
    )


@pytest.mark.parametrize(("last", "counted"), [(170, 0), (250, 0), (300, 1)])
def test_tracks_with_a_half_that_is_too_short_to_tell_a_momentum_are_left_out(last, counted):
    position = flown(Field.of(2.0), 1.5, 2.0, 1, np.linspace(30, last, 10))  # halves of 4/9 of the way
    assert np.hypot(*(position[4] - position[0])[:2]) == pytest.approx((last - 30) * 4 / 9, rel=0.02)
    assert ratios_of_halves(bare(position, Field.of(2.0)), np.zeros(10, np.int64)).sum() == counted


def test_in_a_map_that_is_the_same_everywhere_momenta_are_those_of_a_constant_field():
    rng = np.random.default_rng(2)
    position, track_id = rng.normal(0, 300, (200, 3)), np.arange(200) // 10
    map_of_2_tesla = Field(100.0, -10.0, 20.0, *np.array([np.full((3, 2), 2.0), np.zeros((3, 2))]))
    plain, of_map = (fit_perigees(bare(position, of), track_id, 20).momenta for of in (2.0, map_of_2_tesla))
    np.testing.assert_allclose(of_map, plain, rtol=1e-6)


def test_infer_sums_the_halves_of_all_events_that_have_tracks():
    halves = np.zeros((len(ETAS) - 1, len(RATIOS) - 1), np.int64)
    halves[0, 20] = FEWEST - 1
    evaluated = [{"field": {"name": "3 T", "halves": halves.tolist()}}] * 2 + [{"field": None}, None]
    outcomes = {str(i): Outcome(ScoredEvent(), 0.0, evaluation) for i, evaluation in enumerate(evaluated)}
    (line,) = EventMetrics([], outcomes).field_mismatch()
    assert "field (3 T) looks wrong: the momentum" in line
    assert f"0.41 at |eta| 1 to 1.5 ({2 * FEWEST - 2} tracks)" in line
    for alone in ("0", "2", "3"):
        assert EventMetrics([], {alone: outcomes[alone]}).field_mismatch() == []
