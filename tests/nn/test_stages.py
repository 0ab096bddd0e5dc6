"""Stages and networks over tiles are what their formulas say: compared with plain torch on the whole event."""

import dense
import numpy as np
import pytest
import torch
from random_events import random_event
from tiled import TiledEvent

from domainpar.nn.gradients import GradientSink
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.mlp import MLP
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.testing import run_ranks

NUM_NODES, NUM_TILES = 70, 9


def tiled_event(num_edges=400, num_edge_features=6):
    """An event with self-loops, duplicate edges, isolated nodes and three tiles without any node."""
    graph = random_event(2, NUM_NODES, num_edges, num_edge_features=num_edge_features)
    tiles = np.random.default_rng(2).choice([0, 1, 3, 4, 6, 8], NUM_NODES)
    return TiledEvent.of(graph, tiles, NUM_TILES)


def whole(event):
    """Features of all nodes and edges, and both ends of the edges, in stored order."""
    features = torch.from_numpy(event.graph.features[event.order.original_row]).double()
    edge_features = torch.from_numpy(event.graph.edge_features[event.order.original_position]).double()
    return features, edge_features, *map(torch.from_numpy, event.edge_index)


def assert_close(found, expected, what):
    """max |difference| / max |value| of at most 1e-12."""
    assert found.shape == expected.shape, what
    if expected.numel():
        difference = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-300)
        assert difference <= 1e-12, f"{what}: {difference:.2e}"


def _logits_and_gradients(world, event, flags, upstream):
    part = event.part(world.transport, event.grouping("random", world.size, seed=world.size), torch.float64)
    model = InteractionNetwork(3, event.graph.edge_features.shape[1], hidden=16, dtype=torch.float64, **flags)
    sink = GradientSink(model)
    logits = model(part.graph, part.halo)
    logits.backward(upstream[torch.from_numpy(part.graph.plan.edge_ids)])
    assert sink.reduce(world.transport) == 0
    owned = part.graph.plan.edge_owned
    scores = torch.full((event.graph.edge_index.shape[1],), torch.nan, dtype=torch.float64)
    scores[torch.from_numpy(part.graph.plan.edge_ids[owned])] = logits.detach()[torch.from_numpy(owned)]
    return scores, {name: parameter.grad for name, parameter in model.named_parameters()}


