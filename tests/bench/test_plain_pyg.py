"""The competitor computes what domainpar computes, so that their times can be compared."""

import pytest
import torch
from random_store import write_random_store

pytest.importorskip("torch_geometric")

import on_ranks
import plain_pyg
from formulas import Network
from torch.utils.flop_counter import FlopCounterMode

from domainpar.events.store import EventStore
from domainpar.parallel.part_loading import load_part
from domainpar.parallel.world import World

MODELS = ("interaction", "interaction-node-first")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), num_train=1, num_val=0)


def settings_for(store, model):
    return on_ranks.StepSettings(store, model=model, hidden=16, graph_iters=2, repeats=3)


def difference(one, other):
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("form", ["eager", "checkpoint"])
@pytest.mark.parametrize("model", MODELS)
def test_the_plain_network_with_our_weights_gives_our_logits(store, model, form):
    settings = settings_for(store, model)
    ours, plain, event = on_ranks.make_model(settings), plain_pyg.make_network(settings, form), None
    with torch.no_grad(), EventStore(store).open(EventStore(store).events()[0]) as opened:
        part = load_part(opened, World.alone().domain)
        logits = ours(part.graph, part.halo)
        event = plain_pyg.read_event(settings)
        assert difference(plain(event.x, event.edge_index, event.edge_attr), logits) < 1e-5


@pytest.mark.parametrize("form", ["eager", "checkpoint"])
@pytest.mark.parametrize("model", MODELS)
def test_the_plain_network_trains_to_our_losses(store, model, form):
    settings, world = settings_for(store, model), World.alone()
    ours = on_ranks.training_steps(world, settings)["losses"]
    plain = plain_pyg.training_steps(world, settings, form)["losses"]
    assert len(ours) == 4
    assert plain == pytest.approx(ours, rel=1e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_the_products_of_a_plain_step_are_those_of_the_formula(store, model, checkpointed):
    settings = settings_for(store, model)
    network, event = plain_pyg.make_network(settings, "checkpoint" if checkpointed else "eager"), None
    event = plain_pyg.read_event(settings)
    with FlopCounterMode(display=False) as counter:
        network(event.x, event.edge_index, event.edge_attr).sum().backward()
    formula = Network(event.num_nodes, event.num_edges, 3, 6, 16, 2, node_first=network.node_first)
    assert formula.plain_operations(checkpointed) == counter.get_total_flops()
