"""`acorn` on stages: its definition with all gradients, one hash on all ranks, old checkpoints."""

import copy

import networks
import numpy as np
import pytest
import torch
from random_events import random_event
from tiled import TiledEvent

from domainpar.nn import stages
from domainpar.nn.interaction import InteractionsOnStages
from domainpar.nn.options import NetworkOptions
from domainpar.nn.published import InteractionGNN
from domainpar.testing import run_ranks
from domainpar.tracking.config import BITWISE, MODELS
from domainpar.tracking.networks.catalogue import build_model
from domainpar.tracking.networks.on_events import OnEvents

SHAPES = {"": {}, "no edges": {"num_edges": 0}, "one edge": {"num_edges": 1}}


@pytest.mark.parametrize("grouping", ["random", "one part"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_its_definition_with_all_gradients(shape, grouping):
    event = networks.tiled_event(**shape)
    found = networks.on_ranks(event, 3, grouping=grouping, published=True)
    assert networks.distance(found, networks.by_formula(event, published=True)) < 1e-10


def test_all_ranks_groupings_and_ways_to_keep_layers_have_one_hash(monkeypatch):
    event = TiledEvent.of(random_event(3, 200, 1500, reach=2), np.arange(200) * 8 // 200, 8)
    how = {"dtype": torch.float32, "published": True}
    hashes = {networks.on_ranks(event, ranks, **how).sha for ranks in (1, 2, 3)}
    hashes |= {networks.on_ranks(event, 2, grouping="ranges", **how).sha}
    monkeypatch.setattr(stages, "MOST_BYTES_OF_LAYERS", 0)
    hashes |= {networks.on_ranks(event, 2, **how).sha}
    assert len(hashes) == 1


def _promise(world):
    model = InteractionsOnStages(InteractionGNN(3, 2, hidden=16, graph_iters=2))
    return model.exactness(world.transport)


def test_it_promises_the_same_bits_and_the_self_test_tries_its_perceptrons(monkeypatch):
    (exactness,) = networks.run_ranks(_promise, 1)
    assert exactness == (True, None)
    monkeypatch.setattr("domainpar.nn.selftest._compare_subsets", lambda trial, whole: f"tried {trial.about}")
    (exactness,) = networks.run_ranks(_promise, 1)
    assert exactness.problem.startswith("tried")


def test_checkpoints_are_those_of_the_plain_network():
    module = InteractionGNN(3, 2, hidden=16, graph_iters=2, seed=1)
    model = InteractionsOnStages(InteractionGNN(3, 2, hidden=16, graph_iters=2))
    before = OnEvents(module).state_dict()
    assert model.state_dict().keys() == before.keys()
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in OnEvents(module).named_parameters()]
    model.load_state_dict(before, assign=True)
    in_stages = {id(parameter) for parameter in copy.deepcopy(model).to(torch.float64).layers.parameters()}
    assert len(in_stages) == len(before)
    assert {id(parameter) for parameter in model.layers.parameters()} == {id(it) for it in model.module.parameters()}


def test_a_width_that_would_need_padding_is_refused():
    with pytest.raises(ValueError, match="width 20 .*16; take 32"):
        InteractionsOnStages(InteractionGNN(3, 2, hidden=20, graph_iters=2))


def _second_gradients(world, event, name, of):
    """What asking for the gradient of a gradient ends in: the refusal."""
    part = event.part(world.transport, event.grouping("random", world.size, seed=1), torch.float64)
    model = build_model(name, 3, 6, NetworkOptions(hidden=16, graph_iters=2, dtype=torch.float64))
    model.sink = model.gradients()  # stages give it theirs
    features = part.graph.features.requires_grad_()
    inputs = [features] if of == "features" else [it for it in model.parameters() if it.requires_grad]

    def second():
        logits = model(part.graph, part.halo)
        slopes = torch.autograd.grad(logits.square().sum(), inputs, create_graph=True, allow_unused=of == "parameters")
        torch.autograd.grad(sum(it.square().sum() for it in slopes if it is not None), features)

    with pytest.raises(RuntimeError) as refused:
        second()
    return str(refused.value)


@pytest.mark.parametrize("of", ["features", "parameters"])
@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_of_a_gradient_is_refused_by_name(name, of):
    for said in run_ranks(_second_gradients, 2, networks.tiled_event(), name, of):
        if name in BITWISE:
            assert "create_graph=True" in said
            assert "plain torch" in said
        else:
            assert "differentiate twice" in said or "not have been used in the graph" in said
