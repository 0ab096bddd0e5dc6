"""The GPU engine is its formulas too: on CPU tensors against plain torch, and on a GPU, where there is one."""

import networks
import numpy as np
import pytest
import torch
from marks import needs_gpu
from random_events import random_event
from tiled import TiledEvent, sha

from domainpar.nn import batchwise, stages
from domainpar.nn.gradients import GradientSink
from domainpar.parallel.local import EdgeTile
from domainpar.testing import run_ranks

NUM_NODES, NUM_TILES = 70, 9
KEY = 77


def tiled_event(num_edges=400, num_edge_features=6):
    """An event with self-loops, duplicate edges, isolated nodes and three tiles without any node."""
    graph = random_event(2, NUM_NODES, num_edges, num_edge_features=num_edge_features, reach=4)
    tiles = np.sort(np.random.default_rng(2).choice([0, 1, 3, 4, 6, 8], NUM_NODES))
    return TiledEvent.of(graph, tiles, NUM_TILES, tiny=num_edges <= 1)


@pytest.fixture
def in_batches(monkeypatch):
    """Compute in batches although nothing lies on a GPU."""
    monkeypatch.setattr(stages, "TILES", stages.BATCHES)


def on_ranks(event, num_ranks, **how):
    """Of a cut edge, the two copies agree to rounding only: batches are not padded."""
    return networks.on_ranks(event, num_ranks, copies_agree=False, **how)


@pytest.mark.parametrize("grouping", ["random", "one part"])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_both_networks_are_their_formulas_with_all_gradients(in_batches, order, dropout, num_ranks, grouping):
    """`one part` leaves nothing to the other two ranks."""
    event, flags = tiled_event(), {"order": order, "graph_iters": 3, "dropout": dropout}
    expected = networks.by_formula(event, KEY, **flags)
    found = on_ranks(event, num_ranks, grouping=grouping, key=KEY, **flags)
    assert networks.distance(found, expected) <= 1e-12


@pytest.mark.parametrize(
    ("shape", "flags"),
    [
        ({"num_edge_features": 0}, {}),
        ({"num_edges": 0}, {}),
        ({"num_edges": 1, "num_edge_features": 1}, {}),
        ({}, {"layers": 1}),
        ({}, {"layers": 3}),
        ({}, {"shared_weights": True}),
        ({}, {"recompute_every": 1}),
    ],
    ids=["no edge features", "no edges", "one edge", "one layer", "three layers", "shared weights", "recomputed"],
)
@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_networks_of_other_shapes_and_events_with_little_in_them(in_batches, order, shape, flags):
    event, flags = tiled_event(**shape), {"order": order, "graph_iters": 2, **flags}
    assert networks.distance(on_ranks(event, 3, **flags), networks.by_formula(event, **flags)) <= 1e-12


def _batches(world, event):
    """How many batches of edges: owned and foreign ones."""
    part = event.part(world.transport, event.grouping("ranges", world.size))
    owned = [owned for _, owned in batchwise._runs(part.graph.tiles.edges)]
    return owned.count(True), owned.count(False)


@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_many_batches_and_batches_of_foreign_edges_give_the_same(in_batches, monkeypatch, order):
    event, flags = tiled_event(), {"order": order, "graph_iters": 2, "dropout": 0.3}
    monkeypatch.setattr(batchwise, "BATCH_ROWS", 7)
    counted = run_ranks(_batches, 3, event)
    assert all(min(counts) > 1 for counts in counted)
    found = on_ranks(event, 3, grouping="ranges", key=KEY, **flags)
    assert networks.distance(found, networks.by_formula(event, KEY, **flags)) <= 1e-12


def test_a_batch_does_not_reach_from_owned_into_foreign_edges_nor_over_a_gap():
    def tile(start, stop, owned):
        return EdgeTile(0, owned, slice(start, stop), slice(0, 0), slice(0, 0), has_ghosts=False)

    tiles = [tile(0, 5, True), tile(5, 7, True), tile(7, 9, False), tile(9, 12, False), tile(20, 21, False)]
    assert list(batchwise._runs(tiles)) == [(slice(0, 7), True), (slice(7, 12), False), (slice(20, 21), False)]
    assert list(batchwise._runs([])) == []


