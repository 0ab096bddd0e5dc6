"""Labels of nodes and of whole events: read from PyG files, kept in a store, or known from particles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_events import random_assignment, random_event
from refused import refused
from source_files import read_file

from domainpar.common.problems import Problem
from domainpar.tracking.events.graph import Particles
from domainpar.tracking.events.labels import MOST_CLASSES, OF_PARTICLES, Label, is_known, particle_label
from domainpar.tracking.events.store import EventStore, StoredEvent, WholeEvent, write_event, write_manifest

GRAPH = {
    "x": torch.ones(3, 2),
    "edge_index": torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]),
}


def read(directory, **entries):
    path = directory / "event7.pt"
    torch.save(GRAPH | entries, path)
    return read_file("pyg", path)


def test_labels_are_told_apart_by_their_number(tmp_path):
    graph = read(
        tmp_path, y=torch.tensor([1, 0, -1, 1]), y_energy=torch.tensor([[0.5], [float("nan")], [2.0]]), y_jet=3
    )
    assert graph.label.tolist() == [1, 0, -1, 1]
    assert graph.label.dtype == np.int8
    assert np.array_equal(graph.node_labels["energy"], [0.5, np.nan, 2.0], equal_nan=True)
    assert graph.graph_labels == {"jet": 3}
    assert read(tmp_path, y=torch.tensor([2, 0, -1])).node_labels["y"].tolist() == [2, 0, -1]
    assert read(tmp_path, y=torch.tensor([1.5])).graph_labels == {"y": 1.5}
    square = {"x": torch.ones(4, 2)}  # as many nodes as edges
    with refused("y has 4 values, .*edge_y or node_y", "7", tmp_path / "event7.pt"):
        read(tmp_path, **square, y=torch.tensor([1, 0, 0, 1]))
    assert read(tmp_path, **square, edge_y=torch.tensor([1, 0, 0, 1])).label.tolist() == [1, 0, 0, 1]
    assert read(tmp_path, **square, node_y=torch.tensor([5, 0, 0, 1])).node_labels["y"].tolist() == [5, 0, 0, 1]


def test_columns_of_a_label_are_labels_of_their_own(tmp_path):
    graph = read(tmp_path, node_y_p=torch.arange(6.0).reshape(3, 2), graph_y=torch.tensor([[1.0, 2.0]]))
    assert {name: column.tolist() for name, column in graph.node_labels.items()} == {"p0": [0, 2, 4], "p1": [1, 3, 5]}
    assert graph.graph_labels == {"y0": 1.0, "y1": 2.0}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"node_y": torch.tensor([0, 1, -2])}, "label y of row 2 is -2, .* 0 to 999, or -1"),
        ({"node_y": torch.tensor([0, 1, MOST_CLASSES])}, "row 2 is 1000, (?s:.*)floats"),
        ({"y_energy": torch.tensor([0.0, torch.inf, 1.0])}, "label energy of row 1 is inf"),
        ({"node_y_energy": torch.zeros(7)}, r"node_y_energy .*\[7\], .*per node"),
        ({"node_y_a": torch.zeros(3), "graph_y_a": 1.0}, "label a .*nodes and .*graph"),
        ({"y_a": torch.zeros(3), "node_y_a": torch.ones(3)}, "label a .*node_y_a"),
        ({"node_y_a": torch.zeros(3, 2), "node_y_a0": torch.ones(3)}, "label a0 .*node_y_a0"),
        ({"graph_y": 1.0, "graph_y_y": 2.0}, "label y .*graph_y_y"),
    ],
)
def test_what_is_no_label_is_refused_by_name(tmp_path, entries, said):
    with pytest.raises(Problem, match=said):
        read(tmp_path, **entries)


def test_a_store_keeps_labels_and_its_manifest_lists_them(tmp_path):
    event = random_event(3, 30, 80)
    event = replace(event, label=np.where(np.arange(event.num_edges) % 5 == 0, -1, event.label.astype(int)))
    record = write_event(tmp_path / "event3.zarr.zip", event, random_assignment(3, 30, 4), 4)
    write_manifest(tmp_path, [record], {})
    (listed,) = EventStore(tmp_path).records
    classes = {label.name: label for label in listed.labels}
    assert classes == {
        "kind": Label("kind", "node", 3),
        "energy": Label("energy", "node", 0),
        "sort": Label("sort", "graph", 3),
        "size": Label("size", "graph", 0),
    }
    with StoredEvent(tmp_path / record.path) as stored:
        whole = WholeEvent(stored)
        assert whole.edges("label").tolist() == event.label.tolist()
        assert whole.node_labels["kind"].tolist() == event.node_labels["kind"].tolist()
        in_float32 = event.node_labels["energy"].astype(np.float32).astype(np.float64)
        assert np.array_equal(whole.node_labels["energy"], in_float32, equal_nan=True)
        assert stored.graph_labels == {"sort": 2, "size": 30.0}
        with pytest.raises(Problem, match="no label strange"):
            stored.read_label("strange", np.arange(3))
        rows = np.array([7, 2, 2])
        assert np.array_equal(
            stored.read_label("pt", rows),
            particle_label("pt", stored.read_nodes("particle_id", rows), stored.particles()),
            equal_nan=True,
        )


def test_a_number_of_the_event_may_be_unknown(tmp_path):
    event = replace(random_event(3, 5, 8), graph_labels={"size": float("nan")})
    write_event(tmp_path / "event3.zarr.zip", event, np.zeros(5, np.int32), 1)
    with StoredEvent(tmp_path / "event3.zarr.zip") as stored:
        assert np.isnan(stored.graph_labels["size"])


PARTICLES = Particles(
    particle_id=np.array([9, 4, 6]),
    pt=np.array([1.0, np.nan, 3.0], np.float32),
    eta=np.zeros(3, np.float32),
    vertex=np.array([[0.1, 0.0, 5.0], [30.0, 40.0, 1.0], [np.nan, np.nan, np.nan]], np.float32),
    nhits=np.array([4, 5, 6], np.int32),
    charge=np.ones(3, np.int8),
)
HITS = np.array([4, 0, 9, 6, 5])  # 5 is a particle that nobody knows


def test_labels_of_hits_are_those_of_their_particles():
    nan = np.nan
    for name, expected in {
        "pt": [nan, nan, 1.0, 3.0, nan],
        "radius": [50.0, nan, np.float32(0.1), nan, nan],
        "vz": [1.0, nan, 5.0, nan, nan],
        "nhits": [5.0, nan, 4.0, 6.0, nan],
        "origin": [2.0, 0.0, 1.0, -1.0, -1.0],
    }.items():
        found = particle_label(name, HITS, PARTICLES)
        assert np.array_equal(found, np.array(expected, np.float64), equal_nan=True), name
        label = next(label for label in OF_PARTICLES if label.name == name)
        unknown = np.isnan(expected) if name != "origin" else np.array(expected) < 0
        assert np.array_equal(is_known(label, found), ~unknown)
    told = replace(PARTICLES, primary=np.array([0, 1, 1], np.int8))
    assert particle_label("origin", HITS, told).tolist() == [1.0, 0.0, 2.0, 1.0, -1.0]


def test_without_particles_nothing_is_known():
    nobody = Particles(*(array[:0] for array in (PARTICLES.particle_id, PARTICLES.pt, PARTICLES.eta, PARTICLES.vertex)),
                       PARTICLES.nhits[:0], PARTICLES.charge[:0])  # fmt: skip
    assert np.isnan(particle_label("pt", HITS, nobody)).all()
    assert particle_label("origin", HITS, nobody).tolist() == [-1, 0, -1, -1, -1]


def test_entries_that_only_begin_alike_are_left_alone(tmp_path):
    others = {
        "y_name": "abc",
        "y_list": [1, 2, 3],
        "y_pid": torch.tensor([True] * 4),  # one for each edge, as the truth is
        "y_weight": torch.rand(4),
        "y_particle": torch.tensor([10**6, 2, 10**9]),
        "y_cov": torch.zeros(1, 3, 3),
        "edge_y_other": torch.ones(4),
    }
    graph = read(tmp_path, y=torch.tensor([1, 0, 0, 1]), **others)
    assert graph.label.tolist() == [1, 0, 0, 1]
    assert (graph.node_labels, graph.graph_labels) == ({}, {})
    assert read(tmp_path, **others).label is None


def test_a_label_is_not_called_as_edges_are(tmp_path):
    with pytest.raises(Problem, match="a label is called edge"):
        read(tmp_path, node_y_edge=torch.zeros(3))
