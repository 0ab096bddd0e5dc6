"""Transports and the halo: what they bring, seen to pass where it is right and to fail where rows are spoilt."""

import garbling
import pytest
import torch

from domainpar.diagnosis import transport_checks as transport
from domainpar.diagnosis.finding import Verdict, gathered
from domainpar.diagnosis.transport_checks import check_halo, check_rows, check_transport, form, missing
from domainpar.measure.ring import parts_of_ring, ring_edges
from domainpar.parallel.halo import Halo
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.transport import Transport
from domainpar.plan import build_plans
from domainpar.testing import find_mpiexec, run_ranks

FIGURES = {
    *("latency_seconds", "all_reduce_seconds"),
    *(f"bytes_per_second_{size}_MiB" for size in (1, 4, 16)),
}


def _transport(world):
    return gathered([check_transport(world.transport, 0.05)], world)[0]


def _garbled_transport(world, how):
    return gathered([check_transport(garbling.garbled(world, garbling.INTEGERS, how).transport, 0.05)], world)[0]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_transport_is_measured(num_ranks):
    found = run_ranks(_transport, num_ranks)
    assert all(finding == found[0] for finding in found)
    assert found[0].verdict in (Verdict.PASS, Verdict.WARN), "slow is no failure"
    assert found[0].check == "transport threads"
    assert found[0].figures.keys() - {"ranks"} == FIGURES
    assert all(found[0].figures[name] > 0 for name in FIGURES)


def test_one_rank_has_nobody_to_talk_to():
    assert run_ranks(_transport, 1)[0].verdict is Verdict.SKIP


def test_a_slow_transport_is_warned_about(monkeypatch):
    monkeypatch.setattr(transport, "SLOW_SECONDS", 0.0)
    assert run_ranks(_transport, 2)[0].verdict is Verdict.WARN


@pytest.mark.parametrize(("how", "wrong"), [("one bit", 1), ("nothing", 65_536)])
def test_a_transport_that_garbles_rows_fails_and_the_receiver_is_named(how, wrong):
    finding = run_ranks(_garbled_transport, 3, how)[0]
    assert finding.verdict is Verdict.FAIL
    assert f"of 65,536 numbers from another rank {wrong:,} came out wrong on ranks 1, 2" in finding.found


def _halo(world):
    return gathered(check_halo(world), world)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_the_halo_of_threads_passes(num_ranks):
    ghosts, sums = run_ranks(_halo, num_ranks)[0]
    assert [ghosts.verdict, sums.verdict] == [Verdict.PASS] * 2, (ghosts, sums)
    assert (ghosts.figures["ghosts"] > 0) == (num_ranks > 1)


def _garbled_halo(world, how):
    return gathered(check_halo(garbling.garbled(world, how=how)), world)


@pytest.mark.parametrize(("how", "unfilled"), [("reversed", "0 of them never filled"), ("nothing", "60 of them")])
def test_rows_that_reach_the_wrong_ghosts_fail(how, unfilled):
    ghosts, _ = run_ranks(_garbled_halo, 2, how)[0]
    assert ghosts.verdict is Verdict.FAIL
    assert ghosts.found.startswith("rank 1: ")
    assert unfilled in ghosts.found


def _sums_too_large(world):
    return gathered([transport.check_sums(_Doubling(world))], world)[0]


class _Doubling:
    """A halo whose way back adds everything twice."""

    def __init__(self, world):
        plans = build_plans(ring_edges(20), parts_of_ring(20, world.size), world.size, "incident")
        self._halo = Halo(plans[world.rank], world.transport)
        self.plan, self.transport, self.fill_ghosts = self._halo.plan, world.transport, self._halo.fill_ghosts

    def sum_to_owners(self, ghosts):
        return 2 * self._halo.sum_to_owners(ghosts)


def test_a_way_back_that_is_not_the_adjoint_fails():
    assert run_ranks(_sums_too_large, 2)[0].verdict is Verdict.FAIL


def test_rows_that_depend_on_each_other_fail(monkeypatch):
    assert run_ranks(check_rows, 2)[0].verdict is Verdict.PASS
    monkeypatch.setattr(transport, "rows_are_independent", lambda *_: "rows of a block change")
    assert run_ranks(check_rows, 2)[0].verdict is Verdict.FAIL


def _second(world):
    launcher = Launcher("mpich", "mpiexec", world.rank, world.size, "PMI_SIZE", has_pmi=True)
    reasons = {name: missing(name, world, launcher, [None] * world.size) for name in ("mpi", "gloo", "nccl")}
    name = next((name for name in ("mpi", "gloo") if name != world.transport.name and reasons[name] is None), None)
    if name is None:
        return reasons, None
    second = form(name, world, torch.device("cpu"))
    assert isinstance(second, Transport), second
    finding = gathered([check_transport(second, 0.05)], world)[0]
    world.transport.barrier()
    second.close()
    return reasons, finding.check


@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
def test_beside_mpi_there_is_gloo_and_the_rest_is_said_to_be_missing():
    for reasons, measured in run_ranks(_second, 2, transport="mpi"):
        assert measured == "transport gloo"
        assert "NCCL" in reasons["nccl"]


def test_beside_threads_and_gloo_there_is_nothing_and_why_is_said():
    assert all(reasons["mpi"] and reasons["gloo"] for reasons, _ in run_ranks(_second, 2))
    (reasons, measured), _ = run_ranks(_second, 2, transport="gloo")
    assert measured is None
    assert "no MPI processes" in reasons["mpi"]


def test_a_group_that_cannot_be_formed_fails(monkeypatch):
    monkeypatch.setattr("domainpar.parallel.side_channel.share_store", lambda _: None)
    finding = run_ranks(lambda world: form("gloo", world, torch.device("cpu")), 2)[0]
    assert finding.verdict is Verdict.FAIL
    assert "rank 0: not all ranks can open a connection" in finding.found
