"""Figures of the scores of edges: ROC curves, scores of either kind, efficiency and purity at every cut."""

from __future__ import annotations

import numpy as np

from domainpar.display.edges import EdgeCurves
from domainpar.display.figures import BLACK, BLUE, GREY, ORANGE, VERMILION, Figure, axes, blank, line


def edge_figures(
    curves: EdgeCurves, label: str, other: EdgeCurves | None = None, other_label: str = ""
) -> list[Figure]:
    """The three figures; another run's curves beside them where it has any."""
    runs = [(curves, label, BLUE, "solid")]
    if other is not None:
        runs.append((other, other_label, VERMILION, "dash"))
    return [_roc(runs), _scores(curves), _cuts(runs)]


Runs = list[tuple[EdgeCurves, str, str, str]]


def _roc(runs: Runs) -> Figure:
    plot = blank()
    for curves, label, colour, dash in runs:
        area = "" if curves.auc is None else f", AUC {curves.auc:.4f}"
        above = curves.roc[0] > 0  # a log axis has no zero
        plot.add_trace(line(curves.roc[0][above], curves.roc[1][above], label + area, colour, dash=dash))
    floor = min((curves.roc[0][curves.roc[0] > 0].min(initial=1.0) for curves, *_ in runs), default=1e-3)
    axes(plot, "share of other edges that pass", "share of target edges that pass")
    plot.update_xaxes(type="log", range=[np.log10(max(floor, 1e-5)) - 0.05, 0.03], exponentformat="power", dtick=1)
    plot.update_yaxes(range=[0, 1.03])
    caption = (
        "ROC curve: target edges against all other candidate edges, counted in the graph. The lower the cut on the "
        "score, the further right."
    )
    return Figure("edges-roc", caption, {"only": plot})


def _scores(curves: EdgeCurves) -> Figure:
    plot = blank(barmode="overlay")
    kinds = [("not true", curves.fakes, ORANGE), ("target", curves.targets, BLUE)]
    if curves.others.any():
        kinds.append(("true, but no target", curves.others, GREY))
    for name, counts, colour in kinds:
        # A step line of its own, closed at both ends, reads better on a log axis than bars that hide each other.
        x, y = np.repeat(curves.bins, 2)[1:-1], np.repeat(np.where(counts > 0, counts, np.nan), 2)
        plot.add_trace(line(x, y, name, colour))
    axes(plot, "score of the edge", f"edges per {curves.bins[1]:.2g}")
    plot.update_yaxes(type="log", exponentformat="power", dtick=1)
    plot.update_xaxes(range=[0, 1])
    return Figure("edges-scores", "Scores of target edges and of those that are not true.", {"only": plot})


def _cuts(runs: Runs) -> Figure:
    plot = blank()
    for curves, label, colour, dash in runs:
        suffix = f" ({label})" if len(runs) > 1 else ""
        plot.add_trace(line(curves.cuts, curves.efficiency, f"efficiency{suffix}", colour, dash=dash))
        shade = ORANGE if dash == "solid" else BLACK
        plot.add_trace(line(curves.cuts, curves.purity, f"purity{suffix}", shade, dash=dash))
    axes(plot, "cut on the score", "share")
    plot.update_xaxes(range=[0, 1])
    plot.update_yaxes(range=[0, 1.03])
    caption = "Edge efficiency and purity of all edges with at least this score, counted in the graph."
    ceiling = runs[0][0].ceiling
    if ceiling is not None and ceiling.construction_efficiency is not None:
        caption += (
            f" The graph holds {ceiling.construction_efficiency:.1%} of the true segments of the targets of tracks; no "
            "cut finds more of them."
        )
    return Figure("edges-cuts", caption, {"only": plot})
