"""Many small graphs of torch_geometric with labels of their own, from files to a network: what is said on the way."""

import pytest
import torch
from refused import refused
from source_files import read_file

from domainpar import prepare, train
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.tasks import tasks_of


def write(directory, name, **entries):
    """A ring of five nodes, with a chord."""
    ring = torch.stack([torch.arange(5), (torch.arange(5) + 1) % 5])
    edge_index = torch.cat([ring, torch.tensor([[0], [2]])], dim=1)
    directory.mkdir(exist_ok=True)
    torch.save({"x": torch.rand(5, 2), "edge_index": edge_index, **entries}, directory / f"{name}.pt")


def prepared(place, capfd):
    words = ["--source", "pyg", "--input", str(place / "graphs"), "--store", str(place / "store"), "--tiles", "2"]
    assert prepare.main([*words, "--test-split", "0"]) == 0
    return capfd.readouterr().out.splitlines()


@pytest.fixture
def store(tmp_path, capfd):
    for number in range(6):
        total = {"y_total": 0.5 * number} if number else {}
        write(tmp_path / "graphs", f"jet{number}", y=torch.tensor([0, 1, -1, 0, 1]), **total)
    return tmp_path / "store", prepared(tmp_path, capfd)


def test_labels_are_listed_with_the_events_that_have_them_and_the_next_command_learns_one(store):
    assert any("y (node, 2 classes), total (graph, a number) in 5 of 6" in line for line in store[1])
    assert store[1][-1].endswith(f"-m domainpar.train --task node-class --label y --store {store[0]}")


def test_who_asks_for_edges_is_told_of_the_labels(store, capfd, tmp_path):
    with pytest.raises(SystemExit):
        train.main(["--store", str(store[0]), "--out", str(tmp_path / "run")])
    assert "--task node-class --label y" in capfd.readouterr().err


def test_labels_of_particles_are_not_offered_where_there_are_none(store):
    config = TrainConfig(task="node-class", label="colour", store=str(store[0]))
    with refused("colour.* --label .* y$"):
        tasks_of(config, EventStore(store[0]), World.alone())


def test_a_label_that_is_of_nodes_in_one_file_and_of_graphs_in_another_is_told_how_to_say(tmp_path, capfd):
    write(tmp_path / "graphs", "a", y_q=torch.rand(5))
    write(tmp_path / "graphs", "b", y_q=torch.rand(1))
    words = ["--source", "pyg", "--input", str(tmp_path / "graphs"), "--store", str(tmp_path / "store")]
    with pytest.raises(SystemExit, match="2"):
        prepare.main(words)
    assert not (tmp_path / "store" / "manifest.json").exists()
    assert "node_q or graph_q" in capfd.readouterr().err


def test_a_list_of_graphs_in_one_file_is_told_how_to_save_them(tmp_path):
    torch.save([{"x": torch.rand(2, 2)}], tmp_path / "all.pt")
    with refused("holds a list, expected .*; save each graph in a file of its own", "all", tmp_path / "all.pt"):
        read_file("pyg", tmp_path / "all.pt")
