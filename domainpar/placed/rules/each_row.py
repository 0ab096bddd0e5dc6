"""Calls that compute within some dimensions of a tensor: exact where the rows lie along another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from domainpar.placed import exact
from domainpar.placed.axes import Rows
from domainpar.placed.dispatch import argument, aten, bound, name_of, rule, rule_of_rows
from domainpar.placed.moves import as_rows, local_rows, plain, whole_local
from domainpar.placed.ranks import GraphRanks, NotExact
from domainpar.placed.tensor import Placed, is_rows, placed_in, same

WITHIN: dict[str, int] = {
    name: count
    for count, names in {
        1: "upsample_nearest1d upsample_linear1d avg_pool1d max_pool1d reflection_pad1d replication_pad1d "
        "reflection_pad1d_backward replication_pad1d_backward upsample_nearest1d_backward upsample_linear1d_backward "
        "adaptive_avg_pool1d native_channel_shuffle",
        2: "linalg_inv_ex _linalg_det _linalg_slogdet linalg_cholesky_ex cholesky_solve cholesky_inverse _linalg_svd "
        "_linalg_solve_ex linalg_solve_triangular triangular_solve linalg_qr _linalg_eigh linalg_eig "
        "_linalg_eigvals linalg_eigvals linalg_lu_factor_ex linalg_lu linalg_lu_solve lu_unpack linalg_matrix_exp "
        "linalg_pinv tril triu "
        "avg_pool2d avg_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward "
        "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward "
        "upsample_nearest2d upsample_bilinear2d upsample_nearest2d_backward upsample_bilinear2d_backward "
        "reflection_pad2d replication_pad2d reflection_pad2d_backward replication_pad2d_backward im2col col2im "
        "pixel_shuffle pixel_unshuffle _cdist_forward _cdist_backward linalg_householder_product ormqr geqrf",
        3: "avg_pool3d avg_pool3d_backward max_pool3d_with_indices max_pool3d_with_indices_backward "
        "_adaptive_avg_pool3d _adaptive_avg_pool3d_backward",
    }.items()
    for name in names.split()
}


def share(local: Tensor, ranks: GraphRanks) -> Placed:
    """A share of a sum over ranks. In backward it waits for all others, else it is summed now.

    So every rank has the value of each figure that a program computes.
    """
    if ranks.same_bits:
        ranks.check_integers(local)
    if ranks.in_backward and not ranks.same_bits:
        return Placed(local, ranks.total)
    return same(ranks.added(local), ranks)


def dims_of(x: Tensor, dims: Any) -> list[int]:
    """Dimensions as non-negative numbers; all of them for none."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(x.dim()))
    return [dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)] if x.dim() else []


def _along_rows(func: Any, x: Placed) -> NotExact:
    return NotExact(f"{name_of(func)} of {x.place} mixes rows; put the rows along an earlier dimension, or pool first")


def call_each_row(func: Any, args: Any, kwargs: Any, place: Rows, to: Rows | None = None) -> Any:
    """A call that treats each row by itself, made on this rank's rows. *Collective* if other ranks hold any of them.

    Args:
        func: The call; it returns a tensor with rows, or several.
        args: Its arguments; one that every rank holds is cut if it is as long along the dimension of the rows.
        kwargs: Its arguments by name.
        place: The rows.
        to: Their placement in results; None: as it was.
    """
    axis, to = place.axis, to or place
    first = next(x for x in placed_in((args, kwargs)) if is_rows(x))
    dims, here = list[int | None](), []
    for value in (*args, *kwargs.values()):
        at = value.place.dim if is_rows(value) else place.dim
        if is_rows(value) or (
            isinstance(value, Tensor) and value.dim() == first.dim() and value.size(at) == axis.total != 1
        ):
            value = local_rows(value, axis, at)
            if not axis.length:  # some kernels take no less than a row
                value = value.new_ones([1 if dim == at else size for dim, size in enumerate(value.shape)])
        else:
            at, value = None, plain(value, axis.ranks) if isinstance(value, Tensor) else value
        dims.append(at)
        here.append(value)
    named = dict(zip(kwargs, here[len(args) :]))
    out = exact.by_rows(func, here[: len(args)], named, axis.ranks, dims, to.dim)

    def held(local: Any) -> Any:
        if not isinstance(local, Tensor):
            return local
        return Placed(local if axis.length else local.narrow(to.dim, 0, 0), to)

    return tuple(map(held, out)) if isinstance(out, (tuple, list)) else held(out)


def each_row(func: Any, args: Any, kwargs: Any) -> Any:
    """Each rank computes its rows."""
    x = next(x for x in placed_in((args, kwargs)) if is_rows(x))
    if x.place.dim >= x.dim() - WITHIN[func._schema.name.removeprefix("aten::")]:
        raise _along_rows(func, x)
    if func is aten._linalg_solve_ex.default:  # a system for each row: one for many would leave one result for many
        a, b, *rest = args
        if b.dim() > 1 and b.shape != a.shape[:-1]:  # matrices, not vectors
            batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
            a, b = (each.expand([*batch, *each.shape[-2:]]) for each in (a, b))
        args = [*(as_rows(each, x.place.axis, x.place.dim) for each in (a, b)), *rest]
    return call_each_row(func, args, kwargs, x.place)


