"""Programs that once were silently wrong on ranks: shared memory, numbers of rows, gradients written in hooks."""

import math

import pytest
import torch
from torch import nn
from whole_and_split import ODD, cases, check

SMALL = ("one node", "as many nodes as features", "all on one rank", "no edges")


def zeroed_and_then_written_in_columns(x, v):
    h = x.clone()
    h.zero_()
    h[:, 0] = v
    h[:, :1].add_(1)
    return h, torch.zeros_like(x), x.new_zeros(x.shape)  # the zeros that all share are zeros still


def zeros_detached_and_written(x):
    h, g = torch.zeros_like(x), torch.zeros_like(x)
    h.detach().add_(1)
    d = g.detach()
    g.add_(2)
    return h, g, d


def sums_detached_and_written(x, src, e):
    h = x.new_zeros(x.shape).index_add(0, src, e)
    h.detach().mul_(2)
    g = x.new_zeros(x.shape).index_add(0, src, e)
    d = g.detach()
    g.mul_(2)
    return h, g, d


def data_exchanged(x, src):
    h, y = x.detach().clone(), x.detach() * 3
    before = h[src]
    h.data = y
    y.mul_(2)
    return before, h[src], h


def copies_of_what_is_not_contiguous(x):
    h = x.clone()
    turned, columns = h.t().contiguous(), h[:, 1:3].contiguous()
    flat, cut = h.t().reshape(-1), h[:, 1:3].reshape(-1)
    for one in (turned, columns, flat, cut):
        one.mul_(2)
    return h, turned, columns, flat, cut


def copies_read_after_the_tensor_was_written(x):
    h = x.clone()
    flat, wide = h[:, 1:3].flatten(), h.unsqueeze(1).expand(-1, 3, 4).reshape(-1, 12)
    h.mul_(2)
    return h, flat, wide


def layouts_of_what_was_transposed(x):
    h, added = x.t() * 2, x.t() + torch.ones(13, 4, dtype=x.dtype).t()
    flat, zeros, sums = h.reshape(-1), torch.zeros_like(h), added.contiguous()
    for one in (flat, sums):
        one.mul_(3)
    zeros.reshape(-1).add_(1)
    return h, flat, zeros, added, sums


def strides(x, series):
    views = x, x.t(), x[:, 1:], x[:, 0], x[:, ::2], x[1:], x.unsqueeze(1), x.expand(3, *x.shape), series[:, 0]
    more = x.t() * 2, x.view(-1, 2, 2).permute(2, 0, 1)
    return [(one.stride(), one.is_contiguous()) for one in (*views, *more)]


def views_of_slices_written(x, v):
    h = x.clone()
    h[1:][:, 0] = 5
    h[:3].view(-1).mul_(2)
    h[0][1:3] = 7
    part = h[2:]
    part[1:][:, 2].mul_(3)
    h[:2].t().add_(1)
    return h, v


def one_row_written(x):
    h = x.clone()
    h[:1].squeeze(0).mul_(2)
    row = h[:1].view(-1)
    row.add_(1)
    return h, row


def a_mask_of_one_row(x, v):
    h, first = x.clone(), torch.arange(len(x)) == 0
    mask = (v == v[0]) & (v > -math.inf)
    h[mask] += 1
    h[first] *= x[first]
    return h, h[mask] @ torch.ones(4, 2, dtype=x.dtype)


def nothing_selected(x, edge_index, edge_mask, e):
    none = edge_mask & ~edge_mask
    ends = edge_index[:, none]
    h = x.new_zeros(x.shape).index_add(0, ends[1], e[none])
    return h, x[ends], ends.reshape(-1), e[none].view(-1, 2, 2)


MEMORY = {
    function.__name__.replace("_", " "): function
    for function in (
        zeroed_and_then_written_in_columns, zeros_detached_and_written, sums_detached_and_written, data_exchanged,
        copies_of_what_is_not_contiguous, copies_read_after_the_tensor_was_written, layouts_of_what_was_transposed,
        strides, views_of_slices_written, one_row_written, a_mask_of_one_row, nothing_selected,
    )
}  # fmt: skip


@cases(MEMORY)
def test_what_is_written_is_seen_where_torch_shares_memory_and_nowhere_else(function, more):
    check(function, **more)


SHORT = (
    zeroed_and_then_written_in_columns, one_row_written, sums_detached_and_written, copies_of_what_is_not_contiguous,
    a_mask_of_one_row, nothing_selected,
)  # fmt: skip


@pytest.mark.parametrize("function", SHORT)
@pytest.mark.parametrize("name", SMALL)
def test_it_is_so_where_a_rank_has_one_row_or_none(function, name):
    check(function, ODD[name], or_refused=True)


def sums_in_whole_numbers(x, src, e):
    h = x.new_zeros(x.shape).index_add(0, src, e)
    return h.long(), (h > 0), h.to(torch.bool), h.to(torch.int32)


