"""Integer sums: the same bits in any order, and right."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from domainpar.parallel import integer_sums
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.testing import run_ranks


def _summed(partials):
    sums = IntegerSums(len(partials[0]))
    for partial in partials:
        sums.add(partial)
    return sums


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-12, 7))
def test_any_order_gives_the_same_bits_and_the_exact_sum(seed, exponent):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(50, 3)) * 10.0**exponent * 10 ** rng.uniform(-3, 0, (50, 3))
    partials = [torch.from_numpy(row) for row in values]
    forward = _summed(partials).total()
    assert torch.equal(forward, _summed([partials[i] for i in rng.permutation(50)]).total())
    exact = np.array([math.fsum(column) for column in values.T])
    np.testing.assert_allclose(forward.numpy(), exact, rtol=1e-15, atol=50 * 2.0**-73)


def test_floats_alone_would_not_do():
    """The test above can fail: plain float sums of such numbers depend on the order."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(size=(50, 3)))
    orders = {sum(values[rng.permutation(50)]).numpy().tobytes() for _ in range(5)}
    assert len(orders) > 1


def test_limbs_carry_before_they_overflow():
    """The low limb of -2^-21 is the largest there is; 2^13 of them would wrap around without carrying."""
    count, worst = 2**13, torch.tensor([-(2.0**-21), 2.0**-21, 0.75 + 2.0**-21], dtype=torch.float64)
    np.testing.assert_array_equal(_summed([worst] * count).total(), count * worst)


def test_without_carrying_they_would_overflow(monkeypatch):
    monkeypatch.setattr(integer_sums, "CARRY_EVERY", 2**40)
    worst = torch.tensor([2.0**-21 * 0.999], dtype=torch.float64)
    assert float(_summed([worst] * 2**13).total()) != pytest.approx(2**13 * float(worst))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**26, -(2.0**30)])
def test_what_cannot_be_summed_is_counted_not_swallowed(bad):
    sums = _summed([torch.tensor([1.0, bad, 2.0]), torch.tensor([1.0, 1.0, bad])])
    assert sums.rejected == 2
    sums.clear()
    assert (sums.rejected, float(sums.total().abs().sum())) == (0, 0.0)


def _reduced(world, values):
    sums = IntegerSums(values.shape[1])
    for row in values[world.rank :: world.size]:
        sums.add(row)
    sums.reduce(world.transport)
    return sums.total().numpy().tobytes(), sums.rejected


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_any_dealing_to_ranks_gives_the_same_bits_on_every_rank(num_ranks):
    values = torch.from_numpy(np.random.default_rng(1).normal(size=(100, 7)))
    values[17, 3] = math.nan
    assert set(run_ranks(_reduced, num_ranks, values)) == set(run_ranks(_reduced, 1, values))
    assert run_ranks(_reduced, num_ranks, values)[0][1] == 1
