"""The law of the project: one answer, to the last bit, on any number of ranks, any grouping, any transport."""

import json
import platform
from pathlib import Path

import invariance
import pytest
from marks import slow
from random_store import write_random_store

from domainpar.parallel import world
from domainpar.parallel.world import World
from domainpar.testing import find_mpiexec, run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.training.inputs import open_training_data
from domainpar.tracking.training.run import make_trainer
from domainpar.train import train

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")

SEVERAL = "clipped, warmed up, several events a step, weights, targets"
NETWORKS = {
    "edge-first float32": {},
    "edge-first float64": {"dtype": "float64"},
    "node-first float32": {"model": "interaction-node-first"},
    "node-first float64": {"model": "interaction-node-first", "dtype": "float64"},
    "shared weights": {"shared_weights": True, "graph_iters": 3},
    SEVERAL: {
        "clip": 0.5,
        "warmup": 3,
        "lr_schedule": "cosine",
        "events_per_step": 2,
        "weight_decay": 0.1,
        "true_weight": 3.0,
        "target": "pt: [0.5, .inf]",
    },
    "bf16": {"precision": "bf16"},
    "dropout": {"dropout": 0.3},
    "everything at once": {
        "model": "interaction-node-first",
        "graph_iters": 3,
        "precision": "bf16",
        "dropout": 0.2,
        "clip": 0.5,
        "events_per_step": 2,
        "readouts": "all",
    },
}

THREE_ITERATIONS = "everything at once"
"""The least of which some are computed again by a switch."""

SPARING = {"threads": 3, "recompute_every": 2}
"""What makes a run faster or smaller and changes no bit. (While rows are on their way, ranks compute in any case.)"""


@pytest.fixture(scope="module")
def on_one_rank(store, tmp_path_factory):
    """Results of one rank, computed once a network."""
    known = {}

    def results(network):
        if network not in known:
            out = tmp_path_factory.mktemp("one-rank")
            (known[network],) = run_ranks(invariance.results, 1, store, out, NETWORKS[network])
        return known[network]

    return results


def _assert_same(found, expected):
    for rank, result in enumerate(found):
        assert result["steps"] == expected["steps"], f"losses or metrics, rank {rank}"
        assert result["parameters"] == expected["parameters"], f"parameters, rank {rank}"
        assert result["scores"] == expected["scores"], f"scores, rank {rank}"
    assert found[0]["checkpoint"] == expected["checkpoint"], "bytes of the checkpoint"


FEW = ("edge-first float32", "shared weights", SEVERAL, "everything at once")
WAYS = [pytest.param(network, marks=[] if network in FEW else pytest.mark.slow) for network in NETWORKS]


@pytest.mark.parametrize("num_ranks", [slow(2), 3, slow(4), slow(5), slow(8)])
@pytest.mark.parametrize("network", WAYS)
def test_any_number_of_ranks_gives_the_bits_of_one(store, on_one_rank, tmp_path, network, num_ranks):
    found = run_ranks(invariance.results, num_ranks, store, tmp_path / "run", NETWORKS[network], timeout=120)
    _assert_same(found, on_one_rank(network))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("switch", [{"threads": 1}, {"threads": 3}, {"recompute_every": 2}], ids=str)
def test_what_only_saves_time_or_memory_gives_the_bits_of_one_rank_without(
    store, on_one_rank, tmp_path, switch, num_ranks
):
    flags = NETWORKS[THREE_ITERATIONS] | switch
    found = run_ranks(invariance.results, num_ranks, store, tmp_path / "run", flags, timeout=120)
    _assert_same(found, on_one_rank(THREE_ITERATIONS))


@pytest.mark.parametrize("num_ranks", [slow(1), slow(2), 3, slow(4), slow(5), slow(8)])
def test_everything_switched_on_gives_the_bits_of_one_rank_without_what_only_saves(
    store, on_one_rank, tmp_path, num_ranks
):
    flags = NETWORKS["everything at once"] | SPARING
    found = run_ranks(invariance.results, num_ranks, store, tmp_path / "run", flags, timeout=120)
    _assert_same(found, on_one_rank("everything at once"))


def test_networks_that_are_to_differ_do(on_one_rank):
    """Else a flag that does nothing would pass all of the above."""
    hashes = {on_one_rank(network)["parameters"] for network in ("edge-first float32", "bf16", "dropout")}
    assert len(hashes) == 3


@pytest.mark.parametrize(("asked", "every"), [(3, 3), ("auto", None)])  # auto: all is kept until it is known
def test_what_saves_memory_reaches_the_network(store, asked, every):
    config, alone = TrainConfig(recompute_every=asked), World.alone()
    trainer = make_trainer(config, open_training_data(config, Path(store), alone), alone, config)
    assert trainer.model.recompute_every == every


@pytest.mark.parametrize(
    ("grouping", "num_ranks"), [("metis", 2), ("random", 3), slow("metis", 5), slow("random", 5), slow("random", 2)]
)
def test_any_grouping_of_tiles_gives_the_bits_of_one_rank(store, on_one_rank, tmp_path, grouping, num_ranks):
    flags = {**NETWORKS["edge-first float32"], "grouping": grouping}
    found = run_ranks(invariance.results, num_ranks, store, tmp_path / "run", flags, timeout=120)
    _assert_same(found, on_one_rank("edge-first float32"))


