"""Rows read by an index or a mask."""

import numpy as np
import pytest
import torch
from torch import nn
from whole_and_split import ODD, check, check_error, sums


def without_loops(x, edge_index, mask):
    ends = edge_index[:, mask]
    return x.new_zeros(x.size(0), 4).index_add(0, ends[1], x[ends[0]])


def looped_twice(x, edge_index):
    loops = torch.stack([torch.arange(x.size(0)), torch.arange(x.size(0))])
    ends = torch.cat([edge_index, loops], 1)
    ends = torch.cat([ends[:, x[ends[0]].sum(1) > 0], loops], 1)
    return (x[ends[0]] - 2 * x[ends[1]])[:25]


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.tensor([3, 0, 3]))
        self.register_buffer("pairs", torch.tensor([[0, 1], [2, 1]]))


def changed_after(view, change_view):
    def run(x):
        base = x * 1
        seen = view(base)
        (seen if change_view else base).mul_(2)
        return base * 1, seen * 1

    return run


def changed_mask(e, w):
    with torch.no_grad():
        mask = w > 0.6
        before = e[mask]
        mask.view(-1).logical_not_()
        return e[mask].mean(0) + before.sum(0)


def flipped_and_joined(x, edge_index, src, dst, e):
    h = sums(x, src, dst, e)
    both = torch.cat([edge_index.flip(0), torch.arange(x.size(0)).expand(2, -1)], 1)
    return h[both[1]]


