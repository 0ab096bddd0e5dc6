"""Copies with ghosts that are kept for a second reader: current ones, with the gradients of where they are read."""

import numpy as np
import torch
from torch import nn
from whole_and_split import USUAL, check

from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.split import split_graph
from domainpar.testing import run_ranks


def test_a_copy_read_without_gradient_is_not_given_to_a_reader_that_needs_one():
    def two_readers(x, src, dst, e):
        h = x.new_zeros(x.size(0), e.size(1)).index_add(0, dst, e * x[src][:, :1])
        with torch.no_grad():
            seen = h[src].mean()
        return (h[src] * h[src]).sum(1) + seen

    check(two_readers)


def test_owned_rows_taken_without_gradient_are_not_given_to_a_reader_that_needs_one():
    def two_readers(x, src, dst, e):
        h = x.new_zeros(x.size(0), x.size(1)).index_add(0, dst, x[src])
        with torch.no_grad():
            seen = (x + h).mean()
        return (x + h) * seen

    check(two_readers)


class Smoothed(nn.Module):
    """Neighbours weighted by degrees, which each round counts anew, as PyG's layers do; self-loops taken out first."""

    def __init__(self, weighted):
        super().__init__()
        self.rounds, self.weight = 3, nn.Parameter(torch.ones(())) if weighted else 1.0

    def forward(self, x, edge_index):
        for _ in range(self.rounds):
            src, dst = edge_index[:, edge_index[0] != edge_index[1]]
            ones = torch.ones(src.size(0), dtype=x.dtype) * self.weight
            degree = x.new_zeros(x.size(0)).index_add(0, dst, ones).clamp(min=1)
            x = x + x.new_zeros(x.size(0), x.size(1)).index_add(0, dst, x[src] / degree[src].unsqueeze(-1))
        return x


def exchanges(weighted):
    def work(world):
        part = split_graph(USUAL.edge_index, USUAL.num_nodes, world, partitioner=np.array(USUAL.assignment))
        parallelize(Smoothed(weighted), world)(part.nodes(USUAL.x), part.edge_index)
        return part.num_exchanges

    return set(run_ranks(work, 4))


def test_what_is_made_alike_is_fetched_once():
    check(lambda net, x, edge_index: net(x, edge_index), net=lambda: Smoothed(weighted=False).double())
    check(lambda net, x, edge_index: net(x, edge_index), net=lambda: Smoothed(weighted=True).double())
    assert exchanges(weighted=False) == {2 + 1}  # states twice, since they come with ghosts, and degrees once
    assert exchanges(weighted=True) == {2 + 3}  # a weight may have another gradient each time


def test_sums_are_added_in_place_to_sums_that_have_no_room_for_ghosts():
    def twice(x, src, dst, e):
        h = x.new_zeros(x.size(0), e.size(1)).index_add(0, dst, e) + 1  # has owned rows only
        h.index_add_(0, dst, e * x[src][:, :1])
        return h * x[:, :1]

    check(twice)
