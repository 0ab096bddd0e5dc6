"""Hundreds of steps with a fault in every start: in the end the same parameters as without, to the last bit."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import psutil
import pytest
from jobs import MPIEXEC, TORCHRUN, small_training, started
from random_store import write_random_store

pytestmark = [pytest.mark.faults, pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec or no mpi4py")]

RANKS, STEPS = 4, 500
STEPS_A_FAULT = 25

ANYWHERE = ["load", "forward", "halo_fwd:0", "backward", "halo_bwd:0", "reduce", "optimizer", "stepped", "boundary"]
SAVING = ["save", "save:files", "save:rename", "save:pointer", "save:drop"]
"""Places of rank 0 alone."""


def random_fault(draw: random.Random, step: int) -> str:
    """A fault of any kind, at a step soon after this one."""
    at, rank = draw.choice(ANYWHERE), draw.randrange(RANKS)
    kind = draw.choice(["die", "die", "save", "spoil", "stop", "hang"])
    do = draw.choice(["kill", "raise", "exit", "oom"])
    if kind == "save":
        at, rank, do = draw.choice(SAVING), 0, draw.choice(["kill", "raise", "full"])
    elif kind == "spoil":
        at, do = draw.choice([("loss", "nan"), ("stepped", "flip"), ("optimizer", "nan")])
    elif kind == "stop":
        do = draw.choice(["signal:USR1", "signal:TERM"])
    elif kind == "hang":
        do = "sleep:60"
    if at == "load" or kind == "save":  # the first one of a start: events stay loaded, and not every step is saved
        return f"rank={rank},at={at},do={do}"
    return f"rank={rank},at={at},step={step + draw.randrange(STEPS_A_FAULT)},do={do}"


def step_of(run: Path) -> int:
    """Step of the last checkpoint."""
    pointer = run / "checkpoints" / "last"
    return int(pointer.read_text().strip().removeprefix("step_")) if pointer.is_file() else 0


def words(store: Path, out: Path, last_step: int = STEPS) -> list[str]:
    often = ["--checkpoint-every", "7", "--max-steps", str(last_step), "--check-replicas-every", "5", "--timeout", "4"]
    return small_training(store, out, *often, "--resume", "auto", epochs=STEPS)


def parameters(run: Path) -> str:
    about = json.loads((run / "run.json").read_text())
    assert (about["state"], about["steps"]) == ("done", STEPS)
    return str(about["parameters_sha256"])


def test_a_soak_with_faults_ends_with_the_same_bits(store, tmp_path):
    draw, faults = random.Random(2026), []
    disturbed = tmp_path / "disturbed"
    while step_of(disturbed) < STEPS:
        assert len(faults) < 100, f"no progress: {faults[-5:]}"
        fault = random_fault(draw, step_of(disturbed))
        launcher = draw.choice(["mpiexec", "mpiexec", TORCHRUN])
        # Some faults cost no more than a warning: such a start ends by itself, for another fault to come.
        last_step = min(STEPS, step_of(disturbed) + STEPS_A_FAULT + 5)
        with started(launcher, RANKS, words(store, disturbed, last_step), fault=fault) as job:
            job.wait(300)
            faults.append(f"{fault} ({launcher}): exit {job.code}, step {step_of(disturbed)}")
            sys.stderr.write(f"  {faults[-1]}\n")
            assert job.code != 2, job.text
    with started("mpiexec", RANKS, words(store, disturbed)) as job:
        assert job.wait(300).code == 0, job.text
    with started("mpiexec", RANKS, words(store, tmp_path / "undisturbed")) as job:
        assert job.wait(300).code == 0, job.text
    assert parameters(disturbed) == parameters(tmp_path / "undisturbed")
    sys.stderr.write(f"\n{STEPS} steps, {len(faults)} starts with a fault: parameters {parameters(disturbed)[:16]}\n")


def test_memory_does_not_grow_over_a_thousand_steps(tmp_path):
    """It does before: allocators keep what is freed, and settle down after some ten thousand small steps."""
    store = write_random_store(tmp_path / "store", num_nodes=60, num_edges=200, num_tiles=4, compared=False)
    words = small_training(store, tmp_path / "run", "--max-steps", "12100", "--threads", "1", epochs=12_100)
    seen = []
    with started("mpiexec", 2, words) as job:
        for step in (100, 1080, 11_000, 12_050):
            job.wait_for(f"step={step} ", timeout=600)
            seen.append([_bytes(rank) for rank in job.ranks()])
        assert job.wait().code == 0, job.text
    assert [len(ranks) for ranks in seen] == [2, 2, 2, 2]
    growth = max(after - before for before, after in zip(seen[2], seen[3]))
    at = [f"{max(ranks) / 2**20:.2f}" for ranks in seen]
    sys.stderr.write(
        f"\nmemory of a rank: {at[0]} MiB at step 100, {at[1]} at 1,080, {at[2]} at 11,000, {at[3]} at 12,050: "
        f"{growth} bytes in 1,050 steps\n"
    )
    assert max(after - before for before, after in zip(seen[0], seen[1])) < 4 * 2**20
    assert growth < 2**17


def _bytes(process: psutil.Process) -> int:
    """Memory of a process that no other has."""
    return int(process.memory_full_info().uss)
