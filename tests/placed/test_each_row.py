"""Calls that mix numbers along some dimensions: exact where the rows lie along others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from whole_and_split import ODD, check, sums


def positive(vectors):
    """A matrix with an inverse for each row, [N, 2, 2]."""
    return vectors.transpose(1, 2) @ vectors + torch.diag_embed(torch.ones(2, dtype=vectors.dtype))


def both(function):
    """A function of the matrices of rows, along the first dimension and along another."""
    return lambda vectors: (function(positive(vectors)), function(torch.stack([positive(vectors)] * 2)))


EXACT = {
    "cosines with each of some vectors": lambda x: F.cosine_similarity(x, x.new_ones(2, 1, 4).cumsum(0), dim=2),
    "data against what was tasks, also on a rank without rows": lambda x, z, src, dst, e: (
        F.cosine_similarity(x.detach(), z * 1).sum(),
        F.cosine_similarity(x.detach(), x2=z * 1),
        torch.linalg.vecdot(x.detach(), z * 1).sum(),
        F.pairwise_distance(x.detach(), z * 1).sum(0),
    ),
    "row numbers looked up as values": lambda x, src: x[src][torch.isin(src, torch.tensor([1, 2]))].sum(),
    "row numbers padded": lambda edge_index, x: (F.pad(edge_index, (0, 0, 1, 0)), x.sum()),
    "zeros beside features": lambda x, src, series: (
        F.pad(x, (0, 2))[src] + F.pad(x, (1, 1, 0, 0), value=2.0)[src],
        F.pad(series, (0, 0, 0, 0, 1, 0)) * 2 + F.pad(series, (0, -1, 0, 0, 1, 0))[..., :1],
        F.pad(series, (1, 1), mode="reflect"),
        nn.CircularPad1d(1)(series),
    ),
    "sums padded": lambda x, src, dst, e: F.pad(sums(x, src, dst, e), (0, 1))[src],
    "inverses": both(lambda m: torch.linalg.inv(m) + m.inverse() + torch.linalg.pinv(m)),
    "determinants": both(lambda m: torch.linalg.det(m) + torch.det(m) + torch.logdet(m) + torch.linalg.slogdet(m)[1]),
    "decompositions": both(
        lambda m: (
            torch.linalg.cholesky(m),
            torch.linalg.qr(m)[1],
            torch.linalg.eigvalsh(m),
            torch.linalg.svdvals(m),
            torch.linalg.eigh(m)[0],
            torch.linalg.eigh(m)[1].abs(),
            torch.linalg.svd(m)[1],
        )
    ),
    "ranks and powers": both(
        lambda m: (torch.linalg.matrix_rank(m.detach()), torch.linalg.matrix_power(m, 3), torch.linalg.matrix_exp(m))
    ),
    "systems": lambda vectors, x, c: (
        torch.linalg.solve(positive(vectors), vectors.transpose(1, 2)),
        torch.linalg.solve(positive(vectors), x[:, :2, None]),
        torch.linalg.solve(positive(vectors), c.view(1, 2, 2)),
        torch.linalg.solve(c.view(1, 2, 2), vectors.transpose(1, 2)),
        torch.linalg.solve_triangular(positive(vectors), vectors.transpose(1, 2), upper=True),
    ),
    "sums inverted": lambda x, src, dst, e: torch.linalg.inv(positive(sums(x, src, dst, e).view(-1, 2, 2)))[src],
    "triangles": lambda vectors, series: (
        vectors.tril() + vectors.triu(1) + (vectors * 1).tril_(1) + (vectors * 1).mT.mT
    ),
    "diagonals": lambda x, vectors, src: (
        torch.diag_embed(x)[src],
        vectors.diagonal(dim1=1, dim2=2)[src],
        torch.diagonal(vectors, 0, -2, -1),
        torch.linalg.diagonal(vectors),
    ),
    "products of vectors": lambda series, c: (
        torch.linalg.cross(series, series * series),
        torch.cross(series, c[:3].expand_as(series), dim=-1),
        torch.linalg.vecdot(series, series, dim=0) + torch.linalg.vecdot(series, series).sum(0)[:, None],
    ),
    "distances": lambda vectors, x, z: (
        torch.cdist(vectors, vectors * 2 + 1),
        torch.cdist(vectors, torch.ones(1, 2, 2, dtype=x.dtype), p=1),
        F.pairwise_distance(x, z) + F.cosine_similarity(x, z),
        F.pairwise_distance(x, z, keepdim=True),
    ),
    "unflattened": lambda x, series, src: (
        x.unflatten(-1, (2, 2))[src],
        x.unflatten(1, (2, -1)),
        nn.Unflatten(1, (2, 2))(x),
        series.unflatten(0, (2, 1)),
    ),
    "windows": lambda series, x, src: (
        series.unfold(2, 2, 1),
        series.unfold(0, 2, 1).sum(-1),
        x.unfold(1, 3, 1)[src],
    ),
    "pieces of pictures": lambda vectors: (
        F.fold(F.unfold(vectors[:, None], 2), (3, 2), 2),
        F.interpolate(vectors, scale_factor=2) + F.interpolate(vectors, size=4, mode="linear"),
    ),
    "rolled": lambda x: x.roll(1, 1) + x.roll((1, 2), (1, -1)),
    "spectra": lambda x: (
        torch.fft.rfft(x).abs(),
        torch.fft.irfft(torch.fft.rfft(x), n=4) + torch.fft.fft(x).real + torch.fft.ifft(x, dim=1).imag,
    ),
    "complex pairs": lambda x: (
        torch.view_as_real(torch.view_as_complex(x.view(x.size(0), 2, 2)) * 1j),
        torch.view_as_complex(x.view(x.size(0), 2, 2)).abs(),
    ),
    "among listed values": lambda z, batch, table: (
        torch.isin(z, torch.tensor([0.0, 2.0], dtype=z.dtype)),
        torch.isin(batch, 1) | torch.isin(batch, torch.tensor([2]), invert=True),
        torch.isin(batch, batch.unique()),
    ),
    "bins": lambda x, v, c: (
        torch.bucketize(x, c.detach().sort().values),
        torch.bucketize(v, torch.tensor([0.0, 1.0], dtype=v.dtype), right=True),
        torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0], dtype=v.dtype), v),
        torch.searchsorted(x.detach().sort(1).values, x, side="right"),
    ),
    "products of features": lambda x, series: (x.prod(1), series.prod(0), series.prod(2, keepdim=True)),
    "without nan": lambda x: (torch.where(x > 0, x, torch.nan).nansum(1), torch.where(x > 0, x, 0.0).nanmean(1)),
    "orders": lambda series, x: (
        *x.median(1),
        x.mode(1).values,
        series.kthvalue(2, 2).values,
        series.kthvalue(2, dim=0, keepdim=True)[0],
        series.sort(0)[0] + series.cummax(2)[0],
        series.topk(2, -1)[1],
    ),
    "cosines along rows, counted from the front of more dimensions": lambda x: F.cosine_similarity(
        x, x.new_ones(2, 1, 4), dim=1
    ),
    "dot products along rows of more dimensions": lambda x: torch.linalg.vecdot(x, x.new_ones(2, 1, 4), dim=1),
    "more rows": lambda x: F.pad(x, (0, 0, 0, 1)),
    "more rows in a circle": lambda square: F.pad(square.t()[None], (1, 0), mode="circular"),
    "systems of vectors": lambda vectors, x: torch.linalg.solve(positive(vectors), x[:, :2]),
    "systems of one matrix": lambda vectors: torch.linalg.solve(
        positive(vectors), torch.ones(2, 2, dtype=vectors.dtype)
    ),
    "systems with every rank's": lambda vectors: torch.linalg.solve(
        positive(vectors), torch.ones(13, 2, 2, dtype=vectors.dtype)
    ),
    "rows as a diagonal": lambda v: torch.diag_embed(v),
    "a diagonal before the rows": lambda x: torch.diag_embed(x, dim1=0, dim2=2),
    "distances to every rank's": lambda vectors: torch.cdist(vectors, torch.ones(13, 3, 2, dtype=vectors.dtype)),
    "all rolled": lambda x: x.roll(1),
    "a spectrum of several dimensions": lambda series: torch.fft.fftn(series, dim=(0, 2)),
    "among rows": lambda batch: torch.isin(batch, batch),
    "a value among rows": lambda batch: torch.isin(1, batch),
    "rows searched": lambda x, v: torch.searchsorted(v, x[:, 0]),
}
REFUSED = {
    "a matrix of rows": (lambda square: torch.linalg.inv(square), "mixes rows"),
    "a determinant of rows": (lambda square: torch.linalg.det(square), "mixes rows"),
    "a system of rows": (lambda square, x: torch.linalg.solve(square, x), "mixes rows"),
    "a triangle of rows": (lambda square: square.tril(), "mixes rows"),
    "the diagonal of rows": (lambda square: square.diagonal(), "torch.diagonal along rows"),
    "distances of all rows": (lambda x: torch.cdist(x, x), "mixes rows"),
    "a spectrum of rows": (lambda x: torch.fft.fft(x, dim=0), "mixes rows"),
    "pairs of rows": (
        lambda series: torch.view_as_complex(series[:, :, 0].t().contiguous().t()),
        "torch.view_as_complex along rows",
    ),
    "bins of rows": (lambda x, v: torch.bucketize(x, v), "an order of all rows"),
    "all pairs": (lambda x, z: torch.kron(x, z), "a table of all rows against all rows"),
    "cross products over rows": (lambda series: torch.linalg.cross(series, series, dim=1), "mixes rows"),
}


@pytest.mark.parametrize("name", ODD)
def test_lengths_do_not_matter(name):
    def mixed(x, vectors, series, e, batch):
        moved = x.unflatten(1, (2, 2)), torch.diag_embed(e), vectors.diagonal(dim1=1, dim2=2), F.pad(e, (1, 1))
        computed = torch.linalg.inv(positive(vectors)), torch.fft.rfft(x).abs(), torch.cdist(vectors, vectors + 1)
        return *moved, *computed, series.unfold(0, 2, 1), torch.isin(batch, torch.tensor([1]))

    check(mixed, ODD[name])
