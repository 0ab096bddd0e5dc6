"""The self-test passes on this machine and finds a perceptron whose rows depend on each other."""

import inspect
import threading

import pytest
import torch
from torch import nn

from domainpar.nn import blocks, products
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.mlp import MLP
from domainpar.nn.selftest import rows_are_independent
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.testing import run_ranks

PLAIN_MM = torch.mm
A_BIT = 1 + 2.0**-20
KINDS = {
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "bfloat16 edges": {"products": torch.bfloat16},
}


@pytest.fixture
def by_mm(monkeypatch):
    """All products by `torch.mm`, which these tests break."""
    monkeypatch.setattr(products, "HAS_ONEDNN", False)


def _self_test(world, model):
    return rows_are_independent(model, world.transport)


def _network(order="edge-first", **flags):
    return InteractionNetwork(3, 6, hidden=16, graph_iters=2, order=order, **flags)


@pytest.mark.parametrize("onednn", [products.HAS_ONEDNN, False])
@pytest.mark.parametrize("order", ["edge-first", "node-first"])
@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_this_machine_keeps_rows_apart(flags, order, onednn, monkeypatch):
    monkeypatch.setattr(products, "HAS_ONEDNN", onednn)
    assert run_ranks(_self_test, 2, _network(order, **flags)) == [None, None]


def test_stages_of_other_shapes_are_tried_too():
    generator = torch.Generator().manual_seed(0)
    perceptrons = [MLP(21, (48,), generator), MLP(7, (5,), generator, True), MLP(64, (5,), generator, True),
                   MLP(40, (16, 32, 16), generator), MLP(32, (16,), generator)]  # fmt: skip
    stages = [stage(mlp) for mlp in perceptrons for stage in (EdgeStage, NodeStage)]
    assert run_ranks(_self_test, 1, nn.ModuleList(stages)) == [None]
    assert run_ranks(_self_test, 1, nn.ModuleList()) == [None]


def _leak(rows):
    """As a library that takes another kernel for many rows."""
    if len(rows) > 900:
        rows.mul_(1.01 if rows.dtype == torch.bfloat16 else A_BIT)
    return rows


def _mm_that_leaks(where):
    def mm(operand, weight, out=None):
        found = PLAIN_MM(operand, weight, out=out)
        return _leak(found) if where(operand, weight) else found

    return mm


def _goes_back(operand, weight):
    return weight.is_contiguous()


# Weights of node states at both ends are twice as high as the others, of a network of 16 columns.
IN_PRODUCTS = {
    "all": (lambda *product: True, "forward", "float32"),
    "all, float64": (lambda *product: True, "forward", "float64"),
    "back only": (_goes_back, "backward", "float32"),
    "of node states": (lambda operand, weight: weight.shape == (16, 32), "forward", "float32"),
    "of node states, back": (lambda operand, weight: weight.shape == (32, 16), "backward", "float32"),
    "of bfloat16": (lambda operand, weight: operand.dtype == torch.bfloat16, "forward", "bfloat16 edges"),
    "of bfloat16, back": (
        lambda operand, weight: operand.dtype == torch.bfloat16 and _goes_back(operand, weight),
        "backward",
        "bfloat16 edges",
    ),
}


@pytest.mark.parametrize(("where", "direction", "kind"), IN_PRODUCTS.values(), ids=IN_PRODUCTS)
def test_products_whose_rows_depend_on_their_company_are_found(by_mm, monkeypatch, where, direction, kind):
    monkeypatch.setattr(torch, "mm", _mm_that_leaks(where))
    problems = run_ranks(_self_test, 3, _network(**KINDS[kind]))
    assert len(set(problems)) == 1
    assert f" block change with the other rows of the block ({direction}, 1 of 1000 rows)" in problems[0]


def _neighbour_leaks(operand, weight, out=None):
    """Each row of an aligned group of 32 feels the last one of it."""
    found = PLAIN_MM(operand, weight, out=out)
    groups = found.view(-1, 32, found.shape[1])
    groups[:, :-1] += 1e-4 * groups[:, -1:]
    return found


def test_products_whose_rows_depend_on_their_neighbours_are_found(by_mm, monkeypatch):
    monkeypatch.setattr(torch, "mm", _neighbour_leaks)
    assert "(forward, 1 of 1000 rows)" in run_ranks(_self_test, 1, _network())[0]


KERNELS = {"norm_forward": "forward", "norm_backward": "backward"}


@pytest.mark.parametrize("cause", ["company", "place"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_whose_rows_depend_on_their_company_or_place_are_found(monkeypatch, kernel, cause):
    plain = getattr(blocks, kernel)
    names = list(inspect.signature(plain.py_func).parameters)

    def leaking(*given):
        plain(*given)
        here = dict(zip(names, given))
        if here["count"] > 900 if cause == "company" else here["first"] % 2:
            here["out"][:] *= A_BIT

    monkeypatch.setattr(blocks, kernel, leaking)
    assert f"({KERNELS[kernel]}, 1 of 1000 rows)" in run_ranks(_self_test, 1, _network())[0]


def _on_rank_1_only(leaking):
    def mm(*product, out=None):
        return (leaking if threading.current_thread().name == "rank 1" else PLAIN_MM)(*product, out=out)

    return mm


def test_ranks_that_compute_other_bits_are_found_and_all_are_told(by_mm, monkeypatch):
    def other(*product, out=None):
        return PLAIN_MM(*product, out=out).mul_(A_BIT)

    monkeypatch.setattr(torch, "mm", _on_rank_1_only(other))
    problems = run_ranks(_self_test, 3, _network())
    assert (
        problems
        == ["ranks compute different bits from the same numbers: their machines or matrix libraries differ"] * 3
    )


def test_ranks_whose_sums_over_rows_differ_are_found_although_all_rows_agree(monkeypatch):
    plain = blocks.TileGradients.add_product

    def other(self, layer, gradient, operand):
        plain(self, layer, gradient, operand)
        if threading.current_thread().name == "rank 1":
            self._of_weights[layer][-1].mul_(A_BIT)

    monkeypatch.setattr(blocks.TileGradients, "add_product", other)
    assert "ranks compute different bits from the same numbers" in run_ranks(_self_test, 2, _network())[0]


def test_one_rank_with_a_broken_library_is_reason_enough(by_mm, monkeypatch):
    monkeypatch.setattr(torch, "mm", _on_rank_1_only(_mm_that_leaks(lambda *product: True)))
    problems = run_ranks(_self_test, 3, _network())
    assert len(set(problems)) == 1
    assert "does not keep rows apart" in problems[0]
