"""The PyG reader: the graph as it was saved, an error that says what is wrong, and no hostile pickle ever run."""

from __future__ import annotations

import os
import pickle
import subprocess
import timeit
from functools import partial

import numpy as np
import pytest
from marks import fault
from refused import refused
from source_files import names_in, paths_of, read_file

torch = pytest.importorskip("torch")


read_event = partial(read_file, "pyg")

GRAPH = {
    "x": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
    "edge_index": torch.tensor([[0, 1, 2, 2], [1, 2, 2, 0]]),
    "edge_attr": torch.tensor([0.5, 1.5, 2.5, 3.5]),
    "y": torch.tensor([True, False, False, True]),
    "pos": torch.tensor([[1.0, 2.0, 3.0]] * 3),
}


def save(directory, name="event7.pt", **changes):
    path = directory / name
    torch.save({key: value for key, value in {**GRAPH, **changes}.items() if value is not None}, path)
    return path


def test_a_dict_of_tensors_is_read_as_it_was_saved(tmp_path):
    graph = read_event(save(tmp_path))
    assert graph.hits.event_id == "7"
    assert graph.features.tolist() == GRAPH["x"].tolist()
    assert graph.edge_index.tolist() == GRAPH["edge_index"].tolist()
    assert graph.edge_features.tolist() == [[0.5], [1.5], [2.5], [3.5]]
    assert graph.label.tolist() == [1, 0, 0, 1]
    assert graph.hits.position.tolist() == GRAPH["pos"].tolist()
    assert graph.hits.hit_id.tolist() == [0, 1, 2]


@fault(20)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pyg_data_is_read_even_with_numpy_values_and_strings_in_it(tmp_path, zipped):
    data = pytest.importorskip("torch_geometric.data").Data(
        **GRAPH, event_id="7", number=np.int64(3), mean=np.float32(0.5), table=np.arange(4), config=[{"a": 1}]
    )
    path = tmp_path / "event7.pyg"
    torch.save(data, path, _use_new_zipfile_serialization=zipped)
    graph = read_event(path)
    assert graph.edge_index.tolist() == GRAPH["edge_index"].tolist()
    assert graph.label.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("zipped", [True, False])
def test_a_data_of_pyg_1_is_read(tmp_path, zipped):
    data = pytest.importorskip("torch_geometric.data").Data
    old = data.__new__(data)
    old.__dict__.update(GRAPH, norm=None, face=None)  # what PyG 1 kept, and nothing else
    torch.save(old, tmp_path / "event7.pt", _use_new_zipfile_serialization=zipped)
    graph = read_event(tmp_path / "event7.pt")
    assert graph.features.tolist() == GRAPH["x"].tolist()
    assert graph.label.tolist() == [1, 0, 0, 1]


def test_particles_of_nodes_and_names_of_features_are_those_of_the_file(tmp_path):
    truth = {"particle_id": torch.tensor([9, 0, 9]), "pt": torch.tensor([1.5, torch.nan, 1.5])}
    names = {"x_names": ["r", "z"], "edge_attr_names": ("dr",)}
    graph = read_event(save(tmp_path, **truth, **names, eta=torch.tensor([0.5, 0.0, 0.25])))
    assert (graph.feature_names, graph.edge_feature_names) == (("r", "z"), ("dr",))
    assert graph.hits.particle_id.tolist() == [9, 0, 9]
    particles = graph.hits.particles
    assert (particles.particle_id.tolist(), particles.nhits.tolist(), particles.pt.tolist()) == ([9], [2], [1.5])
    assert np.isnan(particles.eta).all(), "it differs within a particle: it is of nodes"


@pytest.mark.parametrize("value", [torch.tensor([9, 9]), torch.tensor([0.5, 0.5, 1.0]), "nine"])
def test_what_is_no_particle_of_each_node_is_left_alone(tmp_path, value):
    assert read_event(save(tmp_path, particle_id=value)).hits.particle_id is None


def test_only_features_and_edges_are_needed(tmp_path):
    graph = read_event(save(tmp_path, edge_attr=None, y=None, pos=None))
    assert (graph.label, graph.hits.position, graph.edge_feature_names) == (None, None, ())
    assert graph.edge_features.shape == (4, 0)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8])
def test_features_of_any_number_type_become_float32(tmp_path, kind):
    graph = read_event(save(tmp_path, x=GRAPH["x"].to(kind), edge_index=GRAPH["edge_index"].int()))
    assert graph.features.dtype == np.float32
    assert graph.features.tolist() == GRAPH["x"].tolist()


def test_a_column_of_features_and_a_column_of_labels_are_understood(tmp_path):
    graph = read_event(save(tmp_path, x=torch.tensor([1.0, 2.0, 3.0]), y=torch.tensor([[1.0], [0.0], [0.0], [1.0]])))
    assert graph.features.tolist() == [[1.0], [2.0], [3.0]]
    assert graph.label.tolist() == [1, 0, 0, 1]


def test_graphs_without_edges_are_read(tmp_path):
    changes = {"edge_index": torch.zeros(2, 0, dtype=torch.long), "edge_attr": torch.zeros(0, 3), "y": torch.zeros(0)}
    assert read_event(save(tmp_path, **changes)).num_edges == 0


