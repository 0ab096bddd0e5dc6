"""Naive mode: independent sectors. The exact answer where no edge is cut, another one elsewhere, on any ranks."""

import json
from dataclasses import replace
from pathlib import Path

import invariance
import numpy as np
import pytest
import torch
from marks import fault
from random_events import random_event
from random_store import write_graph, write_random_store

from domainpar.common.problems import Problem
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.graph import EventGraph
from domainpar.tracking.events.store import EventStore, write_manifest
from domainpar.tracking.part_loading import empty_parts, sector_of_tiles
from domainpar.tracking.training.sampler import samples_of
from domainpar.train import train

NUM_SECTORS, NUM_TILES = 4, 8
NODES, EDGES = 30, 160  # of each of four clusters


def clustered_event(cut_edges=0):
    """Four clusters of two tiles each, with as many edges; and some edges from each cluster to the next."""
    clusters = [random_event(seed, NODES, EDGES, positions=False) for seed in range(NUM_SECTORS)]
    edge_index = [cluster.edge_index + NODES * number for number, cluster in enumerate(clusters)]
    rng = np.random.default_rng(0)
    for number in range(NUM_SECTORS):
        src, dst = rng.integers(0, NODES, (2, cut_edges)) + NODES * number
        edge_index.append(np.stack([src, (dst + NODES) % (NODES * NUM_SECTORS)]))
    whole = random_event(9, NODES * NUM_SECTORS, (EDGES + cut_edges) * NUM_SECTORS, positions=False)
    graph = replace(whole, edge_index=np.concatenate(edge_index, axis=1))
    assert isinstance(graph, EventGraph)
    return graph, np.arange(NODES * NUM_SECTORS) * NUM_TILES // (NODES * NUM_SECTORS)


def write_clustered(directory, cut_edges=0):
    graph, tiles = clustered_event(cut_edges)
    write_manifest(directory, [write_graph(directory, graph, tiles, NUM_TILES, "train")], {})
    return directory


