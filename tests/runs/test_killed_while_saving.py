"""Checkpoints survive: whenever a save is killed something good is loaded, and no flipped bit goes unseen."""

import multiprocessing
import os
import random
import shutil
import time

import pytest
import torch
from faults.on_purpose import switch
from marks import fault
from saving_forever import network, save_forever, weights_of_step

from domainpar.common.agreement import Refused
from domainpar.parallel.world import World
from domainpar.runs.checkpoint import Checkpoints, TrainingState, load_agreed, parameters_sha256
from domainpar.runs.checkpoint_files import step_of
from domainpar.testing import patient

FORK = multiprocessing.get_context("fork")  # torch is there at once; the children compute on one thread


def kill_while_saving(directory, first, seconds):
    """Let a process save, and kill it so long after its first checkpoint is the last one, which takes two renames."""
    saving = FORK.Process(target=save_forever, args=(directory, first), daemon=True)
    saving.start()
    give_up_at = time.monotonic() + patient(60)
    try:
        while last_step(directory) < first:
            assert saving.is_alive(), "it ended by itself"
            assert time.monotonic() < give_up_at
            time.sleep(0.001)
        time.sleep(seconds)
        assert saving.is_alive()
    finally:
        saving.kill()
        saving.join()


def last_step(directory):
    """Step of the checkpoint that `last` names; -1: it is not there."""
    pointer = directory / "last"
    return step_of(pointer.read_text().rstrip()) if pointer.is_file() else -1


def assert_loads(directory, least):
    """The last checkpoint, and the best if there is one, are whole and hold the weights of their steps."""
    expected, found = network(), network()
    for which in ("last", "best"):
        checkpoints = Checkpoints(directory)
        if not (directory / which).is_file():
            assert which == "best"
            continue
        state = checkpoints.load(which, found, torch.optim.AdamW(found.parameters()))
        weights_of_step(expected, state.step)
        assert parameters_sha256(found) == parameters_sha256(expected)
        assert which == "best" or state.step >= least, "older than what was there before"
    return Checkpoints(directory).load("last", found).step


def kill_often(directory, number):
    """Number of random moments at which a save was killed, with something good to load after each of them."""
    moments = random.Random(number)
    last, survived = -1, 0
    for _ in range(number):
        kill_while_saving(directory, last + 1, moments.uniform(0, 0.05))
        last = assert_loads(directory, max(last, 0))
        survived += 1
    return survived


@fault(43)
def test_whenever_a_process_is_killed_while_it_saves_the_run_loads(tmp_path):
    assert kill_often(tmp_path / "checkpoints", 8) == 8


@fault(43)
@pytest.mark.faults
def test_fifty_kills_while_saving_leave_no_run_that_does_not_load(tmp_path):
    assert kill_often(tmp_path / "checkpoints", 50) == 50


@fault(43)
@pytest.mark.parametrize("place", ["save", "save:files", "save:rename", "save:pointer", "save:drop"])
def test_a_process_that_is_killed_at_a_place_of_saving_leaves_what_loads(tmp_path, place):
    directory = tmp_path / "checkpoints"
    kill_while_saving(directory, 0, 0.05)
    last = assert_loads(directory, 0)
    saving = FORK.Process(target=_save_and_be_killed, args=(directory, last + 1, place), daemon=True)
    saving.start()
    saving.join(60)
    assert saving.exitcode == -9
    found = assert_loads(directory, last)
    assert found == (last + 1 if place == "save:drop" else last)
    kill_while_saving(directory, last + 2, 0.02)
    assert_loads(directory, last + 1)
    assert not list(directory.glob(".*"))[2:], "what killed saves left is tidied up, but for the last one's"


def _save_and_be_killed(directory, first, place):
    os.environ["DOMAINPAR_FAULT"] = switch(f"rank=0,at={place},do=kill")
    save_forever(directory, first)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three checkpoints, the last of which will be damaged."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("three") / "checkpoints")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for step in (1, 2, 3):
        weights_of_step(model, step)
        checkpoints.save(model, optimizer, TrainingState(step=step, best_step=step), best=True)
    return checkpoints


def unnoticed_flips(three, directory, number, capsys):
    """Flips of one random bit in one random file, after which something was loaded without a word, or wrongly."""
    chance, bad = random.Random(0), []
    files = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json", "../last", "../best"]
    for _ in range(number):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(three.directory, directory)
        path = directory / "step_000003" / chance.choice(files)
        content = bytearray(path.read_bytes())
        position, bit = chance.randrange(len(content)), chance.randrange(8)
        content[position] ^= 1 << bit
        path.write_bytes(content)
        capsys.readouterr()
        if not _noticed(directory, path.name, capsys):
            bad.append((path.name, position, bit))
    return bad


def _noticed(directory, file, capsys):
    world, model, expected = World.alone(), network(seed=9), network()
    optimizer = torch.optim.AdamW(model.parameters())
    if file == "best":  # nothing takes its place
        try:
            load_agreed(Checkpoints(directory), "best", world, model)
        except Refused:
            return True
        return False
    state = load_agreed(Checkpoints(directory), "last", world, model, optimizer)
    weights_of_step(expected, state.step)
    warned = "WARNING" in capsys.readouterr().err
    before = 3 if file == "last" else 2
    return warned and state.step in (before, 1, 2) and parameters_sha256(model) == parameters_sha256(expected)


@fault(44)
def test_no_flipped_bit_goes_unseen_and_the_checkpoint_before_is_used(three, tmp_path, capsys):
    assert unnoticed_flips(three, tmp_path / "copy", 100, capsys) == []
