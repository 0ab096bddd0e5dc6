"""Losses and metrics of labels are those of torch's formulas, and the bits of a row do not depend on other rows."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from domainpar.parallel.integer_sums import IntegerSums
from domainpar.testing import run_ranks
from domainpar.tracking.events.labels import Label
from domainpar.tracking.training import label_loss as module
from domainpar.tracking.training.label_loss import LabelMetrics, label_loss
from domainpar.tracking.training.metrics import label_metrics
from domainpar.tracking.training.tasks import Task

KIND, ENERGY = Task(Label("kind", "node", 5), 0.5), Task(Label("energy", "node", 0), 1.0, mean=3.0, scale=4.0)


def said_and_labels(task, rows=200, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    said = 4 * torch.randn(rows, task.head.columns, generator=generator).to(dtype)
    if task.label.classes:
        labels = torch.randint(-1, task.label.classes, (rows,), generator=generator).double()
    else:
        labels = torch.randn(rows, generator=generator).double()
        labels[torch.rand(rows, generator=generator) < 0.2] = torch.nan
    return said, labels


def loss_and_gradient(task, said, labels, divisor=7.0, counts=True):
    sums = IntegerSums(2)
    gradient = label_loss(said, labels, task, divisor, counts, sums, 1)
    assert sums.rejected == 0
    return sums.total()[1].item(), gradient


@pytest.mark.parametrize("on_tensors", [False, True])
@pytest.mark.parametrize("task", [KIND, ENERGY], ids=lambda task: task.name)
def test_losses_and_gradients_are_those_of_torch(monkeypatch, task, on_tensors):
    said, labels = said_and_labels(task, dtype=torch.float64)
    if on_tensors:  # what a GPU computes
        for form in ("_cross_entropy", "_squares"):
            monkeypatch.setattr(module, form, lambda rows, labels, gradient, terms: _as_on_gpu(task, rows, labels, gradient, terms))  # fmt: skip # noqa: E501
    loss, gradient = loss_and_gradient(task, said, labels)
    told = said.clone().requires_grad_()
    if task.label.classes:
        known = labels >= 0
        expected = F.cross_entropy(told[known], labels[known].long(), reduction="sum") / 7.0
    else:
        known = labels.isfinite()
        expected = F.mse_loss(told[known, 0], labels[known], reduction="sum") / 7.0
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, told.grad, rtol=1e-12, atol=1e-15)
    assert not gradient[~known].any()


def _as_on_gpu(task, rows, labels, gradient, terms):
    found = module._over_tensors(torch.from_numpy(rows), torch.from_numpy(labels), bool(task.label.classes))
    gradient[:], terms[:] = (table.numpy() for table in found)


@pytest.mark.parametrize("task", [KIND, ENERGY], ids=lambda task: task.name)
def test_the_bits_of_a_row_are_its_own(task):
    said, labels = said_and_labels(task)
    _, whole = loss_and_gradient(task, said, labels)
    for rows in (slice(3, 4), slice(5, 50), slice(101, 200)):
        _, part = loss_and_gradient(task, said[rows], labels[rows])
        assert torch.equal(part, whole[rows])


def test_a_graph_counts_once_and_has_its_gradient_on_every_rank():
    task = Task(Label("jet", "graph", 3))
    said, label = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0], dtype=torch.float64)
    loss, gradient = loss_and_gradient(task, said, label, 1.0)
    assert gradient.shape == (3,)
    assert loss == pytest.approx(F.cross_entropy(said.double()[None], torch.tensor([1])).item(), rel=1e-12)
    none, same = loss_and_gradient(task, said, label, 1.0, counts=False)
    assert none == 0
    assert torch.equal(same, gradient)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("task", [KIND, ENERGY], ids=lambda task: task.name)
def test_what_is_not_finite_is_counted_and_not_added(task, spoilt):
    said, labels = said_and_labels(task)
    row = int((labels >= 0 if task.label.classes else labels.isfinite()).nonzero()[2])
    for column in range(task.head.columns):
        wrong = said.clone()
        wrong[row, column] = spoilt
        sums = IntegerSums(1)
        label_loss(wrong, labels, task, 7.0, True, sums, 0)
        assert sums.rejected == 1


@pytest.mark.parametrize("task", [KIND, ENERGY], ids=lambda task: task.name)
@pytest.mark.parametrize("ranks", [1, 3])
def test_metrics_are_those_of_their_definitions_on_any_number_of_ranks(task, ranks):
    said, labels = (table.numpy() for table in said_and_labels(task, dtype=torch.float64))

    def counted(world):
        metrics = LabelMetrics(task)
        metrics.add(said[world.rank :: world.size], labels[world.rank :: world.size])
        metrics.reduce(world.transport)
        return label_metrics(task, metrics.counts)

    found = run_ranks(counted, ranks)
    assert all(figures == found[0] for figures in found)
    if task.label.classes:
        known = labels >= 0
        right = said[known].argmax(1) == labels[known]
        of_classes = [right[labels[known] == kind].mean() for kind in range(5)]
        expected = {"known": known.sum(), "accuracy": right.mean(), "mean_accuracy": np.mean(of_classes)}
    else:
        known = np.isfinite(labels)
        off, truth = 4 * (said[known, 0] - labels[known]), 4 * labels[known] + 3
        rmse, r2 = np.sqrt(np.mean(off**2)), 1 - np.sum(off**2) / np.sum((truth - truth.mean()) ** 2)
        expected = {"known": known.sum(), "rmse": rmse, "r2": r2}
    assert found[0] == {name: pytest.approx(value, rel=1e-9) for name, value in expected.items()}


def test_without_a_label_there_is_nothing_to_divide_by():
    assert label_metrics(KIND, LabelMetrics(KIND).counts) == {"known": 0, "accuracy": None, "mean_accuracy": None}
    assert label_metrics(ENERGY, LabelMetrics(ENERGY).counts) == {"known": 0, "rmse": None, "r2": None}
    far = LabelMetrics(ENERGY)
    far.add(np.array([[1e30]]), np.zeros(1))
    assert label_metrics(ENERGY, far.counts) == {"known": None, "rmse": None, "r2": None}
