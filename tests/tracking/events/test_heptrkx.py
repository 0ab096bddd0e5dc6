"""The heptrkx reader: the graph that the incidence lists say, in mm, or an error that names event and file."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import source_files
from marks import fault
from refused import refused

names_in, paths_of, read_event = (
    partial(call, "heptrkx") for call in (source_files.names_in, source_files.paths_of, source_files.read_event)
)

# Three hits, edges 0 -> 1, 1 -> 2 and 0 -> 2, the ends listed in different orders.
GRAPH = {
    "X": np.array([[0.03, 0.5, 0.1], [0.07, 0.99, -0.2], [0.11, -0.99, 0.4]], np.float32),
    "y": np.array([1, 0, 1], np.float32),
    "Ro_rows": np.array([0, 0, 1]),
    "Ro_cols": np.array([0, 2, 1]),
    "Ri_rows": np.array([2, 2, 1]),
    "Ri_cols": np.array([2, 1, 0]),
}


def save(directory, name="event000001000_g000", **changes):
    arrays = {name: array for name, array in {**GRAPH, **changes}.items() if array is not None}
    np.savez(directory / f"{name}.npz", **arrays)
    return directory


def test_the_graph_is_what_the_lists_of_ends_say(tmp_path):
    graph = read_event(save(tmp_path), "000001000_g000")
    assert graph.edge_index.tolist() == [[0, 1, 0], [1, 2, 2]]
    assert graph.label.tolist() == [1, 0, 1]
    assert graph.features.tolist() == GRAPH["X"].tolist()
    assert graph.hits.hit_id.tolist() == [0, 1, 2]
    assert graph.hits.particle_id is None


def test_positions_are_in_mm_and_edge_features_wrap_at_pi(tmp_path):
    graph = read_event(save(tmp_path), "000001000_g000")
    assert graph.hits.position[0] == pytest.approx([0, 30, 100], abs=1e-4)
    dphi = graph.edge_features[1, graph.edge_feature_names.index("dphi")]
    assert dphi == pytest.approx(0.02, abs=1e-5)


def test_phi_of_sectors_is_brought_to_the_units_of_whole_events(tmp_path):
    graph = read_event(save(tmp_path), "000001000_g000", num_phi_sectors=4)
    assert graph.features[:, 1] == pytest.approx(GRAPH["X"][:, 1] / 4)
    assert graph.hits.position[0] == pytest.approx([30 * np.cos(np.pi / 8), 30 * np.sin(np.pi / 8), 100])


def test_hit_ids_are_read_from_the_file_beside(tmp_path):
    save(tmp_path)
    np.savez(tmp_path / "event000001000_g000_ID.npz", ID=np.array([17, 4, 99]))
    assert read_event(tmp_path, "000001000_g000").hits.hit_id.tolist() == [17, 4, 99]
    assert names_in(tmp_path) == ["000001000_g000"]
    assert [path.name[-7:] for path in paths_of(tmp_path, "000001000_g000")] == ["000.npz", "_ID.npz"]


@pytest.mark.parametrize(
    ("ids", "message"), [([1, 2], r"shape \[2\], expected integers \[3\]"), ([1, 2, 2], "1 of 3 hit ids are repeated")]
)
def test_hit_ids_that_do_not_fit_are_refused(tmp_path, ids, message):
    save(tmp_path)
    np.savez(tmp_path / "event000001000_g000_ID.npz", ID=np.array(ids))
    with refused(message, "000001000_g000", tmp_path / "event000001000_g000_ID.npz"):
        read_event(tmp_path, "000001000_g000")


@fault(21)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": None}, "no array y; found"),
        ({"X": np.zeros((3, 4))}, r"X .*\[3, 4\], .*\[hits, 3\]"),
        ({"X": np.full((3, 3), np.nan)}, "X holds 9 values not finite"),
        ({"y": np.array([0, 1, 0.5], np.float32)}, "label of edge 2 is 0.5"),
        ({"Ri_rows": np.array([2, 3, 1])}, "edge 1: 1 -> 3; .*0 to 2"),
        ({"Ro_cols": np.array([0, 0, 1])}, "Ro_cols lists edge 0 2 times"),
        ({"Ro_cols": np.array([0, 3, 1])}, "Ro_cols lists edge 2 0 times"),
        ({"Ro_rows": np.array([0, 1])}, r"Ro_rows .*\[2\], .*\[3\]"),
        ({"Ri_rows": np.array([0.0, 1.0, 2.0])}, "Ri_rows is float64"),
        ({"y": np.array([object()] * 3)}, "cannot be read, ValueError: Object arrays"),
    ],
)
def test_bad_graphs_are_refused_with_event_and_file(tmp_path, changes, message):
    save(tmp_path, **changes)
    with refused(message, "000001000_g000", tmp_path / "event000001000_g000.npz"):
        read_event(tmp_path, "000001000_g000")


@pytest.mark.parametrize("size", [0, 100, -1])
def test_truncated_files_are_refused(tmp_path, size):
    path = save(tmp_path) / "event000001000_g000.npz"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="cannot be read"):
        read_event(tmp_path, "000001000_g000")


def test_directories_without_graphs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no heptrkx graphs"):
        names_in(tmp_path)
    with pytest.raises(ValueError, match="not a directory"):
        names_in(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="FileNotFoundError"):
        read_event(tmp_path, "1")
