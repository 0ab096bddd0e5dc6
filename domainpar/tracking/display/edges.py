"""Scores of edges: ROC curve, histograms, efficiency and purity at every cut, and the chart of them.

Everything is counted in the graph: against the candidate edges. The share of true segments that the graph holds stands
beside it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from domainpar.common.words import several
from domainpar.tracking.display.chart import Chart, ChartAxis, Colour, Panel, Series, log_axis
from domainpar.tracking.display.event_data import EventData
from domainpar.tracking.display.run_files import RunFiles
from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray
from domainpar.tracking.reco.performance.lost import TrueSegments, count_segments
from domainpar.tracking.training.edge_classes import FAKE, OTHER, TARGET, UNKNOWN

BINS = np.linspace(0, 1, 51)
"""Borders of the bins of the score."""

CUTS = np.linspace(0, 1, 101)
"""Cuts on the score."""

ROC_POINTS = 400


@dataclass(frozen=True, eq=False)
class EdgeCurves:
    """Scored edges of some events of one split.

    Attributes:
        split: The split, or several, as words.
        events: Names of the events that were counted.
        left_out: Events of the split that were not counted: too many edges, or without truth.
        roc: Share of other edges and share of targets that pass, as the cut falls, float64 [2, n].
        auc: Area under it, of the edges of all events together (pooled); None without edges of both kinds.
        hard_roc, hard_auc: The same without the true edges of particles that are no targets, most of them soft.
        mean_auc: The mean over events of the area of each, as `infer` prints it.
        efficiency: Share of targets that pass each of `CUTS`, NaN without any.
        purity: Share of targets among what passes, true segments of other particles left out; NaN where none pass.
        targets, fakes, others: Scored edges of each class in each of `BINS`, int64 [50].
        unscored_targets: Targets without a score, which are lost: a filter dropped them, or they join two sectors of
            naive mode.
        unscored: Edges without a score.
        segments: True segments of the targets of the tracks, those the graph holds, and those that pass at 0.5; None
            where the truth does not know them.
    """

    split: str
    events: tuple[str, ...]
    left_out: int
    roc: FloatArray
    auc: float | None
    hard_roc: FloatArray
    hard_auc: float | None
    mean_auc: float | None
    efficiency: FloatArray
    purity: FloatArray
    targets: IntArray
    fakes: IntArray
    others: IntArray
    unscored_targets: int
    unscored: int
    segments: TrueSegments | None


def edge_curves(run: RunFiles) -> EdgeCurves | None:
    """Curves over the events of `run.splits_to_show()`; None without scores, events or truth."""
    splits = run.splits_to_show()
    if not splits:
        return None
    few, left_out = run.events_to_read(splits)
    events = [event for event in map(run.read_event, few) if event.edge_class is not None]
    if not events:
        return None
    logit = np.concatenate([event.logit for event in events if event.logit is not None])
    classes = np.concatenate([event.edge_class for event in events if event.edge_class is not None])
    known = classes != UNKNOWN
    logit, classes = logit[known], classes[known]
    if len(logit) and not (logit > -np.inf).any():  # a network that scores no edges
        return None
    roc, auc = _roc(logit, classes == TARGET)
    hard_roc, hard_auc = _roc(logit[classes != OTHER], classes[classes != OTHER] == TARGET)
    areas = []
    for event in events:
        assert event.logit is not None
        assert event.edge_class is not None
        of_event = event.edge_class != UNKNOWN
        if (area := _roc(event.logit[of_event], event.edge_class[of_event] == TARGET)[1]) is not None:
            areas.append(area)
    scored = logit > -np.inf
    score = 1 / (1 + np.exp(-logit[scored]))
    by_kind = [np.sort(score[classes[scored] == kind]) for kind in (TARGET, FAKE, OTHER)]
    histograms = [np.histogram(scores, BINS)[0] for scores in by_kind]
    targets, fakes, _ = (len(scores) - np.searchsorted(scores, CUTS, side="left") for scores in by_kind)  # that pass
    num_targets = int(np.count_nonzero(classes == TARGET))
    return EdgeCurves(
        split=" and ".join(splits),
        events=tuple(event.event_id for event in events),
        left_out=left_out + len(few) - len(events),
        roc=roc,
        auc=auc,
        hard_roc=hard_roc,
        hard_auc=hard_auc,
        mean_auc=float(np.mean(areas)) if areas else None,
        efficiency=_ratio(targets, np.full(len(CUTS), num_targets)),
        purity=_ratio(targets, targets + fakes),
        targets=histograms[0],
        fakes=histograms[1],
        others=histograms[2],
        unscored_targets=int(np.count_nonzero(~scored & (classes == TARGET))),
        unscored=int(np.count_nonzero(~scored)),
        segments=_segments(events, run.tracking.cuts.target),
    )


def _roc(logit: FloatArray, is_target: BoolArray) -> tuple[FloatArray, float | None]:
    """The ROC curve, as the cut falls from one logit to the next, and the area under it.

    The curve is thinned to points that are evenly spread along it, both ends among them.
    """
    order = np.argsort(-logit, kind="stable")
    ordered = logit[order]
    # Edges of equal scores pass together: the curve has a point at the last of them only.
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) if len(ordered) else np.zeros(0, np.int64)
    targets, others = (np.append(0, np.cumsum(mask)[last]) for mask in (is_target[order], ~is_target[order]))
    pairs = int(targets[-1]) * int(others[-1])
    # Trapezoids of counts: exact in float64, so that their order changes no bit.
    area = float(np.sum(np.diff(others) * (targets[1:] + targets[:-1]) / 2))
    auc = area / pairs if pairs else None
    curve = np.stack([others / max(others[-1], 1), targets / max(targets[-1], 1)])
    if curve.shape[1] <= ROC_POINTS:
        return curve, auc
    length = curve.sum(axis=0)  # both rise
    # Half of the points by length, half by the logarithm of the share of fakes, which is drawn on a log axis.
    steps = np.linspace(0, length[-1], ROC_POINTS // 2)
    decades = np.geomspace(1 / max(others[-1], 1), 1, ROC_POINTS // 2)
    chosen = np.concatenate([np.searchsorted(length, steps), np.searchsorted(curve[0], decades)])
    return curve[:, np.unique(np.minimum(chosen, curve.shape[1] - 1))], auc


def _ratio(part: IntArray, whole: IntArray) -> FloatArray:
    ratio: FloatArray = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return ratio


def _segments(events: Sequence[EventData], track_target: Mapping[str, Any]) -> TrueSegments | None:
    """Over all events; None if one of them does not know what the conditions ask, or has no positions."""
    counts = []
    for event in events:
        assert event.logit is not None, "only scored events are counted"
        if event.truth is None:
            return None
        try:
            counts.append(count_segments(event.truth, event.edge_index, track_target, event.logit > 0))
        except ValueError:  # the other curves are kept
            return None
    known = [of_event for of_event in counts if of_event is not None]
    return functools.reduce(operator.add, known) if len(known) == len(events) else None


def edge_chart(run: RunFiles, curves: EdgeCurves, other: RunFiles | None, beside: EdgeCurves | None) -> Chart:
    """ROC curve, scores of either kind, efficiency and purity at every cut; the curves `beside` of another run."""
    both = ((run, curves), (other, beside))
    runs = [
        (of_run, files.in_legend(files.kind, other if beside else None))
        for files, of_run in both
        if files is not None and of_run is not None
    ]
    roc = []
    for (of_run, kind), colour in zip(runs, (Colour.BLUE, Colour.VERMILION)):
        lines = [("", of_run.roc, of_run.auc, 1.5)]
        if of_run.others.any():
            lines += [(", without edges of other particles", of_run.hard_roc, of_run.hard_auc, 0.8)]
        for words, curve, auc, width in lines:
            name = (kind or "network") + words + ("" if auc is None else f", AUC {auc:.4f}")
            others, targets = curve[:, curve[0] > 0]  # a log axis has no zero
            roc.append(Series(name, "line", colour, others, targets, dashed=colour == Colour.VERMILION, width=width))
    floor = min(float(line.x.min(initial=1.0)) for line in roc)
    low = max(floor, 1e-5) if floor < 1 else 1e-3
    x = log_axis("fraction of other edges that pass", np.array([floor, 1.0]), low, 1.0)
    of_roc = (
        "ROC curve: target edges against all other candidate edges, counted in the graph. A lower cut on the "
        "score lies further to the right. The AUC in the legend is pooled: that of the edges of all events together."
    )
    if any(of_run.others.any() for of_run, _ in runs):
        of_roc += " Thin lines leave out the true edges of particles that are no targets, such as those of too low pT."
    means = [f"{it.mean_auc:.4f}" + f" ({kind})" * bool(kind) for it, kind in runs if it.mean_auc is not None]
    of_roc += f" The mean of the AUC over events is {', '.join(means)}." if means else ""
    kinds = [("target", curves.targets, Colour.BLUE), ("not true", curves.fakes, Colour.ORANGE)]
    if curves.others.any():
        kinds.append(("true, no target", curves.others, Colour.GREY))
    # Nothing is drawn where nothing was counted: a log axis has no zero.
    scores = tuple(
        Series(name, "steps", colour, BINS, np.where(counts > 0, counts, np.nan), dashed=colour == Colour.GREY)
        for name, counts, colour in kinds
    )
    y = log_axis(f"edges per {BINS[1]:.2g} of score", np.concatenate([steps.y for steps in scores]))
    of_scores = "Scores of target edges, and of edges that are not true segments."
    cuts = []
    for (of_run, kind), (blue, orange) in zip(runs, ((Colour.BLUE, Colour.ORANGE), (Colour.VERMILION, Colour.BLACK))):
        words = f", {kind.split(' (')[0]}" if len(runs) > 1 else ""
        for name, values, colour in (("efficiency", of_run.efficiency, blue), ("purity", of_run.purity, orange)):
            cuts.append(Series(name + words, "line", colour, CUTS, values, dashed=blue == Colour.VERMILION))
    of_cuts = "Edge efficiency and purity of all edges with at least this score, counted in the graph."
    if curves.segments is not None and (held := curves.segments.construction_efficiency) is not None:
        of_cuts += f" The graph holds {held:.1%} of the true segments of the targets: no cut finds more of them."
    passes, cut = ChartAxis("fraction of target edges that pass", 0.0, 1.02), ChartAxis("cut on the score", 0.0, 1.0)
    panels = (
        Panel("roc", tuple(roc), x, passes, caption=of_roc),
        Panel("scores", scores, ChartAxis("score of the edge", 0.0, 1.0), y, caption=of_scores),
        Panel("cuts", tuple(cuts), cut, ChartAxis("fraction of edges", 0.0, 1.02), caption=of_cuts),
    )
    title = f"Edges of {several(len(curves.events), f'{curves.split} event')}, {run.how_scored}"
    return Chart("edges", title, panels)
