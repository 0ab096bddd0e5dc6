"""What the benchmark puts in the place of a rule computes the same to rounding, and is gone afterwards."""

import numpy as np
import pytest
import torch
import without_rules
from without_rules import RULES, without

from domainpar.nn import blocks, products, tilewise


def _drawn(*shape):
    return np.random.default_rng(sum(shape)).random(shape) - 0.5


@pytest.mark.parametrize("add", [False, True])
def test_the_products_of_the_library_are_ours_to_rounding(add):
    rows, weight, gradient = _drawn(40, 19), _drawn(19, 32), _drawn(40, 32)
    ours, theirs = np.ones((2, 40, 32))
    products.multiply(rows, 3, 30, weight, ours, 7, add)
    without_rules.library_multiply(rows, 3, 30, weight, theirs, 7, add)
    np.testing.assert_allclose(theirs, ours, rtol=1e-12, atol=1e-14)
    ours, theirs = np.ones((2, 19, 32))
    products.outer(rows, 3, gradient, 7, 30, ours)
    without_rules.library_outer(rows, 3, gradient, 7, 30, theirs)
    np.testing.assert_allclose(theirs, ours, rtol=1e-12, atol=1e-14)


def test_without_our_own_products_the_library_makes_those_of_nodes_and_of_blocks_and_ours_come_back():
    with without(["own products"]):
        for module in (blocks, tilewise):
            assert module.multiply is without_rules.library_multiply
            assert module.outer is without_rules.library_outer
    for module in (blocks, tilewise):
        assert module.multiply is products.multiply
        assert module.outer is products.outer


@pytest.mark.parametrize("rule", RULES)
def test_all_that_a_rule_replaces_is_there_to_be_replaced(rule):
    with without([rule]):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_total_of_floats_stays_when_they_are_cleared(dtype):
    sums = without_rules.FloatSums(2)
    sums.add(torch.ones(2, dtype=dtype))
    sums.add_rows(torch.tensor([[2.0], [3.0]], dtype=dtype), 1)
    total = sums.total()
    sums.clear()
    assert total.tolist() == [1, 6]