EXACT = {
    "places of rows that were joined, selected and joined again": lambda x, v, u, z, edge_index: (
        (lambda j: (lambda k: (k[7], k[5:20], k[13:26]))(torch.cat([j[j > 0], v])))(torch.cat([v, u])),
        (lambda j: torch.cat([j, j * 2, j * 3])[30:100])(torch.cat([x, z]).view(-1, 2)),
        looped_twice(x, edge_index),
    ),
    "both ends at once": lambda x, edge_index, e: (x[edge_index].prod(0) * e, x[edge_index.t()].sum(1)),
    "ends beside each other": lambda x, src, dst: x[torch.stack([src, dst], 1)],
    "ends, turned and masked": lambda x, edge_index, edge_mask: x[edge_index.t()[edge_mask][:, 0]],
    "a table that every rank has, by row numbers": (
        lambda net, src, edge_index, x: (net.weight[src], net.weight[edge_index], x.sum()),
        {"net": lambda: nn.Embedding(13, 4)},
    ),
    "rows by their places": lambda x, e, v, batch: (x[0], x[-1], e[3], v[2], x[-1, 1], x * batch[-1].item()),
    "some rows by their places": lambda x, e: (x[[0, 2, 2]], e[torch.tensor([5, -1])], x[[1]] * 2),
    "rows by slices": lambda x, e, v: (x[:5], x[1:], x[::2] * x[::2], x[2:4].sum(0), v * x[:5].size(0)),
    "sums of the first edges": lambda x, edge_index, e: x.new_zeros(x.size(0), 4).index_add(
        0, edge_index[:, :7][1], e[:7]
    ),
    "masked rows by their places": lambda x, mask: (x[mask][0], x[mask][1:], torch.arange(x[mask].size(0))),
    "items behind a table of row numbers": lambda x, edge_index, series: (
        x[edge_index, 0] + x[edge_index.t(), 1:2].squeeze(2).t(),
        x[..., None][edge_index, ..., 0].sum(0),
        series[np.array([0, 1]), :, 0],
    ),
    "row numbers by the numbers of their edges": lambda src, edge_index, edge_mask, x: (
        *(numbers[..., edge_mask.nonzero().view(-1)] * 2 for numbers in (edge_index, src, src.view(1, -1))),
        edge_index.t()[edge_mask.nonzero().view(-1)] * 2,
        edge_index.t()[torch.stack([edge_mask.nonzero().view(-1)] * 2)] * 2,
        x.sum(),
    ),
    "sums at both ends": lambda x, src, dst, e: (lambda h: h[src] * h[dst])(sums(x, src, dst, e)),
    "rows along another dimension": lambda series, src: series[:, src] + series.index_select(1, src),
    "an index of a column": lambda x, src: x[src.view(-1, 1)],
    "features by a mask that every rank has": lambda x, table: x[:, table[0] > 0],
    "features by a number": lambda x: x[:, 1] + x[..., -1] + x[:, 1:3].sum(1),
    "features backwards": lambda x: x[:, ::2],
    "the first of two steps": lambda series: series[0] - series[-1],
    "all rows": lambda x: x[:] + x[: x.size(0)] + x[0 : x.size(0), :],
    "rows by a mask": lambda x, mask: (x[mask], x[mask, 0], x[~mask].sum(0)),
    "the mean of rows of a mask": lambda x, mask: x[mask].mean(0) + x[mask].size(0),
    "a mask along another dimension": lambda series, mask: series[:, mask],
    "two tensors by one mask": lambda x, z, mask: x[mask] * z[mask],
    "an empty mask": lambda x, v, e, w: (x[v > 100], e[w > 100].sum(0)),
    "a mask of sums": lambda x, src, dst, e: (lambda h: h[h.sum(1) > 0])(sums(x, src, dst, e)),
    "sums of some edges": lambda x, e, edge_index, edge_mask: x.new_zeros(x.size(0), 4).index_add(
        0, edge_index[:, edge_mask][1], e[edge_mask] * x[edge_index[:, edge_mask][0]]
    ),
    "no self-loops": lambda x, src, dst, edge_index: without_loops(x, edge_index, src != dst),
    "only self-loops": lambda x, src, dst, e, edge_index: sums(x, src, dst, e)[edge_index[:, src == dst][0]],
    "a table by types": lambda table, kind, batch: (table[kind] * 2, table.index_select(0, batch)),
    "own features": lambda x, batch: x.gather(1, batch.view(-1, 1)) + torch.take_along_dim(x, batch.view(-1, 1), 1),
    "a table by types and columns": lambda table, batch: table[batch, batch],
    "bools and integers from other ranks": lambda x, w, dst, src, kind: (
        (x.new_zeros(x.size(0)).index_add(0, dst, w) > 1)[src] * 2.0,
        torch.zeros(x.size(0), dtype=torch.long).index_add(0, dst, kind)[src] * 2,
    ),
    "more dimensions from other ranks": lambda vectors, src, dst: vectors.new_zeros(vectors.size(0), 3, 2).index_add(
        0, dst, vectors[src]
    )[src],
    "another dimension from other ranks": lambda series, src, dst: series.new_zeros(2, series.size(1), 3).index_add(
        1, dst, series[:, src]
    )[:, src],
    "complex numbers from other ranks": lambda x, src, dst, e: (sums(x, src, dst, e) * 1j)[src].abs(),
    "single precision from other ranks": (
        lambda x, src, dst, e: sums(x.float(), src, dst, e.float())[src],
        {"tolerance": 1e-6},
    ),
    "every other one": lambda x: x[::2],
    "edges by an index that every rank has": (lambda e, net: e.index_select(0, net.places), {"net": Places}),
    "a table by a type and a column": lambda table, batch: table[batch, torch.tensor([0])],
    "a table of places": (lambda x, net: x[net.pairs], {"net": Places}),
    "a single truth value": lambda x: x[(x > 0).any()],
    "a row changed in place": changed_after(lambda x: x[0], True),
    "a slice changed in place": changed_after(lambda x: x[1:], True),
    "both directions changed in place": lambda e: (lambda both: (both.view(2, -1, 4).mul_(2), both * 1)[1])(
        torch.cat([e, e])
    ),
    "an index of nobody knows": lambda x: x[torch.from_numpy(np.array([0, 1]))],
    "computed numbers": lambda x, batch: x[batch],
    "a mask of two features": lambda vectors, table: vectors[:, table[:, :2] > 100],
    "rows of two equal masks": lambda x, mask: x[mask] + x[mask.clone()],
    "masked_select": lambda x, mask: x.masked_select(mask.view(-1, 1)),
    "where of numbers": lambda v: v.nonzero(),
    "where of a table": lambda x: (x > 0).nonzero(),
    "ends stacked into one": lambda edge_index: edge_index.view(-1),
    "a numpy table": lambda series: series[np.array([[0, 1]])].sum(2),
    "True": lambda series: series[True].sum(1),
    "turned and sorted out edge_index as a result": lambda edge_index, edge_mask: edge_index.flip(0)[:, edge_mask],
    "a mask changed through a view": changed_mask,
    "turned edges joined with loops": flipped_and_joined,
    "turned edges with a dimension more": lambda x, edge_index, src, dst, e: sums(x, src, dst, e)[
        edge_index.flip(0)[:, None][1][0]
    ],
    "an end that equals itself": lambda x, src, dst, e, edge_index: sums(x, src, dst, e)[edge_index[:, src == src][0]],
    "an end that equals the turned one": lambda x, src, dst, e, edge_index: sums(x, src, dst, e)[
        edge_index[:, edge_index[0] == edge_index.flip(0)[1]][0]
    ],
    "features by row numbers": lambda square, src, dst: square[src].gather(1, src.view(-1, 1)),
    "ends by a type of edge": lambda edge_index, kind, x: torch.gather(edge_index, 0, (kind > 0).long()[None]) * 2,
    "indices from other ranks": lambda x, src, mask: (
        x[mask.nonzero().view(-1)].sum(0) + x[torch.arange(x.size(0))[src]].sum(0)
    ),
    "a piece of joined ends": lambda x, edge_index: (
        torch.cat([edge_index, edge_index], 1)[:, edge_index.size(1) :][0] * 2
    ),
    "masked along features and rows": lambda x, mask, table: x[mask][:, table[0] > 0],
    "bytes as a mask": lambda x, mask: x[mask.to(torch.uint8)],
}
REFUSED = {
    "a slice of a slice whose rows are changed in place": (
        changed_after(lambda x: x[2:8][1:3], False),
        "write clone() there",
    ),
    "a row of a slice whose rows are changed in place": (
        changed_after(lambda x: x[2:8][1], False),
        "write clone() there",
    ),
    "a row whose rows are changed in place": (changed_after(lambda x: x[0], False), "write clone() there"),
    "a slice whose rows are changed in place": (changed_after(lambda x: x[1:], False), "write clone() there"),
    "take": (lambda x, src: x.take(src), "no exact form that is known here"),
}


@pytest.mark.parametrize("name", ODD)
def test_lengths_that_coincide_mean_nothing(name):
    def twice(x, src, dst, e):
        return sums(sums(x, src, dst, e), src, dst, e)

    def masked(x, e, mask, edge_mask, edge_index):
        some = x.new_zeros(x.size(0), 4).index_add(0, edge_index[:, edge_mask][1], e[edge_mask])
        return x[mask], e[edge_mask], some, x[mask].sum(0)

    for function in (twice, masked):
        check(function, ODD[name])


def test_ghosts_are_fetched_once_however_often_they_are_read():
    def thrice(x, src, dst, e):
        h = sums(x, src, dst, e)
        return h[src] * h[dst] + h[src] * 2 + h.index_select(0, src) + h.mean(0)

    assert check(thrice).ranks[4][0].forward == (2, 1)  # of x and of h; the mean


@pytest.mark.parametrize("place", [-14, 13, [0, 13], [-1, -14]])
def test_places_that_no_row_has_are_an_error_on_any_number_of_ranks_as_in_torch(place):
    """Remainders would make another row of them."""
    check_error(lambda x: x[place])
