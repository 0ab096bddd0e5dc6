"""One small store for all; and one try of each network, of some hundred that short runs would make on the machine."""

import pytest
from random_store import write_random_store

from domainpar.nn import interaction, selftest

_passed: set[object] = set()


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """Tests read this store and write nothing into it; those that do copy it first."""
    return write_random_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def self_test_once_for_all_networks_of_the_same_shapes(monkeypatch):
    """The self-test itself: `tests/nn/test_selftest.py`."""

    def tried(model, transport, plain=interaction.rows_are_independent):
        shapes = frozenset(case.shapes for case in selftest._cases(model))
        if shapes in _passed:
            transport.barrier()
            return None
        problem = plain(model, transport)
        if problem is None:
            _passed.add(shapes)  # all ranks are past the question by then: they have gathered what each found
        return problem

    monkeypatch.setattr(interaction, "rows_are_independent", tried)
