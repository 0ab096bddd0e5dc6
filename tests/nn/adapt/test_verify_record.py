"""What layers saw: rows are merged by their keys, and what cannot be says why."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from verified_networks import Masks, Net, verified


@pytest.mark.parametrize("edges", ["incoming", "incident"])
def test_rows_made_inside_a_layer_are_told_apart_by_their_keys(edges):
    found = verified(Masks(), edge_policy=edges)
    assert found.exact
    rows = {row.name: (row.rows, row.difference) for row in found.rows}
    assert rows["kept"][0] == "selected edges"
    assert rows["joined"][0] == "selected edges + nodes"
    assert all(difference is not None for _, difference in rows.values())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Doubled.apply(x * self.scale)


class Unwatched(nn.Module):
    """Layers beside the result, of whose rows nobody knows anything or which number rows that it made."""

    def __init__(self):
        super().__init__()
        self.unknown, self.numbers, self.ends, self.last = Unknown(), nn.Identity(), nn.Identity(), nn.Linear(4, 2)

    def forward(self, x, edge_index):
        self.unknown(x)
        some = (x[:, 0] > 0)[x[:, 1] > 0]
        self.numbers(some.nonzero())
        self.ends((edge_index, (x[:, 0] > 0).nonzero()))
        return self.last(x)


@pytest.mark.parametrize("edges", ["incoming", "incident"])
def test_what_cannot_be_compared_says_why_and_row_numbers_are_compared_by_what_they_name(edges):
    found = verified(Unwatched(), edge_policy=edges)
    assert found.exact
    unknown, numbers, ends = found.rows[:3]
    assert (unknown.difference, numbers.difference, ends.difference) == (None, None, 0.0)
    assert unknown.note == "not compared: nobody knows what its rows are"
    assert numbers.note == "not compared: numbers of rows that were made inside the model"
    assert ends.rows == "edges, selected nodes"


class JoinedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.Tanh()

    def forward(self, x, edge_index):
        return self.all(torch.cat([torch.cat([x, 2 * x]), 3 * x]))


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_what_backward_computes_again_is_no_other_call():
    found = verified(Net(Recomputed()))
    assert found.exact, found
    assert [row.number for row in found.rows if row.name == "middle.inner.0"] == [1]


def test_rows_joined_twice_are_compared():
    found = verified(JoinedTwice())
    assert found.exact
    assert found.rows[0].difference == 0.0
    assert found.gradients is None
