"""Threads over tiles: every tile once, errors come back, and the bits do not know how many threads there are."""

import threading
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from random_events import random_event
from tiled import TiledEvent, sha

from domainpar.nn import team as team_module
from domainpar.nn.gradients import GradientSink
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.program import Scratch, Team, set_threads, team
from domainpar.testing import run_ranks

SIZES = (1, 2, 3)


class Meeting:
    """Holds every thread of a team at its first item until all are there: so each of them does some."""

    def __init__(self, size):
        self._barrier, self._seen = threading.Barrier(size, timeout=10), threading.local()

    def attend(self):
        if not hasattr(self._seen, "here"):
            self._seen.here = True
            self._barrier.wait()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_items", [0, 1, 2, 100])
def test_every_item_is_done_once(size, num_items):
    done = []
    Team(size).each(range(num_items), lambda item, scratch: done.append(item))
    assert sorted(done) == list(range(num_items))


class _SlowItems(Sequence):
    """Lets other threads in while an item is taken."""

    def __len__(self):
        return 40

    def __getitem__(self, item):
        time.sleep(0.0005)
        return range(40)[item]


@pytest.mark.parametrize("size", SIZES)
def test_every_item_is_done_once_also_where_it_takes_time_to_take_one(size):
    done = []
    Team(size).each(_SlowItems(), lambda item, scratch: done.append(item))
    assert sorted(done) == list(range(40))


@pytest.mark.parametrize("size", SIZES)
def test_all_threads_of_a_team_work_each_with_a_scratch_of_its_own(size):
    meeting, used = Meeting(size), Counter()
    members = Team(size)

    def work(item, scratch):
        meeting.attend()
        used[threading.get_ident(), id(scratch)] += 1

    for _ in range(3):
        members.each(range(20), work)
    threads, scratches = zip(*used)
    assert used.total() == 60
    assert len(set(threads)) == len(set(scratches)) == size
    assert (threading.get_ident(), id(members.scratch[0])) in used


@pytest.mark.parametrize("size", SIZES)
def test_each_waits_for_the_last_item(size):
    done = []

    def work(item, scratch):
        time.sleep(0.02 * (item == 0))
        done.append(item)

    Team(size).each(range(5), work)
    assert len(done) == 5


@pytest.mark.parametrize("size", SIZES)
def test_an_error_of_any_thread_is_raised_and_the_rest_is_left_undone(size):
    members, done = Team(size), []
    for fails_in in range(size):
        meeting = Meeting(size)

        def work(item, scratch, fails_in=fails_in, meeting=meeting):
            meeting.attend()
            if scratch is members.scratch[fails_in]:
                raise ArithmeticError(f"thread {fails_in} at work")
            done.append(item)
            time.sleep(0.001)

        done.clear()
        with pytest.raises(ArithmeticError, match=f"thread {fails_in} at work"):
            members.each(range(1000), work)
        assert len(done) < 500
    done.clear()
    members.each(range(10), lambda item, scratch: done.append(item))
    assert sorted(done) == list(range(10)), "a team can be used after an error"


@pytest.mark.parametrize("size", SIZES)
def test_only_the_calling_thread_pokes_the_transport_after_each_of_its_items(size):
    meeting, own, pokes = Meeting(size), [], []

    def work(item, scratch):
        meeting.attend()
        if threading.current_thread() is threading.main_thread():
            own.append(item)

    Team(size).each(range(50), work, between=lambda: pokes.append(threading.current_thread()))
    assert set(pokes) == {threading.main_thread()}
    assert len(pokes) == len(own)
    assert (len(own) == 50) == (size == 1)


@pytest.mark.parametrize("size", SIZES)
def test_an_error_of_the_transport_stops_the_team(size):
    def poke():
        raise TimeoutError("rank 1 does not answer")

    done = []
    with pytest.raises(TimeoutError, match="rank 1 does not answer"):
        Team(size).each(range(1000), lambda item, scratch: done.append(time.sleep(0.001)), between=poke)
    assert len(done) < 500


@pytest.mark.parametrize("size", [0, -1])
def test_a_team_without_threads_is_refused(size):
    for make in (Team, set_threads):
        with pytest.raises(ValueError, match=f"a team of {size} threads cannot compute; ask for at least 1"):
            make(size)


def test_a_scratch_keeps_a_block_until_it_is_too_small_and_always_aligned():
    scratch = Scratch()
    first = scratch.take("rows", 32, 48, torch.float32)
    first.fill_(3)
    again = scratch.take("rows", 16, 96, torch.float32)
    assert again.data_ptr() == first.data_ptr()
    assert again.shape == (16, 96)
    assert (again == 3).all()
    assert scratch.take("rows", 31, 17, torch.float32).is_contiguous()
    others = [scratch.take("rows", 64, 48, torch.float32), scratch.take("rows", 32, 48, torch.float64),
              scratch.take("columns", 32, 48, torch.float32)]  # fmt: skip
    assert len({block.data_ptr() for block in (first, *others)}) == 4
    assert all(block.data_ptr() % 64 == 0 for block in (first, *others))
    assert not scratch.zeros("rows", 32, 48, torch.float32).any()


def _teams_of(world):
    before, same = team(), team()
    set_threads(2)
    inside = []
    helper = threading.Thread(target=lambda: inside.append(team()))
    helper.start()
    helper.join()
    return before, same, team(), inside[0]


def test_every_rank_has_a_team_of_its_own_also_where_ranks_are_threads():
    found = run_ranks(_teams_of, 3)
    for before, same, after, of_another_thread in found:
        assert before is same
        assert (before.size, after.size) == (1, 2)
        assert of_another_thread is not after
    members = [each for ranks in found for each in ranks[1:3]]
    assert len({id(one) for one in members}) == 6
    assert len({id(scratch) for one in members for scratch in one.scratch}) == 9


def _train(world, event, order, num_threads):
    set_threads(num_threads)
    part = event.part(world.transport, event.grouping("random", world.size, seed=world.size))
    model = InteractionNetwork(3, 6, hidden=16, graph_iters=2, order=order)
    sink = GradientSink(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rejected = 0
    for _ in range(2):
        logits = model(part.graph, part.halo)
        logits.backward(torch.tanh(logits.detach()) / event.graph.num_edges)
        rejected += sink.reduce(world.transport)
        optimizer.step()
    return rejected, sha(*model.parameters())


@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_training_ends_with_the_same_bits_on_any_threads_of_any_ranks(order):
    event = TiledEvent.of(random_event(3, 400, 4000), np.arange(400) * 24 // 400, 24)
    found = [run_ranks(_train, ranks, event, order, threads) for ranks in (1, 3) for threads in SIZES]
    assert found == [[found[0][0]] * ranks for ranks in (1, 3) for _ in SIZES]
    assert found[0][0][0] == 0, "partials that are not finite"


def test_one_scratch_for_all_threads_would_be_seen(monkeypatch):
    """The test above can fail: threads that share memory to work in spoil each other's tiles."""
    event = TiledEvent.of(random_event(3, 2000, 60_000), np.arange(2000) * 24 // 2000, 24)
    alone = run_ranks(_train, 1, event, "edge-first", 1)

    class Sharing(Team):
        def __init__(self, size):
            super().__init__(size)
            self.scratch = self.scratch[:1] * size

    monkeypatch.setattr(team_module, "Team", Sharing)
    assert run_ranks(_train, 1, event, "edge-first", 3) != alone
