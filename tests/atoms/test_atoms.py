"""MACE, SevenNet, CHGNet and NequIP, as pip installs them, are exact on ranks. `make test-atoms` installs them."""

import json
import os
import re
from pathlib import Path

import pytest

from domainpar.testing import patient, run_command

ROOT = Path(__file__).parents[2]
PACKAGES = {"mace": "mace-torch", "sevennet": "sevenn", "chgnet": "chgnet", "nequip": "nequip"}
TOLERANCES = [1e-12, 1e-10, 1e-10, 1e-10]  # energy, forces, stress, magnetic moments


def python_of(name):
    """The Python of the environment of a package; skips where there is none."""
    found = ROOT / f".venv-{name}" / "bin" / "python"
    if not found.exists():
        pytest.skip(f"{PACKAGES[name]} has an environment of its own, which is not here: make test-atoms")
    return str(found)


def output_of(command, **more):
    """What a program of such an environment prints, in a process of its own."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "examples")))
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}
    code, output = run_command(
        ["env", *(f"{name}={value}" for name, value in environment.items()), *command], patient(600)
    )
    assert code == 0, output
    return output


def compared(name, *flags):
    """What differs on 1, 2 and 3 ranks, by the program; no rank holds the crystal of 64 atoms if there are others."""
    output = output_of([python_of(name), str(ROOT / "tests/atoms/on_ranks.py"), name, *flags])
    whole, *on_ranks = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [found["ranks"] for found in on_ranks] == [1, 2, 3]
    for found in on_ranks:
        assert sum(found["owned"]) == 64
        assert max(found["owned"]) <= 80 / found["ranks"]
    return whole, [found["off"] for found in on_ranks]


@pytest.mark.parametrize("name", PACKAGES)
def test_energy_forces_and_stress_on_ranks_are_those_of_the_whole_crystal(name):
    whole, differences = compared(name)
    assert whole["second"] > 1e-3  # eV/A, the largest force
    for off in differences:
        assert len(off) >= 3
        assert all(one <= most for one, most in zip(off, TOLERANCES)), off


@pytest.mark.parametrize("name", PACKAGES)
def test_a_training_step_on_forces_has_the_loss_and_the_gradients_of_the_whole_crystal(name):
    whole, differences = compared(name, "--train")
    assert whole["second"] < whole["first"]  # the loss after the step
    for off in differences:
        assert len(off) == 3
        assert max(off) <= 1e-10, off


@pytest.mark.parametrize("name", ["mace", "sevennet"])
def test_the_example_moves_atoms_alike_on_one_rank_and_on_two(name):
    python, flags = python_of(name), ["--network", name, "--cells", "2", "2", "2", "--steps", "2"]
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    alone, two = (
        [
            [float(number) for number in re.findall(r"(?:energy|largest force) (\S+)", line)]
            for line in output_of([python, *how, str(ROOT / "examples/atoms.py"), *flags]).splitlines()
            if line.startswith("step ")
        ]
        for how in ([], launch)
    )
    assert len(alone) == 3
    assert alone[0] != alone[2]
    for one, other in zip(alone, two, strict=True):
        assert other == pytest.approx(one, rel=1e-10 if name == "mace" else 1e-4, abs=0)  # SevenNet-0 in float32


@pytest.mark.parametrize("kind", ["--float32", ""])
def test_mace_is_trained_with_the_same_bits_on_any_ranks(kind):
    program = [python_of("mace"), str(ROOT / "tests/atoms/on_ranks.py"), "mace", "--cells", "1", "1", "2"]
    how = [*kind.split(), "--ranks", "1", "2", "3", "--same-bits", "2"]
    lines = output_of([*program, *how]).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == 12
    hashes = {asked: {one["hash"] for one in found if one["same_bits"] is asked} for asked in (True, False)}
    assert len(hashes[True]) == 1
    assert len(hashes[False]) > 2


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_mace_has_the_bits_of_threads_on_ranks_that_are_processes(launcher):
    python = python_of("mace")
    program = [str(ROOT / "tests/atoms/on_ranks.py"), "mace", "--cells", "1", "1", "2", "--same-bits", "2"]
    launch = {
        "torchrun": [python, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()],
        "mpiexec": [str(Path(python).parent / "mpiexec"), "-n", "2", python],
    }
    threads, processes = (
        {
            found["hash"]
            for line in output_of(command).splitlines()
            if line.startswith("{") and (found := json.loads(line))["same_bits"]
        }
        for command in ([python, *program, "--ranks", "3"], [*launch[launcher], *program, "--launched"])
    )
    assert len(threads) == 1
    assert processes == threads
