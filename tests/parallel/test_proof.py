"""Ranks that meet try their transport: one that spoils what it carries is refused by name, on all of them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from marks import fault, slow

from domainpar.common.agreement import Refused, gather
from domainpar.parallel.errors import Garbled
from domainpar.parallel.proof import proved
from domainpar.parallel.threads import ThreadTransport
from domainpar.testing import find_mpiexec, patient, run_command, run_ranks

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class Lying(ThreadTransport):
    """Threads that spoil what reaches one rank."""

    remedy = "do not lie"

    def __init__(self, honest, liar, lie):
        super().__init__(honest._switchboard, honest.rank, honest.deadline, context="lying")
        self.library, self.lie = "Lies 1.0", lie if honest.rank == liar else ""

    def _reduce(self, own, values, *call):
        super()._reduce(own, values, *call)
        if self.lie == "sum" and values.numel() > 1000:
            values[1000:] += 1
        if self.lie == "payload":
            values[0, 1] ^= 1

    def _receive(self, incoming, *call):
        super()._receive(incoming, *call)
        if self.lie == "message":
            incoming[0].rows[0, 7] ^= 1
        if self.lie == "error":
            raise RuntimeError("a message was lost")

        if self.lie == "long payload":
            incoming[0].rows[-1] ^= 1


def refusal_of(world, lie):
    with pytest.raises(Refused) as refused:
        proved(Lying(world.transport, world.size - 1, lie))
    return refused.value.what, refused.value.hint


@fault(48)
@pytest.mark.parametrize(
    ("lie", "seen"),
    [
        ("sum", "100,000 sums .* 99,000 .*wrong"),
        ("message", "65,536 numbers .* 1 .*wrong"),
        ("error", "65,536 numbers .*not all came.*"),
    ],
)
def test_what_one_rank_sees_go_wrong_all_refuse_by_the_name_of_transport_and_library(lie, seen):
    told = run_ranks(refusal_of, 3, lie)
    assert told == [told[0]] * 3
    assert re.search(rf"threads \(Lies 1.0\).* {seen} on rank 2$", told[0][0])
    assert told[0][1] == "do not lie"


def test_an_honest_transport_is_proved_by_any_number_of_ranks_and_counts_nothing_of_it():
    def counters(world):
        transport = proved(world.transport)
        return transport.bytes_sent, transport.seconds_exchanging, transport.seconds_waiting

    for num_ranks in (1, 2, 3, 5):
        assert run_ranks(counters, num_ranks) == [(0, 0.0, 0.0)] * num_ranks


@fault(48)
@pytest.mark.parametrize("lie", ["payload", "long payload"])
@pytest.mark.parametrize("talk", [gather, lambda t, payload: t.broadcast(payload.encode() if t.rank == 0 else None)])
def test_a_payload_that_arrives_changed_is_never_read_and_names_its_transport(talk, lie):
    def told(world):
        transport = Lying(world.transport, 1, lie)
        if world.rank == 0:
            return talk(transport, payload) and None
        with pytest.raises(Garbled, match="from rank 0 to rank 1") as garbled:
            talk(transport, payload)
        return str(garbled.value)

    payload = "port" * (100 if lie == "long payload" else 1)
    text = run_ranks(told, 2)[1]
    assert re.search(r": threads \(Lies 1.0\) .*\nhint: do not lie", text)


@fault(48)
@pytest.mark.parametrize(("sizes", "own"), [([4, -1], 4), ([0, 3], 4), ([-(2**60)], 4)])
def test_sizes_that_cannot_be_are_refused_before_memory_is_asked_for_by_them(sizes, own):
    def told(world):
        with pytest.raises(Garbled, match=r"threads \(domainpar's own\)"):
            world.transport._check_sizes(sizes, own)
        world.transport._check_sizes([4, 0], 4)

    run_ranks(told, 1)


# --- MPI where no process may read another one's memory ---------------------------------------------------------------

SUMS = """
import torch
from domainpar import World
from domainpar.common.agreement import Refused
try:
    with World.session("mpi") as world:
        sums = torch.arange(5000) * (world.rank + 1)
        world.transport.all_reduce(sums)
        print(f"rank {world.rank}: {int((sums != 3 * torch.arange(5000)).sum())} wrong\\n", end="", flush=True)
except SystemExit as ended:
    print(f"a rank ended with {ended.code}\\n", end="", flush=True)
"""


@pytest.fixture
def refusing(tmp_path):
    """A library to preload, made with some definitions."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux" or find_mpiexec() is None:
        pytest.skip("needs Linux, a C compiler and MPI")

    def made(*definitions):
        library = tmp_path / "refuses.so"
        flags = [f"-D{definition}" for definition in definitions]
        source = Path(__file__).with_name("refuses_memory.c")
        subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", library, source], check=True, timeout=patient(60))
        return str(library)

    return made


@fault(48)
@pytest.mark.parametrize("why", [slow("ENOSYS"), "EPERM"])
def test_where_memory_of_others_is_refused_mpi_is_told_so_and_its_sums_are_right(refusing, why):
    command = [find_mpiexec(), "-n", "2", sys.executable, "-c", SUMS]
    code, output = run_command(command, 60, LD_PRELOAD=refusing(f"WHY={why}"))
    assert code == 0, output
    assert sorted(output.split("\n"))[-2:] == ["rank 0: 0 wrong", "rank 1: 0 wrong"]


@fault(48)
def test_where_it_is_refused_between_ranks_alone_they_refuse_mpi_with_the_setting_that_helps(refusing):
    if YAMA.exists() and YAMA.read_text().strip() != "0":
        pytest.skip("MPICH sees by itself that Yama lets no process read another one's memory")
    command = [find_mpiexec(), "-n", "2", sys.executable, "-c", SUMS]
    _, output = run_command(command, 60, LD_PRELOAD=refusing("WHY=EPERM", "BUT_ITS_OWN"))
    if "MPICH" not in output and "0 wrong" in output:
        pytest.skip("this MPI does not read other processes' memory")
    assert "domainpar: error: mpi (MPICH" in output
    assert "of 100,000 sums over the ranks" in output
    assert "MPIR_CVAR_CH4_CMA_ENABLE=0" in output
    assert output.count("a rank ended with 2") == 2


@fault(48)
@pytest.mark.slow
def test_with_that_setting_its_sums_are_right(refusing):
    command = [find_mpiexec(), "-n", "2", sys.executable, "-c", SUMS]
    library = refusing("WHY=EPERM", "BUT_ITS_OWN")
    code, output = run_command(command, 60, LD_PRELOAD=library, MPIR_CVAR_CH4_CMA_ENABLE="0")
    assert code == 0, output
    assert output.count(": 0 wrong") == 2
