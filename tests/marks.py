"""Marks of tests: cases that `make test` leaves out, and the faults that a test shows."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
"""A case for `make test-slow`: more ranks, another transport, another size of what is tested in any case."""

slow_fault = partial(pytest.param, marks=pytest.mark.faults)
"""A case for `make test-faults`."""


def needs_gpu(test: Callable[..., Any]) -> Any:
    """A test for a GPU: it runs where there is one, and on a pretended one (`tests/pretended_gpu`) in any case."""
    import torch  # not by tests that want none

    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")(test))


def fault(*numbers: int) -> pytest.MarkDecorator:
    """Mark a test that shows faults of docs/faults.md, by their numbers there."""
    return pytest.mark.fault(*numbers)


def drawn(item: pytest.Item, share: float, seed: str) -> bool:
    """Whether a seed draws a test: one of `share` of all tests, and those that are always run."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest()[:8])
    return number < share * 2**64 or item.get_closest_marker("always") is not None