def sums_times_infinity(x, src, e):
    return [by(x.new_zeros(x.shape).index_add(0, src, e.detach())) for by in (lambda h: h * math.inf, lambda h: h / 0)]


def variances_without_enough_rows(x):
    return x.detach().var(0, correction=20), x.detach().std(0, correction=13), x.std(0, correction=3)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@cases({"whole numbers": sums_in_whole_numbers, "infinity": sums_times_infinity, "few": variances_without_enough_rows})
def test_figures_of_shares_are_those_of_sums(function, more):
    check(function, **more)


def read_and_added(x, i, e):
    return x[i], x.new_zeros(x.shape).index_add(0, i, e[: len(i)])


def changed(change):
    def function(x, src, dst, e):
        i = dst.clone()
        change(i, src, len(x))
        return [read_and_added(x, i, e), read_and_added(x, i.clone(), e), read_and_added(x, i.view(1, -1)[0], e)]

    return function


def halves(x, dst):
    half = len(dst) // 2
    return dst[:half], dst[len(dst) - half :]


INDICES = {
    "turned round": lambda x, src, dst, e: [read_and_added(x, i.flip(0), e) for i in (src, dst)],
    "of masks, turned round": lambda x, mask, e: read_and_added(x, mask.nonzero().squeeze(1).flip(0), e),
    "of masks of edges": lambda x, src, edge_mask, e: read_and_added(x, src[edge_mask.nonzero().squeeze(1).flip(0)], e),
    "of two selections, stacked": lambda x, dst, e: read_and_added(x, torch.stack(halves(x, dst))[1], e),
    "of two selections, beside": lambda x, dst, e: read_and_added(x, torch.stack(halves(x, dst), 1)[:, 1], e),
    "of two selections, joined": lambda x, dst, e: read_and_added(
        x, torch.cat([one.view(1, -1) for one in halves(x, dst)])[1], e
    ),
    "counted from the end": lambda x, src, e: (x[src - 13], x.index_put((src - 13,), e, accumulate=True)),
    "added to": changed(lambda i, src, n: i.add_(1).remainder_(n)),
    "copied over": changed(lambda i, src, n: i.copy_(n - 1 - src)),
    "written in part": changed(lambda i, src, n: i.__setitem__(slice(0, 9), 0)),
    "written by a mask": changed(lambda i, src, n: i.__setitem__(i > 2, 0)),
    "written through a view": changed(lambda i, src, n: i.view(-1).copy_(src.flip(0))),
}


@cases(INDICES)
def test_what_an_index_was_says_nothing_about_what_it_is(function, more):
    check(function, **more)


def hooked(change, of="x"):
    """Gradients that a hook copies and changes in place, while shares of them are not added yet."""

    def function(x, src, e, c):
        def hook(grad):
            grad = grad.clone()
            change(grad)
            return grad

        (x if of == "x" else c).register_hook(hook)
        return (x * c)[src] * e

    return function


def put(where, value=0.0):
    return lambda grad: grad.__setitem__(where, value)


HOOKS = {
    "a column set": hooked(put((slice(None), 0))),
    "a column of it all": hooked(lambda grad: grad[:, 0].zero_()),
    "transposed": hooked(lambda grad: grad.t().mul_(2)),
    "a slice of rows": hooked(put(slice(0, 2))),
    "their data": hooked(lambda grad: grad.data.clamp_(-0.1, 0.1)),
    "detached": hooked(lambda grad: grad.detach().mul_(2)),
    "the data of a sum": hooked(lambda grad: grad.data.clamp_(-0.1, 0.1), of="c"),
    "a number of a sum": hooked(put(0), of="c"),
    "a view of a sum": hooked(lambda grad: grad.view(2, 2)[1].mul_(2), of="c"),
    "a slice of a sum": hooked(lambda grad: grad[1:3].add_(1), of="c"),
}


@cases(HOOKS)
def test_hooks_write_into_views_of_gradients(function, more):
    check(function, **more)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.beside = nn.Linear(4, 4), nn.Linear(4, 4)


def gradients_of_ones(x, net):
    (net.used(x).sum() * 0 + net.beside.weight.sum()).backward()
    gradient = net.beside.weight.grad
    gradient[0] = 2
    gradient.mul_(3)
    return float(nn.utils.clip_grad_norm_(net.parameters(), 1.0)), gradient.clone(), x.detach()


def gradients_of_ones_of_a_leaf(x, c):
    (x.sum() * 0 + c.sum()).backward()
    c.grad[0] = 2
    return c.grad.clone()


@cases({"of a module": (gradients_of_ones, {"net": Unused}), "of a leaf": gradients_of_ones_of_a_leaf})
def test_gradients_that_are_one_number_can_be_written(function, more):
    check(function, **more)


def lbfgs(x, src, e):
    x = x.detach().clone().requires_grad_()
    optimizer = torch.optim.LBFGS([x], 0.1, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = (x[src] - e.detach()).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return x.detach()


def test_lbfgs_moves_rows_of_nodes():
    check(lbfgs)
