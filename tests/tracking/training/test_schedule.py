"""The learning rate is a function of the step alone."""

import pytest

from domainpar.tracking.training.loop import Schedule


def rates(shape, warmup=0, total_steps=10, steps_per_epoch=2, steps=None):
    schedule = Schedule(0.5, shape, warmup, total_steps, steps_per_epoch)
    return [schedule.at(step) for step in range(total_steps if steps is None else steps)]


def test_constant_stays():
    assert rates("constant") == [0.5] * 10


def test_warm_up_rises_in_equal_steps_to_the_peak_and_is_part_of_every_shape():
    for shape in ("constant", "trapezoid", "cosine", "step"):
        assert rates(shape, warmup=4)[:5] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


def test_cosine_falls_from_the_peak_to_zero_after_the_last_step():
    found = rates("cosine", warmup=2, total_steps=12, steps=13)
    assert found[2] == 0.5
    assert found[7] == pytest.approx(0.25)
    assert found[12] == 0.0
    assert found[2:] == sorted(found[2:], reverse=True)


def test_cosine_stays_at_zero_beyond_the_planned_steps_and_bears_a_run_of_one_step():
    assert rates("cosine", total_steps=4, steps=9)[4:] == [0.0] * 5
    assert rates("cosine", warmup=3, total_steps=3) == pytest.approx([0.5 / 3, 1 / 3, 0.5])
    assert rates("cosine", total_steps=1) == [0.5]


def test_a_trapezoid_is_constant_and_falls_to_0_in_the_last_fifth():
    found = rates("trapezoid", warmup=2, total_steps=12, steps=14)
    assert found == pytest.approx([0.25, 0.5, *[0.5] * 8, 0.5, 0.25, 0.0, 0.0])


def test_step_takes_a_tenth_off_every_ten_epochs():
    found = rates("step", steps_per_epoch=3, total_steps=61)
    assert found[:30] == [0.5] * 30
    assert found[30:60] == pytest.approx([0.45] * 30)
    assert found[60] == pytest.approx(0.405)
    assert (
        rates("step", warmup=5, steps_per_epoch=3, total_steps=61)[5:] == found[5:]
    )  # epochs count from the first step
