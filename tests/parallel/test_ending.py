"""However a rank ends, all ranks end soon, the reason is printed once, and the exit code tells which kind it was."""

import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from marks import fault

from domainpar.testing import find_mpiexec, patient, run_command

PROGRAM = str(Path(__file__).with_name("ending_program.py"))
MPIEXEC = find_mpiexec()
needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec or no mpi4py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]


def launch(launcher: list[str], how: str) -> tuple[int, str]:
    """Exit code and output. Ranks that nobody ends sleep, or wait for others, for 100 s."""
    python = [] if launcher == TORCHRUN else [sys.executable]
    return run_command([*launcher, *python, PROGRAM, how], timeout=90)


@needs_mpi
@pytest.mark.slow
def test_under_mpiexec_an_error_on_one_rank_aborts_all():
    code, output = launch([MPIEXEC, "-n", "3"], "fail")
    assert code == 1
    assert output.count("Traceback") == 1
    assert "--- rank 1 of 3 failed ---" in output
    assert "domainpar: error: KeyError: 'no such thing' | rank 1/3 host " in output
    assert "| step 1 phase working\n" in output


@needs_mpi
def test_under_mpiexec_what_one_rank_refuses_is_said_once_with_exit_code_two():
    code, output = launch([MPIEXEC, "-n", "2"], "refuse")
    assert code == 2
    assert output.strip().endswith("event 7 has no truth | rank 1/2")


@pytest.mark.slow
def test_under_torchrun_an_error_ends_all():
    code, output = launch(TORCHRUN, "fail everywhere")
    assert code == 1
    assert output.count("domainpar: error: KeyError: 'no such thing'") == 1


def launch_by_hand(num_ranks: int, how: str) -> tuple[list[str], str]:
    """Start every rank as `RANK=... WORLD_SIZE=... program`; returns exit codes and output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = range(num_ranks)
    start = " ".join(f"RANK={rank} '{sys.executable}' '{PROGRAM}' '{how}' & p{rank}=$!;" for rank in ranks)
    collect = " ".join(f'wait $p{rank}; codes="$codes $?";' for rank in ranks)
    _, output = run_command(["/bin/sh", "-c", f"{start} {collect} echo codes $codes"], timeout=90, **shared)
    return output.splitlines()[-1].split()[1:], output


@fault(29)
def test_without_help_from_a_launcher_an_error_ends_even_those_that_compute():
    codes, output = launch_by_hand(2, "fail while others compute")
    assert codes == ["1", "1"]
    assert output.count("Traceback") == 1
    assert "--- rank 0 of 2 failed ---" in output


@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_rank_zero():
    codes, output = launch_by_hand(2, "rank 0 is killed while others compute")
    assert codes == ["137", "1"]
    assert re.search("domainpar: error: rank 0.* is gone.* rank 1", output)


@fault(1)
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="no mpi4py")
def test_a_launcher_of_another_mpi_library_is_refused():
    pretended = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"}
    code, output = run_command([sys.executable, PROGRAM, "well"], timeout=90, **pretended)
    assert code == 2
    assert re.match("(?s)domainpar: error: .*8 processes .OMPI_COMM_WORLD_SIZE=8.*MPI libraries", output)
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_program_without_a_launcher_is_one_rank():
    done = subprocess.run(
        [sys.executable, PROGRAM, "well"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
        timeout=patient(90),
    )
    assert done.stdout == "rank 0 of 1 over threads\n", done.stderr
