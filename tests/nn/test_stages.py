"""Stages and networks over tiles are what their formulas say: compared with plain torch on the whole event."""

import dense
import networks
import numpy as np
import pytest
import torch
from networks import tiled_event
from one_mlp import an_mlp
from random_events import random_event
from tiled import TiledEvent

from domainpar.nn.gradients import GradientSink
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.testing import run_ranks

NUM_NODES = 70


def assert_close(found, expected, what):
    """max |difference| / max |value| of at most 1e-12."""
    assert found.shape == expected.shape, what
    if expected.numel():
        difference = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-300)
        assert difference <= 1e-12, f"{what}: {difference:.2e}"


def _compare_network(event, num_ranks, flags):
    found, expected = networks.on_ranks(event, num_ranks, **flags), networks.by_formula(event, **flags)
    assert networks.distance(found, expected) <= 1e-12


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


def _edge_stage(world, event, shape, sums, used=("edges", "sums")):
    """One edge stage: outputs of this part, and gradients of everything that goes in."""
    part = event.part(world.transport, grouping_with_an_empty_part(event, world.size), torch.float64)
    plan, num_owned = part.graph.plan, part.graph.num_owned
    nodes, edges, upstream, mlp = stage_inputs(event, shape)
    owned = nodes.detach()[torch.from_numpy(plan.owned_ids)].requires_grad_()
    local = edges.detach()[torch.from_numpy(plan.edge_ids)].requires_grad_()
    stage = EdgeStage(mlp)
    sink = GradientSink(stage)
    spread = part.halo.spread(owned) if nodes.shape[1] else None
    out, at_ends = stage(spread, local, part.graph, sums=sums)
    assert at_ends.shape == (num_owned, 2 * mlp.out_features if sums else 0)
    losses = {
        "edges": (out * upstream[0][torch.from_numpy(plan.edge_ids)]).sum(),
        "sums": (at_ends * upstream[1][torch.from_numpy(plan.owned_ids), : at_ends.shape[1]]).sum(),
    }
    sum(losses[name] for name in used).backward()
    sink.reduce(world.transport)
    found = [out, at_ends, local.grad, torch.empty(num_owned, 0) if spread is None else owned.grad]
    return plan, [table.detach() for table in found], [parameter.grad for parameter in mlp.parameters()]


def grouping_with_an_empty_part(event, num_parts):
    """Of three parts, the second owns nothing."""
    return (event.grouping("ranges", 2) * 2 if num_parts == 3 else event.grouping("ranges", num_parts)).astype(np.int32)


STAGES = {
    # node width, widths of layers
    "nodes and edges": (5, (32, 16)),
    "edges alone": (0, (32, 16)),
    "one layer": (5, (48,)),
    "one layer, edges alone": (0, (16,)),
    "three layers": (16, (64, 32, 16)),
    "plain, of width 1": (5, (16, 1)),
    "plain, of width 5": (0, (5,)),
}


def stage_inputs(event, shape):
    node_width, layers = STAGES[shape]
    generator = torch.Generator().manual_seed(4)
    num_edges, out = event.graph.edge_index.shape[1], layers[-1]
    tables = [torch.randn(rows, width, dtype=torch.float64, generator=generator) for rows, width in
              ((NUM_NODES, node_width), (num_edges, 7), (num_edges, out), (NUM_NODES, 2 * out))]  # fmt: skip
    mlp = an_mlp(2 * node_width + 7, layers, generator, readout=shape.startswith("plain")).double()
    return tables[0].requires_grad_(), tables[1].requires_grad_(), tables[2:], mlp


def whole_stage(event, shape, sums, used=("edges", "sums")):
    """The same from plain torch on the whole event."""
    nodes, edges, upstream, mlp = stage_inputs(event, shape)
    *_, src, dst = networks.tables(event)
    new, at_dst, at_src = dense.edge_stage(EdgeStage(mlp), nodes, edges, src, dst)
    at_ends = torch.cat([at_dst, at_src], dim=1) if sums else new.new_zeros(NUM_NODES, 0)
    losses = {"edges": (new * upstream[0]).sum(), "sums": (at_ends * upstream[1][:, : at_ends.shape[1]]).sum()}
    inputs = [edges, nodes, *mlp.parameters()]
    grad_edges, grad_nodes, *of_parameters = torch.autograd.grad(sum(losses[name] for name in used), inputs)
    return [new.detach(), at_ends.detach(), grad_edges, grad_nodes], of_parameters


def _compare_stage(event, num_ranks, shape, sums, **used):
    expected, expected_of_parameters = whole_stage(event, shape, sums, **used)
    for plan, found, of_parameters in run_ranks(_edge_stage, num_ranks, event, shape, sums, *used.values()):
        for ours, theirs, ids, what in zip(
            found,
            expected,
            (plan.edge_ids, plan.owned_ids, plan.edge_ids, plan.owned_ids),
            ("edges", "sums", "gradient of edges", "gradient of nodes"),
            strict=True,
        ):
            assert_close(ours, theirs[torch.from_numpy(ids)], what)
        for ours, theirs in zip(of_parameters, expected_of_parameters, strict=True):
            assert_close(ours, theirs, "gradient of a parameter")


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    ("shape", "sums"),
    [
        (shape, sums)
        for shape in STAGES
        for sums in (False, True)
        if not sums or shape in ("nodes and edges", "one layer", "three layers")
    ],
)
def test_an_edge_stage_returns_its_edges_and_their_sums_and_every_gradient(shape, sums, num_ranks):
    _compare_stage(tiled_event(), num_ranks, shape, sums)


