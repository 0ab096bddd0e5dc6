"""Ranks under MPICH need room in /dev/shm: looked at before they start, and what ended runs left is told of."""

import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from marks import fault

from domainpar.common.agreement import Refused
from domainpar.diagnosis import machine_checks as machine
from domainpar.diagnosis.finding import Verdict
from domainpar.diagnosis.launcher_checks import ASK_FOR_LIBRARY
from domainpar.parallel import shared_memory
from domainpar.parallel.meeting import PrintedHere, _check_shared_memory
from domainpar.testing import find_mpiexec, patient

MIB = 2**20


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A pretended /dev/shm of 64 MiB, with files of three runs, of which a process still has one in its memory."""
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 * MIB))
    for name in ("mpich_shm_live", "mpich_shm_old", "mpich_shm_older", "sem.other"):
        (tmp_path / name).write_bytes(bytes(8192))
    (tmp_path / "proc" / "77").mkdir(parents=True)
    (tmp_path / "proc" / "77" / "maps").write_text("7f-80 rw-s 00 00:19 5   /dev/shm/mpich_shm_live\n80-81 r-xp 0 0\n")
    plain = shared_memory.leftovers
    monkeypatch.setattr(shared_memory, "leftovers", lambda shared: plain(shared, tmp_path / "proc"))
    return tmp_path


def test_files_that_no_process_has_in_its_memory_are_leftovers(shared):
    left = shared_memory.leftovers(shared)
    assert {path.name: size for path, size in left.items()} == {"mpich_shm_old": 8192, "mpich_shm_older": 8192}
    assert shared_memory.how_to_remove(left) == f"rm {shared}/mpich_shm_old {shared}/mpich_shm_older"


@fault(49)
@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (11, True), (12, False)])
def test_ranks_without_room_are_refused_with_what_makes_room(shared, ranks, fits):
    problem = shared_memory.shortage(ranks, shared)
    assert (problem is None) is fits
    if problem is not None:
        assert re.match(f"{shared} .*64.0 MiB free.* 12 ranks .*MPICH.* 5.5 MiB", problem.what)
        assert f"rm {shared}/mpich_shm_old " in problem.hint
        assert "--shm-size=1g" in problem.hint


def test_only_mpich_is_asked_and_one_rank_of_a_machine_speaks(shared, monkeypatch):
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    _check_shared_memory("Open MPI v5.0.1", {"MPI_LOCALNRANKS": "12"})
    _check_shared_memory("MPICH Version: 5.0.2", {"SLURM_PROCID": "0"})
    with pytest.raises(PrintedHere):
        _check_shared_memory("MPICH Version: 5.0.2", {"MPI_LOCALNRANKS": "12", "MPI_LOCALRANKID": "0"})
    with pytest.raises(Refused) as refused:
        _check_shared_memory("MPICH Version: 5.0.2", {"MPI_LOCALNRANKS": "12", "MPI_LOCALRANKID": "3"})
    assert not isinstance(refused.value, PrintedHere)


def test_doctor_counts_what_was_left_and_names_the_command(shared, monkeypatch):
    monkeypatch.setattr(machine.limits, "cores_here", lambda: range(2))
    finding = machine.check_shared_memory(2, shared)
    assert "64 MiB free" in finding.found
    assert re.search("11 ranks .*MPICH; 2 files", finding.found)
    assert (finding.verdict, finding.advice) == (Verdict.WARN, f"rm {shared}/mpich_shm_old {shared}/mpich_shm_older")
    for path in shared.glob("mpich_shm_old*"):
        path.unlink()
    assert machine.check_shared_memory(2, shared).verdict is Verdict.PASS
    assert "--shm-size" in machine.check_shared_memory(12, shared).advice


@fault(49)
def test_ranks_in_a_container_of_little_shared_memory_end_in_one_line_and_not_by_a_signal():
    small = "mount -t tmpfs -o size=8m none /dev/shm && exec "
    apart = ["unshare", "--mount", "sh", "-c"]
    if find_mpiexec() is None or shutil.which("unshare") is None:
        pytest.skip("needs MPI and unshare")
    if subprocess.run([*apart, small + "true"], capture_output=True, timeout=patient(60)).returncode:
        pytest.skip("mounting a small /dev/shm needs root")
    library = subprocess.run(
        [sys.executable, "-c", ASK_FOR_LIBRARY], capture_output=True, text=True, timeout=patient(60)
    ).stdout
    if "MPICH" not in library:
        pytest.skip("MPICH is not here")
    program = "from domainpar import World\nwith World.session('mpi') as world: print(world.transport.library)"
    start = f'{find_mpiexec()} -n 2 {sys.executable} -c "{program}"'
    ended = subprocess.run([*apart, small + start], capture_output=True, text=True, timeout=patient(120))
    assert len(re.findall("error: /dev/shm .*8.0 MiB.* 2 ranks", ended.stderr)) == 1, ended.stderr
    assert "--shm-size=1g" in ended.stderr
    assert ended.returncode == 2
