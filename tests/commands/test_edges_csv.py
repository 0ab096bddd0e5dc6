"""Candidate edges as CSV: read by `prepare --edges-from`, written by a recipe as a submission to ColliderML is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_infer import inferred, opened, trained

from domainpar import prepare
from domainpar.common.problems import Problem
from domainpar.testing import patient
from domainpar.tracking.config import ConfigError, PrepareConfig
from domainpar.tracking.events.given_edges import GivenEdges
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.store import EventStore, WholeEvent

pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install '.[parquet]')")
ROOT = Path(__file__).parents[2]
SIMULATED = ("--events", "2", "--hits", "600", "--tiles", "4", "--val-split", "0", "--test-split", "0")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("edges")
    assert prepare.main([*SIMULATED, "--store", str(place / "store")]) == 0
    trained(place / "store", place / "run", max_steps=1)
    inferred(place, place / "scores", checkpoint="last", tracks="cc")
    page = (ROOT / "docs/reference/files.md").read_text(encoding="utf-8")
    (recipe,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "-graph.csv" in text]
    for name, here in {"stores/simulate-20000": "store", "runs/0001": "scores"}.items():
        recipe = recipe.replace(name, str(place / here))
    (place / "graphs").mkdir()
    command = [sys.executable, "-c", recipe.replace('events("test")', "events()")]
    where = {"cwd": place / "graphs", "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    subprocess.run(command, check=True, timeout=patient(60), **where)
    return place


def graphs(store):
    """Edges with their labels of each event by name, in the order of its files."""
    events = {}
    for record in EventStore(store).events():
        with EventStore(store).open(record) as event:
            whole = WholeEvent(event)
            events[record.event] = np.concatenate([whole.edge_index, whole.edges("label")[None]]), whole.event.num_nodes
    return events


def test_the_recipe_of_the_page_writes_what_prepare_reads_as_the_same_candidate_edges(place, tmp_path):
    graphs_of_recipe, words = shutil.copytree(place / "graphs", tmp_path / "graphs"), [*SIMULATED, "--store"]
    words += [str(tmp_path / "store"), "--edges-from", str(graphs_of_recipe)]
    assert prepare.main(words) == 0
    ours, again = graphs(place / "store"), graphs(tmp_path / "store")
    assert ours.keys() == again.keys()
    for name, (edges, nodes) in ours.items():
        assert again[name][1] == nodes
        assert np.array_equal(again[name][0], edges)
    # Another edge is another event, though hits and flags are the same.
    path = graphs_of_recipe / "event000000001-graph.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    before = EventStore(tmp_path / "store").digest
    assert prepare.main(words) == 0
    assert EventStore(tmp_path / "store").digest != before


def test_the_recipe_of_the_page_writes_scores_and_tracks_of_all_events(place):
    table = pd.read_parquet(place / "graphs" / "submission.parquet")
    assert table.event_id.unique().tolist() == [0, 1]
    for record in EventStore(place / "store").events():
        event, of_event = int(record.event), table[table.event_id == int(record.event)]
        arrays = opened(place / "scores" / f"event{event:09d}.scores.zarr.zip")
        weights = pd.read_csv(place / "graphs" / f"event{event:09d}-graph.csv").weight
        assert np.array_equal(weights.to_numpy(np.float32), arrays["edge_score"][...].astype(np.float32))
        track_id, hit_id = arrays["track_id"][...], arrays["hit_id"][...]
        assert np.array_equal(of_event.hit_id, hit_id[track_id >= 0])
        assert np.array_equal(of_event.track_id, track_id[track_id >= 0])
        with EventStore(place / "store").open(record) as stored:
            truth = dict(zip(hit_id.tolist(), WholeEvent(stored).nodes("particle_id").tolist()))
        for _, track in of_event.groupby("track_id"):
            counts = Counter(truth[hit] for hit in track.hit_id)
            assert {counts[int(majority)] for majority in track.majority_particle_id} == {max(counts.values())}


def edges_of(directory, event, num_hits):
    return GivenEdges(directory).edges(Hits.bare(event, range(num_hits), None), None)


def test_columns_may_stand_in_any_order_and_numbers_of_events_have_nine_digits_or_not(tmp_path):
    (tmp_path / "event000000007-graph.csv").write_text("weight, edge1 ,edge0\n0.5,1,0\n1e-3,2,1\n")
    assert edges_of(tmp_path, "7", 3).tolist() == [[0, 1], [1, 2]]
    (tmp_path / "event8-graph.csv").write_text("edge0,edge1,weight\n")
    assert edges_of(tmp_path, "8", 0).shape == (2, 0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("edge0,edge1,weight\n0,1,1\n#1,2,1\n", "edge0 holds 1 values that are no whole numbers .*: #1 in row 1"),
        ("edge0,edge1,weight\n0,1,1\n1,2", "row 1 has 2 fields, and the first line has 3"),
        ("edge0,edge1,weight\n0,1\n", "row 0 has 2 fields, and the first line has 3"),
        ("edge0,edge1\n0,1e300\n", "edge1 holds 1 values that are no whole numbers .*: 1e300 in row 0"),
        ("src,dst\n0,1\n", r"no column edge0, edge1; found \['src', 'dst'\]"),
        ("edge0,edge1,weight\n0,5,1\n", "edge0, edge1"),
        ("edge0,edge1,weight\n0,-1,1\n", "edge0, edge1"),
        ("edge0,edge1,weight\n0,1.5,1\n", "edge1 holds 1 values that are no whole numbers .*: 1.5 in row 0"),
        ("edge0,edge1,weight\n0,1,1\n2\n", "row 1 has 1 fields, and the first line has 3"),
    ],
)
def test_a_file_that_does_not_fit_the_event_is_refused(tmp_path, text, error):
    path = tmp_path / "event7-graph.csv"
    path.write_text(text)
    with pytest.raises(Problem) as refused:
        edges_of(tmp_path, "7", 3)
    assert re.search(error, refused.value.what)
    assert (refused.value.event, refused.value.file) == ("7", str(path))


def test_files_that_are_missing_or_no_text_are_named_also_once_the_store_is_there(place, tmp_path, capfd):
    words = [*SIMULATED, "--store", str(tmp_path / "store"), "--edges-from", str(tmp_path / "edges")]
    for _ in range(2):
        assert prepare_main(words) == 2
        said = capfd.readouterr().err
        assert "no such file" in said
        assert "event 000000000" in said
        shutil.copytree(place / "graphs", tmp_path / "edges", dirs_exist_ok=True)
        assert prepare_main(words) == 0
        capfd.readouterr()
        (tmp_path / "edges" / "event000000000-graph.csv").unlink()
    (tmp_path / "edges" / "event000000000-graph.csv").write_bytes(b"edge0,edge1\n0,\xff\xfe\n")
    assert prepare_main(words) == 2
    assert "'utf-8' codec" in capfd.readouterr().err
    assert prepare_main([*words[:-1], ""]) == 2
    assert "no such file" in capfd.readouterr().err


def prepare_main(words):
    try:
        return prepare.main(words)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"preset": "pixel", "volumes": "7, 8, 9"}, "--volumes .*--preset pixel"),
        ({"phi_slope": 1e-3}, "--phi-slope 0.001 .*with --edges-from"),
        ({"module_map": "build"}, "--module-map build .*with --edges-from"),
        ({"hit_inefficiency": 0.1}, "--hit-inefficiency .*--edges-from"),
        ({"source": "pyg", "input": "x"}, "--edges-from edges .*with --source pyg"),
    ],
)
def test_flags_that_contradict_it_are_refused(flags, error):
    with pytest.raises(ConfigError) as refused:
        PrepareConfig(edges_from="edges", **flags)
    assert re.search(error, refused.value.what)
