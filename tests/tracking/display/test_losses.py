"""The tables of lost particles and of layers hold the counts of the scores, and `report.csv` has them by bins."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
from small_run import simulated, write_run

from domainpar.tracking.display.html import binned_numbers
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.display.sections import build_page
from domainpar.tracking.reco.performance.layers import median_and_width_of_bins
from domainpar.tracking.reco.performance.lost import REASONS
from domainpar.tracking.reco.performance.matching import STYLES


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return read_run_files(write_run(tmp_path_factory.mktemp("losses"), [simulated(seed, 3000) for seed in range(4)]))


@pytest.fixture(scope="module")
def page(files):
    return build_page(files)


@pytest.fixture(scope="module")
def numbers(page):
    return pd.read_csv(io.StringIO(binned_numbers(page)), keep_default_na=False)


def table_of(page, number):
    table = next(section for section in page.sections if section.name == "lost").tables[number]
    return pd.DataFrame(table.rows, columns=table.head)


def test_lost_particles_are_those_of_the_scores_in_all_and_by_bins(files, page, numbers):
    counts = files.pooled(("val", "test"))
    table = table_of(page, 0)
    starts = np.flatnonzero(table["targets in"] == "all")
    assert len(starts) == 2  # network and CKF
    for finder, of_finder in (("network", table[: starts[1]]), ("ckf", table[starts[1] :])):
        style, eta = counts[finder].styles["atlas"], counts[finder].binned["atlas"]["eta"]
        total = of_finder.iloc[0]
        assert int(total["lost"]) == style.targets - style.reconstructed > 5
        assert {reason: int(total[reason].replace("–", "0")) for reason in REASONS} == style.lost
        bins = of_finder[of_finder["targets in"].str.startswith("η")]
        assert bins["lost"].astype(int).sum() == sum(eta.targets) - sum(eta.reconstructed)
        assert of_finder["lost"].astype(int).min() > 0  # bins that lost none are left out
    labels = numbers[numbers.chart == "lost"].curve.unique()
    for label, finder in zip(labels, ("network", "ckf"), strict=True):
        for style in STYLES:
            for quantity in ("pt", "eta"):
                binned = counts[finder].binned[style][quantity]
                rows = numbers[(numbers.chart == "lost") & (numbers.curve == label) & (numbers["style"] == style)]
                rows = rows[(rows.panel == quantity) & (rows.what == "lost, finder")]
                assert rows.part.astype(int).tolist() == list(binned.lost["finder"])
                assert rows.whole.astype(int).tolist() == list(binned.targets)
                assert rows.low.astype(float).tolist() == list(binned.edges[:-1])


def test_layers_have_the_hits_that_tracks_hold_and_how_far_these_lie_from_their_helix(files, page, numbers):
    counts = files.pooled(("val", "test"))["network"]
    table = table_of(page, 1).set_index("layer")
    assert list(table.index) == sorted(counts.layers, key=lambda name: [*map(int, name.split("."))])
    of_csv = numbers[(numbers.chart == "layers") & numbers.curve.str.startswith("network")]
    for name, of_layer in counts.layers.items():
        row = table.loc[name]
        assert row["network: hits"] == f"{of_layer.hits:,}"
        assert float(row["network: held"]) == pytest.approx(of_layer.held / of_layer.hits, abs=1e-4)
        volume, layer = map(int, name.split("."))
        of_layer_here = of_csv[(of_csv.panel == f"volume {volume}") & (of_csv.low.astype(int) == layer)]
        held, *distances = of_layer_here.to_dict("records")
        assert (int(held["part"]), int(held["whole"])) == (of_layer.held, of_layer.hits)
        found = [float(line["value"]) for line in distances]
        assert found == [*median_and_width_of_bins(of_layer.across), *median_and_width_of_bins(of_layer.along)]
        assert [line["unit"] for line in distances] == ["mm"] * 4
    innermost = median_and_width_of_bins(counts.layers["8.2"].across)
    median, width = table.loc["8.2"]["network: across [µm]"].split(" ± ")
    assert (float(median), float(width)) == pytest.approx((1000 * innermost[0], 1000 * innermost[1]), abs=0.51)


def test_a_run_without_tracks_has_no_such_section(tmp_path):
    page = build_page(read_run_files(write_run(tmp_path, tracks=False)))
    assert "lost" not in {section.name for section in page.sections}
