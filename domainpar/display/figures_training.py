"""Figures of the training: loss, metrics and learning rate along its steps."""

from __future__ import annotations

from collections.abc import Mapping

from domainpar.display.curves import Curve
from domainpar.display.figures import BLUE, GREEN, SKY, VERMILION, Figure, axes, blank, line

SHADES = {"train": SKY, "val": BLUE}
NAMES = {"train": "training (one step)", "val": "validation"}
CURVES = {
    "loss": ("Loss", "Loss per edge, weighted as in the training; the smaller the better."),
    "edge_auc": ("Edge AUC", "Area under the ROC curve of target edges against all other candidate edges."),
    "edge_efficiency": ("Edge efficiency", "Share of the target edges in the graph with a score above 0.5."),
    "edge_purity": ("Edge purity", "Share of target edges among the edges with a score above 0.5."),
}

LOG: dict[str, object] = {"type": "log", "dtick": "D2", "tickformat": "~g"}
"""A log axis whose ticks are whole numbers: without a format, plotly writes 0.2 and 20 as 2."""


def training_figures(
    curves: Mapping[str, Mapping[str, Curve]],
    other: Mapping[str, Mapping[str, Curve]] | None = None,
    other_label: str = "",
) -> list[Figure]:
    """A figure of each quantity that was recorded; the validation of another run beside it."""
    figures = []
    for quantity, (label, caption) in CURVES.items():
        if quantity not in curves:
            continue
        plot = blank()
        for split, curve in curves[quantity].items():
            mode = "lines+markers" if split == "val" else "lines"
            plot.add_trace(line(curve.step, curve.value, NAMES[split], SHADES[split], mode=mode, width=_width(split)))
        if other and "val" in other.get(quantity, {}):
            theirs = other[quantity]["val"]
            name = f"validation, {other_label}"
            plot.add_trace(line(theirs.step, theirs.value, name, VERMILION, mode="lines+markers", dash="dash"))
        axes(plot, "optimiser steps", label.lower() if label == "Loss" else label, yaxis=_range(quantity))
        figures.append(Figure(f"training-{quantity.replace('_', '-')}", caption, {"only": plot}))
    return figures + _rate_and_norm(curves)


def _width(split: str) -> float:
    return 2.2 if split == "val" else 1.2


def _range(quantity: str) -> dict[str, object]:
    return LOG if quantity == "loss" else {"rangemode": "normal"}


def _rate_and_norm(curves: Mapping[str, Mapping[str, Curve]]) -> list[Figure]:
    figures = []
    if "lr" in curves:
        curve = curves["lr"]["train"]
        plot = blank()
        plot.add_trace(line(curve.step, curve.value, "learning rate", GREEN))
        axes(plot, "optimiser steps", "learning rate", yaxis={"rangemode": "tozero", "exponentformat": "power"})
        figures.append(Figure("training-lr", "Learning rate of each step.", {"only": plot}))
    if "grad_norm" in curves:
        curve = curves["grad_norm"]["train"]
        plot = blank()
        plot.add_trace(line(curve.step, curve.value, "norm of the gradient", GREEN, width=1.2))
        axes(plot, "optimiser steps", "gradient norm", yaxis=LOG)
        figures.append(Figure("training-grad-norm", "Norm of the gradient before clipping.", {"only": plot}))
    return figures
