"""Published networks on stages: their definitions with all gradients, one hash on all ranks, old checkpoints."""

import copy
from types import SimpleNamespace

import networks
import numpy as np
import pytest
import torch
from one_mlp import an_mlp
from random_events import random_event
from tiled import TiledEvent

from domainpar.nn import on_stages, stages
from domainpar.nn.on_stages import PUBLISHED_ON_STAGES
from domainpar.nn.options import NetworkOptions
from domainpar.nn.published import OF_THE_FIELD
from domainpar.nn.stages import EdgeStage, run_chain
from domainpar.testing import run_ranks
from domainpar.tracking.config import BITWISE, MODELS
from domainpar.tracking.networks.catalogue import build_model
from domainpar.tracking.networks.on_events import OnEvents

each = pytest.mark.parametrize("name", PUBLISHED_ON_STAGES)


def tiled_event(**shape):
    """An event with self-loops, duplicate edges, isolated nodes and three tiles without any node."""
    graph = random_event(2, 70, **{"num_edges": 400, "num_edge_features": 6, "reach": 2, **shape})
    tiles = np.sort(np.random.default_rng(2).choice([0, 1, 3, 4, 6, 8], 70))
    return TiledEvent.of(graph, tiles, 9, tiny=graph.num_edges <= 1)


SHAPES = {"": {}, "no edges": {"num_edges": 0}, "one edge": {"num_edges": 1}}


