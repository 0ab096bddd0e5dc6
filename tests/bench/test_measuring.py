"""What the machine can do at best is counted right, and settings are said in words."""

import measuring
import pytest


@pytest.mark.parametrize("steps", [0, 1, 3, 7])
def test_the_loop_of_the_peak_does_every_multiplication_and_addition(steps):
    count = measuring.SUMS * measuring.LANES
    # Number k begins at k, and x / 2 + 1 / 2 halves its distance from 1.
    expected = sum(1 + (k - 1) / 2**steps for k in range(count))
    assert measuring.fused_loop(steps, 0.5, 0.5) == expected


def test_the_peak_of_threads_is_of_all_of_them_together(monkeypatch):
    calls = []

    def loop(*arguments):
        calls.append(arguments)

    monkeypatch.setattr(measuring, "fused_loop", loop)
    monkeypatch.setattr(measuring, "seconds_of", lambda call: (call(), 2.0 - 0.1 * len(calls))[1])
    peak = measuring.fma_peak(threads=3, runs=2)
    assert len(calls) == 3 * (1 + 2)
    assert peak == pytest.approx(3 * 2 * measuring.SUMS * measuring.LANES * measuring.FUSED_STEPS / (2.0 - 0.9))


def test_every_allocator_setting_is_said_in_words():
    said = measuring.allocators_in_words(measuring.ALLOCATORS)
    for name, settings in measuring.ALLOCATORS.items():
        assert f"allocator {name}: " in said
        assert all(f"{variable}={value}" in said for variable, value in settings.items())
