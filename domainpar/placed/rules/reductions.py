"""Sums, means, extremes, norms and losses. Along rows they run over all ranks, here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from domainpar.placed import exact
from domainpar.placed.axes import Rows
from domainpar.placed.dispatch import argument, aten, bound, decided, name_of, otherwise, rule, rule_of_rows
from domainpar.placed.moves import local_rows, plain, rows_in, whole_local
from domainpar.placed.ranks import NotExact, Sum
from domainpar.placed.rules.each_row import call_each_row, dims_of, share
from domainpar.placed.tensor import Placed, is_rows, mapped, same, settle

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)  # which torch sums as int64
MEAN, SUM = 1, 2  # reductions in ATen's words; 0: none


def after(place: Rows, dims: list[int], keepdim: bool) -> Rows:
    """The placement of rows after a reduction of other dimensions."""
    return place.axis.rows(place.dim if keepdim else place.dim - sum(dim < place.dim for dim in dims))


def along_rows(*calls: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function for calls that reduce rows. Calls along other dimensions run on each rank's rows.

    The function takes the call, its arguments, the dimensions that are reduced, from 0, and whether they stay.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def reduced(func: Any, args: Any, kwargs: Any) -> Any:
            place, dims = args[0].place, dims_of(args[0], argument(func, args, kwargs, "dim"))
            keepdim = bool(argument(func, args, kwargs, "keepdim"))
            if place.dim not in dims:
                return call_each_row(func, args, kwargs, place, after(place, dims, keepdim))
            return function(func, args, kwargs, dims, keepdim)

        rule_of_rows(*calls)(reduced)
        return function

    return add


@rule(aten.sum, aten.mean)
def _sum(func: Any, args: Any, kwargs: Any) -> Any:
    x, mean = args[0], func._schema.name == "aten::mean"
    if not is_rows(x):
        return Placed(func(x.local, *args[1:], **kwargs), x.place)
    dims, keepdim = dims_of(x, argument(func, args, kwargs, "dim")), bool(argument(func, args, kwargs, "keepdim"))
    dtype, place, ranks = kwargs.get("dtype"), settle(x).place, x.ranks
    kind, count = dtype or x.dtype, math.prod(x.size(dim) for dim in dims)
    if mean and not kind.is_floating_point and not kind.is_complex:
        raise RuntimeError(f"mean(): could not infer output dtype. Input dtype must be floating point, got {x.dtype}.")
    if place.dim not in dims:
        out = call_each_row(func, args, kwargs, place, after(place, dims, keepdim))
        return out if ranks.same_bits else decided(func, args, out)
    if kind in (torch.float16, torch.bfloat16) and not ranks.in_backward:  # as torch adds them on one rank
        return _sum(func, (x.float(), *args[1:]), {**kwargs, "dtype": torch.float32}).to(kind)
    if ranks.same_bits:
        local = x.local.to(dtype or (torch.int64 if x.dtype in INTEGERS else x.dtype))
        out = same(exact.summed(local, dims, keepdim, ranks, count), ranks)
    else:
        out = share(x.local.sum(dims, keepdim, dtype=dtype), ranks)
    if mean:
        return out / count
    return decided(func, args, out) if type(out.place) is Sum else out


def lowest(dtype: torch.dtype, largest: bool) -> Any:
    """The neutral value of a maximum, or of a minimum."""
    if dtype is torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def total_of(local: Tensor, dims: list[int], keepdim: bool, ranks: Any, count: int) -> Tensor:
    """The sum over the rows of all ranks, of so many terms, at once on every rank. *Collective*."""
    if ranks.same_bits:
        return exact.summed(local, dims, keepdim, ranks, count)
    total: Tensor = ranks.added(local.sum(dims, keepdim))
    return total


def extreme_of(values: Tensor, dims: list[int], keepdim: bool, ranks: Any, largest: bool) -> Tensor:
    """The extreme of the rows of all ranks. *Collective*."""
    if values.numel() and all(values.size(dim) for dim in dims):
        own = values.amax(dims, keepdim) if largest else values.amin(dims, keepdim)
    else:
        shape = [1 if dim in dims else size for dim, size in enumerate(values.shape)]
        own = values.new_full(shape, lowest(values.dtype, largest))
        own = own if keepdim else own.squeeze(dims)
    out: Tensor = ranks.extreme(own, largest)
    return out + 0.0 if ranks.same_bits and out.is_floating_point() else out  # of 0 and -0 either may be found


@along_rows(aten.amax, aten.amin, aten.max.default, aten.min.default, aten.any, aten.all)
def _extreme(func: Any, args: Any, kwargs: Any, dims: list[int], keepdim: bool) -> Any:
    x, name = args[0], func._schema.name.removeprefix("aten::")
    if x.place.axis.total == 0 and name not in ("any", "all"):
        raise IndexError(f"{name}(): Expected reduction over rows, of which there are none: {x.place}.")
    values = (x.local != 0) if name in ("any", "all") else x.local
    values = values.to(torch.uint8) if values.dtype is torch.bool else values
    out = extreme_of(values, dims, keepdim, x.ranks, name in ("amax", "max", "any"))
    return same(out.to(torch.bool if name in ("any", "all") else x.dtype), x.ranks)


@along_rows(aten.max.dim, aten.min.dim, aten.argmax, aten.argmin)
def extreme_and_place(func: Any, args: Any, kwargs: Any, dims: list[int], keepdim: bool) -> Any:
    """An extreme along rows and where it is: the first one of the whole graph."""
    x, name = args[0], func._schema.name
    if argument(func, args, kwargs, "dim") is None and x.dim() > 1:
        found = func(x.reshape(-1), 0)
        return found.view([1] * x.dim()) if keepdim else found
    (dim,), axis, largest = dims, x.place.axis, "max" in name
    values = x.local.to(torch.uint8) if x.dtype is torch.bool else x.local
    best = extreme_of(values, dims, True, x.ranks, largest)
    is_best = (values == best) | (values.isnan() & best.isnan())
    ids = axis.ids.view([-1 if d == dim else 1 for d in range(x.dim())])
    where = extreme_of(torch.where(is_best, ids, axis.total), dims, True, x.ranks, False)
    best, where = (each if keepdim else each.squeeze(dim) for each in (best.to(x.dtype), where))
    where = same(where, x.ranks)
    return where if name in ("aten::argmax", "aten::argmin") else (same(best, x.ranks), where)


@along_rows(aten.prod)
def _prod(func: Any, args: Any, kwargs: Any, dims: list[int], keepdim: bool) -> Any:
    x = args[0]
    if x.ranks.same_bits and x.dtype not in (torch.int64, *INTEGERS):
        raise NotExact(f"{name_of(func)} of {x.place}, with the same bits asked for: a product over rows has no order")
    own = func(x.local, *args[1:], **kwargs)
    return same(torch.stack(x.ranks.gathered(own)).prod(0).to(own.dtype), x.ranks)


@along_rows(aten.var, aten.std, aten.var_mean, aten.std_mean)
def variance(func: Any, args: Any, kwargs: Any, dims: list[int], keepdim: bool) -> Any:
    """In two passes: the mean over all ranks, then squares around it."""
    x, name = args[0], func._schema.name
    correction, unbiased = (argument(func, args, kwargs, which) for which in ("correction", "unbiased"))
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    count = math.prod(x.size(dim) for dim in dims)
    mean = total_of(x.local, dims, True, x.ranks, count) / max(1, count)
    squares = total_of((x.local - mean).abs().square(), dims, keepdim, x.ranks, count)
    out = squares / max(0, count - correction)  # by 0 as torch does
    out = same(out.sqrt() if "std" in name else out, x.ranks)
    return (out, same(mean if keepdim else mean.squeeze(dims), x.ranks)) if "mean" in name else out


@along_rows(aten.logsumexp, aten.linalg_vector_norm, aten.norm)
def _by_other_reductions(func: Any, args: Any, kwargs: Any, dims: list[int], keepdim: bool) -> Any:
    return otherwise(func, args, kwargs)


@rule_of_rows(aten._softmax, aten._log_softmax, aten._safe_softmax, aten._softmax_backward_data,
              aten._log_softmax_backward_data)  # fmt: skip
def _softmax_rule(func: Any, args: Any, kwargs: Any) -> Any:
    x, backward = next(each for each in args if is_rows(each)), "backward" in func._schema.name
    # With `same_bits` by other calls: torch's kernel of gradients differs with several threads.
    if args[1 + backward] % x.dim() != x.place.dim and not (backward and x.ranks.same_bits):
        return call_each_row(func, args, kwargs, x.place)
    return otherwise(func, args, kwargs)


@rule_of_rows(
    aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.sort, aten.argsort, aten.topk, aten.median, aten.nanmedian,
    aten.kthvalue, aten.mode, aten.cummax, aten.cummin, aten._unique2, aten._unique, aten.unique_dim,
    aten.unique_consecutive, aten.bincount, aten.histc, aten.searchsorted.Tensor, aten.bucketize.Tensor,
    aten.repeat_interleave.Tensor, aten.isin, aten._convert_indices_from_coo_to_csr,
)  # fmt: skip
def by_order(func: Any, args: Any, kwargs: Any) -> Any:
    """Along features on each rank's rows. Along rows, of one number each: all of them on every rank."""
    name = func._schema.name.removeprefix("aten::")
    placed = [x for x in (*args, *kwargs.values()) if is_rows(x)]
    x, ranks, axis, dim = args[0], placed[0].ranks, placed[0].place.axis, argument(func, args, kwargs, "dim")
    at = {"bucketize": 0, "isin": 0, "searchsorted": 1}.get(name)
    if at is not None and len(placed) == 1 and placed[0] is args[at]:  # each number by itself, in a table of all
        table = args[1 - at]
        if not isinstance(table, Tensor) or table.dim() == 1 or name == "isin":
            here = list(args[:2])
            here[at] = args[at].local
            here[1 - at] = plain(table, ranks) if isinstance(table, Tensor) else table
            return Placed(func(*here, *args[2:], **kwargs), args[at].place)
    if name == "searchsorted" and all(each.dim() > 1 and each.place.dim == 0 for each in placed):
        return call_each_row(func, args, kwargs, placed[0].place)
    if dim is not None and at is None and [each is x for each in placed] == [True] and not name.startswith("unique"):
        keepdim = argument(func, args, kwargs, "keepdim")  # None: no dimension goes
        if x.place.dim not in dims_of(x, dim):
            return call_each_row(func, args, kwargs, x.place, after(x.place, dims_of(x, dim), keepdim is not False))
    if name in ("_unique2", "_unique", "bincount", "histc") and x.dim() > 1:  # of all numbers, whatever their rows
        out = func(x.reshape(-1), *args[1:], **kwargs)
        if not isinstance(out, tuple):
            return out
        return out[0], *(each.view(x.shape) if each.numel() == x.numel() else each for each in out[1:])
    if any(each.numel() > max(1, each.place.axis.total) for each in placed):
        raise NotExact(
            f"{name_of(func)} of {placed[0].place}: an order of all rows, with several numbers each. Take one number "
            "of each row (x[:, 0]), sort along features, or pool first"
        )

    def held(each: Tensor) -> Placed:
        fits = each.dim() == 1 and each.size(0) == axis.total > 1
        return Placed(rows_in(each, axis, 0), axis.rows(0)) if fits else same(each, ranks)

    args, kwargs = mapped(
        (args, kwargs), Tensor, lambda each: whole_local(each) if is_rows(each) else plain(each, ranks)
    )
    return mapped(func(*args, **kwargs), Tensor, held)


