"""The grid of ranks, and worlds from somebody else's process group."""

import errno
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from marks import fault

from domainpar.common.agreement import Refused, agree
from domainpar.common.problems import Problem
from domainpar.parallel import mpi, threads, world
from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.gpus import DeviceChoice
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.meeting import choose_transport, join_mpi
from domainpar.parallel.rank_status import guard
from domainpar.parallel.world import World, checked_domain_size
from domainpar.testing import find_mpiexec, run_ranks


def place(world: World) -> tuple[int, int, int, int]:
    assert world.domain.world_ranks[world.domain.rank] == world.rank
    return world.data_group, world.num_data_groups, world.domain.rank, world.domain.size


@pytest.mark.parametrize(
    ("num_ranks", "domain_size", "expected"),
    [
        (4, None, [(0, 1, rank, 4) for rank in range(4)]),
        (4, 2, [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
        (3, 1, [(rank, 3, 0, 1) for rank in range(3)]),
        (16, None, [(rank // 8, 2, rank % 8, 8) for rank in range(16)]),
    ],
)
def test_ranks_of_a_domain_are_consecutive(num_ranks, domain_size, expected):
    assert run_ranks(place, num_ranks, domain_size=domain_size) == expected


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(4, 3), (4, 0)])
def test_a_domain_size_that_does_not_divide_the_ranks_is_refused(num_ranks, domain_size):
    with pytest.raises(ValueError, match=f"does not divide the {num_ranks} ranks"):
        run_ranks(place, num_ranks, domain_size=domain_size)


@pytest.mark.parametrize("domain_size", [1, 2, 4])
def test_a_deadline_holds_among_all_ranks_and_among_those_of_an_event(domain_size):
    def deadlines(world):
        world.set_deadline(30.5)
        return [world.transport.deadline, world.domain.deadline]

    assert run_ranks(deadlines, 4, domain_size=domain_size) == [[30.5] * 2] * 4


def test_one_rank_is_a_world_like_any_other():
    world = World.alone()
    assert place(world) == (0, 1, 0, 1)
    agree(world.transport, None)
    with pytest.raises(Refused, match="^bad flag$"):
        agree(world.transport, "bad flag")


def test_a_world_closes_at_the_end_of_its_block():
    with World.alone() as world:
        assert not world.rank_status.closed
    assert world.rank_status.closed


@pytest.mark.parametrize("error", [Refused("bad graph"), KeyError("x"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_error_inside_the_block_of_a_world_of_one_rank_goes_to_the_caller(capfd, error):
    with pytest.raises(type(error)) as raised, World.alone() as world:
        raise error
    assert raised.value is error
    assert world.rank_status.closed
    assert capfd.readouterr().err == ""


def test_an_error_inside_the_block_of_a_world_ends_all_its_ranks():
    def work(world):
        with world:
            if world.rank == 1:
                raise KeyError("only here")
            world.transport.barrier()

    with pytest.raises(KeyError, match="only here"):
        run_ranks(work, 3)


def test_closing_twice_closes_once(monkeypatch):
    world, closed = World.alone(), []
    monkeypatch.setattr(world.transport, "close", lambda: closed.append(1))
    world.close()
    world.close()
    assert closed == [1]


def fail_on_rank_two(world: World) -> None:
    if world.rank == 2:
        raise KeyError("boom")
    try:
        world.transport.barrier()
    except RanksFailed as failed:
        assert "rank 2 failed: KeyError: 'boom'" in str(failed)  # noqa: PT017
        raise


def test_an_error_on_one_thread_ends_all_at_once_and_is_the_one_raised(monkeypatch):
    woken = []

    class Condition(threading.Condition):
        def wait(self, timeout=None):
            woken.append(super().wait(timeout))
            return woken[-1]

    monkeypatch.setattr(threads, "threading", SimpleNamespace(Condition=Condition, Lock=threading.Lock))
    with pytest.raises(KeyError, match="boom"):
        run_ranks(fail_on_rank_two, 8, timeout=20)
    assert all(woken), "some slept until their deadline"


def fail_guarded(world: World) -> None:
    with guard(world.rank_status):
        fail_on_rank_two(world)


def test_a_guarded_error_is_printed_once_with_its_rank(capfd):
    with pytest.raises(KeyError, match="boom"):
        run_ranks(fail_guarded, 4)
    printed = capfd.readouterr().err
    assert printed.count("Traceback") == 1
    assert "--- rank 2 of 4 failed ---" in printed
    assert "domainpar/parallel/" not in printed


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            Problem("it is spoilt", "mend it", event="7"),
            "it is spoilt | event 7 | rank 0/1 host {host}\nhint: mend it\n",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "/there"),
            "Read-only file system (errno 30) | rank 0/1 host {host} | file /there\n"
            "hint: if --out names that place, choose another; else let it be written\n",
        ),
        (KeyboardInterrupt(), "interrupted; ending all ranks | rank 0/1 host {host}\n"),
    ],
    ids=["a problem", "a disk", "an interrupt"],
)
def test_a_rank_that_is_alone_ends_as_many_do_when_an_error_is_expected(capfd, error, text):
    with pytest.raises(SystemExit) as ended, World.session():
        raise error
    assert ended.value.code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert ended.value.__suppress_context__, "Python would print a traceback below"
    assert capfd.readouterr().err == "domainpar: error: " + text.format(host=platform.node())


def test_what_nobody_expects_goes_on_to_the_caller_of_a_session(capfd):
    with pytest.raises(FileNotFoundError), World.session():
        Path("/no/such/file").read_text()
    assert "FileNotFoundError: [Errno 2]" in capfd.readouterr().err


def test_ranks_that_work_for_too_long_are_named():
    released = threading.Event()
    with pytest.raises(TimeoutError, match="rank 1 still at work"):
        run_ranks(lambda world: released.wait(5) if world.rank == 1 else None, 2, timeout=0.1)
    released.set()


def die(world: World) -> None:
    if world.rank == 1:
        import os

        os._exit(7)
    time.sleep(20)


def test_a_process_that_dies_ends_the_call():
    with pytest.raises(RuntimeError, match="rank 1 ended without a result, exit code 7"):
        run_ranks(die, 2, transport="gloo")


def worlds_over_own_groups(world: World) -> list[tuple[int, int]]:
    """A program with gloo groups of its own makes a world of the last three of four ranks."""
    group = dist.new_group([1, 2, 3])
    if world.rank == 0:
        return []
    inner = World.from_process_group(group, domain_size=1)
    payloads = inner.transport.all_gather(b"x" * world.rank)
    assert [len(payload) for payload in payloads] == [1, 2, 3]
    inner.close()
    assert dist.get_world_size(group) == 3, "the group is the program's own"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist, "all_reduce", lambda it, *how, plain=dist.all_reduce, **more: plain(it.add_(1), *how, **more)
        )
        with pytest.raises(Refused, match="gloo.* spoils what it carries"):
            World.from_process_group(group)
    return [(inner.rank, inner.data_group)]


def test_a_world_from_a_process_group_of_the_program():
    assert run_ranks(worlds_over_own_groups, 4, transport="gloo") == [[], [(0, 0)], [(1, 1)], [(2, 2)]]


def worlds_over_own_communicators(world):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(world.rank == 0, world.rank)
    inner = World.from_mpi(comm)
    payloads = inner.transport.all_gather(b"x" * world.rank)
    inner.close()
    size = comm.allreduce(1)  # the communicator is the program's own
    with pytest.raises(ValueError, match="mpi4py, not a int"):
        World.from_mpi(7)
    return inner.rank, size, [len(payload) for payload in payloads]


@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
def test_a_world_from_a_communicator_of_the_program():
    assert run_ranks(worlds_over_own_communicators, 3, transport="mpi") == [(0, 1, [0]), (0, 2, [1, 2]), (1, 2, [1, 2])]


def test_auto_takes_nccl_on_gpus_then_mpi_then_gloo():
    cpu, gpu = DeviceChoice(torch.device("cpu")), DeviceChoice(torch.device("cuda", 0))
    assert choose_transport("auto", gpu, has_mpi=True) == "nccl"
    assert choose_transport("auto", cpu, has_mpi=True) == "mpi"
    assert choose_transport("auto", cpu, has_mpi=False) == "gloo"
    with pytest.raises(ValueError, match="--device cuda"):
        choose_transport("nccl", cpu, has_mpi=False)


class AloneMPI:
    """An MPI library that does not know the launcher: every process is rank 0 of 1."""

    class COMM_WORLD:
        Get_size = staticmethod(lambda: 1)

    Get_library_version = staticmethod(lambda: "Open MPI v5.0.11, package: x\n")
    Is_initialized = staticmethod(lambda: True)


@fault(1)
def test_a_library_that_sees_one_process_of_eight_is_refused(monkeypatch):
    monkeypatch.setattr(mpi, "import_mpi", lambda: AloneMPI)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "8")
    named = r"started 8 processes \(PMI_SIZE=8\) but mpi4py \(Open MPI v5.*\) sees 1\nhint: they"
    with pytest.raises(Refused, match=named):
        World.launch("mpi")


