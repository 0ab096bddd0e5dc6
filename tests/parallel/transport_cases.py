"""What every transport must do, as functions of a world; `run_ranks` runs them on any of them."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from waiting import wait_until

from domainpar.common.agreement import Refused, agree, agree_on, on_root
from domainpar.common.problems import Problem
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.transport import Pending, Transport
from domainpar.parallel.world import World
from domainpar.testing import patient

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def count_table(size: int, seed: int) -> np.ndarray:
    """Rows from each rank (first axis) to each other, uneven, about half of them zero."""
    rng = np.random.default_rng(seed)
    table = rng.integers(1, 9, (size, size)) * rng.integers(0, 2, (size, size))
    np.fill_diagonal(table, 0)
    return table


def rows_between(sender: int, receiver: int, count: int, dtype: torch.dtype = torch.float32, width: int = 3) -> Tensor:
    """Rows that tell who sent them to whom, exact in every dtype."""
    row = torch.arange(count * width).reshape(count, width) % 7
    return (row + 8 * (sender % 4) + 32 * (receiver % 4)).to(dtype)


def buffers(
    transport: Transport, table: np.ndarray, dtype: torch.dtype = torch.float32, width: int = 3
) -> tuple[Tensor, list[int], Tensor, list[int], Tensor]:
    """Arguments of `start`, and what should be received."""
    me = transport.rank
    peers = range(transport.size)
    send = torch.cat([rows_between(me, peer, int(table[me, peer]), dtype, width) for peer in peers])
    expected = torch.cat([rows_between(peer, me, int(table[peer, me]), dtype, width) for peer in peers])
    return send, table[me].tolist(), torch.full_like(expected, 77), table[:, me].tolist(), expected


def rows_reach_the_right_rank_in_every_dtype(world: World) -> None:
    for seed, dtype in enumerate(DTYPES):
        send, send_counts, receive, receive_counts, expected = buffers(
            world.transport, count_table(world.size, seed), dtype
        )
        world.transport.start(send, send_counts, receive, receive_counts).finish()
        assert torch.equal(receive, expected)


def rows_may_flow_one_way_only(world: World) -> None:
    table = np.zeros((world.size, world.size), int)
    table[0, 1:] = 5
    send, send_counts, receive, receive_counts, expected = buffers(world.transport, table)
    world.transport.start(send, send_counts, receive, receive_counts).finish()
    assert torch.equal(receive, expected)


def an_exchange_of_nothing_ends(world: World) -> None:
    nothing, zeros = torch.empty(0, 4), [0] * world.size
    world.transport.start(nothing, zeros, nothing.clone(), zeros).finish()


def finishing_twice_does_nothing(world: World) -> None:
    send, send_counts, receive, receive_counts, expected = buffers(world.transport, count_table(world.size, 4))
    pending = world.transport.start(send, send_counts, receive, receive_counts)
    pending.finish()
    receive += 1
    pending.finish()
    assert torch.equal(receive, expected + 1)


def exchanges_in_flight_may_finish_in_any_order(world: World) -> None:
    started = []
    for seed in range(6):
        send, send_counts, receive, receive_counts, expected = buffers(
            world.transport, count_table(world.size, seed + 50)
        )
        started.append(
            (world.transport.start(send + seed, send_counts, receive, receive_counts), receive, expected + seed)
        )
    order = np.random.default_rng(world.rank).permutation(len(started))
    for position in order:
        pending, receive, expected = started[position]
        pending.finish()
        assert torch.equal(receive, expected)


def rows_arrive_in_the_tail_of_a_larger_buffer(world: World) -> None:
    send, send_counts, _, receive_counts, expected = buffers(world.transport, count_table(world.size, 3))
    joined = torch.full((4 + len(expected), 3), -1.0)
    world.transport.start(send, send_counts, joined[4:], receive_counts).finish()
    assert torch.equal(joined[4:], expected)
    assert (joined[:4] == -1).all()


def a_rank_may_lag_behind(world: World) -> None:
    for step in range(5):
        time.sleep(0.004 * ((world.rank + step) % world.size))
        send, send_counts, receive, receive_counts, expected = buffers(world.transport, count_table(world.size, step))
        pending = world.transport.start(send, send_counts, receive, receive_counts)
        values = torch.tensor([step])
        world.transport.all_reduce(values)
        pending.finish()
        assert torch.equal(receive, expected)
        assert values.item() == step * world.size


def large_messages_arrive_whole(world: World) -> None:
    table = np.where(np.eye(world.size), 0, 20_000)
    send, send_counts, receive, receive_counts, expected = buffers(world.transport, table, width=16)
    world.transport.start(send, send_counts, receive, receive_counts).finish()
    assert torch.equal(receive, expected)


def bytes_sent_are_those_of_the_rows(world: World) -> None:
    world.take_counters()
    table = count_table(world.size, 9)
    send, send_counts, receive, receive_counts, _ = buffers(world.transport, table, torch.float64)
    world.transport.start(send, send_counts, receive, receive_counts).finish()
    counters = world.take_counters()
    assert counters.bytes_sent == table[world.rank].sum() * 3 * 8
    assert counters.seconds_exchanging > 0
    assert counters.seconds_waiting > 0
    assert world.take_counters().bytes_sent == 0


def payloads_of_any_size_are_gathered(world: World) -> None:
    own = bytes([world.rank]) * (3 * world.rank)
    expected = [bytes([rank]) * (3 * rank) for rank in range(world.size)]
    assert world.transport.all_gather(own) == expected
    assert world.transport.all_gather(b"") == [b""] * world.size


def every_rank_can_broadcast(world: World) -> None:
    for root in range(world.size):
        payload = f"from {root}".encode() * 1000 if world.rank == root else None
        assert world.transport.broadcast(payload, root) == f"from {root}".encode() * 1000
    assert world.transport.broadcast(b"" if world.is_root else None) == b""


def integers_are_reduced_exactly(world: World) -> None:
    ranks = range(world.size)
    large = 2**62 // world.size + 1
    for op, expected in (
        ("sum", [sum(ranks), large * world.size, 0]),
        ("max", [max(ranks), large, 0]),
        ("min", [0, large, 1 - world.size]),
    ):
        values = torch.tensor([world.rank, large, -world.rank])
        if op == "sum":
            values[2] = 0
        world.transport.all_reduce(values, op)
        assert values.tolist() == expected


def floats_are_not_reduced(world: World) -> None:
    for reduce in (world.transport.all_reduce, world.transport.start_all_reduce):
        with pytest.raises(ValueError, match="int64"):
            reduce(torch.ones(2))
        with pytest.raises(ValueError, match="contiguous"):
            reduce(torch.ones(4, dtype=torch.int64)[::2])


def groups_of_every_size(world: World) -> Iterator[Transport]:
    """The whole world, then transports of 1, 2, 3 ... of its ranks."""
    yield world.transport
    for cut in range(1, world.size):
        yield world.transport.split([range(cut), range(cut, world.size)])


def sum_to_start(transport: Transport, shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """What this rank brings to a sum, and the sum; floats would not hold it."""
    rng = np.random.default_rng(seed)
    everyone = torch.from_numpy(rng.integers(-(2**58), 2**58, (transport.size, *shape)))
    return everyone[transport.rank].clone(), everyone.sum(0)


def sums_in_flight_may_finish_in_any_order(world: World) -> None:
    for transport in groups_of_every_size(world):
        shapes = [(4,), (0,), (2, 3), (), (40_000,), (0, 5), (1,)]
        sums = [sum_to_start(transport, shape, seed) for seed, shape in enumerate(shapes)]
        started = [transport.start_all_reduce(values) for values, _ in sums]
        for position in np.random.default_rng(world.rank).permutation(len(sums)):
            started[position].finish()
            assert torch.equal(*sums[position])


def exchanges_sums_and_blocking_calls_may_interleave(world: World) -> None:
    for transport in groups_of_every_size(world):
        began: list[tuple[Pending, Tensor, Tensor]] = []
        for seed in range(4):
            values, total = sum_to_start(transport, (3 * seed,), seed)
            began.append((transport.start_all_reduce(values), values, total))
            blocking, total = sum_to_start(transport, (2,), seed + 10)
            transport.all_reduce(blocking)
            assert torch.equal(blocking, total)
            send, send_counts, receive, receive_counts, rows = buffers(transport, count_table(transport.size, seed))
            began.append((transport.start(send, send_counts, receive, receive_counts), receive, rows))
            began[seed][0].progress()
            assert transport.all_gather(bytes([seed])) == [bytes([seed])] * transport.size
        for position in np.random.default_rng(transport.rank).permutation(len(began)):
            pending, received, expected = began[position]
            pending.finish()
            assert torch.equal(received, expected)


def a_sum_that_nobody_finishes_does_no_harm(world: World) -> None:
    for _ in range(20):
        world.transport.start_all_reduce(torch.ones(8, dtype=torch.int64))
        others = [torch.full((8,), -1) for _ in range(20)]  # may get the memory of what was forgotten
        world.transport.barrier()
        assert all((other == -1).all() for other in others)


def progress_may_be_asked_for_at_any_time(world: World) -> None:
    table = np.where(np.eye(world.size), 0, 10_000)
    send, send_counts, receive, receive_counts, rows = buffers(world.transport, table, width=16)
    values, total = sum_to_start(world.transport, (10_000,), 3)
    for pending, arrived, expected in (
        (world.transport.start(send, send_counts, receive, receive_counts), receive, rows),
        (world.transport.start_all_reduce(values), values, total),
    ):
        for _ in range(5 * world.rank):
            pending.progress()
        pending.finish()
        assert torch.equal(arrived, expected)
        arrived += 1
        pending.progress()
        pending.finish()
        pending.progress()
        assert torch.equal(arrived, expected + 1)


def exact_sums_are_reduced_while_others_are_added_to(world: World) -> None:
    first, second = IntegerSums(3), IntegerSums(2)
    first.add(torch.tensor([0.1, -1e-3 * world.rank, float("nan")]))
    pending = first.start_reduce(world.transport)
    for _ in range(3):
        second.add(torch.tensor([-0.3, 2.0]))
        pending.progress()
    later = second.start_reduce(world.transport)
    pending.finish()
    assert first.total()[0] == pytest.approx(0.1 * world.size)
    assert first.rejected == world.size
    pending.finish()
    later.finish()
    assert second.total()[1] == 6 * world.size
    assert second.rejected == 0
    assert len(set(world.transport.all_gather(first.total().numpy().tobytes()))) == 1


def wrong_counts_are_refused_at_once(world: World) -> None:
    rows, zeros = torch.zeros(2, 3), [0] * world.size
    with pytest.raises(ValueError, match="send_counts"):
        world.transport.start(rows, zeros, rows[:0], zeros)
    to_oneself = [2 * (rank == world.rank) for rank in range(world.size)]
    with pytest.raises(ValueError, match="send_counts"):
        world.transport.start(rows, to_oneself, rows[:0], zeros)
    with pytest.raises(ValueError, match="not contiguous"):
        world.transport.start(rows[:0], zeros, torch.zeros(3, 2).T, zeros)


def groups_talk_apart(world: World) -> None:
    odd = list(range(1, world.size, 2))
    even = list(range(0, world.size, 2))
    group = world.transport.split([even, odd] if odd else [even])
    members = odd if world.rank % 2 else even
    assert (group.rank, group.size) == (members.index(world.rank), len(members))
    assert group.board is world.transport.board, "a rank of a group that comes late could not be named"
    assert group.all_gather(str(world.rank).encode()) == [str(rank).encode() for rank in members]
    send, send_counts, receive, receive_counts, expected = buffers(group, count_table(group.size, world.rank % 2))
    pending = group.start(send, send_counts, receive, receive_counts)
    world.transport.barrier()
    pending.finish()
    assert torch.equal(receive, expected)


def groups_that_miss_a_rank_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="each of"):
        world.transport.split([list(range(world.size)), [0]])


class _SendOnInBackward(torch.autograd.Function):
    """Rows go to the next rank in forward, gradients to the previous one in backward."""

    @staticmethod
    def forward(ctx, rows: Tensor, transport: Transport) -> Tensor:
        ctx.transport = transport
        return pass_on(rows, transport, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return pass_on(grad.contiguous(), ctx.transport, -1), None


def pass_on(rows: Tensor, transport: Transport, step: int) -> Tensor:
    size, me = transport.size, transport.rank
    if size == 1:
        return rows.clone()
    send_counts, receive_counts = [0] * size, [0] * size
    send_counts[(me + step) % size] = receive_counts[(me - step) % size] = len(rows)
    received = torch.empty_like(rows)
    transport.start(rows, send_counts, received, receive_counts).finish()
    return received


def backward_passes_may_exchange(world: World) -> None:
    rows = torch.full((2, 3), float(world.rank), requires_grad=True)
    received = _SendOnInBackward.apply(rows, world.domain)
    assert (received == (world.rank - 1) % world.size).all()
    (received * (10 + world.rank)).sum().backward()
    assert (rows.grad == 10 + (world.rank + 1) % world.size).all()


def a_problem_of_one_rank_is_refused_by_all(world: World) -> None:
    agree(world.transport, None)
    last = world.size - 1
    with pytest.raises(Refused, match=r"event 7 has no truth") as refused:
        agree(world.transport, ValueError("event 7 has no truth") if world.rank == last else None)
    texts = world.transport.all_gather(str(refused.value).encode())
    assert len(set(texts)) == 1
    assert (f"rank {last}" in str(refused.value)) == (world.size > 1)
    with pytest.raises(Refused, match=r"^no store$"):
        agree(world.transport, "no store")
    with pytest.raises(Refused, match=r"^it is bad \| event 7 \| (rank 0/\d+ \| )?file x.zip\nhint: copy it$"):
        agree(world.transport, Problem("it is bad", "copy it", event="7", file="x.zip") if world.is_root else None)


def what_differs_between_ranks_is_named(world: World) -> None:
    agree_on(world.transport, {"torch": "2.13.0", "--lr": "0.1"})
    last = world.size - 1
    if world.size > 2:
        with pytest.raises(Refused, match=rf"^--lr is 0.2 on rank {last}, but 0.1 on the others"):
            agree_on(world.transport, {"torch": "2.13.0", "--lr": "0.2" if world.rank == last else "0.1"})
        with pytest.raises(Refused, match=rf"^--clip is missing on rank {last}, but 1 on the others"):
            agree_on(world.transport, {} if world.rank == last else {"--clip": "1"})


def what_only_the_root_can_decide_reaches_all(world: World) -> None:
    asked = []
    assert on_root(world.transport, lambda: asked.append(world.rank) or "runs/7") == "runs/7"
    assert asked == [0] * world.is_root

    def refuse() -> str:
        raise FileExistsError("runs/7 is another run")

    with pytest.raises(Refused, match="another run"):
        on_root(world.transport, refuse)


def step_boundaries_add_counts(world: World) -> None:
    own = torch.tensor([world.rank, 1])
    assert world.step_boundary(own).tolist() == [sum(range(world.size)), world.size]
    assert own.tolist() == [world.rank, 1]


def every_rank_sees_the_last_mark_of_all(world: World) -> None:
    world.mark("forward", step=11, event=str(world.rank))

    def all_seen() -> bool:
        marks = list(map(str, world.transport.board.read()))
        return all(
            f"rank {i}" in marks[i] and f"step 11, forward of event {i}, " in marks[i] for i in range(world.size)
        )

    with world.transport.elsewhere():  # a mark may still be on its way
        wait_until(all_seen, 20)
    world.transport.barrier()


CASES: list[Callable[[World], None]] = [
    what_differs_between_ranks_is_named,
    rows_reach_the_right_rank_in_every_dtype,
    rows_may_flow_one_way_only,
    an_exchange_of_nothing_ends,
    finishing_twice_does_nothing,
    exchanges_in_flight_may_finish_in_any_order,
    rows_arrive_in_the_tail_of_a_larger_buffer,
    a_rank_may_lag_behind,
    large_messages_arrive_whole,
    bytes_sent_are_those_of_the_rows,
    payloads_of_any_size_are_gathered,
    every_rank_can_broadcast,
    integers_are_reduced_exactly,
    floats_are_not_reduced,
    sums_in_flight_may_finish_in_any_order,
    exchanges_sums_and_blocking_calls_may_interleave,
    a_sum_that_nobody_finishes_does_no_harm,
    progress_may_be_asked_for_at_any_time,
    exact_sums_are_reduced_while_others_are_added_to,
    wrong_counts_are_refused_at_once,
    groups_talk_apart,
    groups_that_miss_a_rank_are_refused,
    backward_passes_may_exchange,
    a_problem_of_one_rank_is_refused_by_all,
    what_only_the_root_can_decide_reaches_all,
    step_boundaries_add_counts,
    every_rank_sees_the_last_mark_of_all,
]


def all_cases(world: World) -> list[str]:
    """Every case in one launch; returns the names of those that ran."""
    for case in CASES:
        try:
            case(world)
        except Exception as error:
            error.add_note(f"in {case.__name__}")
            raise
    return [case.__name__ for case in CASES]


def large_messages_move_in_progress_alone(world: World) -> None:
    """For MPI, which moves nothing larger than some kB unless it is called."""
    transport, size, unfinished = world.transport, world.size, len(world.transport._unfinished)
    send, send_counts, receive, receive_counts, rows = buffers(
        transport, 40_000 * (1 - np.eye(size, dtype=int)), width=32
    )
    values, total = sum_to_start(transport, (100_000,), 1)
    exchange, reduction = (
        transport.start(send, send_counts, receive, receive_counts),
        transport.start_all_reduce(values),
    )
    started, give_up_at = transport._unfinished[unfinished:], time.monotonic() + patient(15)
    while any(posted.requests for posted in started) and time.monotonic() < give_up_at:
        exchange.progress()
        reduction.progress()
        time.sleep(0.001)  # stands for a piece of work
    assert torch.equal(receive, rows)
    assert torch.equal(values, total)
    patience, transport.deadline = transport.deadline, 0.0
    exchange.finish()
    reduction.finish()
    transport.deadline = patience
    assert len(transport._unfinished) == unfinished, "buffers are kept for ever"


def one_rank_fails_in_between(world: World) -> None:
    """Rank 1 fails after it has started a sum and an exchange and before it would have started another sum."""
    start_a_sum(world).progress()
    start_an_exchange(world).progress()
    if world.rank == 1:
        raise KeyError("no such thing")
    pending = start_a_sum(world)
    with pytest.raises(RuntimeError, match=r"rank 1 failed|lost the connection in all_reduce"):
        pending.finish()


def shapes_of_a_sum_differ(world: World) -> None:
    pending = world.transport.start_all_reduce(torch.ones(3 if world.is_root else 1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"is in all_reduce \(sum\) of [13] values where rank . is in all_reduce"):
        pending.finish()


def one_rank_gathers_instead(world: World, start: Callable[[World], Pending]) -> str:
    """Rank 1 calls all_gather where the others start something; what a rank is told."""
    with pytest.raises(RuntimeError) as raised:
        world.transport.all_gather(b"own") if world.rank == 1 else start(world).finish()
    return str(raised.value)


def start_an_exchange(world: World) -> Pending:
    send, send_counts, receive, receive_counts, _ = buffers(world.transport, 2 * (1 - np.eye(world.size, dtype=int)))
    return world.transport.start(send, send_counts, receive, receive_counts)


def start_a_sum(world: World) -> Pending:
    return world.transport.start_all_reduce(torch.ones(1000, dtype=torch.int64))


def all_are_told(world: World) -> bool:
    """Whether all ranks but rank 1 have said that they were told of a trouble."""
    return sum("told" in str(mark) for mark in world.transport.board.read()) == world.size - 1


def one_rank_stays_silent(world: World, start: Callable[[World], Pending]) -> str:
    """What the others are told whose deadline passes; rank 1 comes when they have been told."""
    world.transport.barrier()
    world.mark(*(("forward", 3) if world.rank != 1 else ("load", 3, "5")))
    world.transport.barrier()
    patience, world.transport.deadline = world.transport.deadline, 0.4
    told = ""
    if world.rank != 1:
        pending = start(world)
        pending.progress()
        with pytest.raises(RuntimeError) as raised:
            pending.finish()
        told = str(raised.value)
        world.mark("told", 3)
    if world.rank == 1 or start is not start_a_sum:  # an exchange may cost the connections: nobody leaves before
        with world.transport.elsewhere():
            wait_until(lambda: all_are_told(world), 20)
    world.transport.deadline = patience
    if world.rank == 1 and start is start_a_sum:
        start(world).finish()
    return told


def one_sends_too_little(world: World) -> str:
    """Rank 0 sends two rows where the others expect three; what they are told, in `finish` and nowhere else."""
    counts = [0] + [2] * (world.size - 1) if world.is_root else [0] * world.size
    expected = [0 if world.is_root else 3] + [0] * (world.size - 1)
    pending = world.transport.start(torch.zeros(sum(counts), 4), counts, torch.zeros(sum(expected), 4), expected)
    for _ in range(20 * (world.rank % 2)):
        pending.progress()
        time.sleep(0.001)
    if world.is_root:
        pending.finish()
        return ""
    with pytest.raises(RuntimeError) as raised:
        pending.finish()
    return str(raised.value)


def one_rank_comes_late_to_a_split(world: World) -> str:
    """What the others are told, for MPI, whose own call would wait for ever. Rank 1 comes when they have been told."""
    told = ""
    if world.rank == 1:
        with world.transport.elsewhere():
            wait_until(lambda: all_are_told(world), 20)
        world.transport.barrier()  # the sum in which the others waited, and which MPI keeps for it
    else:
        patience, world.transport.deadline = world.transport.deadline, 0.4
        with pytest.raises(RuntimeError) as raised:
            world.transport.split([range(world.size)])
        world.transport.deadline = patience
        told = str(raised.value)
        world.mark("told", 4)
    world.transport.barrier()
    return told


def trouble(world: World) -> tuple[str, ...]:
    """What a rank is told of all troubles; the silent exchange last, since it may cost the connections."""
    short = one_sends_too_little(world) if world.transport.name != "gloo" else ""
    split = one_rank_comes_late_to_a_split(world) if world.transport.name == "mpi" else ""
    return short, one_rank_stays_silent(world, start_a_sum), one_rank_stays_silent(world, start_an_exchange), split


def all_cases_then_trouble(world: World) -> tuple[list[str], tuple[str, ...]]:
    """Everything in one launch."""
    names = all_cases(world)
    if world.transport.name == "mpi":
        large_messages_move_in_progress_alone(world)
    return names, trouble(world)
