"""Curves, times of ranks and binned rates: the plain numbers behind the charts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from small_run import ODD, drawn, record, write_run

from domainpar.tracking.display.chart import log_axis
from domainpar.tracking.display.finders import QUANTITIES, RATES, finders_of, rate_curve
from domainpar.tracking.display.run_facts import started_as
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.display.sections import NUM_PARTS, partition
from domainpar.tracking.display.training import layer_sizes, rank_chart, rank_times, training_chart, training_curves
from domainpar.tracking.reco.performance.matching import STYLES


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return read_run_files(write_run(tmp_path_factory.mktemp("numbers")))


def test_curves_hold_what_was_recorded_and_leave_out_what_was_not(files):
    curves = training_curves(files)
    assert curves["loss"]["train"][1].tolist() == [1 / step for step in range(1, 7)]
    assert curves["edge_purity"]["train"][0].tolist() == [2, 3, 4, 5, 6]  # the first is null
    assert set(curves["loss"]) == {"train", "val"}
    assert set(curves["lr"]) == {"train"}


def test_times_are_medians_without_the_first_step_and_on_the_last_number_of_ranks(tmp_path):
    run = write_run(tmp_path, scores=False)
    lines = [record(1, 2), *(record(step, 3) for step in (2, 3, 4))]
    lines[1]["seconds_compute"] = [100.0, 100.0, 100.0]  # compiles
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = rank_times(read_run_files(run))
    assert (times.num_ranks, times.num_steps, times.other_sizes) == (3, 2, 1)
    assert times.phases["seconds_compute"].tolist() == pytest.approx([0.5, 0.6, 0.7])
    assert times.peak_bytes.tolist() == [4_000_000, 5_000_000, 6_000_000]
    assert times.load.tolist() == pytest.approx([0.2 / 2 + 0.2 / 3 + 0.2 / 4] * 3)  # also of the first
    assert [panel.name for panel in rank_chart(times).panels] == ["time", "memory", "load"]
    assert times.compute_imbalance == pytest.approx(0.7 / 0.6)


def test_the_size_of_a_block_is_the_norm_over_its_layers(tmp_path):
    run = write_run(tmp_path, scores=False)
    kinds = ("parameters", "gradient", "update")
    sizes = {"a.weight": (3.0, 5.0, 0.6), "b.weight": (1.0, None, 2.0), "a.bias": (4.0, 12.0, 0.8)}
    layers = {name: dict(zip(kinds, values)) for name, values in sizes.items()}
    lines = [record(1, 2) | {"layers": layers}, record(2, 2), record(3, 2) | {"layers": {"b.weight": layers["a.bias"]}}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps, blocks = layer_sizes(read_run_files(run))
    assert steps.tolist() == [1, 3]
    np.testing.assert_allclose(blocks["a"], [[5, 13, 1], [0, 0, 0]])
    np.testing.assert_allclose(blocks["b"], [[1, np.nan, 2], [4, 12, 0.8]])


@pytest.mark.parametrize(
    ("environment", "typed"),
    [
        ({}, "python -m domainpar.train --out run"),
        ({"PMI_RANK": "0", "PMI_SIZE": "8"}, "mpiexec -n 8 python -m domainpar.train --out run"),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"},
            "srun -n 4 python -m domainpar.train --out run",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"},
            "torchrun ... -m domainpar.train --out run",
        ),
        ({"PMI_SIZE": "many"}, "python -m domainpar.train --out run"),
    ],
    ids=["alone", "mpiexec", "srun", "torchrun", "spoilt"],
)
def test_what_was_typed_begins_with_the_launcher(tmp_path, environment, typed):
    run = write_run(tmp_path, [drawn(6, num_edges=5)], scores=False, environment=environment)
    assert started_as(read_run_files(run)) == typed


def test_loss_and_gradient_are_on_logarithmic_axes(files):
    panels = training_chart(files).panels
    assert {panel.name for panel in panels if panel.y.log} == {"loss", "grad-norm"}


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.15, 30, ["0.2", "0.5", "1", "2", "5", "10", "20"]),
        (0.679, 0.701, ["0.68", "0.69", "0.70"]),
        (0.00002, 1, ["10⁻⁴", "10⁻³", "10⁻²", "10⁻¹", "10⁰"]),
        (1, 100_000, ["10⁰", "10¹", "10²", "10³", "10⁴", "10⁵"]),
    ],
)
def test_ticks_of_logarithmic_axes_are_whole_numbers_whose_texts_are_their_places(low, high, ticks):
    axis = log_axis("", np.array([low, high]), low, high)
    assert [text for _, text in axis.ticks] == ticks
    plain = str.maketrans("⁻⁰¹²³⁴⁵", "-012345")
    values = [
        float(f"1e{text[2:].translate(plain)}" if text[2:].translate(plain) != text[2:] else text) for text in ticks
    ]
    assert [place for place, _ in axis.ticks] == pytest.approx(values)


@pytest.mark.parametrize("values", [[], [np.nan], [0.0, 1.0], [-1.0]])
def test_values_without_a_logarithm_get_a_linear_axis(values):
    assert not log_axis("", np.array(values)).log


def test_without_a_step_there_are_no_times_and_no_curves(tmp_path):
    files = read_run_files(write_run(tmp_path, scores=False, steps=0))
    assert rank_times(files) is None
    assert training_curves(files) == {}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_rates_are_counts_divided_within_their_intervals(files, style, quantity):
    network = finders_of(files, ["val"])[0]
    binned = network.counts.binned[style][quantity]
    curve = rate_curve(network.counts, style, quantity, RATES["track-efficiency"])
    there = curve.whole > 0
    assert there.any()
    assert np.array_equal(curve.whole, binned.targets)
    assert np.array_equal(curve.part, binned.reconstructed)
    assert np.isnan(curve.value[~there]).all()
    assert np.allclose(curve.value[there], curve.part[there] / curve.whole[there])
    for rate in RATES.values():
        one = rate_curve(network.counts, style, quantity, rate)
        known = one.whole > 0
        assert (one.low[known] <= one.value[known]).all()
        assert (one.value[known] <= one.high[known]).all()


def test_each_finder_has_a_colour_of_its_own_also_those_of_other_programs(files):
    counts = files.pooled(["val"])["network"]
    names = "network", "ckf", "perfect_scores", "acts-example", "acts-scanned"
    run = SimpleNamespace(
        pooled=lambda splits: dict.fromkeys(names, counts), in_legend=lambda how, other: how, how_scored="halo"
    )
    colours = [finder.colour for finder in finders_of(run, ["val"], run)]
    assert len(colours) == len({*colours}) == 6


def test_another_run_lies_beside_the_network_and_is_called_approximate(files, tmp_path):
    naive = read_run_files(write_run(tmp_path, naive=4))
    labels = [finder.label for finder in finders_of(files, ["val"], naive)]
    assert labels == [
        "network, halo (exact)",
        "network, naive, 4 sectors (approximate)",
        "CKF (no network)",
    ]


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_events_are_split(tmp_path, odd):
    files = read_run_files(write_run(tmp_path, [drawn(**odd)]))
    event = files.read_event(files.choose_event())
    rows = partition(files, event).tables[0].rows
    assert [int(row[0]) for row in rows] == list(NUM_PARTS)
    assert all(0 <= int(row[2].replace(",", "")) <= event.num_edges == odd.get("num_edges", 0) for row in rows)
