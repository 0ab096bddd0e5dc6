"""Tracks are what the definitions say, and the same on any number of ranks, in any tiles."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import plainly
import pytest
from marks import slow
from random_events import random_assignment, random_event

from domainpar.events.store import StoredEvent, event_file_name, write_event
from domainpar.parallel.part_loading import Sector, load_part, sector_of_tiles
from domainpar.reco.numbering import number_tracks
from domainpar.reco.tracks import TrackBuilder, TrackOptions, gather_tracks
from domainpar.testing import find_mpiexec, run_ranks

METHODS = {
    "cc": TrackOptions(method="cc"),
    "walk": TrackOptions(method="walk", double_hits=False),
    "walk, double hits": TrackOptions(method="walk"),
    "junction": TrackOptions(method="junction", double_hits=False),
    "junction, double hits": TrackOptions(method="junction"),
}


def stored(directory, graph, tiles=12, seed=3):
    path = directory / event_file_name(graph.hits.event_id)
    write_event(path, graph, random_assignment(seed, graph.num_nodes, tiles), tiles)
    return StoredEvent(path)


def sparse_event(seed, num_nodes=120, num_edges=150, **kinds):
    """Few edges a hit, so that components are many and small; few surfaces, so that double hits are common."""
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


def tracks_on(world, event, logits, options, grouping, sectors):
    """Track of each hit in the user's order, from rank 0."""
    named = np.full(event.num_nodes, -1, np.int64)
    for sector in [None] if sectors is None else [Sector(number, sectors) for number in range(sectors)]:
        part = load_part(event, world.domain, grouping=grouping, sector=sector)
        plan = part.graph.plan
        local = logits[event.read_edges("original_position", plan.edge_ids)]
        tracks = TrackBuilder.of(part, event, options).build(local)
        gathered = gather_tracks(tracks, plan, world.domain)
        if gathered is not None:
            named[gathered[0]] = gathered[1]
    in_users_order = np.empty_like(named)
    in_users_order[event.read_nodes("original_row", np.arange(event.num_nodes))] = named
    return number_tracks(in_users_order)


def build(event, logits, options, num_ranks=1, grouping="contiguous", sectors=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parts that own nothing are among the cases
        return run_ranks(tracks_on, num_ranks, event, logits, options, grouping, sectors)[0].tolist()


def expected(graph, logits, options):
    position = graph.hits.position
    distance = None if position is None else (position.astype(np.float64) ** 2).sum(axis=1).tolist()
    plain = {"cc": plainly.connected, "walk": plainly.walked, "junction": plainly.without_junctions}[options.method]
    tracks = plain(graph.num_nodes, graph.edge_index, logits, distance)
    if options.double_hits and options.method != "cc":
        floor = {"walk": 0.01, "junction": 0.01}[options.method]
        surface = graph.hits.layer.tolist()
        tracks = plainly.with_doubles(tracks, graph.edge_index, logits, distance, surface, floor)
    return plainly.numbered(graph.num_nodes, tracks)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(8))
def test_tracks_are_those_of_the_definition(tmp_path, name, seed):
    graph = sparse_event(seed, num_edges=100 + 40 * seed)
    logits = random_logits(graph, seed)
    with stored(tmp_path, graph) as event:
        found = build(event, logits, METHODS[name])
    assert found == expected(graph, logits, METHODS[name])
    assert max(found) >= (0 if name == "cc" else 3)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("grouping", [slow("contiguous"), "random"])
def test_tracks_are_the_same_on_any_number_of_ranks(tmp_path, name, grouping):
    for seed in range(4):
        graph = sparse_event(seed, 200, 120 + 200 * seed)
        logits = random_logits(graph, seed)
        with stored(tmp_path, graph, tiles=16, seed=seed) as event:
            alone = build(event, logits, METHODS[name])
            for num_ranks in (2, 3, 4, 8):
                assert build(event, logits, METHODS[name], num_ranks, grouping) == alone, (seed, num_ranks)


@pytest.mark.parametrize("name", METHODS)
def test_tracks_do_not_depend_on_the_tiles(tmp_path, name):
    graph = sparse_event(2, 150, 300)
    logits = random_logits(graph, 5)
    found = []
    for tiles in (1, 5, 16):
        with stored(tmp_path / str(tiles), graph, tiles, seed=tiles) as event:
            found.append(build(event, logits, METHODS[name], num_ranks=3))
    assert found[0] == found[1] == found[2]


def spiral(num_hits, num_tiles):
    """One chain of hits outward, in which hit i lies in tile i modulo the number of tiles: it spans every rank."""
    angle = np.linspace(0, 8, num_hits)
    radius = np.linspace(30, 1000, num_hits)
    position = np.stack([radius * np.cos(angle), radius * np.sin(angle), radius], axis=1).astype(np.float32)
    graph = sparse_event(0, num_hits, 1)
    chain = np.stack([np.arange(num_hits - 1), np.arange(1, num_hits)])
    hits = replace(graph.hits, position=position, layer=np.arange(num_hits, dtype=np.int32))
    graph = replace(
        graph, hits=hits, edge_index=chain, edge_features=np.zeros((num_hits - 1, 6), np.float32),
        label=np.ones(num_hits - 1, np.uint8),
    )  # fmt: skip
    return graph, (np.arange(num_hits) % num_tiles).astype(np.int32)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_a_chain_over_all_ranks_is_one_track(tmp_path, name, num_ranks):
    graph, assignment = spiral(64, 16)
    path = tmp_path / event_file_name("spiral")
    write_event(path, graph, assignment, 16)
    with StoredEvent(path) as event:
        assert build(event, np.full(63, 5, np.float32), METHODS[name], num_ranks, "random") == [0] * 64


