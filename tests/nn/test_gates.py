"""Sums of messages that the sigmoid of each edge's score weighs: the formula, and one hash on any number of ranks."""

import dense
import networks
import numpy as np
import pytest
import torch
from marks import slow
from one_mlp import an_mlp
from random_events import random_event
from tiled import TiledEvent
from torch import nn

from domainpar.nn import stages, tilewise
from domainpar.nn.gradients import GradientSink
from domainpar.nn.noise import key_of
from domainpar.nn.program import set_threads
from domainpar.nn.stages import EdgeStage, NodeStage, run_chain
from domainpar.testing import run_ranks

WIDTH, ITERATIONS, KEY = 16, 2, 7
KINDS = {
    # what goes along edges, and what the score is made of
    "states, by a score of them": ("edges", "states"),
    "states, by a score of them and both ends": ("edges", "all"),
    "features, by a score of them": ("edges", "features"),
    "nodes, by a score of both ends": ("nodes", "ends"),
    "nodes, by a score of states": ("nodes", "states"),
    "nodes, by a score of states and both ends": ("nodes", "all"),
    "nodes, by a score of features": ("nodes", "features"),
}
EACH = pytest.mark.parametrize("kind", KINDS)


class Gated(nn.Module):
    """Iterates over sums of gated messages; every result of every pass is in what it returns."""

    def __init__(self, kind, products=None, aggregate="root", dropout=0.0, keeps_layers=True):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        gates, self.reads = KINDS[kind]
        columns = {"states": WIDTH, "all": 3 * WIDTH, "ends": 2 * WIDTH, "features": WIDTH}[self.reads]
        has_states = self.reads in ("states", "all")
        self.encode = NodeStage(an_mlp(3, (WIDTH,), generator))
        self.edge = (
            EdgeStage(an_mlp(3 * WIDTH, (32, WIDTH), generator, dropout=dropout), products) if has_states else None
        )
        mlp = an_mlp(columns, (32, 1), generator, readout=True, dropout=dropout)
        self.score = EdgeStage(mlp, products, aggregate=aggregate, gates=gates)
        self.update = NodeStage(an_mlp(3 * WIDTH, (32, WIDTH), generator, last_activation="tanh"), residual=True)
        self.head = EdgeStage(an_mlp(2 * WIDTH, (32, 1), generator, readout=True))
        self.stages = [stage for stage in (self.edge, self.score) if stage is not None]
        for stage in (*self.stages, self.encode, self.update):
            stage.keeps_layers = keeps_layers

    def forward(self, features, edges, graph, halo, key):
        x = self.encode([features], graph)
        edges, out = None if self.reads == "ends" else edges, 0
        for k in range(ITERATIONS + 1):
            keys = [None if key is None else key_of(key, name, k) for name in ("edge", "score")][-len(self.stages) :]
            sums = k < ITERATIONS
            results = run_chain(self.stages, halo.spread(x), edges, graph, sums=sums, keys=keys)
            x = self.update([x, results.sums], graph) if sums else x
            out = out + results.readout[:, 0]
            out = out if results.edges is None else out + results.edges.to(out.dtype).sum(dim=1)
        return out + self.head(halo.spread(x), None, graph, sums=False)[0][:, 0]

    def by_formula(self, features, edges, src, dst, key):
        x, out = dense.mlp(self.encode.mlp, features), 0
        for k in range(ITERATIONS + 1):
            keys = [None if key is None else key_of(key, name, k) for name in ("edge", "score")]
            ends = [x[src], x[dst]]
            e = edges if self.edge is None else dense.mlp(self.edge.mlp, torch.cat([*ends, edges], dim=1), keys[0])
            read = {"states": [e], "features": [e], "all": [*ends, e], "ends": ends}[self.reads]
            score = dense.mlp(self.score.mlp, torch.cat(read, dim=1), keys[1])
            out = out + score[:, 0] + (0 if self.edge is None else e.sum(dim=1))
            a, sums = 1 / (1 + torch.exp(-score)), []
            for here, there in ((dst, src), (src, dst)):
                degree = torch.bincount(here, minlength=len(x)).clamp(min=1).to(x.dtype)[:, None]
                scale = {"sum": 1, "mean": 1 / degree, "root": 1 / degree.sqrt()}[self.score.aggregate]
                messages = a * (e if self.score.gates == "edges" else x[there])
                sums.append(torch.zeros_like(x).index_add(0, here, messages) * scale)
            x = x + dense.mlp(self.update.mlp, torch.cat([x, *sums], dim=1)) if k < ITERATIONS else x
        return out + dense.mlp(self.head.mlp, torch.cat([x[src], x[dst]], dim=1))[:, 0]


@pytest.fixture(scope="module")
def event():
    graph = random_event(2, 70, 400, num_edge_features=WIDTH, reach=2)
    tiles = np.sort(np.random.default_rng(2).choice([0, 1, 3, 4, 6, 8], 70))  # three of nine without any node
    return TiledEvent.of(graph, tiles, 9)


@pytest.fixture
def in_batches(monkeypatch):
    """Compute in batches although nothing lies on a GPU."""
    monkeypatch.setattr(stages, "TILES", stages.BATCHES)


def _forward_and_back(world, event, kind, dtype, key, watched, threads, how):
    set_threads(threads)
    part = event.part(world.transport, event.grouping("random", world.size, seed=world.size), dtype)
    graph, plan = part.graph, part.graph.plan
    model = Gated(kind, **how).to(dtype)
    sink = GradientSink(model)
    if watched:
        for stage in model.stages:
            stage.register_forward_hook(lambda stage, given, made: None)
    features = graph.features[: graph.num_owned].detach().requires_grad_()
    edges = graph.edge_features.detach().to(how.get("products") or dtype).requires_grad_()
    out = model(features, edges, graph, part.halo, key)
    out.backward(networks.upstream(event, dtype)[torch.from_numpy(plan.edge_ids)])
    assert sink.reduce(world.transport) == 0
    set_threads(1)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return plan.edge_ids, plan.edge_owned, out.detach().numpy(), gradients, (plan.owned_ids, features.grad, edges.grad)


