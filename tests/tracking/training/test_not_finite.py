"""What is not finite stops all ranks alike, and names the layer, the rank and the event that it began in."""

import re

import own_models
import pytest
import torch
import watched
from marks import fault, slow
from torch import nn

from domainpar.nn.gradients import GradSink
from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.monitor.failure import StepFailed
from domainpar.tracking.training.monitor.non_finite import check_parameters, layers_watched
from domainpar.tracking.training.sampler import deal, samples_of

FIRST = "000000000"


def on_rank(rank, spoil):
    def on_one(trainer, world):
        if world.rank == rank:
            spoil(trainer)

    return on_one


def dealt(store, num_groups):
    """Names of the first two events as groups of ranks take them."""
    samples = samples_of(EventStore(store).events("train"), None)[:2]
    return [[sample.name for sample in of_group] for of_group in deal(samples, num_groups)]


LAYERS = ("node_encoder", "edge_encoder", "edge_stages.1", "node_stages.0", "head")
RECOMPUTED = {"recompute_every": 2, "graph_iters": 3, "dropout": 0.3}
BEGINNINGS = [
    *(pytest.param(layer, {}, id=layer) for layer in LAYERS),
    pytest.param("edge_stages.1", RECOMPUTED, id="edge_stages.1, recomputed"),
    *(slow(layer, RECOMPUTED, id=f"{layer}, recomputed") for layer in LAYERS if layer != "edge_stages.1"),
]


@fault(38)
@pytest.mark.parametrize(("layer", "flags"), BEGINNINGS)
def test_the_layer_that_began_it_is_named_with_rank_and_event(store, layer, flags):
    def spoil(trainer):
        watched.always_poisoned(trainer.model.get_submodule(layer))

    found = watched.steps(store, 3, on_rank(1, spoil), **flags)
    said = watched.spokesman(found, 1)
    assert said.what.endswith(f"is not finite: first in layer {layer} (forward) on rank 1")
    assert said.event == FIRST
    assert "smaller --lr" in said.hint
    assert all(one["unchanged"] for one in found)
    assert found[1]["phase"] == "forward"


def test_what_is_wrong_on_every_rank_is_said_without_a_rank(store):
    def spoil(trainer, world):
        with torch.no_grad():
            trainer.model.edge_stages[1].mlp.linears[0].weight[0, 0] = torch.inf

    found = watched.steps(store, 2, spoil)
    said = watched.spokesman(found, 0)
    assert said.what.endswith("first in parameter edge_stages.1.mlp.linears.0.weight")
    assert said.event is None


def test_a_shared_layer_is_named_with_its_call(store):
    def spoil(trainer):
        watched.poisoned(trainer.model.edge_stages[0], (2, 5))  # of three in each pass

    found = watched.steps(store, 2, on_rank(1, spoil), graph_iters=3, shared_weights=True)
    assert "layer edge_stages.0, call 2 (forward) on rank 1" in watched.spokesman(found, 1).what


def test_a_readout_of_one_of_several_iterations_is_named_with_its_call(store):
    def spoil(trainer):
        watched.poisoned(trainer.model.head, (2, 5))  # of three in each pass

    found = watched.steps(store, 2, on_rank(1, spoil), graph_iters=3, readouts="all")
    assert "layer head, call 2 (forward) on rank 1" in watched.spokesman(found, 1).what


@fault(38)
@pytest.mark.parametrize("layer", ["node_encoder", "edge_stages.0", "head"])
def test_a_gradient_that_is_not_finite_is_named_by_its_layer(store, layer):
    def spoil(trainer):
        watched.gives(trainer.model.get_submodule(layer), torch.nan)

    found = watched.steps(store, 3, on_rank(2, spoil))
    said = watched.spokesman(found, 2)
    assert said.what.endswith(f"first in layer {layer} (backward) on rank 2")
    assert (said.event, found[2]["phase"]) == (FIRST, "backward")
    assert all(one["unchanged"] for one in found)