# Questions of a program, with the same answer on every rank.
rule(aten._local_scalar_dense)(lambda func, args, kwargs: func(whole_local(args[0])))
rule(aten.allclose)(lambda func, args, kwargs: bool(torch.isclose(*args, **kwargs).all()))
rule(aten.is_same_size, aten._has_same_storage_numel)(lambda func, args, kwargs: args[0].shape == args[1].shape)
rule(aten.equal)(lambda func, args, kwargs: args[0].shape == args[1].shape and bool((args[0] == args[1]).all()))


@rule_of_rows(aten.mse_loss.default, aten.mse_loss_backward.default)
def _mse_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """In one pass of torch's kernel: its own decompositions of losses take longer."""
    *grads, x, y, reduction = bound(func, args, kwargs)
    x, y = (each.to(torch.get_default_dtype()) if each.dtype is torch.bool else each for each in (x, y))
    rows = x if is_rows(x) else y
    wide = x.dtype in (torch.float32, torch.float64) and x.dtype == y.dtype and x.shape == y.shape
    apart = not is_rows(rows) or (is_rows(y) and rows.place.dim != y.place.dim)
    if not wide or apart or reduction == 0 or (rows.ranks.same_bits and not grads):
        return otherwise(func, (*grads, x, y, reduction), {})
    place, count = rows.place, max(1, x.numel()) if reduction == MEAN else 1
    if grads:
        return call_each_row(func, (grads[0] / count, x, y, SUM), {}, place)
    local = func(*(local_rows(each, place.axis, place.dim) for each in (x, y)), SUM)
    return share(local / count, place.ranks)


@rule_of_rows(aten.multi_margin_loss_backward.default)
def _multi_margin_loss_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, x, target, p, margin, weight, reduction = bound(func, args, kwargs)
    place: Any = next(each for each in (x, target, grad) if is_rows(each)).place.axis.rows(0)
    grad = (grad / max(1, target.numel()) if reduction == MEAN else grad).expand(target.shape)
    rows = [Placed(local_rows(each, place.axis, 0), place) for each in (grad, x, target)]
    weight = None if weight is None else plain(weight, place.ranks)
    return call_each_row(lambda *rows: func(*rows, p, margin, weight, 0), rows, {}, place)