rule_of_rows(*(getattr(aten, name) for name in WITHIN if hasattr(aten, name)))(each_row)


@rule_of_rows(aten._fft_r2c, aten._fft_c2c, aten._fft_c2r, aten.linalg_cross, aten.glu, aten.glu_backward)
def along_given(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls that name the dimensions along which they compute."""
    x, dims = next(x for x in placed_in(args) if is_rows(x)), argument(func, args, kwargs, "dim")
    if x.place.dim in dims_of(x, dims):
        raise _along_rows(func, x)
    return call_each_row(func, args, kwargs, x.place)


@rule_of_rows(aten.constant_pad_nd)
def _pad(func: Any, args: Any, kwargs: Any) -> Any:
    x, pads, value = bound(func, args, kwargs)
    at, behind = x.place.dim, 2 * (x.dim() - 1 - x.place.dim)
    before, after = [*pads, 0, 0][behind : behind + 2] if behind <= len(pads) else (0, 0)
    inner = [0 if number // 2 == behind // 2 else pad for number, pad in enumerate(pads)]
    out: Any = call_each_row(func, (x, inner, value), {}, x.place)
    if not before and not after:
        return out
    out = out.narrow(at, max(0, -before), out.size(at) + min(0, before) + min(0, after))
    shapes = [[max(0, count) if dim == at else size for dim, size in enumerate(out.shape)] for count in (before, after)]
    first, last = (torch.full(shape, value, dtype=x.dtype, device=x.device) for shape in shapes)
    return torch.cat([first, out, last], at)


@rule_of_rows(aten.convolution, aten.convolution_backward)
def convolution(func: Any, args: Any, kwargs: Any) -> Any:
    """Rows that are separate pictures, or that lie along a dimension with a kernel of size 1."""
    backward = func is aten.convolution_backward.default
    x, weight, *rest = args[1:] if backward else args
    rows = next((each for each in (x, args[0]) if is_rows(each)), None)
    if rows is None or is_rows(weight):
        raise NotExact(f"{name_of(func)} by weights that are rows")
    stride, padding, _, _, outer, _ = rest[1:7]
    if rows.ranks.same_bits:
        raise NotExact(f"{name_of(func)} of {rows.place}, with the same bits asked for: its kernels depend on how many")
    at, axis, ranks = rows.place.dim, rows.place.axis, rows.ranks
    apart = at >= 2 and weight.size(at) == 1 and stride[at - 2] == 1 and padding[at - 2] == 0 and not any(outer)
    if at == 1 or (at > 1 and not apart):
        raise _along_rows(func, rows)
    weight = plain(weight, ranks)
    if not backward:
        rest[0] = rest[0] if rest[0] is None else plain(rest[0], ranks)
        return call_each_row(lambda x: func(x, weight, *rest), (x,), {}, rows.place)
    *_, wanted = rest
    shares: list[Any] = []

    def through(grad: Tensor, x: Tensor) -> Tensor:
        grads = func(grad if axis.length else torch.zeros_like(grad), x, weight, *rest)
        shares[:] = grads[1:]
        return grads[0] if wanted[0] else grad

    first = call_each_row(through, (args[0], x), {}, rows.place)
    return (first if wanted[0] else None, *(share(grad, ranks) if want else None
                                            for grad, want in zip(shares, wanted[1:])))  # fmt: skip


@rule_of_rows(aten._scaled_dot_product_flash_attention_for_cpu,
              aten._scaled_dot_product_flash_attention_for_cpu_backward, aten._scaled_dot_product_attention_math,
              aten._scaled_dot_product_fused_attention_overrideable)  # fmt: skip
def attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Attention within each row, where rows are batches or heads. Attention of all rows to all rows is refused."""
    x = next(x for x in placed_in((args, kwargs)) if is_rows(x))
    if x.ranks.same_bits:
        raise NotExact(f"{name_of(func)} of {x.place}, with the same bits asked for: write softmax(q @ k.mT) @ v")
    if x.place.dim >= x.dim() - 2:
        raise NotExact(
            f"{name_of(func)} of {x.place}: attention of all rows to all rows has no form on a split graph; write it "
            "with edges, or pool one side first"
        )
    if "backward" not in func._schema.name and argument(func, args, kwargs, "dropout_p"):
        raise NotExact(f"{name_of(func)} with dropout, whose numbers torch draws out of sight; use nn.Dropout")
    return call_each_row(func, args, kwargs, x.place)


@rule(aten._trilinear)
def _trilinear_rule(func: Any, args: Any, kwargs: Any) -> Any:
    factors = list(args[:3])
    for number, dims in enumerate(args[3:6]):
        for at in dims:
            factors[number] = factors[number].unsqueeze(at)
    product = factors[0] * factors[1] * factors[2]
    return product.sum(args[6]) if args[6] else product


@rule(aten._linalg_check_errors)
def check_errors(func: Any, args: Any, kwargs: Any) -> Any:
    """Raised on every rank, whichever has the matrix."""
    func(whole_local(args[0]).contiguous(), *args[1:], **kwargs)
