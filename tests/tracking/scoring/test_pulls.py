"""Errors of the parameters that are written for ACTS, counted by a program that knows files and plane geometry only."""

import numpy as np
import pandas as pd
import pytest
from pulls_of_csv import NAMES, pulls, widths
from source_files import read_event

from domainpar.tracking.events.acts_maker import _WRITTEN, _simulate, acts_field
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.field import Field
from domainpar.tracking.reco.ckf.detector_layout import layout_of
from domainpar.tracking.reco.ckf.finder import find_tracks
from domainpar.tracking.reco.event_scores import FoundTracks, Scores
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.performance.rates import NETWORK
from domainpar.tracking.reco.perigee import fit_perigees
from domainpar.tracking.scoring.event_tracks import write_acts

pytest.importorskip("acts")


def muons(folder, pt, number, count=350):
    """Tables of ACTS of muons of one transverse momentum, |eta| < 2.5, in an even field of 2 T."""
    rng = np.random.default_rng([number, 77])
    eta, phi, q = rng.uniform(-2.5, 2.5, count), rng.uniform(-np.pi, np.pi, count), rng.choice([-1, 1], count)
    x, y, z = rng.normal(0, (0.0125, 0.0125, 55.0), (count, 3)).T
    columns = {
        "particle_id_pv": np.arange(1, count + 1), "particle_id_sv": 0, "particle_id_part": 1, "particle_id_gen": 0,
        "particle_id_subpart": 0, "particle_type": -13 * q, "process": 0, "vx": x, "vy": y, "vz": z, "vt": 0.0,
        "px": pt * np.cos(phi), "py": pt * np.sin(phi), "pz": pt * np.sinh(eta), "m": 0.105658, "q": q.astype(float),
    }  # fmt: skip
    pd.DataFrame(columns).to_csv(folder / f"event{number:09d}-{_WRITTEN[0]}.csv", index=False)
    _simulate(folder, acts_field(None, folder))


@pytest.mark.parametrize("pt", [2.0, 100.0])
def test_pulls_of_muons_of_acts_are_as_wide_as_the_errors_that_are_written(tmp_path, pt):
    for number in (1, 2):
        (folder := tmp_path / str(number)).mkdir()
        muons(folder, pt, number)
        for path in folder.glob("event*.csv"):
            path.rename(tmp_path / path.name)
        hits = read_event("acts", tmp_path, f"{number:09d}")
        field, layout = Field.of(2.0), layout_of({"source": "acts"})
        columns = hits.position, hits.volume, hits.layer, hits.module
        of_tracks = TrackHits.of(*columns, field, layout, hits.measured)
        tracks = find_tracks(of_tracks, BeamSpot(0, 55))
        fits = fit_perigees(of_tracks, tracks, tracks.max() + 1)
        nothing = np.zeros((2, 0), np.int64), *[np.zeros(0)] * 2, np.zeros(0, bool)
        scores = Scores(f"{number:09d}", hits.hit_id, *nothing, tracks={NETWORK: FoundTracks(tracks, fits=fits)})
        write_acts(tmp_path, scores, hits.position)
    table = pulls(tmp_path, tmp_path, least_pt=pt)
    assert len(table) > 650  # of 700: hits of few muons are lost
    assert np.abs(widths(table[:, 1:]) - 1).max() < 0.13, dict(zip(NAMES, widths(table[:, 1:])))
    assert np.abs(np.median(table[:, 1:], axis=0)).max() < 0.15
