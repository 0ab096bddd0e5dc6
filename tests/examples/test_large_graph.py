"""`examples/products.py`: slices of a graph that no rank holds give the losses of one rank."""

import re
from pathlib import Path

import pytest
from forked import printed_by_ranks

PROGRAM = Path(__file__).parents[2] / "examples/products.py"
NUM_NODES, NUM_EDGES = 2000, 19968


def printed(num_ranks):
    """Losses, and nodes, ghosts and edges of each rank."""
    size = ["--nodes", str(NUM_NODES), "--edges", "20000", "--steps", "3", "--double"]
    output = printed_by_ranks(PROGRAM, num_ranks, *size)
    found = re.findall(r"rank \d: (\d+) nodes, (\d+) of others, (\d+) edges, \d+\.\d+ GiB", output)
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", output)]
    return losses, [tuple(map(int, one)) for one in found]


def test_three_ranks_that_hold_slices_of_a_graph_learn_as_one():
    alone, ((nodes, ghosts, edges),) = printed(1)
    assert (nodes, ghosts, edges) == (NUM_NODES, 0, NUM_EDGES)
    assert len(alone) == 3
    assert alone[2] < alone[0] - 0.1
    losses, held = printed(3)
    assert losses == pytest.approx(alone, rel=1e-12, abs=0)
    assert [sum(column) for column in zip(*held)][::2] == [NUM_NODES, NUM_EDGES]
    assert len(held) == 3
    assert max(nodes + ghosts for nodes, ghosts, _ in held) < NUM_NODES / 2
