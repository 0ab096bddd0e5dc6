"""Edge states and their products in bf16: one hash on any ranks, close to float32, and logits that are not rounded."""

import networks
import numpy as np
import pytest
import torch
from one_mlp import an_mlp
from random_events import random_event
from tiled import TiledEvent

from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.parallel.halo import Halo
from domainpar.testing import run_ranks

NUM_TILES = 12
ORDERS = ("edge-first", "node-first")
BF16 = {"dtype": torch.float32, "products": torch.bfloat16}


@pytest.fixture(scope="module")
def event():
    graph = random_event(4, 90, 500, reach=2)
    return TiledEvent.of(graph, np.arange(90) * NUM_TILES // 90, NUM_TILES)


@pytest.mark.parametrize("order", ORDERS)
def test_there_is_one_hash_on_any_ranks_and_groupings(event, order):
    """Here of one layer with shared weights; two layers with their own are tried in test_rules.py."""
    flags = {"order": order, "graph_iters": 2, "shared_weights": True, "layers": 1}
    answers = {
        networks.on_ranks(event, num_ranks, grouping=grouping, **BF16, **flags).sha
        for num_ranks, grouping in ((1, "ranges"), (2, "random"), (3, "ranges"), (3, "one part"), (5, "random"))
    }
    assert len(answers) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_rounding_only_what_is_borrowed_would_be_seen(event, order, monkeypatch):
    """The test above can fail: were states of ghosts rounded too, and those of owned nodes not, hashes would differ."""

    def start_fill(self, owned, ghosts=None, plain=Halo.start_fill):
        return plain(self, owned.to(torch.bfloat16).to(owned.dtype), ghosts)

    monkeypatch.setattr(Halo, "start_fill", start_fill)
    answers = [networks.on_ranks(event, ranks, copies_agree=False, order=order, **BF16) for ranks in (1, 3)]
    assert answers[0].sha != answers[1].sha


LOGITS, GRADIENTS = 0.05, 0.05


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("graph_iters", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_logits_and_gradients_are_near_those_of_float32(event, order, graph_iters, num_ranks):
    """bf16 has 8 bits: what is rounded is right to 0.4 %. So logits to 5 % of the largest, gradients to 5 % of all."""
    flags = {"order": order, "graph_iters": graph_iters}
    expected = networks.on_ranks(event, 1, copies_agree=False, dtype=torch.float32, **flags)
    found = networks.on_ranks(event, num_ranks, copies_agree=False, **BF16, **flags)
    assert 1e-4 < networks.distance_of_logits(found, expected) < LOGITS
    assert 1e-4 < networks.distance_of_gradients(found, expected) < GRADIENTS
    assert {gradient.dtype for gradient in found.gradients.values()} == {torch.float32}


def _logits_without_last_bias(world, event, order):
    part = event.part(world.transport, event.grouping("ranges", world.size))
    model = networks.network(event, order=order, graph_iters=1, **BF16)
    model.head.mlp.linears[-1].bias.data.zero_()
    with torch.no_grad():
        return model(part.graph, part.halo)


@pytest.mark.parametrize("order", ORDERS)
def test_the_product_that_makes_logits_stays_in_float32(event, order):
    """Its bias is 0 here: a product that was rounded would be its own bf16."""
    (logits,) = run_ranks(_logits_without_last_bias, 1, event, order)
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9


def _logits_with_weights_between(world, event, name):
    """Logits with a weight that is a bf16 number, and with one so little larger that bf16 does not see it."""
    part = event.part(world.transport, event.grouping("ranges", world.size))
    model = networks.network(event, order="node-first", graph_iters=1, **BF16)
    weight, found = model.get_parameter(name).data, []
    weight.copy_(weight.bfloat16())
    for factor in (1.0, 1 + 2**-12):
        weight *= factor
        with torch.no_grad():
            found.append(model(part.graph, part.halo))
    return found


@pytest.mark.parametrize(
    ("name", "is_rounded"),
    [
        ("edge_encoder.mlp.linears.1.weight", True),
        ("edge_stages.0.mlp.linears.1.weight", True),
        ("head.mlp.linears.1.weight", True),
        ("head.mlp.linears.2.weight", False),
        ("edge_stages.0.mlp.linears.0.weight", False),  # of node states; only what it takes from edges is rounded
        ("edge_encoder.mlp.linears.0.weight", False),
        ("node_stages.0.mlp.linears.1.weight", False),
    ],
)
def test_products_of_edge_states_alone_are_in_bf16(event, name, is_rounded):
    ((exact, next_to_it),) = run_ranks(_logits_with_weights_between, 1, event, name)
    assert torch.equal(exact, next_to_it) == is_rounded


def test_nodes_and_sums_stay_in_float32(event):
    kinds = {NodeStage: set(), EdgeStage: set()}

    def note(stage, given, made):
        kinds[type(stage)].add(tuple(table.dtype for table in (made if isinstance(made, tuple) else (made,))))

    def forward(world):
        part = event.part(world.transport, event.grouping("ranges", world.size))
        model = networks.network(event, order="node-first", graph_iters=2, **BF16)
        for stage in (model.node_encoder, *model.node_stages, model.edge_encoder, *model.edge_stages):
            stage.register_forward_hook(note)
        model(part.graph, part.halo)

    run_ranks(forward, 1)
    assert kinds == {NodeStage: {(torch.float32,)}, EdgeStage: {(torch.bfloat16, torch.float32)}}


def test_sums_are_of_the_states_as_they_are_kept(event):
    """Of rounded ones: so a user who adds them up finds the same."""

    def one_stage(world):
        part = event.part(world.transport, event.grouping("ranges", world.size))
        stage = EdgeStage(an_mlp(12, (16, 16), torch.Generator().manual_seed(0)), torch.bfloat16)
        spread = part.halo.spread(part.graph.features[: part.graph.num_owned])
        edges, sums = stage(spread, part.graph.edge_features, part.graph)
        zeros = torch.zeros(part.graph.num_owned, 16, dtype=torch.float64)
        expected = [zeros.index_add(0, ends, edges.double()) for ends in (part.graph.dst, part.graph.src)]
        return sums.double(), torch.cat(expected, dim=1)

    ((sums, expected),) = run_ranks(one_stage, 1)
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "products"),
    [
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
    ],
)
def test_types_that_do_not_go_together_are_refused_before_a_kernel_meets_them(dtype, products):
    with pytest.raises(ValueError, match=f"products in {products} do not go with parameters in {dtype}"):
        InteractionNetwork(3, dtype=dtype, products=products)


def test_products_in_the_type_of_the_parameters_are_those_of_no_type(event):
    plain = networks.on_ranks(event, 2, dtype=torch.float64)
    assert networks.on_ranks(event, 2, dtype=torch.float64, products=torch.float64).sha == plain.sha
