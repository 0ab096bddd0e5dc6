"""Metric learning: edges of a trained space, exact over ranks and orders of hits, turned with the event, in a file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_preparation import on_ranks

from domainpar.common.agreement import Gathering, Refused
from domainpar.common.problems import Problem
from domainpar.tracking.events import embedding_training
from domainpar.tracking.events.construct import build_graph
from domainpar.tracking.events.embedding import LARGEST, PLACE, Embedding, near_pairs, numbers_of, places_of
from domainpar.tracking.events.embedding_training import (
    EmbeddingSample,
    build_embedding,
    first_layers,
    gradient,
    training,
    work_of,
)
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.joining import cylindrical
from domainpar.tracking.events.map_building import build_map
from domainpar.tracking.events.module_map import segments_outward
from domainpar.tracking.events.simulate import simulate_event

TARGET = {"pt": [0.5, float("inf")]}
NAMES = [f"{seed}" for seed in range(7)]


def simulated(name: str) -> Hits:
    return simulate_event(int(name), 600)


def built(ranks, steps: int = 60, names=NAMES) -> Embedding:
    return build_embedding(simulated, names, TARGET, {"source": "simulate"}, ranks, steps=steps)


@pytest.fixture(scope="module")
def learned() -> Embedding:
    return built(Gathering())


def pairs_of(hits: Hits, by: Embedding) -> set[tuple[int, int]]:
    """Edges, by hit ids."""
    found = list(map(tuple, hits.hit_id[build_graph(hits, by).edge_index].T.tolist()))
    assert len(set(found)) == len(found)
    return set(found)


def kept(by: Embedding, edges_per_hit: float) -> float:
    """Share of the target's segments that are edges, in events that nothing was learned from."""
    counts = np.zeros(2)
    for seed in range(50, 56):
        hits = simulate_event(seed, 600)
        segments = set(map(tuple, hits.hit_id[segments_outward(hits, TARGET)[1]].T.tolist()))
        counts += len(segments & pairs_of(hits, by.best(edges_per_hit))), len(segments)
    return counts[0] / counts[1]


# --- edges


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.integers(0, 40), st.sampled_from([0.1, 1.0, 7.0]))
def test_the_pairs_found_are_those_nearer_than_the_radius(seed, num_inner, num_outer, radius):
    rng = np.random.default_rng(seed)
    inner, outer = (
        (rng.choice([0.5, 3.0, 40.0]) * rng.normal(size=(count, 12)) * (rng.random(12) < 0.4)).astype(np.float32)
        for count in (num_inner, num_outer)
    )
    pairs, squares = near_pairs(inner, outer, radius)
    exact = ((inner[:, None] - outer[None]).astype(np.float64) ** 2).sum(axis=2)
    surely = set(zip(*np.nonzero(exact < radius**2 * (1 - 1e-5))))
    perhaps = set(zip(*np.nonzero(exact < radius**2 * (1 + 1e-5))))
    found = list(zip(*pairs.tolist()))
    assert len(set(found)) == len(found)
    assert surely <= set(found) <= perhaps
    assert (np.diff(pairs[0]) >= 0).all()
    np.testing.assert_allclose(squares, exact[tuple(pairs)], rtol=1e-4, atol=1e-6)


def test_an_inner_place_beyond_all_outer_ones_is_paired():
    inner, outer = np.zeros((1, PLACE), np.float32), np.zeros((2, PLACE), np.float32)
    for sign in (1, -1):
        inner[0, 0], outer[0, 0] = 1.9 * sign, sign
        assert near_pairs(inner, outer, 1.0)[0].tolist() == [[0], [0]]


def test_edges_run_outward_between_layers_and_get_fewer_with_the_radius(learned):
    hits = simulate_event(60, 2000)
    cylinder = cylindrical(hits.position)
    number = {}
    for edges_per_hit in (0.2, 0.6, 1.0):
        src, dst = learned.best(edges_per_hit).edges(hits, cylinder)
        assert (cylinder[src, 0] < cylinder[dst, 0]).all()
        assert ((hits.volume[src] != hits.volume[dst]) | (hits.layer[src] != hits.layer[dst])).all()
        number[edges_per_hit] = len(src)
    assert 0 < number[0.2] < number[0.6] < number[1.0]