def test_under_srun_auto_does_without_an_mpi_that_does_not_work(monkeypatch):
    monkeypatch.setattr(mpi, "import_mpi", lambda: AloneMPI)
    srun = Launcher("srun", "srun", 0, 8, size_variable="SLURM_NTASKS", has_pmi=True)
    assert join_mpi("auto", srun) is None
    with pytest.raises(Refused, match="sees 1"):
        join_mpi("mpi", srun)


def test_no_rank_goes_on_before_all_have_joined(monkeypatch):
    """Who fails first thing then is noticed by all: each rank has what shows failures by now."""
    ready, of_thread = [], threading.local()

    def be_ready(ranks):
        time.sleep(0.2 * ranks.rank)
        ready.append(ranks.rank)

    def join(own):
        of_thread.transport = own.transport
        own.transport.name = "processes"  # threads are together from the start
        World.launch()
        return len(ready)

    monkeypatch.setattr(world, "meet", lambda *_: (of_thread.transport, torch.device("cpu"), None))
    monkeypatch.setattr(World, "_report_what_nobody_catches", be_ready)
    assert run_ranks(join, 3) == [3, 3, 3]


def test_importing_the_room_starts_no_mpi_and_no_process_group():
    code = (
        "import sys, domainpar.parallel.world, domainpar.parallel.mpi\n"
        "assert 'mpi4py' not in sys.modules\n"
        "import torch.distributed as dist; assert not dist.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=None)


CORES = {
    # what each rank may use, the machine of each, and what comes of it
    "two share a machine": ([range(8)] * 2, "aa", [4, 4]),
    "three share a machine": ([range(8)] * 3, "aaa", [2, 2, 2]),
    "more ranks than cores": ([range(2)] * 4, "aaaa", [1, 1, 1, 1]),
    "bound to cores of their own": ([[0, 1], [2, 3, 4]], "aa", [2, 3]),
    "bound in pairs": ([range(4), range(4), range(4, 8), range(4, 8)], "aaaa", [2, 2, 2, 2]),
    "two machines": ([range(8)] * 3, "aab", [4, 4, 8]),
}


@pytest.mark.parametrize(("allowed", "machines", "expected"), CORES.values(), ids=CORES)
def test_ranks_share_the_cores_of_their_machine_unless_they_have_their_own(monkeypatch, allowed, machines, expected):
    def own(values):
        def of_rank(*args):
            name = threading.current_thread().name
            return values[int(name.removeprefix("rank ")) if name.startswith("rank ") else 0]

        return of_rank

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", own([set(cores) for cores in allowed]), raising=False)
    monkeypatch.setattr("platform.node", own(machines))
    assert run_ranks(World.cores_for_each, len(allowed)) == expected


def test_where_a_system_binds_nothing_all_its_cores_are_shared(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert run_ranks(World.cores_for_each, 2) == [3, 3]


@pytest.mark.parametrize(("asked", "alone"), [("1", 1), ("2,3", 2), ("", 6), ("0", 6), ("99", 6), ("many", 6)])
def test_a_rank_that_is_alone_takes_as_many_threads_as_the_environment_asks_for(monkeypatch, asked, alone):
    monkeypatch.setattr(world, "cores_here", lambda: list(range(6)))
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert World.alone().cores_for_each() == alone
    assert run_ranks(World.cores_for_each, 2) == [3, 3], "torchrun asks for 1 without being told"


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 1), (7, 7), (8, 8), (11, 1), (12, 6), (16, 8)])
def test_by_default_as_many_ranks_share_an_event_as_divide_them_up_to_8(num_ranks, expected):
    assert checked_domain_size(None, num_ranks) == expected