@pytest.mark.parametrize("name", METHODS)
def test_an_event_that_is_one_single_component_gives_the_same_tracks_on_any_number_of_ranks(tmp_path, name):
    graph = sparse_event(7, 160, 900)
    hub = np.stack([np.zeros(graph.num_nodes - 1, int), np.arange(1, graph.num_nodes)])
    edge_index = np.concatenate([graph.edge_index, hub], axis=1)
    num_edges = edge_index.shape[1]
    graph = replace(
        graph, edge_index=edge_index, edge_features=np.zeros((num_edges, 6), np.float32),
        label=np.zeros(num_edges, np.uint8),
    )  # fmt: skip
    logits = np.where(np.arange(num_edges) < 900, random_logits(graph, 1, 3.0), np.float32(0.2))
    with stored(tmp_path, graph, tiles=16) as event:
        alone = build(event, logits, METHODS[name])
        assert (max(alone) == 0) == (name == "cc")
        for num_ranks in (2, 4, 8):
            assert build(event, logits, METHODS[name], num_ranks, "random") == alone


@pytest.mark.parametrize("name", METHODS)
def test_naive_mode_never_joins_hits_of_two_sectors(tmp_path, name):
    graph = sparse_event(3, 200, 700)
    logits = random_logits(graph, 3)
    with stored(tmp_path, graph, tiles=16) as event:
        alone = build(event, logits, METHODS[name], sectors=4)
        sector = np.empty(graph.num_nodes, int)
        sector[event.read_nodes("original_row", np.arange(200))] = np.repeat(
            sector_of_tiles(event, 4), np.diff(event.node_ptr)
        )
        for num_ranks in (2, 4):
            assert build(event, logits, METHODS[name], num_ranks, sectors=4) == alone
        assert alone != build(event, logits, METHODS[name])
    for track in range(max(alone) + 1):
        assert len(set(sector[np.array(alone) == track])) == 1


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("num_nodes", "num_edges"), [(0, 0), (1, 0), (30, 0), (1, 3)])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_events_without_segments_have_no_tracks(tmp_path, name, num_nodes, num_edges, num_ranks):
    graph = random_event(1, num_nodes, num_edges)
    with stored(tmp_path, graph, tiles=4) as event:
        assert build(event, random_logits(graph, 0), METHODS[name], num_ranks) == [-1] * num_nodes


@pytest.mark.parametrize("method", ["cc", "junction"])
def test_events_without_positions_have_tracks_along_their_edges(tmp_path, method):
    graph = sparse_event(4, 100, 200, positions=False)
    logits = random_logits(graph, 4)
    options = TrackOptions(method=method, double_hits=False)
    with stored(tmp_path, graph) as event:
        alone = build(event, logits, options)
        assert alone == expected(graph, logits, options)
        assert build(event, logits, options, 4) == alone


def test_a_walk_without_positions_is_refused(tmp_path):
    graph = sparse_event(4, 20, 20, positions=False)
    with (
        stored(tmp_path, graph) as event,
        pytest.raises(ValueError, match=r"a walk goes outward, but its hits have no positions \| event 000000004"),
    ):
        build(event, random_logits(graph, 0), TrackOptions(method="walk"))


def tracks_of_parts_that_disagree(world, event, logits, options):
    """As `tracks_on`, but each part says something of its own of the edges that another one owns."""
    part = load_part(event, world.domain, grouping="random")
    plan = part.graph.plan
    local = logits[event.read_edges("original_position", plan.edge_ids)]
    local[~plan.edge_owned] = np.random.default_rng(world.rank).normal(0, 5, np.count_nonzero(~plan.edge_owned))
    gathered = gather_tracks(TrackBuilder.of(part, event, options).build(local), plan, world.domain)
    return None if gathered is None else dict(zip(*map(np.ndarray.tolist, gathered)))


@pytest.mark.parametrize("name", METHODS)
def test_what_the_owner_of_a_cut_edge_says_counts(tmp_path, name):
    graph = sparse_event(6, 150, 400)
    logits = random_logits(graph, 6)
    with stored(tmp_path, graph, tiles=16) as event:
        alone = run_ranks(tracks_of_parts_that_disagree, 1, event, logits, METHODS[name])[0]
        for num_ranks in (2, 4):
            found = run_ranks(tracks_of_parts_that_disagree, num_ranks, event, logits, METHODS[name])[0]
            assert found == alone


@pytest.mark.parametrize("transport", ["gloo", slow("mpi")])
def test_tracks_are_the_same_on_processes(tmp_path, transport):
    if transport == "mpi" and find_mpiexec() is None:
        pytest.skip("no mpiexec")
    graph = sparse_event(5, 120, 300)
    logits = random_logits(graph, 5)
    with stored(tmp_path, graph) as event:
        alone = {name: build(event, logits, options) for name, options in METHODS.items()}
        path = event.path
    assert run_ranks(tracks_from_file, 3, path, logits, transport=transport)[0] == alone


def tracks_from_file(world, path, logits):
    with StoredEvent(path) as event:
        return {
            name: tracks_on(world, event, logits, options, "contiguous", None).tolist()
            for name, options in METHODS.items()
        }
