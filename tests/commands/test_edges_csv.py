"""Candidate edges as CSV: written by `infer --format edges`, read by `prepare --edges-from`."""

from __future__ import annotations

import re

import numpy as np
import pytest
from test_infer import inferred, opened, trained

from domainpar import prepare
from domainpar.common.problems import Problem
from domainpar.tracking.config import ConfigError, PrepareConfig
from domainpar.tracking.events.given_edges import GivenEdges, read_edges, write_edges
from domainpar.tracking.events.store import EventStore, WholeEvent

SIMULATED = ("--events", "2", "--hits", "600", "--tiles", "4", "--val-split", "0", "--test-split", "0")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("edges")
    assert prepare.main([*SIMULATED, "--store", str(place / "store")]) == 0
    trained(place / "store", place / "run", max_steps=1)
    return place


def graphs(store):
    """Edges with their labels of each event by name, in the order of its files."""
    events = {}
    for record in EventStore(store).events():
        with EventStore(store).open(record) as event:
            whole = WholeEvent(event)
            events[record.event] = np.concatenate([whole.edge_index, whole.edges("label")[None]]), whole.event.num_nodes
    return events


def test_what_infer_writes_are_the_edges_and_scores_of_the_event(place, tmp_path, capsys):
    inferred(place, tmp_path / "one", checkpoint="last", format="edges")
    assert "event<name>-graph.csv" in capsys.readouterr().out
    inferred(place, tmp_path / "two", 2, checkpoint="last", format="edges")
    names = sorted(path.name for path in (tmp_path / "one").glob("*.csv"))
    assert names == ["event000000000-graph.csv", "event000000001-graph.csv"]
    for name in names:
        path = tmp_path / "one" / name
        assert path.read_bytes() == (tmp_path / "two" / name).read_bytes()
        head, *lines = path.read_text().splitlines()
        assert head == "edge0,edge1,weight"
        scores = opened(tmp_path / "one" / name.replace("-graph.csv", ".scores.zarr.zip"))
        table = np.loadtxt(lines, delimiter=",")
        assert np.array_equal(table[:, :2].T, scores["edge_index"][...])
        assert np.array_equal(table[:, 2].astype(np.float32), scores["edge_score"][...].astype(np.float32))


def test_what_it_writes_is_read_as_the_same_candidate_edges(place, tmp_path, capsys):
    inferred(place, tmp_path / "scores", checkpoint="last", format="edges")
    words = [*SIMULATED, "--store", str(tmp_path / "store"), "--edges-from", str(tmp_path / "scores")]
    assert prepare.main(words) == 0
    ours, again = graphs(place / "store"), graphs(tmp_path / "store")
    assert ours.keys() == again.keys()
    for name, (edges, nodes) in ours.items():
        assert again[name][1] == nodes
        assert np.array_equal(again[name][0], edges)
    # Another edge is another event, though hits and flags are the same.
    path = tmp_path / "scores" / "event000000001-graph.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    before = EventStore(tmp_path / "store").digest
    assert prepare.main(words) == 0
    assert EventStore(tmp_path / "store").digest != before


def test_a_naive_run_writes_the_edges_that_it_scored(place, tmp_path):
    listed, _ = inferred(place, tmp_path / "out", checkpoint="last", format="edges", mode="naive", sectors=2)
    for event in listed["events"]:
        edges = read_edges(tmp_path / "out" / f"event{event['event']}-graph.csv", event["event"], 10**6)
        assert edges.shape[1] == event["edges"] - event["unscored"]
        assert event["unscored"] > 0


def test_columns_may_stand_in_any_order_and_numbers_of_events_have_nine_digits_or_not(tmp_path):
    (tmp_path / "event000000007-graph.csv").write_text("weight, edge1 ,edge0\n0.5,1,0\n1e-3,2,1\n")
    path = GivenEdges(tmp_path).path("7")
    assert read_edges(path, "7", 3).tolist() == [[0, 1], [1, 2]]
    write_edges(tmp_path / "event8-graph.csv", np.zeros((2, 0), np.int64), np.zeros(0))
    assert read_edges(GivenEdges(tmp_path).path("8"), "8", 0).shape == (2, 0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("edge0,edge1,weight\n0,1,1\n#1,2,1\n", "cannot be read"),
        ("edge0,edge1,weight\n0,1,1\n1,2", "cannot be read: "),
        ("edge0,edge1,weight\n0,1\n", "2 numbers, .* 3 columns"),
        ("edge0,edge1\n0,1e300\n", "not whole numbers"),
        ("src,dst\n0,1\n", "edge0; found src, dst"),
        ("edge0,edge1,weight\n0,5,1\n", "edge0, edge1"),
        ("edge0,edge1,weight\n0,-1,1\n", "edge0, edge1"),
        ("edge0,edge1,weight\n0,1.5,1\n", "not whole numbers"),
        ("edge0,edge1,weight\n0,1,1\n2\n", "cannot be read: "),
    ],
)
def test_a_file_that_does_not_fit_the_event_is_refused(tmp_path, text, error):
    path = tmp_path / "event7-graph.csv"
    path.write_text(text)
    with pytest.raises(Problem) as refused:
        read_edges(path, "7", 3)
    assert re.search(error, refused.value.what)
    assert (refused.value.event, refused.value.file) == ("7", str(path))


def test_files_that_are_missing_or_no_text_are_named_also_once_the_store_is_there(place, tmp_path, capfd):
    words = [*SIMULATED, "--store", str(tmp_path / "store"), "--edges-from", str(tmp_path / "edges")]
    for _ in range(2):
        assert prepare_main(words) == 2
        said = capfd.readouterr().err
        assert "no such file" in said
        assert "event 000000000" in said
        inferred(place, tmp_path / "edges", checkpoint="last", format="edges", overwrite=True)  # which knows its files
        assert prepare_main(words) == 0
        capfd.readouterr()
        (tmp_path / "edges" / "event000000000-graph.csv").unlink()
    (tmp_path / "edges" / "event000000000-graph.csv").write_bytes(b"edge0,edge1\n0,1\n\xff\xfe")
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