def _compare_network(event, num_ranks, flags):
    num_edges = event.graph.edge_index.shape[1]
    upstream = torch.randn(num_edges, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    model = InteractionNetwork(3, event.graph.edge_features.shape[1], hidden=16, dtype=torch.float64, **flags)
    expected = dense.interaction_network(model, *whole(event))
    expected.backward(upstream)
    found = run_ranks(_logits_and_gradients, num_ranks, event, flags, upstream)
    scores = torch.stack([scores for scores, _ in found]).nansum(dim=0)
    assert_close(scores, expected.detach(), "logits")
    for _, gradients in found:
        for name, parameter in model.named_parameters():
            assert_close(
                gradients[name], torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, name
            )


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("shared_weights", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_both_networks_are_their_formulas_with_all_gradients(order, shared_weights, num_ranks):
    flags = {"order": order, "shared_weights": shared_weights, "graph_iters": 3}
    _compare_network(tiled_event(), num_ranks, flags)


@pytest.mark.parametrize("order", ["edge-first", "node-first"])
@pytest.mark.parametrize(
    "shape",
    [{"num_edge_features": 0}, {"num_edges": 0}, {"num_edge_features": 1, "num_edges": 1}],
    ids=["no edge features", "no edges", "one edge"],
)
def test_networks_bear_events_with_little_in_them(order, shape):
    _compare_network(tiled_event(**shape), 2, {"order": order, "graph_iters": 1, "layers": 1})


def _edge_stage(world, event, with_nodes, sums):
    """One edge stage on one rank: outputs, and gradients of everything that goes in."""
    part = event.part(world.transport, event.grouping("ranges", world.size), torch.float64)
    nodes, edges, upstream, mlp = stage_inputs(event, with_nodes)
    stage = EdgeStage(mlp)
    sink = GradientSink(stage)
    out, at_ends = stage(nodes, edges, part.graph, sums=sums)
    ((out * upstream[0]).sum() + (at_ends * upstream[1][:, : at_ends.shape[1]]).sum()).backward()
    sink.reduce(world.transport)
    inputs = [edges] if nodes is None else [nodes, edges]
    return out.detach(), at_ends.detach(), [one.grad for one in inputs], [p.grad for p in mlp.parameters()]


def stage_inputs(event, with_nodes):
    generator = torch.Generator().manual_seed(4)
    num_edges = event.graph.edge_index.shape[1]
    nodes = torch.randn(NUM_NODES, 5, dtype=torch.float64, generator=generator).requires_grad_() if with_nodes else None
    edges = torch.randn(num_edges, 7, dtype=torch.float64, generator=generator).requires_grad_()
    upstream = [torch.randn(rows, width, dtype=torch.float64, generator=generator) for rows, width in
                ((num_edges, 16), (NUM_NODES, 32))]  # fmt: skip
    return nodes, edges, upstream, MLP(17 if with_nodes else 7, (32, 16), generator).double()


@pytest.mark.parametrize(("with_nodes", "sums"), [(True, True), (True, False), (False, True), (False, False)])
def test_an_edge_stage_returns_its_edges_and_their_sums_and_every_gradient(with_nodes, sums):
    event = tiled_event()
    *_, src, dst = whole(event)
    nodes, edges, upstream, mlp = stage_inputs(event, with_nodes)
    table = nodes if with_nodes else edges.new_zeros(NUM_NODES, 0)
    new, at_dst, at_src = dense.edge_stage(EdgeStage(mlp), table, edges, src, dst)
    expected_sums = torch.cat([at_dst, at_src], dim=1) if sums else new.new_zeros(NUM_NODES, 0)
    ((new * upstream[0]).sum() + (expected_sums * upstream[1][:, : expected_sums.shape[1]]).sum()).backward()
    ((out, at_ends, of_inputs, of_parameters),) = run_ranks(_edge_stage, 1, event, with_nodes, sums)
    assert_close(out, new.detach(), "edges")
    assert_close(at_ends, expected_sums.detach(), "sums")
    for found, given in zip(of_inputs, [nodes, edges] if with_nodes else [edges], strict=True):
        assert_close(found, given.grad, "gradient of an input")
    for found, parameter in zip(of_parameters, mlp.parameters(), strict=True):
        assert_close(found, parameter.grad, "gradient of a parameter")


def _node_stage(world, event):
    part = event.part(world.transport, event.grouping("ranges", world.size), torch.float64)
    generator = torch.Generator().manual_seed(4)
    tables = [torch.randn(NUM_NODES, width, dtype=torch.float64, generator=generator) for width in (3, 10)]
    stage = NodeStage(MLP(13, (16,), generator)).double()
    sink = GradientSink(stage)
    ours = [table.clone().requires_grad_() for table in tables]
    out = stage(ours, part.graph)
    out.tanh().sum().backward()
    sink.reduce(world.transport)
    found = [out.detach(), *(table.grad for table in ours), *(parameter.grad for parameter in stage.parameters())]
    stage.zero_grad()
    plain = [table.clone().requires_grad_() for table in tables]
    expected = dense.mlp(stage.mlp, torch.cat(plain, dim=1))
    expected.tanh().sum().backward()
    wanted = [
        expected.detach(),
        *(table.grad for table in plain),
        *(parameter.grad for parameter in stage.parameters()),
    ]
    return list(zip(found, wanted, strict=True))


def test_a_node_stage_takes_tables_side_by_side_and_returns_every_gradient():
    for found, wanted in run_ranks(_node_stage, 1, tiled_event())[0]:
        assert_close(found, wanted, "node stage")


def test_ghost_rows_of_the_sums_are_zero_until_their_owner_hands_them_out():
    def sums_of_ghosts(world, event):
        part = event.part(world.transport, event.grouping("ranges", world.size))
        stage = EdgeStage(MLP(6, (16,), torch.Generator().manual_seed(0)))
        _, at_ends = stage(part.graph.features, part.graph.edge_features[:, :0], part.graph)
        return part.graph.plan.num_ghosts, at_ends[part.graph.num_owned :].abs().sum().item()

    found = run_ranks(sums_of_ghosts, 3, tiled_event())
    assert all(num_ghosts > 0 for num_ghosts, _ in found)
    assert all(total == 0 for _, total in found)


def test_a_stage_that_gets_other_columns_than_its_perceptron_takes_says_so():
    def wrong_width(world, event):
        part = event.part(world.transport, event.grouping("ranges", world.size))
        EdgeStage(MLP(9, (16,), torch.Generator()))(part.graph.features, part.graph.edge_features, part.graph)

    with pytest.raises(ValueError, match="takes 9 columns but got 12"):
        run_ranks(wrong_width, 1, tiled_event())


def test_networks_of_impossible_size_are_refused():
    for sizes in ({"graph_iters": 0}, {"layers": 0}, {"node_features": 0}):
        with pytest.raises(ValueError, match="must all be at least 1"):
            InteractionNetwork(**{"node_features": 3, **sizes})