def test_a_radius_makes_as_many_edges_a_hit_as_are_asked_for_in_the_events_that_were_counted(learned):
    counted = [simulated(name) for name in NAMES]
    hits = sum(map(len, counted))
    assert learned.counted_hits == hits
    for edges_per_hit in (0.3, 0.9):
        found = learned.best(edges_per_hit)
        wider = replace(found, radius=found.radius + LARGEST / len(found.pairs))
        edges = [sum(build_graph(one, by).num_edges for one in counted) for by in (found, wider)]
        assert edges[0] <= edges_per_hit * hits < edges[1]
    assert learned.best(1e6).radius == LARGEST
    assert learned.best(1e-9).radius > 0


@pytest.mark.parametrize("seed", range(3))
def test_edges_do_not_depend_on_the_order_of_hits(learned, seed):
    hits = simulate_event(70 + seed, 2000)
    order = np.random.default_rng(seed).permutation(len(hits))
    columns = "hit_id", "position", "volume", "layer", "module", "particle_id"
    other = replace(hits, **{name: getattr(hits, name)[order] for name in columns}, weight=None)
    ours = pairs_of(hits, learned)
    assert len(ours) > 1000
    assert pairs_of(other, learned) == ours


def test_a_turned_event_has_the_same_edges_also_at_the_seam(learned):
    hits = simulate_event(80, 5000)
    ours = pairs_of(hits, learned)
    for angle in (0.3, 2.0, np.pi):
        turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
        turned = replace(hits, position=(hits.position @ turn.T).astype(np.float32))
        theirs = pairs_of(turned, learned)
        assert len(ours ^ theirs) < 1e-3 * len(ours)  # positions are rounded
        phi = cylindrical(turned.position)[:, 1]
        src, dst = learned.edges(turned, cylindrical(turned.position))
        across = np.abs(phi[src] - phi[dst]) > np.pi
        assert 0 < across.sum() < 0.1 * len(src)


def test_no_bit_of_a_hits_place_depends_on_other_hits(learned):
    cylinder = cylindrical(simulate_event(81, 20_000).position)
    whole = numbers_of(learned.layers, cylinder)
    assert whole.dtype == np.float32
    for rows in (slice(0, 1), slice(3, 300), slice(777, 19_001)):
        np.testing.assert_array_equal(numbers_of(learned.layers, cylinder[rows]), whole[rows])
    assert numbers_of(learned.layers, cylinder[:0]).shape == (0, 2 * PLACE)


# --- training


def test_every_number_of_ranks_learns_the_same_bytes(learned):
    for num_ranks in (2, 3):
        found = on_ranks(num_ranks, lambda ranks: built(ranks).to_bytes())
        assert set(found) == {learned.to_bytes()}


def test_training_keeps_more_segments_at_as_many_edges(learned):
    untrained, trained = built(Gathering(), steps=0), built(Gathering(), steps=400)
    assert kept(learned, 1.0) > kept(untrained, 1.0) + 0.1
    assert kept(trained, 1.0) > kept(learned, 1.0)


