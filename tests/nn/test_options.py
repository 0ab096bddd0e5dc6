"""Residuals, scaled sums and activations: the formula, and one hash on any number of ranks, alone and in pairs."""

import itertools

import networks
import numpy as np
import pytest
import torch
from marks import slow
from one_mlp import an_mlp
from random_events import random_event
from tiled import TiledEvent

from domainpar.nn.gradients import GradientSink
from domainpar.nn.stages import EdgeStage, NodeStage, run_chain

OPTIONS = {
    "residual": {"residual": True},
    "mean": {"aggregate": "mean"},
    "root": {"aggregate": "root"},
    "silu": {"activation": "silu"},
    "tanh": {"activation": "tanh"},
    "dropout": {"dropout": 0.2},
    "recompute": {"recompute_every": 1},
    "shared": {"shared_weights": True},
    "readouts": {"readouts": "all"},
}
PAIRS = [(one, other) for one, other in itertools.combinations(OPTIONS, 2) if not OPTIONS[one].keys() & OPTIONS[other]]
OPTIONS["no norm"] = {"norm": "none"}
PAIRS += [("no norm", other) for other in ("residual", "silu", "dropout")]
KEY = 7
IN_TRAINING = {"dropout", "readouts"}


def with_options(values):
    """Options, alone with each of two values and in pairs with one or the other: `names` and the value."""
    alone = [pytest.param((name,), value, id=f"{name}-{text}") for name in OPTIONS for text, value in values.items()]
    for number, pair in enumerate(PAIRS):
        for place, (text, value) in enumerate(values.items()):
            as_case = pytest.param if number % 2 == place else slow
            alone.append(as_case(pair, value, id=f"{'-'.join(pair)}-{text}"))
    return alone


@pytest.fixture(scope="module")
def event():
    return TiledEvent.of(random_event(3, 90, 500, reach=2), np.arange(90) * 8 // 90, 8)


@pytest.mark.parametrize(("names", "order"), with_options({order: order for order in ("edge-first", "node-first")}))
def test_options_are_their_formulas_with_all_gradients(event, names, order):
    flags = {"order": order, "graph_iters": 2}
    for name in names:
        flags |= OPTIONS[name]
    key = KEY if IN_TRAINING & set(names) else None
    expected = networks.by_formula(event, key, **flags)
    found = networks.on_ranks(event, 2, key=key, **flags)
    assert networks.distance(found, expected) < 1e-10


@pytest.mark.parametrize(
    ("names", "kind"), with_options({"float32": {}, "bfloat16 edges": {"products": torch.bfloat16}})
)
def test_with_any_options_all_ranks_have_one_hash(event, names, kind):
    flags = {"graph_iters": 2, "order": "node-first" if len(names) == 1 else "edge-first", **kind}
    for name in names:
        flags |= OPTIONS[name]
    key = KEY if IN_TRAINING & set(names) else None
    found = {networks.on_ranks(event, ranks, dtype=torch.float32, key=key, **flags).sha for ranks in (1, 3)}
    assert len(found) == 1


def _stage(columns, widths=(16, 16), plain=False, **options):
    return EdgeStage(an_mlp(columns, widths, torch.Generator().manual_seed(0), plain), **options)


def test_a_residual_needs_states_of_its_width(event):
    part = event.part
    stage = _stage(6 + 6, residual=True)

    node = NodeStage(an_mlp(3, (16,), torch.Generator().manual_seed(0)), residual=True)

    def of_edges(world):
        graph = part(world.transport, event.grouping("ranges", 1)).graph
        return stage(None, torch.zeros(graph.num_edges, 12), graph, sums=False)

    def of_nodes(world):
        return node([torch.zeros(4, 3)], part(world.transport, event.grouping("ranges", 1)).graph)

    with pytest.raises(ValueError, match="residual adds 16 columns to states of 12,"):
        networks.run_ranks(of_edges, 1)
    with pytest.raises(ValueError, match="a residual adds 16 columns to states of 3"):
        networks.run_ranks(of_nodes, 1)


def test_only_the_last_of_several_stages_reads_out(event):
    def forward(world):
        graph = event.part(world.transport, event.grouping("ranges", 1)).graph
        stages = [_stage(16, (16, 16), plain=True), _stage(16)]
        run_chain(stages, None, torch.zeros(graph.num_edges, 16), graph, sums=False, keys=[None, None])

    with pytest.raises(ValueError, match="only the last of several stages may be a readout"):
        networks.run_ranks(forward, 1)


def test_stages_that_are_watched_run_one_by_one_with_the_same_results(event):
    flags = {"graph_iters": 3, "residual": True, "aggregate": "root"}  # the second one is a pass of its own anyway
    plain = networks.on_ranks(event, 1, **flags)
    seen = []

    def forward(world):
        part = event.part(world.transport, event.grouping("random", 1, seed=1), torch.float64)
        model = networks.network(event, torch.float64, **flags)
        sink = GradientSink(model)
        for name, module in model.named_modules():
            if isinstance(module, EdgeStage):
                module.register_forward_hook(lambda module, given, made, name=name: seen.append(name))
        logits = model(part.graph, part.halo)
        logits.backward(networks.upstream(event)[torch.from_numpy(part.graph.plan.edge_ids)])
        sink.reduce(world.transport)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return part.graph.plan.edge_ids, part.graph.plan.edge_owned, logits.detach().numpy(), gradients

    watched = networks.whole(event, networks.run_ranks(forward, 1))
    assert seen == ["edge_encoder", "edge_stages.0", "edge_stages.1", "edge_stages.2", "head"]
    assert networks.distance(watched, plain) < 1e-12


def _logits(world, event, grad, flags):
    part = event.part(world.transport, event.grouping("ranges", world.size), torch.float32)
    model = networks.network(event, torch.float32, **flags)
    before = part.graph.edge_features.clone()
    with torch.set_grad_enabled(grad):
        logits = model(part.graph, part.halo).detach()
    assert torch.equal(part.graph.edge_features, before), "features were overwritten"
    owned = part.graph.plan.edge_owned
    return part.graph.plan.edge_ids[owned], logits.numpy()[owned]


@pytest.mark.parametrize("order", ["edge-first", "node-first"])
@pytest.mark.parametrize("flags", [{}, {"residual": False}, {"products": torch.bfloat16}], ids=str)
def test_inference_writes_states_over_those_before_with_the_same_bits(event, order, flags):
    answers = set()
    for grad, ranks in itertools.product((True, False), (1, 2)):
        whole = np.zeros(event.graph.num_edges, np.float32)
        for ids, logits in networks.run_ranks(_logits, ranks, event, grad, {"order": order, "graph_iters": 3, **flags}):
            whole[ids] = logits
        answers.add(whole.tobytes())
    assert len(answers) == 1
