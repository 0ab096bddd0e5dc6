"""The training, step by step: what its records say, and the chart of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from domainpar.display.chart import BLUE, SKY, VERMILION, Axis, Chart, Panel, Series, log_axis
from domainpar.display.run_files import RunFiles, Table
from domainpar.events.graph import FloatArray

QUANTITIES = {
    "loss": ("loss per edge", "Loss per edge, weighted as in the training; the smaller the better."),
    "edge_auc": ("edge AUC", "Area under the ROC curve of target edges against all other candidate edges."),
    "edge_efficiency": (
        "edge efficiency (score > 0.5)",
        "Share of the target edges in the graph with a score above 0.5.",
    ),
    "edge_purity": ("edge purity (score > 0.5)", "Share of target edges among the edges with a score above 0.5."),
    "lr": ("learning rate", "Learning rate of each step."),
    "grad_norm": ("norm of the gradient", "Norm of the gradient before clipping."),
}
"""Keys of a record: the label of the axis, and what the panel shows."""

OF_STEPS = ("lr", "grad_norm")
"""Quantities that a step has and a validation has not."""

MOST_POINTS = 2000
FEW = 60
"""Fewer points are marked, so that a single one is seen."""


def training_curves(run: RunFiles) -> dict[str, dict[str, FloatArray]]:
    """Optimiser steps done and the value after them, float64 [2, n], by quantity and split (`train`, `val`).

    Quantities that no record has are left out.
    """
    curves: dict[str, dict[str, FloatArray]] = {}
    for quantity in QUANTITIES:
        for split in ("train", "val"):
            curve = _curve(run.records_of(split), quantity)
            if curve.size and not (split == "val" and quantity in OF_STEPS):
                curves.setdefault(quantity, {})[split] = curve
    return curves


def training_chart(run: RunFiles, other: RunFiles | None = None) -> Chart | None:
    """A panel for each quantity that was recorded, the validation of another run beside it; None before a step."""
    curves = training_curves(run)
    if not curves:
        return None
    # One training that was scored in two ways has one set of curves.
    beside = training_curves(other) if other is not None and other.records != run.records else {}
    other_name = "" if other is None else f"validation, {_how_trained(other)}"
    panels = []
    for quantity, by_split in curves.items():
        series = []
        if "train" in by_split:
            series.append(_series("training, each step", by_split["train"], SKY, width=0.9))
        if "val" in by_split:
            series.append(_series("validation", by_split["val"], BLUE))
        if "val" in beside.get(quantity, {}):
            series.append(_series(other_name, beside[quantity]["val"], VERMILION, dashed=True))
        label, caption = QUANTITIES[quantity]
        y = Axis(label, low=0.0 if quantity == "lr" else None, high=1.0 if quantity.startswith("edge") else None)
        if quantity in ("loss", "grad_norm"):
            y = log_axis(label, np.concatenate([line.y for line in series]))
        panels.append(Panel(quantity.replace("_", "-"), tuple(series), Axis("optimiser step", low=0.0), y, "", caption))
    return Chart("training", f"Training, {_how_trained(run)}", tuple(panels))


def _how_trained(run: RunFiles) -> str:
    """Where sectors are samples of their own, metrics do not see the edges between them."""
    return run.how_trained + (", edges inside sectors only" if run.approximate else "")


def _series(name: str, curve: FloatArray, colour: str, dashed: bool = False, width: float = 1.5) -> Series:
    marker = "circle" if curve.shape[1] < FEW and not name.startswith("training") else ""
    return Series(name, "line", colour, curve[0], curve[1], marker=marker, dashed=dashed, width=width)


def _curve(records: Sequence[Table], quantity: str) -> FloatArray:
    known = [(record["step"], record[quantity]) for record in records if record.get(quantity) is not None]
    points = np.array(known, dtype=np.float64).reshape(-1, 2)
    points = points[np.isfinite(points).all(axis=1)]
    # A figure has some 1000 pixels; the last point is always among them.
    every = -(-len(points) // MOST_POINTS) or 1
    return points[::-1][::every][::-1].T
