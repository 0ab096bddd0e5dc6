"""Replicas: a rank whose parameters or optimiser drift from the others' by one bit is found and named."""

import pytest
import torch
import watched
from faults.on_purpose import spoil_tensor
from marks import fault

from domainpar.common.agreement import differing_ranks
from domainpar.parallel.digests import digest
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.training.monitor.failure import StepFailed
from domainpar.tracking.training.monitor.rank_differences import replicated
from domainpar.train import train

FIRST_PARAMETER = "node_encoder.mlp.linears.0.weight"


def one_ulp(tensor):
    spoil_tensor(tensor, "flip")


def nothing(trainer, world):
    pass


@fault(39)
@pytest.mark.parametrize("rank", [0, 2])
def test_one_ulp_in_one_parameter_on_one_rank_is_found_and_the_rank_named(store, monkeypatch, rank):
    watched.at_point(monkeypatch, rank, "stepped", one_ulp)
    found = watched.steps(store, 3, nothing, num_steps=3, check_replicas_every=1)
    said = watched.spokesman(found, rank)
    assert said.what.startswith(f"rank {rank} no longer holds what the others hold: {FIRST_PARAMETER} of ")
    assert "--resume" in said.hint
    assert {one["step"] for one in found} == {0}


def test_it_is_found_at_the_next_check_and_not_before(store, monkeypatch):
    # By more than one ulp, which the steps until then may round away.
    watched.at_point(monkeypatch, 1, "stepped", lambda parameter: parameter.detach().mul_(1.01))
    found = watched.steps(store, 3, nothing, num_steps=5, check_replicas_every=3)
    watched.spokesman(found, 1)
    assert {one["step"] for one in found} == {2}


def test_of_two_ranks_neither_is_the_majority(store, monkeypatch):
    watched.at_point(monkeypatch, 0, "stepped", one_ulp)
    found = watched.steps(store, 2, nothing, check_replicas_every=1)
    assert "rank 1 no longer" in watched.spokesman(found, 1).what


@fault(39)
def test_a_drifting_optimiser_is_found_before_it_drives_parameters_apart(store, monkeypatch):
    trainers = {}

    def flip(parameter):
        one_ulp(trainers[1].optimizer.state[parameter]["exp_avg_sq"])

    watched.at_point(monkeypatch, 1, "stepped", flip)
    keep = lambda trainer, world: trainers.update({world.rank: trainer})  # noqa: E731
    found = watched.steps(store, 3, keep, check_replicas_every=1)
    assert f"exp_avg_sq of {FIRST_PARAMETER} of " in watched.spokesman(found, 1).what


def test_running_means_of_an_own_network_are_looked_at_too(store, monkeypatch):
    trainers = {}

    def drift(parameter):
        trainers[2].model.module.norm.running_mean += 1

    watched.at_point(monkeypatch, 2, "stepped", drift)
    keep = lambda trainer, world: trainers.update({world.rank: trainer})  # noqa: E731
    flags = {"model": "own_models:masked", "check_replicas_every": 1}
    said = watched.spokesman(watched.steps(store, 3, keep, **flags), 2)
    assert ": norm.running_mean of " in said.what
    assert "rank 2 no longer" in said.what


def test_replicas_that_are_the_same_go_on_and_0_switches_checks_off(store, monkeypatch):
    for model in ("interaction", "own_models:masked"):
        flags = {"model": model, "check_replicas_every": 1}
        found = watched.steps(store, 3, nothing, num_steps=3, **flags)
        assert [one["error"] for one in found] == [None] * 3
    watched.at_point(monkeypatch, 1, "stepped", one_ulp)
    found = watched.steps(store, 3, nothing, num_steps=2, check_replicas_every=0)
    assert [one["error"] for one in found] == [None] * 3


def _train(world, store, out):
    train(TrainConfig(hidden=16, graph_iters=1, epochs=1, out=str(out)), store, world)


@fault(39)
def test_no_checkpoint_is_written_of_replicas_that_differ(store, tmp_path, monkeypatch):
    """Every 100 steps is never in a run of three."""
    watched.at_point(monkeypatch, 1, "stepped", one_ulp)
    with pytest.raises(StepFailed, match="rank 1 no longer"):
        run_ranks(_train, 3, store, tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def _asked(world, store, every):
    trainer = watched.trainer_of(store, world, check_replicas_every=every)
    if world.rank == 1:
        one_ulp(next(trainer.model.parameters()))
    trainer.check_replicas()


def test_who_switches_checks_off_has_none_before_checkpoints_either(store):
    run_ranks(_asked, 2, store, 0)
    with pytest.raises(StepFailed, match="no longer holds"):
        run_ranks(_asked, 2, store, 1000)


def test_any_flipped_bit_changes_the_digest():
    tensors = {"a": torch.randn(7, 3), "b": torch.randn(5).bfloat16(), "c": torch.zeros(0), "d": torch.tensor(3)}
    whole = digest(tensors)
    for name in ("a", "b", "d"):
        bits = tensors[name].view(-1).view(torch.uint8)
        for byte in range(len(bits)):
            bits[byte] ^= 4
            assert digest(tensors) != whole
            bits[byte] ^= 4
    assert digest(tensors) == whole


def test_changes_that_cancel_in_a_sum_change_the_digest():
    tensor = torch.arange(1.0, 9.0)
    whole = digest({"a": tensor})
    bits = tensor.view(torch.int32)
    bits[0] += 1
    bits[5] -= 1
    assert digest({"a": tensor}) != whole


def test_parameters_buffers_and_the_optimisers_state_are_all_looked_at():
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    assert set(replicated(model, optimizer)) == {
        *("weight", "bias", "running_mean", "running_var", "num_batches_tracked"),
        *(f"{key} of {name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in ("weight", "bias")),
    }


@pytest.mark.parametrize(
    ("held", "drifted"),
    [("aaba", [2]), ("baa", [0]), ("ab", [1]), ("aabb", [2, 3]), ("abc", [1, 2]), ("abbb", [0])],
)
def test_those_who_differ_from_most_have_drifted(held, drifted):
    assert differing_ranks(held) == drifted
