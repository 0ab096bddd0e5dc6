"""Every transport keeps the same promises: `transport_cases.py` says which."""

import math
import re
import time
from types import SimpleNamespace

import pytest
import torch
import transport_cases
from transport_cases import CASES

from domainpar.parallel import process_group
from domainpar.parallel.errors import RankMissing
from domainpar.parallel.process_group import GlooTransport
from domainpar.parallel.thread_ranks import run_threads
from domainpar.testing import find_mpiexec, run_ranks

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
PROCESSES = ["gloo", pytest.param("mpi", marks=needs_mpi)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_on_threads(num_ranks, case):
    run_ranks(case, num_ranks, timeout=20)


def test_trouble_on_threads_is_named_with_its_rank():
    check_trouble(run_ranks(transport_cases.trouble, 4, timeout=20), "threads")


def test_on_threads_a_sum_of_different_shapes_is_noticed():
    run_ranks(transport_cases.shapes_of_a_sum_differ, 2, timeout=20)


@pytest.mark.parametrize("start", [transport_cases.start_an_exchange, transport_cases.start_a_sum])
def test_on_threads_ranks_that_do_not_make_the_same_calls_are_told_so(start):
    told = run_ranks(transport_cases.one_rank_gathers_instead, 2, start, timeout=20)
    other = "an exchange of rows of .*" if start is transport_cases.start_an_exchange else "all_reduce .*"
    assert re.match(f"rank 1 is in all_gather where rank 0 is in {other}; the ranks do not make the same", told[0])
    assert re.match(f"rank 0 is in {other} where rank 1 is in all_gather; the ranks do not make the same", told[1])


def test_threads_without_end_wait_for_each_other_until_a_deadline():
    with pytest.raises(RuntimeError, match=r"waited 0.2 s in all_reduce"):
        run_threads(lambda world: world.is_root and world.transport.barrier(), 2, timeout=math.inf, deadline=0.2)


def test_threads_may_compute_longer_than_others_wait():
    assert run_threads(lambda world: time.sleep(0.3), 2, timeout=math.inf, deadline=0.1) == [None, None]


@pytest.mark.parametrize("transport", PROCESSES)
def test_on_processes_in_one_launch(transport):
    results = run_ranks(transport_cases.all_cases_then_trouble, 3, transport=transport, timeout=50)
    assert [ran for ran, _ in results] == [[case.__name__ for case in CASES]] * 3
    check_trouble([told for _, told in results], transport)


@pytest.mark.parametrize("transport", ["threads", "gloo", pytest.param("mpi", marks=[needs_mpi, pytest.mark.slow])])
def test_a_rank_that_fails_between_start_and_finish_ends_the_wait_of_the_others(transport):
    with pytest.raises((KeyError, RuntimeError), match="no such thing"):
        run_ranks(transport_cases.one_rank_fails_in_between, 3, transport=transport, timeout=30)


def check_trouble(told: list[tuple[str, ...]], transport: str) -> None:
    """The error of a deadline names the silent rank 1, that of a short message its sender, rank 0."""
    others = [rank for rank in range(len(told)) if rank != 1]
    of_sums = [told[rank][1] for rank in others]
    of_exchanges = [told[rank][2] for rank in others]
    if transport == "gloo":
        # The first rank to give up closes its connections, which the others may then complain about.
        of_exchanges = [text for text in of_exchanges if "lost" not in text]
        assert of_exchanges
    else:  # gloo does not notice; plans are compared before the first exchange
        for rank in range(1, len(told)):
            assert f"from rank 0 to rank {rank} brought 32;" in told[rank][0] or "rank 0 sent (2, 4)" in told[rank][0]
    if transport == "mpi":
        assert all("waited 0.4 s in split (mpi)" in told[rank][3] for rank in others)
    for text in of_exchanges:
        assert "waited 0.4 s in an exchange" in text
        assert "nothing came from rank 1" in text
    for text in of_sums:
        assert f"waited 0.4 s in all_reduce ({transport})" in text
    for text in of_exchanges + of_sums:
        of_rank_one = next(line for line in text.splitlines() if line.startswith("  rank 1"))
        assert "step 3, load of event 5" in of_rank_one


class MockedGloo:
    """A group of five, this rank the first: each message takes 4 s of a clock of our own. Keeps tags."""

    def __init__(self, monkeypatch):
        self.now, self.tags = 100.0, []
        of_rank = {"get_rank": lambda group: 0, "get_world_size": lambda group: 5}
        for name, mocked in {**of_rank, "isend": self.post, "irecv": self.post}.items():
            monkeypatch.setattr(process_group.dist, name, mocked)
        monkeypatch.setattr(process_group, "time", SimpleNamespace(monotonic=lambda: self.now))

    def post(self, rows, group, tag, **_):
        self.tags.append(tag)
        return self

    def wait(self, limit):
        self.now += min(4.0, limit.total_seconds())
        if limit.total_seconds() < 4:
            raise RuntimeError("Timed out waiting for recv operation to complete")


def test_a_deadline_of_gloo_is_one_for_all_messages_that_are_waited_for(monkeypatch):
    group = MockedGloo(monkeypatch)
    transport = GlooTransport(deadline=10.0)
    exchange = transport.start(torch.zeros(0, 2), [0] * 5, torch.zeros(4, 2), [0, 1, 1, 1, 1])
    with pytest.raises(RankMissing, match=r"10 s in an exchange .* ranks 3, 4"):
        exchange.finish()
    assert group.now == pytest.approx(110, abs=0.01)
    exchange = transport.start(torch.zeros(2, 2), [0, 1, 1, 0, 0], torch.zeros(2, 2), [0, 1, 1, 0, 0])
    with pytest.raises(RankMissing, match="rank 1 did not take"):
        exchange.finish()
    assert group.now == pytest.approx(120, abs=0.01)


def test_gloo_knows_rows_of_another_width_or_type_by_their_tag(monkeypatch):
    """It would take a message that is too short without a word."""
    group, rows = MockedGloo(monkeypatch), torch.zeros(2, 3)
    for sent, expected in [(rows, rows), (rows, torch.zeros(2, 4)), (rows, rows.double()), (rows, rows.bfloat16())]:
        transport = GlooTransport()
        transport.start(sent, [0, 2, 0, 0, 0], expected[:0], [0] * 5)
        transport = GlooTransport()
        transport.start(sent[:0], [0] * 5, expected, [0, 0, 2, 0, 0])
    same, width, kind, half = zip(group.tags[::2], group.tags[1::2])
    assert same[0] == same[1]
    assert all(tags[0] != tags[1] for tags in (width, kind, half))
