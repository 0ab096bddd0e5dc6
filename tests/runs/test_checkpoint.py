"""Checkpoints: whole or not there at all, checked when loaded, and training goes on from them to the last bit."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from faults.on_purpose import switch
from marks import fault

from domainpar.common import faults
from domainpar.common.agreement import Refused
from domainpar.nn.interaction import InteractionNetwork
from domainpar.runs import checkpoint_files
from domainpar.runs.checkpoint import Checkpoints, TrainingState, first_not_finite, load_agreed, parameters_sha256
from domainpar.runs.checkpoint_files import FILES
from domainpar.testing import run_ranks


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
        checkpoints.drop_old()
    kept = sorted(path.name for path in checkpoints.directory.glob("step_*"))
    assert kept == ["step_000010", "step_1000000", "step_1000001", "step_1000002"]
    (checkpoints.directory / "last").write_text("step_000010\n")  # a run that went back, with three later ones there
    for number in (11, 12):
        checkpoints.save(model, optimizer, TrainingState(step=number), best=False)
    checkpoints.drop_old()
    assert checkpoints.names() == ["step_000010", "step_000011", "step_000012", *kept[1:]]


@pytest.mark.parametrize("which", ["last", "best"])
def test_what_was_never_saved_is_said_to_be_missing(checkpoints, which):
    with pytest.raises(ValueError, match=f"no {which} checkpoint in .*checkpoints\nhint: train first"):
        checkpoints.place(checkpoints.pointed(which))


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

    monkeypatch.setattr(checkpoint_files, "write_synced", counted(checkpoint_files.write_synced))
    monkeypatch.setattr(checkpoint_files, "write_whole", counted(checkpoint_files.write_whole))
    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(checkpoint_files.shutil, "rmtree", counted(shutil.rmtree))
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
    path = checkpoints.place(checkpoints.pointed("last")) / file
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 25)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        with pytest.raises(ValueError, match=r"step_000003.*(damaged|cannot be read)(.|\n)*write the name"):
            checkpoints.load("last", network())
    path.write_bytes(content)
    checkpoints.load("last", network())


def test_a_damaged_tensor_file_is_named_with_both_hashes(checkpoints, saved):
    path = checkpoints.place(checkpoints.pointed("last")) / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    with pytest.raises(ValueError, match=r"optimizer\.safetensors .*sha256 \w{12}, .*manifest .*\w{12}"):
        checkpoints.load("last", network())


def test_a_missing_file_is_named(checkpoints, saved):
    (checkpoints.place(checkpoints.pointed("last")) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"step_000003 .*FileNotFoundError.*model\.safetensors"):
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
    with pytest.raises(ValueError, match="another network: (.|\n)*the flags"):
        checkpoints.load("last", other, training(other))
    assert parameters_sha256(other) == before, "nothing was loaded in part"
    checkpoints.save(other, training(other, steps=1), TrainingState(step=9), best=False)
    with pytest.raises(ValueError, match="another network"):
        checkpoints.load("last", network())


def three(checkpoints):
    """Three checkpoints, of steps 1 to 3; the hash of the weights of each."""
    model = network()
    optimizer, hashes = training(model), {}
    for number in (1, 2, 3):
        step(model, optimizer, seed=number, steps=1)
        checkpoints.save(model, optimizer, TrainingState(step=number, best_step=number), best=True)
        hashes[number] = parameters_sha256(model)
    return hashes


def flip(path, position, bit=0):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def step_of(checkpoints, number, file):
    return checkpoints.directory / f"step_{number:06d}" / file


DAMAGE = {
    "a flipped bit": (lambda some: flip(step_of(some, 3, "model.safetensors"), 1000), "the file is damaged"),
    "a truncated file": (
        lambda some: step_of(some, 3, "optimizer.safetensors").write_bytes(b"\0" * 10),
        "optimizer.safetensors has sha256",
    ),
    "no manifest": (lambda some: step_of(some, 3, "manifest.json").unlink(), "cannot be read: FileNotFoundError"),
    "a manifest that is no object": (lambda some: step_of(some, 3, "manifest.json").write_text("3"), "cannot be read"),
    "no directory": (lambda some: shutil.rmtree(step_of(some, 3, "")), "last names step_000003, which is not there"),
    "a pointer to a place elsewhere": (
        lambda some: (some.directory / "last").write_text("../checkpoints/step_000003\n"),
        "which is no name of a checkpoint",
    ),
    "a pointer that is empty": (lambda some: (some.directory / "last").write_bytes(b""), "which is no name of"),
    "a pointer that is no text": (
        lambda some: (some.directory / "last").write_bytes(b"\xff" * 5000),
        "which is no name",
    ),
    "no pointer": (lambda some: (some.directory / "last").unlink(), "no last checkpoint"),
}
POINTER_ONLY = {name for name in DAMAGE if "pointer" in name}


def load_on(num_ranks, checkpoints, which="last", strict=False):
    """What every rank loads: state, and hash of the weights."""

    def load(world):
        model = network(seed=9)
        state = load_agreed(checkpoints, which, world, model, training(model), strict=strict)
        return state.step, parameters_sha256(model)

    return run_ranks(load, num_ranks)


@fault(44)
@pytest.mark.parametrize("name", DAMAGE)
def test_if_the_newest_checkpoint_is_damaged_all_ranks_take_the_one_before_and_it_is_said_once(
    checkpoints, capsys, name
):
    hashes = three(checkpoints)
    spoil, words = DAMAGE[name]
    spoil(checkpoints)
    taken = 3 if name in POINTER_ONLY else 2
    assert load_on(3, checkpoints) == [(taken, hashes[taken])] * 3
    err = capsys.readouterr().err
    assert err.count("WARNING") == 1
    assert words in err
    assert f"going on from step_{taken:06d}" in err


@fault(44)
@pytest.mark.parametrize("name", DAMAGE)
def test_strict_refuses_in_place_of_taking_another(checkpoints, name):
    three(checkpoints)
    spoil, words = DAMAGE[name]
    spoil(checkpoints)
    with pytest.raises(Refused, match=words) as refused:
        load_on(2, checkpoints, strict=True)
    assert "--strict-resume" in str(refused.value)


@fault(44)
def test_if_none_is_good_all_are_named(checkpoints):
    three(checkpoints)
    for number, file in ((1, "state.json"), (2, "manifest.json"), (3, "model.safetensors")):
        flip(step_of(checkpoints, number, file), 5)
    with pytest.raises(Refused, match=r"is whole: .*step_000003.*step_000002.*step_000001"):
        load_on(2, checkpoints)


def test_a_step_that_was_named_by_hand_is_taken_and_that_it_is_not_the_newest_is_said(checkpoints, capsys):
    hashes = three(checkpoints)
    (checkpoints.directory / "last").write_text("step_000002\n")
    assert load_on(1, checkpoints) == [(2, hashes[2])]
    assert "step_000002 though step_000003 is there" in capsys.readouterr().err
    flip(step_of(checkpoints, 2, "state.json"), 0)
    assert load_on(1, checkpoints) == [(1, hashes[1])], "not the newer one, which was left on purpose"
    flip(step_of(checkpoints, 1, "state.json"), 0)
    assert load_on(1, checkpoints) == [(3, hashes[3])], "better than nothing"


def test_a_whole_run_says_nothing(checkpoints, capsys):
    hashes = three(checkpoints)
    assert load_on(2, checkpoints, strict=True) == [(3, hashes[3])] * 2
    assert capsys.readouterr().err == ""


def test_a_damaged_best_checkpoint_is_never_replaced_by_another(checkpoints):
    three(checkpoints)
    (checkpoints.directory / "best").write_text("step_000002\n")
    load_on(1, checkpoints, "best")
    (checkpoints.directory / "best").write_text("step_000003\n")
    flip(step_of(checkpoints, 3, "model.safetensors"), 1000)
    with pytest.raises(Refused, match="step_000003: model.safetensors "):
        load_on(2, checkpoints, "best")


def test_a_best_pointer_that_names_what_was_not_the_best_is_found(checkpoints):
    model = network()
    optimizer = training(model, steps=1)
    checkpoints.save(model, optimizer, TrainingState(step=1, best=0.9, best_step=1), best=True)
    checkpoints.save(model, optimizer, TrainingState(step=3, best=0.9, best_step=1), best=False)
    (checkpoints.directory / "best").write_text("step_000003\n")
    with pytest.raises(Refused, match="step 1: the pointer is damaged"):
        load_on(2, checkpoints, "best")


def test_a_rank_that_sees_other_files_than_rank_0_makes_all_refuse(checkpoints, tmp_path):
    three(checkpoints)
    elsewhere = Checkpoints(tmp_path / "elsewhere")
    model = network(seed=4)
    elsewhere.save(model, training(model, steps=1), TrainingState(step=3), best=True)

    def load(world):
        mine = elsewhere if world.rank == 1 else checkpoints
        load_agreed(mine, "last", world, network())

    with pytest.raises(Refused, match="manifest .*rank 0"):
        run_ranks(load, 3)


def test_damaged_checkpoints_never_push_out_good_ones_and_are_left_until_they_are_old(checkpoints):
    three(checkpoints)
    for number in (2, 3):
        flip(step_of(checkpoints, number, "model.safetensors"), 1000)
    again = Checkpoints(checkpoints.directory)  # another process: it has not written them
    model = network()
    optimizer = training(model, steps=1)
    left = []
    for number in (4, 5, 6):
        again.save(model, optimizer, TrainingState(step=number), best=False)
        (again.directory / "best").unlink(missing_ok=True)
        again.drop_old()
        left.append([path.name[-1] for path in sorted(again.directory.glob("step_*"))])
    assert left == [["1", "2", "3", "4"], ["1", "2", "3", "4", "5"], ["4", "5", "6"]]


def test_a_save_of_a_step_whose_checkpoint_is_damaged_replaces_it(checkpoints):
    three(checkpoints)
    shutil.rmtree(step_of(checkpoints, 3, ""))
    step_of(checkpoints, 3, "").write_text("not even a directory")
    model = network(seed=5)
    checkpoints.save(model, training(model, steps=1), TrainingState(step=3), best=False)
    assert load_on(1, checkpoints) == [(3, parameters_sha256(model))]


PLACES = ["save", "save:files", "save:rename", "save:pointer"]


@pytest.mark.parametrize("place", PLACES)
def test_a_save_that_finds_the_disk_full_leaves_everything_as_it_was(checkpoints, saved, monkeypatch, place):
    model, optimizer = saved
    before = {path: path.read_bytes() for path in checkpoints.directory.rglob("*") if path.is_file()}
    monkeypatch.setenv("DOMAINPAR_FAULT", switch(f"rank=0,at={place},do=full"))
    faults.arm(0)
    try:
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(model, optimizer, TrainingState(step=4), best=True)
    finally:
        monkeypatch.delenv("DOMAINPAR_FAULT")
        faults.arm(0)
    left = {path: path.read_bytes() for path in checkpoints.directory.rglob("*") if path.is_file()}
    if place == "save:pointer":  # whole, and overwritten by the next save of that step
        left = {path: content for path, content in left.items() if path.parent.name != "step_000004"}
    assert left == before


def test_weights_and_states_that_are_not_finite_are_found_however_large_finite_ones_are():
    model = network()
    optimizer = training(model, steps=1)
    assert first_not_finite(model, optimizer) is None
    bias = model.head.mlp.linears[-1].bias
    largest = torch.finfo(torch.float32).max
    model.head.mlp.linears[-1].weight.data.fill_(largest)  # their sum is infinite
    assert first_not_finite(model, optimizer) is None
    optimizer.state[bias]["exp_avg_sq"][-1] = float("nan")
    assert first_not_finite(model, optimizer) == "head.mlp.linears.2.bias:exp_avg_sq"
    bias.data[-1] = -float("inf")
    assert first_not_finite(model, optimizer) == "head.mlp.linears.2.bias"
