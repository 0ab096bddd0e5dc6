"""Ranks as threads: one that fails ends the others, and takes nothing from a call that all of them have begun."""

import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from domainpar.parallel import threads
from domainpar.parallel.errors import RankMissing, RanksFailed
from domainpar.parallel.threads import Switchboard, ThreadTransport
from domainpar.testing import run_ranks


def test_a_rank_that_fails_after_a_call_takes_it_from_no_other(monkeypatch):
    """Rank 0 has all letters, and fails, before rank 2 has left its letter for rank 1."""
    put, lost = Switchboard.put, []

    def slow(board, receiver, key, letter):
        if (receiver, key[1]) == (1, 2):
            time.sleep(0.2)
        put(board, receiver, key, letter)

    def work(world):
        try:
            world.transport.all_gather(b"")
        except RanksFailed:
            lost.append(world.rank)
        if world.rank == 0:
            raise ValueError("of rank 0 alone")

    monkeypatch.setattr(Switchboard, "put", slow)
    with pytest.raises(ValueError, match="of rank 0 alone"):
        run_ranks(work, 3)
    assert not lost


def test_a_deadline_is_one_for_all_ranks_that_are_waited_for(monkeypatch):
    """Each letter takes 4 s of a clock of our own: the third one comes after the 10 s of all of them."""
    now = [100.0]

    def slow(board, receiver, key, give_up_at):
        now[0] = min(now[0] + 4, give_up_at)
        if now[0] == give_up_at:
            raise TimeoutError
        return "all_gather", torch.zeros(5, dtype=torch.int64)

    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Switchboard, "take", slow)
    transport = ThreadTransport(Switchboard(5), 0, deadline=10.0)
    with pytest.raises(RankMissing, match=r"10 s in all_gather .* ranks 3, 4"):
        transport.all_gather(b"")
    assert now == [110.0]


def test_ranks_come_to_an_error_of_their_own_before_they_hear_of_another_ones():
    def work(world):
        if world.rank == 0:
            raise ValueError("first")
        for _ in range(3):  # with each other: nobody waits for rank 0
            pair.append(world.rank)
            send, counts = torch.zeros(1, 1), [0, 0, 0]
            counts[3 - world.rank] = 1
            world.transport.start(send, counts, torch.zeros(1, 1), counts).finish()
        with suppress(RanksFailed):
            world.transport.barrier()
            pair.append("never")

    pair = []
    with pytest.raises(ValueError, match="first"):
        run_ranks(work, 3)
    assert sorted(pair) == [1, 1, 1, 2, 2, 2]
