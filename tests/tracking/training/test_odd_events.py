"""Events that break what was not thought of: a step on several ranks is to the last bit that of one rank."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from marks import fault, slow
from random_events import random_assignment, random_event
from random_store import write_graph

from domainpar.nn.options import NetworkOptions
from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore, write_manifest
from domainpar.tracking.networks.catalogue import build_model
from domainpar.tracking.training.loop import Schedule, Trainer
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.sampler import samples_of
from partitioners import Phi, Topology

NUM_TILES = 8


def with_edges(graph, edge_index):
    """The same hits, joined by other edges."""
    rows = np.arange(edge_index.shape[1])
    return replace(
        graph,
        edge_index=edge_index,
        edge_features=np.resize(graph.edge_features, (len(rows), 6)),
        label=(rows % 2).astype(np.uint8),
    )


def at_the_seam():
    """Every node within a tenth of a degree of phi = pi or -pi, and every edge from one side to the other."""
    graph = random_event(5, 60, 10)
    rng = np.random.default_rng(0)
    side = np.arange(60) % 2
    phi = (np.pi - rng.uniform(0, 1e-3, 60)) * np.where(side, 1, -1)
    radius = rng.uniform(30, 1000, 60)
    place = np.stack([radius * np.cos(phi), radius * np.sin(phi), rng.normal(0, 100, 60)], axis=1).astype(np.float32)
    ends = np.stack([rng.choice(np.flatnonzero(side), 200), rng.choice(np.flatnonzero(side == 0), 200)])
    return with_edges(replace(graph, hits=replace(graph.hits, position=place)), ends)


def both_directions():
    one = random_event(6, 40, 100).edge_index
    return with_edges(random_event(6, 40, 100), np.concatenate([one, one[::-1]], axis=1))


def by_phi(graph):
    return Phi()(Topology(graph.edge_index, graph.num_nodes, graph.hits.position), NUM_TILES)


def drawn_at_random(graph):
    return random_assignment(1, graph.num_nodes, NUM_TILES)


def in_one_sector(graph):
    return np.full(graph.num_nodes, 3, np.int32)


loops = np.stack([np.arange(40), np.arange(40)])
ODD = {
    "no nodes": (random_event(0, 0, 0), drawn_at_random),
    "no edges": (random_event(0, 40, 0), drawn_at_random),
    "one node": (random_event(0, 1, 0), drawn_at_random),
    "one node and its loop": (with_edges(random_event(0, 1, 0), loops[:, :1]), drawn_at_random),
    "fewer nodes than ranks": (random_event(0, 3, 9), drawn_at_random),
    "all nodes in one tile": (random_event(0, 40, 120), in_one_sector),
    "every node at the seam": (at_the_seam(), by_phi),
    "loops only": (with_edges(random_event(0, 40, 10), loops), drawn_at_random),
    "one edge forty times": (
        with_edges(random_event(0, 40, 10), loops[:, :1] + np.array([[0] * 40, [1] * 40])),
        by_phi,
    ),
    "isolated nodes": (random_event(7, 200, 20), drawn_at_random),
    "every edge both ways": (both_directions(), drawn_at_random),
}


def _step(world, store):
    network = build_model("interaction", 3, 6, NetworkOptions(hidden=16, graph_iters=2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    loader = PartLoader(EventStore(store), world)
    trainer = Trainer(network, optimizer, loader, world, Schedule(0.01, "constant", 0, 100, 10))
    samples = samples_of(EventStore(store).events(), None)
    records = [trainer.step(samples, step) for step in range(2)]
    part = loader.load(samples[0])
    weights = torch.cat([one.detach().reshape(-1) for one in network.parameters()])
    assert weights.isfinite().all()
    cut = int((~part.graph.plan.edge_owned).sum()) + part.graph.plan.num_ghosts
    return [record["loss"] for record in records], weights.numpy().tobytes(), cut


@fault(23, 24, 25)
@pytest.mark.parametrize("num_ranks", [slow(2), 4])
@pytest.mark.parametrize(("graph", "cut"), ODD.values(), ids=ODD)
def test_a_step_on_an_odd_event_is_to_the_last_bit_that_of_one_rank(tmp_path, graph, cut, num_ranks):
    write_manifest(tmp_path, [write_graph(tmp_path, graph, cut(graph), NUM_TILES, "train")], {})
    ((losses, weights, _),) = run_ranks(_step, 1, tmp_path)
    assert np.isfinite(losses).all()
    found = run_ranks(_step, num_ranks, tmp_path)
    assert [one[:2] for one in found] == [(losses, weights)] * num_ranks


@fault(25)
def test_edges_across_the_seam_are_edges_of_the_halo(tmp_path):
    graph = at_the_seam()
    write_manifest(tmp_path, [write_graph(tmp_path, graph, by_phi(graph), NUM_TILES, "train")], {})
    assert sum(cut for _, _, cut in run_ranks(_step, 4, tmp_path)) > 50
