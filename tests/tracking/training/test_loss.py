"""The loss is torch's weighted cross-entropy of the whole step, whatever parts it is computed in."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from counted_calls import calls_of
from other_machines import needs_x86, printed_on
from random_events import random_event
from tiled import TiledEvent, sha
from torch.nn import functional as F

from domainpar.parallel.integer_sums import IntegerSums, _add_tensors
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.training.loss import _over_arrays, _over_tensors, edge_loss

EVENTS = [TiledEvent.random(seed, 60, 300 + seed, num_tiles=7, reach=2) for seed in range(2)]


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
        gradient = edge_loss(z[..., ids], graph, w[ids], step_weight, loss_sum)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_loss_of_several_readouts_is_the_mean_of_theirs(num_ranks, dtype):
    logits, weights = step(dtype)
    readouts = [torch.stack([z, 0.5 * z, 1 - z]) for z in logits]
    each = [in_one_piece([z[row].double() for z in readouts], [w.double() for w in weights]) for row in range(3)]
    step_weight, bound = each[0][2], 1e-6 if dtype == torch.float32 else 1e-13
    for loss, rejected, found in run_ranks(_in_parts, num_ranks, readouts, weights, step_weight, "random"):
        assert (loss, rejected) == (pytest.approx(sum(loss for loss, *_ in each) / 3, rel=1e-13), 0)
        for number, (ids, gradient, _) in enumerate(found):
            whole = torch.stack([gradients[number] for _, gradients, _ in each]) / 3
            torch.testing.assert_close(gradient.double(), whole[:, ids], rtol=bound, atol=1e-16)


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


@pytest.mark.parametrize("weight", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [_over_arrays, _over_tensors])
def test_no_such_logit_passes_as_a_loss_whatever_its_label_and_weight(form, logit, label, weight):
    values = [torch.tensor([value], dtype=torch.float64) for value in (logit, weight)]
    of_tile = torch.tensor([label]), torch.tensor([0, 1]), torch.tensor([True])
    assert not form(*values, *of_tile)[1].isfinite()


def _bits(world, logits, weights, kind):
    """The loss, and the gradients of all local edges by event and edge."""
    loss, _, found = _in_parts(world, logits, weights, 100.0, kind)
    return loss, [dict(zip(ids.tolist(), gradient.tolist())) for ids, gradient, _ in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_and_every_gradient_have_the_same_bits_in_any_parts(dtype):
    logits, weights = step(dtype)
    ((expected, of_all),) = run_ranks(_bits, 1, logits, weights, "ranges")
    for num_ranks, kind in ((2, "ranges"), (3, "random"), (5, "random"), (3, "one part")):
        for loss, gradients in run_ranks(_bits, num_ranks, logits, weights, kind):
            assert loss == expected
            for of_edges, of_whole in zip(gradients, of_all, strict=True):
                assert of_edges.items() <= of_whole.items()


# --- one edge, one tile ----------------------------------------------------------------------------------------------


def drawn(count, seed=0):
    """Logits of all sizes, labels and weights."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=count) * 10.0 ** rng.uniform(-9, 3, count)
    some = [0.0, -0.0, 5e-324, 1e-300, 36.8, -36.8, 707.9, -708.1, 745.2, -1e30, 1e300]
    logits[: len(some)] = some[:count]
    label, weights = rng.integers(0, 2, count), rng.choice([1.0, 0.3, -2.5], count)
    return torch.from_numpy(logits), torch.from_numpy(label.astype(np.uint8)), torch.from_numpy(weights)


def each_alone(logits, label, weights, form=_over_arrays):
    """Gradient and loss of each edge, in a tile of its own."""
    count = len(logits)
    return form(logits, weights, label, torch.arange(count + 1), torch.ones(count, dtype=torch.bool))


