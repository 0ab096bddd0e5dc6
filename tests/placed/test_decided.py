"""What a rule decided once is decided alike the next time; random programs of torch calls, none wrong in silence."""

import threading

import pytest
import torch
from random_programs import check_programs
from torch import nn
from torch.nn import functional as F

from domainpar import parallelize, split_graph
from domainpar.placed import dispatch
from domainpar.placed.ranks import Same
from domainpar.placed.tensor import Placed
from domainpar.testing import run_ranks


def told(x):
    """All that a tensor says of itself."""
    return x.shape, x.stride(), x.dtype, x.place, x.names, x.path, x._local.shape, x._local.stride()


def check_alike(one, other):
    if isinstance(one, (list, tuple)):
        for each, like in zip(one, other, strict=True):
            check_alike(each, like)
    elif isinstance(one, Placed):
        assert told(one) == told(other)
        assert torch.equal(one._local.detach().nan_to_num(), other._local.detach().nan_to_num())


@pytest.fixture
def thrice(monkeypatch):
    """Calls that neither write nor draw are made three times: by the rule, to be kept, and as it was kept."""
    usual, kept, found = Placed.__torch_dispatch__.__func__, [], dispatch.hold

    def noting(local, form, *shared):
        kept.append(form)
        return found(local, form, *shared)

    def three_times(cls, func, types, args=(), kwargs=None):
        out = usual(cls, func, types, args, kwargs)
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return out
        for _ in range(2):
            again = usual(cls, func, types, args, kwargs)
            check_alike(again, out)
        return again

    monkeypatch.setattr(dispatch, "hold", noting)
    monkeypatch.setattr(Placed, "__torch_dispatch__", classmethod(three_times))
    return kept


@pytest.mark.parametrize("first", [0, 20, 40])
def test_random_programs_are_exact_or_refused_however_often_a_call_is_made(thrice, first):
    tally = check_programs(range(first, first + 20))
    assert tally.exact == 20
    assert tally.statements > 5 * tally.exact  # what refusals leave of a program is still one
    assert len(thrice) > 500


@pytest.mark.slow
@pytest.mark.parametrize("first", range(60, 2000, 100))
def test_more_random_programs_are_exact_or_refused(first):
    programs = range(first, min(2000, first + 100))
    assert check_programs(programs).exact == len(programs)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(5, 8), nn.Linear(8, 3), nn.LayerNorm(8)

    def forward(self, x, edge_index):
        x = self.norm(F.silu(self.first(x)))
        there = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]] * 0.5)
        back = torch.zeros_like(x).index_add(0, edge_index[0], x[edge_index[1]])  # which waits for what others have
        return self.second(back) + self.second(there + x).t().contiguous().t()


def trained(world):
    draw = torch.Generator().manual_seed(3)
    edges, x, y = torch.randint(40, (2, 150), generator=draw), *(torch.randn(40, 5, generator=draw) for _ in range(2))
    torch.manual_seed(0)
    part, net = split_graph(edges, 40, world, partitioner="contiguous"), parallelize(Net().double(), world)
    x, y = part.nodes(x.double()), part.nodes(y[:, :3].double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x, part.edge_index), y)
        loss.backward()
        optimizer.step()
    x.mul_(2.0)  # what was decided of x holds, and its numbers are others
    return float(loss), float(net(x, part.edge_index).sum()), [p.detach().clone() for p in net.parameters()]


def test_training_takes_what_was_decided(thrice):
    ((loss, after, parameters),) = run_ranks(trained, 1)
    for its_loss, its_after, its_parameters in run_ranks(trained, 3):
        assert its_loss == pytest.approx(loss, rel=1e-12)
        assert its_after == pytest.approx(after, rel=1e-12)
        torch.testing.assert_close(its_parameters, parameters, rtol=1e-11, atol=1e-12)


def same_calls_of_others(world):
    """Calls that look alike to a table, with what must tell them apart."""
    draw = torch.Generator().manual_seed(4)
    edges, x = torch.randint(40, (2, 150), generator=draw), torch.randn(40, 5, generator=draw, dtype=torch.float64)
    part = split_graph(edges, 40, world, partitioner="contiguous")
    x, ids = part.nodes(x), part.edge_index[0].clone()
    outs = []
    for by in (2, 2, 2.0, 2.0, True):  # equal numbers, and other types of results
        outs.append(ids * by)
    weight = torch.randn(5, 5, generator=draw, dtype=torch.float64).requires_grad_()
    for _ in range(3):  # in backward a product over rows waits for its sum
        (x @ weight).square().sum().backward()
        product = x.t() @ x
        assert type(product.place) is Same
        outs.append(product)
    seen = ids.view(150, 1)
    for _ in range(3):
        outs.append(x[seen.clone()[:, 0]].sum(0))
    ids.copy_((ids * 7 + 3) % 40)  # no longer rows that this rank has
    for _ in range(3):
        outs.append(x[seen.clone()[:, 0]].sum(0))
    return [(str(out.dtype), part.whole(out).detach().clone()) for out in [*outs, weight.grad]]


def test_calls_that_look_alike_are_told_apart():
    (whole,) = run_ranks(same_calls_of_others, 1)
    for outs in run_ranks(same_calls_of_others, 3):
        for (dtype, out), (its_dtype, its) in zip(outs, whole, strict=True):
            assert dtype == its_dtype
            torch.testing.assert_close(out, its, rtol=1e-12, atol=1e-12)
    assert [dtype for dtype, _ in whole[:5]] == ["torch.int64"] * 2 + ["torch.float32"] * 2 + ["torch.int64"]


def calls_by_rules(world):
    """The names of calls that went through rules in the third step of training."""
    draw = torch.Generator().manual_seed(5)
    edges, x = torch.randint(40, (2, 150), generator=draw), torch.randn(40, 6, generator=draw, dtype=torch.float64)
    part = split_graph(edges, 40, world, partitioner="contiguous")
    x, weights = part.nodes(x), torch.randn(3, 3, generator=draw, dtype=torch.float64).requires_grad_()
    parallelize(nn.Module(), world, [weights])
    for _ in range(3):
        RULED.names = []
        left, right = x[:, :3] @ weights[:, :3], x[:, 3:].unsqueeze(2)
        products = torch.bmm(left.unsqueeze(1), right).squeeze(2)
        loss = (products + weights[1:].sum()).square().sum()
        weights.grad = None
        loss.backward()
    return RULED.names, weights.grad.clone()


RULED = threading.local()  # ranks are threads


def test_slices_and_products_of_each_row_are_decided_once(monkeypatch):
    usual = dispatch.dispatch

    def noting(func, args, kwargs):
        RULED.names.append(func._schema.name)
        return usual(func, args, kwargs)

    monkeypatch.setattr(dispatch, "dispatch", noting)
    results = [result for size in (1, 3) for result in run_ranks(calls_by_rules, size)]
    for names, gradient in results:
        assert not {"aten::slice", "aten::slice_backward", "aten::squeeze", "aten::bmm"}.intersection(names), names
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-12, atol=0)
