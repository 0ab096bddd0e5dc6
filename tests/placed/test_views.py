"""Dimensions moved about: the rows stay apart, wherever they go."""

import einops
import pytest
import torch
import torch.nn.functional as F
from whole_and_split import ODD, check, sums


def loops(edge_index, x):
    numbers = torch.arange(x.size(0))
    return torch.cat([edge_index, torch.stack([numbers, numbers])], 1)


def with_loops(x, edge_index, e):
    ends = loops(edge_index, x)
    weights = torch.cat([e, x * 2])
    return x.new_zeros(x.size(0), 4).index_add(0, ends[1], x[ends[0]] * weights)


def loops_cut_off(x, edge_index, e):
    both = torch.cat([e, x])
    return both[: e.size(0)] * e, both[e.size(0) :] * x, both.sum(0)


def alike(function, **more):
    return function, {"against": "alone"} | more


EXACT = {
    "their number as a plain integer": lambda x, e, series: (
        x.view(13, 2, 2),
        x.reshape(len(x), -1, 2).sum(1),
        e.view(len(e), 2, -1),
        series.reshape(2, 13, 3, 1),
    ),
    "a plain integer that is also that of features": (
        lambda x: x.view(4, 4),
        {"sample": ODD["as many nodes as features"]},
    ),
    "squeezed in place": lambda x, series: (
        (lambda a: (a.squeeze_(1), a.sum(-1))[1])(x[:, :1].clone()),
        (lambda a: (a.squeeze_(), a * a)[1])(series[:1] * 1),
    ),
    "a constant repeated for each row": lambda x, c: (
        c.repeat(x.size(0), 1) + torch.tile(c, (x.size(0), 1)) + c[None].repeat_interleave(x.size(0), dim=0)
    ),
    "both directions side by side": lambda e, w: (
        torch.cat([e, e * 2]).view(2, -1, 4).mean(0),
        torch.cat([w, w * 2]).reshape(2, w.size(0)),
    ),
    "shapes computed by a library": lambda x: (
        einops.rearrange(x, "n (h d) -> n h d", h=2),
        einops.rearrange(x.view(x.size(0), 2, 2), "n h d -> n (h d)"),
        einops.reduce(x, "n (h d) -> n h", "sum", h=2),
        einops.repeat(x, "n d -> n h d", h=3),
    ),
    "views by a size": lambda x, src: (
        x.view(x.size(0), 2, 2)[src] + x.reshape(x.size(0), -1).view(x.size(0), 2, -1)[src]
    ),
    "views along another dimension": lambda series: series.reshape(2, -1, 3, 1).view(2, series.size(1), 3),
    "a vector in a row": lambda v: v.ravel() + v.view(-1, 1).ravel(),
    "turned complex": lambda x: (x * 1j).H.mH,
    "a dimension more and less": lambda x, v: x.unsqueeze(0).squeeze(0) + v.unsqueeze(-1) + x.unsqueeze(1).squeeze(),
    "only lengths of 1 less": lambda x: x[:, :1].squeeze(1) + x[:, :1].squeeze(-1) + x[:, 1:2].squeeze(),
    "turned": lambda x, src: (x.t().transpose(0, 1) + x.T.mT)[src],
    "turned and read": lambda x, src: x.t()[:, src] + x.permute(1, 0).index_select(1, src),
    "permuted": lambda vectors: vectors.permute(2, 0, 1).movedim(0, -1).swapaxes(1, 2),
    "expanded": lambda v, x, c: (
        v.view(-1, 1).expand(-1, 4)
        + v.view(-1, 1).expand(x.size(0), 4)
        + v.view(-1, 1).expand_as(x)
        + c.expand(x.size(0), 4)
    ),
    "sums expanded like fresh rows": lambda x, src, dst, e: (
        sums(x, src, dst, e)[:, :1].expand_as(x) + x[:, :1].expand_as(sums(x, src, dst, e))
    ),
    "in a new dimension": lambda x, c: x.expand(2, -1, 4).sum(0) + x.broadcast_to((3, x.size(0), 4))[0],
    "repeated features": lambda x: (
        x.repeat(1, 2) + torch.tile(x, (1, 2)) + x.repeat_interleave(2, dim=1) + x.repeat(2, 1, 1)[1].repeat(1, 2)
    ),
    "one step at a time": lambda series: (
        sum(series.unbind(0)) + sum(step for step in series) + sum(series[:, :, 0].unbind()).view(-1, 1)
    ),
    "ends one by one": lambda x, edge_index: (lambda ends: x[ends[0]] - x[ends[1]])(list(edge_index)),
    "all numbers in a row": lambda x: (x.view(-1) * 2).sum() + x.reshape(-1, 1).amax(),
    "rows split and put together": lambda x, src, dst, e: (
        torch.relu(sums(x, src, dst, e).view(-1, 2)).softmax(0).view(-1, 4)[src] + e.view(-1, 2).cumsum(1).view(-1, 4)
    ),
    "pieces of features": lambda x: torch.cat(
        [*x.chunk(2, 1), *x.split(3, dim=1), *x.split([1, 3], -1), *x.tensor_split(2, dim=1)], 1
    ),
    "pieces of steps": lambda series: series.chunk(2)[1] - series.split(1)[0],
    "fresh rows beside sums": lambda x, src, dst, e: torch.cat([x, sums(x, src, dst, e)], 1)[src],
    "steps beside each other": lambda series, x: torch.cat([series, x[None, :, :3]]),
    "nothing beside rows": lambda x, c: torch.cat([c[:0], x, c[:0]], 1) if False else torch.cat([x[:, :0], x], 1),
    "rows behind each other": lambda x, z: torch.cat([x, z]).sum(0) + torch.cat([x, z]).mean(0),
    "self-loops behind edges": with_loops,
    "pieces of joined rows": loops_cut_off,
    "halves of joined rows": lambda x, z: (lambda halves: halves[0] * x - halves[1])(torch.cat([x, z]).chunk(2)),
    "joined rows split by sizes": lambda x, e: torch.cat([x, e]).split([x.size(0), e.size(0)])[1] * e,
    "both directions of edges": (
        lambda x, edge_index, e: (
            lambda ends: x.new_zeros(x.size(0), 4).index_add(0, ends[1], x[ends[0]] * torch.cat([e, e]))
        )(torch.cat([edge_index, edge_index.flip(0)], 1)),
        {},
    ),
    "on top of each other": lambda x, z: (
        torch.stack([x, z]).sum(0) + torch.stack([x, z], -1)[..., 1] + torch.stack((x, z), dim=1)[:, 0]
    ),
    "ends on top of each other": lambda x, src, dst: (lambda ends: x[ends[0]] - x[ends[1]])(torch.stack([src, dst])),
    "columns of ends copied": lambda x, edge_index, src: (
        edge_index.t().repeat(1, 2)[:, 3] * 2,
        edge_index.t().repeat(1, 2) * 2,
        src.view(-1, 1).expand(-1, 3)[:, 1] * 2,
        edge_index.flip([]) * 2,
        x.sum(),
    ),
    "turned edges": lambda x, edge_index, e: x[edge_index.flip(0)[0]] - x[edge_index[[1, 0]][1]],
    "features backwards": lambda x: x.flip(1) + x.flip([-1]),
    "some features": lambda x: (
        x.narrow(1, 1, 2) + x.narrow(-1, -2, 2) + x.select(1, 0).view(-1, 1) + x.select(-1, 3).unsqueeze(-1)
    ),
    "some rows": lambda x, v: (
        x.narrow(0, 2, 3),
        v.narrow(0, -3, 2),
        x.select(0, 1),
        x.narrow(0, 0, x.size(0)) * v[:, None],
    ),
    "pieces of steps by rows": lambda series: series.reshape(-1, 3),
    "nodes as edges": (lambda x, e: x.view(e.size(0), -1), {"sample": ODD["as many edges as nodes"]}),
    "ends flattened": lambda edge_index: edge_index.flatten(),
    "rows repeated": lambda x: x.repeat(2, 1),
    "rows repeated one by one": lambda x: x.repeat_interleave(2, 0),
    "rows repeated by their own numbers": lambda x, batch: x.repeat_interleave(batch, 0),
    "rows one by one": lambda x: x.unbind(),
    "rows in pieces of 5": lambda x: x.split(5)[0],
    "joined rows cut elsewhere": lambda x, e: torch.cat([x, e]).split([e.size(0), x.size(0)]),
    "joined rows cut at places": lambda x, e: torch.cat([x, e]).tensor_split([x.size(0), e.size(0)]),
    "nodes beside edges": (lambda x, e: torch.cat([x, e], 1), {"sample": ODD["as many edges as nodes"]}),
    "row numbers beside others": lambda edge_index, kind: torch.cat([edge_index, kind[None]]),
    "row numbers on top of others": lambda x, batch: torch.stack([torch.arange(x.size(0)), batch]),
    "a constant on top of rows": lambda x: torch.stack([x, torch.ones(13, 4, dtype=x.dtype)]),
    "nodes on top of edges": (lambda x, e: torch.stack([x, e]), {"sample": ODD["as many edges as nodes"]}),
    "rows upside down": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "a meshgrid": lambda v: torch.meshgrid(v, v, indexing="ij"),
    "a constant of all rows expanded": lambda x, c: (
        (x.mean() * c).expand(x.size(0), 4) + x * c.new_ones(13, 1).expand(x.size(0), 4)
    ),
    "an end split off": lambda edge_index: edge_index.split(1)[1].double().mean(),
    "ends on top of themselves": lambda edge_index: torch.stack([edge_index, edge_index]) * 2,
    "ends repeated and read": lambda edge_index, x: x[edge_index.repeat(2, 1)[3]],
    "joined twice": lambda x, z, e: (
        torch.cat([torch.cat([x, z]), e]).sum(0),
        torch.cat([x, torch.cat([z, e])]).amax(0),
    ),
    "joined with itself": lambda x: torch.cat([x]) + x,
    "loops joined and read": lambda x, edge_index: x[loops(edge_index, x)[0]],
    "chunks of one piece": lambda x: x.chunk(1)[0] * 2,
    "broadcast": lambda x, c: torch.broadcast_tensors(x, c)[1],
    "rows behind rows": lambda x, z, v, u: torch.vstack([x, z]).sum(0) + torch.hstack([v, u]).sum(),
    "rows on top": lambda v, u, src: torch.vstack([v, u])[:, src],
    "numbers of the type of rows": lambda x, mask: (
        x * x.new_tensor([1, 2, x.size(0), 3]) + mask.new_tensor(data=2.0, dtype=x.dtype) * x.new_tensor(x.size(0))
    ),
    "a random choice": alike(
        lambda x, series, src: F.gumbel_softmax(x)[src] * F.gumbel_softmax(series, 0.5, dim=0).sum((0, 2))[src][:, None]
    ),
    "a random hard choice": alike(lambda x, src: F.gumbel_softmax(x, hard=True, dim=1)[src] * x[src]),
    "a constant behind rows": lambda x, c: torch.vstack([x, c]),
    "rows made anew": lambda x: x.new_tensor(x.detach()),
}
REFUSED = {
    "a plain integer that fits the rows here": (
        lambda x: x.reshape(4, 2, 4),
        "splits rows",
        {"sample": ODD["as many local rows as features"]},
    ),
    "turned and run together": (lambda x: x.t().reshape(-1, 4), "splits rows"),
    "numbers taken to pieces": (lambda x: x.view(torch.float32), "no exact form that is known here"),
    "rows beside rows along another dimension": (
        lambda square: torch.cat([square, square.t()], 1),
        "a table of all rows against all rows",
    ),
    "as_strided": (lambda x: x.as_strided((2, 2), (1, 1)), "views by strides"),
    "unfolded": (lambda x: x.unfold(0, 2, 1), "torch.unfold along rows"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_dimension_is_not_taken_for_rows_because_of_its_length(name):
    def turn(x, z, v, u, vectors, e):
        together = torch.cat([x, z], 1), torch.cat([x, e]).sum(0), torch.hstack([x, z]), torch.vstack([v, u])
        return x.t(), vectors.permute(2, 1, 0), x.view(-1, 2, 2), e.view(e.size(0), 4, 1), *together

    check(turn, ODD[name])
    check(lambda x, e: (x.squeeze(), x.squeeze(0).sum(0), x[:, None].squeeze(), e.squeeze(0) * 2), ODD[name])