def on_ranks(event, num_ranks, kind, dtype=torch.float64, key=None, watched=False, threads=1, batches=False, **how):
    found = run_ranks(_forward_and_back, num_ranks, event, kind, dtype, key, watched, threads, how)
    answer = networks.whole(event, [each[:4] for each in found], copies_agree=not batches)
    grad_nodes, grad_edges = np.zeros((70, 3)), np.zeros((event.graph.num_edges, WIDTH))
    for ids, owned, _, _, (node_ids, of_features, of_edge_features) in found:
        grad_nodes[node_ids] = of_features
        if of_edge_features is not None:
            grad_edges[ids[owned]] = of_edge_features.double()[torch.from_numpy(owned)]
    of_inputs = {"features": torch.from_numpy(grad_nodes), "edge features": torch.from_numpy(grad_edges)}
    return networks.Answer(answer.logits, answer.gradients | of_inputs)


def by_formula(event, kind, key=None, **how):
    model = Gated(kind, **how).double()
    features, edges, src, dst = networks.tables(event)
    out = model.by_formula(features.requires_grad_(), edges.requires_grad_(), src, dst, key)
    out.backward(networks.upstream(event))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    grad_edges = torch.zeros_like(edges) if edges.grad is None else edges.grad
    return networks.Answer(out.detach(), gradients | {"features": features.grad, "edge features": grad_edges})


@pytest.mark.parametrize("how", [{}, {"aggregate": "mean"}, {"aggregate": "sum", "dropout": 0.3, "key": KEY}], ids=str)
@EACH
def test_gated_sums_are_their_formula_with_all_gradients(event, kind, how):
    assert networks.distance(on_ranks(event, 3, kind, **how), by_formula(event, kind, **how)) < 1e-10


@EACH
def test_gated_sums_in_batches_are_their_formula_with_all_gradients(in_batches, event, kind):
    how = {"dropout": 0.3, "key": KEY}
    found = on_ranks(event, 3, kind, batches=True, **how)
    assert networks.distance(found, by_formula(event, kind, **how)) < 1e-10


@pytest.mark.parametrize(
    ("kind", "products"),
    [
        (pytest.param if number % 2 == place else slow)(kind, products, id=f"{kind}-{name}")
        for number, kind in enumerate(KINDS)
        for place, (name, products) in enumerate({"float32": None, "bfloat16 edges": torch.bfloat16}.items())
    ],
)
def test_gated_sums_have_one_hash_on_all_ranks_whether_layers_are_kept_or_not(event, kind, products):
    how = {"dtype": torch.float32, "products": products, "dropout": 0.2, "key": KEY}
    found = [on_ranks(event, ranks, kind, keeps_layers=ranks != 3, threads=ranks % 2 + 1, **how) for ranks in (1, 2, 3)]
    assert len({answer.sha for answer in found}) == 1
    expected = by_formula(event, kind, dropout=0.2, key=KEY)
    bound = 1e-4 if products is None else 0.05
    assert networks.distance_of_logits(found[0], expected) < bound
    assert networks.distance_of_gradients(found[0], expected) < bound


@EACH
def test_gates_that_are_watched_run_one_by_one_with_the_same_results(event, kind):
    assert networks.distance(on_ranks(event, 2, kind, watched=True), by_formula(event, kind)) < 1e-10


def test_without_the_spread_of_the_gradient_ghosts_would_send_nothing_back(event, monkeypatch):
    """The gradient of node states is local sums: it needs that of the sums at the other ends, also at ghosts."""

    def forgets_ghosts(call, kept, given, needed, plain=tilewise.EdgeTiles.backward):
        given.sums.finish().zero_()
        return plain(call, kept, given, needed)

    kind = "nodes, by a score of features"
    expected = by_formula(event, kind)
    assert networks.distance(on_ranks(event, 2, kind), expected) < 1e-10
    monkeypatch.setattr(tilewise.EdgeTiles, "backward", _unless_without_sums(forgets_ghosts))
    monkeypatch.setattr(networks, "sha", lambda *tensors: "")
    assert networks.distance(on_ranks(event, 2, kind, batches=True), expected) > 1e-3


def _unless_without_sums(changed, plain=tilewise.EdgeTiles.backward):
    def backward(call, kept, given, needed):
        return (plain if given.sums is None else changed)(call, kept, given, needed)

    return backward


def test_a_gate_is_a_readout_of_one_column():
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="a gate is a readout of 1 column, but this MLP makes 16 of states"):
        EdgeStage(an_mlp(16, (16,), generator), gates="edges")
    with pytest.raises(ValueError, match="this MLP makes 2; give it"):
        EdgeStage(an_mlp(16, (16, 2), generator, readout=True), gates="nodes")


@pytest.mark.parametrize(("gates", "columns"), [("nodes", 3), ("edges", 12)])
def test_messages_of_odd_widths_are_refused(event, gates, columns):
    def forward(world):
        part = event.part(world.transport, event.grouping("ranges", 1))
        edges = torch.zeros(part.graph.num_edges, 12)
        stage = EdgeStage(an_mlp(12, (16, 1), torch.Generator().manual_seed(0), readout=True), gates=gates)
        return stage(part.halo.spread(part.graph.features), edges, part.graph)

    with pytest.raises(ValueError, match=f"messages of {columns} columns are not summed; take states of a multiple"):
        run_ranks(forward, 1)
