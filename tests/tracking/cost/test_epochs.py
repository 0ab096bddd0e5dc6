"""The costs of an epoch: energy from counters that turn over; operations of each rank."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from random_store import write_random_store

from domainpar.nn.flops import counted
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.cost import epochs as costs
from domainpar.tracking.cost.epoch_words import in_words, mean_epoch
from domainpar.tracking.training import run_log
from domainpar.tracking.training.inputs import open_lessons
from domainpar.tracking.training.run import make_trainer, train

FLAGS = {"hidden": 16, "graph_iters": 2, "epochs": 2, "overwrite": True}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("costs") / "store")


def write_counters(powercap, **joules):
    """Counters of packages, in millionths, of which a part of a package must not count again."""
    for number, (name, value) in enumerate(joules.items()):
        for place in (f"intel-rapl:{number}", f"intel-rapl:{number}:0"):
            (powercap / place).mkdir(parents=True, exist_ok=True)
            (powercap / place / "name").write_text(name)
            (powercap / place / "energy_uj").write_text(f"{int(value * 1e6)}\n")
            (powercap / place / "max_energy_range_uj").write_text(f"{int(100e6)}\n")


def test_counters_of_all_packages_are_added_and_go_on_where_one_begins_anew(tmp_path):
    write_counters(tmp_path, first=10.0, second=95.0)
    counter = costs.of_processors(tmp_path)
    assert counter.source == "RAPL"
    begin = counter.joules()
    write_counters(tmp_path, first=14.0, second=2.0)  # the second went through its 100 J
    assert counter.joules() - begin == pytest.approx(4.0 + 7.0)
    write_counters(tmp_path, first=15.0, second=3.0)
    assert counter.joules() - begin == pytest.approx(5.0 + 8.0)


def test_counters_that_are_not_there_or_not_to_be_read_are_none(tmp_path):
    assert costs.of_processors(tmp_path) is None
    write_counters(tmp_path, first=1.0)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("no number")
    assert costs.of_processors(tmp_path) is None


def test_a_gpu_is_asked_by_its_uuid_and_one_that_cannot_tell_is_none(monkeypatch):
    asked = []
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid) or "handle",
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 2500,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(costs.torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="abc"))
    counter = costs.of_gpu("cuda:0")
    assert (counter.source, counter.joules(), asked) == ("NVML", 2.5, [b"GPU-abc"])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert costs.of_gpu("cuda:0") is None


def epochs_of(world, store, out):
    run = train(TrainConfig(**FLAGS, out=str(out)), store, world)
    world.transport.barrier()
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["epoch"], line["step"], line["epoch_costs"]) for line in lines if "epoch_costs" in line]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_last_step_of_each_epoch_has_its_costs(store, tmp_path, monkeypatch, capsys, num_ranks):
    monkeypatch.setattr(costs, "of_processors", lambda: None)
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


def test_each_machine_is_read_once(store, tmp_path, monkeypatch):
    readings = iter(range(0, 100_000, 10))
    monkeypatch.setattr(costs, "of_processors", lambda: costs.Counter("RAPL", lambda: float(next(readings))))
    found = run_ranks(epochs_of, 3, store, tmp_path / "run")[0]
    # Three ranks of one machine: one of them reads, when an epoch begins and when it ends.
    assert [(one["joules"], one["joules_by"]) for _, _, one in found] == [(10.0, "RAPL")] * 2


def _joules_of_cards(world, cards):
    on_gpu = dataclasses.replace(world, device=torch.device("cuda", cards[world.rank]))
    return costs.Costs(on_gpu, "float32").of_epoch()["joules"]


def test_ranks_that_share_a_card_count_its_energy_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=str(device.index)))
    monkeypatch.setattr(costs, "of_gpu", lambda _: costs.Counter("NVML", iter([5.0, 7.0]).__next__))
    assert run_ranks(_joules_of_cards, 3, [0, 1, 0]) == [4.0] * 3


def test_nothing_is_said_of_short_epochs_without_a_counter_but_a_mean(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(costs, "of_processors", lambda: None)
    ((_, _, one), _) = run_ranks(epochs_of, 1, store, tmp_path / "run")[0]
    assert (one["joules"], one["joules_by"]) == (None, None)
    out = capsys.readouterr().out
    assert "epoch 0: " not in out
    assert "epochs   : 2, on average " in out
    assert "GFLOP/s per rank in float32" in out


def test_operations_are_those_that_are_counted_around_every_step(store):
    config, world = TrainConfig(**FLAGS), World.alone()
    training_data = open_lessons(config, store, world)
    trainer = make_trainer(config, training_data, world)
    meter, total, seconds = costs.Costs(world, "float32"), 0, 0.0
    for number, sample in enumerate(training_data.train):
        with counted() as flops, meter.step():
            record = trainer.step([sample], number)
        meter.add(record)
        total, seconds = total + flops.total, seconds + record["seconds_compute"][0]
    (found,) = meter.of_epoch()["flops_per_second"]
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
    assert meter.of_epoch()["seconds"] == 1.0


def test_costs_in_words():
    costs_of = {
        "seconds": 12.34, "joules": 1234.0, "joules_by": "RAPL", "precision": "bf16",
        "flops_per_second": [3e10, 3.2e10], "steps": 4,
    }  # fmt: skip
    assert in_words(costs_of) == "12.3 s, 1.23 kJ (RAPL), 31 GFLOP/s per rank in bf16"
    dear = {**costs_of, "joules": 7.2e6, "seconds": 37.66}
    assert in_words(dear).startswith("37.7 s, 2 kWh")
    mean = mean_epoch([costs_of, dear])
    assert mean["seconds"] == 25.0
    assert mean_epoch([costs_of, {**dear, "joules": None}])["joules"] is None
    assert mean_epoch([]) is None
    # All operations over all seconds: a short epoch of compiling does not count as much as a long one.
    slow, fast = {**costs_of, "flops_per_second": [1e9]}, {**costs_of, "seconds": 3 * 12.34, "flops_per_second": [5e9]}
    assert mean_epoch([slow, fast])["flops_per_second"] == pytest.approx([4e9])
