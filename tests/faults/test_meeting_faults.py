"""Ranks that do not come, do not belong together, or have no place to meet: refused soon, once, and by name."""

import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import pytest
from faults.on_purpose import switch
from jobs import free_port
from marks import fault, slow, slow_fault
from torch.distributed import HashStore

import domainpar
from domainpar.common.agreement import agree_on
from domainpar.parallel import meeting, side_channel, start_limit
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.meeting import unsuited
from domainpar.testing import find_mpiexec, patient, run_command

PROGRAM = str(Path(__file__).with_name("meeting_program.py"))
MPIEXEC, WHEEL = find_mpiexec(), "0"
with suppress(PackageNotFoundError):
    WHEEL = version("mpich")
needs_wheel = pytest.mark.skipif(int(WHEEL.split(".")[0]) < 5, reason="no MPICH of the wheel, from 5 on")
needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec or no mpi4py")


class Forked:
    """The process that ranks are copied from; a start of them takes tenths of a second."""

    def __init__(self) -> None:
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("forked_ranks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | variables,
        )

    def start(self, ranks: Sequence[tuple[dict[str, str], Sequence[str]]]) -> tuple[list[str], str]:
        """Start ranks with these variables and words; returns exit codes and output."""
        give_up = threading.Timer(patient(90), self._end)
        give_up.start()
        self._process.stdin.write(json.dumps(ranks) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        give_up.cancel()
        assert answer, "ranks were still at work after 90 s"
        codes, output = json.loads(answer)
        return codes, output

    def by_hand(self, ranks: Sequence[int], size: int, *words: str, **more: str) -> tuple[list[str], str]:
        """Start some of `size` ranks as `RANK=... program` does."""
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | more
        return self.start([({"RANK": str(rank)} | shared, words) for rank in ranks])

    def by_srun(self, pmi: dict[str, str], size: int, *words: str) -> tuple[list[str], str]:
        """Start ranks with the variables of tasks of srun, and of its `--mpi=...`, in which `{}` is the rank."""
        job = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.1"}
        step = job | {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_PROCID": "{}"} | pmi
        ranks = [{name: value.format(rank) for name, value in step.items()} for rank in range(size)]
        return self.start([(rank, words) for rank in ranks])

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        self._end()
        self._process.communicate()

    def __enter__(self) -> "Forked":
        return self


@pytest.fixture(scope="module")
def forked():
    with Forked() as forked:
        yield forked


@fault(2)
@needs_mpi
@pytest.mark.faults
def test_without_an_mpi_library_mpiexec_is_refused_and_one_process_works():
    missing = {"MPI4PY_LIBMPI": "/no/such/libmpi.so"}
    code, output = run_command([MPIEXEC, "-n", "2", sys.executable, PROGRAM], timeout=90, **missing)
    assert code == 2
    assert output.count("domainpar: error:") == 1
    assert "no MPI library found" in output or "mpi4py does not work here" in output
    assert "hint: pip install 'domainpar[mpi]'" in output
    code, output = run_command([sys.executable, PROGRAM], timeout=90, **missing)
    assert (code, output) == (0, "rank 0 of 1 over threads\n")


PMIX = {"PMIX_RANK": "{}", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
PMI2 = {"PMI_RANK": "{}", "PMI_SIZE": "2", "PMI_JOBID": "7.0"}


@fault(1)
@needs_wheel
@pytest.mark.parametrize(
    ("pmi", "what"), [(PMIX, "by PMIx, which mpi4py's MPICH"), (PMI2, "by srun --mpi=pmi2 mpi4py's MPICH")]
)
def test_what_srun_cannot_start_as_mpi_meets_over_gloo_before_mpi_can_end_it(forked, pmi, what):
    codes, output = forked.by_srun(pmi, 2, "join=30")
    assert codes == ["0", "0"], output
    assert output.count("note: without MPI: ") == output.count(what) == 1
    assert output.count("of 2 over gloo") == 2


@fault(1)
@needs_wheel
def test_under_srun_gloo_touches_no_mpi_and_mpi_that_pmix_cannot_start_is_refused(forked):
    for pmi in (PMIX, PMI2):
        codes, output = forked.by_srun(pmi, 2, "join=30", "transport=gloo")
        assert (codes, sorted(output.splitlines())) == (["0", "0"], ["rank 0 of 2 over gloo", "rank 1 of 2 over gloo"])
    codes, output = forked.by_srun(PMIX, 2, "join=30", "transport=mpi")
    assert codes == ["2", "2"]
    assert output.count("domainpar: error:") == output.count("by PMIx, which mpi4py's MPICH") == 1


TOLD_BOTH, TOLD_ONE, AUTO, OTHER = "both:", "one:", "auto:", "other:"


@pytest.fixture(scope="module")
def in_one_launch():
    """Exit code and lines of three ranks of an mpiexec, which meet in several ways in turn: a launch costs seconds.

    MPI can be started once, so that what is to do without it comes first, and what is refused comes last.
    """
    usual = [sys.executable, PROGRAM]
    ways = [
        f"told={TOLD_BOTH} MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} MPI4PY_LIBMPI=/no/libmpi.so transport=gloo",
        f"told={TOLD_ONE} MASTER_ADDR=nowhere.invalid MASTER_PORT= MPI4PY_LIBMPI= transport=gloo",
        f"told={AUTO} MASTER_ADDR=",
        f"told={OTHER}",
    ]
    words = " then ".join(ways).split()
    command = [MPIEXEC, "-n", "2", *usual, *words, ":", "-n", "1", *usual, *words, "lr=0.5"]
    code, output = run_command(command, timeout=150, PMIX_NAMESPACE="job.1")
    return code, output.splitlines()


def met(in_one_launch, way):
    """What the ranks said when they met in one way."""
    _, lines = in_one_launch
    return sorted(line.removeprefix(way) for line in lines if line.startswith(way))


@fault(1)
@needs_mpi
def test_variables_of_pmix_around_an_mpiexec_are_no_trouble(in_one_launch):
    assert met(in_one_launch, AUTO) == [f"rank {rank} of 3 over mpi" for rank in range(3)], in_one_launch


OF_SRUN = Launcher("srun", "srun", 0, 2, has_pmi=True)


@fault(1)
@pytest.mark.parametrize(
    ("library", "pmi", "with_pmix", "words"),
    [
        ("MPICH Version: 5.0.2", {"PMI_RANK": "0"}, False, "at random"),
        ("MPICH Version: 4.0.2", {"PMI_RANK": "0"}, False, None),
        ("MPICH Version: 4.0.2", {"PMIX_RANK": "0"}, False, "PMIx"),
        ("MPICH Version: 5.0.2", {"PMIX_RANK": "0"}, True, None),
        ("MVAPICH Version: 4.0", {"PMIX_RANK": "0"}, False, "PMIx"),
        ("MPI VERSION : CRAY MPICH version 8.1.29.29", {"PMIX_RANK": "0"}, False, None),
        ("Intel(R) MPI Library 2021.14 for Linux* OS", {"PMI_RANK": "0"}, False, None),
        ("Open MPI v4.1.4", {"PMI_RANK": "0"}, False, "PMI"),
        ("Open MPI v5.0.11", {"PMIX_RANK": "0"}, True, None),
    ],
)
def test_which_libraries_srun_starts_by_which_pmi(library, pmi, with_pmix, words):
    refused = unsuited(OF_SRUN, library, with_pmix, environ=pmi)
    assert refused is None if words is None else words in refused.what
    by_mpiexec = unsuited(Launcher("mpich", "mpiexec", 0, 2, has_pmi=True), library, with_pmix, environ=pmi)
    assert (by_mpiexec is None) == (words != "PMIx")


@fault(4)
@pytest.mark.parametrize("launcher", ["none", slow_fault("mpiexec")])
def test_another_number_of_ranks_than_asked_for_is_refused(forked, launcher):
    if launcher == "mpiexec":
        if MPIEXEC is None:
            pytest.skip("no mpiexec or no mpi4py")
        code, output = run_command([MPIEXEC, "-n", "2", sys.executable, PROGRAM, "ranks=8"], timeout=90)
    else:
        (code,), output = forked.start([({}, ["ranks=8"])])
    assert int(code) == 2
    assert f" 8 ranks, {2 if launcher == 'mpiexec' else 1} started\n" in output
    assert "hint: mpiexec -n 8 " in output


@fault(4)
def test_a_job_of_several_tasks_that_srun_did_not_start_is_told_so_and_runs_alone(forked):
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    codes, output = forked.start([(job, [])])
    assert codes == ["0"]
    assert re.match("WARNING: .* 4 tasks, .*: srun -n 4 python -m ", output), output
    assert output.endswith("\nrank 0 of 1 over threads\n")
    step = job | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[1-2]"}
    pty_of_srun = step | {"SLURM_PTY_PORT": "40001", "SLURM_PTY_WIN_COL": "120", "SLURM_TASK_PID": str(os.getpid())}
    code, output = run_command([*WITH_TERMINAL, sys.executable, "-c", SEEN], 90, **pty_of_srun)
    assert code == 0, output
    assert re.match("none 0 of 1 .* 4 tasks, .*srun --pty: srun --overlap -n 4 ", output)


WITH_TERMINAL = [sys.executable, "-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"]

SEEN = """
from domainpar.parallel.launcher import alone_in_job, detect
seen = detect()
print(seen.kind, seen.rank, "of", seen.size, alone_in_job())
"""
"""What a rank looks at before it meets others, without torch, which takes seconds."""


@fault(4)
@pytest.mark.parametrize("ended", ["", "; exit $?"], ids=["itself", "a script"])
def test_a_task_to_which_srun_gives_a_terminal_is_a_rank_unless_a_shell_in_it_was_told_what_to_start(
    tmp_path, forked, ended
):
    step = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.1"}
    task = step | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    (tmp_path / "seen.py").write_text(SEEN)
    script = f"SLURM_TASK_PID=$$ '{sys.executable}' '{tmp_path / 'seen.py'}'{ended}"
    code, output = run_command([*WITH_TERMINAL, "/bin/sh", "-c", script], 90, **task, SLURM_PTY_PORT="40001")
    assert (code, output.strip()) == (0, "srun 0 of 1")
    assert forked.start([(task, [])]) == (["0"], "rank 0 of 1 over gloo\n")


@fault(6)
def test_a_port_that_is_taken_is_named(forked):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        codes, output = forked.by_hand([0], 2, "join=5", MASTER_PORT=str(port))
    assert codes == ["2"]
    assert f"domainpar: error: port {port} of 127.0.0.1 is taken\nhint: set MASTER_PORT" in output


@fault(6)
@needs_mpi
@pytest.mark.faults
def test_under_mpiexec_a_stale_port_is_not_even_looked_at():
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        stale = {"MASTER_PORT": str(taken.getsockname()[1])}
        command = [MPIEXEC, "-n", "2", sys.executable, PROGRAM, "transport=gloo"]
        code, output = run_command(command, timeout=90, **stale)
    assert code == 0, output
    assert sorted(output.splitlines()) == ["rank 0 of 2 over gloo", "rank 1 of 2 over gloo"]


@fault(6)
@needs_mpi
@pytest.mark.parametrize(
    "way",
    [TOLD_ONE, TOLD_BOTH],
    ids=["an address without a port means nothing", "where both are given, no MPI is loaded"],
)
def test_under_mpiexec_gloo_meets_where_it_was_told_to_and_else_asks_mpi(in_one_launch, way):
    assert met(in_one_launch, way) == [f"rank {rank} of 3 over gloo" for rank in range(3)], in_one_launch


@fault(7)
@pytest.mark.faults
def test_ranks_that_never_start_are_named(forked):
    codes, output = forked.by_hand([0, 2], 4, "join=2")
    assert codes == ["2", "2"]
    assert output.count("domainpar: error:") == 1
    assert "ranks 1, 3 did not join within 2 s; joined: 0, 2" in output


@fault(7)
@pytest.mark.faults
def test_a_rank_zero_that_never_starts_is_named(forked):
    codes, output = forked.by_hand([1], 2, "join=2")
    assert codes == ["2"]
    assert "domainpar: error: rank 1 of 2 could not meet rank 0 at 127.0.0.1:" in output
    assert "within 2 s" in output
    assert "frame #" not in output, "torch's C++ frames say nothing to a user"


@fault(7)
@needs_mpi
@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the start of MPI is for Linux")
@pytest.mark.parametrize(
    ("late", "joined"), [("rank=2,at=init,do=sleep:1000", "0, 1"), ("rank=0,at=init,do=freeze", "1, 2")]
)
@pytest.mark.faults
def test_a_rank_that_never_comes_to_the_start_of_mpi_is_named_once_and_all_end(late, joined):
    words = [MPIEXEC, "-n", "3", sys.executable, PROGRAM, "join=3"]
    code, output = run_command(words, 60, DOMAINPAR_FAULT=switch(late))
    assert code != 0, "that of the launcher, which kills the one that is late"
    assert output.count("domainpar: error:") == 1, output
    said = (
        f"domainpar: error: rank {late[5]} did not join within 3 s; joined on {platform.node()}: {joined}\nhint: look"
    )
    assert said in output, output


STARTS = """
import sys, time
if "late" in sys.argv:
    time.sleep(1000)
from domainpar.parallel import launcher, start_limit
with start_limit.limited(launcher.detect(), 3.0):
    time.sleep(1000)
"""


@fault(7)
@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the start of MPI is for Linux")
@pytest.mark.parametrize("said", ["rank 1 did not join within 3 s", slow("MPI has not started within 3 s")])
def test_whoever_started_the_ranks_one_that_never_comes_to_the_start_of_mpi_is_named(said, tmp_path):
    file, step = tmp_path / "starts.py", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    file.write_text(STARTS)
    starts = f"'{sys.executable}' '{file}'"
    late = f"SLURM_PROCID=1 {starts} late & late=$!" if said.startswith("rank") else "late="
    waits = "wait $p0; codes=$?; wait $p2; echo codes $codes $?; test -z $late || kill $late"
    script = f"{late}; SLURM_PROCID=0 {starts} & p0=$!; SLURM_PROCID=2 {starts} & p2=$!; {waits}"
    _, output = run_command(["/bin/sh", "-c", script], 150, **step)
    assert output.count("domainpar: error:") == 1, output
    assert f"{said}; joined on {platform.node()}: 0, 2" in output
    assert "codes 2 2" in output


IN_5_S = "within 5 s; joined on"


@fault(7)
@pytest.mark.parametrize(
    ("came", "here", "said"),
    [
        ({0: 1.0, 2: 2.0}, {0, 2}, f"MPI has not started {IN_5_S} HOST: 0, 2; not seen on this host: 1, 3"),
        ({0: 1.0, 1: 1.0}, {0, 1, 2}, f"rank 2 did not join {IN_5_S} HOST: 0, 1; not seen on this host: 3"),
        ({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, {0, 1, 2, 3}, "all ranks joined, but MPI has not started within 5 s"),
        ({0: 2.0, 1: 1.0}, {0, 1, 2}, None),
    ],
)
def test_the_first_to_come_on_each_host_says_which_ranks_it_does_not_see(came, here, said, monkeypatch, capfd):
    monkeypatch.setattr(start_limit, "_seen", lambda *_: (came, here))
    start_limit._say(Launcher("mpich", "mpiexec", 0, 4), 5.0, [])
    error = capfd.readouterr().err
    assert error.startswith(f"domainpar: error: {said}\nhint: ".replace("HOST", platform.node())) if said else not error


@fault(9)
def test_an_interface_that_a_host_does_not_have_is_named_once_before_gloo_waits(forked):
    codes, output = forked.by_hand([0, 1], 2, "join=30", GLOO_SOCKET_IFNAME="ib7")
    assert codes == ["2", "2"]
    assert output.count("domainpar: error:") == 1
    said = f"domainpar: error: ranks 0, 1 could not form a gloo group: host {platform.node()} has no interface ib7; it "
    assert output.startswith(said), output
    assert "hint: set GLOO_SOCKET_IFNAME" in output


def test_the_loopback_leads_to_no_other_host_and_lists_of_interfaces_are_looked_at_one_by_one():
    loopback = next(name for name, state in psutil.net_if_stats().items() if "loopback" in state.flags)
    wrong = side_channel._wrong_interface
    assert "leads to no other host" in wrong(loopback, alone=False)
    assert [wrong(loopback, alone=True), wrong("", alone=False)] == ["", ""]
    assert f"has no interface ib7; it has {', '.join(sorted(psutil.net_if_addrs()))}" in wrong(f"{loopback},ib7", False)


@fault(9)
def test_where_gloo_itself_fails_one_rank_of_each_host_says_so():
    store = HashStore()
    assert [meeting._first_here(store) for _ in range(3)] == [True, False, False]


@fault(9)
@pytest.mark.faults
def test_a_name_that_does_not_resolve_is_named(forked):
    codes, output = forked.by_hand([1], 2, "join=2", MASTER_ADDR="no-such-host.invalid")
    assert codes == ["2"]
    assert "no-such-host.invalid" in output
    assert "set MASTER_ADDR" in output or "check that rank 0 was started" in output


@fault(8, 36)
@needs_mpi
def test_another_configuration_on_one_rank_is_refused_with_both_values(in_one_launch):
    code, lines = in_one_launch
    assert code == 2
    said = "domainpar: error: --lr is 0.5 on rank 2, but 0.001 on the others"
    assert [line for line in lines if line.startswith("domainpar: error")] == [said]
    assert not met(in_one_launch, OTHER)


@fault(8)
@needs_mpi
@pytest.mark.faults
def test_another_checkout_on_one_rank_is_refused(tmp_path):
    here = Path(domainpar.__file__).parents[1]
    for package in ("domainpar", "partitioners"):
        shutil.copytree(here / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "domainpar" / "plan.py").open("a") as file:
        file.write("\n# edited on one machine only\n")
    run = [sys.executable, PROGRAM]
    command = [MPIEXEC, "-n", "2", *run, ":", "-n", "1", "env", f"PYTHONPATH={tmp_path}", *run]
    code, output = run_command(command, timeout=90)
    assert code == 2
    assert "domainpar: error: the code of domainpar is " in output
    assert "on rank 2, but " in output


@fault(8)
def test_another_torch_on_one_rank_is_refused(monkeypatch):
    from domainpar.common.agreement import Refused
    from domainpar.parallel import digests
    from domainpar.testing import run_ranks

    def work(world):
        ours = digests.about_this_program()
        agree_on(world.transport, ours | ({"torch": "2.10.0"} if world.rank == 1 else {}))

    with pytest.raises(Refused, match=r"torch is 2\.10\.0 on rank 1, but .* on the others"):
        run_ranks(work, 3)


@fault(9)
@pytest.mark.skipif(os.name != "posix" or shutil.which("unshare") is None, reason="no unshare")
@pytest.mark.faults
def test_a_host_whose_own_name_does_not_resolve_is_no_trouble():
    inside = 'hostname no-such-name-anywhere && exec "$0" "$@"'
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    port = ["--master-port", str(free_port())]
    try:
        subprocess.run(["unshare", "-u", "true"], check=True, capture_output=True)
    except subprocess.CalledProcessError:
        pytest.skip("no right to another host name")
    command = ["unshare", "-u", "sh", "-c", inside, *torchrun, *port, PROGRAM]
    code, output = run_command(command, timeout=90)
    assert code == 0, output
    assert "rank 1 of 2 over gloo" in output


@fault(10)
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(forked):
    codes, output = forked.start([({}, ["device=cuda"])])
    assert codes == ["2"]
    assert output.startswith("domainpar: error: --device cuda but torch sees no GPU for rank 0 (host ")
    assert "\nhint: use --device cpu" in output


def test_other_events_on_one_rank_are_refused(tmp_path):
    from random_store import write_random_store

    from domainpar.common.agreement import Refused
    from domainpar.testing import run_ranks
    from domainpar.tracking.training.inputs import open_store

    stores = [write_random_store(tmp_path / "a"), write_random_store(tmp_path / "b", num_edges=600, compared=False)]
    with pytest.raises(Refused, match=r"the content of the store is \w+ on rank 2, but \w+ on the others"):
        run_ranks(lambda world: open_store(stores[world.rank == 2], world), 3)
