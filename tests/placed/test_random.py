"""Random numbers: the same for a row on any number of ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from whole_and_split import NUM_RANKS, ODD, USUAL, cases, check, run, sums

from domainpar import split_graph
from domainpar.placed.moves import whole
from domainpar.testing import run_ranks


def like_one_rank(function, **more):
    return function, {"against": "alone"} | more


class Initialised(nn.Module):
    def forward(self, x):
        return x * nn.init.kaiming_uniform_(x.new_empty(4, 4))[0]


EXACT = {
    "of nodes, ghosts included": like_one_rank(lambda x, src: F.dropout(x, 0.3)[src]),
    "of sums": like_one_rank(lambda x, src, dst, e: F.dropout(sums(x, src, dst, e), 0.5)[src]),
    "along other dimensions": like_one_rank(lambda series, columns: (F.dropout(series, 0.2), F.dropout(columns, 0.7))),
    "of selected rows": like_one_rank(lambda x, mask, e, edge_mask: (F.dropout(x[mask]), F.dropout(e[edge_mask]))),
    "of joined rows": like_one_rank(lambda x, e: F.dropout(torch.cat([e, x])).sum(0)),
    "by a module": like_one_rank(
        lambda x, net, src: net(x)[src], net=lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4))
    ),
    "another call each time": like_one_rank(lambda x, net: net(x), net=nn.Dropout, calls=3),
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
    "nothing dropped": lambda x: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False) + F.dropout(x, 0.9, False),
    "everything dropped": lambda x, src: F.dropout(x, 1.0)[src] + x[src],
    "in evaluation": (lambda x, net: net(x), {"net": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)).eval()}),
    "weights made anew": like_one_rank(lambda x, net: net(x), net=Initialised),
    "alpha dropout in evaluation": (
        lambda x, net: net(x),
        {"net": lambda: nn.Sequential(nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.RReLU()).eval()},
    ),
    "a rate that is a tensor": like_one_rank(lambda x: F.dropout(x, float(x.detach().mean().sigmoid()))),
    "a generator": like_one_rank(lambda x: torch.rand(x.size(0), generator=torch.Generator().manual_seed(3))),
    "a generator (2)": lambda x: x * torch.rand(x.size(0), 1, generator=torch.Generator()),
}
REFUSED = {
    "a choice": (lambda u: torch.multinomial(u, 3), "draws among all rows"),
    "a generator of flips": (lambda x: x.bernoulli(0.5, generator=torch.Generator()), "with a generator"),
}
PLAIN_DRAWS = {
    "of what every rank has": like_one_rank(lambda x, c: x * F.dropout(c, 0.5) + F.dropout(x.mean())),
    "uniform numbers": like_one_rank(
        lambda x, src: torch.rand(x.size(0), 2)[src] + torch.rand_like(x)[src][:, :2] + torch.rand(2)
    ),
    "uniform numbers of edges": like_one_rank(lambda e: torch.rand(e.size(0), dtype=e.dtype) * torch.rand(())),
    "written over": like_one_rank(
        lambda x, c, src: (
            x.detach().clone().normal_()[src] + x.detach().clone().normal_(3, 0.1)[src],
            x.detach().clone().uniform_(-1, 1)[src],
            c.detach().clone().uniform_() * c.new_empty(4).normal_(),
        )
    ),
    "integers": lambda x: torch.randint(0, 3, (x.size(0),)),
    "a permutation": lambda x: torch.randperm(x.size(0)),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "whole features": lambda vectors: F.dropout1d(vectors, 0.5),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "random slopes": lambda x: F.rrelu(x, training=True),
    "attention of every rank": like_one_rank(
        lambda x, table: x * F.scaled_dot_product_attention(table, table, table, dropout_p=0.5).sum()
    ),
    "a recurrent network of every rank": like_one_rank(
        lambda x, table, net: x * net(table[None])[0].sum(), net=lambda: nn.GRU(4, 4, 2, dropout=0.5)
    ),
    "sizes by a keyword": like_one_rank(lambda x: torch.rand(size=(x.size(0), 4))),
    "rows by rows": like_one_rank(lambda x: torch.rand(x.size(0), x.size(0))),
    "complex numbers": lambda x: x * torch.randn_like(x, dtype=torch.complex64),
}


PLAIN_DRAWS |= {
    "a random choice of every rank": lambda x, c: x * F.gumbel_softmax(c, dim=0),
}


@cases(PLAIN_DRAWS)
def test_numbers_that_torch_draws_are_alike_on_all_ranks(function, more):
    check(function, **{"against": "alone", **more})


def test_coins_and_normal_numbers_have_the_shares_and_moments_they_should():
    def draw(x):
        many = x.detach()[:, :1].expand(-1, 4000)
        coins = torch.rand_like(many).bernoulli_(0.3), torch.empty_like(many, dtype=torch.bool).bernoulli_(0.5)
        certain = torch.bernoulli(torch.ones_like(many, dtype=torch.bfloat16))
        return torch.randn_like(many), *coins, certain, torch.empty_like(many).uniform_(2, 4)

    found = run(draw, ranks=(NUM_RANKS,), against="alone").ranks[NUM_RANKS][0].results
    normal, coins, flips, ones, uniform = (table.double() for table in found)
    off = 3 / normal.numel() ** 0.5
    assert abs(normal.mean()) < 2 * off
    assert abs(normal.var() - 1) < 3 * off
    assert abs((normal.abs() < 1).double().mean() - 0.6827) < off
    assert abs(torch.corrcoef(normal[:2])[0, 1]) < 0.1
    assert abs(coins.mean() - 0.3) < off
    assert abs(flips.mean() - 0.5) < off
    assert ones.min() == 1
    assert 2 <= uniform.min() < uniform.max() < 4


def test_the_dropout_that_gpus_call_drops_what_that_of_cpus_drops():
    def both(x):
        torch.manual_seed(5)
        by_cpu = F.dropout(x.detach(), 0.3)
        torch.manual_seed(5)
        by_gpu, kept = torch.native_dropout(x.detach(), 0.3, True)
        return by_cpu, by_gpu, kept, torch.native_dropout(x.detach(), 1.0, True)[0]

    for of_rank in run(both, ranks=(NUM_RANKS,), against="alone").ranks[NUM_RANKS]:
        by_cpu, by_gpu, kept, nothing = of_rank.results
        torch.testing.assert_close(by_cpu, by_gpu, rtol=1e-15, atol=0)
        assert torch.equal(by_cpu != 0, kept.bool())
        assert not nothing.any()


def test_two_calls_draw_different_numbers_and_so_do_two_seeds():
    def drawn(world, seed):
        torch.manual_seed(seed)
        x = split_graph(USUAL.edge_index, 13, world).nodes(USUAL.x)
        return [whole(F.dropout(torch.ones_like(x), 0.25)) for _ in range(2)]

    (one, two), (one_again, _), (other, _) = (run_ranks(drawn, 3, seed)[1] for seed in (0, 0, 1))
    assert torch.equal(one, one_again)
    assert not torch.equal(one, two)
    assert not torch.equal(one, other)
    assert set(one.unique().tolist()) == {0.0, 1 / 0.75}


@pytest.mark.parametrize("name", ODD)
def test_noise_does_not_mind_lengths(name):
    check(lambda x, e, src: (F.dropout(x)[src], F.dropout(e), torch.rand_like(x)), ODD[name], against="alone")
