"""The loss is torch's weighted cross-entropy of the whole step, whatever parts it is computed in."""

import numpy as np
import pytest
import torch
from tiled import TiledEvent
from torch.nn import functional as F

from domainpar.parallel.integer_sums import IntegerSums
from domainpar.testing import run_ranks
from domainpar.training.loss import edge_loss

EVENTS = [TiledEvent.random(seed, 60, 300 + seed, num_tiles=7) for seed in range(2)]


def step(dtype=torch.float64):
    """Logits and weights of all edges of both events in global order; a third weighs nothing."""
    rng = np.random.default_rng(0)
    counts = [event.graph.edge_index.shape[1] for event in EVENTS]
    logits = [torch.from_numpy(rng.normal(0, 3, count)).to(dtype) for count in counts]
    weights = [torch.from_numpy(rng.choice([0.0, 0.7, 3.0], count)).to(dtype) for count in counts]
    return logits, weights


def labels(event):
    return torch.from_numpy(event.graph.label[event.order.original_position])


def in_one_piece(logits, weights):
    """Loss and its gradients by torch alone."""
    z = [one.clone().requires_grad_() for one in logits]
    step_weight = sum(float(one.sum()) for one in weights)
    every_label = torch.cat([labels(event).to(z[0].dtype) for event in EVENTS])
    summed = F.binary_cross_entropy_with_logits(torch.cat(z), every_label, weight=torch.cat(weights), reduction="sum")
    loss = summed / step_weight
    loss.backward()
    return float(loss.detach()), [one.grad for one in z], step_weight


def _in_parts(world, logits, weights, step_weight, kind):
    loss_sum, found = IntegerSums(1), []
    for event, z, w in zip(EVENTS, logits, weights, strict=True):
        graph = event.part(world.transport, event.grouping(kind, world.size), z.dtype).graph
        ids = torch.from_numpy(graph.plan.edge_ids)
        gradient = edge_loss(z[ids], graph, w[ids], step_weight, loss_sum)
        found.append((ids, gradient, torch.from_numpy(graph.plan.edge_owned)))
    loss_sum.reduce(world.transport)
    return float(loss_sum.total()), loss_sum.rejected, found


@pytest.mark.parametrize("kind", ["ranges", "random", "one part"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_loss_and_gradient_are_torchs_in_one_piece(num_ranks, kind):
    logits, weights = step()
    expected, gradients, step_weight = in_one_piece(logits, weights)
    for loss, rejected, found in run_ranks(_in_parts, num_ranks, logits, weights, step_weight, kind):
        assert (loss, rejected) == (pytest.approx(expected, rel=1e-13), 0)
        for (ids, gradient, _), whole in zip(found, gradients, strict=True):
            torch.testing.assert_close(gradient, whole[ids], rtol=1e-13, atol=1e-16)


def test_every_edge_is_counted_once_though_cut_edges_have_two_copies():
    logits, weights = step()
    *_, step_weight = in_one_piece(logits, weights)
    found = [found for _, _, found in run_ranks(_in_parts, 3, logits, weights, step_weight, "random")]
    for number, event in enumerate(EVENTS):
        copies = np.concatenate([ids.numpy() for ids, _, _ in (rank[number] for rank in found)])
        owned = np.concatenate([ids[mine].numpy() for ids, _, mine in (rank[number] for rank in found)])
        assert len(copies) > event.graph.edge_index.shape[1]
        assert np.array_equal(np.sort(owned), np.arange(event.graph.edge_index.shape[1]))


def test_the_loss_of_a_step_is_no_mean_of_the_losses_of_its_events():
    logits, weights = step()
    weights[1] *= 5
    expected, _, step_weight = in_one_piece(logits, weights)
    (loss, _, _), *_ = run_ranks(_in_parts, 2, logits, weights, step_weight, "ranges")
    each = [
        float(F.binary_cross_entropy_with_logits(z, labels(event).double(), weight=w, reduction="sum") / w.sum())
        for event, z, w in zip(EVENTS, logits, weights, strict=True)
    ]
    assert loss == pytest.approx(expected, rel=1e-13)
    assert abs(loss - sum(each) / 2) > 1e-3


def test_float32_is_the_same_to_rounding_and_keeps_very_sure_answers_finite():
    logits, weights = step(torch.float32)
    logits[0][:4] = torch.tensor([200.0, -200.0, 1e30, -1e30])
    weights[0][:4] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    *_, step_weight = in_one_piece(logits, weights)
    exact, gradients, _ = in_one_piece([z.double() for z in logits], [w.double() for w in weights])
    (loss, rejected, found), *_ = run_ranks(_in_parts, 2, logits, weights, step_weight, "ranges")
    assert (loss, rejected) == (pytest.approx(exact, rel=1e-6), 0)
    for (ids, gradient, _), whole in zip(found, gradients, strict=True):
        torch.testing.assert_close(gradient.double(), whole[ids], rtol=1e-5, atol=1e-9)


def test_a_logit_that_is_not_finite_is_told_by_every_rank():
    logits, weights = step()
    logits[1][5], weights[1][5] = float("nan"), 1.0
    for _, rejected, _ in run_ranks(_in_parts, 3, logits, weights, 100.0, "random"):
        assert rejected == 1
