"""What a step says it is doing, and the places in it where a fault can be made to happen."""

import pytest
import watched
from faults.on_purpose import POINTS
from random_store import write_random_store

from domainpar.common import faults
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.sampler import samples_of

FIRST, SECOND, LAST = "000000000", "000000001", "000000003"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), num_edges=700, compared=False)


OURS = ("forward", "loss", "backward", "reduce", "optimizer", "stepped", "evaluate")


def _train_and_validate(world, store):
    trainer, store = watched.trainer_of(store, world), EventStore(store)
    trainer.step(samples_of(store.events("train"), None)[:2], 5)
    trainer.evaluate(samples_of(store.events("val"), None), 6)


def test_each_phase_is_marked_with_step_and_event_before_it_begins(store, monkeypatch):
    marks = []
    monkeypatch.setattr(World, "mark", lambda self, phase, step, event=None: marks.append((phase, step, event)))
    run_ranks(_train_and_validate, 1, store)
    assert marks == [
        ("load", 5, SECOND),  # the larger one first
        ("load", 5, FIRST),
        ("forward", 5, SECOND),
        ("backward", 5, SECOND),
        ("forward", 5, FIRST),
        ("backward", 5, FIRST),
        ("reduce", 5, None),
        ("optimizer", 5, None),
        ("load", 6, LAST),
        ("evaluate", 6, LAST),
    ]


def test_every_place_of_a_step_is_reached_with_what_can_be_spoilt_at_hand(store, monkeypatch):
    reached = []

    def reach(point, at_hand=None):
        if point in OURS:
            reached.append((point, None if at_hand is None else tuple(at_hand.shape)))
        return at_hand

    monkeypatch.setattr(faults, "reach", reach)
    run_ranks(_train_and_validate, 1, store)
    assert set(OURS) <= set(POINTS)
    first = (16, 3)  # of the node encoder's first layer
    assert reached == [
        *[("forward", None), ("loss", (737,)), ("backward", None)],
        *[("forward", None), ("loss", (700,)), ("backward", None)],
        *[("reduce", None), ("optimizer", first), ("stepped", first), ("evaluate", None)],
    ]
