"""Shares of gradients summed over ranks: the same bits on all of them, and what is not finite known to all."""

import math

import pytest
import torch
from torch import nn

from domainpar.testing import run_ranks
from domainpar.tracking.networks.shares import GradientShares

BAD = [math.nan, math.inf, -math.inf]


def module_of(gradients, dtype=torch.float64):
    """A module with a parameter for each gradient; None: the parameter has two numbers and no gradient."""
    module = nn.Module()
    for number, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(2 if gradient is None else len(gradient), dtype=dtype))
        parameter.grad = None if gradient is None else torch.tensor(gradient, dtype=dtype)
        module.register_parameter(f"p{number}", parameter)
    return module


def _summed(world, of_ranks, dtype):
    module = module_of(of_ranks[world.rank], dtype)
    sums = GradientShares(module)
    assert sums.rejected_now() == 0
    result = sums.reduce(world.transport)
    return result, [parameter.grad for parameter in module.parameters()]


def summed(*of_ranks, dtype=torch.float64):
    """What `reduce` returns on each rank, and the gradients it leaves."""
    return run_ranks(_summed, len(of_ranks), of_ranks, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_rank_has_the_sum_of_all_in_the_same_bits_and_its_type(dtype):
    draw = torch.Generator().manual_seed(0)
    of_ranks = [[torch.randn(5, generator=draw).tolist(), torch.randn(3, generator=draw).tolist()] for _ in range(3)]
    found = summed(*of_ranks, dtype=dtype)
    for number in range(2):
        expected = sum(torch.tensor(gradients[number], dtype=dtype).double() for gradients in of_ranks)
        for result, gradients in found:
            assert result == 0
            assert gradients[number].dtype == dtype
            assert torch.equal(gradients[number], found[0][1][number])
            rounding = 1e-12 if dtype == torch.float64 else 1e-6
            assert torch.allclose(gradients[number].double(), expected, rtol=rounding, atol=0)


@pytest.mark.parametrize("size", [1e30, 1e-30, 1.0, 1e300, 1e-300])
def test_huge_and_tiny_gradients_keep_their_digits(size):
    for result, (gradient,) in summed([[1.1 * size, -0.3 * size]], [[2.3 * size, 0.1 * size]]):
        assert result == 0
        assert gradient.tolist() == pytest.approx([3.4 * size, -0.2 * size], rel=1e-12, abs=0)


def test_a_tiny_gradient_keeps_its_digits_beside_a_huge_one_of_another_parameter():
    for result, (huge, tiny) in summed([[1e30], [1e-30]], [[1e30], [1e-30]]):
        assert result == 0
        assert huge.tolist() == pytest.approx([2e30], rel=1e-12, abs=0)
        assert tiny.tolist() == pytest.approx([2e-30], rel=1e-12, abs=0)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_gradient_of_one_rank_that_is_not_finite_is_known_to_all(bad, rank):
    of_ranks = [[[1.0, 2.0], None] for _ in range(3)]
    of_ranks[rank] = [[1.0, 2.0], [0.0, bad]]
    assert all(result > 0 for result, _ in summed(*of_ranks))


def test_a_sum_that_is_not_finite_is_known_to_all_though_every_summand_is():
    assert all(result > 0 for result, _ in summed([[3e38]], [[3e38]], dtype=torch.float32))


def test_the_largest_numbers_there_are_can_be_summed():
    for result, (gradient,) in summed([[1.7e308]], [[-1.6e308]]):
        assert result == 0
        assert gradient.tolist() == pytest.approx([1e307], rel=1e-12)


def test_a_parameter_that_some_ranks_have_no_gradient_of_gets_the_sum_of_the_others_and_none_stays_none():
    for result, gradients in summed([None, [1.0, 2.0], None], [None, None, None], [None, [0.5, 0.5], [3.0, 0.0]]):
        assert result == 0
        assert gradients[0] is None
        assert [one.tolist() for one in gradients[1:]] == [[1.5, 2.5], [3.0, 0.0]]


def test_a_gradient_of_zeros_stays_a_gradient():
    assert [gradients[0].tolist() for _, gradients in summed([[0.0, 0.0]], [None])] == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("gradients", [[], [[]]], ids=["no parameters", "a parameter without numbers"])
def test_nothing_to_sum_is_no_problem(gradients):
    assert [result for result, _ in summed(gradients, gradients)] == [0, 0]


def _summed_with_one_frozen(world):
    module = module_of([[1.0, 2.0], [3.0]])
    module.p0.requires_grad_(False)
    result = GradientShares(module).reduce(world.transport)
    return result, module.p0.grad.tolist(), module.p1.grad.tolist()


def test_frozen_parameters_are_left_alone():
    assert run_ranks(_summed_with_one_frozen, 2) == [(0, [1.0, 2.0], [6.0])] * 2


def test_shapes_are_kept():
    module = nn.Linear(3, 2, dtype=torch.float64)
    module.weight.grad = torch.arange(6.0, dtype=torch.float64).view(3, 2).t()  # not contiguous
    run_ranks(lambda world: GradientShares(module).reduce(world.transport), 1)
    assert torch.equal(module.weight.grad, torch.arange(6.0, dtype=torch.float64).view(3, 2).t())
