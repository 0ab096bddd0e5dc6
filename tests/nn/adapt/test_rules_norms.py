"""Norms: statistics over the rows of all ranks, or of each row."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from whole_and_split import ODD, USUAL, cases, check, refusals

from domainpar import parallelize, split_graph
from domainpar.testing import run_ranks


def sums(x, src, dst, e):
    return x.new_zeros(x.size(0), 4).index_add(0, dst, x[src] * e)


EXACT = {
    "of nodes, twice": (lambda x, net, src: net(x)[src], {"net": lambda: nn.BatchNorm1d(4), "calls": 2}),
    "of sums": (lambda x, src, dst, e, net: net(sums(x, src, dst, e))[src], {"net": lambda: nn.BatchNorm1d(4)}),
    "of edges": (lambda e, net: net(e), {"net": lambda: nn.BatchNorm1d(4)}),
    "of some edges": (lambda e, edge_mask, net: net(e[edge_mask]), {"net": lambda: nn.BatchNorm1d(4)}),
    "averaged over all calls": (lambda x, net: net(x), {"net": lambda: nn.BatchNorm1d(4, momentum=None), "calls": 3}),
    "without weights and averages": (
        lambda x, net: net(x),
        {"net": lambda: nn.BatchNorm1d(4, affine=False, track_running_stats=False)},
    ),
    "with its averages": (lambda x, net: net(x), {"net": lambda: nn.BatchNorm1d(4).eval()}),
    "without averages, not learning": (
        lambda x, net: net(x),
        {"net": lambda: nn.BatchNorm1d(4, track_running_stats=False).eval()},
    ),
    "of more dimensions": (lambda vectors, net: net(vectors), {"net": lambda: nn.BatchNorm1d(3)}),
    "of columns": (lambda columns, net: net(columns[None])[0], {"net": lambda: nn.BatchNorm1d(4)}),
    "of each column": (lambda x, net: net(x.t()[None])[0], {"net": lambda: nn.InstanceNorm1d(4, affine=True)}),
    "of each column with averages": (
        lambda x, net: net(x.t()[None])[0],
        {"net": lambda: nn.InstanceNorm1d(4, track_running_stats=True), "calls": 2},
    ),
    "of each row's matrix": (lambda vectors, net: net(vectors), {"net": lambda: nn.InstanceNorm1d(3)}),
    "of groups": (lambda x, net: net(x), {"net": lambda: nn.GroupNorm(2, 4)}),
    "of a layer between layers": (
        lambda x, net: net(x),
        {"net": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))},
    ),
    "single precision": (lambda x, net: net(x.float().double()), {"net": lambda: nn.BatchNorm1d(4), "tolerance": 1e-6}),
}

REFUSED = {
    "a feature for each node": (
        lambda square, net: net(square.t()),
        "a feature for each of the nodes",
        {"net": lambda: nn.BatchNorm1d(13)},
    ),
    "a feature for each node, with averages": (
        lambda square, net: net(square.t()),
        "a feature for each of the nodes",
        {"net": lambda: nn.BatchNorm1d(13).eval()},
    ),
    "groups of rows": (lambda x, net: net(x.t()[None]), "runs along the nodes", {"net": lambda: nn.GroupNorm(2, 4)}),
    "groups of columns": (
        lambda columns, net: net(columns),
        "runs along the edges",
        {"net": lambda: nn.GroupNorm(2, 40)},
    ),
    "local response": (lambda x: F.local_response_norm(x.t()[None], 2), ""),
}

LAW = {
    "synchronised": (lambda x, net: net(x), {"net": lambda: nn.SyncBatchNorm(4).eval()}),
    "a column that is constant": (lambda x, net: net(x * 0 + 1), {"net": lambda: nn.BatchNorm1d(4)}),
    "no momentum": (lambda x, net: net(x), {"net": lambda: nn.BatchNorm1d(4, momentum=0.0), "calls": 2}),
    "by keywords": lambda x: F.batch_norm(input=x, running_mean=None, running_var=None, training=True),
    "of one matrix": (lambda x, net: net(x), {"net": lambda: nn.InstanceNorm1d(13)}),
    "weights of unit length": (
        lambda x, net: net(x),
        {"net": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))},
    ),
    "weights of unit norm": (
        lambda x, net: net(x),
        {"net": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "calls": 2},
    ),
    "orthogonal weights": (
        lambda x, net: net(x),
        {"net": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))},
    ),
    "functional, without a gradient": lambda x: torch.no_grad()(lambda: F.batch_norm(x, None, None, training=True))(),
}
WAITING = {}
ENOUGH = [name for name, sample in ODD.items() if sample.num_nodes > 1]


@cases(EXACT)
def test_statistics_are_of_the_whole_graph(function, more):
    check(function, **more)


@refusals(REFUSED)
def test_norms_that_take_rows_for_features_are_refused(function, text, more):
    check(function, refused=text, **more)


@cases(LAW, WAITING)
def test_odd_norms_are_exact_or_refused(function, more):
    check(function, or_refused=True, **more)


@pytest.mark.parametrize("name", ENOUGH)
def test_a_rank_without_rows_takes_part_in_norms(name):
    check(lambda x, net: net(x), ODD[name], net=lambda: nn.BatchNorm1d(4))


@pytest.mark.parametrize(("name", "field"), [("one node", lambda x, net: net(x)), ("one edge", lambda e, net: net(e))])
def test_one_row_is_too_few_on_every_rank(name, field):
    with pytest.raises((ValueError, AssertionError), match="more than"):
        check(field, ODD[name], net=lambda: nn.BatchNorm1d(4), against="alone")


def _kept(world):
    """How many tables of the edges a batch norm keeps for backward."""
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world, edge_policy="incident")
    sizes = []
    with saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor):
        parallelize(nn.BatchNorm1d(4).double(), world)(part.edges(USUAL.e.clone().requires_grad_()))
    return sizes.count(4 * part.plan.num_edges)


def test_of_a_batch_norm_only_its_rows_are_kept():
    assert run_ranks(_kept, 2) == [1, 1]


def _in_half(world):
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    e = (USUAL.e + 100).bfloat16()
    exact = nn.BatchNorm1d(4).double()(e.double())
    result = parallelize(nn.BatchNorm1d(4).bfloat16(), world)(part.edges(e))
    return float((result.double() - part.owned_edges(exact.detach())).abs().max())


def test_statistics_of_half_precision_are_taken_in_float32_as_torch_takes_them():
    assert max(run_ranks(_in_half, 2)) < 0.02, "two bits of the last place of numbers below 4"
