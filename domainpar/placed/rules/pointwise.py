"""Elementwise calls, by torch's own tag."""

from __future__ import annotations

import cmath
import math
from typing import Any

import torch
from torch import Tensor

from domainpar.placed.axes import Rows
from domainpar.placed.dispatch import aten, decided, name_of, on_whole, rule
from domainpar.placed.exact import ROUNDED_ONCE, by_rows
from domainpar.placed.moves import local_rows, plain, whole_local
from domainpar.placed.ranks import NotExact, Sum
from domainpar.placed.strides import layout_of
from domainpar.placed.tensor import Placed, each_once, is_rows, same, settle

ADDS = {aten.add.Tensor, aten.sub.Tensor}
SCALES = {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.neg.default, aten._to_copy.default,
          aten.clone.default}  # fmt: skip
_CLONE, _TO = aten.clone.default, aten._to_copy.default


@rule(
    aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten._to_copy, aten.clone,
    aten.fill, aten.lift_fresh, aten.lift_fresh_copy, aten.masked_fill, aten.nan_to_num, aten._conj_physical,
)  # fmt: skip
def pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Each rank computes its rows; without rows, every rank computes all."""
    first: Any = None
    plainly, contiguous, here = not kwargs, True, []
    for value in args:  # most calls: rows that lie alike, and numbers
        if type(value) is Placed:
            if first is None:
                first, place, dims = value, value.place, value.dim()
                plainly = plainly and type(place) is Rows and not place.pending
            elif value.place is not place or value.dim() != dims:
                plainly = False
            contiguous = contiguous and value.is_contiguous()
            value = value.local
        elif isinstance(value, Tensor):
            plainly = False
        here.append(value)
        if not plainly:
            return _pointwise(func, args, kwargs)
    names = first.names if func is _CLONE else None
    layout = None if contiguous else layout_of(func, args, kwargs)
    if place.ranks.same_bits and func not in ROUNDED_ONCE:
        at = [place.dim if type(value) is Placed else None for value in args]
        return Placed(by_rows(func, here, kwargs, place.ranks, at, place.dim), place, names, layout)
    return decided(func, args, Placed(func(*here), place, names, layout))


def _pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    operands: list[Any] = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    waiting = [x for x in operands if isinstance(x, Placed) and x.place.pending]
    if waiting:
        out = _on_shares(func, args, kwargs, operands, waiting)
        if out is not None:
            return out
        for x in waiting:
            settle(x)
    first: Any = next((x for x in operands if is_rows(x)), None)
    if first is not None:
        return _rows(func, args, kwargs, operands, first)
    ranks = next(x for x in operands if isinstance(x, Placed)).ranks
    if ranks.size > 1 and not ranks.in_backward and any(x.dim() == 0 for x in operands):
        # This finds a rank whose own data decided about a figure of all ranks.
        scalars = [repr(x) for x in args if not isinstance(x, Tensor)]
        ranks.log.call(f"{name_of(func)}({', '.join(scalars)})")
    if len(operands) == 1 and isinstance(args[0], Placed) and 0 in args[0]._local.stride():
        local = settle(args[0]).local  # of numbers that repeat: no rank holds a table of all rows
        return same(func(each_once(local), *args[1:], **kwargs).expand(local.shape), ranks)
    return on_whole(func, args, kwargs)


def _on_shares(func: Any, args: Any, kwargs: Any, operands: list[Any], waiting: list[Placed]) -> Placed | None:
    """A linear call on tensors that wait for shares of other ranks, made on the shares; None for all other calls."""
    first, place = operands[0], waiting[0].place
    if kwargs.get("rounding_mode"):
        return None
    if func in SCALES and len(waiting) == 1 and waiting[0] is first and "alpha" not in kwargs:
        most = first.dim() if type(place) is Sum else 0  # dimensions of what it is scaled by
        if all(x.dim() <= most and not is_rows(x) for x in operands[1:]) and _scales(func, args, kwargs):
            here = [plain(x, first.ranks) if isinstance(x, Tensor) else x for x in args[1:]]
            return Placed(func(first.local, *here, **kwargs), place)
    if func in ADDS and len(operands) == 2 and operands[0].shape == operands[1].shape:
        shares = [_share(x, place) for x in operands]
        if all(share is not None for share in shares):
            return Placed(func(*shares, **kwargs), place)
    return None


def _share(x: Any, place: Any) -> Tensor | None:
    """This rank's share of a tensor, beside others with a placement that waits; None if it is placed otherwise."""
    if isinstance(x, Placed) and x.place is place:
        return x.local
    if type(place) is Sum and not is_rows(x):  # of what every rank holds, rank 0 has the share
        local = plain(x, place.ranks)
        return local if place.ranks.rank == 0 else torch.zeros_like(local)
    if not is_rows(x) or type(place) is Sum or (x.place.axis, x.place.dim) != (place.axis, place.dim):
        return None
    # Zeros behind, where others have what ghost rows collected.
    shape = [place.axis.num_ghosts if dim == place.dim else size for dim, size in enumerate(x.local.shape)]
    return torch.cat([x.local, x.local.new_zeros(()).expand(shape)], place.dim)


