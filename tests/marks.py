"""Cases of a test that `make test` leaves out."""

from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
"""A case for `make test-slow`: more ranks, another transport, another size of what is tested in any case."""

slow_fault = partial(pytest.param, marks=pytest.mark.faults)
"""A case for `make test-faults`."""
