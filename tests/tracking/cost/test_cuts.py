"""The report of a store: the figures of the quality measures, put into words and bars."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from random_events import random_event

from domainpar.tracking.cost.cuts import (
    Cut,
    compare_cuts,
    describe_store,
    histogram,
    median_event,
    print_report,
    tilings_of,
)
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.sources import Events
from domainpar.tracking.events.store import EventStore
from partitioners import PARTITIONERS, Contiguous, Topology, group, number_along_phi
from partitioners.quality import measure, measure_truth


def store_of(directory, num_events=4, **options) -> EventStore:
    def read(name):
        return random_event(int(name), 60, 200 + 10 * int(name), event_id=name, **options)

    source = Events(tuple("0123")[:num_events], read, lambda _: [], {})
    return prepare(source, directory, partitioner="contiguous", num_tiles=6, val_split=0.25, test_split=0)


def test_cuts_are_measured_on_the_users_own_graph(tmp_path):
    # Rows run against phi, so tiles of neighbouring rows must be renumbered; stored rows are in another order again.
    phi = np.linspace(3, -3, 60)
    graph = random_event(0, 60, 200)
    position = np.stack([np.cos(phi), np.sin(phi), 0 * phi], axis=1).astype(np.float32)
    graph = replace(graph, hits=replace(graph.hits, position=position))
    prepare(Events(("0",), lambda _: graph, lambda _: [], {}), tmp_path, partitioner="random", num_tiles=6)
    store = EventStore(tmp_path)
    with store.open(store.events()[0]) as event:
        (tiling,) = tilings_of(event, ["contiguous"], seed=0)
        cut = Cut.of(tiling, "contiguous", 3)
        tile = number_along_phi(Contiguous()(Topology(graph.edge_index, 60, position), 6), position, 6)
        part = group(event.tile_graph().from_assignment(graph.edge_index, tile, 6), 3)[tile]
    expected = measure(graph.edge_index, part, 3)
    for name, values in vars(expected).items():
        assert getattr(cut.quality, name).tolist() == values.tolist(), name
    assert cut.truth == measure_truth(graph.edge_index, part, graph.label, graph.hits.particle_id)


def test_every_partitioner_grouping_and_number_of_parts_has_a_row(tmp_path):
    rows = [line.split() for line in compare_cuts(store_of(tmp_path), num_parts=[2, 3]).splitlines()]
    found = [tuple(row[:3]) for row in rows if len(row) == 10 and row[2].isdigit()]
    assert found == [
        (name, grouping, parts)
        for name in PARTITIONERS
        if name != "random"
        for grouping in ("contiguous", "metis")
        for parts in ("2", "3")
    ]


def test_events_without_positions_or_truth_are_reported_with_what_is_known(tmp_path):
    text = compare_cuts(store_of(tmp_path, positions=False, labels=False), groupings=["contiguous"], num_parts=[2])
    rows = [line.split() for line in text.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["metis", "contiguous"]
    assert all(row[-2:] == ["-", "-"] for row in rows)


def test_one_part_cuts_nothing(tmp_path):
    text = compare_cuts(store_of(tmp_path), partitioners=["metis"], groupings=["contiguous"], num_parts=[1])
    assert text.splitlines()[-1].split() == "metis contiguous 1 0.0 0.0 1.00 1.00 0 0.0 0.0".split()


def test_the_event_of_the_table_is_the_one_of_median_size(tmp_path):
    assert median_event(store_of(tmp_path, 3)).event == "1"
    assert median_event(prepare(Events((), random_event, lambda _: [], {}), tmp_path / "empty")) is None


def as_many_bytes(nodes, edges):
    return nodes + edges


def test_the_description_counts_events_splits_nodes_and_edges(tmp_path):
    text = describe_store(store_of(tmp_path), as_many_bytes, "a network", num_parts=2)
    assert "4 events (3 train, 1 val, 0 test)" in text
    assert "edges per event: smallest 200, median 215, largest 230" in text
    assert "nodes per event: smallest 60, median 60, largest 60 (all 4 alike)" in text
    assert "With 2 ranks" in text
    assert ": smallest 0, " in text


def test_the_printed_report_is_the_description_and_the_table(tmp_path, capsys):
    store = store_of(tmp_path)
    prediction = as_many_bytes, "a network"
    print_report(tmp_path, *prediction)
    assert capsys.readouterr().out == f"{describe_store(store, *prediction)}\n\n{compare_cuts(store)}\n"


def test_an_empty_store_is_described(tmp_path):
    empty = prepare(Events((), random_event, lambda _: [], {}), tmp_path)
    assert "0 events" in describe_store(empty, as_many_bytes, "a network")
    assert "no events" in compare_cuts(empty)


def test_the_bars_of_a_histogram_hold_every_value():
    text = histogram("things", np.arange(100))
    bars = text.splitlines()[1:]
    assert sum(int(line.split()[-1]) for line in bars) == 100
    assert histogram("things", np.array([3, 1])) == "things: 3, 1"
    assert histogram("things", np.array([])) == "things: none"


def test_no_two_bars_of_a_histogram_have_one_name():
    for values in (
        np.array([15, 16, 16, 17]),
        np.array([15.0, 15.1, 15.4, 16.2]),
        np.array([0.001, 0.002, 0.0021, 0.004]),
    ):
        names = [line.split("|")[0] for line in histogram("things", values).splitlines()[1:]]
        assert len(set(names)) == len(names)
        assert not any(left.strip() == right.strip() for left, _, right in (name.partition(" - ") for name in names))
    assert histogram("things", np.array([15, 16, 16, 18])).splitlines()[1:] == [
        f"  15 | {'#' * 20} 1",
        f"  16 | {'#' * 40} 2",
        "  17 |  0",
        f"  18 | {'#' * 20} 1",
    ]