def trained(store, out, **flags):
    """A run of three steps on one rank and its lines."""
    config = TrainConfig(hidden=16, graph_iters=2, epochs=3, lr=1e-2, overwrite=True, out=str(out), **flags)
    run = train(config, Path(store), World.alone())
    return run, [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def scores(run, num_sectors):
    """Logits of all edges of the first event in global order, NaN for those that no sector holds."""
    samples = samples_of(run.store.events()[:1], num_sectors)
    logits = torch.full((samples[0].record.num_edges,), torch.nan)
    for part in (run.trainer.loader.load(sample) for sample in samples):
        with torch.no_grad():
            logits[torch.from_numpy(part.graph.plan.edge_ids)] = run.trainer.model(part.graph, part.halo)
    return logits


NAIVE = {"mode": "naive", "sectors": NUM_SECTORS, "events_per_step": NUM_SECTORS}


@pytest.mark.parametrize("method", ["contiguous", "metis"])
def test_the_tiles_of_a_sector_are_shared_out_as_if_there_were_no_others(tmp_path, method):
    events = EventStore(write_clustered(tmp_path, cut_edges=9))
    with events.open(events.events()[0]) as event:
        for sectors, num_parts in ((2, 4), (4, 2), (2, 2)):
            assert empty_parts(event, num_parts, method, sectors, seed=0) == []
        assert empty_parts(event, 3, method, 4, seed=0) != []  # of two tiles each


def test_where_sectors_cut_no_edge_naive_mode_has_the_bits_of_halo_mode(tmp_path):
    store = write_clustered(tmp_path)
    events = EventStore(store)
    with events.open(events.events()[0]) as event:
        assert sector_of_tiles(event, NUM_SECTORS).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    halo, halo_lines = trained(store, tmp_path / "halo")
    naive, naive_lines = trained(store, tmp_path / "naive", **NAIVE)
    same = ("step", "loss", "grad_norm", "edge_efficiency", "edge_purity", "edge_auc_pooled", "edges", "target_edges")
    assert [[line[name] for name in same] for line in naive_lines] == [
        [line[name] for name in same] for line in halo_lines
    ]
    assert invariance.parameters_of(naive) == invariance.parameters_of(halo)
    assert torch.equal(scores(naive, NUM_SECTORS), scores(halo, None))
    assert {line["edges_not_scored"] for line in naive_lines + halo_lines} == {0}


@fault(15)
def test_where_edges_are_cut_naive_mode_gives_another_answer_and_counts_them(tmp_path):
    store = write_clustered(tmp_path, cut_edges=5)
    halo, halo_lines = trained(store, tmp_path / "halo")
    naive, naive_lines = trained(store, tmp_path / "naive", **NAIVE)
    assert invariance.parameters_of(naive) != invariance.parameters_of(halo)
    assert naive_lines[0]["loss"] != halo_lines[0]["loss"]
    given = scores(naive, NUM_SECTORS)
    assert int(given.isnan().sum()) == 5 * NUM_SECTORS
    scored = ~given.isnan()
    assert not torch.equal(given[scored], scores(naive, None)[scored]), "edges inside miss their neighbours outside"
    for line in naive_lines:
        assert (line["edges"], line["edges_not_scored"]) == (EDGES * NUM_SECTORS, 5 * NUM_SECTORS)
        assert "approximate" in line["counted_against"]
    assert halo_lines[0]["edges"] == (EDGES + 5) * NUM_SECTORS
    assert halo_lines[0]["counted_against"] == "candidate edges"


CASE = {"mode": "naive", "events_per_step": 3, "epochs": 1, "clip": 1.0, "warmup": 2}


@pytest.fixture(scope="module", params=[5, "2x3"])
def case(request):
    return {**CASE, "sectors": request.param}


@pytest.fixture(scope="module")
def on_one_rank(store, tmp_path_factory, case):
    out = tmp_path_factory.mktemp("one-rank")
    return run_ranks(invariance.results, 1, store, out, case)[0]


GRIDS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
USUAL = [(5, 2, 1), ("2x3", 4, 2)]
WAYS = [
    pytest.param(sectors, *grid, marks=[] if (sectors, *grid) in USUAL else pytest.mark.slow)
    for sectors in (5, "2x3")
    for grid in GRIDS
]


@pytest.mark.parametrize(("case", "num_ranks", "domain_size"), WAYS, indirect=["case"], scope="module")
def test_naive_training_has_the_same_bits_on_any_grid_of_ranks(
    store, on_one_rank, tmp_path, case, num_ranks, domain_size
):
    found = run_ranks(invariance.results, num_ranks, store, tmp_path / "run", case, domain_size=domain_size, timeout=60)
    for result in found:
        assert {name: result[name] for name in ("steps", "parameters", "scores")} == {
            name: on_one_rank[name] for name in ("steps", "parameters", "scores")
        }
    assert found[0]["checkpoint"] == on_one_rank["checkpoint"]


def test_over_an_epoch_every_edge_is_counted_once_inside_a_sector_or_between_two(store, on_one_rank):
    lines = json.loads(on_one_rank["steps"])
    for split in ("train", "val"):
        counted = sum(line["edges"] + line["edges_not_scored"] for line in lines if line["split"] == split)
        assert counted == sum(record.num_edges for record in EventStore(store).events(split))
        assert any(line["edges_not_scored"] for line in lines if line["split"] == split)


def refusal(world, store, out, flags):
    with pytest.raises(Problem) as raised:
        train(TrainConfig(mode="naive", max_steps=1, out=str(out), **flags), Path(store), world)
    return str(raised.value)


@pytest.mark.parametrize("sectors", [20, "4x4"])
def test_more_sectors_than_tiles_are_refused(store, tmp_path, sectors):
    told = run_ranks(refusal, 2, store, tmp_path / "run", {"sectors": sectors})
    assert told[0] == told[1]
    assert f"{16 if sectors == '4x4' else 20} sectors are made of whole tiles" in told[0]
    assert "has 12 tiles" in told[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("along", ["phi", "eta", None])
def test_a_grid_of_sectors_is_refused_where_tiles_make_none(tmp_path, along, num_ranks):
    positions = along is not None
    store = write_random_store(tmp_path / "store", num_train=1, num_val=0, positions=positions)
    events = EventStore(store)
    write_manifest(store, events.events(), {"partitioner": along or "metis"})
    for said in run_ranks(refusal, num_ranks, store, tmp_path / "run", {"sectors": "2x3"}):
        expected = f"those of store {store} follow {along} only" if positions else "its hits have no positions"
        assert "sectors of 2x3" in said
        assert expected in said
        assert ("ask for a number of sectors, such as 6" in said) == (not positions)
    if along == "eta":  # slices in eta alone are sectors
        trained(store, tmp_path / "slices", mode="naive", sectors="1x3", max_steps=1)
