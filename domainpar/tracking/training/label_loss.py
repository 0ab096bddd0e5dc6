"""Loss and metrics of labels: cross-entropy of classes, squares of numbers, over all known labels, divided once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from domainpar.common.compiling import compiled
from domainpar.common.problems import Problem
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.transport import Transport
from domainpar.tracking.events.graph import Array
from domainpar.tracking.events.store import StoredEvent
from domainpar.tracking.training.loss import LN2, exp_of, log1p_of
from domainpar.tracking.training.tasks import Task

FloatArray = npt.NDArray[np.float64]
FAR = 2.0**-20
"""Factor of what is summed exactly, a power of two: numbers that are millions of deviations off can still be added."""


def label_loss(
    output: Tensor, labels: Tensor, task: Task, divisor: float, counts: bool, add: IntegerSums, at: int
) -> Tensor:
    """Add the loss of some labels to a sum, and return its gradient.

    Args:
        output: That of the network: of nodes [n, columns], of the graph [columns].
        labels: Of these, float64 [n], or [1] of the graph: classes, or numbers as the network is to say them.
        divisor: Known labels of the step, over all events and ranks, over the weight of the task.
        counts: Whether this rank counts them: each its own nodes, one of those that share a graph its label.
        add: Where losses are summed.
        at: The place of this one.

    Returns:
        d loss / d output, of its shape.
    """
    rows = output.detach().reshape(-1, task.head.columns).to(torch.float64).contiguous()
    if rows.is_cuda:
        gradient, terms = _over_tensors(rows, labels, bool(task.label.classes))
    else:
        gradient, terms = torch.empty_like(rows), torch.empty(len(rows), dtype=torch.float64)
        form = _cross_entropy if task.label.classes else _squares
        form(rows.numpy(), labels.numpy(), gradient.numpy(), terms.numpy())
    if counts:
        add.add_rows(terms[:, None] / divisor, at)
    return (gradient / divisor).to(output.dtype).view_as(output)


def _over_tensors(rows: Tensor, labels: Tensor, of_classes: bool) -> tuple[Tensor, Tensor]:
    """Gradient of each row and its loss, not divided yet; on any device, to rounding."""
    if not of_classes:
        known = labels.isfinite()
        off = torch.where(known, rows[:, 0] - labels, 0.0)
        return 2 * off[:, None], off.square()
    known, right = labels >= 0, labels.clamp_min(0).to(torch.int64)
    terms = torch.where(known, F.cross_entropy(rows, right, reduction="none"), 0.0)
    slopes = torch.softmax(rows, 1) - F.one_hot(right, rows.shape[1])
    return torch.where(known[:, None], slopes, 0.0), terms


@compiled
def _cross_entropy(rows: Any, labels: Any, gradient: Any, terms: Any) -> None:
    """Cross-entropy of the right class of each row, and its gradient; 0 where no class is known.

    A row's numbers are functions of that row alone, to the last bit: sums, products and quotients, one at a time.
    """
    for i in range(len(rows)):
        terms[i] = 0.0
        for c in range(rows.shape[1]):
            gradient[i, c] = 0.0
        if not labels[i] >= 0:
            continue
        largest, of_all = rows[i, 0], 0.0
        for c in range(rows.shape[1]):
            largest = max(largest, rows[i, c])
            of_all += 0.0 * rows[i, c]  # what is not finite, is an error
        total = 0.0
        for c in range(rows.shape[1]):
            gradient[i, c] = exp_of(rows[i, c] - largest)
            total += gradient[i, c]
        right = int(labels[i])
        terms[i] = largest - rows[i, right] + _log(total) + of_all
        for c in range(rows.shape[1]):
            gradient[i, c] = gradient[i, c] / total + of_all
        gradient[i, right] -= 1.0


@compiled
def _log(x: Any) -> Any:
    """log(x) of x in [1, 2^52], to some units in the last place."""
    twos = 0
    while x >= 2.0:
        x, twos = 0.5 * x, twos + 1
    return twos * LN2[0] + (twos * LN2[1] + log1p_of(x - 1.0))


@compiled
def _squares(rows: Any, labels: Any, gradient: Any, terms: Any) -> None:
    """Square of what each row is off, and its gradient; 0 where no number is known."""
    for i in range(len(rows)):
        off = rows[i, 0] - labels[i] if labels[i] == labels[i] else 0.0
        gradient[i, 0], terms[i] = 2.0 * off, off * off


class LabelMetrics:
    """Counts how often labels were right, over everything that is added on any rank.

    Of classes: rows of a class found right, and all rows of it. Of numbers: rows, and sums of the squares of what they
    are off, of the labels, and of their squares, as the network predicts them.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._classes = torch.zeros(2, task.label.classes, dtype=torch.int64)
        self._numbers = IntegerSums(4)

    @property
    def counts(self) -> list[Any]:
        """What was counted, as plain numbers, which can be added to those of other events."""
        if self.task.label.classes:
            return list(self._classes.tolist())
        return [math.nan] * 4 if self._numbers.rejected else list((self._numbers.total() / FAR).tolist())

    def add(self, output: FloatArray, labels: FloatArray) -> None:
        """Count predictions of some rows, [n, columns], given their true labels, [n]."""
        if self.task.label.classes:
            known = labels >= 0
            right, guess = labels[known].astype(np.int64), output[known].argmax(axis=1)
            count = self.task.label.classes
            for row, classes in enumerate((right[right == guess], right)):
                self._classes[row] += torch.from_numpy(np.bincount(classes, minlength=count))
        else:
            known = np.isfinite(labels)
            numbers, off = labels[known], output[known, 0] - labels[known]
            columns = np.stack([np.ones(len(off)), off * off, numbers, numbers * numbers], axis=1) * FAR
            self._numbers.add_rows(torch.from_numpy(columns))

    def reduce(self, transport: Transport) -> None:
        """Add up what all ranks have counted; once. *Collective*."""
        transport.all_reduce(self._classes)
        self._numbers.reduce(transport)


def count_labels(event: StoredEvent, readings: Mapping[str, Array], tasks: Sequence[Task]) -> dict[str, list[Any]]:
    """Counts of the predicted labels of a whole event, in the order of its source, by name.

    Those that the event does not have, or of which it has classes that the network does not know, are left out.
    """
    counts = {}
    ids = event.ids_in_users_order()
    for task in tasks:
        with suppress(Problem):
            metrics = LabelMetrics(task)
            metrics.add(readings[task.name].reshape(-1, task.head.columns).astype(np.float64), task.labels(event, ids))
            counts[task.name] = metrics.counts
    return counts
