"""What the benchmark puts in the place of a rule computes the same to rounding, and is gone afterwards."""

import networks
import numpy as np
import pytest
import torch
import without_rules
from one_operation import multiply, outer
from random_events import random_event
from tiled import TiledEvent
from without_rules import RULES, without

from domainpar.nn import operations


def _drawn(*shape, dtype=np.float64):
    return (np.random.default_rng(sum(shape)).random(shape) - 0.5).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("add", [False, True])
def test_the_products_of_the_library_are_ours_to_rounding(add, dtype):
    rows, weight, gradient = (_drawn(*shape, dtype=dtype) for shape in ((40, 19), (19, 32), (40, 32)))
    made = np.ones((2, 40, 32), dtype)
    of_weight = np.ones((2, 19, 32), dtype)
    for rules, product, of_rows in zip(([], ["own products"]), made, of_weight):
        with without(rules):
            multiply(rows, 30, weight, product, add)
            outer(rows, gradient, 30, of_rows)
    for ours, theirs in (made, of_weight):
        np.testing.assert_allclose(theirs, ours, rtol=1e-4 if dtype == np.float32 else 1e-12, atol=1e-5)
        assert np.abs(theirs - 1).max() > 0.1


def test_without_our_own_products_the_library_makes_all_and_ours_come_back():
    ours = operations.multiply_rows, operations.outer_of_rows
    with without(["own products"]):
        assert operations.multiply_rows is without_rules.library_rows
        assert operations.outer_of_rows is without_rules.library_outer
    assert (operations.multiply_rows, operations.outer_of_rows) == ours


EVENT = TiledEvent.of(random_event(3, 400, 4000, reach=8), np.arange(400) * 12 // 400, 12)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "loss by tiles"])
def test_a_network_without_a_rule_is_the_same_to_rounding(rule):
    """And other bits: something was replaced."""
    expected = networks.on_ranks(EVENT, 2, dtype=torch.float64, graph_iters=2)
    with without([rule]):
        found = networks.on_ranks(EVENT, 2, dtype=torch.float64, graph_iters=2, copies_agree=False)
    assert networks.distance(found, expected) < 1e-9
    # The products of some libraries are chains of multiply-adds too.
    assert found.sha != expected.sha or rule == "own products"


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


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_sums_of_floats_over_tiles_keep_their_type(kind):
    sums = without_rules.FloatSums(3)
    tenths = torch.full((2,), 0.1, dtype=kind).double().numpy()
    sums.add_limbs(np.stack([tenths, 0 * tenths]).view(np.int64), 0, 1)
    assert sums._sums.dtype == kind
    sums.add_limbs(np.zeros((2, 3), np.int64), 0)
    assert sums._sums.dtype == kind
    assert sums.total().tolist() == [0, *tenths]
