"""Runs on standardised features: whose constants a network has when it begins, goes on, or scores another store."""

import invariance
import pytest
import torch
from random_events import random_assignment, random_event
from random_store import NUM_TILES, write_graph
from safetensors.torch import load_file

from domainpar.common.agreement import Refused
from domainpar.nn.standard import Standard
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.command_line import config_of_run, parse
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import EventStore, write_manifest
from domainpar.tracking.training.network import load_network
from domainpar.train import train

SMALL = {"hidden": 16, "graph_iters": 2, "epochs": 2, "lr": 1e-2}
CONSTANTS = [f"standardise.{name}" for name in Standard._fields]


def with_other_constants(directory):
    """Events of the same features, ten times as wide and elsewhere."""
    records = []
    for seed in range(2):
        graph = random_event(50 + seed, 80, 300)
        graph.features[:] = 10 * graph.features + 3
        graph.edge_features[:] = 10 * graph.edge_features - 7
        assignment = random_assignment(seed, graph.num_nodes, NUM_TILES)
        records.append(write_graph(directory, graph, assignment, NUM_TILES, "train"))
    write_manifest(directory, records, {})
    return directory


def _train(world, store, out, flags):
    run = train(TrainConfig(**{**SMALL, **flags}, out=str(out)), store, world)
    world.transport.barrier()
    return invariance.parameters_of(run)


def trained(store, out, num_ranks=1, **flags):
    """The hash of the parameters of every rank after a run."""
    return run_ranks(_train, num_ranks, store, out, flags, timeout=100)


def saved(run):
    last = (run / "checkpoints" / "last").read_text().strip()
    return load_file(run / "checkpoints" / last / "model.safetensors")


def test_a_run_standardises_by_default_with_the_same_bits_on_1_and_3_ranks(store, tmp_path):
    (expected,) = trained(store, tmp_path / "1")
    assert trained(store, tmp_path / "3", 3) == [expected] * 3
    assert trained(store, tmp_path / "off", standardise=False) != [expected]


def test_a_checkpoint_holds_the_constants_of_the_store_and_none_where_features_are_taken_as_they_are(store, tmp_path):
    trained(store, tmp_path / "on", max_steps=1)
    tensors, standard = saved(tmp_path / "on"), EventStore(store).standard
    for name, constants in zip(CONSTANTS, standard, strict=True):
        assert torch.equal(tensors[name], torch.tensor(constants, dtype=torch.float32))
    trained(store, tmp_path / "off", standardise=False, max_steps=1)
    assert saved(tmp_path / "off").keys() == tensors.keys() - set(CONSTANTS)


def test_a_network_that_scores_another_store_has_the_constants_of_its_checkpoint(store, tmp_path):
    trained(store, tmp_path / "run", max_steps=1)
    expected = saved(tmp_path / "run")
    other = EventStore(with_other_constants(tmp_path / "other"))
    network, _ = load_network(tmp_path / "run", config_of_run(tmp_path / "run"), "last", other, World.alone())
    found = network.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_networks_of_the_field_take_features_as_they_are(store, tmp_path):
    for name, flags in {"on": {}, "off": {"standardise": False}}.items():
        trained(store, tmp_path / name, model="acorn2", max_steps=1, **flags)
    ours, theirs = saved(tmp_path / "on"), saved(tmp_path / "off")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_that_does_not_standardise_scores_without(store, tmp_path):
    trained(store, tmp_path / "run", standardise=False, max_steps=1)
    network, _ = load_network(
        tmp_path / "run", config_of_run(tmp_path / "run"), "last", EventStore(store), World.alone()
    )
    assert network.standardise is None


def test_a_run_keeps_the_flag_it_began_with(store, tmp_path):
    for name, flag in {"on": True, "off": False}.items():
        trained(store, tmp_path / name, standardise=flag, max_steps=1)
        assert config_of_run(tmp_path / name).standardise is flag
        assert parse(TrainConfig, "", ["--out", str(tmp_path / name), "--resume"]).standardise is flag


@pytest.mark.parametrize("began", [True, False])
def test_a_run_does_not_go_on_the_other_way(store, tmp_path, began):
    trained(store, tmp_path / "run", standardise=began, max_steps=1)
    with pytest.raises(Refused, match="belongs to another network: standardise.edge_mean is .*\nhint: give the flags"):
        trained(store, tmp_path / "run", resume=True, standardise=not began)


def test_the_first_lines_say_whether_features_are_standardised(store, tmp_path, capsys):
    for flag in (True, False):
        trained(store, tmp_path / str(flag), standardise=flag, max_steps=1)
        network = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("network "))
        assert (", standardised features, " in network) is flag
