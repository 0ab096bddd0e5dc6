"""Random numbers: the same for a row on any number of ranks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from whole_and_split import ODD, USUAL, Called, cases, check, refusals, trial_of

from domainpar import World
from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.split import split_graph
from domainpar.testing import run_ranks


def sums(x, src, dst, e):
    return x.new_zeros(x.size(0), 4).index_add(0, dst, x[src] * e)


def like_one_rank(function, **more):
    return function, {"against": "alone"} | more


EXACT = {
    "of nodes, ghosts included": like_one_rank(lambda x, src: F.dropout(x, 0.3)[src]),
    "of sums": like_one_rank(lambda x, src, dst, e: F.dropout(sums(x, src, dst, e), 0.5)[src]),
    "of edges": like_one_rank(lambda x, e, dst: x.new_zeros(x.size(0), 4).index_add(0, dst, F.dropout(e))),
    "along other dimensions": like_one_rank(lambda series, columns: (F.dropout(series, 0.2), F.dropout(columns, 0.7))),
    "of what every rank has": like_one_rank(lambda x, c: x * F.dropout(c, 0.5) + F.dropout(x.mean())),
    "of selected rows": like_one_rank(lambda x, mask, e, edge_mask: (F.dropout(x[mask]), F.dropout(e[edge_mask]))),
    "of joined rows": like_one_rank(lambda x, e: F.dropout(torch.cat([e, x])).sum(0)),
    "in place": like_one_rank(lambda x, src: F.dropout(x * 1, 0.5, True, True)[src]),
    "by a module": like_one_rank(
        lambda x, net, src: net(x)[src], net=lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4))
    ),
    "another call each time": like_one_rank(lambda x, net: net(x), net=nn.Dropout, calls=3),
    "uniform numbers": like_one_rank(
        lambda x, src: torch.rand(x.size(0), 2)[src] + torch.rand_like(x)[src][:, :2] + torch.rand(2)
    ),
    "uniform numbers of sums": like_one_rank(lambda x, src, dst, e: torch.rand_like(sums(x, src, dst, e))[src]),
    "uniform numbers of edges": like_one_rank(lambda e: torch.rand(e.size(0), dtype=e.dtype) * torch.rand(())),
    "dropped edges": like_one_rank(
        lambda x, e, edge_index: (lambda kept: x.new_zeros(x.size(0), 4).index_add(0, edge_index[:, kept][1], e[kept]))(
            torch.rand(e.size(0)) > 0.5
        )
    ),
    "normal numbers": like_one_rank(
        lambda x, c, src: (
            (torch.randn(x.size(0), 4) + torch.randn_like(x))[src],
            c * torch.randn(4) + torch.randn(()),
            torch.randn_like(c, dtype=torch.float32),
        )
    ),
    "normal numbers of edges": like_one_rank(lambda e: (torch.randn(e.size(0), 2), torch.randn_like(e.half()))),
    "written over": like_one_rank(
        lambda x, c, src: (
            x.detach().clone().normal_()[src] + x.detach().clone().normal_(3, 0.1)[src],
            x.detach().clone().uniform_(-1, 1)[src],
            c.detach().clone().uniform_() * c.new_empty(4).normal_(),
        )
    ),
    "coins": like_one_rank(
        lambda u, x, src, c: (
            torch.bernoulli(u.clamp(max=1))[src],
            x.detach().bernoulli(0.3)[src],
            x.detach().clone().bernoulli_(0.3)[src],
            torch.bernoulli(c.detach() * 0 + 0.5),
        )
    ),
    "coins of masks and numbers": like_one_rank(
        lambda mask, batch, u, src: (
            torch.empty_like(mask).bernoulli_(0.5)[src],
            torch.empty_like(mask).bernoulli_(u.detach().sigmoid()),
            torch.empty_like(batch).bernoulli_(0.3),
        )
    ),
    "weights made anew, by name": like_one_rank(lambda x: x * nn.init.normal_(tensor=torch.empty(4), std=2.0)),
    "nothing dropped": lambda x: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False) + F.dropout(x, 0.9, False),
    "everything dropped": lambda x, src: F.dropout(x, 1.0)[src] + x[src],
    "in evaluation": (lambda x, net: net(x), {"net": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)).eval()}),
}

DRAWS = {
    "integers": lambda x: torch.randint(0, 3, (x.size(0),)),
    "a permutation": lambda x: torch.randperm(x.size(0)),
    "a choice": lambda u: torch.multinomial(u, 3),
    "exponential": lambda x: x.detach().clone().exponential_(),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "whole features": lambda vectors: F.dropout1d(vectors, 0.5),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "random slopes": lambda x: F.rrelu(x, training=True),
}
REFUSED = {name: (function, "random") for name, function in DRAWS.items()}
REFUSED["normal distributions"] = (lambda x, u: torch.normal(x.detach(), u.detach()), "mean + std * torch.randn_like")
REFUSED["native dropout"] = (DRAWS["native dropout"], "native_dropout")


class Initialised(nn.Module):
    def forward(self, x):
        return x * nn.init.kaiming_uniform_(x.new_empty(4, 4))[0]


LAW = {
    "dropout of torch itself, not in training": lambda x: torch.dropout(x, 0.5, train=False),
    "Gumbel of every rank": like_one_rank(lambda x, c: x * F.gumbel_softmax(c, dim=0)),
    "Gumbel of rows": like_one_rank(lambda x: F.gumbel_softmax(x, dim=1)),
    "Gamma of every rank": like_one_rank(
        lambda x, c: x * torch.distributions.Gamma(c.detach().abs() + 1, 1.0).sample()
    ),
    "Dirichlet of every rank": like_one_rank(
        lambda x, c: x * torch.distributions.Dirichlet(c.detach().abs() + 1).sample()
    ),
    "binomial of every rank": like_one_rank(
        lambda x, c: x * torch.binomial(c.detach().abs() + 5, c.detach() * 0 + 0.5)
    ),
    "weights made anew": like_one_rank(lambda x, net: net(x), net=Initialised),
    "attention of every rank": like_one_rank(
        lambda x, table: x * F.scaled_dot_product_attention(table, table, table, dropout_p=0.5).sum()
    ),
    "a recurrent network of every rank": like_one_rank(
        lambda x, table, net: x * net(table[None])[0].sum(), net=lambda: nn.GRU(4, 4, 2, dropout=0.5)
    ),
    "sizes by a keyword": like_one_rank(lambda x: torch.rand(size=(x.size(0), 4))),
    "rows by rows": like_one_rank(lambda x: torch.rand(x.size(0), x.size(0))),
    "alpha dropout in evaluation": (
        lambda x, net: net(x),
        {"net": lambda: nn.Sequential(nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.RReLU()).eval()},
    ),
    "a rate that is a tensor": like_one_rank(lambda x: F.dropout(x, float(x.detach().mean().sigmoid()))),
    "by keywords": like_one_rank(lambda x: F.dropout(input=x, p=0.5, training=True)),
    "torch.dropout": like_one_rank(lambda x, src: torch.dropout(x, 0.5, True)[src]),
    "a generator": like_one_rank(lambda x: torch.rand(x.size(0), generator=torch.Generator().manual_seed(3))),
}
WAITING = {}
REFUSED["a generator"] = (lambda x: x * torch.rand(x.size(0), 1, generator=torch.Generator()), "given a generator")
REFUSED["a generator of flips"] = (lambda x: x.bernoulli(0.5, generator=torch.Generator()), "given a generator")
REFUSED["complex numbers"] = (lambda x: x * torch.randn_like(x, dtype=torch.complex64), "torch.complex of two draws")
REFUSED["into a tensor of every rank"] = (lambda x, c: x * torch.randn(4, out=torch.empty(4)), "out=")


@cases(EXACT)
def test_a_row_draws_the_same_numbers_on_any_number_of_ranks(function, more):
    check(function, **more)


@refusals(REFUSED)
def test_other_random_numbers_are_refused(function, text, more):
    check(function, refused=text, **more)


@cases(LAW, WAITING)
def test_hidden_random_numbers_are_alike_or_refused(function, more):
    check(function, or_refused=True, **more)


@pytest.mark.parametrize("name", ODD)
def test_noise_does_not_mind_lengths(name):
    check(lambda x, e, src: (F.dropout(x)[src], F.dropout(e), torch.rand_like(x)), ODD[name], against="alone")


def test_coins_and_normal_numbers_have_the_shares_and_moments_they_should():
    def draw(x):
        many = x.new_zeros(x.size(0), 4000)
        return (
            torch.randn_like(many),
            torch.rand_like(many).bernoulli_(0.3),
            torch.empty_like(many, dtype=torch.bool).bernoulli_(0.5),
            torch.bernoulli(torch.ones_like(many, dtype=torch.bfloat16)),
            torch.rand_like(many, dtype=torch.float16),
            torch.empty_like(many).uniform_(2, 4),
        )

    run = trial_of(draw, USUAL).split(4)
    assert run.failure is None, run.failure
    normal, coins, flips, ones, halves, uniform = (table.double() for table in run.ranks[0].result)
    count = normal.numel()
    assert abs(normal.mean()) < 5 / count**0.5
    assert abs(normal.var() - 1) < 10 / count**0.5
    assert abs((normal.abs() < 1).double().mean() - 0.6827) < 3 / count**0.5
    assert abs(torch.corrcoef(normal[:2].reshape(2, -1))[0, 1]) < 0.1
    assert abs(coins.mean() - 0.3) < 3 / count**0.5
    assert abs(flips.mean() - 0.5) < 3 / count**0.5
    assert ones.min() == 1
    assert halves.max() < 1
    assert abs(halves.mean() - 0.5) < 3 / count**0.5
    assert 2 <= uniform.min() < uniform.max() < 4


def drawn(world, num_calls, seed=0):
    assignment = np.asarray(USUAL.assignment) % world.size
    part = split_graph(USUAL.edge_index, 13, world, partitioner=assignment)
    model = parallelize(Called(lambda x: F.dropout(x * 0 + 1, 0.25), None), world, seed=seed)
    found = [model(part.edge_index, x=part.nodes(USUAL.x)) for _ in range(num_calls)]
    return [(part.plan.owned_ids, one) for one in found]


def together(ranks, call):
    rows = torch.cat([one[call][1] for one in ranks])
    return rows[np.argsort(np.concatenate([one[call][0] for one in ranks]))]


def test_two_calls_draw_different_numbers_and_so_do_two_seeds():
    first, second = (together([drawn(World.alone(), 2)], call) for call in range(2))
    other = together([drawn(World.alone(), 1, seed=1)], 0)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_numbers_are_the_same_on_one_two_and_four_ranks_and_share_the_rate():
    one = drawn(World.alone(), 2)
    for num_ranks in (2, 4):
        ranks = run_ranks(drawn, num_ranks, 2)
        for call in range(2):
            assert torch.equal(together(ranks, call), together([one], call))
    kept = together([drawn(World.alone(), 1)], 0)
    assert set(kept.unique().tolist()) <= {0.0, 1 / 0.75}
    assert 0.5 < float((kept > 0).double().mean()) < 0.95
