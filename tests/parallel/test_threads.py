"""Ranks as threads: one that fails ends the others, and takes nothing from a call that all of them have begun."""

import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import _ops

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
        return b""

    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Switchboard, "take", slow)
    transport = ThreadTransport(Switchboard(5), 0, deadline=10.0)
    with pytest.raises(RankMissing, match=r"waited 10 s in all_gather \(threads\); .*nothing came from ranks 3, 4"):
        transport.all_gather(b"")
    assert now == [110.0]


def test_ranks_that_use_an_operation_of_torch_for_the_first_time_at_once_get_one_object(monkeypatch):
    """Both are held where torch makes it: of two, one would be freed while torch's C++ side keeps its address."""
    look, both = _ops._has_script_object_arg, threading.Barrier(2)

    def meet(schema):
        if "test_threads" in schema.name:
            with suppress(threading.BrokenBarrierError):
                both.wait(1.0)
        return look(schema)

    def work(world):
        world.transport.all_gather(b"")
        return torch.ops.test_threads.once.default

    library = torch.library.Library("test_threads", "DEF")
    library.define("once(Tensor x) -> Tensor")
    monkeypatch.setattr(_ops, "_has_script_object_arg", meet)
    first, second = run_ranks(work, 2)
    assert first is second
    assert torch.ops.test_threads.once.default is first
