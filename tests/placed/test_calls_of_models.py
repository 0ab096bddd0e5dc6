"""Models from outside: what they are given and give back, how a refusal names its place, and what comes after one."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from whole_and_split import ODD, USUAL, gap, sums

from domainpar import NotExact, parallelize, split_graph
from domainpar.placed.moves import whole
from domainpar.testing import run_ranks

Pair = namedtuple("Pair", "nodes graph")


@dataclass
class Result:
    nodes: torch.Tensor


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args):
        return self.function(self, *args)


def part_of(world, sample=USUAL):
    owner = np.array(sample.assignment) % world.size
    return split_graph(sample.edge_index, sample.num_nodes, world, partitioner=owner)


def test_results_of_any_nesting_come_back_as_they_are():
    def nest(net, x):
        return [x, (x * 2, None, 3)], {"a": Pair(x, x.sum(0))}, OrderedDict(b=x[:, 0]), Result(x * 3)

    def work(world):
        (first, (second, nothing, three)), named, ordered, result = Calls(nest)(part_of(world).nodes(USUAL.x))
        assert (nothing, three) == (None, 3)
        assert isinstance(named["a"], Pair)
        return [whole(it) for it in (first, second, named["a"].graph, ordered["b"], result.nodes)]

    x = USUAL.x
    for found in run_ranks(work, 4):
        torch.testing.assert_close(found, [x, x * 2, x.sum(0), x[:, 0], x * 3])


def test_a_refusal_names_the_innermost_module_and_the_line_on_every_rank():
    inner = Calls(lambda net, x: x.sort(0))

    def work(world):
        model = parallelize(Calls(lambda net, x: net.outer(x), outer=nn.Sequential(inner)), world)
        with pytest.raises(
            NotExact, match=r"^outer.0 \(Calls\), .*test_calls_of_models.py:\d+: torch.sort of rows of 13"
        ):
            model(part_of(world).nodes(USUAL.x))

    for size in (1, 4):
        run_ranks(work, size)


def test_after_a_refusal_the_next_call_is_right():
    def work(world):
        part = part_of(world)
        model = parallelize(Calls(lambda net, x, bad: x.sort(0) if bad else x.sum(0)), world)
        x = part.nodes(USUAL.x)
        with pytest.raises(NotExact):
            model(x, True)
        assert len(torch.ones(3).sort().values) == 3
        return whole(model(x, False))

    for found in run_ranks(work, 4):
        assert gap(found, USUAL.x.sum(0)) < 1e-14


def test_rows_of_two_splits_of_one_graph_meet_by_their_numbers():
    def work(world):
        one, other = part_of(world), split_graph(USUAL.edge_index, 13, world, partitioner=np.arange(13) % world.size)
        x, y = one.nodes(USUAL.x), other.nodes(USUAL.z)
        ends = other.edge_index
        return whole(x * y + y), whole(torch.zeros_like(x).index_add(0, ends[1], x[ends[0]] * other.edges(USUAL.e)))

    expected = USUAL.x * USUAL.z + USUAL.z, sums(USUAL.x, *USUAL.edge_index, USUAL.e)
    for found in run_ranks(work, 4):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_what_was_kept_from_another_graph_does_not_fit():
    def work(world):
        kept = part_of(world).nodes(USUAL.x)
        other = ODD["as many edges as nodes"]
        with pytest.raises(RuntimeError, match=r"7.*13|13.*7"):
            part_of(world, other).nodes(other.x) + kept

    run_ranks(work, 4)
