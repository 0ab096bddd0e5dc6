"""Means and deviations of features: exact, so the same for any order of rows and events and any number of ranks."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from random_events import random_assignment, random_event
from random_store import edit_manifest, write_graph
from test_preparation import files, on_ranks, prepared, source_of

from domainpar.nn.standard import FeatureSums, Standard, standard_of
from domainpar.tracking.events.store import EventStore, StoreError, write_manifest

NOTHING = FeatureSums(0, [], [])


def drawn(rows=3000, columns=3, seed=0):
    """Numbers of all magnitudes that a float32 can have, of both signs, with zeros of both, and the extreme ones."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-48, 38, (rows, columns))
    table = (rng.standard_normal((rows, columns)) * 10.0**exponents).astype(np.float32)
    limits = np.finfo(np.float32)
    extremes = [0.0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_subnormal, -limits.smallest_subnormal]
    table[: len(extremes)] = np.array(extremes, np.float32)[:, None]
    return table


def constants_of(*tables):
    """Mean and scale of the columns of tables."""
    return standard_of([(FeatureSums.of(table), NOTHING) for table in tables])[:2]


def by_fractions(table):
    """The same by definition, in exact fractions."""
    columns = [[Fraction(float(value)) for value in column] for column in table.T]
    means = [sum(column) / len(column) for column in columns]
    squares = [sum((value - mean) ** 2 for value in column) for column, mean in zip(columns, means, strict=True)]
    return tuple(map(float, means)), tuple(math.sqrt(square / len(table)) for square in squares)


def test_sums_are_exact_for_numbers_of_every_magnitude():
    table = drawn()
    sums = FeatureSums.of(table)
    for column, value, square in zip(table.T, sums.values, sums.squares, strict=True):
        exact = [Fraction(float(number)) for number in column]
        assert Fraction(value, 2**172) == sum(exact)
        assert Fraction(square, 2**344) == sum(number**2 for number in exact)


def test_constants_are_those_of_the_definition_rounded_once():
    table = drawn(500)
    assert constants_of(table) == by_fractions(table)
    narrow = (1e6 + np.random.default_rng(1).random((500, 2))).astype(np.float32)  # floats would cancel
    assert constants_of(narrow) == by_fractions(narrow)


def test_no_order_of_rows_or_events_and_no_cut_changes_a_bit():
    table = drawn()
    expected = constants_of(table)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        pieces = np.split(rng.permutation(table), np.sort(rng.integers(0, len(table), 4)))
        assert constants_of(*pieces) == expected


def test_rows_are_added_in_pieces_of_which_none_rounds(monkeypatch):
    table = drawn()
    expected = FeatureSums.of(table)
    monkeypatch.setattr("domainpar.nn.standard._ROWS_AT_ONCE", 7)
    assert FeatureSums.of(table) == expected
    many = np.full((2**20 + 5, 1), np.float32(1 - 2.0**-24))  # the largest mantissa, more often than are added at once
    monkeypatch.undo()
    assert constants_of(many) == ((1 - 2.0**-24,), (1.0,))


def test_features_that_never_vary_have_a_scale_of_1():
    table = np.array([[3.7, 0.0, 1e-42], [3.7, -0.0, 2e-42]], np.float32)
    mean, scale = constants_of(table)
    assert scale == (1.0, 1.0, 1.0)  # of the last, a network in float32 could not divide by the deviation
    assert mean[0] == float(np.float32(3.7))
    assert constants_of(table[:0]) == ((0.0,) * 3, (1.0,) * 3)


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="made of float32, got float64"):
        FeatureSums.of(np.zeros((2, 2)))


# --- of a store ------------------------------------------------------------------------------------------------------


def by_numpy(events):
    """Means and deviations of the features of some graphs."""
    tables = (np.concatenate([getattr(event, name) for event in events]) for name in ("features", "edge_features"))
    return [moment for table in tables for moment in (table.mean(0, np.float64), table.std(0, np.float64))]


def test_a_store_has_the_constants_of_the_events_to_train_on_which_have_truth(tmp_path):
    def read(name):
        return random_event(int(name), 40, 100, event_id=name, labels=name != "001")

    store = prepared(source_of(12, read=read), tmp_path)
    assert 0 < len(store.events("val")) < len(store.events("train"))
    assert "001" in {record.event for record in store.events("train")}
    training = [read(record.event) for record in store.events("train") if record.event != "001"]
    for found, expected in zip(store.standard, by_numpy(training), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_store_without_events_to_train_on_has_those_of_all(tmp_path):
    source = source_of(3, splits=dict.fromkeys(source_of(3).names, "test"))
    store = prepared(source, tmp_path)
    for found, expected in zip(store.standard, by_numpy(list(map(source.read, source.names))), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_they_are_the_same_bits_on_any_number_of_ranks_and_in_any_order_of_events(tmp_path, size):
    source = source_of(7)
    expected = prepared(source, tmp_path / "one").standard
    backwards = replace(source, names=source.names[::-1])
    stores = on_ranks(size, lambda ranks: prepared(backwards, tmp_path / "many", ranks=ranks))
    assert [store.standard for store in stores] == [expected] * size


def test_a_store_that_grows_has_those_of_all_its_events_as_if_prepared_at_once(tmp_path):
    given = {"splits": dict.fromkeys(source_of(4).names, "train")}
    before = prepared(source_of(2, **given), tmp_path / "one").standard
    grown = prepared(source_of(4, **given), tmp_path / "one").standard
    assert grown == prepared(source_of(4, **given), tmp_path / "other").standard != before


@pytest.mark.parametrize(("size", "lacks"), [(1, "standard"), (3, "standard"), (1, "survey")])
def test_a_store_whose_manifest_lacks_them_gets_them_when_prepared_again_and_keeps_its_events(tmp_path, size, lacks):
    prepared(source_of(), tmp_path)
    expected = files(tmp_path)
    edit_manifest(tmp_path, lambda manifest: manifest.pop(lacks))
    if lacks == "standard":
        with pytest.raises(StoreError, match="standard"):
            EventStore(tmp_path)
    unread = source_of(read=lambda name: pytest.fail(f"event {name} was made again"))
    on_ranks(size, lambda ranks: prepared(unread, tmp_path, ranks=ranks))
    assert files(tmp_path) == expected


def test_a_manifest_written_by_hand_has_them_as_well(tmp_path):
    graph = random_event(1, 40, 100)
    write_manifest(tmp_path, [write_graph(tmp_path, graph, random_assignment(1, 40, 3), 3, "train")], {})
    assert EventStore(tmp_path).standard == standard_of(
        [(FeatureSums.of(graph.features), FeatureSums.of(graph.edge_features))]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node_scale": [1.0, 0.0, 1.0]}, "features of nodes cannot be standardised"),
        ({"edge_mean": [0.0]}, "features of edges cannot be standardised"),
        ({"node_mean": ["wide", 0, 0]}, "could not convert"),
        ({"node_mean": [math.nan, 0, 0]}, "features of nodes cannot be standardised"),
    ],
)
def test_constants_that_cannot_be_are_refused(tmp_path, change, message):
    prepared(source_of(2), tmp_path)
    edit_manifest(tmp_path, lambda manifest: manifest["standard"].update(change))
    with pytest.raises(StoreError, match=message):
        EventStore(tmp_path)


def test_lines_say_what_there_is_and_nothing_of_features_that_are_not_there():
    lines = Standard((0.5, -3.0), (0.25, 1e4), (), ()).lines(("r", "z"), ())
    assert lines == ["node features, mean +- std: r 0.5 +- 0.25, z -3 +- 1e+04"]