def test_the_first_on_the_way_back_is_the_last_on_the_way_forward(store):
    def spoil(trainer, world):
        layers = ["node_encoder", "edge_stages.1", "edge_stages.0"]
        watched.gives(trainer.model.get_submodule(layers[world.rank]), torch.nan)

    found = watched.steps(store, 3, spoil)
    assert "layer edge_stages.1 (backward) on rank 1" in watched.spokesman(found, 1).what


def test_what_is_too_large_for_exact_sums_is_told_apart(store):
    def spoil(trainer):
        watched.gives(trainer.model.edge_stages[0], 2.0**30)

    said = watched.spokesman(watched.steps(store, 2, on_rank(1, spoil)), 1)
    assert re.search(r"too large, 1.07e\+09 .*6.71e\+07 .* layer edge_stages.0 \(backward\) on rank 1$", said.what)


def test_a_loss_that_is_too_large_is_told_apart(store):
    def spoil(trainer, world):
        with torch.no_grad():
            trainer.model.head.mlp.linears[-1].bias[:] = 1e30

    said = watched.spokesman(watched.steps(store, 2, spoil), 0)
    assert "is too large" in said.what
    assert said.what.endswith("first in the loss")


def test_only_the_event_it_began_in_is_named(store):
    """Two events a step on two pairs of ranks: the second event on ranks 2 and 3."""

    def spoil(trainer):
        watched.always_poisoned(trainer.model.edge_stages[0])

    found = watched.steps(store, 4, on_rank(3, spoil), domain_size=2, events_per_step=2)
    said = watched.spokesman(found, 3)
    assert said.event == dealt(store, 2)[1][0]
    assert said.what.endswith("layer edge_stages.0 (forward) on rank 3")


def test_of_several_events_on_the_same_ranks_the_first_bad_one_is_named(store):
    def spoil(trainer):
        watched.poisoned(trainer.model.edge_stages[0], (2, 4))  # of one for each event, in each pass

    said = watched.spokesman(watched.steps(store, 2, on_rank(0, spoil), events_per_step=2), 0)
    assert said.event == dealt(store, 1)[0][1]


def test_features_of_an_event_are_looked_at_first(store):
    def spoil(trainer, world):
        load = trainer.loader.load

        def loaded(sample):
            part = load(sample)
            if world.rank == 1:
                part.graph.features[0, 0] = torch.nan
            return part

        trainer.loader.load = loaded

    said = watched.spokesman(watched.steps(store, 3, spoil), 1)
    assert said.what.endswith("the node features on rank 1")
    assert "prepare it again" in said.hint


@pytest.mark.parametrize(
    ("point", "where"), [("loss", "the logits"), ("backward", "a gradient")], ids=["logits", "gradient"]
)
def test_what_a_second_pass_does_not_find_is_said_to_be_of_the_first_only(store, monkeypatch, point, where):
    trainers = {}

    def spoil(trainer, world):
        trainers[world.rank] = trainer

    def nan(logits):
        if point == "loss":
            foreign = ~trainers[1].now.part.graph.plan.edge_owned
            logits.detach()[int(foreign.nonzero()[0][0])] = torch.nan  # its loss is another rank's
        else:
            stage, given = trainers[1].model.head, []
            give = stage.add_limbs

            def once(parameters, limbs, rejected, largest):
                give(parameters, limbs, *((rejected, largest) if given else (1, torch.nan)))
                given.append(1)

            stage.add_limbs = once

    watched.at_point(monkeypatch, 1, point, nan)
    said = watched.spokesman(watched.steps(store, 3, spoil), 1)
    assert f" {where} on rank 1; a second pass" in said.what
    assert said.event == FIRST
    assert "memory" in said.hint