def test_a_program_without_a_process_group_is_told_which_worlds_there_are():
    with pytest.raises(ValueError, match=r"World.session\(\).*World.launch\(\).*World.alone\(\)"):
        World.from_process_group()


def grid_of(ranks):
    return ranks.data_group, ranks.domain.world_ranks, ranks.num_data_groups


@pytest.mark.parametrize(
    ("hosts", "groups"),
    [
        ("aabb", [(0, 1), (2, 3)]),
        ("abab", [(0, 2), (1, 3)]),  # dealt to machines in turn
        ("baab", [(0, 3), (1, 2)]),
        ("abba", [(0, 3), (1, 2)]),
        ("abcd", [(0, 1), (2, 3)]),
        ("aaab", [(0, 1), (2, 3)]),  # one group must reach over two machines
    ],
)
def test_domain_groups_lie_on_one_machine_where_they_can(monkeypatch, hosts, groups):
    monkeypatch.setattr(world, "gather", lambda *_: list(hosts))
    found = run_ranks(grid_of, 4, domain_size=2)
    for number, ranks in enumerate(groups):
        for rank in ranks:
            assert (found[rank][0], tuple(found[rank][1]), found[rank][2]) == (number, ranks, 2)


def test_what_the_ranks_of_a_group_send_each_other_is_counted():
    def sent(world):
        world.take_counters()
        to_other = [int(rank != world.domain.rank) for rank in range(2)]
        world.domain.start(torch.ones(1, 3), to_other, torch.empty(1, 3), to_other).finish()
        return world.take_counters().bytes_sent

    assert run_ranks(sent, 4, domain_size=2) == [3 * 4] * 4
