"""Metrics of edges and of labels, each declared once: all that writes, prints or draws metrics walks these tables.

What is counted is added over tiles, events and ranks, and divided once. Edges are counted against the candidate edges
*in the graph*. True segments that no candidate edge joins do not appear here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.reco.performance.rates import ratio

if TYPE_CHECKING:  # torch comes with it; a report needs none
    from domainpar.tracking.training.tasks import Task

AGAINST = {False: "candidate edges", True: "candidate edges inside sectors (approximate: naive mode)"}
"""The edges that are counted: of whole events, or of independent sectors."""


@dataclass(frozen=True)
class Metric:
    """A metric: how it comes from counts, and how it is shown.

    Attributes:
        name: In `metrics.jsonl`, event files, `scores.json` and printed lines.
        heading: In the tables of the report.
        meaning: A sentence for docs/reference/files.md, and for the captions and headings of the report.
        value: Of the counts; None where there is nothing to divide by.
        axis: The label of its chart in the report; empty for no chart.
        line: Its format in the printed line of a step; empty: it is not in it.
        mean: Its name in `scores.json` if it is the mean over events there; empty: it is that of all events together.
    """

    name: str
    heading: str
    meaning: str
    value: Callable[[Any], float | None]
    axis: str = ""
    line: str = ""
    mean: str = ""


# --- edges -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EdgeCounts:
    """Edges of the graph, counted at a score cut of 0.5."""

    edges: int  # all edges
    targets: int  # true segments of target particles
    found: int  # targets that pass
    passing: int  # edges that pass
    passing_other: int  # true segments of other particles that pass: neither good nor bad
    ordered: int  # twice the (target, other edge) pairs in the right order, plus the pairs that tie
    # edges that join two sectors of naive mode: no sector holds them, and they are not among `edges`
    not_scored: int = 0
    in_unit: int = 0  # edges whose logit lies between 0 and 1, where logits of a sigmoid's results do


EDGE_METRICS = (
    Metric(
        "edge_efficiency",
        "edge efficiency",
        "Fraction of the target edges in the graph with a score above 0.5.",
        lambda of: ratio(of.found, of.targets),
        axis="edge efficiency (score > 0.5)",
        line=".4f",
    ),
    Metric(
        "edge_purity",
        "edge purity",
        "Fraction of target edges among the edges with a score above 0.5, without true segments of other particles.",
        lambda of: ratio(of.found, of.passing - of.passing_other),
        axis="edge purity (score > 0.5)",
        line=".4f",
    ),
    Metric(
        "edge_auc_pooled",
        "edge AUC",
        "Area under the ROC curve of target edges against other edges, of all events together.",
        lambda of: ratio(of.ordered, 2 * of.targets * (of.edges - of.targets)),
        axis="edge AUC, pooled",
        line=".4f",
        mean="edge_auc_mean",  # pairs of two events are not counted, so that no event's scores need to be kept
    ),
)


def metrics_of(counts: EdgeCounts, in_sectors: bool = False) -> dict[str, Any]:
    """Edge metrics, against the candidate edges in the graph; None where there is nothing to divide by.

    Args:
        in_sectors: Whether the graphs were independent sectors, which lack the edges between them.
    """
    return {
        **{metric.name: metric.value(counts) for metric in EDGE_METRICS},
        "counted_against": AGAINST[in_sectors],
        "edges": counts.edges,
        "edges_not_scored": counts.not_scored,
        "target_edges": counts.targets,
    }


def metrics_over(counts: Sequence[EdgeCounts]) -> dict[str, Any]:
    """Metrics over whole events, None where there is nothing to divide by."""
    total = EdgeCounts(*np.sum([astuple(of_event) for of_event in counts], axis=0, dtype=object).tolist())
    metrics: dict[str, float | None] = {}
    for metric in EDGE_METRICS:
        if metric.mean:
            known = [value for of_event in counts if (value := metric.value(of_event)) is not None]
            metrics[metric.mean] = float(np.mean(known)) if known else None
        else:
            metrics[metric.name] = metric.value(total)
    return {"events": len(counts), **metrics, "edges": total.edges, "target_edges": total.targets}


# --- labels ----------------------------------------------------------------------------------------------------------


class ClassCounts(NamedTuple):
    """Rows of a label that is a class."""

    found: IntArray  # those of each class that were found right, int64 [classes]
    rows: IntArray  # all of each class


class NumberSums(NamedTuple):
    """Sums over the rows of a label that is a number, in a unit of its own."""

    scale: float  # the unit
    rows: float  # how many
    squares: float  # of the squares of what they are off
    labels: float
    squares_of_labels: float


def _explained(of: NumberSums) -> float | None:
    spread = of.squares_of_labels - of.labels * of.labels / of.rows
    return 1.0 - of.squares / spread if spread > 1e-9 * of.squares_of_labels else None  # else it is rounding


CLASS_METRICS = (
    Metric(
        "accuracy",
        "accuracy",
        "Fraction of the nodes or events with a known label that get the right class.",
        lambda of: ratio(int(of.found.sum()), int(of.rows.sum())),
        axis="accuracy",
        line=".4f",
    ),
    Metric(
        "mean_accuracy",
        "mean of classes",
        "Mean of the accuracy over the classes that occur.",
        lambda of: float((of.found[of.rows > 0] / of.rows[of.rows > 0]).mean()) if of.rows.any() else None,
    ),
)

NUMBER_METRICS = (
    Metric(
        "rmse",
        "RMSE",
        "Root mean square error of the label, in its own unit.",
        lambda of: of.scale * math.sqrt(of.squares / of.rows),
        line=".4g",
    ),
    Metric("r2", "R^2", "Fraction of the variance of the label that the network explains.", _explained, "R^2", ".4f"),
)

LABEL_METRICS = (*CLASS_METRICS, *NUMBER_METRICS)


def label_metrics(task: Task, counts: Sequence[Any]) -> dict[str, Any]:
    """Metrics of what was counted of a label, None where there is nothing to divide by; and how many are `known`.

    Args:
        counts: As of `label_loss.LabelMetrics`.
    """
    if task.label.classes:
        of_classes = ClassCounts(*np.array(counts))
        metrics = {metric.name: metric.value(of_classes) for metric in CLASS_METRICS}
        return {"known": int(of_classes.rows.sum()), **metrics}
    sums = NumberSums(task.scale, *counts)
    if not sums.rows > 0:  # nothing, or something that was too far off to be added
        return {"known": 0 if sums.rows == 0 else None, **{metric.name: None for metric in NUMBER_METRICS}}
    return {"known": int(sums.rows), **{metric.name: metric.value(sums) for metric in NUMBER_METRICS}}


def definitions() -> list[str]:
    """The table of docs/reference/files.md, line by line."""
    rows = [f"| `{of.name}` | {of.meaning} |" for of in (*EDGE_METRICS, *LABEL_METRICS)]
    return ["| metric | definition |", "| --- | --- |", *rows]