def test_the_second_pass_meets_the_numbers_of_the_first_also_with_dropout(store):
    logits = []

    def spoil(trainer):
        watched.gives(trainer.model.node_encoder, torch.nan)
        plain = trainer.model.read

        def read(*given):
            said = plain(*given)
            logits.append(said.edges.detach().clone())
            return said

        trainer.model.read = read

    watched.spokesman(watched.steps(store, 2, on_rank(1, spoil), dropout=0.4), 1)
    assert len(logits) == 2
    assert torch.equal(*logits)


@pytest.mark.parametrize("model", ["interaction", "own_models:small"])
def test_a_watched_network_is_left_as_it_was(store, model):
    network = watched.network_of(store, model)
    for module in network.modules():
        if isinstance(module, GradSink):
            module.sink = "a sink"
    with layers_watched(network.layers, []):
        assert not set(hooks_and_sinks(network)) & {(0, 0, "a sink"), (0, 0, None)}
    assert set(hooks_and_sinks(network)) <= {(0, 0, "a sink"), (0, 0, None)}


def hooks_and_sinks(network):
    hooks = [len(one._backward_hooks or ()) for one in network.parameters()]
    return [(len(one._forward_hooks), sum(hooks), getattr(one, "sink", None)) for one in network.modules()]


# --- networks that are not built on stages ----------------------------------------------------------------------------


class Tower(own_models.Small):
    """Three layers, one of them inside another module."""

    def __init__(self):
        super().__init__()
        self.more = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def changed(self, x):
        return self.more(x)


def tower():
    return own_models.filled(Tower())


@pytest.mark.parametrize("layer", ["lin", "more.2", "head"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_layer_of_an_own_network_is_named_as_its_author_names_it(store, layer, num_ranks):
    rank = num_ranks - 1

    def spoil(trainer):
        watched.always_poisoned(trainer.model.module.get_submodule(layer))

    found = watched.steps(store, num_ranks, on_rank(rank, spoil), model="test_not_finite:tower")
    on = f" on rank {rank}" if num_ranks > 1 else ""
    said = watched.spokesman(found, rank)
    assert said.what.endswith(f"first in layer {layer} (forward){on}")
    assert said.event == FIRST


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_gradient_of_an_own_network_is_named_by_its_layer(store, num_ranks):
    found = watched.steps(store, num_ranks, lambda trainer, world: None, model="own_models:steep")
    said = watched.spokesman(found, 0)
    assert said.what.endswith("first in layer lin (backward)")
    assert all(one["unchanged"] for one in found)


# --- parameters -------------------------------------------------------------------------------------------------------


@fault(38)
def test_parameters_that_a_step_has_spoilt_end_it_on_every_rank(store):
    def spoil(trainer, world):
        trainer.schedule = type("Steep", (), {"at": staticmethod(lambda step: float("inf"))})()

    for one in watched.steps(store, 2, spoil):
        assert isinstance(one["error"], StepFailed)
        assert re.search("node_encoder.mlp.linears.0.weight and .* rate inf; nothing", one["error"].what)
        assert one["phase"] == "optimizer"


def test_parameters_whose_norm_overflows_are_still_finite():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1e30)
    check_parameters(model, 0.1)
    with torch.no_grad():
        model.bias[1] = torch.inf
    with pytest.raises(StepFailed, match="bias is not finite .* 0.1"):
        check_parameters(model, 0.1)


def _one_step(world, store):
    watched.trainer_of(store, world).step(samples_of(EventStore(store).events("train"), None)[:1], 0)


def test_a_parameter_that_one_rank_alone_has_spoilt_ends_all(store, monkeypatch):
    def nan(parameter):
        parameter.detach().view(-1)[0] = torch.nan

    watched.at_point(monkeypatch, 1, "stepped", nan)
    with pytest.raises(StepFailed, match=r"parameter node_encoder.mlp.linears.0.weight is not finite after a step"):
        run_ranks(_one_step, 3, store, timeout=20)
