"""Marks of tests: cases that `make test` leaves out, and the faults that a test shows."""

from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
"""A case for `make test-slow`: more ranks, another transport, another size of what is tested in any case."""

slow_fault = partial(pytest.param, marks=pytest.mark.faults)
"""A case for `make test-faults`."""


def fault(*numbers: int) -> pytest.MarkDecorator:
    """Mark a test that shows faults of docs/faults.md, by their numbers there."""
    return pytest.mark.fault(*numbers)