@pytest.mark.parametrize("used", ["edges", "sums"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_loss_may_use_only_one_of_the_results_of_an_edge_stage(num_ranks, used):
    """Autograd has zeros for the other one; the gradient of the sums is exchanged all the same, on every rank."""
    _compare_stage(tiled_event(), num_ranks, "nodes and edges", True, used=(used,))


@pytest.mark.parametrize("shape", ["edges alone", "plain, of width 1", "plain, of width 5"])
def test_sums_of_a_stage_without_a_halo_or_of_a_readout_are_refused(shape):
    with pytest.raises(ValueError, match="sums at both ends need node states"):
        run_ranks(_edge_stage, 1, tiled_event(), shape, True)


def _stage_with_bfloat16_edges(world, event):
    """Sums and gradients of a stage whose edges come in, and go out, as bfloat16."""
    part = event.part(world.transport, event.grouping("ranges", world.size))
    nodes, edges, upstream, mlp = stage_inputs(event, "three layers")
    nodes, edges = (table.detach().float() for table in (nodes, edges))
    nodes, edges = nodes.requires_grad_(), edges.to(torch.bfloat16).requires_grad_()
    stage = EdgeStage(mlp.float(), torch.bfloat16)
    sink = GradientSink(stage)
    out, at_ends = stage(part.halo.spread(nodes), edges, part.graph)
    assert (out.dtype, at_ends.dtype) == (torch.bfloat16, torch.float32)
    ((out * upstream[0]).sum() + (at_ends * upstream[1]).sum()).backward()
    assert sink.reduce(world.transport) == 0
    assert (nodes.grad.dtype, edges.grad.dtype) == (torch.float32, torch.bfloat16)
    return [out.detach(), at_ends.detach(), edges.grad, nodes.grad], [parameter.grad for parameter in mlp.parameters()]


def test_edges_and_their_products_may_be_bfloat16_with_sums_and_all_else_exact():
    event = tiled_event()
    expected, expected_of_parameters = whole_stage(event, "three layers", True)
    ((found, of_parameters),) = run_ranks(_stage_with_bfloat16_edges, 1, event)
    for position, (ours, theirs) in enumerate(zip((*found, *of_parameters), (*expected, *expected_of_parameters))):
        tolerance = 0.01 if position < 2 else 0.15  # rounding opens or closes some ReLUs
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
    *_, src, dst = networks.tables(event)  # sums are of the rows as they were stored
    sums = [torch.zeros(NUM_NODES, 16).index_add(0, end, found[0].float()) for end in (dst, src)]
    torch.testing.assert_close(found[1], torch.cat(sums, dim=1), rtol=1e-5, atol=1e-5)


def _node_stage(world, event):
    part = event.part(world.transport, event.grouping("ranges", world.size), torch.float64)
    generator = torch.Generator().manual_seed(4)
    tables = [torch.randn(NUM_NODES, width, dtype=torch.float64, generator=generator) for width in (3, 10)]
    stage = NodeStage(an_mlp(13, (16,), generator)).double()
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


def test_sums_are_of_owned_nodes_only_and_whole_although_edges_are_cut():
    def sums_of_owned(world, event):
        part = event.part(world.transport, event.grouping("ranges", world.size), torch.float64)
        stage = EdgeStage(an_mlp(6, (16,), torch.Generator().manual_seed(0)).double())
        nodes = part.halo.spread(part.graph.features[: part.graph.num_owned])
        _, at_ends = stage(nodes, None, part.graph)
        return part.graph.plan, at_ends.detach()

    event = tiled_event()
    ((_, expected),) = run_ranks(sums_of_owned, 1, event)
    for plan, found in run_ranks(sums_of_owned, 3, event):
        assert plan.num_ghosts > 0
        assert torch.equal(found, expected[torch.from_numpy(plan.owned_ids)])


def test_a_stage_that_gets_other_columns_than_its_perceptron_takes_says_so():
    def wrong_width(world, event):
        part = event.part(world.transport, event.grouping("ranges", world.size))
        nodes = part.halo.spread(part.graph.features[: part.graph.num_owned])
        EdgeStage(an_mlp(9, (16,), torch.Generator()))(nodes, part.graph.edge_features, part.graph)

    with pytest.raises(ValueError, match="takes 9 columns but got 12"):
        run_ranks(wrong_width, 1, tiled_event())


def test_node_tables_of_other_widths_than_the_perceptron_takes_are_refused():
    def wrong_width(world, event):
        part = event.part(world.transport, event.grouping("ranges", world.size))
        NodeStage(an_mlp(9, (16,), torch.Generator()))([part.graph.features] * 2, part.graph)

    with pytest.raises(ValueError, match="takes 9 columns but got 6"):
        run_ranks(wrong_width, 1, tiled_event())


def test_networks_of_impossible_size_are_refused():
    for sizes in ({"graph_iters": 0}, {"layers": 0}, {"node_features": 0}):
        with pytest.raises(ValueError, match="must all be at least 1"):
            InteractionNetwork(**{"node_features": 3, **sizes})


@pytest.mark.parametrize("published", [False, True])
def test_a_network_on_another_device_is_refused_before_kernels_read_its_memory(published):
    def on_rank(world):
        event = TiledEvent.of(random_event(3, 20, 60), np.arange(20) // 10, 2)
        part = event.part(world.transport, event.grouping("ranges", world.size))
        networks.network(event, torch.float32, published=published).to("meta")(part.graph, part.halo)

    with pytest.raises(ValueError, match=r"CPU, .*meta .*cpu; .*plain"):
        run_ranks(on_rank, 1)
