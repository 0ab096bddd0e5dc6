"""Programs over tiles: every row once, errors come back, and the bits do not know of threads, strips or memory."""

import gc
import sys
import threading
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from numba import njit
from one_mlp import an_mlp
from one_operation import in_python, table_at
from random_events import random_event
from tiled import TiledEvent, sha

from domainpar.nn import operations
from domainpar.nn import program as program_module
from domainpar.nn.gradients import GradientSink
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.program import (
    NOTHING,
    POKES,
    STRIP,
    Program,
    Team,
    When,
    numbers,
    set_threads,
    shared,
    table,
    team,
)  # fmt: skip
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.testing import patient, run_ranks

SIZES = (1, 2, 3)


@pytest.fixture(autouse=True)
def _one_thread_afterwards():
    yield
    set_threads(1)


class Meeting:
    """Holds every thread of a team at its first tile until all are there: so each of them does some."""

    def __init__(self, size):
        self._barrier, self._seen = threading.Barrier(size, timeout=patient(10)), threading.local()

    def attend(self):
        if not hasattr(self._seen, "here"):
            self._seen.here = True
            self._barrier.wait()


def tiles_of(sizes, owned=True):
    """Tiles of so many rows, one behind the other, with a pair for every second row."""
    stops = np.cumsum(sizes, dtype=np.int64)
    rows = np.stack([stops - sizes, stops], axis=1)
    return np.column_stack([rows, rows // 2, np.zeros_like(rows), np.full(len(rows), owned)]).astype(np.int64)


def run(work, tiles, between=None):
    """A program of one operation for each strip, `work(first, count)`."""
    program = Program()
    program.add(in_python(lambda arguments, first, count: work(first, count)))
    program.run(tiles, between)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tiles", [0, 1, 2, 100])
def test_every_row_is_done_once_in_strips_that_do_not_reach_over_a_tile(size, num_tiles):
    set_threads(size)
    done, sizes = [], np.random.default_rng(num_tiles).integers(0, 3 * STRIP, num_tiles)
    sizes[:2] = (2 * STRIP, 0)[:num_tiles]
    run(lambda first, count: done.append((first, count)), tiles_of(sizes))
    stops = np.cumsum(sizes).tolist()
    expected = [
        (row, min(STRIP, stop - row)) for stop, rows in zip(stops, sizes) for row in range(stop - rows, stop, STRIP)
    ]
    assert sorted(done) == sorted(expected)


@pytest.mark.parametrize("size", SIZES)
def test_no_tile_is_done_twice_where_threads_take_them_at_the_same_time(size):
    set_threads(size)
    program, one, num_tiles = Program(), np.ones(1), 300_000
    limbs = program.room(1, 4, torch.int64)
    program.add(operations.split(torch.float64), shared(one), 1, limbs, when=When.OWNED_TILE_ENDS)
    for of_thread in program.thread_arrays(limbs, 4, np.int64):
        of_thread[:] = 0
    program.run(program_module.tiles_of(np.zeros((num_tiles, 2), np.int64)))
    assert sum(of_thread[0] for of_thread in program.thread_arrays(limbs, 4, np.int64)) == num_tiles * 2**20


def test_operations_are_done_strip_by_strip_in_order_and_what_belongs_to_a_tile_around_them():
    done, program = [], Program()
    for name, when in [("ends", When.OWNED_TILE_ENDS), ("a", When.STRIP), ("b", When.OWNED_STRIP), ("c", When.STRIP),
                       ("pairs", When.TILE_STARTS), ("starts", When.OWNED_TILE_STARTS),
                       ("nodes", When.NODES_START)]:  # fmt: skip
        program.add(in_python(lambda arguments, *rows, name=name: done.append((name, *rows))), when=when)
    owned, foreign = (10, 10 + STRIP + 1, 3, 5, 20, 26, True), (500, 507, 5, 9, 30, 30, False)
    program.run(np.array([owned, foreign]))
    strips = [(name, *rows) for rows in ((10, STRIP), (10 + STRIP, 1)) for name in "abc"]
    assert done == [("pairs", 3, 2), ("starts", 10, 0), ("nodes", 20, 6), *strips, ("ends", 10, 0),
                    ("pairs", 5, 4), ("nodes", 30, 0), ("a", 500, 7), ("c", 500, 7)]  # fmt: skip


def test_a_program_without_operations_does_nothing():
    Program().run(tiles_of([3, 2]), between=lambda: pytest.fail("there is nothing to wait for"))


def test_operands_move_with_the_rows_or_stay_and_numbers_are_themselves():
    rows, ids = torch.arange(600.0).view(300, 2), np.arange(300)
    weight, vector, array = torch.ones(3, 4), torch.ones(5), np.ones((2, 3))
    operands = [table(rows), numbers(ids), shared(weight), shared(vector), shared(array), NOTHING, 7, True]
    seen, program = [], Program()
    own = program.room(3, 5, torch.float64)
    kernel = in_python(lambda arguments, first, count: seen.append((first, [arguments[i] for i in range(9)])))
    program.add(kernel, *operands, own)
    program.run(tiles_of([200, 100]))
    here = team().memory(0, 0).ctypes.data
    for first, (at_rows, at_ids, *still, of_thread) in seen:
        assert at_rows == rows.data_ptr() + 8 * first
        assert at_ids == ids.ctypes.data + 8 * first
        assert still == [weight.data_ptr(), vector.data_ptr(), array.ctypes.data, 0, 7, 1]
        assert of_thread == here + own.address
    assert [operand.width for operand in (*operands[:6], own)] == [2, 0, 4, 0, 3, 0, 5]
    assert [operand.dtype for operand in (operands[0], own)] == [torch.float32, torch.float64]
    assert numbers(ids[:0]) == NOTHING


@pytest.mark.parametrize("size", SIZES)
def test_all_threads_of_a_team_work_each_with_memory_of_its_own(size):
    set_threads(size)
    used, threads, program = Counter(), set(), Program()
    first, second = program.room(3, 5, torch.float32), program.room(1, 7, torch.float64)

    def work(arguments, *rows):
        meeting.attend()
        for slot, (columns, kind) in enumerate([(15, torch.float32), (7, torch.float64)]):
            values = table_at(arguments[slot], 1, columns, kind)
            values += 1  # zeros at first
        used[arguments[0], arguments[1]] += 1
        threads.add(threading.get_ident())

    program.add(in_python(work), first, second)
    for _ in range(3):
        meeting = Meeting(size)
        program.run(tiles_of([1] * 20))
    places = list(zip(*used))
    assert used.total() == 60
    assert len(threads) == len(set(places[0])) == len(set(places[1])) == size
    assert threading.get_ident() in threads
    assert all(place % 64 == 0 for place in (*places[0], *places[1]))
    counts = sorted(used.values())
    for operand, count, kind in ((first, 15, np.float32), (second, 7, np.float64)):
        found = [set(values.tolist()) for values in program.thread_arrays(operand, count, kind)]
        assert sorted(value for (value,) in found) == counts


def test_the_memory_of_a_thread_stays_until_it_is_too_small():
    members = Team(2)
    before = members.memory(1, 100)
    before[:] = 3
    assert members.memory(1, 40).ctypes.data == before.ctypes.data
    assert (members.memory(1, 100) == 3).all()
    larger = members.memory(1, 101)
    assert not larger.any()
    assert [len(members.memory(0, 0)), len(larger)] == [0, 101]
    assert [len(memory) for memory in members.memories(150)] == [150, 150]
    assert all(memory.ctypes.data % 64 == 0 for memory in (before, larger, *members.memories(0)))


@pytest.mark.parametrize("size", SIZES)
def test_a_program_waits_for_the_last_tile(size):
    set_threads(size)
    done = []

    def work(first, count):
        time.sleep(0.02 * (first == 0))
        done.append(first)

    run(work, tiles_of([1] * 5))
    assert len(done) == 5


@pytest.mark.parametrize("size", SIZES)
def test_only_the_calling_thread_pokes_the_transport_now_and_then(size):
    set_threads(size)
    meeting, own, pokes = Meeting(size), [], []

    def work(first, count):
        meeting.attend()
        if threading.current_thread() is threading.main_thread():
            own.append(first)

    run(work, tiles_of([1] * 200), between=lambda: pokes.append(threading.current_thread()))
    assert set(pokes) <= {threading.main_thread()}
    assert len(pokes) == len(own) // -(-200 // (POKES * size))
    assert (len(own) == 200) == (size == 1)
    assert len(pokes) == POKES or size > 1


@pytest.mark.parametrize("size", SIZES)
def test_an_error_of_the_transport_stops_the_team(size):
    set_threads(size)
    meeting, done, tiles = Meeting(size), [], tiles_of([1] * 1000)

    def poke():
        raise TimeoutError("rank 1 does not answer")

    def work(first, count):
        meeting.attend()
        done.append(time.sleep(0.001))

    with pytest.raises(TimeoutError, match="rank 1 does not answer"):
        run(work, tiles, between=poke)
    assert len(done) < 800
    done.clear()
    run(work, tiles)
    assert len(done) == 1000, "a team can be used after an error"


@pytest.mark.parametrize("size", SIZES)
def test_an_error_of_any_thread_is_raised_and_the_rest_is_left_undone(size):
    members, left = Team(size), []
    for fails_in in range(size):
        meeting, stopped = Meeting(size), threading.Event()

        def work(thread, most, fails_in=fails_in, meeting=meeting, stopped=stopped):
            meeting.attend()
            if thread == fails_in:
                raise ArithmeticError(f"thread {thread} at work")
            assert stopped.wait(patient(10)), "the others were not stopped"
            return False

        with pytest.raises(ArithmeticError, match=f"thread {fails_in} at work"):
            members.each(size, lambda thread, work=work: partial(work, thread), 1, stopped.set)
    members.each(size, lambda thread: lambda most: left.append(thread), 1, lambda: None)
    assert sorted(left) == list(range(size)), "a team can be used after an error"


@pytest.mark.parametrize("size", [0, -1])
def test_a_team_without_threads_is_refused(size):
    for make in (Team, set_threads):
        with pytest.raises(ValueError, match=f"a team of {size} threads cannot compute; ask for at least 1"):
            make(size)


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
    assert len({memory.ctypes.data for one in members for memory in one.memories(64)}) == 9


def _train(world, event, order, num_threads, **flags):
    set_threads(num_threads)
    part = event.part(world.transport, event.grouping("random", world.size, seed=world.size))
    model = InteractionNetwork(3, 6, hidden=16, graph_iters=2, order=order, **flags)
    sink = GradientSink(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rejected = 0
    for key in (5, 6):
        logits = model(part.graph, part.halo, key)
        logits.backward(torch.tanh(logits.detach()) / event.graph.num_edges)
        rejected += sink.reduce(world.transport)
        optimizer.step()
    return rejected, sha(*model.parameters())


@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_training_ends_with_the_same_bits_on_any_threads_of_any_ranks(order):
    event = TiledEvent.of(random_event(3, 400, 4000, reach=4), np.arange(400) * 24 // 400, 24)
    found = [run_ranks(_train, ranks, event, order, threads) for ranks in (1, 3) for threads in SIZES]
    assert found == [[found[0][0]] * ranks for ranks in (1, 3) for _ in SIZES]
    assert found[0][0][0] == 0, "partials that are not finite"


def test_one_memory_for_all_threads_would_be_seen(monkeypatch):
    """The test above can fail: threads that share memory to work in spoil each other's tiles."""
    event = TiledEvent.of(random_event(3, 2000, 60_000), np.arange(2000) * 24 // 2000, 24)
    alone = run_ranks(_train, 1, event, "edge-first", 1)

    class Sharing(Team):
        def memory(self, thread, size):
            assert size < 2**22, "larger memory would be made while another thread works in the one before"
            return super().memory(0, 2**22)

        def __init__(self, size):
            super().__init__(size)
            self.memory(0, 0)

    monkeypatch.setattr(program_module, "Team", Sharing)
    assert run_ranks(_train, 1, event, "edge-first", 3) != alone


# Few tiles with many rows: some have several strips.
FEW_TILES = TiledEvent.of(random_event(3, 400, 4000, reach=8), np.arange(400) * 6 // 400, 6)


def _train_with_dropout(world, order, products):
    return _train(world, FEW_TILES, order, 1, dropout=0.3, products=products)


@pytest.mark.parametrize("products", [None, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_no_bit_depends_on_the_length_of_a_strip(order, products, monkeypatch):
    expected = run_ranks(_train_with_dropout, 2, order, products)
    for strip in (8, 24, 5):
        monkeypatch.setattr(program_module, "STRIP", strip)
        assert run_ranks(_train_with_dropout, 2, order, products) == expected


def test_what_the_memory_of_threads_held_before_reaches_nothing(monkeypatch):
    """It holds anything: numbers that are not finite here."""
    expected = run_ranks(_train_with_dropout, 2, "node-first", torch.bfloat16)

    class Spoilt(Team):
        def memory(self, thread, size):
            before = len(self._memory[thread])
            memory = super().memory(thread, size)
            if len(memory) != before:
                memory[:] = 0xFF
            return memory

    monkeypatch.setattr(program_module, "Team", Spoilt)
    assert run_ranks(_train_with_dropout, 2, "node-first", torch.bfloat16) == expected


def _python_calls(world, num_tiles):
    """Of a node stage and of an edge stage, forward and backward."""
    event = TiledEvent.of(random_event(3, 400, 4000), np.arange(400) * num_tiles // 400, num_tiles)
    part = event.part(world.transport, event.grouping("ranges", 1))
    generator = torch.Generator().manual_seed(0)
    nodes, edges = NodeStage(an_mlp(3, (16, 16), generator)), EdgeStage(an_mlp(2 * 16 + 6, (16, 16), generator))
    GradientSink(torch.nn.ModuleList([nodes, edges]))
    counted = []

    def step():
        states = nodes([part.graph.features], part.graph)
        new_edges, sums = edges(part.halo.spread(states), part.graph.edge_features, part.graph)
        (new_edges.sum() + sums.sum()).backward()

    for _ in range(2):  # the first one compiles
        calls = Counter()
        gc.collect()  # destructors of what other tests left are calls, too
        gc.disable()
        sys.setprofile(lambda frame, what, argument, calls=calls: calls.update([what]))
        try:
            step()
        finally:
            sys.setprofile(None)
            gc.enable()
        counted.append(calls["call"])
    return counted[1]


def test_the_number_of_python_calls_does_not_depend_on_the_number_of_tiles():
    few, many = (run_ranks(_python_calls, 1, num_tiles)[0] for num_tiles in (8, 64))
    assert few == many


def test_a_thread_that_takes_a_tile_shows_others_what_it_wrote_and_sees_what_they_wrote():
    """On x86 every locked instruction does; elsewhere the counter has to ask for it."""
    take = program_module._next
    taken = njit(lambda counter: take(counter))
    counter = np.array([7], np.int64)
    assert (taken(counter), taken(counter), counter[0]) == (7, 8, 9)
    (code,) = taken.inspect_llvm().values()
    assert "atomicrmw add" in code
    assert "acq_rel" in code
