"""The self-test passes on this machine and finds a perceptron whose rows depend on each other."""

import inspect
import threading

import numpy as np
import pytest
import torch
from torch import nn

from domainpar.nn import blocks, products, selftest
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.mlp import MLP
from domainpar.nn.selftest import rows_are_independent
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.testing import run_ranks

A_BIT = 1 + 2.0**-20
KINDS = {
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "bfloat16 edges": {"products": torch.bfloat16},
}


@pytest.fixture
def use(monkeypatch):
    """Put another product in the place of ours."""

    def use(multiply):
        for module in (blocks, selftest):
            monkeypatch.setattr(module, "multiply", multiply)

    return use


@pytest.fixture
def goes_back(monkeypatch):
    """Whether a weight is one that gradients are multiplied with."""
    plain, backs = blocks._weight, []

    def weight(*given):
        made = plain(*given)
        backs.append(made.back)
        return made

    monkeypatch.setattr(blocks, "_weight", weight)
    return lambda weight: any(weight is back for back in backs)


def _self_test(world, model):
    return rows_are_independent(model, world.transport)


def _network(order="edge-first", **flags):
    return InteractionNetwork(3, 6, hidden=16, graph_iters=2, order=order, **flags)


@pytest.mark.parametrize("order", ["edge-first", "node-first"])
@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_this_machine_keeps_rows_apart(flags, order):
    assert run_ranks(_self_test, 2, _network(order, **flags)) == [None, None]


def test_stages_of_other_shapes_are_tried_too():
    generator = torch.Generator().manual_seed(0)
    perceptrons = [MLP(21, (48,), generator), MLP(7, (5,), generator, True), MLP(64, (5,), generator, True),
                   MLP(40, (16, 32, 16), generator), MLP(32, (16,), generator)]  # fmt: skip
    stages = [stage(mlp) for mlp in perceptrons for stage in (EdgeStage, NodeStage)]
    assert run_ranks(_self_test, 1, nn.ModuleList(stages)) == [None]
    assert run_ranks(_self_test, 1, nn.ModuleList()) == [None]


def _product_that_leaks(where):
    """As that of a library that takes another kernel for many rows."""

    def multiply(rows, first, count, weight, out, out_first, add):
        products.multiply(rows, first, count, weight, out, out_first, add)
        if count > 900 and where(rows, weight):
            out[out_first : out_first + count] *= 1.01 if rows.dtype == np.uint16 else A_BIT

    return multiply


def _everywhere(rows, weight):
    return True


# Weights of node states at both ends are twice as wide as the others, of a network of 16 columns.
IN_PRODUCTS = {
    "all": (_everywhere, None, "float32"),
    "all, float64": (_everywhere, None, "float64"),
    "back only": (_everywhere, "backward", "float32"),
    "of node states": (lambda rows, weight: weight.shape == (16, 32), "forward", "float32"),
    "of node states, back": (lambda rows, weight: weight.shape == (32, 16), "backward", "float32"),
    "of bfloat16": (lambda rows, weight: rows.dtype == np.uint16, "forward", "bfloat16 edges"),
    "of bfloat16, back": (lambda rows, weight: rows.dtype == np.uint16, "backward", "bfloat16 edges"),
}


@pytest.mark.parametrize(("where", "direction", "kind"), IN_PRODUCTS.values(), ids=IN_PRODUCTS)
def test_products_whose_rows_depend_on_their_company_are_found(use, goes_back, where, direction, kind):
    def there(rows, weight):
        return where(rows, weight) and (direction is None or goes_back(weight) == (direction == "backward"))

    use(_product_that_leaks(there))
    problems = run_ranks(_self_test, 3, _network(**KINDS[kind]))
    assert len(set(problems)) == 1
    found = f" block change with the other rows of the block ({direction or 'forward'}, 1 of 1000 rows)"
    assert found in problems[0]


def _neighbour_leaks(rows, first, count, weight, out, out_first, add):
    """Each row of an aligned group of 32 feels the last one of it."""
    products.multiply(rows, first, count, weight, out, out_first, add)
    for begin in range(out_first, out_first + count, 32):
        group = out[begin : min(begin + 32, out_first + count)]
        group[:-1] += 1e-4 * group[-1:]


def test_products_whose_rows_depend_on_their_neighbours_are_found(use):
    use(_neighbour_leaks)
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


def _on_rank_1_only(other):
    def multiply(*product):
        (other if threading.current_thread().name == "rank 1" else products.multiply)(*product)

    return multiply


def _everything_a_bit_more(rows, first, count, weight, out, out_first, add):
    products.multiply(rows, first, count, weight, out, out_first, add)
    out[out_first : out_first + count] *= A_BIT


def test_ranks_that_compute_other_bits_are_found_and_all_are_told(use):
    use(_on_rank_1_only(_everything_a_bit_more))
    problems = run_ranks(_self_test, 3, _network())
    expected = "ranks compute different bits from the same numbers: their machines or numba versions differ"
    assert problems == [expected] * 3


def test_ranks_whose_sums_over_rows_differ_are_found_although_all_rows_agree(monkeypatch):
    plain = blocks.TileGradients.add_product

    def other(self, layer, *given):
        plain(self, layer, *given)
        if threading.current_thread().name == "rank 1":
            self._of_weights[layer][-1].mul_(A_BIT)

    monkeypatch.setattr(blocks.TileGradients, "add_product", other)
    assert "ranks compute different bits from the same numbers" in run_ranks(_self_test, 2, _network())[0]


def test_one_rank_with_broken_products_is_reason_enough(use):
    use(_on_rank_1_only(_product_that_leaks(_everywhere)))
    problems = run_ranks(_self_test, 3, _network())
    assert len(set(problems)) == 1
    assert "does not keep rows apart" in problems[0]
