"""Runs that are interrupted by signals, as schedulers and people send them: stopped with a checkpoint, or at once."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from faults.on_purpose import switch
from forked import forked
from jobs import MPIEXEC, started
from marks import fault, slow_fault
from random_store import write_random_store
from waiting import wait_until

from domainpar import train
from domainpar.__main__ import COMMANDS
from domainpar.runs.checkpoint_files import CheckpointFiles
from domainpar.testing import run_command

BUFFERED = {"PYTHONUNBUFFERED": ""}  # as users have it: Python then keeps what it prints into a pipe or a file
SMALL = "--hidden 16 --graph-iters 1 --lr 0.01".split()
needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec or no mpi4py")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), num_train=2, num_val=0)


def words(store, out, *flags):
    return ["train", "--store", str(store), "--out", str(out), *SMALL, *flags]


def run_json(out):
    return json.loads((out / "run.json").read_text())


def steps(out):
    path = out / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def steps_said(printed):
    return [line.split()[2] for line in printed.splitlines() if line.startswith("split=train")]


def assert_preempted(out, printed):
    """Stopped with a checkpoint of its last step, and said how to go on; returns that step."""
    about = run_json(out)
    assert about["state"] == "preempted", printed
    assert steps(out) == list(range(1, about["steps"] + 1))
    assert CheckpointFiles(out / "checkpoints").choose(strict=True).name == f"step_{about['steps']:06d}"
    assert not (out / "run.lock").exists()
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith("next: ")
    assert printed.rstrip().endswith(f" -m domainpar.train --out {out} --resume")
    return about["steps"]


def assert_goes_on(store, out, step):
    """Resumed for three more steps, it ends with the bits of a run that nobody stopped."""
    until = ["--epochs", "100000", "--max-steps", str(step + 3)]
    assert train.main(["--out", str(out), "--resume", *until]) == 0
    assert train.main(["--store", str(store), *SMALL, *until, "--out", str(out.with_name("whole"))]) == 0
    assert run_json(out)["parameters_sha256"] == run_json(out.with_name("whole"))["parameters_sha256"]
    assert steps(out) == steps(out.with_name("whole"))


@fault(40, 41)
@needs_mpi
@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_stops_all_ranks_at_one_step_and_the_run_goes_on_to_the_same_bits(
    store, tmp_path, number
):
    out = tmp_path / "run"
    with started("mpiexec", 2, words(store, out, "--epochs", "100000")) as job:
        job.wait_until(lambda: len(steps(out)) > 2, 60)
        job.process.send_signal(number)
        job.wait(60)
    assert job.code == 0, job.text
    assert_goes_on(store, out, assert_preempted(out, job.text))


@fault(40)
@needs_mpi
@pytest.mark.slow
def test_one_of_two_processes_that_gets_sigusr1_stops_both_with_a_checkpoint_to_go_on_from(store, tmp_path):
    out = tmp_path / "run"
    with started("mpiexec", 2, words(store, out, "--epochs", "100000")) as job:
        job.wait_until(lambda: len(steps(out)) > 2, 60)
        ranks = job.ranks()
        assert len(ranks) == 2
        ranks[-1].send_signal(signal.SIGUSR1)
        job.wait(60)
    assert job.code == 0, job.text
    assert_goes_on(store, out, assert_preempted(out, job.text))


MOMENTS = {
    "while a checkpoint is written": ("rank=0,at=save:files,do=signal:USR1", 3),
    "while a checkpoint gets its name": ("rank=0,at=save:rename,do=signal:TERM", 3),
    "before the ranks meet": ("rank=1,at=init,do=signal:USR1", 0),
    "after the ranks have met": ("rank=1,at=joined,do=signal:USR1", 0),
    "terminated while rank 0 sets up": ("rank=0,at=joined,do=signal:TERM", 0),
    "one rank, in a step": ("rank=1,at=forward,step=2,do=signal:USR1", 3),
}


@fault(42)
@pytest.mark.faults
@needs_mpi
@pytest.mark.parametrize(("fault", "step"), MOMENTS.values(), ids=MOMENTS)
def test_a_signal_at_an_awkward_moment_stops_the_run_at_the_next_step_with_a_whole_checkpoint(
    store, tmp_path, fault, step
):
    """A checkpoint is written after step 2, the end of the first epoch."""
    out = tmp_path / "run"
    with started("mpiexec", 2, words(store, out, "--epochs", "1000"), fault=fault) as job:
        assert job.wait(60).code == 0, job.text
    assert assert_preempted(out, job.text) == step
    assert train.main(["--out", str(out), "--resume", "--epochs", "2"]) == 0


@fault(41)
@pytest.mark.parametrize("first", [signal.SIGINT, slow_fault(signal.SIGUSR1)])
def test_ctrl_c_after_a_first_signal_ends_at_once_with_one_line(store, tmp_path, first):
    out = tmp_path / "run"
    asleep = "rank=0,at=forward,step=3,do=sleep:600"
    endless = words(store, out, "--epochs", "100000", "--checkpoint-every", "1")[1:]
    with forked(train.main, endless, DOMAINPAR_FAULT=switch(asleep)) as program:
        wait_until(lambda: "fault on purpose" in program.text)
        os.kill(program.process.pid, first)
        wait_until(lambda: "Ctrl-C (again) ends at once" in program.text)
        assert program.process.is_alive()
        os.kill(program.process.pid, signal.SIGINT)
        code, printed = program.wait()
    assert code == 130, printed
    assert printed.count("domainpar: error: interrupted") == 1
    assert "Traceback" not in printed
    assert run_json(out)["state"] == "failed"
    assert CheckpointFiles(out / "checkpoints").choose(strict=True).name == "step_000003"
    assert train.main(["--out", str(out), "--resume", "auto", "--max-steps", "4"]) == 0


def test_every_command_prints_each_line_when_it_is_complete():
    """Each in a copy of a process that has read them all, whose output waits as Python makes it wait in a file."""
    program = (
        "import importlib, os, sys; from domainpar.tracking import command_line\n"
        "def parsed(*given): print('said'); os._exit(7)\n"
        "command_line.parse = parsed\n"
        "commands = [importlib.import_module('domainpar.' + name) for name in sys.argv[1:]]\n"
        "for command in commands:\n"
        "    if not os.fork(): command.main([])\n"
        "    print(command.__name__, os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)"
    )
    names = sorted(COMMANDS)
    said = "".join(f"said\ndomainpar.{name} 7\n" for name in names)
    assert run_command([sys.executable, "-c", program, *names], 60, **BUFFERED) == (0, said)


@fault(30)
def test_a_killed_run_has_its_lines_in_the_log_and_goes_on_with_the_command_that_began_it(store, tmp_path, capfd):
    """Its lock stays behind; the process that it names is gone."""
    out = tmp_path / "run"
    again = words(store, out, "--epochs", "3", "--log-every", "1", "--resume", "auto")
    with started(None, 1, again, fault="rank=0,at=save:rename,step=4,do=kill", **BUFFERED) as job:
        assert job.wait(60).code == -signal.SIGKILL
    assert steps_said(job.text) == ["step=1", "step=2", "step=3", "step=4"]
    assert (out / "run.lock").exists()
    assert CheckpointFiles(out / "checkpoints").names() == ["step_000002"]
    assert train.main(again[1:]) == 0
    said = capfd.readouterr().out
    assert said.count("run.lock was left") == 1
    assert "steps 3 to 6" in said
    assert train.main(["--store", str(store), *SMALL, "--epochs", "3", "--out", str(tmp_path / "whole")]) == 0
    assert run_json(out)["parameters_sha256"] == run_json(tmp_path / "whole")["parameters_sha256"]


def test_a_run_that_never_saved_is_begun_anew_in_its_place(store, tmp_path, capfd):
    out = tmp_path / "run"
    again = words(store, out, "--epochs", "2", "--resume", "auto")
    with forked(train.main, again[1:], DOMAINPAR_FAULT=switch("rank=0,at=save:files,do=kill")) as program:
        assert program.wait()[0] == -signal.SIGKILL
    assert steps(out) == [1, 2]
    assert train.main(again[1:]) == 0
    assert "never saved a checkpoint; starting anew" in capfd.readouterr().out
    assert steps(out) == [1, 2, 3, 4]
    assert Path(out, "checkpoints", "last").read_text() == "step_000004\n"
