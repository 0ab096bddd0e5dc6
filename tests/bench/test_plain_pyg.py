"""The competitor computes what domainpar computes, so that their times can be compared."""

from dataclasses import replace

import pytest
import torch
from random_store import write_random_store

pytest.importorskip("torch_geometric")

import on_ranks
import plain_pyg
from flags import USUAL
from systems import Network

from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.catalogue import make_network
from domainpar.tracking.part_loading import load_part

MODELS = ("interaction", "interaction-node-first")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), num_train=1, num_val=0)


def job_for(store, model):
    return on_ranks.Job(store, replace(USUAL, model=model, hidden=16, graph_iters=2))


def difference(one, other):
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("form", ["eager", "checkpoint"])
@pytest.mark.parametrize("model", MODELS)
def test_the_plain_network_with_our_weights_gives_our_logits(store, model, form):
    job, opened = job_for(store, model), EventStore(store)
    ours, plain = make_network(job.training, opened), plain_pyg.make_network(job, form)
    with torch.no_grad(), opened.open(opened.events()[0]) as stored:
        part = load_part(stored, World.alone().domain)
        logits = ours(part.graph, part.halo)
        event = plain_pyg.read_event(store, "float32")
        assert difference(plain(event.x, event.edge_index, event.edge_attr), logits) < 1e-5


@pytest.mark.parametrize("form", ["eager", "checkpoint"])
@pytest.mark.parametrize("model", MODELS)
def test_the_plain_network_trains_to_our_losses(store, model, form):
    job, world = job_for(store, model), World.alone()
    ours = on_ranks.training_steps(world, job)["losses"]
    plain = plain_pyg.training_steps(world, job, form)["losses"]
    assert len(ours) == 4
    assert plain == pytest.approx(ours, rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_the_plain_network_scores_like_ours_in_the_users_order_and_ours_alike_on_ranks_and_threads(store, model):
    job = replace(job_for(store, model), work="scoring_passes", repeats=2)
    plain = plain_pyg.scoring_passes(World.alone(), job, "eager")
    threads = replace(job, training=replace(job.training, threads=2))
    layouts = [(1, job), (3, job), (2, threads)]
    ours = [run_ranks(on_ranks.scoring_passes, ranks, work) for ranks, work in layouts]
    assert len({ranks[0]["sha256"] for ranks in ours}) == 1
    for ranks in ours:
        assert difference(torch.from_numpy(plain["logits"]), torch.from_numpy(ranks[0]["logits"])) < 1e-5
        assert not any("logits" in rank for rank in ranks[1:])
        for rank in ranks:
            assert len(rank["seconds"]) == len(rank["whole"]) == 2
            assert all(network <= whole for network, whole in zip(rank["seconds"], rank["whole"]))
    assert len(plain["seconds"]) == 2


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_a_plain_step_of_a_full_event_holds_eleven_gigabytes_and_checkpoints_half_of_it():
    full = Network(num_nodes=91_749, num_edges=1_176_560, hidden=64, graph_iters=4)
    assert 11.0e9 < full.plain_bytes() < 13.0e9
    assert 0.5 < full.plain_bytes(checkpointed=True) / full.plain_bytes() < 0.65


def test_a_plain_pass_without_gradients_holds_less_than_a_step_and_more_than_its_joined_table():
    full = Network(num_nodes=91_749, num_edges=1_176_560, hidden=64, graph_iters=4)
    joined = full.num_edges * 3 * 64 * 4
    assert 3 * joined < full.plain_scoring_bytes() < 4 * joined < full.plain_bytes(checkpointed=True)
