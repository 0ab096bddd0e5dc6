"""Checks of a rank by itself and of all ranks' places: they pass here, and fail where something is wrong."""

import os
import re
import resource

import numba
import pytest
import torch

from domainpar.diagnosis import machine_checks as machine
from domainpar.diagnosis.finding import Verdict
from domainpar.diagnosis.machine_checks import (
    RankPlace,
    check_ranks,
    check_same_versions,
    local_ranks,
    places_of,
)
from domainpar.parallel.gpus import VisibleGpus
from domainpar.testing import run_ranks


def test_this_machine_can_run_the_tests():
    for finding in (machine.check_versions(), machine.check_disk(), machine.check_numbers(), machine.check_memory(1)):
        assert finding.verdict is Verdict.PASS, finding
    assert f"torch {torch.__version__}" in machine.check_versions().found


@pytest.mark.parametrize(
    ("declared", "found"),
    [({"torch": "99.1"}, " < 99.1"), ({"no-such-package": "1"}, "missing: no-such-package")],
)
def test_a_package_that_is_missing_or_old_fails(monkeypatch, declared, found):
    monkeypatch.setattr(machine, "needed_versions", lambda: declared)
    finding = machine.check_versions()
    assert finding.verdict is Verdict.FAIL
    assert found in finding.found


def test_versions_are_compared_as_numbers_and_extras_are_not_needed(monkeypatch):
    declared = ["torch>=2.10", "rich[jupyter]>=13.2", 'mpi4py>=4.1; extra == "mpi"']
    monkeypatch.setattr(machine.metadata, "requires", lambda _: declared)
    assert machine.needed_versions() == {"torch": "2.10", "rich": "13.2"}
    monkeypatch.setattr(machine, "installed", lambda name: {"torch": "2.9.1+cpu", "rich": "13.10"}.get(name))
    assert machine.check_versions().found == "torch 2.9.1+cpu < 2.10"


ARM = """processor\t: {number}
BogoMIPS\t: 50.00
Features\t: fp asimd
CPU implementer\t: {implementer}
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: {part}
CPU revision\t: 1

"""
PROCESSORS = {
    "x86": ("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n\nprocessor\t: 1\n", "Some CPU @ 2 GHz"),
    "one of ARM's": (
        "".join(ARM.format(number=number, implementer="0x41", part="0xd40") for number in range(3)),
        "ARM (implementer 0x41, part 0xd40)",
    ),
    "two kinds of core, on a board": (
        ARM.format(number=0, implementer="0x41", part="0xd08")
        + ARM.format(number=1, implementer="0x99", part="0x001")
        + "Model\t\t: Some Board\n",
        "ARM (implementer 0x41, part 0xd08) and ARM (implementer 0x99, part 0x001)",
    ),
    "another": ("cpu\t: 9\nModel\t: Some Server\n", "Some Server"),
}


@pytest.mark.parametrize(("cpuinfo", "name"), PROCESSORS.values(), ids=PROCESSORS)
def test_a_processor_is_told_by_its_name_or_by_the_numbers_of_its_cores(tmp_path, cpuinfo, name):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert machine.cpu_model(tmp_path / "cpuinfo") == name


def test_more_ranks_or_threads_than_cores_are_seen(monkeypatch):
    monkeypatch.setattr(machine.limits, "cores_here", lambda: range(4))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine.check_processor(4).verdict is Verdict.PASS
    assert machine.check_processor(5).verdict is Verdict.WARN
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert machine.check_processor(1).verdict is Verdict.PASS
    assert machine.check_processor(2).advice.startswith("OMP_NUM_THREADS=2 ")


def test_little_memory_is_seen():
    assert machine.check_memory(4, free=8 * 2**30).verdict is Verdict.PASS
    assert machine.check_memory(16, free=8 * 2**30).verdict is Verdict.WARN


def test_a_directory_that_cannot_be_written_to_fails(tmp_path):
    (tmp_path / "file").touch()
    assert machine.check_disk(tmp_path).verdict is Verdict.PASS
    finding = machine.check_disk(tmp_path / "file")
    assert finding.verdict is Verdict.FAIL
    assert str(tmp_path / "file") in finding.found


def test_a_cache_of_kernels_that_cannot_be_kept_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    finding = machine.check_numba_cache()
    assert (finding.verdict, finding.found) == (Verdict.PASS, f"compiled kernels are kept in {tmp_path / 'cache'}")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limit[1]))  # a full disk: empty files fit
    try:
        finding = machine.check_numba_cache()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert finding.verdict is Verdict.WARN
    assert f"{tmp_path / 'cache'}" in finding.found
    assert "File too large" in finding.found
    monkeypatch.setattr(machine, "place_of_kernels", lambda: None)
    finding = machine.check_numba_cache()
    assert finding.verdict is Verdict.WARN
    assert "home directory" in finding.found


def test_gpus_are_counted_against_ranks(monkeypatch):
    class Gpu:
        name, total_memory = "GPU", 80 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Gpu)
    monkeypatch.setattr(machine, "nccl_version", lambda: "2.27.5")
    here = VisibleGpus(machine.platform.node(), ["A", "B"])
    assert machine.check_gpus(2, [here, here]).verdict is Verdict.PASS
    assert "2 GPUs for 2 ranks here: GPU 80 GiB, GPU 80 GiB; NCCL 2.27.5" in machine.check_gpus(2, [here] * 2).found
    assert "at most 2 ranks" in machine.check_gpus(3, [here] * 3).advice
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each rank sees one of them
    apart = [here._replace(uuids=[uuid]) for uuid in "AB"]
    assert machine.check_gpus(2, apart).verdict is Verdict.PASS
    assert "2 GPUs for 2 ranks here: GPU 80 GiB (1 GPU seen by this rank)" in machine.check_gpus(2, apart).found


def place(rank, host="one", clock=100.0, cpu="cpu"):
    return RankPlace(rank, host, cpu, 4, 0, clock)


def test_ranks_are_counted_by_host():
    places = [place(0), place(1), place(2, "two")]
    assert [local_ranks(places, rank) for rank in range(3)] == [2, 2, 1]
    assert re.search("3 ranks on 2 hosts .*mpi; 1 to 2 ranks .* 0.00 s", check_ranks(places, "mpi").found)
    assert check_ranks([place(0), place(1, cpu="other")], "mpi").verdict is Verdict.WARN


def test_another_version_on_one_rank_fails_and_names_it(monkeypatch):
    assert run_ranks(check_same_versions, 2)[0].verdict is Verdict.PASS
    assert run_ranks(check_same_versions, 1)[0].verdict is Verdict.SKIP
    versions = iter([{"zarr": "2"}, {"zarr": "3"}, {"zarr": "2"}])
    monkeypatch.setattr(machine, "package_versions", lambda: next(versions))
    for finding in run_ranks(check_same_versions, 3):
        assert finding.verdict is Verdict.FAIL
        assert re.match(r"zarr is 3 on rank \d, but 2 on the others", finding.found)


def test_clocks_that_differ_between_hosts_are_seen():
    assert check_ranks([place(0), place(1, clock=150.0)], "mpi").verdict is Verdict.PASS, "one host has one clock"
    assert check_ranks([place(0), place(1, "two", clock=101.0)], "mpi").verdict is Verdict.PASS
    assert check_ranks([place(0), place(1, "two", clock=103.0)], "mpi").verdict is Verdict.WARN


def test_every_rank_knows_where_all_are():
    places, *others = run_ranks(places_of, 3)
    assert others == [places, places]
    assert [place.rank for place in places] == [0, 1, 2]
    assert places[0].host == os.uname().nodename
