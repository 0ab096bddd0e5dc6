"""Integer sums: the same bits in any order, and right."""

import copy
import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from domainpar.parallel import integer_sums
from domainpar.parallel.integer_sums import IntegerSums, sum_exactly
from domainpar.testing import run_ranks


def _summed(partials):
    sums = IntegerSums(len(partials[0]))
    for partial in partials:
        sums.add(partial)
    return sums


@settings(max_examples=100)
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


ADDERS = {"arrays": integer_sums._add_arrays, "tensors": integer_sums._add_tensors}


@pytest.fixture(params=ADDERS)
def either_form(request, monkeypatch):
    """What adds partials on CPU, and what adds them elsewhere."""
    monkeypatch.setattr(integer_sums, "_add_arrays", ADDERS[request.param])


@pytest.mark.parametrize("add", [lambda sums, worst: [sums.add(row) for row in worst], IntegerSums.add_rows])
def test_without_carrying_they_would_overflow(monkeypatch, either_form, add):
    monkeypatch.setattr(integer_sums, "CARRY_EVERY", 2**40)
    worst = torch.full((2**13, 1), 2.0**-21 * 0.999, dtype=torch.float64)
    sums = IntegerSums(1)
    add(sums, worst)
    assert float(sums.total()) != pytest.approx(float(worst.sum()))


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 2048, 2**12 + 5])
def test_any_number_of_partials_of_each_sum_may_come_in_one_call(count, either_form):
    """Between two as large calls, each of which leaves what the next one must not make overflow."""
    worst = torch.tensor([-(2.0**-21), 2.0**-21, 0.75 + 2.0**-21, -(2.0**25) - 2.0**-21], dtype=torch.float64)
    rows = torch.cat([worst.repeat(count, 1), torch.tensor([[math.nan, 0, -math.inf, 2.0**26]])])
    sums, one_by_one = IntegerSums(6), IntegerSums(6)
    for _ in range(1023):
        sums.add(worst, 1)
    for _ in range(3):
        sums.add_rows(rows, 1)
    for row in [*[worst] * 1023, *rows, *rows, *rows]:
        one_by_one.add(row, 1)
    assert torch.equal(sums.total(), one_by_one.total())
    assert torch.equal(sums._limbs, one_by_one._limbs)  # of one canonical form, once carried
    assert sums.rejected == one_by_one.rejected == 9
    np.testing.assert_array_equal(sums.total(), [0, *((1023 + 3 * count) * worst).tolist(), 0])


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


UNIT, FINE = 2.0**-20, 2.0**-72  # of the two limbs
AWKWARD = [
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    2.0**26,
    -(2.0**26),
    math.nextafter(2.0**26, 0),
    1e300,
    5e-324,
    -1e-310,
]
AWKWARD += [(k + 0.5) * scale for k in (-3, -2, -1, 0, 1, 2, 2**30) for scale in (UNIT, FINE)]
AWKWARD += [UNIT + 2.5 * FINE, 2.0**-21 - 1.5 * FINE, -(2.0**-21), 2.0**-150, -(2.0**-140)]
NUMBERS = st.sampled_from(AWKWARD) | st.floats(width=64) | st.floats(-1e3, 1e3) | st.floats(-1e-19, 1e-19)
LAYOUTS = {
    "contiguous": lambda values: values,
    "every second": lambda values: values.repeat_interleave(2)[::2],
    "transposed": lambda values: values.repeat(3, 1).T,
    "backwards": lambda values: values.flip(0),
    "one, expanded": lambda values: values[:1].expand(7),
}


@settings(max_examples=300)
@given(
    numbers=st.lists(NUMBERS, min_size=1, max_size=40),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    column=st.booleans(),
    start=st.integers(0, 3),
)
def test_the_pass_over_arrays_and_the_tensor_form_give_the_same_limbs(numbers, dtype, layout, column, start):
    partials = torch.tensor(numbers, dtype=torch.float64)
    if dtype == torch.int64:
        partials = torch.nan_to_num(partials).clamp(-(2.0**40), 2.0**40)
    partials = LAYOUTS[layout](partials.to(dtype))
    partials = partials if partials.ndim == 2 else partials[:, None] if column else partials[None]
    limbs = torch.randint(-(2**50), 2**50, (2 * (start + partials.shape[1] + 2) + 1,))
    expected = limbs.clone()
    integer_sums._add_tensors(partials, expected, start)
    integer_sums._add_arrays(partials, limbs, start)
    assert torch.equal(limbs, expected)


def test_on_many_drawn_values_too():
    rng = np.random.default_rng(7)
    values = torch.from_numpy(rng.normal(size=50_000) * 10.0 ** rng.uniform(-30, 9, 50_000))
    for partials in (values, values.float()):
        arrays, tensors = torch.zeros(2, 100_001, dtype=torch.int64)
        integer_sums._add_arrays(partials[None], arrays, 0)
        integer_sums._add_tensors(partials[None], tensors, 0)
        assert torch.equal(arrays, tensors)
        assert arrays[-1] == (partials.abs() >= 2**26).sum() > 100


def test_halves_are_rounded_to_even():
    sums = _summed([torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5], dtype=torch.float64) * FINE])
    assert (sums.total() / FINE).tolist() == [0, 2, 2, 0, -2]


