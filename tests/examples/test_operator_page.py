"""The operator of the page on operators of your own runs as it is printed, on three ranks with the results of one."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import domainpar
from domainpar.testing import run_ranks

PAGE = Path(__file__).parents[2] / "docs/recipes/model_operators.md"
DRAW = torch.Generator().manual_seed(2)
ENDS = torch.randint(24, (2, 90), generator=DRAW)
X, E = (torch.randn(size, 4, generator=DRAW, dtype=torch.float64) for size in (24, 90))


@pytest.fixture(scope="module")
def names():
    operators, self_check = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"torch": torch, "nn": nn, "Tensor": Tensor, "domainpar": domainpar, "edge_index": ENDS, "num_nodes": 24}
    names |= {"x": X, "e": E, "print": lambda value: None}
    exec(operators, names)
    return names | {"self_check": self_check}


def twice(module, x, e, edge_index):
    return module(module(x, e, edge_index).tanh(), e, edge_index)


def test_three_ranks_give_the_results_and_gradients_of_the_whole_graph(names):
    def work(world):
        owner = np.arange(24) % max(1, world.size - 1)  # the last rank owns nothing
        part = domainpar.split_graph(ENDS, 24, world, partitioner=owner)
        x, e = (tensor.clone().requires_grad_() for tensor in (X, E))
        out = twice(names["Messages"](), part.nodes(x), part.edges(e), part.edge_index)
        out.square().sum().backward()
        return part.whole(out.detach()), x.grad, e.grad

    x, e = (tensor.clone().requires_grad_() for tensor in (X, E))
    formula = lambda x, e, ends: torch.zeros_like(x).index_add(0, ends[1], x[ends[0]] * e)  # noqa: E731
    out = twice(formula, x, e, ENDS)
    out.square().sum().backward()
    for size in (1, 3):
        for found in run_ranks(work, size):
            for ours, theirs in zip(found, (out.detach(), x.grad, e.grad)):
                assert (ours - theirs).abs().max() <= 1e-13 * theirs.abs().max()


def test_verify_says_that_its_rules_are_right(names):
    exec(names["self_check"], names)
    assert names["found"].exact, names["found"]
