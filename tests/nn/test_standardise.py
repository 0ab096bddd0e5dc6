"""Features standardised by constants of the network: nodes, ghosts and edges alike, and the same bits on any ranks."""

from dataclasses import replace

import networks
import numpy as np
import pytest
import torch
from tiled import TiledEvent, sha

from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.interaction_module import Standardise
from domainpar.nn.standard import FeatureSums, Standard, standard_of
from domainpar.parallel.world import World
from domainpar.testing import run_ranks

EVENT = TiledEvent.random(4, 60, 300, 8, reach=2)
GRAPH = EVENT.graph
STANDARD = standard_of([(FeatureSums.of(GRAPH.features), FeatureSums.of(GRAPH.edge_features))])
CONSTANTS = {f"standardise.{name}" for name in Standard._fields}


def by_numpy(dtype):
    """Features of nodes and edges by the formula."""
    tables = (GRAPH.features, *STANDARD[:2]), (GRAPH.edge_features, *STANDARD[2:])
    return [
        np.clip((table.astype(dtype) - np.array(mean, dtype)) / np.array(scale, dtype), -5, 5)
        for table, mean, scale in tables
    ]


def local(world, dtype=torch.float32):
    return EVENT.part(world.transport, EVENT.grouping("ranges", world.size), dtype).graph


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_are_the_bits_of_the_formula_in_the_type_of_the_parameters(dtype):
    graph = local(World.alone(), dtype)
    found = Standardise(STANDARD).to(dtype)(graph)
    nodes, edges = by_numpy(str(dtype).removeprefix("torch."))
    order = EVENT.order
    assert found.features.dtype == found.edge_features.dtype == dtype
    assert np.array_equal(found.features.numpy(), nodes[order.original_row])
    assert np.array_equal(found.edge_features.numpy(), edges[order.original_position])


def test_an_outlier_is_cut_off_at_five_deviations():
    graph = local(World.alone())
    graph.features[7] = torch.tensor([1e30, -1e30, 0.0])
    found = Standardise(STANDARD).float()(graph).features[7]
    assert found[:2].tolist() == [5.0, -5.0]
    assert -5 < found[2] < 5


def test_a_network_computes_what_one_without_constants_does_on_standardised_features():
    nodes, edges = by_numpy(np.float32)
    event = TiledEvent(replace(GRAPH, features=nodes, edge_features=edges), EVENT.order)
    flags = {"dtype": torch.float32, "graph_iters": 2}
    found = networks.on_ranks(EVENT, 1, standard=STANDARD, **flags)
    assert found.sha == networks.on_ranks(event, 1, **flags).sha
    assert found.sha != networks.on_ranks(EVENT, 1, **flags).sha


@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_any_number_of_ranks_gives_the_bits_of_one(order):
    flags = {"standard": STANDARD, "dtype": torch.float32, "order": order, "graph_iters": 2}
    assert len({networks.on_ranks(EVENT, num_ranks, **flags).sha for num_ranks in (1, 2, 3)}) == 1


def test_features_of_ghosts_are_the_bits_of_their_owners():
    expected = Standardise(STANDARD).float()(local(World.alone())).features

    for graph in run_ranks(local, 3):
        found = Standardise(STANDARD).float()(graph).features
        assert len(found) > graph.num_owned
        assert sha(found) == sha(expected[torch.from_numpy(graph.plan.local_ids)])


def test_constants_are_buffers_of_the_parameters_type_and_without_them_there_are_none():
    sizes = {"hidden": 16, "graph_iters": 1, "seed": 3}
    plain, with_constants = InteractionNetwork(3, 6, **sizes), InteractionNetwork(3, 6, **sizes, standard=STANDARD)
    ours, theirs = with_constants.state_dict(), plain.state_dict()
    assert ours.keys() - theirs.keys() == CONSTANTS
    assert theirs.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "the first weights"
    assert torch.equal(ours["standardise.node_mean"], torch.tensor(STANDARD.node_mean))
    assert not any(ours[name].requires_grad for name in CONSTANTS)
    double = InteractionNetwork(3, 6, **sizes, standard=STANDARD, dtype=torch.float64)
    assert double.state_dict()["standardise.edge_scale"].tolist() == list(STANDARD.edge_scale)


def test_events_without_edge_features_have_constants_of_nodes_alone():
    event = TiledEvent.random(4, 60, 300, 8, reach=2, num_edge_features=0)
    standard = standard_of([(FeatureSums.of(event.graph.features), FeatureSums.of(event.graph.edge_features))])
    flags = {"standard": standard, "dtype": torch.float32, "graph_iters": 1}
    assert networks.on_ranks(event, 1, **flags).sha == networks.on_ranks(event, 2, **flags).sha


def test_constants_of_other_features_are_refused():
    with pytest.raises(ValueError, match=r"\(3, 6\) .*\(3, 5\)"):
        InteractionNetwork(3, 5, hidden=16, standard=STANDARD)
