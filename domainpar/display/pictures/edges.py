"""The picture of the scores of edges: ROC curve, scores of either kind, efficiency and purity at every cut."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from domainpar.display.edges import EdgeCurves, edge_curves
from domainpar.display.pictures.style import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    VERMILION,
    Picture,
    label,
    legend_above,
    new_figure,
)
from domainpar.display.pictures.wording import how, kind_of
from domainpar.display.reading import RunFiles
from domainpar.display.sections import why_missing
from domainpar.words import several

NAME = "edges"


def draw_edges(run: RunFiles, other: RunFiles | None = None) -> Picture:
    """How well target edges are told from others, counted in the graph; another run's curves beside them."""
    curves = edge_curves(run)
    if curves is None:
        otherwise = "none of the scored events has truth to count against"
        return Picture(NAME, absent=why_missing(run, "scores", "events", otherwise=otherwise))
    theirs = edge_curves(other) if other is not None else None
    compared = [(curves, run, "-")]
    if other is not None and theirs is not None:
        compared.append((theirs, other, "--"))
    figure = new_figure(3.6, f"Edges of {several(len(curves.events), f'{curves.split} event')}, {how(run)}")
    roc, scores, cuts = figure.subplots(1, 3)
    _draw_roc(roc, compared)
    _draw_scores(scores, curves)
    _draw_cuts(cuts, compared)
    return Picture(NAME, figure)


Compared = list[tuple[EdgeCurves, RunFiles, str]]


def _draw_roc(axes: Axes, compared: Compared) -> None:
    floor = 1.0
    for (curves, run, dash), colour in zip(compared, (BLUE, VERMILION)):
        area = "" if curves.auc is None else f", AUC {curves.auc:.4f}"
        above = curves.roc[0] > 0  # a log axis has no zero
        axes.plot(*curves.roc[:, above], dash, color=colour, label=kind_of(run) + area)
        floor = min(floor, float(curves.roc[0][above].min(initial=1.0)))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=12))
    axes.set_xlim(max(floor, 1e-5) if floor < 1 else 1e-3, 1.0)
    axes.set_ylim(0, 1.02)
    label(axes, "share of other edges that pass", "share of target edges that pass")
    legend_above(axes, 1)


def _draw_scores(axes: Axes, curves: EdgeCurves) -> None:
    kinds = [("target", curves.targets, BLUE, "-"), ("not true", curves.fakes, ORANGE, "-")]
    if curves.others.any():
        kinds.append(("true, no target", curves.others, GREY, "--"))
    for name, counts, colour, dash in kinds:
        # Nothing is drawn where nothing was counted: a log axis has no zero.
        heights = np.where(counts > 0, counts, np.nan)
        axes.stairs(heights, curves.bins, color=colour, linestyle=dash, linewidth=1.5, label=name, baseline=None)
    axes.set_yscale("log")
    axes.set_xlim(0, 1)
    label(axes, "score of the edge", f"edges per {curves.bins[1]:.2g} of score")
    legend_above(axes)


def _draw_cuts(axes: Axes, compared: Compared) -> None:
    for (curves, run, dash), (blue, orange) in zip(compared, ((BLUE, ORANGE), (VERMILION, BLACK))):
        words = f", {kind_of(run).split(' (')[0]}" if len(compared) > 1 else ""
        axes.plot(curves.cuts, curves.efficiency, dash, color=blue, label=f"efficiency{words}")
        axes.plot(curves.cuts, curves.purity, dash, color=orange, label=f"purity{words}")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    label(axes, "cut on the score", "share of edges")
    legend_above(axes)