def test_partials_may_be_added_to_some_of_the_sums():
    sums = IntegerSums(5)
    sums.add(torch.tensor([1.0, math.nan]), 1)
    sums.add(torch.tensor([[2.0], [0.5]]), 3)
    sums.add(torch.tensor([]), 5)
    sums.add_rows(torch.ones(7, 0), 2)
    assert sums.total().tolist() == [0, 1, 0, 2, 0.5]
    assert sums.rejected == 1


@pytest.mark.parametrize(("count", "start"), [(3, 3), (1, 5), (2, -1), (6, 0)])
def test_partials_that_fit_nowhere_are_refused(count, start):
    sums = IntegerSums(5)
    with pytest.raises(ValueError, match=f"{count} partials from sum {start} on do not fit 5 sums"):
        sums.add(torch.ones(count), start)
    with pytest.raises(ValueError, match=f"{count} partials from sum {start} on do not fit 5 sums"):
        sums.add_rows(torch.ones(1, count), start)


def test_threads_may_add_at_the_same_time(monkeypatch):
    """Between reading the limbs and writing them lies time enough for every other thread."""
    add_arrays, one, repeats = integer_sums._add_arrays, torch.tensor([1.0, math.nan, 2.0**-21]), 5

    def add_slowly(partials, limbs, start):
        read = limbs.clone()
        time.sleep(1e-3)
        add_arrays(partials, read, start)
        limbs.copy_(read)

    monkeypatch.setattr(integer_sums, "_add_arrays", add_slowly)
    monkeypatch.setattr(integer_sums, "CARRY_EVERY", 7)
    sums = IntegerSums(3)
    with ThreadPoolExecutor(8) as threads:
        for added in [threads.submit(sums.add, one) for _ in range(8 * repeats)]:
            added.result()
    assert sums.total().tolist() == [8 * repeats, 0, 8 * repeats * 2.0**-21]
    assert sums.rejected == 8 * repeats


def _reduced_one_after_the_other_and_overlapping(world, values):
    own = values[world.rank :: world.size]
    plain, first, second = (IntegerSums(values.shape[1]) for _ in range(3))
    for row in own:
        plain.add(row)
        first.add(row)
    plain.reduce(world.transport)
    pending = first.start_reduce(world.transport)
    for row in own:
        second.add(-row)
        pending.progress()
    also_pending = second.start_reduce(world.transport)
    pending.finish()
    also_pending.finish()
    assert torch.equal(first._limbs, plain._limbs)
    assert (first._limbs[len(first) : -1] < 2**52).all(), "not in canonical form"
    found = [sums.total() * sign for sums, sign in ((plain, 1), (first, 1), (second, -1))]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert plain.rejected == first.rejected == second.rejected == 1
    first.add(values[0])  # in use again
    first.add(-values[0])
    pending.finish()  # and a second call changes nothing
    assert torch.equal(found[0], first.total())
    return found[0].numpy().tobytes()


def _worst_low_limbs_of_all_ranks(world, worst):
    sums = _summed([worst] * 1000)  # 8 ranks of them would not fit
    sums.reduce(world.transport)
    return sums.total().tolist()


def test_limbs_carry_before_they_are_reduced():
    worst = torch.tensor([-(2.0**-21), 2.0**-21])
    assert run_ranks(_worst_low_limbs_of_all_ranks, 8, worst)[7] == (8000 * worst).tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_sums_can_be_reduced_while_others_are_added_to(num_ranks):
    values = torch.from_numpy(np.random.default_rng(2).normal(size=(41, 6)))
    values[:, 5] = -(2.0**-21)  # the low limbs of all ranks together need a carry
    values[3, 0] = math.inf
    expected = run_ranks(_reduced, 1, values)[0][0]
    assert set(run_ranks(_reduced_one_after_the_other_and_overlapping, num_ranks, values)) == {expected}


def _used_while_reduced(world):
    sums = IntegerSums(2)
    sums.add(torch.ones(2))
    pending = sums.start_reduce(world.transport)
    uses = (lambda: sums.add(torch.ones(2)), sums.total, sums.clear, lambda: sums.rejected)
    for use in (*uses, lambda: sums.reduce(world.transport)):
        with pytest.raises(RuntimeError, match="being added up over ranks"):
            use()
    pending.finish()
    pending.finish()  # nothing is under way
    for use in uses:
        use()
    again = sums.start_reduce(world.transport)
    with pytest.raises(RuntimeError, match="being added up over ranks"):
        sums.total()
    again.finish()
    sums.total()


def test_sums_cannot_be_used_while_they_are_reduced():
    run_ranks(_used_while_reduced, 2)


def test_copies_of_sums_are_sums_of_their_own():
    sums = IntegerSums(2)
    sums.add(torch.tensor([1.0, math.nan]))
    twin = copy.deepcopy(sums)
    twin.add(torch.tensor([2.0, 4.0]))
    assert (sums.total().tolist(), twin.total().tolist(), twin.rejected) == ([1, 0], [3, 4], 1)


def test_of_complex_numbers_both_parts_are_summed():
    def summed(world):
        numbers = torch.tensor([1 + 2j, 3e9 - 0.5j], dtype=torch.complex128) * (world.rank + 1)
        return [total.tolist() for total in sum_exactly([numbers.conj(), numbers.real], world.transport)]

    assert run_ranks(summed, 2) == [[[3 - 6j, 9e9 + 1.5j], [3.0, 9e9]]] * 2
