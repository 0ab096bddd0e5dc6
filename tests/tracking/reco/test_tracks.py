"""Tracks are those of the definitions, and the same on any number of ranks, in any tiles."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import plainly
import pytest
import torch
from marks import slow
from random_events import random_assignment, random_event

from domainpar.common.problems import Problem
from domainpar.testing import find_mpiexec, run_ranks
from domainpar.tracking.events.graph import surface_numbers
from domainpar.tracking.events.store import StoredEvent, WholeEvent, event_file_name, write_event
from domainpar.tracking.part_loading import sector_of_tiles
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.segments import Segments
from domainpar.tracking.reco.tracks import (
    TrackOptions,
    build_tracks,
    finished,
    quality,
    select_by_quality,
    tracks_from_scores,
)
from domainpar.tracking.scoring.event_tracks import with_tracks
from domainpar.tracking.scoring.scores import score_events

METHODS = {
    "greedy": TrackOptions(method="greedy", stitch=False),
    "greedy, refined": TrackOptions(method="greedy", max_chi2=3.0, refine=True, stitch=False),
    "cc": TrackOptions(method="cc", stitch=False),
}


def stored(directory, graph, tiles=12, seed=3, assignment=None):
    path = directory / event_file_name(graph.hits.event_id)
    write_event(
        path, graph, random_assignment(seed, graph.num_nodes, tiles) if assignment is None else assignment, tiles
    )
    return StoredEvent(path)


def sparse_event(seed, num_nodes=120, num_edges=150, **kinds):
    """Few edges a hit, so that components are many and small; few surfaces, so that hits often share one."""
    graph = random_event(seed, num_nodes, num_edges, **kinds)
    few = np.full(num_nodes, 8, np.int32)
    return replace(graph, hits=replace(graph.hits, volume=few, layer=(graph.hits.layer % 6).astype(np.int32)))


def random_logits(graph, seed, spread=4.0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, graph.num_edges)
    repeated = rng.random(graph.num_edges) < 0.2
    logits[repeated] = np.round(logits[repeated])  # ties
    # Edges between the same two hits often say the same.
    _, pair = np.unique(np.sort(graph.edge_index, axis=0), axis=1, return_inverse=True)
    alike = rng.random(graph.num_edges) < 0.5
    logits[alike] = rng.normal(0, spread, graph.num_edges)[pair.reshape(-1)[alike]]
    return logits.astype(np.float32)


def known(hits):
    """What track builders know of hits."""
    return TrackHits(hits.position, surface_numbers(hits.volume, hits.layer), hits.module)


def build(graph, logits, options):
    """Tracks of an event from plain arrays."""
    hits = known(graph.hits)
    return finished(build_tracks(graph.edge_index, logits, hits, options), hits, options).tolist()


def tracks_on(world, event, logits, grouping="contiguous", sectors=None, root=0, strays=False, names=tuple(METHODS)):
    """Tracks by method on `root`; with `strays`, each rank says something else of the edges that another one owns."""

    def network(graph, halo):
        plan = graph.plan
        local = logits[event.read_edges("original_position", plan.edge_ids)]
        if strays:
            others = ~plan.edge_owned
            local[others] = np.random.default_rng(world.rank).normal(0, 5, np.count_nonzero(others))
        return torch.from_numpy(local)

    scores = score_events(network, [event], world.domain, root=root, sectors=sectors, grouping=grouping)
    if scores is None:
        return None
    whole = WholeEvent(event)
    return {name: with_tracks(whole, scores[0], METHODS[name]).track_id.tolist() for name in names}


def tracks_of(event, logits, num_ranks=1, **flags):
    """Tracks by method from ranks that are threads; only the root may have any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parts that own nothing are among the cases
        tracks = run_ranks(lambda world: tracks_on(world, event, logits, **flags), num_ranks)
    root = flags.get("root", 0)
    assert tracks[:root] + tracks[root + 1 :] == [None] * (num_ranks - 1)
    return tracks[root]


def expected(graph, logits, options):
    if options.method == "greedy":
        return plainly.numbered(graph.num_nodes, plainly.grown(graph.hits, graph.edge_index, logits, options.max_chi2))
    return plainly.numbered(graph.num_nodes, plainly.connected(graph.num_nodes, graph.edge_index, logits))


