"""Parameters of tracks against the truth in the report: resolutions, pulls, quality, and all bins as a table."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from small_run import simulated, write_run

from domainpar.tracking.display.finders import RATES, finders_of, rate_curve
from domainpar.tracking.display.html import HEADING, binned_numbers
from domainpar.tracking.display.resolutions import FEWEST, curve_of, differences, differences_of, resolution_charts
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.display.sections import build_page
from domainpar.tracking.events.truth_order import rows_of_table
from domainpar.tracking.reco.performance.counts import EDGES
from domainpar.tracking.reco.performance.truth import true_perigees

SPLITS = ("val", "test")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    graphs = [simulated(seed, hits) for seed, hits in enumerate((600, 600, 6000, 4000))]
    return read_run_files(write_run(tmp_path_factory.mktemp("fits"), graphs))


@pytest.fixture(scope="module")
def table(files):
    text = binned_numbers(build_page(files))
    assert text.splitlines()[0] == ",".join(HEADING)
    return pd.read_csv(io.StringIO(text), keep_default_na=False)


def test_differences_are_those_of_targets_by_their_own_truth(files):
    event = files.read_event(files.events("val")[0])
    fits = event.scores.tracks["network"].fits
    value, covariance = fits.value, fits.covariance
    found = differences(event, "network", files.tracking.cuts)
    # Here each track has the hits of one particle: plainly one after the other.
    expected = []
    for track in range(len(value)):
        hits = np.flatnonzero(event.scores.track_id == track)
        (particle,) = set(event.particle_id[hits])
        pt, eta, nhits = (rows_of_table(event.particles, [particle], name)[0] for name in ("pt", "eta", "nhits"))
        if len(hits) >= 5 and nhits >= 5:
            off = value[track] - true_perigees(event.truth, np.array([particle]))[0]
            off[2] = np.angle(np.exp(1j * off[2]))
            pulls = off / np.sqrt(np.diag(covariance[track]))
            off[4] *= pt * np.cosh(eta)
            expected.append([pt, eta, pt >= 1, *off, *pulls])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    assert len(found) > 100
    near = np.abs(np.nanmedian(found[:, 8:], axis=0))
    assert near.max() < 0.5  # nothing is turned around or in another unit


def test_a_finder_without_parameters_in_one_event_has_no_resolution(files):
    finders = finders_of(files, SPLITS)
    assert set(differences_of(files, SPLITS, finders)) == {"network", "ckf"}

    def read_event(record):
        event = files.read_event(record)
        if record.event != "003":
            return event
        tracks = event.scores.tracks
        without = {"network": replace(tracks["network"], fits=None), "ckf": tracks["ckf"]}
        return replace(event, scores=replace(event.scores, tracks=without))

    partly = SimpleNamespace(events_to_read=files.events_to_read, read_event=read_event, tracking=files.tracking)
    assert set(differences_of(partly, SPLITS, finders)) == {"ckf"}
    none = SimpleNamespace(events_to_read=lambda _: ([], 0), tracking=files.tracking)
    assert resolution_charts(none, SPLITS, finders, "") == ()


def test_widths_and_medians_are_robust_and_few_tracks_have_none():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0.5, 2.0, 4000), np.full(40, 1e6), rng.normal(size=FEWEST - 1), [np.nan] * 9])
    bins = np.concatenate([np.zeros(4040, int), np.ones(FEWEST + 8, int)])
    for middle, expected in ((True, 0.5), (False, 2.0)):
        curve = curve_of(values, bins, (0.0, 1.0, 2.0, 3.0), middle)
        assert curve.whole.tolist() == [4040, FEWEST - 1, 0]
        assert np.isnan(curve.value[1:]).all()
        assert abs(curve.value[0] - expected) < 0.1
        # The error is the spread of such medians and widths.
        again = [curve_of(rng.normal(0.5, 2.0, 400), np.zeros(400, int), (0.0, 1.0), middle) for _ in range(400)]
        error = np.mean([(one.high - one.low)[0] / 2 for one in again])
        assert error == pytest.approx(np.std([one.value[0] for one in again]), rel=0.12)


def test_against_pt_targets_of_any_pt_count_and_against_eta_those_that_pass(files, table):
    network = finders_of(files, SPLITS)[0]
    rows = differences_of(files, SPLITS, [network])["network"]
    assert 0 < rows[:, 2].sum() < len(rows)
    for chart, column in (("track-resolution", 4), ("track-pulls", 9), ("track-bias", 9)):  # of z0
        known = rows[np.isfinite(rows[:, column])]
        for panel, values in (("z0-pt", known[:, 0]), ("z0-eta", known[known[:, 2] > 0, 1])):
            drawn = table[(table.chart == chart) & (table.panel == panel) & (table.curve == network.label)]
            expected = np.histogram(values, EDGES[panel.removeprefix("z0-")])[0]
            assert drawn.whole.astype(float).tolist() == expected.tolist()


def test_the_table_holds_every_bin_of_every_curve_with_its_unit(files, table):
    network = finders_of(files, SPLITS)[0]
    assert set(table["style"]) == {"", "atlas", "one_way", "two_way"}
    for quantity in ("pt", "d0", "z0", "vz", "hits", "radius"):
        rows = table[(table.chart == "track-efficiency") & (table["style"] == "one_way") & (table.panel == quantity)]
        rows = rows[rows.curve == network.label]
        curve = rate_curve(network.counts, "one_way", quantity, RATES["track-efficiency"])
        assert rows.low.tolist() == list(EDGES[quantity][:-1])
        assert rows.high.tolist() == list(EDGES[quantity][1:])
        assert rows.whole.astype(float).tolist() == curve.whole.tolist()
        assert rows.part.astype(float).tolist() == curve.part.tolist()
        there = curve.whole > 0
        assert np.allclose(rows.value[there].astype(float), curve.value[there])
        assert (rows.value[~there] == "").all()
        assert curve.whole.sum() > 20
    units = table[["chart", "panel", "quantity", "quantity_unit", "what", "unit"]].drop_duplicates().set_index(
        ["chart", "panel"])  # fmt: skip
    assert units.loc[("track-efficiency", "d0")].tolist() == ["true |d0|", "mm", "track efficiency", "1"]
    assert units.loc[("track-resolution", "phi-pt")].tolist() == ["true p_T", "GeV", "σ of φ", "rad"]
    assert units.loc[("track-pulls", "z0-eta")].tolist() == ["true η", "1", "width of the pull of z0", "1"]


def test_hits_purity_and_completeness_are_shares_of_the_tracks(files, table):
    network = finders_of(files, SPLITS)[0]
    for quantity in ("hits", "purity", "completeness"):
        rows = table[(table.chart == "track-quality") & (table.panel == quantity) & (table.curve == network.label)]
        rows = rows[rows["style"] == "atlas"]
        assert rows.part.astype(float).tolist() == list(network.counts.binned["atlas"][quantity].tracks)
        assert rows.value.astype(float).sum() == pytest.approx(1)
    pure = rows.part.astype(float)
    assert pure.iloc[-1] == pure.sum()  # tracks here are whole particles


def test_all_scored_events_are_in_the_tables(files):
    tracks = next(section for section in build_page(files).sections if section.name == "tracks")
    assert "2 events of the val and test split" in tracks.lead[0]
    (others,) = (table for table in tracks.tables if table.note == "Of the train split alone.")
    counts = files.performance["train"]["network"]
    assert counts.events == 2
    assert others.rows[0][2].endswith(f" of {counts.styles['atlas'].targets:,}")


@pytest.mark.parametrize("imported", [None, {"framework": "acorn", "file": "a.ckpt"}])
def test_the_report_of_a_network_that_was_not_trained_here_says_so(tmp_path, imported):
    run = write_run(tmp_path, steps=0)
    told = json.loads((run / "run.json").read_text())
    told["store"] |= {"path": "", "absolute": ""}
    told |= {"argv": [], "steps": 3900, "saved": None, "imported": imported}
    (run / "run.json").write_text(json.dumps(told))
    summary = build_page(read_run_files(run, store=tmp_path / "store")).sections[0]
    whence = "acorn trained it" if imported else "it is shipped"
    assert summary.lead[0].startswith(f"This network was not trained here: {whence}")
    facts = {row[0]: row[1] for row in summary.tables[0].rows}
    assert facts["steps"] == "3,900"
    assert facts["trained on"].startswith("a store that is not here, digest ")


def test_a_run_that_was_trained_here_says_nothing_of_that(files):
    assert build_page(files).sections[0].lead == ()
