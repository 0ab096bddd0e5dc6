"""What a store holds of each feature is its formula of the table, over its divisor, with its sign."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from domainpar.common.problems import EventPlace
from domainpar.tracking.events.construct import Cuts, build_graph, edge_features
from domainpar.tracking.events.features import EDGE_FEATURES, FEATURES, NODE_FEATURES, OF_CLUSTERS, SLOPE_LIMIT
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.store import EventStore, event_file_name, write_event, write_manifest
from domainpar.tracking.events.trackml import cluster_features

PAGE = Path(__file__).parents[3] / "docs/reference/features.md"


def wrapped(angle):
    return (angle + np.pi) % (2 * np.pi) - np.pi


def stored(place, graph):
    """Positions, ends, node features and edge features of a graph, as a store gives them back."""
    num_tiles = 4
    written = write_event(place / event_file_name("e"), graph, np.arange(graph.num_nodes) % num_tiles, num_tiles)
    write_manifest(place, [written], {"source": "simulate"})
    store = EventStore(place)
    with store.open(store.records[0]) as event:
        nodes, edges = np.arange(event.num_nodes), np.arange(event.num_edges)
        position = event.read_nodes("position", nodes).astype(np.float64)
        ends = [event.read_edges(name, edges) for name in ("src", "dst")]
        tables = event.read_nodes("features", nodes), event.read_edges("features", edges)
        return store, position, ends, tables


def by_formulas(position, src, dst):
    """Every feature of nodes and edges by the words of its formula alone, in its unit."""
    x, y, z = position.T
    known = {"x": x, "y": y, "z": z, "src": src, "dst": dst, "wrapped": wrapped}
    known |= {name: getattr(np, name) for name in ("hypot", "arctan2")}
    known["eta"] = np.arcsinh(z / np.maximum(np.hypot(x, y), 1e-3))
    for name in (*NODE_FEATURES, *EDGE_FEATURES):
        with np.errstate(divide="ignore", invalid="ignore"):
            known[name] = eval(FEATURES[name].formula, {}, dict(known))
        if name == "phi_slope":  # as its sign and range say
            most = SLOPE_LIMIT * FEATURES[name].divisor
            known[name] = np.where(known["dphi"] == 0, 0, np.clip(known[name], -most, most))
    return known


def test_the_store_holds_each_formula_over_its_divisor(tmp_path):
    hits = simulate_event(3, 600)
    store, position, (src, dst), found = stored(tmp_path, build_graph(hits, Cuts(same_layer=True)))
    assert (store.feature_names, store.edge_feature_names) == (NODE_FEATURES, EDGE_FEATURES)
    assert len(src) > 300
    known = by_formulas(position, src, dst)
    for names, table in ((NODE_FEATURES, found[0]), (EDGE_FEATURES, found[1])):
        for column, name in enumerate(names):
            expected = known[name] / FEATURES[name].divisor
            np.testing.assert_allclose(table[:, column], expected, rtol=2e-6, atol=1e-9, err_msg=name)
    defined = store.feature_definitions
    assert [divisor for divisor, _ in defined["edge_features"]] == [FEATURES[name].divisor for name in EDGE_FEATURES]
    assert defined["node_features"][1][1] == (
        "arctan2(y, x) [rad], over pi; in [-pi, pi); grows from the x axis to the y axis"
    )


def test_signs_and_units_are_those_of_a_pair_worked_out_by_hand(tmp_path):
    """From 30 mm along x to 60 mm along y, 10 mm on: a quarter turn, and back over the border of phi."""
    position = np.array([[30, 0, 0], [0, 60, 10], [-90, -1e-4, 20], [-90, 0, 20]], np.float32)
    layers = np.array([2, 4, 6, 6], np.int32)
    rows = np.arange(4)
    volume, module = np.full(4, 8, np.int32), rows.astype(np.int32)
    hits = Hits(event_id="e", hit_id=rows + 1, position=position, volume=volume, layer=layers, module=module)
    graph = build_graph(hits, Cuts(phi_slope=1.0, z0=1e6))
    edges = {(int(a), int(b)): row for a, b, row in zip(*graph.edge_index, graph.edge_features)}
    eta = np.arcsinh(10 / 60)
    np.testing.assert_allclose(edges[0, 1], [0.03, 0.5, 0.01, eta, 0.5 / 0.03, 0.045 * 0.5 / 0.03], rtol=1e-6)
    # phi of hit 2 is just above -pi: going on turning left from pi / 2 takes another quarter turn, not three back.
    assert edges[1, 2][1] == pytest.approx(0.5, abs=1e-5)
    assert graph.features[2, 1] == pytest.approx(-1.0)
    assert graph.features[3, 1] == -1.0, "pi itself is -pi"


def test_slopes_between_hits_at_one_radius_are_cut_and_keep_their_sign():
    position = np.array([[30, 0, 0], [0, 30, 5], [30, 0, 7], [0, 30.001, 5]])
    found = edge_features(position, np.array([[0, 1, 0, 0, 3], [1, 0, 2, 3, 0]]))
    assert found[:, 4].tolist() == [SLOPE_LIMIT, -SLOPE_LIMIT, 0, SLOPE_LIMIT, SLOPE_LIMIT]
    # The last leads inward: dphi and dr are both negative.
    np.testing.assert_allclose(found[:, 5], [3, -3, 0, 3, 3], rtol=1e-4)


def test_features_of_clusters_are_their_formulas():
    cells = {"ch0": np.array([10, 12, 11]), "ch1": np.array([5, 5, 4]), "value": np.array([0.25, 0.5, 0.25])}
    of_module = {"module_t": 0.15, "pitch_u": 0.05, "pitch_v": 0.06}
    numbers = {"volume_id": [8], "layer_id": [2], "module_id": [1]}
    found = cluster_features(
        pd.DataFrame({"hit_id": [7], **numbers}),
        pd.DataFrame({"hit_id": 7, **cells}),
        pd.DataFrame({**numbers, **of_module}),
        EventPlace("e"),
    )
    known = {**cells, **of_module, "cells": 3, "charge": cells["value"].sum(), "max": np.max, "min": np.min}
    known |= {"log": np.log, "arctan2": np.arctan2}
    for column, (name, feature) in enumerate(OF_CLUSTERS.items()):
        known[name] = eval(feature.formula, {}, dict(known))
        assert found[0, column] == pytest.approx(known[name] / feature.divisor, rel=1e-6, abs=1e-9), name


def test_every_feature_says_its_unit_and_sign_and_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    for name, feature in FEATURES.items():
        assert feature.sign, name
        assert f"| `{name}` |" in page
        assert f"| `{feature.formula}` | {feature.unit} |" in page


def test_columns_of_files_are_called_that_and_what_nobody_told_is_left_open(tmp_path):
    store, *_ = stored(tmp_path, build_graph(simulate_event(3, 100), Cuts()))
    store.settings = {
        "source": "acorn", "node_features": ["r", "phi", "z"], "node_scales": [1000.0, 3.0, 2.0],
        "edge_features": None, "edge_scales": None,
    }  # fmt: skip
    assert store.feature_definitions["node_features"][1] == (3.0, "column phi of the files, over 3")
    assert store.feature_definitions["edge_features"][0] == (1000.0, FEATURES["dr"].words)
    store.settings = {}
    assert store.feature_definitions == {"node_features": [(None, None)] * 3, "edge_features": [(None, None)] * 6}
