"""`python -m domainpar.doctor` as people use it: alone, after mpiexec and torchrun, and where something is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from forked import forked
from jobs import without_signs_of_life
from marks import slow
from random_store import write_random_store

from domainpar import doctor
from domainpar.testing import find_mpiexec, run_command
from domainpar.tracking.diagnosis import all_checks

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")

QUICK = ["--seconds", "0.05"]
DOCTOR = [sys.executable, "-m", "domainpar.doctor", *QUICK]
ALWAYS = {
    *("launcher", "versions", "cores", "memory", "disk", "shared memory", "kernel cache", "numbers", "GPUs"),
    *("ranks", "same software", "halo: ghosts", "halo: sums", "split = whole", "rows"),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(
        tmp_path_factory.mktemp("store"), num_train=3, num_val=0, num_nodes=30, num_edges=90, compared=False
    )


def checks(file):
    content = json.loads(Path(file).read_text())
    return content, {check["check"]: check for check in content["checks"]}


def test_help_teaches_and_loads_no_library():
    program = (
        "import sys, domainpar.doctor as doctor\n"
        "try: doctor.main(['--help'])\n"
        "finally: print(sorted({'torch', 'rich', 'mpi4py', 'zarr'} & set(sys.modules)))"
    )
    code, printed = run_command([sys.executable, "-c", program], 30)
    assert code == 0, printed
    assert printed.splitlines()[-1] == "[]"
    assert "mpiexec -n 4 python -m domainpar.doctor" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--seconds 0", "--seconds 0.0; above"),
        ("--transport nccl", "--transport nccl --device cpu"),
        ("--verfy store", "unknown --verfy"),
    ],
)
def test_what_makes_no_sense_is_refused(words, said, capfd):
    assert doctor.main(words.split()) == 2
    printed = capfd.readouterr().err
    assert all(value in printed for value in said.split())


@pytest.fixture
def no_ranks_of_its_own(monkeypatch):
    """Ranks that it starts take seconds; `test_alone_it_starts_ranks_of_its_own` looks at them."""
    monkeypatch.setattr(all_checks, "probe_mpi", lambda mpiexecs, seconds: None)
    monkeypatch.setattr(all_checks, "probe_gloo", lambda seconds: None)


@pytest.mark.parametrize("broken", [slow("numba"), "torch", "rich"])
def test_a_package_that_cannot_be_imported_is_named(broken, tmp_path):
    (tmp_path / f"{broken}.py").write_text("raise ImportError('it needs NumPy 2.3 or less.\\nGot NumPy 9.9.')")
    code, printed = run_command(DOCTOR, 60, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path[1:]]))
    assert code == 1
    lines = without_signs_of_life(printed).splitlines()
    assert lines[0].startswith(f"domainpar: error: {broken} {version(broken)} ")
    assert lines[0].endswith("2.3 or less. Got NumPy 9.9")
    assert lines[1].startswith("hint: pip install")
    assert "Traceback" not in printed


def test_all_packages_that_are_declared_are_looked_at_when_one_is_broken():
    project = tomllib.loads((Path(doctor.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert set(doctor.NEEDED.values()) == {re.split(r"[\[>]", line)[0] for line in project["dependencies"]}


def test_a_broken_mpi4py_is_a_row_of_the_table(tmp_path, monkeypatch, capfd, no_ranks_of_its_own):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(
        "raise ImportError('libmpi.so.12: cannot open shared object file')"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the programs that it starts
    code = doctor.main(QUICK)
    out, err = capfd.readouterr()
    assert code == 1
    assert "Traceback" not in out + err
    assert "libmpi.so.12" in out
    assert "split = whole" in out


def test_one_thread_computes_where_torch_would_take_several(monkeypatch, capfd, no_ranks_of_its_own):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    code = doctor.main(QUICK)
    printed = capfd.readouterr().out
    assert code == 0, printed
    assert torch.get_num_threads() == 1
    words = printed.replace("│", " ").split()  # the name of the processor decides where the line is broken
    assert "torch would take 2 threads" in " ".join(words)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_done(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--json", str(tmp_path / "none" / "found.json")])
    assert ended.value.code == 2
    said = capfd.readouterr()
    assert str(tmp_path / "none") in said.err
    assert said.out == ""


@pytest.mark.faults  # some twenty seconds
def test_alone_it_starts_ranks_of_its_own(store, tmp_path):
    found = tmp_path / "found.json"
    code, printed = run_command([*DOCTOR, "--verify", str(store), "--json", str(found)], 120)
    content, rows = checks(found)
    assert code == content["exit_code"] == 0, printed
    assert rows.keys() >= ALWAYS | {"MPI", "transport threads", f"store {store}", "MPI, 2 ranks", "gloo, 2 ranks"}
    assert rows["gloo, 2 ranks"]["verdict"] in ("PASS", "WARN")
    assert rows["MPI, 2 ranks"]["verdict"] in ("PASS", "WARN") or find_mpiexec() is None
    assert rows[f"store {store}"]["figures"]["events"] == 3
    assert printed.splitlines()[-1].endswith("; exit code 0")


@needs_mpi
@pytest.mark.faults
def test_after_mpiexec_ranks_are_looked_at(tmp_path):
    found = tmp_path / "found.json"
    code, printed = run_command([find_mpiexec(), "-n", "2", *DOCTOR, "--json", str(found)], 120)
    _, rows = checks(found)
    assert code == 0, printed
    assert rows.keys() >= ALWAYS | {"MPI", "transport mpi", "transport gloo", "transport nccl"}
    assert rows["launcher"]["found"].startswith("mpiexec (")
    assert "2 ranks on 1 host " in rows["ranks"]["found"]
    assert rows["halo: ghosts"]["figures"]["ghosts"] > 0
    assert printed.count("split = whole") == 1, "rank 0 alone prints"


@pytest.mark.faults  # some twenty seconds
def test_after_torchrun_a_spoilt_event_is_named_and_the_exit_code_is_1(store, tmp_path):
    spoilt, found = shutil.copytree(store, tmp_path / "store"), tmp_path / "found.json"
    path = sorted(spoilt.glob("event*.zip"))[1]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [*QUICK, "--verify", str(spoilt), "--json", str(found)]
    code, printed = run_command([*torchrun, "-m", "domainpar.doctor", *flags], 120)
    content, rows = checks(found)
    assert code == content["exit_code"] == 1, printed
    assert rows.keys() >= ALWAYS | {"transport gloo"}
    assert rows["transport mpi"]["verdict"] == "SKIP"
    assert [name for name, row in rows.items() if row["verdict"] == "FAIL"] == [f"store {spoilt}"]
    (bad,) = rows[f"store {spoilt}"]["figures"]["bad"]
    assert bad.startswith(path.name)
    assert "; exit code 1\n" in printed


@needs_mpi
def test_an_mpiexec_of_another_library_fails_with_the_table():
    """As seen by a rank of Open MPI's; one of MPICH's is tried in tests/diagnosis."""
    with forked(doctor.main, QUICK, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0") as program:
        code, printed = program.wait()
    assert code == 1, printed
    words = " ".join(printed.split())
    for word in ("FAIL", "OMPI_COMM_WORLD_SIZE=2", "versions"):
        assert word in words
