"""Features of clusters: what the cells of a hit amount to, in mm and rad, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from source_files import read_event

from domainpar.common.problems import Problem
from domainpar.tracking.config import ConfigError, PrepareConfig
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.features import CLUSTER_FEATURES
from domainpar.tracking.events.selection import Selection
from domainpar.tracking.events.sources import open_source

HITS = "hit_id,x,y,z,volume_id,layer_id,module_id\n7,32,0,5,8,2,1\n9,-4,72,10,8,4,2\n8,116,3,20,8,6,1\n"
CELLS = "hit_id,ch0,ch1,value\n9,10,5,0.25\n7,3,4,0.5\n9,12,5,0.5\n9,11,4,0.25\n8,0,0,2\n"
DETECTORS = (
    ",volume_id,layer_id,module_id,module_t,pitch_u,pitch_v\n0,8,2,1,0.15,0.05,0.06\n1,8,4,2,0.15,0.05,0.06\n"
    "2,8,6,1,0.25,0.08,1.2\n"
)


@pytest.fixture
def place(tmp_path):
    for name, content in (("event1-hits", HITS), ("event1-cells", CELLS), ("detectors", DETECTORS)):
        (tmp_path / f"{name}.csv").write_text(content)
    return tmp_path


def test_each_hit_has_the_size_charge_and_angle_of_its_own_cells(place):
    clusters = read_event("trackml", place, "1", cluster_features=True).clusters
    assert clusters.dtype == np.float32
    assert clusters.shape == (3, len(CLUSTER_FEATURES))
    expected = [
        [0, np.log(0.5), 0.05, 0.06, np.arctan(0.05 / 0.3), np.arctan(0.06 / 0.3)],
        [np.log(3), 0, 0.15, 0.12, np.arctan(0.15 / 0.3), np.arctan(0.12 / 0.3)],
        [0, np.log(2), 0.08, 1.2, np.arctan(0.08 / 0.5), np.arctan(1.2 / 0.5)],
    ]
    np.testing.assert_allclose(clusters, expected, rtol=1e-6, atol=1e-7)
    assert read_event("trackml", place, "1").clusters is None


def test_they_follow_the_other_features_and_their_hits(place):
    hits = read_event("trackml", place, "1", cluster_features=True)
    graph = build_graph(hits, Cuts())
    assert graph.feature_names == ("r", "phi", "z", *CLUSTER_FEATURES)
    assert np.array_equal(graph.features[:, 3:], hits.clusters)
    plain = build_graph(replace(hits, clusters=None), Cuts())
    assert np.array_equal(graph.features[:, :3], plain.features)
    assert np.array_equal(graph.edge_index, plain.edge_index)
    doubled = replace(hits, volume=np.array([8, 9, 8], np.int32))
    assert np.array_equal(Selection(volumes=(8,)).select(doubled).clusters, hits.clusters[[0, 2]])


def test_a_source_tells_the_files_that_it_reads_and_its_setting(place):
    source = open_source("trackml", directory=place, cluster_features=True)
    assert [path.name for path in source.files("1")] == ["event1-hits.csv", "event1-cells.csv", "detectors.csv"]
    assert source.settings["cluster_features"] is True
    plain = open_source("trackml", directory=place)
    assert [path.name for path in plain.files("1")] == ["event1-hits.csv"]
    assert "cluster_features" not in plain.settings


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("event1-cells", None, "no event1-cells.csv in"),
        ("detectors", None, "no detectors.csv in"),
        (
            "event1-cells",
            CELLS.replace("8,0,0,2\n", ""),
            "1 of 3 hits have no cell .* is hit_id 8",
        ),
        ("event1-cells", CELLS.replace("8,0,0,2", "8,0,0,0"), "1 of 3 hits have no cell with a charge"),
        ("detectors", DETECTORS.replace("8,4,2", "8,4,3"), r"does not list the module of 1 of \d hits, .* 8, 4, 2"),
        ("event1-cells", CELLS.replace("value", "charge"), "no column value"),
    ],
)
def test_cells_that_do_not_fit_are_refused(place, name, content, what):
    path = place / f"{name}.csv"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(Problem, match=what) as refused:
        read_event("trackml", place, "1", cluster_features=True)
    assert refused.value.event == "1"


def test_hits_without_cells_are_not_asked_for_them():
    with pytest.raises(ConfigError, match="--cluster-features .*--source simulate"):
        PrepareConfig(cluster_features=True)


def test_the_order_of_the_cells_changes_nothing(place):
    before = read_event("trackml", place, "1", cluster_features=True).clusters
    table = pd.read_csv(place / "event1-cells.csv")
    table.iloc[::-1].to_csv(place / "event1-cells.csv", index=False)
    assert np.array_equal(read_event("trackml", place, "1", cluster_features=True).clusters, before)
