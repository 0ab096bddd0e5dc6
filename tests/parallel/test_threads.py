"""Ranks as threads: one that fails ends the others, and takes nothing from a call that all of them have begun."""

import time

import pytest

from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.threads import Switchboard
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
