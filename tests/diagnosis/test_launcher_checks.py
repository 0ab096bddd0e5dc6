"""Does the mpiexec that one would type belong to the MPI library that mpi4py loads?"""

import re
import sys
import textwrap

import pytest
from marks import fault

from domainpar.common import timeouts
from domainpar.diagnosis import launcher_checks as launcher
from domainpar.diagnosis.finding import Verdict
from domainpar.diagnosis.launcher_checks import check_launcher, check_mpi, open_mpi_flags, probe_mpi
from domainpar.parallel.launcher import Launcher
from domainpar.testing import find_mpiexec

ALONE = Launcher("none", "no launcher")


@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
def test_here_they_belong_together():
    finding = check_mpi(ALONE)
    assert finding.verdict in (Verdict.PASS, Verdict.WARN), finding
    assert finding.figures["mpiexecs"][0] == find_mpiexec()


def test_no_mpi_library_at_all_fails_and_no_mpi4py_does_not_matter(monkeypatch):
    monkeypatch.setattr(launcher, "ASK_FOR_LIBRARY", "raise RuntimeError('cannot load libmpi.so')")
    monkeypatch.setattr(launcher, "find_spec", lambda _: object())
    finding = check_mpi(ALONE)
    assert finding.verdict is Verdict.FAIL
    assert "cannot load libmpi.so" in finding.found
    monkeypatch.setattr(launcher, "find_spec", lambda _: None)
    assert check_mpi(ALONE).verdict is Verdict.SKIP


@fault(3)
@pytest.mark.skipif(find_mpiexec() is None, reason="no mpi4py")
def test_open_mpi_is_given_its_flags(monkeypatch):
    assert list(open_mpi_flags(is_superuser=False)) == ["--oversubscribe"]
    assert list(open_mpi_flags(is_superuser=True)) == ["--allow-run-as-root", "--oversubscribe"]
    monkeypatch.setattr(launcher, "cores_here", lambda: range(4))
    for library, has_flags in (("MPICH Version: 5.0.2", False), ("Open MPI v5.0.11", True)):
        monkeypatch.setattr(launcher, "ASK_FOR_LIBRARY", f"print({library!r})")
        found = check_mpi(ALONE).found
        assert found.startswith(f"mpi4py uses {library}; ")
        assert ("for more ranks than 4 cores: mpiexec --oversubscribe" in found) is has_flags


def test_a_launcher_is_named_and_a_slurm_job_without_srun_is_seen(monkeypatch):
    assert "one process alone" in check_launcher(ALONE, 1).found
    for tasks, advice in (("1", ""), ("8", "srun -n 8 ")):
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_NTASKS", tasks)
        finding = check_launcher(ALONE, 1)
        assert advice in finding.advice
        assert finding.verdict is (Verdict.WARN if advice else Verdict.PASS)
    of_slurm = Launcher("srun", "srun", 0, 4, "SLURM_NTASKS")
    assert re.search("srun .*4 ranks, .*SLURM_NTASKS", check_launcher(of_slurm, 4).found)


def fake_mpiexec(folder, text):
    path = folder / "mpiexec"
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(find_mpiexec() is None, reason="no mpi4py")
def test_a_library_that_does_not_answer_in_time_is_not_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(timeouts, "LAUNCHER_ANSWER", 0.5)
    monkeypatch.setattr(launcher, "ASK_FOR_LIBRARY", "import time; print('loading', flush=True); time.sleep(60)")
    finding = check_mpi(Launcher("none", ""))
    assert finding.verdict is Verdict.FAIL
    assert finding.found.startswith("a Python that asks mpi4py for its library had not ended after ")
    assert "no MPI library" not in finding.found


# What an mpiexec of another library does: it starts processes that do not find each other.
LONELY = """
    import os, subprocess, sys
    pretended = os.environ | {"PMI_SIZE": "2", "PMI_RANK": "0"}
    sys.exit(subprocess.run(sys.argv[3:], env=pretended).returncode)
"""


def test_ranks_that_see_only_themselves_fail_the_probe(tmp_path):
    finding = probe_mpi([fake_mpiexec(tmp_path, LONELY)], 0.1)
    assert finding.verdict is Verdict.FAIL
    assert "exit code 2: mpiexec started 2 processes (PMI_SIZE=2)" in finding.found
    assert "belong" in finding.advice


@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
def test_an_mpiexec_of_another_library_is_found_and_the_right_one_works_and_is_named(tmp_path):
    wrong, right = fake_mpiexec(tmp_path, LONELY), find_mpiexec()
    finding = probe_mpi([wrong, right], 0.1)
    assert finding.verdict is Verdict.WARN
    assert finding.advice.startswith(f"start with {right}, not with {wrong}")
    assert "(PMI_SIZE=2) but mpi4py " in finding.found
    assert finding.found.startswith(f"{right}: ")


def test_a_probe_without_mpi_is_left_out_and_one_that_hangs_is_ended(tmp_path, monkeypatch):
    assert probe_mpi([], 0.1).verdict is Verdict.SKIP
    assert "cannot be started" in probe_mpi([str(tmp_path / "none")], 0.1).found
    monkeypatch.setattr(timeouts, "STARTING", 1.0)
    hanging = fake_mpiexec(tmp_path, "import time; print('waiting', flush=True); time.sleep(100)")
    finding = probe_mpi([hanging], 0.1)
    assert finding.verdict is Verdict.FAIL
    assert finding.found.startswith("two ranks had not ended after 1 s: waiting")
