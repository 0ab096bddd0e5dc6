"""A call of the API that some ranks skip is named with its place in the user's program, on both sides and soon."""

import re
import sys
from pathlib import Path

import pytest
import torch
from marks import fault, slow_fault
from torch import nn

from domainpar import parallelize, split_graph
from domainpar.common.agreement import Refused
from domainpar.common.problems import Where
from domainpar.parallel.errors import RanksDiffer
from domainpar.parallel.rank_status import report
from domainpar.testing import find_mpiexec, run_command, run_ranks

HERE = r"\S*test_skipped_calls.py:\d+"
PROGRAM = Path(__file__).with_name("skipping_program.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MPIEXEC = [find_mpiexec(), "-n", "2", sys.executable]
needs_mpi = pytest.mark.skipif(MPIEXEC[0] is None, reason="no mpiexec or no mpi4py")


def step(world, skips):
    part = split_graph(torch.arange(12).view(2, 6), 12, world, partitioner="contiguous")
    model = parallelize(nn.Linear(2, 2), world)
    for _ in range(2):
        if world.rank != 1 or skips != "a loss":
            loss = model(part.nodes(torch.ones(12, 2))).sum()
        if world.rank != 1 or skips not in ("a loss", "backward"):
            loss.backward()
        model.zero_grad()
        if world.rank != 1 or skips != "a figure":
            part.nodes(torch.ones(12)).mean()


@fault(37)
@pytest.mark.parametrize("skips", ["a loss", "backward", "a figure"])
def test_a_call_of_some_ranks_only_ends_all_at_the_next_one_and_is_named(skips):
    run_ranks(step, 3, "nothing")
    with pytest.raises((RanksDiffer, Refused)) as raised:
        run_ranks(step, 3, skips)
    printed = report(raised.value, Where(rank=1, size=3))
    assert printed.startswith("domainpar: error: ")
    assert "rank 1 " in printed
    assert re.search(HERE, printed)
    assert "Traceback" not in printed


@fault(37)
@pytest.mark.parametrize(
    ("launcher", "skips", "call"),
    [
        pytest.param(MPIEXEC, "a step", "torch.sum(...)", marks=needs_mpi),
        pytest.param(MPIEXEC, "the graph", "split_graph(...)", marks=[needs_mpi, pytest.mark.faults]),
        slow_fault(TORCHRUN, "a step", "torch.sum(...)"),
    ],
    ids=["mpi", "mpi, a graph", "gloo"],
)
def test_a_rank_that_ends_while_another_waits_for_it_is_named_soon(launcher, skips, call):
    code, output = run_command([*launcher, str(PROGRAM), skips], 50)  # its own time limit is 60 s
    assert code != 0
    lines = PROGRAM.read_text().splitlines()
    begins = {"torch.sum(...)": "model(part", "split_graph(...)": "part = split"}[call]
    used = 1 + next(at for at, line in enumerate(lines) if line.strip().startswith(begins))
    (error,) = re.findall("domainpar: error: (.*)", output)
    assert "rank 1 did not come: it is in world.close() at " in error
    assert f"rank 0 waits for it in {call} at " in error
    assert f"skipping_program.py:{used} | rank 1/2 host " in error
    assert "waiting for others in close" in output
    assert "World.session(timeout=...)" in output
    assert "--timeout" not in output