@each
@pytest.mark.parametrize("grouping", ["random", "one part"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_is_its_definition_with_all_gradients(name, shape, grouping):
    event = tiled_event(**shape)
    found = networks.on_ranks(event, 3, grouping=grouping, published=name)
    assert networks.distance(found, networks.by_formula(event, published=name)) < 1e-10


@each
def test_each_is_its_definition_in_batches_of_a_gpu(monkeypatch, name):
    monkeypatch.setattr(stages, "TILES", stages.BATCHES)
    event = tiled_event()
    found = networks.on_ranks(event, 3, copies_agree=False, published=name)
    assert networks.distance(found, networks.by_formula(event, published=name)) < 1e-10


@each
def test_all_ranks_groupings_and_ways_to_keep_layers_have_one_hash(monkeypatch, name):
    event = TiledEvent.of(random_event(3, 200, 1500, reach=2), np.arange(200) * 8 // 200, 8)
    how = {"dtype": torch.float32, "published": name}
    hashes = {networks.on_ranks(event, ranks, **how).sha for ranks in (1, 2, 3)}
    hashes |= {networks.on_ranks(event, 2, grouping="ranges", **how).sha}
    monkeypatch.setattr(stages, "MOST_BYTES_OF_LAYERS", 0)
    hashes |= {networks.on_ranks(event, 2, **how).sha}
    assert len(hashes) == 1


def _promise(world, name):
    model = PUBLISHED_ON_STAGES[name](OF_THE_FIELD[name](3, 2, hidden=16, graph_iters=2))
    return model.exactness(world.transport)


@each
def test_each_promises_the_same_bits_and_the_self_test_tries_its_perceptrons(monkeypatch, name):
    (exactness,) = networks.run_ranks(_promise, 1, name)
    assert exactness == (True, None)
    monkeypatch.setattr("domainpar.nn.selftest._compare_subsets", lambda trial, whole: f"tried {trial.about}")
    (exactness,) = networks.run_ranks(_promise, 1, name)
    assert exactness.problem.startswith("tried")


def _promise_on_gpus(world, why):
    model = PUBLISHED_ON_STAGES["agnn"](OF_THE_FIELD["agnn"](3, 2, hidden=16, graph_iters=2))
    model.parameters = lambda: iter([SimpleNamespace(is_cuda=True)])
    model._why_in_torch = lambda: why.get(world.rank)
    return model.exactness(world.transport)


@pytest.mark.parametrize(
    ("why", "problem"),
    [
        ({}, None),
        ({1: "triton does not start here"}, "triton does not start here (rank 1 alone)"),
        ({0: "torch was asked for", 1: "torch was asked for"}, "torch was asked for"),
    ],
)
def test_one_rank_without_the_gpus_kernels_is_told_by_all(monkeypatch, why, problem):
    monkeypatch.setattr(on_stages, "rows_are_independent", lambda model, transport: transport.barrier())
    assert networks.run_ranks(_promise_on_gpus, 2, why) == [(problem is None, problem)] * 2


@each
def test_checkpoints_are_those_of_the_network_run_by_adapt(name):
    module = OF_THE_FIELD[name](3, 2, hidden=16, graph_iters=2, seed=1)
    model = PUBLISHED_ON_STAGES[name](OF_THE_FIELD[name](3, 2, hidden=16, graph_iters=2))
    before = OnEvents(module).state_dict()
    assert model.state_dict().keys() == before.keys()
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in OnEvents(module).named_parameters()]
    model.load_state_dict(before, assign=True)
    in_stages = {id(parameter) for parameter in copy.deepcopy(model).to(torch.float64).layers.parameters()}
    assert len(in_stages) == len(before)
    assert {id(parameter) for parameter in model.layers.parameters()} == {id(it) for it in model.module.parameters()}


@each
def test_a_width_that_would_need_padding_is_refused(name):
    with pytest.raises(ValueError, match="width 20 is not a multiple of 16; take 32"):
        PUBLISHED_ON_STAGES[name](OF_THE_FIELD[name](3, 2, hidden=20, graph_iters=2))


REFUSED = {
    "residual": ({"residual": True}, {}, "residual"),
    "products": ({"products": torch.bfloat16}, {}, "products"),
    "dropout": ({}, {"dropout": 0.1}, "dropout"),
    "readout": ({}, {"readout": True}, "a readout"),
}


@pytest.mark.parametrize(("options", "of_mlp", "message"), REFUSED.values(), ids=REFUSED)
def test_a_stage_both_ways_refuses_what_it_cannot_do(options, of_mlp, message):
    mlp = an_mlp(32, (16, 16), torch.Generator(), **of_mlp)
    with pytest.raises(ValueError, match=f"a stage both ways cannot have {message}; leave"):
        EdgeStage(mlp, both_ways=True, **options)


@pytest.mark.parametrize("how", [{"sums": False, "keeps": False}, {"sums": True, "keeps": True}], ids=str)
def test_a_stage_both_ways_makes_sums_and_no_states(how):
    event = tiled_event()

    def forward(world):
        part = event.part(world.transport, event.grouping("ranges", 1))
        nodes = part.halo.spread(torch.zeros(part.graph.num_owned, 16, dtype=part.graph.features.dtype))
        stage = EdgeStage(an_mlp(32, (16,), torch.Generator()), both_ways=True).to(nodes.owned.dtype)
        run_chain([stage], nodes, None, part.graph, keys=[None], **how)

    with pytest.raises(
        ValueError, match="a stage both ways makes sums of node states and no edge states: call it alone"
    ):
        networks.run_ranks(forward, 1)


def _second_gradients(world, event, name, of):
    """What asking for the gradient of a gradient ends in: the refusal, or that gradient and torch's own."""
    part = event.part(world.transport, event.grouping("random", world.size, seed=1), torch.float64)
    model = build_model(name, 3, 6, NetworkOptions(hidden=16, graph_iters=2, dtype=torch.float64))
    model.sink = model.gradients()  # stages give it theirs
    features = part.graph.features.requires_grad_()
    parameters = [it for it in model.parameters() if it.requires_grad]

    def second(logits):
        inputs = [features] if of == "features" else parameters
        slopes = torch.autograd.grad(logits.square().sum(), inputs, create_graph=True, allow_unused=of == "parameters")
        return torch.autograd.grad(sum(it.square().sum() for it in slopes if it is not None), features)[0]

    try:
        found = second(model(part.graph, part.halo))
    except RuntimeError as refused:
        return str(refused)
    return found, second(model.module(*_tables_of(part)))


def _tables_of(part):
    """The arguments of a plain module on one rank."""
    return part.graph.features, torch.stack([part.graph.src, part.graph.dst]), part.graph.edge_features


@pytest.mark.parametrize("of", ["features", "parameters"])
@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_of_a_gradient_is_that_of_torch_or_is_refused_by_name(name, of):
    if name in BITWISE:
        for said in run_ranks(_second_gradients, 2, tiled_event(), name, of):
            assert "create_graph=True" in said
            assert "a network built on stages has no form here; take one in plain torch" in said
    else:
        ((found, expected),) = run_ranks(_second_gradients, 1, tiled_event(), name, of)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
