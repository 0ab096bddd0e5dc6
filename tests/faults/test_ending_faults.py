"""A rank that raises, dies, hangs or freezes: the whole job ends soon, says why once, and nothing is lost."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from jobs import MPIEXEC, TORCHRUN, small_training, started
from marks import fault, slow_fault

from domainpar.tracking.events.store import EventStore

needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec or no mpi4py")
MPI = pytest.param("mpiexec", marks=needs_mpi)
LAUNCHERS = [MPI, TORCHRUN]
long = pytest.mark.faults

PHASES = ["load", "forward", "halo_fwd", "backward", "halo_bwd", "reduce", "optimizer", "evaluate", "close"]
DEADLY = ["load", "halo_fwd:0", "halo_bwd:0", "optimizer", "save:files"]


def nothing_is_lost(store: Path, out: Path) -> None:
    """Every event of the store is whole, and the run's last checkpoint loads."""
    events = EventStore(store)
    for record in events.records:
        events.verify(record)
    with started(None, 1, small_training(store, out, "--resume")) as job:
        assert job.wait().code == 0, job.text


def train(launcher, num_ranks, store, out, fault, *more, timeout=150.0):
    with started(launcher, num_ranks, small_training(store, out, *more), fault=fault) as job:
        return job.wait(timeout), job.text


def check_raised(text: str, rank: int, num_ranks: int) -> None:
    assert text.count(f"--- rank {rank} of {num_ranks} failed ---") == 1
    assert text.count("domainpar: error:") == 1
    assert f"| rank {rank}/{num_ranks} host " in text


@fault(29)
@pytest.mark.parametrize("launcher", [MPI, slow_fault(TORCHRUN)])
def test_an_error_on_one_rank_ends_all_and_names_rank_step_phase_and_event(launcher, store, tmp_path, measured):
    job, text = train(launcher, 2, store, tmp_path / "run", "rank=1,at=forward,step=2,do=raise")
    measured(f"raise, 2 ranks, {launcher}", job.seconds)
    assert job.code == 1
    check_raised(text, 1, 2)
    assert "RuntimeError: fault on purpose at forward | event " in text
    assert "| step 2 phase forward\n" in text


@fault(29)
@long
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("at", PHASES)
def test_an_error_anywhere_ends_eight_ranks(launcher, at, store, tmp_path, measured):
    job, text = train(launcher, 8, store, tmp_path / "run", f"rank=5,at={at},do=raise")
    measured(f"raise, 8 ranks, {launcher}", job.seconds)
    measured(f"raise, 8 ranks, {launcher}, the ranks alone", job.seconds_of_ranks)
    assert job.code == 1
    check_raised(text, 5, 8)


@fault(30)
@long
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("at", DEADLY)
def test_a_killed_rank_ends_all_and_nothing_is_lost(launcher, rank, at, store, tmp_path, measured):
    if at == "save:files" and rank != 0:
        pytest.skip("rank 0 saves")
    out = tmp_path / "run"
    # Events stay loaded after the first epoch, of three steps; the first checkpoint is that of step 2.
    step = {"save:files": "", "load": ",step=2"}.get(at, ",step=4")
    more = ["--checkpoint-every", "2"]
    job, text = train(launcher, 4, store, out, f"rank={rank},at={at}{step},do=kill", *more)
    measured(f"kill -9, 4 ranks, {launcher}", job.seconds)
    measured(f"kill -9, 4 ranks, {launcher}, the ranks alone", job.seconds_of_ranks)
    assert job.code not in (0, 2), text
    if at != "save:files":  # else it was the first checkpoint, and there is none yet
        nothing_is_lost(store, out)


@fault(31)
@long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_do_not_outlive_a_killed_launcher(launcher, store, tmp_path, measured):
    with started(launcher, 3, small_training(store, tmp_path / "run", epochs=2000)) as job:
        job.wait_for("step=3 ")
        began = time.time()
        os.kill(job.process.pid, signal.SIGKILL)
        job.wait()
        measured(f"kill -9 of {launcher} itself", job.ended - began)
        assert job.ended - began < 10


@fault(33)
@long
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("at", ["forward", "halo_bwd:0", "optimizer"])
def test_a_rank_that_hangs_is_named_first_with_the_line_it_is_in(launcher, at, store, tmp_path, measured):
    fault = f"rank=2,at={at},step=2,do=sleep:1000"
    job, text = train(launcher, 4, store, tmp_path / "run", fault, "--timeout", "4")
    measured(f"hang, beyond the timeout, {launcher}", job.seconds - 4)
    assert job.code == 1
    board = text[text.index("Last seen:") :].splitlines()
    assert board[1].startswith("  rank 2 on ")
    assert re.search("not waiting for others, at .*on_purpose.py:[0-9]+   <- the others wait for it", board[1])
    assert "domainpar: error: rank 2 did not come: rank " in text
    assert "| rank 2/4 host " in text
    boards = [path.read_text() for path in (tmp_path / "run" / "faults").iterdir()]
    assert any(kept.splitlines()[1].startswith("  rank 2 on ") for kept in boards)


@fault(33)
@long
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_frozen_is_named(launcher, rank, store, tmp_path):
    fault = f"rank={rank},at=forward,step=2,do=freeze"
    with started(launcher, 3, small_training(store, tmp_path / "run", "--timeout", "4"), fault=fault) as job:
        job.wait_for("domainpar: error: ")
        for frozen in job.ranks():  # whether a launcher can end a frozen process is not ours to say
            frozen.kill()
        assert job.wait().code != 0
        if rank != 0:  # who holds the board cannot be read from it
            assert "no sign of life" in job.text
            assert f"domainpar: error: rank {rank} did not come: " in job.text


@long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_exit_without_a_word_ends_all(launcher, store, tmp_path, measured):
    job, _ = train(launcher, 3, store, tmp_path / "run", "rank=1,at=backward,step=1,do=exit")
    measured(f"exit without a word, {launcher}", job.seconds)
    assert job.code not in (0, 2)