def _with_frozen(world, event, frozen):
    part = event.part(world.transport, event.grouping("ranges", world.size), torch.float64)
    model = networks.network(event, graph_iters=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(frozen)
    sink = GradientSink(model)
    model(part.graph, part.halo).backward(networks.upstream(event)[torch.from_numpy(part.graph.plan.edge_ids)])
    sink.reduce(world.transport)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("frozen", ["edge_encoder", "head.mlp.linears.0.weight", "node_stages.0.mlp.norms"])
def test_what_is_frozen_gets_no_gradient_and_all_else_has_its_own(in_batches, frozen):
    event = tiled_event()
    expected = networks.by_formula(event, graph_iters=2).gradients
    for found in run_ranks(_with_frozen, 2, event, frozen):
        for name, gradient in found.items():
            if name.startswith(frozen):
                assert gradient is None, name
            else:
                torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_at_a_node_runs_over_its_edges_in_global_order(dtype):
    event = tiled_event()
    for part, sums, rows, graph in run_ranks(_sums, 2, event, dtype):
        expected = torch.zeros(graph.num_owned, 2 * rows.shape[1], dtype=dtype)
        for edge in range(graph.num_edges):
            for half, node in enumerate((graph.dst[edge], graph.src[edge])):
                if node < graph.num_owned:
                    expected[node].view(2, -1)[half] += rows[edge]
        assert sha(sums) == sha(expected), f"rank {part}"


def _sums(world, event, dtype):
    graph = event.part(world.transport, event.grouping("random", world.size, seed=1), dtype).graph
    rows = torch.randn(graph.num_edges, 48, dtype=dtype, generator=torch.Generator().manual_seed(world.rank))
    return world.rank, batchwise._sums_at_ends(rows, rows, graph), rows, graph


@pytest.mark.parametrize("products", [None, torch.bfloat16], ids=["float32", "bf16"])
def test_twice_the_same_gives_the_same_bits(in_batches, products):
    answers = [on_ranks(tiled_event(), 2, dtype=torch.float32, products=products, graph_iters=2) for _ in range(2)]
    assert answers[0].sha == answers[1].sha


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_in_bf16_batches_and_tiles_are_close(monkeypatch, order, num_ranks):
    """Both round operands of products alike, and sum these in float32."""
    event = tiled_event()
    flags = {"dtype": torch.float32, "products": torch.bfloat16, "order": order, "graph_iters": 2}
    in_tiles = networks.on_ranks(event, num_ranks, **flags)
    monkeypatch.setattr(stages, "TILES", stages.BATCHES)
    found = on_ranks(event, num_ranks, **flags)
    assert networks.distance_of_logits(found, in_tiles) <= 0.01  # some states are rounded to the neighbour
    assert networks.distance_of_gradients(found, in_tiles) <= 0.002
    assert found.sha != in_tiles.sha, "the same engine twice"


def test_nothing_is_kept_of_the_encoder_of_ghosts(in_batches):
    """Their owners make its gradient."""

    def encoded(world):
        event = tiled_event()
        part = event.part(world.transport, event.grouping("ranges", world.size))
        features = part.graph.features[part.graph.num_owned :]
        return networks.network(event, torch.float32).node_encoder.of_ghosts([features], part.graph)

    made = run_ranks(encoded, 2)
    assert all(len(states) and states.grad_fn is None and not states.requires_grad for states in made)


def test_states_of_edges_are_kept_in_bf16_and_logits_are_not(in_batches):
    kinds = []

    def forward(world):
        event = tiled_event()
        part = event.part(world.transport, event.grouping("ranges", world.size))
        model = networks.network(event, torch.float32, products=torch.bfloat16, graph_iters=2)
        for stage in (model.edge_encoder, *model.edge_stages, model.head):
            stage.register_forward_hook(lambda stage, given, made: kinds.append([table.dtype for table in made]))
        model(part.graph, part.halo)

    run_ranks(forward, 1)
    *grad_states, grad_logits = kinds
    assert grad_states == [[torch.bfloat16, torch.float32]] * 3
    assert grad_logits[0] == torch.float32


ON_GPU = {
    "float64": (1e-12, {}),
    "float32": (1e-5, {"dtype": torch.float32}),
    "with dropout": (1e-12, {"dropout": 0.3, "key": KEY}),
    "recomputed": (1e-12, {"recompute_every": 1}),
}


@needs_gpu
@pytest.mark.parametrize(("bound", "how"), ON_GPU.values(), ids=ON_GPU)
@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_a_gpu_gives_what_a_cpu_gives(order, bound, how):
    event, how = tiled_event(), {"order": order, "graph_iters": 3, **how}
    on_cpu = networks.on_ranks(event, 1, **how)
    assert networks.distance(on_ranks(event, 1, device="cuda", **how), on_cpu) <= bound


@needs_gpu
def test_a_gpu_gives_the_same_bits_twice_and_bf16_is_close_to_that_of_a_cpu():
    event, how = tiled_event(), {"dtype": torch.float32, "products": torch.bfloat16, "graph_iters": 2}
    once, again = (on_ranks(event, 1, device="cuda", **how) for _ in range(2))
    assert once.sha == again.sha
    on_cpu = networks.on_ranks(event, 1, **how)
    assert networks.distance_of_logits(once, on_cpu) <= 0.01  # as above
    assert networks.distance_of_gradients(once, on_cpu) <= 0.002


def many_on_gpu(world, event, cases):
    """Several networks in one launch of processes that share the card."""
    return [networks.forward_and_back(world, event, device="cuda", **how) for how in cases]


@needs_gpu
def test_two_ranks_that_share_the_card_give_what_one_cpu_gives():
    event = tiled_event()
    cases = [{"order": order, "graph_iters": 2, **how} for order in ("edge-first", "node-first")
             for _, how in ON_GPU.values()]  # fmt: skip
    found = run_ranks(many_on_gpu, 2, event, cases, transport="gloo", timeout=300)
    bounds = [bound for bound, _ in ON_GPU.values()] * 2
    for number, (how, bound) in enumerate(zip(cases, bounds, strict=True)):
        answer = networks.whole(event, [ranks[number] for ranks in found], copies_agree=False)
        assert networks.distance(answer, networks.on_ranks(event, 1, **how)) <= bound, how
