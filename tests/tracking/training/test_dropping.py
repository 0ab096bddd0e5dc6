"""Which random numbers a step takes: a function of seed, step and sample, and none where nothing is learned."""

import pytest
import torch
import watched

from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.noise import key_of
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.sampler import samples_of
from domainpar.train import train

SMALL = {"hidden": 16, "graph_iters": 1, "epochs": 2, "dropout": 0.5, "events_per_step": 2}


@pytest.fixture
def keys(monkeypatch):
    """Keys of all forward passes but those of pieces that are weighed: of training, and of what only looks."""
    used = {True: [], False: []}

    def read(self, graph, halo, key=None, plain=InteractionNetwork.read):
        if key != 1:
            used[torch.is_grad_enabled()].append(key)
        return plain(self, graph, halo, key)

    monkeypatch.setattr(InteractionNetwork, "read", read)
    return used


def _train(world, store, out, flags):
    train(TrainConfig(**SMALL, store=str(store), out=str(out), **flags), store, world)


def test_every_event_of_every_step_has_its_own_key_and_validation_none(store, tmp_path, keys):
    """Three events, two a step, two epochs: six forward passes in four steps; one validation event an epoch."""
    run_ranks(_train, 1, store, tmp_path / "run", {"seed": 5})
    steps, names = (0, 0, 1, 2, 2, 3), {f"00000000{number}" for number in range(3)}
    possible = {key_of(5, step, name): (step, name) for step in set(steps) for name in names}
    assert [possible[key][0] for key in keys[True]] == list(steps)
    assert {possible[key][1] for key in keys[True]} == names
    assert len(set(keys[True])) == 6
    assert keys[False] == [None, None]


@pytest.mark.parametrize("domain_size", [1, 3])
def test_keys_do_not_depend_on_ranks(store, tmp_path, keys, domain_size):
    """The ranks that share an event use one key; whichever rank has an event uses the key of that event."""
    run_ranks(_train, 1, store, tmp_path / "one", {})
    expected = sorted(keys[True])
    keys[True].clear()
    run_ranks(_train, 3, store, tmp_path / "three", {}, domain_size=domain_size)
    assert sorted(keys[True]) == sorted(expected * domain_size)


def test_keys_of_sectors_and_of_another_seed_are_others(store, tmp_path, keys):
    run_ranks(_train, 1, store, tmp_path / "run", {"seed": 5})
    run_ranks(_train, 1, store, tmp_path / "other-seed", {"seed": 6})
    run_ranks(_train, 1, store, tmp_path / "sectors", {"seed": 5, "mode": "naive", "sectors": 2})
    assert len(set(keys[True])) == len(keys[True]) == 6 + 6 + 12


def _evaluated(world, store, dropout):
    samples = samples_of(EventStore(store).events("val"), None)
    record = watched.trainer_of(store, world, dropout=dropout).evaluate(samples, 0)
    return {name: record[name] for name in ("loss", "edge_auc_pooled", "edge_efficiency")}


def test_validation_drops_nothing(store):
    results = [run_ranks(_evaluated, 2, store, dropout) for dropout in (0.0, 0.9)]
    assert results[0] == results[1]
