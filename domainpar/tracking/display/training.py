"""The training, step by step and rank by rank, and its profile: the numbers of its records, and the charts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from domainpar.common.words import several
from domainpar.runs.records import Table
from domainpar.tracking.display.chart import Chart, ChartAxis, Colour, Panel, Series, log_axis
from domainpar.tracking.display.run_facts import ReportTable
from domainpar.tracking.display.run_files import RunFiles
from domainpar.tracking.events.graph import FloatArray
from domainpar.tracking.training.metrics import EDGE_METRICS, LABEL_METRICS
from partitioners.quality import imbalance

QUANTITIES = {
    "loss": ("loss per edge", "Loss per edge, weighted as in the training; the smaller the better."),
    **{metric.name: (metric.axis, metric.meaning) for metric in EDGE_METRICS if metric.axis},
    "lr": ("learning rate", "Learning rate of each step."),
    "grad_norm": ("norm of the gradient", "Norm of the gradient before clipping."),
}
"""Keys of a record: the label of the axis, and the content of the panel."""

OF_STEPS = ("lr", "grad_norm")
"""Quantities of a step. The record of a validation repeats the last rate."""

FEW = 60
"""Fewer points are marked, so that a single one is seen."""

PHASES = {
    "seconds_compute": ("computing", Colour.BLUE),
    "seconds_exchange": ("handing rows on", Colour.ORANGE),
    "seconds_wait": ("waiting", Colour.PALE),
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
        label, _, figure = quantity.partition(".")  # that of a label is behind a point
        records = [(it["step"], it.get("labels", {}).get(label, {}) if figure else it) for it in run.records_of(split)]
        values = [(step, of.get(figure or quantity)) for step, of in records]
        points = np.array([value for value in values if value[1] is not None], np.float64).reshape(-1, 2)
        points = points[np.isfinite(points).all(axis=1)]
        if len(points):
            curves.setdefault(quantity, {})[split] = points.T
    return curves


def label_figures(run: RunFiles) -> dict[str, tuple[str, str]]:
    """Figures of the labels that a run learns, by quantity, as in `QUANTITIES`; in records they are by label."""
    last = next(iter(run.records_of("train")[-1:]), {})
    return {
        f"{label}.{metric.name}": (f"{label}: {metric.axis}", metric.meaning)
        for label, figures in last.get("labels", {}).items()
        for metric in LABEL_METRICS
        if metric.axis and metric.name in figures
    }


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
            series.append(Series("training, each step", "line", Colour.SKY, steps, values, width=0.9))
        for name, curve, colour in (
            (own_name, by_split.get("val"), Colour.BLUE),
            (other_name, of_other.get(shown), Colour.VERMILION),
        ):
            if curve is not None:
                (steps, values), marker = curve, "circle" * (curve.shape[1] < FEW)
                dashed = colour == Colour.VERMILION
                series.append(Series(name, "line", colour, steps, values, marker=marker, dashed=dashed))
        label, caption = (QUANTITIES | of_labels)[quantity]
        if quantity == "loss" and of_labels:
            label, caption = "loss", "Sum of the losses of all that the network is trained on, by their weights."
        high = 1.0 if quantity.startswith("edge") or quantity in of_labels else None
        y = ChartAxis(label, low=0.0 if quantity == "lr" else None, high=high)
        if quantity in ("loss", "grad_norm"):
            y = log_axis(label, np.concatenate([line.y for line in series]))
        name = quantity.replace("_", "-").replace(".", "-")
        panels.append(Panel(name, tuple(series), ChartAxis("optimiser step", low=0.0), y, caption=caption))
    return Chart("training", f"Training, {_how_trained(run)}", tuple(panels))


# --- layer by layer --------------------------------------------------------------------------------------------------

MOST_BLOCKS = 6


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

    def shares(block: str, kind: int) -> FloatArray:
        """A norm of each step over that of the parameters; NaN where one is 0."""
        sizes = blocks[block]
        none: FloatArray = np.full(len(steps), np.nan)
        return np.divide(sizes[:, kind], sizes[:, 0], out=none, where=(sizes[:, kind] > 0) & (sizes[:, 0] > 0))

    def usual(block: str) -> float:
        known = shares(block, 2)
        return float(np.median(known[np.isfinite(known)])) if np.isfinite(known).any() else 0.0

    # Those that change most; more lines than colours look alike.
    shown = sorted(blocks, key=lambda name: -usual(name))[:MOST_BLOCKS]
    left_out = f" Of {len(blocks)} blocks, those that change most." if len(shown) < len(blocks) else ""
    panels = []
    for name, kind, label, caption in (
        ("update", 2, "update / size of the parameters", "What a step changes of each block of layers"),
        ("gradient", 1, "gradient / size of the parameters", "The gradient of each block of layers, before clipping"),
    ):
        marker = "circle" * (len(steps) < FEW)
        lines = tuple(
            Series(block, "line", colour, steps, shares(block, kind), marker=marker)
            for block, colour in zip(shown, Colour.LINES)
        )
        y = log_axis(label, np.concatenate([line.y for line in lines]))
        text = f"{caption}, as a fraction of the size of its parameters (Euclidean norms).{left_out}"
        panels.append(Panel(name, lines, ChartAxis("optimiser step", low=0.0), y, caption=text))
    return Chart("layers", f"Layers, {_how_trained(run)}", tuple(panels))


def _how_trained(run: RunFiles) -> str:
    """Where sectors are samples of their own, metrics do not see the edges between them."""
    return run.how_trained + (", edges inside sectors only" if run.approximate else "")


# --- rank by rank ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RankTimes:
    """Medians over the training steps of a run, P values each."""

    phases: dict[str, FloatArray]  # seconds of a step in each of `PHASES`, by its name
    # seconds of all steps in which each rank waited for parts of events to be read; NaN where nobody noted it
    load: FloatArray
    step_seconds: float  # seconds of a step: the slowest rank's
    owned: FloatArray  # nodes that each rank owned
    ghosts: FloatArray  # ghosts that each rank held
    halo_bytes: FloatArray  # bytes that each rank sent in a step
    peak_bytes: FloatArray  # the most memory that each rank's process held in the whole run
    node_imbalance: float  # largest owned / mean, median over steps
    compute_imbalance: float  # slowest computing / mean, median over steps
    num_steps: int  # steps in these numbers; the first, in which kernels are compiled, is left out
    other_sizes: int  # steps of this run that were done on another number of ranks, and are not in these numbers

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

    def table(name: str, records: Sequence[Table] = steps) -> FloatArray:
        """One number of each rank in each step, [steps, P]."""
        return np.array([record[name] for record in records], np.float64)

    owned, compute = table("owned_nodes"), table("seconds_compute")
    return RankTimes(
        phases={name: np.median(table(name), axis=0) for name in PHASES},
        load=np.sum([record.get("seconds_load", np.full(len(owned[0]), np.nan)) for record in alike], axis=0),
        step_seconds=float(np.median([record["seconds"] for record in steps])),
        owned=np.median(owned, axis=0),
        ghosts=np.median(table("ghost_nodes"), axis=0),
        halo_bytes=np.median(table("halo_bytes"), axis=0),
        peak_bytes=table("peak_rss_bytes", alike).max(axis=0),
        node_imbalance=float(np.median([imbalance(row) for row in owned])),
        compute_imbalance=float(np.median([imbalance(row) for row in compute])),
        num_steps=len(steps),
        other_sizes=len(records) - len(alike),
    )


def _bars_of_ranks(name: str, bars: Sequence[tuple[str, str, FloatArray]], label: str, caption: str) -> Panel:
    """Bars of each rank, the values of each colour upon those before; no wider than with four ranks."""
    num_ranks = len(bars[0][2])
    ranks, spare = np.arange(num_ranks, dtype=np.float64), max(0.5, (4 - num_ranks) / 2)
    series = tuple(Series(of, "bars", colour, ranks, values) for of, colour, values in bars)
    x = ChartAxis("rank", -spare, num_ranks - 1 + spare, ticks=tuple((rank, f"{rank:g}") for rank in ranks.tolist()))
    return Panel(name, series, x, ChartAxis(label, low=0.0), caption=caption)


def rank_chart(times: RankTimes) -> Chart:
    """Seconds of a training step by phase, the most memory held, and seconds of loading, on each rank."""
    steps = several(times.num_steps, "step")
    phases = [(name, colour, times.phases[key]) for key, (name, colour) in PHASES.items()]
    caption = f"Where the time of a training step goes on each rank: medians over {steps}."
    memory = [("peak memory", Colour.GREEN, times.peak_bytes / MIB)]
    of_memory = "The largest memory that the process of each rank held at any time."
    panels = [
        _bars_of_ranks("time", phases, "time of a training step [s]", caption),
        _bars_of_ranks("memory", memory, "peak memory [MiB]", of_memory),
    ]
    if np.isfinite(times.load).all():
        load = [("loading", Colour.PURPLE, times.load)]
        of_load = "How long each rank waited for parts of events, in all steps; not where they were kept or read ahead."
        panels.append(_bars_of_ranks("load", load, "loading in all steps [s]", of_load))
    return Chart("ranks", f"{several(times.num_ranks, 'rank')}, medians over {steps}", tuple(panels))


# --- profiled steps --------------------------------------------------------------------------------------------------

MOST_RANKS, MOST_ROWS = 8, 25


def operations(profile: Table) -> tuple[ReportTable, ...]:
    """A row for each operation: its calls, and its own time in a step on each rank; the longest first."""
    ranks = profile["ranks"][:MOST_RANKS]
    by_name: dict[str, list[Table]] = {}
    for number, rank in enumerate(ranks):
        for operation in rank["operations"]:
            by_name.setdefault(operation["name"], [{}] * len(ranks))[number] = operation
    longest = sorted(by_name, key=lambda name: -sum(it.get("seconds", 0.0) for it in by_name[name]))[:MOST_ROWS]
    sums = [sum(it["seconds"] for it in rank["operations"]) + rank["other_seconds"] for rank in ranks]
    by_name["all"] = [{"seconds": seconds} for seconds in sums]
    rows = []
    for name in [*longest, "all"]:
        calls = max(it.get("calls", 0.0) for it in by_name[name])
        of_ranks = {f"rank {n}": f"{1e3 * it['seconds']:,.2f} ms" if it else "–" for n, it in enumerate(by_name[name])}
        rows.append({"operation": name, "calls": f"{calls:,.4g}" if name in longest else "", **of_ranks})
    note = f"Own time of operations, without that of those they call; means over {several(profile['steps'], 'step')}."
    if len(ranks) < len(profile["ranks"]):
        note += f" The first {MOST_RANKS} of {several(len(profile['ranks']), 'rank')}."
    return ReportTable.of(rows, note)


def profile_chart(profile: Table) -> Chart:
    """Memory of each rank over the profiled steps; operations of a step on each rank, and how fast they were."""
    ranks, steps = profile["ranks"], several(profile["steps"], "step")
    lines = []
    for number, (rank, colour) in enumerate(zip(ranks, Colour.LINES)):
        seconds, held = np.array(rank["memory"], np.float64).reshape(-1, 2).T
        lines.append(Series(f"rank {number}", "line", colour, seconds, held / MIB, width=1.0))
    of_memory = f"Memory in use on each rank over {steps}; not what is kept free."
    axes = ChartAxis("time [s]", low=0.0), ChartAxis("memory in use [MiB]", low=0.0)
    flops = np.array([rank["flops"] for rank in ranks], np.float64)
    rates = flops / np.array([rank["seconds"] for rank in ranks]) / 1e9
    counted = "Floating-point operations of products in a step, by formula, both passes and all that is made again."
    waits = "The same over the seconds of a step, waiting included."
    panels = (
        Panel("memory", tuple(lines), *axes, caption=of_memory),
        _bars_of_ranks("flops", [("operations", Colour.GREEN, flops / 1e9)], "GFLOP of a step", counted),
        _bars_of_ranks("rate", [("rate", Colour.BLUE, rates)], "GFLOP/s", waits),
    )
    return Chart("profile", f"Profile of {steps}", panels)
