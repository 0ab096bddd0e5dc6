"""Checkpoints: whole or not there at all, checked when loaded, and training goes on from them to the last bit."""

import shutil
from pathlib import Path

import pytest
import torch

from domainpar.nn.interaction import InteractionNetwork
from domainpar.training import checkpoint
from domainpar.training.checkpoint import FILES, Checkpoints, TrainingState, parameters_sha256


def network(seed=0, **flags):
    return InteractionNetwork(3, 6, **{"hidden": 16, "graph_iters": 2, **flags}, seed=seed)


def training(model, seed=0, steps=0):
    """An optimiser of the model after some steps on random gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, seed, steps)
    return optimizer


def step(model, optimizer, seed, steps):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


@pytest.fixture
def saved(checkpoints):
    """A network and its optimiser after three steps, saved as last and best."""
    model = network()
    optimizer = training(model, steps=3)
    checkpoints.save(model, optimizer, TrainingState(step=3, epoch=1, best=0.75, best_step=3), best=True)
    return model, optimizer


@pytest.mark.parametrize("flags", [{}, {"dtype": torch.float64}, {"shared_weights": True, "graph_iters": 3}])
def test_training_goes_on_from_a_checkpoint_to_the_same_bits(checkpoints, flags):
    model = network(**flags)
    optimizer = training(model, steps=3)
    state = TrainingState(step=3, epoch=1, step_in_epoch=2, best=0.75, best_step=2, dataset="abc")
    checkpoints.save(model, optimizer, state, best=False)
    other = network(seed=1, **flags)
    optimizer_of_other = training(other, seed=1)
    assert checkpoints.load("last", other, optimizer_of_other) == state
    assert parameters_sha256(other) == parameters_sha256(model)
    step(model, optimizer, seed=2, steps=4)
    step(other, optimizer_of_other, seed=2, steps=4)
    assert parameters_sha256(other) == parameters_sha256(model)


def test_one_hash_stands_for_all_parameters():
    assert parameters_sha256(network()) == parameters_sha256(network())
    changed = network()
    with torch.no_grad():
        changed.head.mlp.linears[-1].bias += 1e-7
    assert parameters_sha256(changed) != parameters_sha256(network())


def test_last_and_best_lead_to_their_own_weights(checkpoints, saved):
    model, optimizer = saved
    best = parameters_sha256(model)
    step(model, optimizer, seed=1, steps=1)
    checkpoints.save(model, optimizer, TrainingState(step=4), best=False)
    found = network(seed=9)
    assert checkpoints.load("best", found).step == 3
    assert parameters_sha256(found) == best
    assert checkpoints.load("last", found).step == 4
    assert parameters_sha256(found) == parameters_sha256(model)


def test_the_three_newest_are_kept_and_the_best(checkpoints, saved):
    model, optimizer = saved
    for number in (10, 20, 999_999, 1_000_000, 1_000_001, 1_000_002):
        checkpoints.save(model, optimizer, TrainingState(step=number), best=number == 10)
    kept = sorted(path.name for path in checkpoints.directory.glob("step_*"))
    assert kept == ["step_000010", "step_1000000", "step_1000001", "step_1000002"]


@pytest.mark.parametrize("which", ["last", "best"])
def test_what_was_never_saved_is_said_to_be_missing(checkpoints, which):
    with pytest.raises(ValueError, match=f"no {which} checkpoint in .*checkpoints; train first"):
        checkpoints.find(which)


class Killed(BaseException):
    """In place of the signal that ends a process at once."""


def kill_at(monkeypatch, number):
    """Let the save die at its n-th operation on the directory: a file written, renamed, replaced or removed."""
    count = 0

    def counted(plain):
        def operation(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                raise Killed
            return plain(*args, **kwargs)

        return operation

    monkeypatch.setattr(checkpoint, "_write", counted(checkpoint._write))
    monkeypatch.setattr(checkpoint.os, "replace", counted(checkpoint.os.replace))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", counted(shutil.rmtree))
    monkeypatch.setattr(Path, "rename", counted(Path.rename))


@pytest.mark.parametrize("same_step", [False, True], ids=["a new step", "the same step again"])
def test_whenever_a_save_is_killed_last_and_best_are_whole_and_the_next_save_tidies_up(
    checkpoints, saved, monkeypatch, same_step
):
    model, optimizer = saved
    before = parameters_sha256(model)
    step(model, optimizer, seed=1, steps=1)
    after = parameters_sha256(model)
    state = TrainingState(step=3 if same_step else 4)
    ended = False
    for number in range(1, 40):
        shutil.copytree(checkpoints.directory, checkpoints.directory.with_name(f"copy{number}"))
        copy = Checkpoints(checkpoints.directory.with_name(f"copy{number}"))
        with monkeypatch.context() as patched:
            kill_at(patched, number)
            try:
                copy.save(model, optimizer, state, best=True)
                ended = True
            except Killed:
                pass
        for which in ("last", "best"):
            found = network(seed=9)
            copy.load(which, found, training(found))
            assert parameters_sha256(found) in (before, after), f"killed at operation {number}"
        copy.save(model, optimizer, TrainingState(step=5), best=False)
        copy.load("best", network())
        left = {path.name for path in copy.directory.iterdir()}
        assert left <= {"last", "best", "step_000003", "step_000004", "step_000005"}, f"killed at operation {number}"
        if ended:
            break
    assert ended
    assert number > 8, "operations of a save"


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_a_flipped_bit_anywhere_is_found_and_named(checkpoints, saved, file):
    path = checkpoints.find("last") / file
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 25)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        with pytest.raises(ValueError, match=r"checkpoint .*step_000003.*(damaged|cannot be read).*write the name of"):
            checkpoints.load("last", network())
    path.write_bytes(content)
    checkpoints.load("last", network())


def test_a_damaged_tensor_file_is_named_with_both_hashes(checkpoints, saved):
    path = checkpoints.find("last") / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    with pytest.raises(ValueError, match=r"optimizer\.safetensors has sha256 \w{12}, its manifest says \w{12}"):
        checkpoints.load("last", network())


def test_a_missing_file_is_named(checkpoints, saved):
    (checkpoints.find("last") / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"step_000003 cannot be read: FileNotFoundError.*model\.safetensors"):
        checkpoints.load("last", network())


OTHERS = {
    "another width": {"hidden": 32},
    "more iterations": {"graph_iters": 3},
    "another order": {"order": "node-first"},
    "another precision": {"dtype": torch.float64},
    "shared weights": {"shared_weights": True},
}


@pytest.mark.parametrize("flags", OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_another_network_is_refused_both_ways(checkpoints, saved, flags):
    other = network(**flags)
    before = parameters_sha256(other)
    with pytest.raises(ValueError, match="belongs to another network: .* give the flags the run was trained with"):
        checkpoints.load("last", other, training(other))
    assert parameters_sha256(other) == before, "nothing was loaded in part"
    checkpoints.save(other, training(other, steps=1), TrainingState(step=9), best=False)
    with pytest.raises(ValueError, match="belongs to another network"):
        checkpoints.load("last", network())
