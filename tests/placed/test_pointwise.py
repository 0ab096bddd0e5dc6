"""Calls that treat each number by itself, and tables that are looked up by rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from whole_and_split import ODD, check, sums

from domainpar import split_graph
from domainpar.testing import run_ranks


def in_place(x, src, dst, e):
    h = sums(x, src, dst, e)
    h += x
    h.mul_(0.5).add_(1.0).relu_()
    return h[src]


def fresh_in_place(x, src):
    y = x * 2
    y[:, :2].mul_(3.0)
    y.clamp_(min=-1.0)
    return y[src]


def becomes_stale(x, src, dst, e):
    y = x * 1
    y += sums(x, src, dst, e)
    return y[src]


def max_norm(x, batch, kind, net):
    return net(batch), net(kind)


EXACT = {
    "a vector against a square": lambda square, v: square + v,
    "arithmetic": lambda x, z, c: (x + 2 * z - c) / 3 + 1 / (1 + x**2) - x.neg().abs() + 2 - x + (x.detach() // 2),
    "with sums": lambda x, src, dst, e: (x * sums(x, src, dst, e) + x)[src] + sums(x, src, dst, e)[dst],
    "what every rank has, broadcast": lambda x, c, table, series: (x * c + x * table[:1], series * table[0, :3]),
    "functions": lambda x: (
        F.gelu(x) + F.silu(x) + x.tanh().exp() + F.softplus(x) + F.leaky_relu(x, 0.2) + x.sigmoid().log() + F.elu(x)
    ),
    "comparisons": lambda x, z: (
        torch.where(x > z, x, z) + (x >= 0) * (z != 1) + torch.where(x.isfinite() & (x < 1), x, 0.0)
    ),
    "masks": lambda x, mask: x.masked_fill(mask.view(-1, 1), 0.0) + torch.where(~mask[:, None], x, x * 2),
    "three arguments": lambda x, z, u: (
        torch.addcmul(x, x, z, value=0.5) + x.lerp(z, 0.3) + x.clamp(min=z * 0, max=z + 1)
    ),
    "with learned slopes": (lambda x, net: net(x), {"net": lambda: nn.PReLU(4)}),
    "in place": in_place,
    "fresh rows in place": fresh_in_place,
    "along other dimensions": lambda series, columns: series.exp().mul(2) + series[:1] + columns.sum() * 0,
    "types": lambda x, kind, mask: (
        x.float().double() * 2 + x.to(torch.float32).to(x) + mask.double().view(-1, 1) + x.detach().clone().contiguous()
    ),
    "types of integers": lambda kind, e: kind.int().long().to(e.dtype) + kind.type_as(e),
    "softmax of features": lambda x, z: (
        x.softmax(1) + F.log_softmax(z, dim=-1) + F.normalize(x) + F.normalize(z + 1, dim=-1) + F.softmin(x, dim=1)
    ),
    "order of features": lambda x: (
        x.sort(1).values
        + x.topk(4, 1).values
        + x.cumsum(1)
        + x.argsort(1)
        + x.cummax(1).values
        + x.sort(dim=-1, stable=True)[0]
    ),
    "gates": lambda x: F.glu(x) + F.glu(x, dim=-1),
    "an embedding with padding": (lambda batch, net: net(batch), {"net": lambda: nn.Embedding(3, 4, padding_idx=0)}),
    "one column for each class": lambda batch, x: F.one_hot(batch, 3) * x[:, :3] + F.one_hot(batch, num_classes=3),
    "norms of each row": (
        lambda x, vectors, net: net(x) + F.rms_norm(x, (4,)) + F.layer_norm(vectors, (3, 2)).sum((1, 2))[:, None],
        {"net": lambda: nn.LayerNorm(4)},
    ),
    "special functions": lambda x, u: (
        torch.special.expit(x) * torch.special.i0(x) + torch.special.ndtr(x) * x.asinh(),
        torch.special.gammaln(u) + torch.special.xlog1py(u, u) + torch.special.entr(u) + torch.special.polygamma(1, u),
    ),
    "complex numbers": lambda x, z: torch.polar(x.exp(), z) * torch.complex(x, z) + torch.polar(z.exp(), x).conj(),
    "ends that are equal": lambda src, dst: (src == dst) | ~(src != dst),
    "row numbers named": lambda x, src: (torch.sub(x[:, 0], other=torch.arange(x.size(0))), torch.add(1, other=src)),
    "embeddings of row numbers": (
        lambda src, edge_index, x, net: (net(src), net(edge_index).prod(0), x * net(torch.arange(x.size(0)))),
        {"net": lambda: nn.Embedding(13, 4)},
    ),
    "out=": lambda x, z: torch.add(x.detach(), z.detach(), out=torch.empty_like(x)),
    "cumsum of a vector": lambda v: v.cumsum(-1),
    "rows sorted": lambda v: v.sort(),
    "a table of all rows": (lambda x, net: x + net.weight, {"net": lambda: nn.Embedding(13, 4)}),
    "an embedding whose table is rows": lambda batch, x: F.embedding(batch, x),
    "norms over rows": lambda x: F.layer_norm(x, (13, 4)),
    "fresh rows changed by sums": becomes_stale,
    "row numbers as bytes": lambda src, x: x[src.byte().long()],
    "columns for all rows": lambda x: F.one_hot(torch.arange(x.size(0)), 13),
    "cross products": lambda series: torch.cross(series, series.flip(2), dim=2),
    "a product of vectors": lambda vectors: torch.linalg.cross(vectors.transpose(1, 2), vectors.transpose(1, 2) * 2),
    "differences of features": lambda x: x.diff() + x.diff(dim=1),
    "a slope for each row": (lambda series, net: F.prelu(series, net.weight), {"net": lambda: nn.PReLU(13)}),
    "an embedding that renormalises": (max_norm, {"net": lambda: nn.Embedding(3, 4, max_norm=0.5)}),
    "an embedding by frequency": (
        lambda batch, net: net(batch),
        {"net": lambda: nn.Embedding(3, 4, scale_grad_by_freq=True)},
    ),
    "inference": (
        lambda x, src, dst, e: torch.inference_mode()(lambda: sums(sums(x, src, dst, e), src, dst, e)[src])(),
        {"gradients": False},
    ),
    "no gradient": lambda x, src, dst, e: x * torch.no_grad()(lambda: sums(sums(x, src, dst, e), src, dst, e))(),
    "nan replaced": lambda x: x.log().nan_to_num(0.0),
    "deep copies": lambda x: __import__("copy").deepcopy(x.detach()) * 2,
}
REFUSED = {
    "a column against a vector": (lambda x, v: x[:, :1] + v, "a table of all rows against all rows"),
    "all pairs": (lambda x: (x[:, None] - x[None]).norm(dim=-1), "a table of all rows against all rows"),
    "cumsum of rows": (lambda x: x.cumsum(0), "an order of all rows"),
    "an unknown call": (lambda x: torch.cov(x), "all rows against all rows"),
}


@pytest.mark.parametrize("name", ODD)
def test_broadcasting_looks_at_rows_and_not_at_lengths(name):
    check(lambda x, c, v, e, w: (x * c + v.view(-1, 1), e.t() * w, (x.t() + v).t()), ODD[name])
    check(lambda x, v: x[:, :1] + v, ODD[name], or_refused=True)


def test_rows_of_nodes_meet_those_of_as_many_edges_by_their_numbers():
    """On both ranks there are as many of either, and none of the same number."""
    numbers = torch.arange(12)
    x, w = numbers.double() + 1, 100 * numbers.double()

    def both(world):
        part = split_graph(torch.stack([numbers, (5 * numbers + 1) % 12]), 12, world, partitioner=numbers.numpy() % 2)
        return part.whole(part.nodes(x) * part.edges(w)), part.whole(part.edges(w) - part.nodes(x))

    for product, difference in run_ranks(both, 2):
        assert torch.equal(product, x * w)
        assert torch.equal(difference, w - x)