@pytest.mark.parametrize("domain_size", [slow(1), 2, slow(4)])
def test_any_shape_of_the_process_grid_gives_the_bits_of_one_rank(store, on_one_rank, tmp_path, domain_size):
    found = run_ranks(
        invariance.results, 4, store, tmp_path / "run", NETWORKS[SEVERAL], domain_size=domain_size, timeout=120
    )
    _assert_same(found, on_one_rank(SEVERAL))


def test_a_run_that_was_stopped_goes_on_to_the_same_bits_on_other_ranks(store, on_one_rank, tmp_path):
    run_ranks(invariance.results, 2, store, tmp_path / "run", {"max_steps": 4}, timeout=120)
    flags = {"resume": True, "overwrite": False}
    found = run_ranks(invariance.results, 3, store, tmp_path / "run", flags, timeout=120)
    assert found[0]["parameters"] == on_one_rank("edge-first float32")["parameters"]
    model, optimizer, *_ = found[0]["checkpoint"]  # not its state: the stop saw one more validation
    assert [model, optimizer] == on_one_rank("edge-first float32")["checkpoint"][:2]


CASES_OF_PROCESSES = ["edge-first float32", "node-first float64"]


@pytest.mark.parametrize(
    ("transport", "num_ranks"),
    [
        ("gloo", 2),  # eight, with every option: test_covering
        pytest.param("mpi", 2, marks=needs_mpi),
        pytest.param("mpi", 3, marks=[needs_mpi, pytest.mark.slow]),
    ],
)
def test_any_transport_gives_the_bits_of_one_rank(store, on_one_rank, tmp_path, transport, num_ranks):
    cases = [NETWORKS[network] for network in CASES_OF_PROCESSES]
    found = run_ranks(
        invariance.many_results, num_ranks, str(store), str(tmp_path / "run"), cases, transport=transport, timeout=120
    )
    for number, network in enumerate(CASES_OF_PROCESSES):
        _assert_same([results[number] for results in found], on_one_rank(network))


@pytest.mark.parametrize("transport", ["gloo", pytest.param("mpi", marks=needs_mpi)])
@pytest.mark.slow
def test_a_grid_of_processes_gives_the_bits_of_one_rank(store, on_one_rank, tmp_path, transport):
    networks = [SEVERAL, "everything at once"]
    cases = [NETWORKS[networks[0]], NETWORKS[networks[1]] | SPARING]
    found = run_ranks(
        invariance.many_results,
        4,
        str(store),
        str(tmp_path / "run"),
        cases,
        transport=transport,
        domain_size=2,
        timeout=120,
    )
    for number, network in enumerate(networks):
        _assert_same([results[number] for results in found], on_one_rank(network))


def _long_run(world, store, out, flags):
    """Hash of the parameters after a run, its step, and the norms of its gradients."""
    run = train(TrainConfig(**LONG, store=str(store), out=str(out), **flags), store, world)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] if world.is_root else []
    return invariance.parameters_of(run), run.state.step, [line["grad_norm"] for line in lines]


LONG = {
    **{"hidden": 16, "graph_iters": 3, "epochs": 25, "events_per_step": 2, "lr": 3e-3},
    **{"precision": "bf16", "dropout": 0.1, "clip": 0.05},
}


@pytest.mark.slow
def test_a_hundred_steps_end_with_the_bits_of_one_rank_though_stopped_and_taken_up_by_other_ranks(tmp_path):
    """Four steps an epoch: the stop at step 50 is in the middle of one."""
    store = write_random_store(tmp_path / "store", num_train=8, num_val=0, num_nodes=20, num_edges=30, num_tiles=5)
    ((whole, num_steps, norms),) = run_ranks(_long_run, 1, store, tmp_path / "whole", {"threads": 1})
    assert num_steps == len(norms) == 100
    assert sum(norm > LONG["clip"] for norm in norms) > 25, "clipping"
    stopped = run_ranks(
        _long_run, 3, store, tmp_path / "run", {"recompute_every": 2, "threads": 1, "max_steps": 50}, timeout=120
    )
    assert [steps for _, steps, _ in stopped] == [50] * 3
    resumed = run_ranks(_long_run, 2, store, tmp_path / "run", {"resume": True, "threads": 1}, timeout=120)
    assert [(parameters, steps) for parameters, steps, _ in resumed] == [(whole, 100)] * 2
    assert resumed[0][2] == norms


def test_groups_of_ranks_that_do_not_lie_in_a_row_have_the_same_bits(store, tmp_path, monkeypatch):
    flags = {"events_per_step": 2}
    expected = run_ranks(invariance.results, 1, store, tmp_path / "one", flags)[0]
    gather = world.gather
    named = lambda transport, own: list("abab") if own == platform.node() else gather(transport, own)  # noqa: E731
    monkeypatch.setattr(world, "gather", named)  # ranks dealt to two machines in turn
    for found in run_ranks(invariance.results, 4, store, tmp_path / "apart", flags, domain_size=2):
        names = ("steps", "parameters", "scores")
        assert {name: found[name] for name in names} == {name: expected[name] for name in names}
