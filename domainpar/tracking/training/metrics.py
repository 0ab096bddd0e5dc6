"""Metrics of edges and of labels, each declared once: all that writes, prints or draws metrics walks these tables.

What is counted is added over tiles, events and ranks, and divided once. Edges are counted against the candidate edges
*in the graph*. True segments that no candidate edge joins do not appear here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from domainpar.tracking.reco.performance.rates import ratio

if TYPE_CHECKING:  # torch comes with it; a report needs none
    from domainpar.tracking.training.tasks import Task

AGAINST = {False: "candidate edges", True: "candidate edges inside sectors (approximate: naive mode)"}
"""The edges that are counted: of whole events, or of independent sectors."""


@dataclass(frozen=True)
class Metric:
    """A metric: how it comes from counts, and how it is shown."""

    name: str  # in `metrics.jsonl`, event files, `scores.json` and printed lines
    heading: str  # in the tables of the report
    meaning: str  # a sentence for docs/reference/files.md, and for the captions and headings of the report
    # of the counts, `EdgeCounts` or those of `label_loss.LabelMetrics` (of numbers after their unit); None where there
    # is nothing to divide by
    value: Callable[..., float | None]
    axis: str = ""  # label of its chart in the report; empty for no chart
    line: str = ""  # format in the printed line of a step; empty: the metric is not in it
    mean: str = ""  # name in `scores.json` of the mean over events; empty: the metric is that of all events together


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


def _explained(_: float, rows: float, squares: float, labels: float, squares_of_labels: float) -> float | None:
    spread = squares_of_labels - labels * labels / rows
    return 1.0 - squares / spread if spread > 1e-9 * squares_of_labels else None  # else it is rounding


CLASS_METRICS = (
    Metric(
        "accuracy",
        "accuracy",
        "Fraction of the nodes or events with a known label that get the right class.",
        lambda found, rows: ratio(int(found.sum()), int(rows.sum())),
        axis="accuracy",
        line=".4f",
    ),
    Metric(
        "mean_accuracy",
        "mean of classes",
        "Mean of the accuracy over the classes that occur.",
        lambda found, rows: float((found[rows > 0] / rows[rows > 0]).mean()) if rows.any() else None,
    ),
)

NUMBER_METRICS = (
    Metric(
        "rmse",
        "RMSE",
        "Root mean square error of the label, in its own unit.",
        lambda scale, rows, squares, *_: scale * math.sqrt(squares / rows),
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
        found, rows = np.array(counts)
        return {"known": int(rows.sum()), **{metric.name: metric.value(found, rows) for metric in CLASS_METRICS}}
    number = counts[0]
    if not number > 0:  # nothing, or something that was too far off to be added
        return {"known": 0 if number == 0 else None, **{metric.name: None for metric in NUMBER_METRICS}}
    return {"known": int(number), **{metric.name: metric.value(task.scale, *counts) for metric in NUMBER_METRICS}}


def definitions() -> list[str]:
    """The table of docs/reference/files.md, line by line."""
    rows = [f"| `{of.name}` | {of.meaning} |" for of in (*EDGE_METRICS, *LABEL_METRICS)]
    return ["| metric | definition |", "| --- | --- |", *rows]
