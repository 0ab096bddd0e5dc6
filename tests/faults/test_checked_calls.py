"""A rank that skips a layer or a backward pass: with calls checked it is named at once, else at the deadline."""

import pytest
import torch
from marks import fault, slow_fault
from waiting import wait_until

from domainpar.parallel.transport import CHECK_CALLS
from domainpar.testing import find_mpiexec, run_ranks

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
TRANSPORTS = [
    "threads",
    slow_fault("gloo"),
    pytest.param("mpi", marks=[needs_mpi, pytest.mark.faults]),
]


def exchange(world, rows: int = 4) -> None:
    others = [0 if rank == world.rank else rows for rank in range(world.size)]
    block = torch.zeros(sum(others), 3)
    world.transport.start(block, others, torch.empty_like(block), others).finish()


def a_step(world, skip: str) -> str:
    """Two layers forward, two back, a sum over ranks; rank 1 leaves something out. Returns what it was told."""
    world.transport._checks_calls = True  # where it is not read from the environment: forkserver's is an older one
    left_out = skip if world.rank == 1 else ""
    try:
        for phase, layers in (("forward", 2), ("backward", 2)):
            world.mark(phase, 5)
            for _ in range(layers - (left_out == phase) if left_out != "a whole backward" or phase == "forward" else 0):
                exchange(world)
        world.mark("reduce", 5)
        world.transport.all_reduce(torch.ones(3, dtype=torch.int64))
    except RuntimeError as error:
        world.transport._checks_calls = False  # ranks part in peace
        return str(error)
    return ""


@fault(37)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_skips_something_is_named_at_once(transport):
    assert run_ranks(a_step, 3, "nothing", transport=transport) == [""] * 3
    for skip in ("forward", "backward", "a whole backward"):
        told = run_ranks(a_step, 3, skip, transport=transport)
        # Threads of a failed rank are ended before they can compare.
        told = [text for text in told if "different calls" in text]
        assert told
        assert all("rank 1 in " in text for text in told)
        assert all("step 5, " in text for text in told)


@fault(36)
def test_rows_of_another_type_are_named(monkeypatch):
    def work(world):
        send = [0 if rank == world.rank else 2 for rank in range(world.size)]
        block = torch.zeros(sum(send), 3, dtype=torch.bfloat16 if world.rank == 2 else torch.float32)
        world.transport.start(block, send, torch.empty_like(block), send).finish()

    monkeypatch.setenv(CHECK_CALLS, "1")
    with pytest.raises(RuntimeError, match=r"rank 2 in an exchange of rows of \(3,\) torch.bfloat16"):
        run_ranks(work, 3)


def rows_of_another_type(world) -> str:
    """Rank 1 sends half as many bytes a row, which gloo alone would take without a word."""
    world.transport.deadline = 2.0
    world.transport._checks_calls = False
    block = torch.ones(2, 4, dtype=torch.bfloat16 if world.rank == 1 else torch.float32)
    counts = [2, 0] if world.rank == 1 else [0, 2]
    with pytest.raises(RuntimeError) as raised:
        world.transport.start(block, counts, torch.zeros_like(block), counts).finish()
    world.mark("told", 0)
    # Whoever leaves first costs the other its connection.
    with world.transport.elsewhere():
        wait_until(lambda: all("told" in str(mark) for mark in world.transport.board.read()))
    return str(raised.value)


@fault(36)
@pytest.mark.faults
def test_gloo_never_takes_rows_of_another_width_for_its_own():
    told = run_ranks(rows_of_another_type, 2, transport="gloo")
    assert any("waited 2 s in an exchange (gloo)" in text for text in told), told