# --- the definitions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_each_pair_of_hits_is_one_segment_outward_with_its_best_edge(seed, positions):
    graph = sparse_event(seed, 60, 400, positions=positions)
    logits = np.round(random_logits(graph, seed, 1.0))  # several edges of a pair often say the same
    segments, position = Segments.of(graph.edge_index, logits, known(graph.hits), 0.3), graph.hits.position
    distance = None if position is None else (position.astype(np.float64) ** 2).sum(axis=1).tolist()
    ends = zip(segments.inner.tolist(), segments.outer.tolist(), strict=True)
    plain = plainly.segments_of(graph.edge_index, logits, distance, 0.3)
    in_order = sorted(plain.items(), key=lambda item: item[1][1])
    assert list(zip(ends, segments.logit.tolist())) == [(pair, value) for pair, (value, _) in in_order]


def test_hits_equally_far_out_are_ordered_as_the_user_had_them():
    graph = sparse_event(1, 50, 200)
    around = TrackHits(np.full((50, 3), 7.0), np.zeros(50, int), np.zeros(50, int))
    segments = Segments.of(graph.edge_index, np.full(200, 3, np.float32), around, 0.5)
    assert len(segments.inner) > 100
    assert (segments.inner < segments.outer).all()


@pytest.mark.parametrize("name", [name for name, options in METHODS.items() if not options.refine])
@pytest.mark.parametrize("seed", range(8))
def test_tracks_are_those_of_the_definition(name, seed):
    graph = sparse_event(seed, num_edges=100 + 40 * seed)
    logits = random_logits(graph, seed)
    tracks = build(graph, logits, METHODS[name])
    assert tracks == expected(graph, logits, METHODS[name])
    assert max(tracks) >= (0 if name == "cc" else 3)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("num_nodes", "num_edges"), [(0, 0), (1, 0), (30, 0), (1, 3)])
def test_events_without_segments_have_no_tracks(name, num_nodes, num_edges):
    graph = random_event(1, num_nodes, num_edges)
    assert build(graph, random_logits(graph, 0), METHODS[name]) == [-1] * num_nodes


def test_events_without_positions_have_tracks_along_their_edges(tmp_path):
    graph = sparse_event(4, 100, 200, positions=False)
    logits = random_logits(graph, 4)
    alone = build(graph, logits, METHODS["cc"])
    assert alone == expected(graph, logits, METHODS["cc"])
    with stored(tmp_path, graph) as event:
        assert tracks_of(event, logits, 4, names=["cc"]) == {"cc": alone}


def test_no_helix_is_followed_without_positions_and_it_is_said(tmp_path):
    graph = sparse_event(4, 20, 20, positions=False)
    with pytest.raises(ValueError, match="their hits have no positions"):
        build(graph, random_logits(graph, 0), METHODS["greedy"])
    with stored(tmp_path, graph) as event:
        ((scores,),) = run_ranks(lambda world: score_events(
            lambda part, halo: torch.zeros(len(part.plan.edge_ids)), [event], world.domain), 1)  # fmt: skip
        of_cc = [TrackOptions("cc", **{flag: True}) for flag in ("refine", "extend", "shared_hits")]
        for options in (TrackOptions("greedy"), *of_cc):
            with pytest.raises(Problem, match="its hits have no positions") as refused:
                with_tracks(WholeEvent(event), scores, options)
            assert (refused.value.event, "--tracks cc" in refused.value.hint) == ("000000004", True)


# --- on ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouping", [slow("contiguous"), "random"])
def test_tracks_are_the_same_on_any_number_of_ranks_and_on_whichever_rank_builds_them(tmp_path, grouping):
    for seed in range(4):
        graph = sparse_event(seed, 200, 120 + 200 * seed)
        logits = random_logits(graph, seed)
        alone = {name: build(graph, logits, options) for name, options in METHODS.items()}
        with stored(tmp_path, graph, tiles=16, seed=seed) as event:
            for num_ranks in (1, 2, 3, 4, 8):
                root = (seed + 1) % num_ranks
                assert tracks_of(event, logits, num_ranks, grouping=grouping, root=root) == alone, (seed, num_ranks)


def test_tracks_do_not_depend_on_the_tiles(tmp_path):
    graph = sparse_event(2, 150, 300)
    logits = random_logits(graph, 5)
    tracks = []
    for tiles in (1, 5, 16):
        with stored(tmp_path / str(tiles), graph, tiles, seed=tiles) as event:
            tracks.append(tracks_of(event, logits, num_ranks=3))
    assert tracks[0] == tracks[1] == tracks[2]


