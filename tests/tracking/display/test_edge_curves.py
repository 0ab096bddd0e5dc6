"""ROC curve, efficiency and purity of edges: the numbers of the training, and nothing invented for odd events."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small_run import ODD, drawn, write_run

from domainpar.parallel.world import World
from domainpar.tracking.display.edges import ROC_POINTS, edge_chart, edge_curves
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.training.edge_classes import FAKE, OTHER, TARGET
from domainpar.tracking.training.edge_counting import EdgeMetrics
from domainpar.tracking.training.metrics import metrics_of, metrics_over


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return read_run_files(write_run(tmp_path_factory.mktemp("edges"), naive=4))


@pytest.fixture(scope="module")
def events(files):
    """The events that training did not see."""
    return [files.read_event(record) for split in ("val", "test") for record in files.events(split)]


def counts_of(*events):
    metrics = EdgeMetrics()
    for event in events:
        metrics.add(event.logit, event.edge_class)
    return metrics.count(World.alone().transport)


def test_auc_efficiency_and_purity_are_those_of_the_training_over_all_events_that_it_did_not_see(files, events):
    curves = edge_curves(files)
    assert curves.events == tuple(event.event_id for event in events)
    counted = metrics_of(counts_of(*events))
    assert curves.auc == pytest.approx(counted["edge_auc_pooled"], abs=1e-12)
    told_by_infer = metrics_over([counts_of(event) for event in events])
    assert curves.mean_auc == pytest.approx(told_by_infer["edge_auc_mean"], abs=1e-12)
    assert curves.efficiency[50] == pytest.approx(counted["edge_efficiency"], abs=1e-12)
    assert curves.purity[50] == pytest.approx(counted["edge_purity"], abs=1e-12)


def test_beside_the_full_roc_curve_is_that_without_true_edges_of_particles_that_are_no_targets(tmp_path):
    run = write_run(tmp_path)
    scores = json.loads((run / "scores" / "scores.json").read_text())
    (run / "scores" / "scores.json").write_text(json.dumps(scores | {"target": "pt: [0.5, .inf]"}))
    files = read_run_files(run)
    curves = edge_curves(files)
    events = [files.read_event(record) for split in ("val", "test") for record in files.events(split)]
    logit, classes = (np.concatenate([getattr(event, name) for event in events]) for name in ("logit", "edge_class"))
    assert (classes == OTHER).sum() > 100
    targets, fakes = logit[classes == TARGET], logit[classes == FAKE]
    above = (targets[:, None] > fakes).mean() + 0.5 * (targets[:, None] == fakes).mean()
    assert curves.hard_auc == pytest.approx(above, abs=1e-12)
    assert curves.hard_auc > curves.auc + 0.01  # this network knows of all true edges
    names = [series.name for series in edge_chart(files, curves, None, None).panels[0].series]
    for area, name in zip((curves.auc, curves.hard_auc), names, strict=True):
        assert f"AUC {area:.4f}" in name


def test_the_thinned_roc_curve_keeps_its_ends_and_its_area(files):
    curves = edge_curves(files)
    assert curves.roc.shape[1] <= ROC_POINTS
    assert curves.roc[:, 0].tolist() == [0, 0]
    assert curves.roc[:, -1].tolist() == [1, 1]
    assert (np.diff(curves.roc) >= 0).all()
    assert np.trapezoid(curves.roc[1], curves.roc[0]) == pytest.approx(curves.auc, abs=2e-3)


def test_every_edge_is_in_one_bin_or_has_no_score(files, events):
    curves = edge_curves(files)
    in_bins = int((curves.targets + curves.fakes + curves.others).sum())
    assert in_bins + curves.unscored == sum(event.num_edges for event in events)
    targets = sum(int((event.edge_class == TARGET).sum()) for event in events)
    assert int(curves.targets.sum()) + curves.unscored_targets == targets
    assert curves.unscored_targets > 0


def test_an_edge_without_a_score_is_lost_at_every_cut(files):
    curves = edge_curves(files)
    scored = int(curves.targets.sum())
    assert curves.efficiency[0] == pytest.approx(scored / (scored + curves.unscored_targets))


def test_without_positions_of_one_event_no_segments_are_told(tmp_path):
    graphs = [drawn(6, num_edges=5, event_id=str(i), positions=i < 3) for i in range(4)]
    assert edge_curves(read_run_files(write_run(tmp_path, graphs))).segments is None


def test_the_segments_of_a_graph_without_its_last_edge_are_one_fewer(tmp_path):
    files = read_run_files(write_run(tmp_path, [drawn(6, num_edges=4)]))
    assert edge_curves(files).segments.segments == 5
    assert edge_curves(files).segments.in_graph == 4


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_events_have_curves_or_none(tmp_path, odd):
    curves = edge_curves(read_run_files(write_run(tmp_path, [drawn(**odd)])))
    if not odd.get("truth", True):
        assert curves is None
        return
    assert curves.auc is None  # one kind of edges at most
    assert np.isfinite(curves.roc).all()
    assert ((curves.efficiency >= 0) | np.isnan(curves.efficiency)).all()


def test_without_scores_or_events_there_are_no_curves(tmp_path):
    assert edge_curves(read_run_files(write_run(tmp_path / "a", scores=False))) is None


def test_each_area_is_told_with_its_name(files):
    curves = edge_curves(files)
    panel = edge_chart(files, curves, None, None).panels[0]
    assert f"AUC {curves.auc:.4f}" in panel.series[0].name
    assert "The AUC in the legend is pooled" in panel.caption
    assert f"The mean of the AUC over events is {curves.mean_auc:.4f} (" in panel.caption