def test_gradients_are_the_slopes_of_the_loss(monkeypatch):
    monkeypatch.setattr(embedding_training, "REPULSION", 3.0)  # both terms count
    layers, sample = first_layers(), EmbeddingSample.of(simulate_event(3, 600), TARGET)
    for _ in training(layers, [sample], 40):  # until pairs are near
        pass

    def loss() -> float:
        inner, outer = places_of(numbers_of(layers, sample.cylinder), sample.cylinder[:, 1])
        inner, outer = inner.astype(float), outer.astype(float)
        square = ((inner[:, None] - outer[None]) ** 2).sum(axis=2)
        joins = (sample.cylinder[:, None, 0] < sample.cylinder[None, :, 0]) & (
            sample.surface[:, None] != sample.surface[None]
        )
        joins &= (sample.particle[:, None] != sample.particle[None]) | (sample.particle[:, None] == 0)
        others = np.maximum(1 - square, 0)[joins].sum() / len(inner)
        return np.log1p(square[tuple(sample.segments)]).mean() + embedding_training.REPULSION * others

    found = gradient(layers, sample, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    for i, array in enumerate(array for layer in layers for array in layer):
        way = rng.normal(size=array.shape).astype(np.float32) + 3 * np.sign(found[i])
        size, values = np.float32(2e-4 / np.sqrt(array.size)), []
        kept_values = array.copy()
        for sign in (1, -1):
            array[...] = kept_values + sign * size * way
            values.append(loss())
        array[...] = kept_values
        slope = (values[0] - values[1]) / (2 * float(size))
        assert abs(slope - float((found[i] * way).sum())) < 0.02 * abs(slope)


def test_a_wedge_holds_the_segments_between_its_hits():
    sample = EmbeddingSample.of(simulate_event(5, 40_000), TARGET)
    wedge = sample.wedge(np.random.default_rng(0))
    assert 0.8 * embedding_training.WEDGE < len(wedge.cylinder) < 1.2 * embedding_training.WEDGE
    assert 0.2 < wedge.segments.shape[1] / sample.segments.shape[1] < 0.4
    src, dst = wedge.segments
    assert (wedge.particle[src] == wedge.particle[dst]).all()
    whole = EmbeddingSample.of(simulate_event(5, 600), TARGET)
    assert len(whole.wedge(np.random.default_rng(0)).cylinder) == len(whole.cylinder)


def test_progress_is_told_as_often_as_was_said():
    calls = []
    steps, origin = 51, {"source": "simulate"}
    build_embedding(simulated, NAMES[:2], TARGET, origin, Gathering(), lambda: calls.append(1), steps)
    assert len(calls) == work_of(NAMES[:2], steps) == 6


def test_events_without_truth_or_targets_are_refused():
    def blind(name: str) -> Hits:
        return replace(simulated(name), particle_id=None)

    with pytest.raises(Refused, match="candidate edges are learned from both"):
        build_embedding(blind, NAMES, TARGET, {}, Gathering(), steps=1)
    with pytest.raises(Refused, match="no target particle in 7 events"):
        build_embedding(simulated, NAMES, {"pt": [1e6, 2e6]}, {}, Gathering(), steps=1)


# --- files and refusals


def test_an_embedding_comes_back_from_its_file(learned, tmp_path):
    path = tmp_path / "embedding.safetensors"
    few = learned.best(0.5)
    path.write_bytes(few.to_bytes())
    again = Embedding.read(path)
    assert again.to_bytes() == few.to_bytes()
    assert again.settings == few.settings != learned.settings
    assert again.settings == replace(few, learned_from={}).settings
    assert again.origin["target"] == TARGET
    events = map(simulated, NAMES)
    assert again.learned_from == {hits.event_id: hits.fingerprint for hits in events}
    assert again.events == len(NAMES)
    hits = simulate_event(50, 600)
    np.testing.assert_array_equal(build_graph(hits, again).edge_index, build_graph(hits, few).edge_index)


def test_a_damaged_or_foreign_file_is_refused_by_what_is_wrong(learned, tmp_path):
    (weight, bias), *rest = learned.layers
    content = learned.to_bytes()
    module_map = build_map(simulated, NAMES, TARGET, {"source": "simulate"}, Gathering())
    wrong = {
        "no embedding, SafetensorError": content[:-1],
        "embedding 9'": content.replace(b"domainpar embedding 1", b"domainpar embedding 9"),
        "module map 1'": module_map.to_bytes(),
        "'log X'": content.replace(b"log R", b"log X"),
        "not all finite": replace(learned, layers=[(weight * np.float32(np.nan), bias), *rest]).to_bytes(),
        "its layers ": replace(learned, layers=[(weight[:-1], bias), *rest]).to_bytes(),
        "radius 2.5": replace(learned, radius=2.5).to_bytes(),
        "this is no embedding": b"x" * 100,
    }
    path = tmp_path / "embedding.safetensors"
    for message, damaged in wrong.items():
        path.write_bytes(damaged)
        with pytest.raises(Problem, match=message) as refused:
            Embedding.read(path)
        assert str(path) in str(refused.value)
    with pytest.raises(Problem, match="No such file"):
        Embedding.read(tmp_path / "missing")


def test_hits_of_another_detector_are_refused(learned):
    hits = simulate_event(1, 100)
    with pytest.raises(Problem, match="none of .* hits"):
        build_graph(replace(hits, volume=hits.volume + 100), learned)


def test_an_event_without_hits_has_no_edges(learned):
    none = Hits.bare("none", np.zeros(0, np.int64), np.zeros((0, 3), np.float32))
    assert learned.edges(none, cylindrical(none.position)).shape == (2, 0)
