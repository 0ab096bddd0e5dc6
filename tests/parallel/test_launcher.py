"""Who started us is read from the environment alone; MPI and torch.distributed are not touched."""

import fcntl
import os
import subprocess
import sys
import termios

import pytest

from domainpar.parallel.launcher import Launcher, address, alone_in_job, detect, first_host, started_as_root

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "PMI_FD": "7"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "3",
    "PRTE_LAUNCHED": "1",
}
SLURM_JOB = {"SLURM_JOB_ID": "123456", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "gpu[08-11]"}
SRUN = SLURM_JOB | {
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[09-10]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "PMIX_RANK": "3",
    "LSB_JOBID": "77",
}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1"}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f1"}
CRAY_SRUN = {"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_SHARED_SECRET": "5"}
PLAIN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "kind", "has_pmi"),
    [
        (TORCHRUN, "torchrun", False),
        (MPICH, "mpich", True),
        (OPEN_MPI, "openmpi", True),
        (SRUN, "srun", False),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "8"}, "srun", True),
        (SRUN | {"PMIX_RANK": "3"}, "srun", True),
        (SRUN | CRAY_SRUN, "srun", True),
        (JSRUN, "jsrun", True),
        ({name: value for name, value in JSRUN.items() if "OMPI" not in name}, "jsrun", True),
        (PALS, "mpich", True),
        (FLUX, "flux", True),
        (FLUX | {"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_FD": "9"}, "flux", True),
        (FLUX | {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"} | MPICH, "mpich", True),
        (PLAIN, "environment", False),
    ],
)
def test_rank_and_size_are_found_for_every_launcher(environ, kind, has_pmi):
    launcher = detect(environ)
    assert (launcher.kind, launcher.has_pmi) == (kind, has_pmi)
    assert (launcher.rank, launcher.size) == (3, 8)


def test_the_command_that_was_typed_is_named():
    assert [detect(environ).command for environ in (PALS, JSRUN, FLUX)] == ["mpiexec (PALS)", "jsrun", "flux run"]


def test_without_a_launcher_there_is_one_rank():
    launcher = detect({"HOME": "/home/me"})
    assert (launcher.kind, launcher.rank, launcher.size) == ("none", 0, 1)


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_a_batch_script_or_interactive_shell_is_not_a_rank(step):
    assert detect(SLURM_JOB).kind == "none"
    assert detect(SLURM_JOB | {"SLURM_STEP_ID": step}).kind == "none"


PTY = {"SLURM_PTY_PORT": "40001", "SLURM_PTY_WIN_COL": "120", "SLURM_PTY_WIN_ROW": "40"}


@pytest.mark.parametrize("pmi", [{}, {"PMI_RANK": "3", "PMI_SIZE": "8"}, {"PMIX_RANK": "3"}])
def test_what_is_typed_at_the_terminal_of_srun_is_alone_and_tasks_are_ranks(pmi):
    assert detect(SRUN | PTY | pmi, typed=True).kind == "none"
    assert detect(SRUN | PTY | pmi, typed=False).size == 8, "srun --pty itself, or srun inside of srun --pty bash"
    assert detect(SRUN | pmi, typed=True).size == 8
    assert detect(SRUN | PTY | {"SLURM_PROCID": "0"} | MPICH, typed=True).size == 8, "mpiexec in that shell"


def test_one_process_in_a_job_of_several_tasks_is_told_what_starts_them():
    assert [alone_in_job({}), alone_in_job(SLURM_JOB | {"SLURM_NTASKS": "1"})] == ["", ""]
    assert "16 tasks, started by a script or shell, not srun: srun -n 16 " in alone_in_job(SLURM_JOB)
    assert "started by srun --pty: srun --overlap -n 16 " in alone_in_job(SLURM_JOB | PTY)
    by_node = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    assert "srun -n 8 " in alone_in_job(by_node)


@pytest.mark.parametrize(("environ", "kind"), [(MPICH, "mpich"), (OPEN_MPI, "openmpi"), (TORCHRUN, "torchrun")])
def test_a_launcher_inside_a_slurm_job_comes_before_inherited_variables(environ, kind):
    inherited = SRUN | {"SLURM_PROCID": "0"}
    launcher = detect(inherited | environ)
    assert (launcher.kind, launcher.rank) == (kind, 3)


def test_an_mpiexec_that_slurm_knows_nothing_of_is_told_by_its_own_numbers():
    # Intel MPI gives no MPI_LOCALRANKID; its ranks inherit the variables of the one task that started them.
    intel = {"PMI_RANK": "3", "PMI_SIZE": "8"}
    launcher = detect(SRUN | {"SLURM_PROCID": "0"} | intel)
    assert (launcher.kind, launcher.rank) == ("mpich", 3)


def test_torchrun_comes_before_the_mpiexec_around_it():
    assert detect(MPICH | TORCHRUN).kind == "torchrun"


def test_pmix_alone_leaves_the_size_to_mpi():
    launcher = detect({"PMIX_RANK": "3"})
    assert (launcher.kind, launcher.rank, launcher.size) == ("pmix", 3, None)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
    ],
)
def test_half_an_environment_is_refused_with_the_variable_named(environ, words):
    with pytest.raises(ValueError, match=words):
        detect(environ)
    assert started_as_root(environ)


def test_the_meeting_point_is_the_masters_or_derived_from_the_slurm_step():
    assert address(detect(PLAIN), {"MASTER_ADDR": "n1", "MASTER_PORT": "77"}) == ("n1", 77)
    host, port = address(detect(SRUN), SRUN)
    assert host == "gpu09"
    assert 15_000 <= port < 25_000
    assert address(detect(SRUN), SRUN | {"SLURM_STEP_ID": "3"})[1] != port
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        address(Launcher("environment", "x", 0, 2), PLAIN)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[08-11,14],n1", "gpu08"), ("a[3,5]-ib,b", "a3-ib"), ("c-0-[7-9]", "c-0-7")],
)
def test_the_first_host_of_a_slurm_list(nodes, first):
    assert first_host(nodes) == first


def test_in_a_shell_of_srun_without_its_terminal_that_of_the_task_tells_and_nothing_is_refused():
    ours, its = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"],
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(its, termios.TIOCSCTTY, 0),
        stdout=subprocess.PIPE,
    ) as shell:
        assert shell.stdout.readline() == b"1\n"
        typed = SRUN | PTY | {"SLURM_PROCID": "0", "SLURM_TASK_PID": str(shell.pid)}
        kinds = seen_without_terminal(typed)
        shell.kill()
    assert kinds == "none 1"
    assert seen_without_terminal(typed | {"SLURM_TASK_PID": "self"}) == "srun 8", "a task of an inner srun"
    with pytest.raises(ValueError, match=r"srun --overlap -n"):
        detect(SRUN | PTY)
    os.close(ours)
    os.close(its)


def seen_without_terminal(environ):
    """Launcher and size that a process in a session of its own sees; `self`: of its own number."""
    program = "import os, sys; from domainpar.parallel.launcher import detect; e = eval(sys.argv[1]); "
    program += "e |= {'SLURM_TASK_PID': str(os.getpid())} if e['SLURM_TASK_PID'] == 'self' else {}; "
    program += "seen = detect(e); print(seen.kind, seen.size)"
    command = [sys.executable, "-c", program, repr(environ)]
    return subprocess.run(command, start_new_session=True, capture_output=True, text=True, check=True).stdout.strip()
