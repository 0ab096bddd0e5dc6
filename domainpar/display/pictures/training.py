"""The picture of a training: loss and metrics along its steps."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from domainpar.display.curves import Curve, training_curves
from domainpar.display.pictures.style import BLUE, SKY, VERMILION, Picture, label, legend_below, new_figure
from domainpar.display.pictures.wording import how_trained
from domainpar.display.reading import RunFiles

NAMES = {
    "loss": "loss per edge",
    "edge_auc": "edge AUC",
    "edge_efficiency": "edge efficiency (score > 0.5)",
    "edge_purity": "edge purity (score > 0.5)",
}
"""What is drawn, and the labels of its axes."""

FEW = 60
"""Fewer points are marked, so that a single one is seen."""

NAME = "training"


def draw_training(run: RunFiles, other: RunFiles | None = None) -> Picture:
    """Loss, AUC, efficiency and purity of edges along the steps; the validation of another run beside them."""
    curves = training_curves(run)
    drawn = [quantity for quantity in NAMES if quantity in curves]
    if not drawn:
        return Picture(NAME, absent="no step of the training was finished")
    # One training that was scored in two ways has one set of curves.
    theirs = training_curves(other) if other is not None and other.records != run.records else {}
    figure = new_figure(2.9 * ((len(drawn) + 1) // 2), f"Training, {how_trained(run)}{_against(run)}")
    grid = figure.add_gridspec((len(drawn) + 1) // 2, 2 if len(drawn) > 1 else 1)
    frames = [figure.add_subplot(grid[place // 2, place % 2]) for place in range(len(drawn))]
    for axes, quantity in zip(frames, drawn, strict=True):
        _draw(
            axes,
            curves[quantity],
            theirs.get(quantity, {}),
            "" if other is None else how_trained(other) + _against(other),
        )
        label(axes, "optimiser step", NAMES[quantity])
        _scale(axes, quantity, curves[quantity])
    legend_below(figure, _fullest(frames), 3)
    return Picture(NAME, figure)


def _against(run: RunFiles) -> str:
    """What metrics do not see where sectors are samples of their own: the edges between them."""
    return ", edges inside sectors only" if run.approximate else ""


def _draw(axes: Axes, ours: Mapping[str, Curve], theirs: Mapping[str, Curve], other_name: str) -> None:
    """Every step in a pale colour, what training did not see in a strong one."""
    if "train" in ours:
        axes.plot(ours["train"].step, ours["train"].value, color=SKY, linewidth=0.7, label="training, each step")
    if "val" in ours:
        size = 3.0 if len(ours["val"].step) < FEW else 0.0
        axes.plot(ours["val"].step, ours["val"].value, "o-", markersize=size, color=BLUE, label="validation")
    if "val" in theirs:
        name = f"validation of the run beside it: {other_name}"
        axes.plot(theirs["val"].step, theirs["val"].value, "--", color=VERMILION, label=name)


def _scale(axes: Axes, quantity: str, curves: Mapping[str, Curve]) -> None:
    """The loss on a log axis where it can be; shares end at 1."""
    if quantity != "loss":
        axes.set_ylim(top=1.0)
    elif all((curve.value > 0).all() for curve in curves.values()):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left=0)


def _fullest(frames: list[Axes]) -> Axes:
    return max(frames, key=lambda axes: len(axes.lines))
