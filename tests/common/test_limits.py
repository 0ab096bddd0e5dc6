"""Limits of control groups, as Linux shows them: of both versions, of the groups around one's own, in containers."""

import math

import pytest

from domainpar.common import limits

GIB = 2**30


def tree(root, membership, files):
    """A pretended /sys/fs/cgroup and /proc/self/cgroup, as arguments of the readers."""
    for name, content in files.items():
        (root / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "groups" / name).write_text(f"{content}\n")
    (root / "membership").write_text(membership)
    return {"cgroups": root / "groups", "membership": root / "membership"}


def of_memory(group, limit, used=7 * GIB, files=2 * GIB, old=False):
    """The files of a memory group."""
    if old:
        names, own = ("memory.limit_in_bytes", "memory.usage_in_bytes"), f"inactive_file 1\ntotal_inactive_file {files}"
    else:
        names, own = ("memory.max", "memory.current"), f"anon 5\ninactive_file {files}"
    return {f"{group}/{names[0]}": limit, f"{group}/{names[1]}": used, f"{group}/memory.stat": own}


OLD = "9:name=systemd:/\n4:memory:/job/task\n2:cpu,cpuacct:/job/task\n0::/\n"
OF_MEMORY = {
    "the limit of the job around it": ("0::/job/task\n", of_memory("job", 10 * GIB) | of_memory("job/task", "max"), 5),
    "the least of two": ("0::/job/task\n", of_memory("job", 10 * GIB) | of_memory("job/task", 6 * GIB), 1),
    "version 1": (
        OLD,
        of_memory("memory/job", 10 * GIB, old=True) | of_memory("memory/job/task", 2**63 - 4096, old=True),
        5,
    ),
    "version 1 in a container, which has its group at the top": (OLD, of_memory("memory", 8 * GIB, old=True), 3),
    "version 2 beside version 1": ("0::/job\n", of_memory("unified/job", 9 * GIB), 4),
    "more used than there is": ("0::/job\n", of_memory("job", 4 * GIB), 0),
    "a group of a namespace further up": ("0::/../job\n", of_memory("job", 10 * GIB), 5),
}


@pytest.mark.parametrize(("membership", "files", "free"), OF_MEMORY.values(), ids=OF_MEMORY)
def test_the_least_that_any_group_around_leaves_is_free_and_files_in_memory_give_way(tmp_path, membership, files, free):
    assert limits.memory(**tree(tmp_path, membership, files)).free == free * GIB


def test_the_limit_itself_is_known_too(tmp_path):
    files = of_memory("job", 10 * GIB) | of_memory("job/task", "max")
    assert limits.memory(**tree(tmp_path, "0::/job/task\n", files)) == (10 * GIB, 5 * GIB)


def of_time(group, quota, period=100_000):
    """The files of a group with a quota of version 1."""
    return {f"{group}/cpu.cfs_quota_us": quota, f"{group}/cpu.cfs_period_us": period}


OF_TIME = {
    "version 2": ("0::/job/task\n", {"job/cpu.max": "150000 100000", "job/task/cpu.max": "max 100000"}, 1.5),
    "version 1": (OLD, of_time("cpu,cpuacct/job", 100_000) | of_time("cpu,cpuacct/job/task", -1), 1.0),
    "version 1 under the controller's own name": (OLD, of_time("cpu/job", 50_000) | of_time("cpu", 400_000), 0.5),
    "in a container, which has its group at the top": ("0::/\n", {"cpu.max": "200000 100000"}, 2.0),
}


@pytest.mark.parametrize(("membership", "files", "cores"), OF_TIME.values(), ids=OF_TIME)
def test_the_least_quota_of_any_group_around_counts(tmp_path, membership, files, cores):
    assert limits.quota(**tree(tmp_path, membership, files)) == cores


@pytest.mark.parametrize("membership", ["", "0::/job\n", OLD])
def test_without_a_limit_there_is_none(tmp_path, membership):
    files = of_memory("job", "max") | of_time("cpu", -1) | {"job/cpu.max": "max 100000"}
    paths = tree(tmp_path, membership, files)
    assert limits.memory(**paths) == (math.inf, math.inf)
    assert limits.quota(**paths) == math.inf
    assert limits.quota(tmp_path / "none", tmp_path / "none") == math.inf


@pytest.mark.parametrize(("quota", "cores"), [(0.5, [2]), (1.0, [2]), (1.9, [2]), (2.0, [2, 5]), (math.inf, [2, 5, 7])])
def test_no_more_cores_are_counted_than_the_quota_pays_for(monkeypatch, quota, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5, 2, 7}, raising=False)
    monkeypatch.setattr(limits, "quota", lambda: quota)
    assert limits.cores_here() == cores


def test_doctor_says_what_is_left(monkeypatch):
    from domainpar.diagnosis import machine_checks as machine

    monkeypatch.setattr(limits, "quota", lambda: 1.0)
    monkeypatch.setattr(limits, "memory", lambda: limits.Memory(2**30, 2**29))
    assert "1 core (a quota of 1)" in machine.check_processor(1).found
    assert machine.check_memory(1).found.startswith("0.5 GiB free for each rank; the machine has ")
    assert machine.check_memory(1).found.endswith(", of which 1.0 GiB are allowed here (a memory group)")
