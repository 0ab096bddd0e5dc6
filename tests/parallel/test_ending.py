"""However a rank ends, all ranks end soon, the reason is printed once, and the exit code tells which kind it was."""

import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from domainpar.testing import find_mpiexec, run_command

PROGRAM = str(Path(__file__).with_name("ending_program.py"))
MPIEXEC = find_mpiexec()
needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec or no mpi4py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]


def launch(launcher: list[str], how: str) -> tuple[int, str, float]:
    began = time.monotonic()
    python = [] if launcher == TORCHRUN else [sys.executable]
    code, output = run_command([*launcher, *python, PROGRAM, how], timeout=40)
    return code, output, time.monotonic() - began


@needs_mpi
def test_under_mpiexec_an_error_on_one_rank_aborts_all():
    code, output, seconds = launch([MPIEXEC, "-n", "3"], "fail")
    assert code == 1
    assert output.count("Traceback") == 1
    assert "--- rank 1 of 3 failed ---" in output
    assert "KeyError: 'no such thing'" in output
    assert seconds < 18, "the others wait in a barrier with a deadline of 30 s"


@needs_mpi
def test_under_mpiexec_what_one_rank_refuses_is_said_once_with_exit_code_two():
    code, output, _ = launch([MPIEXEC, "-n", "3"], "refuse")
    assert code == 2
    assert output.strip() == "error: rank 1: event 7 has no truth"


def test_under_torchrun_an_error_ends_all():
    code, output, seconds = launch(TORCHRUN, "fail everywhere")
    assert code == 1
    assert output.count("KeyError: 'no such thing'") == 1
    assert seconds < 18


def test_without_help_from_a_launcher_an_error_ends_even_those_that_compute():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # One shell starts all ranks and waits for each: its last line holds their exit codes.
    ranks = " ".join(
        f"RANK={rank} '{sys.executable}' '{PROGRAM}' 'fail while others compute' & p{rank}=$!;" for rank in range(3)
    )
    script = f"{ranks} wait $p0; a=$?; wait $p1; b=$?; wait $p2; echo codes $a $b $?"
    began = time.monotonic()
    _, output = run_command(["/bin/sh", "-c", script], timeout=40, **shared)
    assert output.splitlines()[-1] == "codes 1 1 1"
    assert output.count("Traceback") == 1
    assert "--- rank 0 of 3 failed ---" in output
    assert time.monotonic() - began < 18, "the others would sleep for 20 s"


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="no mpi4py")
def test_a_launcher_of_another_mpi_library_is_refused():
    pretended = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"}
    code, output = run_command([sys.executable, PROGRAM, "well"], timeout=40, **pretended)
    assert code == 2
    assert "mpiexec started 8 processes (OMPI_COMM_WORLD_SIZE=8) but mpi4py (" in output
    assert ") sees 1" in output
    assert "Traceback" not in output


def test_a_program_without_a_launcher_is_one_rank():
    done = subprocess.run(
        [sys.executable, PROGRAM, "well"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
        timeout=40,
    )
    assert done.stdout == "rank 0 of 1 over threads\n", done.stderr
