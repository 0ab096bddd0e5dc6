"""An event much larger than the others: it is the one that memory is foreseen for, by name, before the first step."""

import json

import pytest
from marks import fault
from random_events import random_assignment, random_event
from random_store import NUM_TILES, write_graph

from domainpar.measure import forecast as of_parts
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import write_manifest
from domainpar.tracking.training import step_memory as forecast
from domainpar.tracking.training.inputs import open_training_data
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.run import make_trainer
from domainpar.train import train

LARGE = "000000001"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Four events, the second with ten times the edges of the others."""
    directory = tmp_path_factory.mktemp("store")
    records = []
    for seed in range(4):
        graph = random_event(seed, 1000 if seed == 1 else 100, 7000 if seed == 1 else 700)
        assignment = random_assignment(seed, graph.num_nodes, NUM_TILES)
        records.append(write_graph(directory, graph, assignment, NUM_TILES, "train"))
    write_manifest(directory, records, {})
    return directory


def _run(world, store, out):
    train(TrainConfig(hidden=16, graph_iters=1, max_steps=1, out=str(out)), store, world)


@fault(28)
def test_the_largest_event_is_named_with_its_part_before_the_first_step(store, tmp_path, monkeypatch, capsys):
    before = []
    step = Trainer.step

    def first_step(self, samples, number, following):
        if self.world.is_root:
            before.append(capsys.readouterr().out)
        return step(self, samples, number)

    monkeypatch.setattr(Trainer, "step", first_step)
    run_ranks(_run, 2, store, tmp_path / "run")
    about = before[0].replace("\n          ", "")
    assert "expected on the fullest of 2 ranks" in about
    assert f" of event {LARGE}" in about
    assert json.loads((tmp_path / "run" / "run.json").read_text())["memory"]["sample"] == LARGE
    assert "WARNING" not in about


@fault(28)
def test_where_it_will_not_fit_the_warning_comes_before_the_first_step(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(of_parts, "free_memory", lambda device: ("n2", 2**20))
    monkeypatch.setattr(Trainer, "step", lambda self, samples, step, following: pytest.fail("so far and no further"))
    with pytest.raises(pytest.fail.Exception, match="so far"):
        run_ranks(_run, 2, store, tmp_path / "run")
    said = capsys.readouterr().out
    assert f" of event {LARGE}" in said
    assert "WARNING: 2 ranks on n2 will want" in said
    assert "1 MiB are free: the system may end the run." in said


def _largest(world, store):
    config = TrainConfig(hidden=16, graph_iters=1)
    training_data = open_training_data(config, store, world)
    sample, _ = forecast._largest(make_trainer(config, training_data, world), training_data, 0, keeps_freed=True)
    return sample.name


def test_an_event_of_fewer_edges_may_take_more_since_its_stages_keep_their_layers(tmp_path, monkeypatch):
    graphs = [random_event(seed, 100, edges) for seed, edges in enumerate((1000, 700, 400))]
    records = [write_graph(tmp_path, graph, random_assignment(0, 100, 4), 4, "train") for graph in graphs]
    write_manifest(tmp_path, records, {})
    assert run_ranks(_largest, 1, tmp_path) == ["000000000"]
    monkeypatch.setattr(of_parts, "MOST_BYTES_OF_LAYERS", 400_000)  # of some 840 edges, in this network
    assert run_ranks(_largest, 1, tmp_path) == [LARGE]