def test_the_loss_of_an_edge_is_exact_to_some_units_in_the_last_place():
    logits, label, weights = drawn(20_000)
    z = logits.numpy().astype(np.longdouble)
    u = np.where((label.numpy() > 0) & (weights.numpy() >= 0), -z, z)
    small = np.exp(-abs(u))
    terms = np.maximum(u, 0) + np.log1p(small)
    slopes = np.where(u >= 0, 1, small) / (1 + small) * np.where(u == z, 1, -1)
    gradient, partials = each_alone(logits, label, weights)
    for found, exact in ((gradient, slopes), (partials, terms)):
        exact = (exact * abs(weights.numpy())).astype(np.float64)
        np.testing.assert_allclose(found, exact, rtol=5 * 2.0**-52, atol=1e-305)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 31, 64, 101])
def test_numbers_of_an_edge_do_not_depend_on_the_edges_beside_it(count):
    """Wherever it lies in a loop that takes several at once, and in what such a loop leaves over."""
    edges = drawn(200)
    gradient, terms = each_alone(*edges)
    for first in range(0, 200 - count, 7):
        rows = slice(first, first + count)
        ours, partials = each_alone(*(values[rows] for values in edges))
        assert torch.equal(ours, gradient[rows])
        assert torch.equal(partials, terms[rows])


def test_the_sum_of_a_tile_runs_in_stored_order():
    edges = drawn(1000)
    _, terms = each_alone(*edges)
    ptr = torch.tensor([0, 1, 7, 64, 600, 1000])
    owned = torch.tensor([True, True, False, True, True])
    _, partials = _over_arrays(edges[0], edges[2], edges[1], ptr, owned)
    expected = [0.0] * 5
    for tile in (0, 1, 3, 4):
        for term in terms[ptr[tile] : ptr[tile + 1]].tolist():
            expected[tile] += term
    assert partials.tolist() == expected


def test_the_form_for_other_devices_is_the_same_to_rounding():
    logits, label, weights = drawn(1000)
    logits = logits.clamp(-1e6, 1e6)
    for ptr, owned in (([0, 1000], [True]), ([0, 3, 400, 1000], [True, False, True]), ([0], [])):
        tiles = torch.tensor(ptr), torch.tensor(owned, dtype=torch.bool)
        edges = [values[: ptr[-1]] for values in (logits, weights, label)]
        for ours, theirs in zip(_over_arrays(*edges, *tiles), _over_tensors(*edges, *tiles), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


# --- in one call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "other"])
def test_the_loss_of_64_tiles_takes_as_many_calls_as_that_of_4(device, monkeypatch):
    if device == "other":
        monkeypatch.setattr("domainpar.tracking.training.loss._over_arrays", _over_tensors)
        monkeypatch.setattr("domainpar.parallel.integer_sums._add_arrays", _add_tensors)

    def of_tiles(num_tiles):
        event = TiledEvent.of(random_event(0, 200, 2000), np.arange(200) * num_tiles // 200, num_tiles)
        graph = event.part(World.alone().transport, event.grouping("ranges", 1)).graph
        assert len(graph.tiles.edges) == num_tiles
        logits, weights, loss_sum = torch.zeros(2000), torch.ones(2000), IntegerSums(1)
        edge_loss(logits, graph, weights, 2000.0, loss_sum)  # compiled
        fresh = replace(graph, tiles=replace(graph.tiles))  # nothing found out before
        return calls_of(lambda: edge_loss(logits, fresh, weights, 2000.0, loss_sum))

    assert of_tiles(64) == of_tiles(4)


# --- on another machine ----------------------------------------------------------------------------------------------


def hash_of_drawn():
    return hashlib.sha256(sha(*each_alone(*drawn(5000))).encode()).hexdigest()


WITHOUT_MULTIPLY_ADD = """
import test_loss
from domainpar.tracking.training.loss import _over_edges
print(test_loss.hash_of_drawn())
print(*("ymm" in code for code in _over_edges.inspect_asm().values()))
"""


@needs_x86
@pytest.mark.slow
def test_the_loss_has_the_same_bits_on_a_machine_with_other_instructions(tmp_path):
    machine, folder = "of 128 bits, no multiply-add", Path(__file__).parent
    assert printed_on(machine, WITHOUT_MULTIPLY_ADD, folder, tmp_path) == [hash_of_drawn(), "False"]
