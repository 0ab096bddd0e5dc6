"""Module maps: hits joined by boxes over regions, learned from segments, exact over ranks, kept in a file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numba.core import event
from test_preparation import on_ranks

from domainpar.common.problems import Problem
from domainpar.tracking.events import module_map
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.graph import Hits, surface_numbers
from domainpar.tracking.events.joining import DR, Boxes, Regions, cylindrical, kinds, longer, quantities
from domainpar.tracking.events.map_building import build_map
from domainpar.tracking.events.module_map import ModuleMap, SegmentCounts
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.targets import target_particles
from domainpar.tracking.events.triplets import BIN_EDGES, ENOUGH, SHARE, TripletCounts, Triplets
from domainpar.tracking.events.truth_order import places_along_particles, segments_of

TARGET = {"pt": [0.5, float("inf")]}
NAMES = [f"{seed}" for seed in range(12)]


def simulated(name: str) -> Hits:
    return simulate_event(int(name), 600)


@pytest.fixture(scope="module")
def learned() -> ModuleMap:
    from domainpar.common.agreement import Gathering

    return build_map(simulated, NAMES, TARGET, {"source": "simulate"}, Gathering())


def segments(hits: Hits) -> set[tuple[int, int]]:
    surface = surface_numbers(hits.volume, hits.layer)
    places = places_along_particles(hits.particle_id, surface, hits.position, hits.particles)
    wanted = np.isin(hits.particle_id, hits.particles.particle_id[target_particles(hits.particles, TARGET)])
    pairs = np.stack(segments_of(hits.particle_id, np.where(wanted, places, -1)))
    return set(map(tuple, np.sort(pairs, axis=0).T.tolist()))


def joined(hits: Hits, by: ModuleMap) -> set[tuple[int, int]]:
    edges = by.edges(hits, cylindrical(hits.position))
    pairs = list(map(tuple, np.sort(edges, axis=0).T.tolist()))
    assert len(set(pairs)) == len(pairs)
    return set(pairs)


# --- joining


def drawn_hits(rng: np.random.Generator, count: int) -> Hits:
    """Hits around +-pi and elsewhere, some at one place, on few layers and modules."""
    radius, z = rng.choice([30.0, 31.5, 72.0, 116.0], count) + rng.choice([0.0, 1.0], count), rng.normal(0, 200, count)
    phi = rng.choice([np.pi - 0.01, -np.pi + 0.01, 0.4], count) + rng.normal(0, 0.05, count)
    position = np.stack([radius * np.cos(phi), radius * np.sin(phi), z], axis=1).astype(np.float32)
    hits = Hits.bare("drawn", np.arange(count), position)
    return replace(hits, **{name: rng.integers(1, 3, count).astype(np.int32) for name in ("volume", "layer", "module")})


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(0, 60), st.sampled_from(["layer", "module", "eta"]))
def test_the_pairs_found_are_those_whose_quantities_lie_in_the_box_of_their_regions_and_kind(seed, count, by):
    rng = np.random.default_rng(seed)
    hits = drawn_hits(rng, count)
    cylinder = cylindrical(hits.position)
    keys = Regions.keys_of(hits, cylinder, by, 0.5)
    known = np.unique(keys, axis=0)[: rng.integers(1, 9)] if count else np.zeros((1, 3), np.int64)
    regions = Regions(known, by, 0.5)
    z0_limits, slope_limits = np.array([50.0, 300.0])[: rng.integers(0, 3)], np.array([1e-3])[: rng.integers(0, 2)]
    num_kinds = (len(z0_limits) + 1) * (len(slope_limits) + 1)
    codes = rng.permutation(len(known) ** 2 * num_kinds)[: rng.integers(1, 40)]
    src, dst, kind = np.unravel_index(codes, (len(known), len(known), num_kinds))
    high = rng.choice([0.5, 2.0, np.inf], (len(codes), 5)) * [2e-3, 300.0, 0.1, 2.0, 60.0]
    boxes = Boxes(regions, z0_limits, slope_limits, src, dst, kind, -high * rng.choice([0.1, 1.0], high.shape), high)
    *edges, found_in = boxes.join(hits, cylinder)
    edges = np.stack(edges)
    region = regions.assign(hits, cylinder)
    assert [None if r < 0 else known[r].tolist() for r in region] == [
        key if key in known.tolist() else None for key in keys.tolist()
    ]
    wanted, counts = set(), np.zeros(len(codes), np.int64)
    for a in range(count):
        for b in range(count):
            if cylinder[b, 0] <= cylinder[a, 0]:
                continue
            values = quantities(cylinder, np.array([[a], [b]]))
            of_kind = kinds(values, z0_limits, slope_limits)[0]
            for box in np.flatnonzero((src == region[a]) & (dst == region[b]) & (kind == of_kind)):
                if ((boxes.low[box] < values[0]) & (values[0] < boxes.high[box])).all():
                    wanted.add((a, b))
                    counts[box] += 1
    assert sorted(map(tuple, edges.T.tolist())) == sorted(wanted)
    np.testing.assert_array_equal(np.bincount(found_in, minlength=len(codes)), counts)
    np.testing.assert_array_equal(boxes.count(hits, cylinder), counts)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_segments_are_the_pairs_of_hits_on_consecutive_places(seed, count):
    rng = np.random.default_rng(seed)
    particle, place = rng.integers(1, 5, count), rng.integers(-1, 4, count)
    for of in np.unique(particle):  # places have no gaps
        rows = np.flatnonzero((particle == of) & (place >= 0))
        place[rows] = np.unique(place[rows], return_inverse=True)[1].reshape(-1)
    wanted = sorted(
        (a, b)
        for a in range(count) for b in range(count)
        if particle[a] == particle[b] and place[a] >= 0 and place[b] == place[a] + 1
    )  # fmt: skip
    assert sorted(zip(*(ends.tolist() for ends in segments_of(particle, place)), strict=True)) == wanted


# --- learning


def test_a_map_holds_every_segment_that_it_was_learned_from_and_pairs_of_hits_as_counted(learned):
    counted = np.zeros_like(learned.pairs)
    of_pairs = replace(learned, triplets=None)
    for name in NAMES:
        hits = simulated(name)
        graph = build_graph(hits, of_pairs)
        outward = np.hypot(*hits.position[:, :2].T.astype(np.float64))
        along_radius = {pair for pair in segments(hits) if outward[pair[0]] != outward[pair[1]]}
        assert along_radius <= joined(hits, of_pairs)
        assert joined(hits, learned) <= joined(hits, of_pairs)
        assert (outward[graph.edge_index[0]] < outward[graph.edge_index[1]]).all()
        if name in NAMES[:8]:
            counted += learned.pairs_in_boxes(hits)
    np.testing.assert_array_equal(counted, learned.pairs)
    assert learned.counted_hits == sum(len(simulated(name)) for name in NAMES[:8])


def test_segments_of_events_not_seen_are_held_beyond_the_extrema(learned):
    unseen = [simulate_event(seed, 600) for seed in range(100, 130)]
    learned = replace(learned, triplets=None)
    bare = replace(learned, margin=0.0)
    held, of_bare, all_of_them = (
        sum(len(found & segments(hits)) for hits, found in zip(unseen, of, strict=True))
        for of in (
            [joined(hits, learned) for hits in unseen],
            [joined(hits, bare) for hits in unseen],
            [segments(hits) for hits in unseen],
        )
    )
    assert of_bare < held <= all_of_them


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_map_is_the_same_bytes_on_any_number_of_ranks(learned, size):
    maps = on_ranks(size, lambda ranks: build_map(simulated, NAMES, TARGET, {"source": "simulate"}, ranks).to_bytes())
    assert set(maps) == {learned.to_bytes()}


def test_tallies_of_events_add_up_in_any_order():
    tallies = [SegmentCounts.of(simulated(name), TARGET) for name in NAMES[:6]]
    at_once = SegmentCounts.together(tallies)
    for order in ([5, 3, 0], [1, 2, 4]), ([0], [1, 2, 3, 4, 5]):
        parts = [SegmentCounts.together([tallies[i] for i in part]) for part in order]
        assert SegmentCounts.together([*parts, SegmentCounts.nothing()]).to_bytes() == at_once.to_bytes()
    assert SegmentCounts.from_bytes(at_once.to_bytes()).to_bytes() == at_once.to_bytes()
    assert at_once.events == 6


def test_the_purest_boxes_come_first_and_as_many_as_are_asked_for(learned):
    np.testing.assert_allclose(learned.purity, learned.segments / 12 / ((learned.pairs + 1) / 8))
    assert (np.diff(learned.purity) <= 0).all()
    sizes, hits, learned = [], simulate_event(50, 600), replace(learned, triplets=None)
    for edges_per_hit in (0.05, 0.1, 0.3, 1e9):
        best = learned.best(edges_per_hit)
        assert best.pairs.sum() <= edges_per_hit * learned.counted_hits
        rest = learned.pairs[len(best.pairs) :]
        assert not len(rest) or best.pairs.sum() + rest[0] > edges_per_hit * learned.counted_hits
        assert joined(hits, best) <= joined(hits, learned)  # what is left out does not change the bounds of the rest
        sizes.append(len(best.segments))
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == len(learned.segments)


def test_bounds_move_by_a_margin_and_by_the_usual_width_over_the_segments_of_a_box():
    learned = ModuleMap.of(SegmentCounts.together([SegmentCounts.of(simulated(name), TARGET) for name in "01"]), {})
    boxes, moved = learned.boxes, learned.moved()
    assert {1, 2, 3} <= set(learned.segments.tolist())
    away = 0.1 * (boxes.high - boxes.low) + learned.usual[boxes.kind] / learned.segments[:, None]
    np.testing.assert_allclose(moved.low, boxes.low - away, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moved.high, boxes.high + away, rtol=1e-12, atol=1e-12)


def test_triplets_of_an_event_and_of_its_mirror_image_in_z_are_the_same():
    hits = simulated("0")
    mirrored = replace(hits, position=hits.position * np.float32([1, 1, -1]))
    one, other = (SegmentCounts.of(each, TARGET).triplets for each in (hits, mirrored))
    assert one.counts[:, 1].any()
    assert (one.counts == other.counts).all()


def test_boxes_hold_both_charges(learned):
    np.testing.assert_array_equal(learned.boxes.low[:, [0, 2]], -learned.boxes.high[:, [0, 2]])
    assert (learned.boxes.low[:, DR] > 0).all()


# --- triplets


def turn_and_bend(a, b, c):
    """Of three points, by their definition."""
    first, second = b - a, c - b
    lengths = np.hypot(*first[:2]), np.hypot(*second[:2])
    angle = np.arctan2(*(first[0] * second[1] - first[1] * second[0], first[:2] @ second[:2]))
    turn = np.inf if abs(angle) >= np.pi / 2 else abs(np.sin(angle)) / np.mean(lengths)
    return turn, abs(np.arctan2(second[2], lengths[1]) - np.arctan2(first[2], lengths[0]))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(0, 25))
def test_an_edge_is_confirmed_by_one_that_continues_it_within_the_bounds_of_three_layers(seed, count):
    rng = np.random.default_rng(seed)
    hits = replace(drawn_hits(rng, count), position=rng.normal(0, 100, (count, 3)).astype(np.float32))
    hits = replace(hits, volume=hits.volume * 0 + 8)
    edges = rng.integers(0, max(count, 1), (2, 40 if count else 0))
    edges = np.unique(edges[:, edges[0] != edges[1]], axis=1)
    keys = np.array([(8, a, 8, b, 8, c) for a in (1, 2) for b in (1, 2) for c in (1, 2)])[rng.permutation(8)[:6]]
    keys = keys[np.lexsort(keys.T[::-1])]
    bounds = Triplets(keys, rng.choice([[5e-3, 0.5], [1e-2, 1.0], [1e-6, 1e-6]], 6))
    certain = rng.random(edges.shape[1]) < 0.1
    wanted = certain.copy()
    for i, (a, b) in enumerate(edges.T):
        for o, (again, c) in enumerate(edges.T):
            layers = [8, hits.layer[a], 8, hits.layer[b], 8, hits.layer[c]]
            if again == b and layers in keys.tolist():
                found = turn_and_bend(*hits.position[[a, b, c]].astype(np.float64))
                if (np.array(found) <= bounds.most[keys.tolist().index(layers)]).all():
                    wanted[[i, o]] = True
    np.testing.assert_array_equal(bounds.confirmed(hits, edges, certain), wanted)


def test_triplets_of_tracks_are_let_through_in_the_share_that_was_asked_for():
    found, of_events = SegmentCounts.nothing(), []
    for name in NAMES:
        segment_counts = SegmentCounts.of(simulated(name), TARGET)
        of_events.append(segment_counts.triplets)
        found = SegmentCounts.together([found, segment_counts])
    assert TripletCounts.together(of_events[::-1]).counts.tolist() == found.triplets.counts.tolist()
    counts, bounds = found.triplets.counts, Triplets.of(found.triplets)
    assert (counts[:, 1] <= counts[:, 0]).all()
    known = np.flatnonzero(counts[:, 0, 0].sum(axis=1) >= ENOUGH)
    assert len(known) > 5
    pooled = counts[:, 1].sum(axis=0)
    for quantity in (0, 1):
        most = bounds.most[:, quantity].max()  # that of all layers together
        through = [pooled[quantity][BIN_EDGES[1:] <= bound].sum() for bound in (most, 0.9 * most)]
        assert through[1] < SHARE * pooled[quantity].sum() <= through[0]
        for row in known:
            of_row = counts[row, int(counts[row, 1, 0].sum() >= ENOUGH), quantity]
            enough = of_row[BIN_EDGES[1:] <= bounds.most[row, quantity]].sum() >= SHARE * of_row.sum()
            assert enough or bounds.most[row, quantity] == most


def test_triplets_leave_out_edges_more_than_segments(learned, monkeypatch):
    monkeypatch.setattr(module_map, "CERTAIN", np.inf)  # in events as small as these all boxes are
    unseen = [simulate_event(seed, 2000) for seed in range(100, 110)]
    of_pairs = replace(learned, triplets=None)
    edges = [sum(len(joined(hits, by)) for hits in unseen) for by in (of_pairs, learned)]
    held = [sum(len(joined(hits, by) & segments(hits)) for hits in unseen) for by in (of_pairs, learned)]
    assert edges[1] < edges[0]
    assert held[1] / held[0] > edges[1] / edges[0]


# --- files and refusals


def test_a_map_comes_back_from_its_file(learned, tmp_path):
    path = tmp_path / "map.safetensors"
    path.write_bytes(learned.to_bytes())
    again = ModuleMap.read(path)
    assert again.to_bytes() == learned.to_bytes()
    assert again.settings == learned.settings
    assert again.settings != learned.best(0.3).settings
    assert again.origin["target"] == TARGET
    hits = simulate_event(50, 600)
    np.testing.assert_array_equal(build_graph(hits, again).edge_index, build_graph(hits, learned).edge_index)
    bare = replace(learned, triplets=None)
    path.write_bytes(bare.to_bytes())
    assert ModuleMap.read(path).triplets is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "no module map"), (b"x" * 100, "no module map"), (None, "No such file")],
)
def test_a_file_that_is_no_map_is_refused(tmp_path, content, message):
    path = tmp_path / "map.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Problem, match=message):
        ModuleMap.read(path)


def test_a_map_of_another_format_or_cut_short_is_refused(learned, tmp_path):
    path = tmp_path / "map.safetensors"
    for content in (learned.to_bytes()[:-1], learned.to_bytes().replace(b"module map 1", b"module map 9")):
        path.write_bytes(content)
        with pytest.raises(Problem, match="this is no module map"):
            ModuleMap.read(path)


def test_hits_of_another_detector_are_refused(learned):
    hits = simulate_event(1, 100)
    with pytest.raises(Problem, match="none of .* hits"):
        build_graph(replace(hits, volume=hits.volume + 100), learned)


@pytest.mark.parametrize("size", [1, 2])
def test_events_without_truth_or_without_targets_are_refused_on_all_ranks(size):
    def blind(name: str) -> Hits:
        hits = simulated(name)
        return replace(hits, particle_id=None) if name == "1" else hits

    for read, target, message in (
        (blind, TARGET, "no positions"),
        (simulated, {"pt": [1e9, float("inf")]}, "no target particle in 3 events"),
    ):
        errors = on_ranks(size, lambda ranks, read=read, target=target: build_map(read, NAMES[:3], target, {}, ranks))
        assert all(message in str(error) for error in errors)


def test_cuts_are_boxes_without_kinds():
    boxes = Cuts(1e-3, 50.0, layer_pairs=(((8, 2), (8, 4)), ((8, 6), (8, 4)))).boxes()
    assert boxes.num_kinds == 1
    assert boxes.regions.keys.tolist() == [[8, 2, 0], [8, 4, 0], [8, 6, 0]]
    assert (boxes.src.tolist(), boxes.dst.tolist()) == ([0, 2], [1, 1])
    assert boxes.high[:, 0].tolist() == [1e-3, 1e-3]
    assert boxes.low[0].tolist() == [-1e-3, -50.0, -np.inf, -np.inf, 0.0]


def test_room_for_more_edges_is_twice_as_large_and_compiled_without_words_of_errors():
    class Compiled(event.Listener):
        def on_start(self, started):
            modules.append(started.data["dispatcher"].py_func.__module__)

        def on_end(self, ended): ...

    modules, edges = [], np.arange(6).reshape(3, 2)
    with event.install_listener("numba:compile", Compiled()):
        room = njit(longer.py_func)(edges)
    assert (room.shape, room.dtype, room[:, :2].tolist()) == ((3, 4), np.int64, edges.tolist())
    assert modules
    assert not [module for module in modules if "unicode" in module], "two seconds of each new clone"
