"""The beam spot: measured from true particles, told by a flag, and what the CKF makes of it."""

from dataclasses import replace

import numpy as np
import pytest

from domainpar.tracking.events import detector
from domainpar.tracking.events.beam_spot import FEWEST, BeamSpot
from domainpar.tracking.events.construct import Cuts
from domainpar.tracking.events.detector import BEAM_SPOT
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.sources import DetectorConditions, open_source
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.reco.ckf.finder import BEAM_MARGIN, SEARCHES, find_tracks, reach_of
from domainpar.tracking.reco.hit_table import TrackHits

WIDE = BeamSpot(20.0, 60.0)


@pytest.mark.parametrize("spot", [None, WIDE])
def test_the_spot_of_simulated_particles_is_that_of_their_simulation(spot):
    measured = [BeamSpot.from_particles(simulate_event(seed, 4000, beam_spot=spot).particles) for seed in range(4)]
    found, truth = BeamSpot.from_events(measured), spot or BEAM_SPOT
    assert abs(found.z - truth.z) < truth.width / 2
    assert found.width == pytest.approx(truth.width, rel=0.35)  # some twenty collisions an event


def test_particles_from_elsewhere_without_hits_or_without_a_vertex_do_not_count():
    particles = simulate_event(1, 4000, beam_spot=WIDE).particles
    vertex, nhits = particles.vertex.copy(), particles.nhits.copy()
    prompt = np.flatnonzero(np.hypot(*vertex[:, :2].T) < 1)
    assert BeamSpot.from_particles(particles) is not None
    vertex[prompt[FEWEST - 1 :: 3], 0], nhits[prompt[FEWEST::3]] = 1.5, 0
    vertex[prompt[FEWEST + 1 :: 3], 2] = np.nan
    vertex[prompt[: FEWEST - 1], 2] = 7.0
    assert BeamSpot.from_particles(replace(particles, vertex=vertex, nhits=nhits)) is None
    assert BeamSpot.from_particles(None) is None
    vertex[prompt[FEWEST], 2], nhits[prompt[FEWEST]] = 7.0, 1
    vertex[prompt[FEWEST], 0] = 0.0
    assert BeamSpot.from_particles(replace(particles, vertex=vertex, nhits=nhits)) == (7.0, 0.0)


def test_of_several_events_the_spot_holds_all():
    assert BeamSpot.from_events([None, (0.0, 3.0), (8.0, 3.0)]) == (4.0, 5.0)
    assert BeamSpot.from_events([None]) is None


def test_a_store_keeps_what_was_told_and_measures_what_was_not(tmp_path):
    def store_of(name, **told):
        prepare(
            open_source("simulate", num_events=2, num_hits=1500, cuts=Cuts(), conditions=DetectorConditions(**told)),
            tmp_path / name,
        )
        return EventStore(tmp_path / name)

    told = store_of("told", field=Field.of(3.0), beam_spot=WIDE)
    assert (told.settings["field"], told.settings["beam_spot"], told.beam_spot) == (3.0, [20.0, 60.0], WIDE)
    with told.open(told.records[0]) as event:
        layers = [event.read_nodes(name, np.arange(5)) for name in ("volume", "layer")]
        assert detector.field_of(event.settings, *layers).to_json() == 3.0
    usual = store_of("usual")
    assert {"field", "beam_spot"} & set(usual.settings) == set()
    assert usual.beam_spot == BeamSpot.from_events(record.beam_spot for record in usual.records)
    assert 2 < usual.beam_spot.width < 9


def found(hits, spot, field=None, eta=(0.0, 4.0), most=0.5):
    """Share of the prompt particles above 0.6 GeV with six hits of which one track of the prompt searches has most."""
    columns = hits.position, hits.volume, hits.layer, hits.module
    tracks = find_tracks(TrackHits.of(*columns, field), spot, SEARCHES[:3])
    particles = hits.particles
    wanted = (particles.pt > 0.6) & (np.hypot(*particles.vertex[:, :2].T) < 1) & (particles.nhits >= 6)
    wanted &= (np.abs(particles.eta) > eta[0]) & (np.abs(particles.eta) < eta[1])
    shares = []
    for particle in particles.particle_id[wanted]:
        of = tracks[hits.particle_id == particle]
        shares.append(np.bincount(of[of >= 0], minlength=1).max() > most * len(of))
    return np.mean(shares)


def test_the_ckf_finds_tracks_from_all_over_a_wide_spot_if_it_is_told():
    hits = simulate_event(3, 6000, beam_spot=BeamSpot(0.0, 60.0))
    assert found(hits, BeamSpot(0.0, 60.0)) > 0.95
    assert found(hits, BEAM_SPOT) < 0.85
    assert reach_of(BEAM_SPOT) == pytest.approx(30.0)
    assert reach_of(BeamSpot(-20.0, 60.0)) == 200.0 + BEAM_MARGIN


def test_the_ckf_goes_by_the_field_that_it_is_told():
    hits, forward = simulate_event(3, 6000, field=Field.of(3.5)), (1.5, 2.5)
    assert found(hits, BEAM_SPOT, Field.of(3.5), forward, 0.9) > 0.95
    assert found(hits, BEAM_SPOT, None, forward, 0.9) < 0.8
