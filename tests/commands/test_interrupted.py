"""Runs that are interrupted by signals, as schedulers and people send them: stopped with a checkpoint, or at once."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from random_store import write_random_store

from domainpar import train
from domainpar.testing import find_mpiexec, run_command
from domainpar.training.checkpoint_files import CheckpointFiles

SMALL = "--hidden 16 --graph-iters 1 --lr 0.01".split()
MPIEXEC = find_mpiexec()
slow = partial(pytest.param, marks=pytest.mark.faults)
needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec or no mpi4py")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), num_train=2, num_val=0)


def command(store, out, *flags, num_ranks=1):
    launcher = [] if num_ranks == 1 else [MPIEXEC, "-n", str(num_ranks)]
    words = ["-m", "domainpar.train", "--store", str(store), "--out", str(out), *SMALL, *flags]
    return [*launcher, sys.executable, *words]


@contextmanager
def started(words, tmp_path, **environment):
    """A program at work; its output, standard error too, goes to a file. Nothing of it is left afterwards."""
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "printed").open("wb") as printed:
        process = subprocess.Popen(
            words,
            stdout=printed,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | paths | environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(there, process):
    give_up_at = time.monotonic() + 60
    while not there():
        assert process.poll() is None, "it ended before it was asked to"
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def run_json(out):
    return json.loads((out / "run.json").read_text())


def steps(out):
    path = out / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def assert_preempted(out, printed):
    """Stopped with a checkpoint of its last step, and said how to go on; returns that step."""
    about = run_json(out)
    assert about["state"] == "preempted", printed
    assert steps(out) == list(range(1, about["steps"] + 1))
    assert CheckpointFiles(out / "checkpoints").choose(strict=True).name == f"step_{about['steps']:06d}"
    assert not (out / "run.lock").exists()
    assert "Traceback" not in printed
    assert printed.rstrip().endswith(f" -m domainpar.train --out {out} --resume")
    return about["steps"]


def assert_goes_on(store, out, step):
    """Resumed for three more steps, it ends with the bits of a run that nobody stopped."""
    until = ["--epochs", "100000", "--max-steps", str(step + 3)]
    assert train.main(["--out", str(out), "--resume", *until]) == 0
    assert train.main(["--store", str(store), *SMALL, *until, "--out", str(out.with_name("whole"))]) == 0
    assert run_json(out)["parameters_sha256"] == run_json(out.with_name("whole"))["parameters_sha256"]


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGUSR1, slow(signal.SIGTERM), slow(signal.SIGINT)])
def test_a_signal_to_the_launcher_stops_all_ranks_at_one_step_and_the_run_goes_on_to_the_same_bits(
    store, tmp_path, number
):
    out = tmp_path / "run"
    with started(command(store, out, "--epochs", "100000", num_ranks=2), tmp_path) as process:
        wait_until(lambda: len(steps(out)) > 2, process)
        process.send_signal(number)
        code = process.wait(60)
    printed = (tmp_path / "printed").read_text()
    assert code == 0, printed
    assert_goes_on(store, out, assert_preempted(out, printed))


FAULTS = {
    "before the ranks meet": ("rank=1,at=init,do=signal:USR1", 0),
    "while a checkpoint is written": ("rank=0,at=save:files,do=signal:USR1", 3),
}
MORE_FAULTS = {
    "one rank, in a step": ("rank=1,at=forward,step=2,do=signal:USR1", 3),
    "after the ranks have met": ("rank=1,at=joined,do=signal:USR1", 0),
    "terminated while rank 0 sets up": ("rank=0,at=joined,do=signal:TERM", 0),
    "while a checkpoint gets its name": ("rank=0,at=save:rename,do=signal:TERM", 3),
}
MOMENTS = [pytest.param(*of, id=name) for name, of in FAULTS.items()]
MOMENTS += [slow(*of, id=name) for name, of in MORE_FAULTS.items()]


@needs_mpi
@pytest.mark.parametrize(("fault", "step"), MOMENTS)
def test_a_signal_at_an_awkward_moment_stops_the_run_at_the_next_step_with_a_whole_checkpoint(
    store, tmp_path, fault, step
):
    """A checkpoint is written after step 2, the end of the first epoch."""
    out = tmp_path / "run"
    words = command(store, out, "--epochs", "1000", num_ranks=2)
    code, printed = run_command(words, 60, DOMAINPAR_FAULT=fault)
    assert code == 0, printed
    assert assert_preempted(out, printed) == step
    assert train.main(["--out", str(out), "--resume", "--epochs", "2"]) == 0


@pytest.mark.parametrize("first", [signal.SIGINT, slow(signal.SIGUSR1)])
def test_ctrl_c_after_a_first_signal_ends_at_once_with_one_line(store, tmp_path, first):
    out = tmp_path / "run"
    asleep = {"DOMAINPAR_FAULT": "rank=0,at=forward,step=3,do=sleep:60"}
    with started(command(store, out, "--epochs", "100000", "--checkpoint-every", "1"), tmp_path, **asleep) as process:
        wait_until(lambda: len(steps(out)) == 3, process)
        time.sleep(0.3)
        process.send_signal(first)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        code = process.wait(10)
    printed = (tmp_path / "printed").read_text()
    assert code == 130, printed
    assert printed.count("domainpar: error: interrupted") == 1
    assert "Traceback" not in printed
    assert run_json(out)["state"] == "failed"
    assert CheckpointFiles(out / "checkpoints").choose(strict=True).name == "step_000003"
    assert train.main(["--out", str(out), "--resume", "auto", "--max-steps", "4"]) == 0


def test_a_killed_run_goes_on_with_the_command_that_began_it(store, tmp_path, capfd):
    """Its lock stays behind; the process that it names is gone."""
    out = tmp_path / "run"
    words = command(store, out, "--epochs", "3", "--resume", "auto")
    code, _ = run_command(words, 60, DOMAINPAR_FAULT="rank=0,at=save:rename,step=4,do=kill")
    assert code == -signal.SIGKILL
    assert (out / "run.lock").exists()
    assert CheckpointFiles(out / "checkpoints").names() == ["step_000002"]
    assert train.main(words[words.index("--store") :]) == 0
    said = capfd.readouterr().out
    assert said.count("run.lock was left by an earlier run: process ") == 1
    assert "steps 3 to 6" in said
    assert train.main(["--store", str(store), *SMALL, "--epochs", "3", "--out", str(tmp_path / "whole")]) == 0
    assert run_json(out)["parameters_sha256"] == run_json(tmp_path / "whole")["parameters_sha256"]


def test_a_run_that_never_saved_is_begun_anew_in_its_place(store, tmp_path, capfd):
    out = tmp_path / "run"
    words = command(store, out, "--epochs", "2", "--resume", "auto")
    code, _ = run_command(words, 60, DOMAINPAR_FAULT="rank=0,at=save:files,do=kill")
    assert code == -signal.SIGKILL
    assert steps(out) == [1, 2]
    assert train.main(words[words.index("--store") :]) == 0
    assert "holds a run that never saved a checkpoint; starting anew" in capfd.readouterr().out
    assert steps(out) == [1, 2, 3, 4]
    assert Path(out, "checkpoints", "last").read_text() == "step_000004\n"
