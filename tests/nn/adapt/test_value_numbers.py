"""Calls share a number only where they make the same values."""

import pytest
import torch
from whole_and_split import check

from domainpar.nn.adapt.value_numbers import ValueNumbers

ZEROS = {
    "an argument": lambda zero: ((3, zero), {}),
    "an argument by name": lambda zero: ((3,), {"fill_value": zero}),
    "one of a list": lambda zero: (([1, [zero]],), {}),
    "a bound of a slice": lambda zero: ((slice(None, zero),), {}),
}


@pytest.mark.parametrize("given", ZEROS.values(), ids=ZEROS)
def test_calls_that_differ_in_the_sign_of_a_zero_have_two_numbers(given):
    numbers = ValueNumbers()
    one, again, other, of_int = (numbers.of_call(torch.full, *given(zero)) for zero in (0.0, 0.0, -0.0, 0))
    assert one == again
    assert len({one, other, of_int}) == 3


@pytest.fixture
def single_by_default():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.usefixtures("single_by_default")
def test_calls_under_another_default_type_have_two_numbers():
    numbers = ValueNumbers()
    one = numbers.of_call(torch.div, (1, 3), {})
    torch.set_default_dtype(torch.float64)
    other = numbers.of_call(torch.div, (1, 3), {})
    torch.set_default_dtype(torch.float32)
    assert one == numbers.of_call(torch.div, (1, 3), {})
    assert one != other


@pytest.mark.usefixtures("single_by_default")
def test_calls_under_autocast_have_none():
    numbers = ValueNumbers()
    assert numbers.of_call(torch.mm, (1, 3), {}) is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert numbers.of_call(torch.mm, (1, 3), {}) is None
    torch.set_autocast_enabled("cuda", True)
    assert numbers.of_call(torch.mm, (1, 3), {}) is None


def sums_of(kind, dst, x):
    """Numbers of nodes without a gradient: such are fetched once if they are made alike."""
    return torch.zeros(x.size(0)).index_add(0, dst, kind.float() + 1)


def zeros_of_both_signs(kind, dst, src, x):
    h = sums_of(kind, dst, x)
    return torch.copysign(h[src], (h * 0.0)[src]), torch.copysign(h[src], (h * -0.0)[src])


def products_in_two_precisions(kind, dst, src, x):
    h = sums_of(kind, dst, x).view(-1, 1) / 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = (h @ h.new_full((1, 2), 0.3))[src]
    return half.double(), (h @ h.new_full((1, 2), 0.3))[src].double()


@pytest.mark.parametrize("function", [zeros_of_both_signs, products_in_two_precisions])
def test_what_differs_is_fetched_apart(function):
    check(function, tolerance=1e-7)