def spiral(num_hits):
    """One chain of hits outward, on no helix."""
    angle = np.linspace(0, 8, num_hits)
    radius = np.linspace(30, 1000, num_hits)
    position = np.stack([radius * np.cos(angle), radius * np.sin(angle), radius], axis=1).astype(np.float32)
    graph = sparse_event(0, num_hits, 1)
    chain = np.stack([np.arange(num_hits - 1), np.arange(1, num_hits)])
    hits = replace(graph.hits, position=position, layer=np.arange(num_hits, dtype=np.int32))
    return replace(
        graph, hits=hits, edge_index=chain, edge_features=np.zeros((num_hits - 1, 6), np.float32),
        label=np.ones(num_hits - 1, np.uint8),
    )  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_a_chain_over_all_ranks_is_one_track(tmp_path, num_ranks):
    tile_of_hit = (np.arange(64) % 16).astype(np.int32)  # so that it spans every rank
    with stored(tmp_path, spiral(64), 16, assignment=tile_of_hit) as event:
        tracks = tracks_of(event, np.full(63, 5, np.float32), num_ranks, grouping="random", names=["cc"])
    assert tracks == {"cc": [0] * 64}


def test_an_event_that_is_one_single_component_gives_the_same_tracks_on_any_number_of_ranks(tmp_path):
    graph = sparse_event(7, 160, 900)
    hub = np.stack([np.zeros(graph.num_nodes - 1, int), np.arange(1, graph.num_nodes)])
    edge_index = np.concatenate([graph.edge_index, hub], axis=1)
    num_edges = edge_index.shape[1]
    graph = replace(
        graph, edge_index=edge_index, edge_features=np.zeros((num_edges, 6), np.float32),
        label=np.zeros(num_edges, np.uint8),
    )  # fmt: skip
    logits = np.where(np.arange(num_edges) < 900, random_logits(graph, 1, 3.0), np.float32(0.2))
    alone = {name: build(graph, logits, options) for name, options in METHODS.items()}
    assert {name for name, tracks in alone.items() if max(tracks) == 0} == {"cc"}
    with stored(tmp_path, graph, tiles=16) as event:
        for num_ranks in (2, 4, 8):
            assert tracks_of(event, logits, num_ranks, grouping="random") == alone


def test_naive_mode_never_joins_hits_of_two_sectors(tmp_path):
    graph = sparse_event(3, 200, 700)
    logits = random_logits(graph, 3)
    with stored(tmp_path, graph, tiles=16) as event:
        alone = tracks_of(event, logits, sectors=4)
        sector = np.repeat(sector_of_tiles(event, 4), np.diff(event.node_ptr))[event.ids_in_users_order()]
        for num_ranks in (2, 4):
            assert tracks_of(event, logits, num_ranks, sectors=4) == alone
    for name, tracks in alone.items():
        assert tracks != build(graph, logits, METHODS[name])
        for track in range(max(tracks) + 1):
            assert len(set(sector[np.array(tracks) == track])) == 1


def test_the_owner_of_a_cut_edge_decides_its_logit(tmp_path):
    graph = sparse_event(6, 150, 400)
    logits = random_logits(graph, 6)
    alone = {name: build(graph, logits, options) for name, options in METHODS.items()}
    with stored(tmp_path, graph, tiles=16) as event:
        for num_ranks in (2, 4):
            assert tracks_of(event, logits, num_ranks, grouping="random", strays=True) == alone


@pytest.mark.parametrize("transport", ["gloo", slow("mpi")])
def test_tracks_are_the_same_on_processes(tmp_path, transport):
    if transport == "mpi" and find_mpiexec() is None:
        pytest.skip("no mpiexec")
    graph = sparse_event(5, 120, 300)
    logits = random_logits(graph, 5)
    with stored(tmp_path, graph) as event:
        path = event.path
    tracks = run_ranks(tracks_from_file, 3, path, logits, transport=transport)
    assert tracks[:2] == [None, None]
    assert tracks[2] == {name: build(graph, logits, options) for name, options in METHODS.items()}


def tracks_from_file(world, path, logits):
    with StoredEvent(path) as event:
        return tracks_on(world, event, logits, root=2)


# --- worth -----------------------------------------------------------------------------------------------------------


