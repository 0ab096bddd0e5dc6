"""The costs of an epoch: seconds of its steps, and operations of each rank."""

import json

import pytest
from random_store import write_random_store

from domainpar.nn.flops import counted
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.cost import epochs as costs
from domainpar.tracking.cost.epoch_words import in_words, mean_epoch
from domainpar.tracking.training import run_log
from domainpar.tracking.training.inputs import open_training_data
from domainpar.tracking.training.run import make_trainer
from domainpar.train import train

FLAGS = {"hidden": 16, "graph_iters": 2, "epochs": 2, "overwrite": True}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("costs") / "store")


def epochs_of(world, store, out):
    run = train(TrainConfig(**FLAGS, out=str(out)), store, world)
    world.transport.barrier()
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["epoch"], line["step"], line["epoch_costs"]) for line in lines if "epoch_costs" in line]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_last_step_of_each_epoch_has_its_costs(store, tmp_path, monkeypatch, capsys, num_ranks):
    monkeypatch.setattr(run_log, "LONG_EPOCH", 0.0)
    found = run_ranks(epochs_of, num_ranks, store, tmp_path / "run")[0]
    assert [(epoch, step) for epoch, step, _ in found] == [(0, 3), (1, 6)]
    for _, _, one in found:
        assert one["steps"] == 3
        assert one["seconds"] > 0
        assert len(one["flops_per_second"]) == num_ranks
        assert sum(one["flops_per_second"]) > 0
        assert one["precision"] == "float32"
    out = capsys.readouterr().out
    assert "epoch 0: " in out
    assert "epochs   : 2, on average " in out


def test_nothing_is_said_of_short_epochs_but_a_mean(store, tmp_path, capsys):
    run_ranks(epochs_of, 1, store, tmp_path / "run")
    out = capsys.readouterr().out
    assert "epoch 0: " not in out
    assert "epochs   : 2, on average " in out
    assert "GFLOP/s per rank in float32" in out


def test_operations_are_those_that_are_counted_around_every_step(store):
    config, world = TrainConfig(**FLAGS), World.alone()
    training_data = open_training_data(config, store, world)
    trainer = make_trainer(config, training_data, world, config)
    meter, total, seconds = costs.Costs(world, "float32"), 0, 0.0
    for number, sample in enumerate(training_data.train):
        with counted() as flops, meter.step():
            record = trainer.step([sample], number)
        meter.add(record)
        total, seconds = total + flops.total, seconds + record["seconds_compute"][0]
    (found,) = meter.epoch_costs()["flops_per_second"]
    assert found == pytest.approx(total / seconds, rel=0.05)  # events differ a little in nodes for each edge


def test_what_happens_between_steps_is_not_charged(monkeypatch):
    now = [3.0]
    monkeypatch.setattr(costs, "clock", lambda: now[0])
    meter = costs.Costs(World.alone(), "float32")
    for _ in range(2):
        with meter.step():
            now[0] += 0.5
        meter.add({"local_edges": [5], "seconds_compute": [0.5]})
        now[0] += 20  # a trace is written, say
    assert meter.epoch_costs()["seconds"] == 1.0


def test_costs_in_words():
    costs_of = {"seconds": 12.34, "precision": "bf16", "flops_per_second": [3e10, 3.2e10], "steps": 4}
    assert in_words(costs_of) == "12.3 s, 31 GFLOP/s per rank in bf16"
    assert in_words({**costs_of, "flops_per_second": [0.0]}) == "12.3 s"
    assert mean_epoch([costs_of, {**costs_of, "seconds": 37.66}])["seconds"] == 25.0
    assert mean_epoch([]) is None
    # All operations over all seconds: a short epoch of compiling does not count as much as a long one.
    slow, fast = {**costs_of, "flops_per_second": [1e9]}, {**costs_of, "seconds": 3 * 12.34, "flops_per_second": [5e9]}
    assert mean_epoch([slow, fast])["flops_per_second"] == pytest.approx([4e9])