@fault(21)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, r"no x; .*\['edge_attr', 'edge_index', 'pos', 'y'\]"),
        ({"edge_index": None}, "no edge_index"),
        ({"edge_index": torch.tensor([[0, 1], [1, 3]]), "edge_attr": None, "y": None}, "edge 1: 1 -> 3; .*0 to 2"),
        ({"edge_index": torch.tensor([[0, -1], [1, 2]]), "edge_attr": None, "y": None}, "edge 1: -1 -> 2"),
        ({"edge_index": torch.zeros(4, 2, dtype=torch.long)}, r"edge_index .*\[4, 2\]"),
        ({"edge_index": torch.zeros(2, 4)}, "edge_index is float64"),
        ({"x": torch.full((3, 2), torch.nan)}, r"features holds 6 .*nan at \[0, 0\]"),
        ({"x": torch.full((3, 2), 1e300, dtype=torch.float64)}, "features holds 6 "),
        ({"edge_attr": torch.tensor([0.0, 1.0, torch.inf, 2.0])}, r"edge_features holds 1 .* inf at \[2, 0\]"),
        ({"edge_attr": torch.zeros(3, 2)}, r"edge_features .*\[3, 2\], .*\[4, 2\]"),
        ({"x": torch.zeros(3, 2, 2)}, r"x .*\[3, 2, 2\]"),
        ({"x": "text"}, "x is a str"),
        ({"x": torch.zeros(3, 2).to_sparse()}, "x is a sparse"),
        ({"y": torch.tensor([0, 1, 0, 0, 1])}, r"y .*\[5\], .* edge, .* node, .* graph, \[4\]"),
        ({"y": torch.zeros(2, 2)}, r"y .*\[2, 2\], .* \[4\]"),
        ({"edge_y": torch.tensor([1]), "y": None}, r"edge_y .*\[1\], .*\[4\]"),
        ({"y": torch.tensor([0, 1, 2, 0])}, r"edge 2 is 2, .* \(1 such edges\)"),
        ({"y": torch.tensor([0, 1, torch.nan, 0])}, "edge 2 is nan"),
        ({"pos": torch.zeros(3, 2)}, r"pos .*\[3, 2\], .*x, y, z"),
        ({"particle_id": torch.tensor([4, -1, 4])}, "particle_id is -1 at node 1"),
        ({"x_names": ["r", "r"]}, r"x_names is \['r', 'r'\], expected 2 texts"),
    ],
)
def test_bad_graphs_are_refused_with_event_and_file(tmp_path, changes, message):
    path = save(tmp_path, **changes)
    with refused(message, "7", path):
        read_event(path)


class Hostile:
    """Runs a call when it is unpickled."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def payloads(mark):
    return {
        "system": Hostile(os.system, f"touch {mark}"),
        "check_call": Hostile(subprocess.check_call, ["touch", str(mark)]),
        "exec": Hostile(exec, f"open({str(mark)!r}, 'w')"),
        "eval": Hostile(eval, f"open({str(mark)!r}, 'w')"),
        "timeit": Hostile(timeit.timeit, f"open({str(mark)!r}, 'w')", "pass", timeit.default_timer, 1),
    }


def save_bare(thing, path):
    path.write_bytes(pickle.dumps(thing))


def save_old(thing, path):
    torch.save(thing, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("kind", ["system", "check_call", "exec", "eval", "timeit"])
def test_the_hostile_files_of_these_tests_do_run_where_unpickling_is_not_restricted(tmp_path, kind):
    save_bare(payloads(tmp_path / "was-run")[kind], tmp_path / "event7.pyg")
    pickle.loads((tmp_path / "event7.pyg").read_bytes())
    assert (tmp_path / "was-run").exists()


def test_a_class_that_is_not_allowed_is_refused_by_name(tmp_path):
    torch.save({**GRAPH, "z": Hostile(os.path.join, "a", "b")}, tmp_path / "event7.pt")
    with pytest.raises(ValueError, match=r"refused, nothing of it was run: it asks for posixpath\.join"):
        read_event(tmp_path / "event7.pt")


@pytest.mark.parametrize("way", [torch.save, save_old, save_bare], ids=["zip", "old", "pickle"])
@pytest.mark.parametrize("size", [0, 10, 300, -10])
def test_truncated_files_are_refused_without_advice_to_load_them_unsafely(tmp_path, size, way):
    path = tmp_path / "event7.pt"
    way(GRAPH, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="cannot be read") as refused:
        read_event(path)
    assert "weights_only" not in str(refused.value)


def test_a_file_of_something_else_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / "event7.pt")
    with pytest.raises(ValueError, match="holds a list, expected"):
        read_event(tmp_path / "event7.pt")
    with pytest.raises(ValueError, match="no such file"):
        read_event(tmp_path / "event8.pt")


def test_events_of_a_directory_are_listed_and_found(tmp_path):
    for name in ("event7.pt", "top.pyg", "notes.txt"):
        (tmp_path / name).touch()
    assert names_in("pyg", tmp_path) == ["7", "top"]
    assert [paths_of("pyg", tmp_path, name)[0].name for name in ("7", "top")] == ["event7.pt", "top.pyg"]
    (tmp_path / "7.pyg").touch()
    with refused("of one event by their names", "7"):
        names_in("pyg", tmp_path)


def test_directories_without_graphs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no PyG graphs"):
        names_in("pyg", tmp_path)
    with pytest.raises(ValueError, match="not a directory"):
        names_in("pyg", tmp_path / "nowhere")