def _scales(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call scales each share of a number as it scales the number: by what is finite, into floats."""
    dtype = kwargs.get("dtype")
    if dtype is not None and not dtype.is_floating_point and not dtype.is_complex:
        return False
    if len(args) < 2:
        return True
    by = args[1]
    if isinstance(by, Tensor):
        if by.device.type != "cpu":  # which is not waited for
            return func is aten.mul.Tensor
        by = by._local if isinstance(by, Placed) else by
        return bool(by.isfinite().all()) and (func is aten.mul.Tensor or bool(by.all()))
    return cmath.isfinite(by) and (by != 0 or func not in (aten.div.Tensor, aten.div.Scalar))


def _crossing(func: Any, args: Any, kwargs: Any, operands: list[Any]) -> Any:
    """Rows along one dimension beside rows along another: rows that become columns come to every rank."""
    count = math.prod(torch.broadcast_shapes(*(tuple(x.shape) for x in operands)))
    table = next((x for x in operands if is_rows(x) and x.numel() == count), None)
    if table is None:
        one, other = [x.place for x in operands if is_rows(x)][:2]
        raise NotExact(
            f"{name_of(func)} of {one} and {other}: a table of all rows against all rows has no form on a split graph; "
            "write it with edges, or with attention over pooled rows"
        )
    behind, ranks = table.place.dim - table.dim(), table.ranks

    def along(x: Any) -> Any:
        if is_rows(x) and x.place.dim - x.dim() != behind:
            if x.numel() == count > x.place.axis.total:
                raise NotExact(f"{name_of(func)} of {table.place} and {x.place}: a table of all rows against all rows")
            return same(whole_local(x), ranks)
        return x

    return pointwise(func, list(map(along, args)), {name: along(value) for name, value in kwargs.items()})


def _rows(func: Any, args: Any, kwargs: Any, operands: list[Any], first: Any) -> Any:
    """Rows beside rows of other axes, and beside what every rank holds."""
    axis, behind = first.place.axis, first.place.dim - first.dim()
    lengths = {x.size(behind) for x in operands if x.dim() + behind >= 0}
    if axis.total == 1 and len(lengths - {1}) == 1:  # one row beside each of many
        bigger = next((x for x in operands if is_rows(x) and x.size(behind) > 1), None)
        if bigger is None:
            return on_whole(func, [same(whole_local(x), axis.ranks) if is_rows(x) else x for x in args], kwargs)
        axis = bigger.place.axis
        behind = bigger.place.dim - bigger.dim()
    crossing = [x for x in operands if is_rows(x) and x.place.dim - x.dim() != behind]
    if crossing:
        return _crossing(func, args, kwargs, operands)

    dims: list[int | None] = []

    def here(x: Any) -> Any:
        dims.append(None)
        if not isinstance(x, Tensor):
            return x
        dim = x.dim() + behind
        if isinstance(x, Placed) and is_rows(x) and x.place.axis.total == 1 != axis.total:
            return whole_local(x)
        if is_rows(x):
            dims[-1] = dim
            return local_rows(x, axis, dim)
        if dim >= 0 and x.size(dim) not in (1, axis.total):
            raise RuntimeError(
                f"The size of tensor a ({axis.total}) must match the size of tensor b ({x.size(dim)}) at dimension "
                f"{dim}: {axis} meet a tensor of shape {tuple(x.shape)} that is the same on every rank."
            )
        if dim < 0 or x.size(dim) == 1:
            return plain(x, axis.ranks)
        dims[-1] = dim
        return local_rows(x, axis, dim)

    values, named = [here(x) for x in args], {name: here(value) for name, value in kwargs.items()}
    out_dim = max(x.dim() for x in operands) + behind
    out = by_rows(func, values, named, axis.ranks, dims, out_dim)
    names = first.names if func is _TO or func is _CLONE else None
    contiguous = all(x.is_contiguous() for x in operands)
    return Placed(out, axis.rows(out_dim), names, None if contiguous else layout_of(func, args, kwargs))


@rule(aten.copy.default)
def copy(func: Any, args: Any, kwargs: Any) -> Any:
    """The value that `copy_` writes: the source, in the shape and type of the target."""
    target, source = args[:2]
    value = source.to(target.dtype) if source.dtype != target.dtype else source
    return value if value.shape == target.shape else value.expand(target.shape)
