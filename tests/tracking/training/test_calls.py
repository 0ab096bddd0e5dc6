"""What surrounds the network calls as many functions for an event of many tiles as for one of few."""

from functools import partial

import numpy as np
import pytest
import torch
import watched
from counted_calls import calls_of
from random_events import random_event
from random_store import write_graph

from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore, write_manifest
from domainpar.tracking.scoring.scores import score_events
from domainpar.tracking.training.sampler import samples_of

FEW, MANY = 4, 64


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The same two events, in few and in many tiles."""
    directories = []
    for num_tiles in (FEW, MANY):
        directory = tmp_path_factory.mktemp("store")
        assignment, records = np.arange(300) * num_tiles // 300, []
        for seed, split in enumerate(("train", "val")):
            records.append(write_graph(directory, random_event(seed, 300, 3000), assignment, num_tiles, split))
        write_manifest(directory, records, {})
        directories.append(directory)
    return directories


def _calls(world, path):
    """Of each room in a step, an evaluation, and the scoring of an event; everything compiled and loaded before.

    The fewest of three times: what garbage is collected and which rank is late depends on the load of the machine.
    """
    store, trainer = EventStore(path), watched.trainer_of(path, world, check_replicas_every=1)
    for_training, others = (samples_of(store.events(split), None) for split in ("train", "val"))
    score = partial(
        score_events, trainer.model, sectors=None, grouping="contiguous", device=world.device, dtype=torch.float32
    )
    with store.open(store.events()[0]) as event:
        works = {
            ("tracking/training", "a step"): lambda: trainer.step(for_training, 0),
            ("tracking/training", "an evaluation"): lambda: trainer.evaluate(others, 1),
            ("tracking/scoring", "scores"): lambda: score([event], world.domain),
        }
        for work in works.values():
            work()
        return {what: min(calls_of(work, what[0]) for _ in range(3)) for what, work in works.items()}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_and_inference_around_the_network_call_as_many_functions_for_64_tiles_as_for_4(stores, num_ranks):
    few, many = (run_ranks(_calls, num_ranks, store) for store in stores)
    assert all(count > 20 for of_rank in few for count in of_rank.values())
    assert many == few
