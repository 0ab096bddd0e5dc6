"""Views: other shapes of the same numbers. A slice of rows is a copy here, which puts back what is written into it."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from domainpar.placed.axes import Axis, Names, Rows
from domainpar.placed.dispatch import aten, bound, copied, decided, name_of, ready, rule, rule_of_rows, viewed
from domainpar.placed.moves import as_rows, local_rows, plain, whole_local
from domainpar.placed.ranks import NotExact
from domainpar.placed.rules.indexing import numbered
from domainpar.placed.strides import strides_of
from domainpar.placed.tensor import Placed, is_rows, same, settle


def _one_name(x: Placed) -> Names | None:
    return x.names if isinstance(x.names, Names) else None


@rule(aten.detach, aten.alias, aten.lift)
def _detach(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    ready(x)
    x.memory.viewed = True
    return decided(func, args, Placed(x._local, x.place, x.names, x.stride(), x.memory, x.path), ())


@rule(aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.view_copy.default)
def _view(func: Any, args: Any, kwargs: Any) -> Any:
    x, size = ready(args[0]), list(args[1])
    if -1 in size:
        size[size.index(-1)] = x.numel() // max(1, -math.prod(size))
    if math.prod(size) != x.numel():
        raise RuntimeError(f"shape '{list(args[1])}' is invalid for input of size {x.numel()}")
    shape, strides = tuple(size), None
    if not x.is_contiguous():
        with suppress(RuntimeError):  # torch has no such view
            strides = strides_of(aten.view.default, (x, shape))
    if not is_rows(x):
        return _shaped(func, args, x, size, 0, shape, strides)
    place = x.place
    if shape == tuple(x.shape):
        out, call = x.local.view(x.local.shape), ("view", *shape)
        out = viewed(x, out, place.dim, call, x.names, None, x.stride())
        return decided(func, args, out, call, (out._local.shape,))
    axis = place.axis
    if axis.total == 0 and 0 in size:
        return _shaped(func, args, x, size, size.index(0), shape, strides, axis)
    before = math.prod(x.shape[: place.dim])
    base, outer, inner = axis.base or (axis, 1, 1)
    before *= outer  # the numbers lie as [before, rows of base, behind]
    product = 1
    for dim, length in enumerate(size):
        if product == before and length == axis.total and outer == inner == 1:
            found: Axis | None = axis
        elif product == before and axis.pieces and length == len(axis.pieces) and axis.alike_pieces:
            found, dim, size[dim] = axis.pieces[0], dim + 1, length  # each piece by itself, as in a stack
        elif product * length >= before * base.total and axis.total > 1:
            more = before // max(1, product)
            fits = product * more == before and base.total * more and length % (base.total * more) == 0
            found = base.times(more, length // (base.total * more)) if fits else None
        else:
            product *= length
            continue
        if found is None:
            break
        if place.pending and found is not axis:
            settle(x)
        size[dim] = found.length + (found.num_ghosts if x.place.pending else 0)
        return _shaped(func, args, x, size, dim, shape, strides, found)
    if axis.total == 1:  # one row, whose dimension goes
        return copied(x, whole_local(x).clone().view(size), x.ranks.same, lambda one: one.view(x.shape))
    raise NotExact(f"a view of {tuple(x.shape)} as {tuple(args[1])} splits {place}")


def _shaped(
    func: Any, args: Any, x: Placed, size: list[int], dim: int, shape: Any, strides: Any, axis: Axis | None = None
) -> Placed:
    """A view in a shape, of which this rank holds `size`, with rows along a dimension."""
    local, place = x.local, x.place
    if type(place) is Rows:
        place = (place.axis if axis is None else axis).rows(dim, place.pending)
    if strides is None and not x.is_contiguous():  # torch copies on the whole graph, so all ranks copy
        return Placed(local.reshape(size), place, _one_name(x))
    try:
        here = local.view(size)
    except RuntimeError:  # the local strides differ from those that the tensor reports
        if x.memory.viewed:
            back = lambda one: aten.view(one, list(x.shape))  # noqa: E731
            return copied(x, local.reshape(size), place, back, _one_name(x), strides)
        x.local = local.contiguous()
        here = x._local.view(size)
    call = ("view", *shape)
    return decided(func, args, viewed(x, here, dim, call, _one_name(x), axis, strides), call, (size,))


@rule(aten.expand, aten.expand_copy)
def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    x, size = settle(ready(args[0])), list(args[1])
    new = len(size) - x.dim()
    size = [x.size(d - new) if length == -1 else length for d, length in enumerate(size)]
    key, strides = ("expand", *size), strides_of(aten.expand.default, (x, size))
    if not is_rows(x):
        return viewed(x, x.local.expand(size), 0, key, _one_name(x), None, strides)
    at = x.place.dim + new
    if size[at] != x.place.axis.total:  # of one row

        def put_back(_: Any) -> Any:
            raise NotExact(f"one of {x.place} expanded to {size[at]}, and written; write clone() first")

        return copied(x, whole_local(x).clone().expand(size), x.ranks.same, put_back, None, strides)
    size[at] = x.local.size(x.place.dim)
    out = viewed(x, x.local.expand(size), at, key, _one_name(x), None, strides)
    return decided(func, args, out, key, (size,)) if len(args) == 2 else out


MARK = 2**40  # a stride by which rows are found again


def _traced(func: Any, x: Placed, rest: Any) -> tuple[tuple[int, ...], int | None]:
    """The strides of a view in the whole graph, and the dimension of its rows; None if they are not as they were."""
    strides = strides_of(func, (x, *rest))
    if not is_rows(x):
        return strides, 0
    key = tuple([tuple(each) if isinstance(each, list) else each for each in rest])
    return strides, _rows_seen(func, tuple(x.shape), x.dtype, x.place.dim, key)


@lru_cache(maxsize=4096)
def _rows_seen(func: Any, shape: tuple[int, ...], dtype: torch.dtype, at: int, rest: Any) -> int | None:
    marks = [MARK if dim == at else 2 - (dim == len(shape) - 1) for dim in range(len(shape))]
    out = func(torch.empty_strided(shape, marks, dtype=dtype, device="meta"), *rest)
    mark = MARK * dtype.itemsize // out.dtype.itemsize
    where = [dim for dim in range(out.dim()) if out.stride(dim) == mark and out.size(dim) == shape[at]]
    return where[-1] if where else None


@rule(
    aten.unsqueeze, aten.unsqueeze_copy, aten.squeeze, aten.squeeze_copy, aten.t, aten.t_copy, aten.transpose,
    aten.transpose_copy, aten.permute, aten.permute_copy, aten.diagonal, aten.unfold, aten.view_as_real,
    aten.view_as_complex, aten.real, aten.imag,
)  # fmt: skip
def along_features(func: Any, args: Any, kwargs: Any) -> Any:
    """Views of each row by itself; views that change the dimension of rows are refused."""
    x, *rest = bound(func, args, kwargs)
    ready(x)
    original, squeezed = func, "squeeze" in func._schema.name and "unsqueeze" not in func._schema.name
    if squeezed:  # a rank may have one of many rows
        dims = range(x.dim()) if not rest else [rest[0]] if isinstance(rest[0], int) else rest[0]
        func, rest = aten.squeeze.dims, [[dim % x.dim() for dim in dims if x.dim() and x.size(dim) == 1]]
        if is_rows(x) and x.place.dim in rest[0]:  # of one row
            x = aten.unsqueeze(aten.select(x, x.place.dim, 0), x.place.dim)
    local = x.local
    if func is aten.view_as_complex.default and local.stride(-1) != 1:  # it is what the tensor reports to torch
        local = local.contiguous()
    along = rest[0] if func is aten.unfold.default else -1 if func is aten.view_as_complex.default else None
    taken = along is not None and is_rows(x) and along % x.dim() == x.place.dim
    strides, at = ((), None) if taken else _traced(func, x, rest)
    if at is None:
        raise NotExact(f"{name_of(func)} along {x.place}")
    call = (name_of(func), *(tuple(each) if isinstance(each, list) else each for each in rest))
    out = viewed(x, func(local, *rest), at, call, _one_name(x), None, strides)
    if squeezed and (original is not aten.squeeze.dim or not rest[0] or x is not args[0]):
        return out
    return decided(original, args, out, call)


@rule(aten.select.int, aten.select_copy.int)
def select(func: Any, args: Any, kwargs: Any) -> Any:
    """One slice of a dimension; of the dimension of rows, one row, which comes to every rank."""
    x, dim, at = ready(args[0]), args[1] % args[0].dim(), int(args[2])
    strides, rows_at = _traced(func, x, (dim, at))
    at %= x.size(dim)
    if rows_at is None:
        row = numbered(x, dim, torch.tensor([at], device=x.device)).local.squeeze(dim)
        return copied(x, row, x.ranks.same, lambda row: aten.select_scatter(x, row, dim, at), None, strides)
    names = x.names[at] if isinstance(x.names, tuple) and dim == 0 else _one_name(x)
    call = ("select", dim, at)
    return decided(func, args, viewed(x, x.local.select(dim, at), rows_at, call, names, None, strides), call)


def bounds(start: Any, end: Any, step: int, total: int) -> tuple[int, int, int]:
    """First, last and step of a slice of a dimension, as numbers in it."""
    return slice(None if start is None else int(start), None if end is None else int(end), step).indices(total)


@rule(aten.slice.Tensor, aten.slice_copy.Tensor)
def _slice(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim, start, end, step = bound(func, args, kwargs)
    ready(x)
    dim %= x.dim()
    where = first, last, step = bounds(start, end, step, x.size(dim))
    strides, at = _traced(aten.slice.Tensor, x, (dim, *where))
    names = x.names if isinstance(x.names, Names) or dim != 0 else None
    if not is_rows(x) or dim != x.place.dim:
        here, call = aten.slice(x.local, dim, *where), ("slice", dim, *where)
        return decided(func, args, viewed(x, here, at or 0, call, names, None, strides), call)
    if where == (0, x.size(dim), 1):
        return viewed(x, x.local.view(x.local.shape), dim, (), names, None, strides)
    part, mine = _part_of(settle(x).place.axis, first, max(first, last), step)
    put_back = lambda rows: aten.slice_scatter(x, rows, dim, *where)  # noqa: E731
    return copied(x, x.local.index_select(dim, mine), part.rows(dim), put_back, names, strides)


def _part_of(axis: Axis, first: int, last: int, step: int) -> tuple[Axis, Tensor]:
    """The axis of a slice of rows, and the local rows in it. *Collective* the first time."""
    mask = (axis.ids >= first) & (axis.ids < last) & ((axis.ids - first) % step == 0)
    where = mask.nonzero().view(-1)
    start = 0
    for piece in axis.pieces:
        if (start, start + piece.total, 1) == (first, last, step):
            return piece, where
        start += piece.total
    return axis.select(mask, ("slice", first, last, step)), where


@rule_of_rows(aten.slice_scatter.default)
def _slice_scatter(func: Any, args: Any, kwargs: Any) -> Any:
    x, source, dim, start, end, step = bound(func, args, kwargs)
    dim %= x.dim()
    where = first, last, step = bounds(start, end, step, x.size(dim))
    if not is_rows(x):
        if source.place.dim == dim:
            return same(func(plain(x, source.ranks), whole_local(source), dim, *where), source.ranks)
        x = as_rows(x, source.place.axis, source.place.dim)
    place = x.place
    if place.dim != dim:
        return Placed(func(x.local, local_rows(source, place.axis, place.dim), dim, *where), place)
    part, mine = _part_of(place.axis, first, max(first, last), step)
    return Placed(x.local.index_copy(dim, mine, local_rows(source, part, dim).to(x.dtype)), place)


@rule_of_rows(aten.select_scatter.default)
def _select_scatter(func: Any, args: Any, kwargs: Any) -> Any:
    x, source, dim, at = args
    dim %= x.dim()
    at %= x.size(dim)
    return aten.slice_scatter(x, source.unsqueeze(dim), dim, at, at + 1, 1)


@rule(aten.select_backward, aten.slice_backward)
def _placed_in_zeros(func: Any, args: Any, kwargs: Any) -> Any:
    grad, size, dim, *rest = args
    if not is_rows(grad):  # for a share of a sum that of the share
        return decided(func, args, Placed(func(grad.local, *args[1:]), grad.place))
    of_select, dim, here = func is aten.select_backward.default, dim % len(size), list(size)
    at = grad.place.dim + (of_select and dim <= grad.place.dim)
    if dim == at and not of_select:  # rows in zeros of all rows
        return aten.slice_scatter(grad.new_zeros(size), grad, dim, *rest)
    here[at] = grad.local.size(grad.place.dim)
    out = Placed(func(grad.local, here, dim, *rest), grad.place.axis.rows(at, grad.place.pending))
    return decided(func, args, out, None, (here, dim, *rest))


@rule(aten.unbind.int)
def _unbind(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim = bound(func, args, kwargs)
    if is_rows(x) and dim % x.dim() == x.place.dim and x.size(dim) > 64:
        raise NotExact(f"{name_of(func)} of {x.place}: a tensor for each row; work with all rows at once")
    return [aten.select(x, dim, at) for at in range(x.size(dim))]


@rule(aten.split.Tensor, aten.split_with_sizes, aten.unsafe_split, aten.unsafe_split_with_sizes,
      aten.split_copy, aten.split_with_sizes_copy)  # fmt: skip
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    x, sizes, dim = bound(func, args, kwargs)
    if isinstance(sizes, int):
        sizes = [min(sizes, x.size(dim) - at) for at in range(0, x.size(dim), max(1, sizes))] or [0]
    return [aten.slice(x, dim, end - size, end) for size, end in zip(sizes, accumulate(sizes))]


@rule(aten._conj, aten._neg_view)
def conjugate(func: Any, args: Any, kwargs: Any) -> Any:
    """Torch makes a view with a flag here, which a placed tensor cannot report, so the numbers are computed."""
    x = settle(args[0])
    return Placed(func(x.local).resolve_conj().resolve_neg(), x.place)


@rule_of_rows(aten.diagonal_scatter)
def _into_diagonals(func: Any, args: Any, kwargs: Any) -> Any:
    x, source, offset, *both = bound(func, args, kwargs)
    first = x if is_rows(x) else source
    gone = [dim % x.dim() for dim in both]
    at = x.place.dim if is_rows(x) else [dim for dim in range(x.dim()) if dim not in gone][source.place.dim]
    if at in gone:
        raise NotExact(f"{name_of(func)} along {first.place}")
    axis, behind = first.place.axis, at - sum(dim < at for dim in gone)
    return Placed(func(local_rows(x, axis, at), local_rows(source, axis, behind), offset, *both), axis.rows(at))
