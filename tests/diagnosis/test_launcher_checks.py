"""Does the mpiexec that one would type belong to the MPI library that mpi4py loads?"""

import sys
import textwrap

import pytest
from marks import fault

from domainpar.common import timeouts
from domainpar.diagnosis import launcher
from domainpar.diagnosis.finding import Verdict
from domainpar.diagnosis.launcher import (
    check_launcher,
    check_mpi,
    check_open_mpi,
    family_of,
    judge_mpi,
    mpiexec_for,
    probe_mpi,
    version_of,
)
from domainpar.parallel.launcher import Launcher
from domainpar.testing import find_mpiexec

ALONE = Launcher("none", "no launcher")


@pytest.mark.parametrize(
    ("said", "family"),
    [
        ("MPICH Version: 5.0.2", "MPICH"),
        ("MPICH (hydra) 5.0.2", "MPICH"),
        ("Intel(R) MPI Library 2021.14 for Linux* OS", "MPICH"),
        ("MVAPICH Version: 4.0", "MPICH"),
        ("Open MPI v5.0.11", "Open MPI"),
        ("mpirun (Open MPI) 5.0.11", "Open MPI"),
        ("mpiexec (OpenRTE) 4.1.2", "Open MPI"),
        ("something else", None),
    ],
)
def test_libraries_and_launchers_are_told_apart(said, family):
    assert family_of(said) == family


MPICH, HYDRA, OPEN = "MPICH Version: 5.0.2", "MPICH (hydra) 5.0.2", "mpirun (Open MPI) 5.0.11"


@pytest.mark.parametrize(
    ("mpiexecs", "verdict", "advice"),
    [
        ({"/a/mpiexec": HYDRA}, Verdict.PASS, ""),
        ({"/b/mpiexec": OPEN}, Verdict.FAIL, "use the mpiexec of MPICH Version: 5.0.2"),
        ({"/a/mpiexec": HYDRA, "/b/mpiexec": OPEN}, Verdict.WARN, "start with /a/mpiexec, not with /b/mpiexec"),
        ({"/b/mpiexec": OPEN, "/a/mpiexec": HYDRA}, Verdict.WARN, "start with /a/mpiexec, not with /b/mpiexec"),
        ({}, Verdict.WARN, "pip install mpich"),
    ],
)
def test_an_mpiexec_of_another_library_is_found(mpiexecs, verdict, advice):
    finding = judge_mpi(MPICH, mpiexecs)
    assert finding.verdict is verdict
    assert advice in finding.advice
    first_choice = "/a/mpiexec" if "/a/mpiexec" in mpiexecs else "/b/mpiexec"
    assert mpiexec_for(finding) == (first_choice if mpiexecs else None), "the one to start two ranks with"


@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
def test_here_they_belong_together():
    finding = check_mpi(ALONE)
    assert finding.verdict in (Verdict.PASS, Verdict.WARN), finding
    assert family_of(finding.figures["library"]) == family_of(version_of(find_mpiexec()))


def test_no_mpi_library_at_all_fails_and_no_mpi4py_does_not_matter(monkeypatch):
    monkeypatch.setattr(launcher, "ASK_FOR_LIBRARY", "raise RuntimeError('cannot load libmpi.so')")
    monkeypatch.setattr(launcher, "find_spec", lambda _: object())
    finding = check_mpi(ALONE)
    assert finding.verdict is Verdict.FAIL
    assert "cannot load libmpi.so" in finding.found
    monkeypatch.setattr(launcher, "find_spec", lambda _: None)
    assert check_mpi(ALONE).verdict is Verdict.SKIP


@fault(3)
def test_open_mpi_is_given_its_flags():
    assert check_open_mpi(MPICH, 4).verdict is Verdict.SKIP
    finding = check_open_mpi("Open MPI v5.0.11", 4, is_superuser=True)
    assert finding.figures["flags"] == ["--allow-run-as-root", "--oversubscribe"]
    assert "for more ranks than 4 cores: mpiexec --oversubscribe" in finding.found
    assert check_open_mpi("Open MPI v5.0.11", 4, is_superuser=False).figures["flags"] == ["--oversubscribe"]


def test_a_launcher_is_named():
    assert "one process alone" in check_launcher(ALONE, 1).found
    of_slurm = Launcher("srun", "srun", 0, 4, "SLURM_NTASKS")
    assert check_launcher(of_slurm, 4).found == "srun (srun) started 4 ranks, as SLURM_NTASKS says"


def fake_mpiexec(folder, text):
    path = folder / "mpiexec"
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
    path.chmod(0o755)
    return str(path)


def test_an_mpiexec_says_its_version_or_that_it_cannot(tmp_path):
    hydra = "print('HYDRA build details:\\n    Version:      4.2.1\\n    Release Date: now')"
    assert version_of(fake_mpiexec(tmp_path, hydra)) == "MPICH (hydra) 4.2.1"
    assert version_of(fake_mpiexec(tmp_path, "print('mpirun (Open MPI) 5.0.11')")) == "mpirun (Open MPI) 5.0.11"
    assert version_of(str(tmp_path / "none")) == "cannot be started: No such file or directory"


@pytest.mark.skipif(find_mpiexec() is None, reason="no mpi4py")
def test_who_does_not_answer_in_time_is_not_said_to_be_missing_or_another(tmp_path, monkeypatch):
    monkeypatch.setattr(timeouts, "LAUNCHER_ANSWER", 0.5)
    monkeypatch.setattr(launcher, "ASK_FOR_LIBRARY", "import time; print('loading', flush=True); time.sleep(60)")
    finding = check_mpi(Launcher("none", ""))
    assert finding.verdict is Verdict.FAIL
    assert finding.found.startswith("a Python that asks mpi4py for its library had not ended after ")
    assert "no MPI library" not in finding.found
    slow = version_of(fake_mpiexec(tmp_path, "import time; time.sleep(60)"))
    assert slow.startswith("gave no version within ")
    assert judge_mpi("MPICH Version: 5.0.2", {"mpiexec": slow}).verdict is Verdict.PASS


def test_ranks_that_see_only_themselves_fail_the_probe(tmp_path):
    """What an mpiexec of another library does: it starts processes that do not find each other."""
    lonely = """
        import os, subprocess, sys
        pretended = os.environ | {"PMI_SIZE": "2", "PMI_RANK": "0"}
        sys.exit(subprocess.run(sys.argv[3:], env=pretended).returncode)
    """
    finding = probe_mpi(fake_mpiexec(tmp_path, lonely), 0.1)
    assert finding.verdict is Verdict.FAIL
    assert "exit code 2: mpiexec started 2 processes (PMI_SIZE=2) but mpi4py " in finding.found
    assert "belong" in finding.advice


def test_a_probe_without_mpi_is_left_out_and_one_that_hangs_is_ended(tmp_path, monkeypatch):
    assert probe_mpi(None, 0.1).verdict is Verdict.SKIP
    assert "cannot be started" in probe_mpi(str(tmp_path / "none"), 0.1).found
    monkeypatch.setattr(timeouts, "STARTING", 1.0)
    hanging = fake_mpiexec(tmp_path, "import time; print('waiting', flush=True); time.sleep(100)")
    finding = probe_mpi(hanging, 0.1)
    assert finding.verdict is Verdict.FAIL
    assert finding.found.startswith("two ranks had not ended after 1 s: waiting")
