"""Reductions over rows: over all ranks, each row once."""

import pytest
import torch
import torch.nn.functional as F
from whole_and_split import ODD, check

SINGLE = {"tolerance": 2e-6}


EXACT = {
    "sums and extremes of row numbers": lambda src, edge_index, x: (
        src.sum(),
        edge_index.max(),
        edge_index.min(1).values,
        x.sum(),
    ),
    "numpy's names": lambda series: (series.mean(axis=1, keepdims=True), torch.sum(a=series, axis=1)),
    "sums": lambda x, e: (x.sum(0), x.sum(), e.sum(0, keepdim=True), x.sum(1), torch.sum(x, dim=(0, 1))),
    "sums of sums": lambda x, e, dst: x.new_zeros(x.size(0), 4).index_add(0, dst, e).sum(0),
    "means": lambda x, e: (x.mean(0), x.mean(), e.mean((0, 1)), x.mean(-1), e.mean(0, True)),
    "means along another dimension": lambda series, columns: (
        series.mean(1),
        series.mean(0),
        columns.sum(1),
        columns.mean(0),
    ),
    "a mean taken off": lambda x, src: (x - x.mean(0))[src],
    "integers and bools": lambda batch, mask, kind: (
        batch.sum(),
        mask.sum(0),
        kind.double().mean(),
        mask.count_nonzero(),
    ),
    "another type": lambda x: (x.float().sum(0, dtype=torch.float64) * 0 + x.sum(0), x.mean(dtype=torch.float64)),
    "single precision": (lambda x: (x.float().sum(0), x.float().mean(), x.float().std(0)), SINGLE),
    "bfloat16": (lambda x: (x.bfloat16().sum(0), x.bfloat16().amax(0)), {"tolerance": 3e-2}),
    "complex": lambda x: ((x * 1j).sum(0), (x * 1j).mean()),
    "variances": lambda x: (x.var(0), x.var(0, unbiased=False), x.std(), x.var(1), torch.var(x, 0, correction=0)),
    "variances with means": lambda x: (*torch.var_mean(x, 0), *torch.std_mean(x), x.std(0, True, True)),
    "extremes": lambda x, e: (x.amax(0), x.amin((0, 1)), x.max(), e.min(), x.amax(1), x.max(0).values, e.min(0).values),
    "extremes of features": lambda x: (x.max(1).values, x.max(1).indices, x.argmax(1), x.median(1).values, x.prod(1)),
    "extremes of integers": lambda batch, kind: (batch.max(), batch.amin(), kind.max(0).values),
    "ties of extremes": lambda z: (z.amax(0), z.max(), z.amin()),
    "elementwise extremes": lambda x, z: (torch.max(x, z), x.min(z)),
    "truth": lambda mask, edge_mask: (
        mask.any(),
        mask.all(),
        edge_mask.any(0),
        (mask & ~mask).any(),
        (mask | ~mask).all(),
    ),
    "truth of features": lambda x: ((x > 0).any(1), (x > 0).all(0), (x > 0).count_nonzero(1)),
    "norms": lambda x: (
        x.norm(),
        x.norm(dim=1),
        x.norm(2, 0),
        torch.linalg.vector_norm(x, dim=0),
        x.norm(1, 1),
        x.norm(p=3, dim=1),
    ),
    "norms of vectors and matrices": lambda x, vectors, series: (
        torch.linalg.norm(x),
        torch.linalg.norm(x, dim=-1),
        torch.linalg.norm(x, 1, 1, True),
        torch.linalg.norm(x, dim=0),
        torch.linalg.norm(x, "fro"),
        torch.linalg.matrix_norm(vectors)
        + torch.linalg.matrix_norm(vectors, "nuc")
        + torch.linalg.norm(vectors, 2, (1, 2)),
        torch.linalg.norm(series, ord=torch.inf, dim=(0, 2)),
    ),
    "norms of other orders": lambda x, e: (
        x.norm(p=1),
        x.norm(p=1, dim=0),
        e.norm(3, 0),
        (x * 0).norm(p=1.5, dim=0),
    ),
    "norms of another type": (
        lambda x: torch.linalg.vector_norm(x.float(), 3, dim=0, dtype=torch.float64),
        {"gradients": False},
    ),
    "normalised columns": lambda x, e: (
        F.normalize(x, dim=0),
        F.normalize(x, p=1, dim=0),
        F.normalize(e, p=3.0, dim=0, eps=1e-3),
        F.normalize(x * 0, dim=0),
        F.normalize(x, dim=1),
    ),
    "large halves": (
        lambda x: (
            F.normalize(x.half() * 200, dim=0),
            F.normalize(x.half() * 1e-4, dim=0),
            (x.half() * 100).norm(3, 0),
            (x.half() * 1000).mean(0),
            (x * 30000).bfloat16().sum(0),
        ),
        {"tolerance": 2e-2, "gradients": False},
    ),
    "which is largest": lambda x, e: (x.argmax(0), x.argmin(0, keepdim=True), x.argmax(), e.argmin(), x.max(0).indices),
    "which of equal ones": lambda z, batch: (z.argmax(0), z.min(0).indices, z.argmin(), *batch.max(0)),
    "the row that has it": lambda x, v: (x[v.max(0).indices], x[v.argmin()], v[v.min(0)[1]]),
    "which is largest, kept": lambda x, v: (x.argmax(keepdim=True), v.argmin(None, True)),
    "the least integers": lambda batch: (
        *batch.masked_fill(batch == 0, torch.iinfo(torch.int64).min).min(0),
        batch.masked_fill(batch == 0, torch.iinfo(torch.int64).min).argmin(),
        (batch * 0 + torch.iinfo(torch.int64).min).max(0).indices,
    ),
    "by the names that numpy has": lambda x: (
        x.softmax(axis=0),
        x.softmax(axis=1),
        x.sum(axis=1, keepdims=True),
        x.amax(axis=0, keepdims=True),
        x.unsqueeze(axis=1),
        x.index_select(axis=1, index=torch.tensor([0])),
        torch.max(x, x2=-x),
    ),
    "logsumexp": lambda x: (x.logsumexp(0), x.logsumexp(1), torch.logsumexp(x * 100, (0, 1), keepdim=True)),
    "softmax over rows": lambda x, src: (x.softmax(0)[src], F.log_softmax(x * 50, dim=0), x.softmax(1), x.softmax(-2)),
    "losses": lambda x, z: (
        F.mse_loss(x, z),
        F.l1_loss(x, z, reduction="sum"),
        F.smooth_l1_loss(x, z),
        F.huber_loss(x, z, reduction="none"),
    ),
    "losses of classes": lambda x, batch: (
        F.cross_entropy(x, batch),
        F.nll_loss(x, batch),
        F.cross_entropy(x, batch, reduction="none"),
    ),
    "losses of probabilities": lambda x, mask: (
        F.binary_cross_entropy_with_logits(x[:, 0], mask.double())
        + F.binary_cross_entropy(x[:, 1].sigmoid(), mask.double())
    ),
    "a divergence": lambda x, u: F.kl_div(x[:, 0], u.detach() * 0 + 0.5),
    "losses in the old way": lambda x, z: F.mse_loss(x, z, size_average=False),
    "losses of torch itself": lambda v, mask: torch.binary_cross_entropy_with_logits(v, mask.double()),
    "another norm of a matrix of rows": lambda x: torch.linalg.matrix_norm(x, 1),
    "the largest norm": lambda x: torch.linalg.vector_norm(x, torch.inf, dim=0),
    "norms below 1": lambda x: x.norm(p=0.5),
    "norms of complex numbers": lambda x: (x * 1j).norm(p=1),
    "sums without nan": lambda x: x.nansum(),
    "a weighted mean of classes": lambda x, batch, c: F.cross_entropy(x, batch, weight=c[:4].detach().abs()),
    "no dimensions": lambda x: x.sum([]),
    "no dimensions, a mean": lambda x: x.mean(dim=()),
    "the first of ties": lambda z: z.max(0).values,
    "the first of ties of edges": lambda e: e.round().min(0).values,
    "the largest bool": lambda mask, x: (mask.max(), mask.min(), mask.amax(0)),
    "the largest of no bool": lambda mask: (mask & ~mask).max(),
    "the largest byte": lambda mask: ((mask & ~mask).to(torch.uint8).max(), mask.to(torch.uint8).min()),
    "the largest short": lambda batch: (batch.to(torch.int16).max(), batch.to(torch.int8).amin()),
    "not the largest bool": lambda mask, x: torch.where(~mask.max(), x, x * 2),
    "norms of nothing": lambda x: (x * 0).norm(dim=0),
    "spread of constants": lambda x: (x * 0 + 1).std(0),
    "the norm of all of nothing": lambda x: (x * 0).norm(),
    "complex variances": lambda x: (x * 1j + x.flip(1)).var(0),
    "complex norms": lambda x: (x * 1j + x.flip(1)).norm(dim=0),
    "several quantiles": lambda x: torch.quantile(x, torch.tensor([0.25, 0.75], dtype=x.dtype), dim=1),
    "one quantile": lambda x: torch.quantile(x, 0.25, dim=1),
    "labels that are left out": lambda x, batch: F.cross_entropy(x, torch.where(batch == 0, -100, batch)),
    "another label that is left out": lambda x, batch: F.nll_loss(x, batch, ignore_index=1),
    "a loss of every rank's": lambda x, c: F.mse_loss(x, c.expand(x.size(0), 4)),
    "a loss with weights": lambda x, mask, u: F.binary_cross_entropy_with_logits(
        x[:, 0], mask.double(), weight=u.detach()
    ),
    "a loss with weights of classes": lambda x, mask, c: F.binary_cross_entropy_with_logits(
        x, mask.double().view(-1, 1).expand(-1, 4), pos_weight=c.detach().abs()
    ),
    "extremes with nan": (
        lambda x: (x.log().amax(0), x.log().max(), *x.log().max(0), x.log().argmin(0)),
        {"gradients": False},
    ),
    "extremes with inf": lambda x: (x.masked_fill(x > 1, torch.inf).amax(0), x.masked_fill(x > 1, -torch.inf).amax(0)),
    "softmax with inf": lambda x: (
        x.masked_fill(x > 1, -torch.inf).softmax(0) + x.masked_fill(x < -1, -torch.inf).logsumexp(0)
    ),
    "sums with a type, of integers": lambda batch: batch.sum(0, dtype=torch.int32),
    "all of integers": lambda batch: (batch.any(), batch.all()),
    "the smallest and the largest": lambda x: torch.aminmax(x, dim=1),
    "the mean of integers": lambda kind: kind.mean(dtype=torch.float64),
    "rows and columns of a norm of at most one": lambda x: (x.renorm(2, 0, 1.0), x.renorm(2, 1, 1.0)),
    "an element by rank": lambda x: (x.kthvalue(2, 1).values, x.kthvalue(2, 1).values.sum()),
}
REFUSED = {
    "a norm of a matrix of rows": (lambda x: torch.linalg.norm(x, 2), "mixes rows"),
    "medians": (lambda x: x.median(0), "an order of all rows"),
    "the largest ones": (lambda x: x.topk(2, 0), "an order of all rows"),
    "a product": (lambda x: x.prod(0), "an order of all rows"),
    "quantiles": (lambda x: x.quantile(0.5, 0), "an order of all rows"),
    "columns without doubles": (lambda x: torch.unique(x, dim=1), "an order of all rows"),
    "a trace": (lambda square: square.trace(), "torch.diagonal along rows"),
    "a loss of a column against a vector": (
        lambda x, v: F.mse_loss(x[:, :1], v),
        "a table of all rows against all rows",
    ),
}


TOO_FEW = ("no edges", "one node without edges")


@pytest.mark.parametrize("name", ODD)
def test_reductions_do_not_mind_how_many_rows_a_rank_has(name):
    check(
        lambda x, e: (x.sum(0), e.sum(), x.mean(1), x.amax(0), x.softmax(0), x.mean(), x.var(0, unbiased=False)),
        ODD[name],
    )
    check(lambda e: (e.mean(0), e.sum(1), e.softmax(0), (e > 0).any(0)), ODD[name])
    if name not in TOO_FEW:
        check(lambda e: (e.amax(0), e.min(), e.logsumexp(0)), ODD[name])