def test_the_worth_of_a_track_is_its_hits_twice_the_best_score_that_leads_to_each_and_what_its_helix_tells():
    bare = TrackHits(None, np.arange(6), np.ones(6, int))
    edges = np.array([[0, 1, 0, 2, 3, 4], [1, 2, 2, 3, 4, 5]])
    logits = np.log(np.array([0.9, 0.5, 0.6, 0.8, 0.7, 0.75]) / np.array([0.1, 0.5, 0.4, 0.2, 0.3, 0.25]))
    segments = Segments.of(edges, logits, bare, 0.0)
    two = np.array([0, 0, 0, 1, 1, 1])  # the segment from 2 to 3 joins them
    expected = [3 + 2 * (0.9 + 0.6), 3 + 2 * (0.7 + 0.75)]
    assert quality(two, segments, bare) == pytest.approx(expected)
    assert quality(np.array([-1, -1, -1, 0, 0, -1]), segments, bare) == pytest.approx([2 + 2 * 0.7])
    # A straight line through the beam line, and one 0.15 mm beside it.
    out = np.array([[30.0, 0, 1], [70, 0, 2], [110, 0, 3]])
    hits = TrackHits(np.concatenate([out, out + np.array([0, 0.15, 0])]), np.arange(6), np.ones(6, int))
    segments = Segments.of(edges, logits, hits, 0.0)
    assert quality(two, segments, hits) == pytest.approx([expected[0] + 2 + 8, expected[1] + 1 + 8])
    for least, kept in ((14.8, [0, 0, 0, 1, 1, 1]), (15.0, [0, 0, 0, -1, -1, -1]), (16.1, [-1] * 6)):
        options = TrackOptions("greedy", score_cut=0.0, min_quality=least)
        assert select_by_quality(two, edges, logits, hits, options).tolist() == kept, least


def test_a_track_is_worth_more_the_closer_its_hits_lie_to_one_helix_as_its_surfaces_measure_them():
    worth = {}
    for off in (0.0, 0.02, 0.3):
        outward = np.array([[100.0, 0, 10], [200, 0, 20 + off], [300, 0, 30]])
        for surface in (surface_numbers(np.full(3, 8), np.array([2, 4, 6])), np.full(3, 77)):
            hits = TrackHits(outward, surface, np.ones(3, int))
            alone = Segments.of(np.zeros((2, 0), int), np.zeros(0), hits, 0.0)
            worth[off, surface[0] == 77] = quality(np.zeros(3, int), alone, hits)[0]
    assert worth[0.0, False] == pytest.approx(13) == worth[0.0, True]
    assert 5.1 > worth[0.3, False] < 9 < worth[0.3, True] < 13  # pixels measure better than a surface that is not known
    assert worth[0.3, False] < worth[0.02, False] < 13


def test_hits_of_tracks_that_are_dropped_are_built_again_without_the_segments_of_these():
    particle = np.array([[30.0, 0, 1], [70, 0, 2], [110, 0, 3], [150, 0, 4], [190, 0, 5]])
    others = np.array([[70.0, 10, 90], [150, -12, 90]])  # with the particle's third hit they lie on no helix
    hits = TrackHits(np.concatenate([-particle, others, particle]), np.arange(12), np.ones(12, int))
    edges = np.array([[0, 1, 2, 3, 5, 9, 7, 8, 9, 10], [1, 2, 3, 4, 9, 6, 8, 9, 10, 11]])
    logits = np.array([4.0] * 4 + [3.0] * 2 + [1.0] * 4)  # so these are joined first
    wrong, right = [1, 1, -1, -1, 1, -1, -1], [-1, -1, 1, 1, 1, 1, 1]
    found = TrackOptions("greedy", stitch=False)
    first = tracks_from_scores(edges, logits, hits, found)
    assert first.tolist() == [0] * 5 + wrong
    worthy_ones = replace(found, min_quality=12.0)
    assert tracks_from_scores(edges, logits, hits, worthy_ones).tolist() == [0] * 5 + right
    assert tracks_from_scores(edges, logits, hits, worthy_ones, first=first).tolist() == [0] * 5 + right
    assert not np.any(tracks_from_scores(edges, logits, hits, replace(found, min_quality=99.0)) >= 0)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"method": "walk"}, "track method is 'walk'; take greedy or cc"),
        ({"min_hits": 0}, "min_hits is 0"),
        ({"score_cut": 1.0}, "score_cut is 1.0"),
        ({"score_cut": -0.1}, "score_cut is -0.1"),
        *(({"min_quality": least}, "min_quality is") for least in (-1.0, float("nan"), float("inf"))),
    ],
)
def test_impossible_options_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        TrackOptions(**wrong)


def test_options_tell_what_they_look_at():
    of_all = {"min_hits": 3, "refine": False, "stitch": True, "extend": False, "min_quality": 0.0}
    assert TrackOptions("cc").to_json() == {"method": "cc", "score_cut": 0.5, **of_all}
    assert TrackOptions().to_json() == {"method": "greedy", "score_cut": 0.1, "max_chi2": 12.0, **of_all}
    refined = TrackOptions("cc", refine=True, max_chi2=2.0).to_json()
    assert refined == {"method": "cc", "score_cut": 0.5, "max_chi2": 2.0, **of_all, "refine": True}
    sharing = TrackOptions("cc", shared_hits=True).to_json()
    assert sharing == {"method": "cc", "score_cut": 0.5, "max_chi2": 12.0, **of_all, "shared_hits": True}
