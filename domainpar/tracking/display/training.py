"""The training, step by step and rank by rank: the numbers of its records, and the charts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from domainpar.common.words import several
from domainpar.runs.records import Table
from domainpar.tracking.display.chart import (
    BLUE,
    GREEN,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    Chart,
    ChartAxis,
    Panel,
    Series,
    log_axis,
)
from domainpar.tracking.display.run_files import RunFiles
from domainpar.tracking.events.graph import FloatArray
from partitioners.quality import imbalance

QUANTITIES = {
    "loss": ("loss per edge", "Loss per edge, weighted as in the training; the smaller the better."),
    "edge_auc_pooled": (
        "edge AUC, pooled",
        "Area under the ROC curve of target edges against other edges, of all events together.",
    ),
    "edge_efficiency": (
        "edge efficiency (score > 0.5)",
        "Fraction of the target edges in the graph with a score above 0.5.",
    ),
    "edge_purity": ("edge purity (score > 0.5)", "Fraction of target edges among the edges with a score above 0.5."),
    "lr": ("learning rate", "Learning rate of each step."),
    "grad_norm": ("norm of the gradient", "Norm of the gradient before clipping."),
}
"""Keys of a record: the label of the axis, and the content of the panel."""

OF_STEPS = ("lr", "grad_norm")
"""Quantities of a step. The record of a validation repeats the last rate."""

FEW = 60
"""Fewer points are marked, so that a single one is seen."""

PHASES = {
    "seconds_compute": ("computing", BLUE),
    "seconds_exchange": ("handing rows on", ORANGE),
    "seconds_wait": ("waiting", PALE),
}
"""Phases of a step by their keys in a record: name and colour."""

MIB = 2.0**20


def training_curves(run: RunFiles) -> dict[str, dict[str, FloatArray]]:
    """Optimiser steps done and the value after them, float64 [2, n], by quantity and split (`train`, `val`).

    Quantities that no record has are left out.
    """
    curves: dict[str, dict[str, FloatArray]] = {}
    for quantity, split in product([*QUANTITIES, *label_figures(run)], ("train", "val")):
        if split == "val" and quantity in OF_STEPS:
            continue
        values = [(record["step"], _value(record, quantity)) for record in run.records_of(split)]
        points = np.array([value for value in values if value[1] is not None], np.float64).reshape(-1, 2)
        points = points[np.isfinite(points).all(axis=1)]
        if len(points):
            curves.setdefault(quantity, {})[split] = points.T
    return curves


def label_figures(run: RunFiles) -> dict[str, tuple[str, str]]:
    """Figures of the labels that a run learns, by quantity, as in `QUANTITIES`; in records they are by label."""
    last = next(iter(run.records_of("train")[-1:]), {})
    told = {
        "accuracy": ("accuracy", "Fraction of the nodes or events with a known label that get the right class."),
        "r2": ("R^2", "Fraction of the variance of the label that the network explains."),
    }
    return {
        f"{label}.{figure}": (f"{label}: {name}", caption)
        for label, figures in last.get("labels", {}).items()
        for figure, (name, caption) in told.items()
        if figure in figures
    }


def _value(record: Table, quantity: str) -> float | None:
    """A quantity of a record; that of a label is behind a point."""
    label, _, figure = quantity.partition(".")
    value: float | None = record.get("labels", {}).get(label, {}).get(figure) if figure else record.get(quantity)
    return value


def training_chart(run: RunFiles, other: RunFiles | None = None) -> Chart | None:
    """A panel for each quantity that was recorded; None before a step.

    Of another run its validation lies beside, and its training where nothing was validated.
    """
    curves = training_curves(run)
    # One training that was scored in two ways has one set of curves.
    beside = training_curves(other) if other is not None and other.records != run.records else {}
    if not (curves or beside):
        return None
    own_name, other_name = "validation" + (f", {run.name}" if run.name else ""), ""
    shown = "val" if any("val" in by_split for by_split in beside.values()) else "train"
    if other is not None:
        word = "validation" if shown == "val" else "training"
        other_name = f"{word}, {other.in_legend(_how_trained(other), run, 'training')}"
    panels, of_labels = [], label_figures(run) | ({} if other is None else label_figures(other))
    for quantity in curves | beside:
        by_split, of_other = curves.get(quantity, {}), beside.get(quantity, {})
        series = []
        if "train" in by_split:
            steps, values = by_split["train"]
            series.append(Series("training, each step", "line", SKY, steps, values, width=0.9))
        if "val" in by_split:
            series.append(_validation(own_name, by_split["val"], BLUE))
        if shown in of_other:
            series.append(_validation(other_name, of_other[shown], VERMILION))
        label, caption = (QUANTITIES | of_labels)[quantity]
        if quantity == "loss" and of_labels:
            label, caption = "loss", "Sum of the losses of all that the network is trained on, by their weights."
        y = ChartAxis(
            label,
            low=0.0 if quantity == "lr" else None,
            high=1.0 if quantity.startswith("edge") or quantity in of_labels else None,
        )
        if quantity in ("loss", "grad_norm"):
            y = log_axis(label, np.concatenate([line.y for line in series]))
        panels.append(
            Panel(
                quantity.replace("_", "-").replace(".", "-"),
                tuple(series),
                ChartAxis("optimiser step", low=0.0),
                y,
                "",
                caption,
            )
        )
    return Chart("training", f"Training, {_how_trained(run)}", tuple(panels))


# --- layer by layer --------------------------------------------------------------------------------------------------

LAYER_COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)


def layer_sizes(run: RunFiles) -> tuple[FloatArray, dict[str, FloatArray]]:
    """Norms of the network's blocks: the first part of the names of layers, over the training steps that note them.

    Returns:
        Steps, float64 [n]; and of each block [n, 3]: norms of its parameters, of its gradient, and of the update.
    """
    records = [record for record in run.records_of("train") if record.get("layers")]
    names = [[layer.partition(".")[0] for layer in record["layers"]] for record in records]
    blocks = {name: number for number, name in enumerate(dict.fromkeys(name for each in names for name in each))}
    squares = np.zeros((len(records), len(blocks), 3))
    for of_record, each, record in zip(squares, names, records, strict=True):
        # None, of what is not finite, becomes NaN.
        sizes = [[of[kind] for kind in ("parameters", "gradient", "update")] for of in record["layers"].values()]
        np.add.at(of_record, [blocks[name] for name in each], np.array(sizes, np.float64) ** 2)
    steps = np.array([record["step"] for record in records], np.float64)
    return steps, {name: np.sqrt(squares[:, number]) for name, number in blocks.items()}


def layer_chart(run: RunFiles) -> Chart | None:
    """The change of each block in a step, and its gradient, as shares of its size; None where none were noted."""
    steps, blocks = layer_sizes(run)
    if not blocks:
        return None
    # Those that change most; more lines than colours could not be told apart.
    shown = sorted(blocks, key=lambda name: -_usual(_shares(blocks[name], 2)))[: len(LAYER_COLOURS)]
    left_out = f" Of {len(blocks)} blocks, those that change most." if len(shown) < len(blocks) else ""
    panels = []
    for name, kind, label, caption in (
        ("update", 2, "update / size of the parameters", "What a step changes of each block of layers"),
        ("gradient", 1, "gradient / size of the parameters", "The gradient of each block of layers, before clipping"),
    ):
        lines = tuple(
            Series(block, "line", colour, steps, _shares(blocks[block], kind), marker="circle" * (len(steps) < FEW))
            for block, colour in zip(shown, LAYER_COLOURS)
        )
        y = log_axis(label, np.concatenate([line.y for line in lines]))
        text = f"{caption}, as a fraction of the size of its parameters (Euclidean norms).{left_out}"
        panels.append(Panel(name, lines, ChartAxis("optimiser step", low=0.0), y, "", text))
    return Chart("layers", f"Layers, {_how_trained(run)}", tuple(panels))


def _usual(shares: FloatArray) -> float:
    """The median of those that there are."""
    known = shares[np.isfinite(shares)]
    return float(np.median(known)) if len(known) else 0.0


def _shares(sizes: FloatArray, kind: int) -> FloatArray:
    """A norm of each step over that of the parameters; NaN where one is 0."""
    shares: FloatArray = np.where(
        sizes[:, kind] > 0, sizes[:, kind] / np.where(sizes[:, 0] > 0, sizes[:, 0], np.nan), np.nan
    )
    return shares


def _how_trained(run: RunFiles) -> str:
    """Where sectors are samples of their own, metrics do not see the edges between them."""
    return run.how_trained + (", edges inside sectors only" if run.approximate else "")


def _validation(name: str, curve: FloatArray, colour: str) -> Series:
    steps, values = curve
    marker = "circle" if len(steps) < FEW else ""
    return Series(name, "line", colour, steps, values, marker=marker, dashed=colour == VERMILION)


# --- rank by rank ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RankTimes:
    """Medians over the training steps of a run, P values each.

    Attributes:
        phases: Seconds of a step in each of `PHASES`, by its name.
        load: Seconds of all steps in which each rank waited for parts of events to be read; NaN where nobody noted it.
        step_seconds: Seconds of a step: the slowest rank's.
        owned: Nodes that each rank owned.
        ghosts: Ghosts that each rank held.
        halo_bytes: Bytes that each rank sent in a step.
        peak_bytes: The most memory that each rank's process held in the whole run.
        node_imbalance: Largest owned / mean, median over steps.
        compute_imbalance: Slowest computing / mean, median over steps.
        num_steps: Steps in these numbers; the first, in which kernels are compiled, is left out.
        other_sizes: Steps of this run that were done on another number of ranks, and are not in these numbers.
    """

    phases: dict[str, FloatArray]
    load: FloatArray
    step_seconds: float
    owned: FloatArray
    ghosts: FloatArray
    halo_bytes: FloatArray
    peak_bytes: FloatArray
    node_imbalance: float
    compute_imbalance: float
    num_steps: int
    other_sizes: int

    @property
    def num_ranks(self) -> int:
        return len(self.owned)


def rank_times(run: RunFiles) -> RankTimes | None:
    """Times and memory of each rank, on the number of ranks the run had last; None before the first step."""
    records = [record for record in run.records_of("train") if record.get("ranks")]
    if not records:
        return None
    alike = [record for record in records if record["ranks"] == records[-1]["ranks"]]
    steps = alike[1:] or alike  # kernels are compiled in the first
    owned, compute = _table(steps, "owned_nodes"), _table(steps, "seconds_compute")
    return RankTimes(
        phases={name: _median(_table(steps, name)) for name in PHASES},
        load=np.sum([record.get("seconds_load", np.full(len(owned[0]), np.nan)) for record in alike], axis=0),
        step_seconds=float(np.median([record["seconds"] for record in steps])),
        owned=_median(owned),
        ghosts=_median(_table(steps, "ghost_nodes")),
        halo_bytes=_median(_table(steps, "halo_bytes")),
        peak_bytes=_table(alike, "peak_rss_bytes").max(axis=0),
        node_imbalance=float(np.median([imbalance(row) for row in owned])),
        compute_imbalance=float(np.median([imbalance(row) for row in compute])),
        num_steps=len(steps),
        other_sizes=len(records) - len(alike),
    )


def rank_chart(times: RankTimes) -> Chart:
    """Seconds of a training step by phase, the most memory held, and seconds of loading, on each rank."""
    ranks = np.arange(times.num_ranks, dtype=np.float64)
    # Bars no wider than with four ranks.
    ticks = tuple((float(rank), str(rank)) for rank in range(times.num_ranks))
    spare = max(0.5, (4 - times.num_ranks) / 2)
    x = ChartAxis("rank", -spare, times.num_ranks - 1 + spare, ticks=ticks)
    phases = tuple(Series(name, "bars", colour, ranks, times.phases[key]) for key, (name, colour) in PHASES.items())
    memory = (Series("peak memory", "bars", GREEN, ranks, times.peak_bytes / MIB),)
    steps = several(times.num_steps, "step")
    seconds, mib = ChartAxis("time of a training step [s]", low=0.0), ChartAxis("peak memory [MiB]", low=0.0)
    caption = f"Where the time of a training step goes on each rank: medians over {steps}."
    of_memory = "The largest memory that the process of each rank held at any time."
    panels = [Panel("time", phases, x, seconds, "", caption), Panel("memory", memory, x, mib, "", of_memory)]
    if np.isfinite(times.load).all():
        load = (Series("loading", "bars", PURPLE, ranks, times.load),)
        of_load = "How long each rank waited for parts of events, in all steps; not where they were kept or read ahead."
        panels.append(Panel("load", load, x, ChartAxis("loading in all steps [s]", low=0.0), "", of_load))
    return Chart("ranks", f"{several(times.num_ranks, 'rank')}, medians over {steps}", tuple(panels))


def _table(records: Sequence[Table], name: str) -> FloatArray:
    """One number of each rank in each step, [steps, P]."""
    return np.array([record[name] for record in records], dtype=np.float64)


def _median(table: FloatArray) -> FloatArray:
    medians: FloatArray = np.median(table, axis=0)
    return medians
