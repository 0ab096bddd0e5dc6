"""Rows added, combined or set at rows: results at rows of other ranks are sent to these."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from domainpar.placed import exact
from domainpar.placed.axes import Axis, Names, Rows
from domainpar.placed.dispatch import argument, aten, bound, name_of, rule, rule_of_rows, writing, written
from domainpar.placed.moves import as_rows, local_rows, plain, whole_local
from domainpar.placed.ranks import GraphRanks, NotExact, OneBlock
from domainpar.placed.rules.each_row import share
from domainpar.placed.rules.indexing import check_numbers, expand_masks, reach_of, select_rows, wrapped
from domainpar.placed.rules.reductions import lowest
from domainpar.placed.rules.views import select
from domainpar.placed.tensor import Placed, brought_home, is_rows, same, settle


def one_dimensional(index: Any, dim: int) -> Any:
    """An index that is the same for all features, as an index of rows; others as they are."""
    if is_rows(index) and index.place.dim != dim:
        return index
    local = index._local if isinstance(index, Placed) else index
    others = [at for at in range(index.dim()) if at != dim]
    if any(local.size(at) != 1 and local.stride(at) != 0 for at in others):
        return index
    for at in reversed(others):
        if not index.size(at):
            index = index.sum(at)
        else:
            args = index, at, 0
            index = select(aten.select.int, args, {}) if isinstance(index, Placed) else index.select(at, 0)
    return index


def scatter(x: Any, dim: int, index: Any, source: Any, how: str, include_self: bool = True) -> Any:
    """A tensor into which rows of another are put: `sum`, `mean`, `prod`, `amax`, `amin`, or `set`.

    Args:
        x: What is there before.
        dim: The dimension along which the index counts.
        index: Where each goes, [rows] or in the shape of `source`.
        source: What goes there, or a number.
        how: How values at one place are combined.
        include_self: Whether the values of `x` take part.
    """
    dim %= max(1, x.dim())
    if not isinstance(source, Tensor):
        source = torch.as_tensor(source, dtype=x.dtype, device=x.device)
    if how == "mean":
        ones = torch.ones_like(source) if source.dim() else torch.ones(index.shape, dtype=x.dtype, device=x.device)
        total = scatter(x, dim, index, source, "sum", include_self)
        start = torch.ones_like(x) if include_self else torch.zeros_like(x)
        count = scatter(start, dim, index, ones, "sum").clamp(min=1)
        return total / count if x.dtype.is_floating_point else torch.div(total, count, rounding_mode="floor")
    if how in ("amax", "amin", "prod") and x.dtype is source.dtype is torch.bool:  # which no exchange combines
        return scatter(x.to(torch.uint8), dim, index, source.to(torch.uint8), how, include_self).to(torch.bool)
    if not include_self and not (how == "sum" and isinstance(x, Placed) and x.fresh == 0):
        one = torch.ones((), dtype=torch.int32, device=x.device)
        touched = scatter(torch.zeros_like(x, dtype=torch.int32), dim, index, one, "sum") > 0
        return torch.where(touched, scatter(torch.full_like(x, _neutral(x.dtype, how)), dim, index, source, how), x)
    out = _scatter(x, dim, index, source, how)
    zeros = how in ("amax", "amin") and out.is_floating_point() and isinstance(out, Placed) and out.ranks.same_bits
    return out + 0.0 if zeros else out  # of 0 and -0 either may be found


def _scatter(x: Any, dim: int, index: Any, source: Any, how: str) -> Any:
    full = index.dim() == x.dim() and x.dim() > 1
    if not full and is_rows(index) and index.dim() == 1:  # most calls
        return _rows_at(x, dim, index, source, how)
    narrow = one_dimensional(index, dim) if full else index
    if full and narrow.dim() == 1:
        sizes = [x.size(at) if at == dim else index.size(at) for at in range(x.dim())]
        if [x.size(at) for at in range(x.dim())] != sizes or (source.dim() and source.shape != index.shape):
            narrow = index  # a part of the features only
    rows_of = index if is_rows(index) else source if is_rows(source) else None
    if rows_of is not None and rows_of.place.dim == (0 if rows_of is index and index.dim() == 1 else dim):
        return _rows_at(x, dim, narrow, source, how)
    return _along_features(x, dim, narrow, source, how)


def _put(out: Tensor, dim: int, rows: Tensor, what: Tensor, how: str) -> None:
    """Rows into a plain tensor, in place."""
    rows = rows.to(torch.int64)
    if rows.dim() == 1:
        shape = [*out.shape[:dim], len(rows), *out.shape[dim + 1 :]]
        what = what.expand(shape)
        if how == "set":
            out.index_copy_(dim, rows, what)
            return
        rows = rows.view([-1 if at == dim else 1 for at in range(out.dim())]).expand(shape)
    elif what.dim() == 0:
        what = what.expand(rows.shape)
    if how == "sum":
        out.scatter_add_(dim, rows, what)
    elif how == "set":
        out.scatter_(dim, rows, what)
    else:
        out.scatter_reduce_(dim, rows, what, how)


def _neutral(dtype: torch.dtype, how: str) -> Any:
    return {"sum": 0, "prod": 1}.get(how) if how in ("sum", "prod") else lowest(dtype, how == "amax")


_COMBINE: dict[str, Any] = {"sum": torch.add, "prod": torch.mul, "amax": torch.maximum, "amin": torch.minimum}


def _rows_at(x: Any, dim: int, index: Any, source: Any, how: str) -> Any:
    """Rows of an axis into rows of another, or into what every rank holds, such as sums at graphs. *Collective*."""
    axis: Axis = (index if is_rows(index) else source).place.axis
    ranks, at = axis.ranks, 0 if index.dim() == 1 else dim
    names = index.names if is_rows(index) and isinstance(index.names, Names) else None
    index = settle(index) if is_rows(index) else Placed(local_rows(index, axis, at), axis.rows(at))
    if isinstance(ranks, OneBlock) and not ranks.in_backward:
        raise NotExact("in_blocks applies a module to each edge by itself: sum at nodes outside of it, over all edges")
    what = local_rows(source, axis, dim) if source.dim() else plain(source, ranks)
    if what.dtype != x.dtype:
        raise RuntimeError(f"scatter(): Expected self.dtype to be equal to src.dtype, got {x.dtype} and {what.dtype}")
    fresh = isinstance(x, Placed) and x.fresh is not None and x.fresh == 0
    x, target = _target(x, dim, axis, names)
    local, rows, halo, place = x.local, index.local, None, x.place
    if target is None:
        bad = bool(rows.numel()) and (int(rows.min()) < 0 or int(rows.max()) >= x.size(dim))
        if ranks.largest(int(bad)):
            raise IndexError(f"index out of range: rows are put at {x.size(dim)} places, and an index names another.")
    else:
        reach = reach_of(index, target)
        rows, halo = reach.rows.expand(rows.shape), reach.halo
    in_order = names is not None and _in_order(names, target)
    if ranks.same_bits and how in ("sum", "prod") and x.dtype.is_floating_point and not in_order:
        if how == "prod":
            raise NotExact(f"a product of rows of {axis}, with the same bits asked for: sum logarithms")
        home = _integer_sums(what, dim, rows, axis, x.size(dim) if target is None else target, halo)
    elif target is not None and halo is None:
        out = local.clone(memory_format=torch.contiguous_format)
        _put(out, dim, rows, what, how)
        return Placed(out, place)
    elif how == "set":
        return _set(x, dim, index, what, axis)
    else:
        shape = list(local.shape)
        shape[dim] += 0 if halo is None else halo.plan.num_ghosts
        shares = local.new_full(shape, _neutral(local.dtype, how))
        _put(shares, dim, rows, what, how)
        if how == "sum" and target is None:
            total = share(shares, ranks)
            return total if fresh else x + total
        if how == "sum" and fresh and halo is target.halo and x.dtype.is_floating_point:
            return Placed(shares, target.rows(dim, True))
        if target is not None:
            home = brought_home(shares, target, dim, halo, how)
        elif how == "prod":
            home = torch.stack(ranks.gathered(shares)).prod(0, dtype=shares.dtype)
        else:
            home = ranks.extreme(shares, how == "amax")
    return Placed(home if how == "sum" and fresh else _COMBINE[how](local, home), place)


def _target(x: Any, dim: int, axis: Axis, names: Names | None) -> tuple[Placed, Any]:
    """The target as rows along the dimension, with their axis; None if it has no rows."""
    if is_rows(x) and x.place.dim != dim:
        if x.fresh is None and any(other.total == x.size(dim) for other in axis.family):
            raise NotExact(f"{axis.rows(dim)} put at rows of {x.place}: a table of all rows against all rows")
        x = same(whole_local(x), axis.ranks)  # it has the length of other rows by chance
    if not is_rows(x):
        fitting = [other for other in axis.family if other.total == x.size(dim) > 1]
        target = names.axis if names is not None and names.axis.total == x.size(dim) else [*fitting, None][0]
        if target is None:
            return same(plain(x, axis.ranks), axis.ranks), None
        x = as_rows(x, target, dim)
    return settle(x), x.place.axis


def _in_order(names: Names, target: Any) -> bool:
    """Whether each rank has all values for its rows, in the order of all rows: then a sum of floats has one order.

    It must not depend on the number of ranks, so it is decided before any communication.
    """
    return names.axis is target and names.known == "owned"


def _integer_sums(what: Tensor, dim: int, rows: Tensor, axis: Axis, target: Axis | int, halo: Any) -> Tensor:
    """Sums at rows of an axis, or at places that every rank holds, the same bits on any number of ranks. *Collective*.

    Args:
        what: Rows of an axis, or a number.
        dim: Their dimension.
        rows: The place of each row, [rows], or of each number.
        axis: The rows.
        target: The axis of the sums; a number of places that every rank holds.
        halo: The exchange that brings sums to their owners; None if all are there.
    """
    ranks: GraphRanks = axis.ranks
    owned = target.length if isinstance(target, Axis) else target
    length = owned + (0 if halo is None else halo.plan.num_ghosts)
    one_each = rows.dim() > 1  # a place for each number: they become rows of one number
    if one_each or not what.dim():
        what = what.expand(rows.shape)
    columns = what.movedim(dim, 0)
    others = columns.shape[1:]
    width = others.numel()
    flat, at, inner = columns.reshape(len(columns), width), rows, 1
    if one_each:
        number = torch.arange(width, device=rows.device)
        at = (rows.movedim(dim, 0).reshape(len(columns), width) * width + number).view(-1)
        flat, inner = flat.reshape(-1, 1), width

    def home(sums: Tensor) -> Tensor:
        if not isinstance(target, Axis):
            return ranks.added(sums, any_order=True)
        each: Tensor = brought_home(sums.view(length, inner * sums.size(1)), target, 0, halo, any_order=True)
        return each.reshape(owned * inner, sums.size(1))

    sums: Tensor = exact.added_at(flat, at, length * inner, ranks, axis.total * inner, home).view(owned, *others)
    return sums.movedim(0, dim)


def _set(x: Placed, dim: int, index: Placed, what: Tensor, axis: Axis) -> Any:
    """Rows set in a table that other ranks hold as well; where several go to one place, the last one stays.

    *Collective*. Other ranks add zeros, as integers, which keeps all bits.
    """
    if axis.total == 0:
        return x.clone()
    one, at = index.dim() == 1, 0 if index.dim() == 1 else dim
    along = [-1 if number == dim else 1 for number in range(x.dim())]
    ids = Placed(axis.ids if one else axis.ids.view(along).expand(index.local.shape), axis.rows(at))
    none = x.local.new_full([x.local.size(dim)] if one else x.local.shape, -1, dtype=torch.int64)
    last: Any = scatter(Placed(none, x.place.axis.rows(at) if is_rows(x) else x.place), at, index, ids, "amax")
    is_last = (select_rows(last, 0, index, False) if one else last.gather(dim, index)) == ids
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(what.element_size(), torch.uint8)
    integers = integers if what.is_floating_point() or what.dtype is torch.bool else what.dtype
    numbers: Any = Placed(what.expand([*x.local.shape[:dim], axis.length, *x.local.shape[dim + 1 :]] if one else
                                 index.local.shape).view(integers), axis.rows(dim))  # fmt: skip
    numbers = torch.where(is_last.view(along) if one else is_last, numbers, 0)
    zeros: Any = torch.zeros_like(x, dtype=integers)
    chosen = settle(scatter(zeros, dim, index, numbers, "sum"))
    chosen = Placed(chosen.local.view(x.dtype), chosen.place)
    return torch.where((last >= 0).view(along) if one else last >= 0, chosen, x)


def _along_features(x: Any, dim: int, index: Any, source: Any, how: str) -> Any:
    """Along a dimension that is not that of the rows; or at rows by numbers that every rank has."""
    ranks = next(each for each in (x, index, source) if isinstance(each, Placed)).ranks
    if is_rows(x) and x.place.dim == dim and not is_rows(index) and not is_rows(source):
        ids, source = plain(index, ranks), plain(source, ranks)
        axis = settle(x).place.axis
        check_numbers(ids, axis)
        rows = axis.table[ids] if ranks.size > 1 else ids
        # Each rank takes the values for its rows; those for other ranks' rows go to one row behind, which is cut off.
        rows = torch.where((rows >= 0) & (rows < axis.length), rows, axis.length)
        out = torch.cat([x.local, x.local.new_zeros([1 if at == dim else n for at, n in enumerate(x.shape)])], dim)
        _put(out, dim, rows, source, how)
        return Placed(out.narrow(dim, 0, axis.length), x.place)
    if not any(map(is_rows, (x, index, source))):
        out = plain(x, ranks).clone(memory_format=torch.contiguous_format)
        _put(out, dim, plain(index, ranks), plain(source, ranks), how)
        return same(out, ranks)
    rows_of = next(t for t in (index, source, x) if is_rows(t) and (t is x or t.dim() == x.dim()))
    axis, at = rows_of.place.axis, rows_of.place.dim
    if at == dim:
        raise NotExact(f"rows of {axis} put at single places of a tensor that has rows along another dimension")
    if source.dim() and index.dim() == x.dim() and source.size(at) > index.size(at):
        source = aten.slice(source, at, 0, index.size(at))
    if index.dim() == x.dim() and index.size(at) != x.size(at):
        part = aten.slice(x, at, 0, index.size(at))
        return aten.slice_scatter(x, scatter(part, dim, index, source, how), at, 0, index.size(at))
    out = local_rows(x, axis, at).clone(memory_format=torch.contiguous_format)
    rows = local_rows(index, axis, at) if index.dim() == x.dim() else plain(index, ranks)
    what = local_rows(source, axis, at) if source.dim() else plain(source, ranks)
    if what.dim() and rows.dim() > 1 and what.shape != rows.shape:
        what = what[tuple(slice(0, size) for size in rows.shape)]
    _put(out, dim, rows, what, how)
    return Placed(out, axis.rows(at))


@rule(aten.index_add, aten.scatter_add)
def _adding(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim, index, source = args[:4]
    if not kwargs and (made := _added_to_zeros(x, dim, index, source)):
        return Placed(*made)
    if kwargs.get("alpha", 1) != 1:
        source = (source * kwargs["alpha"]).to(source.dtype)
    return scatter(x, dim, index, source, "sum")


@rule(aten.scatter_add_.default, aten.index_add_.default)
def _adding_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """At once into new zeros; else as all calls in place."""
    x, dim, index, source = args[:4]
    alone = isinstance(x, Placed) and x._memory is None and x._base is None and not kwargs
    if alone and (made := _added_to_zeros(x, dim, index, source)):
        (x.local, x.place), x.fresh = made, None
        return x
    return _WRITES[func](func, args, kwargs)


def _added_to_zeros(x: Any, dim: int, index: Any, source: Any) -> tuple[Tensor, Rows] | None:
    """The fast path: rows added up at rows, into new zeros, as most sums at nodes do; None for all other cases."""
    if not (is_rows(x) and x.fresh == 0 and is_rows(index) and is_rows(source) and x.dtype is source.dtype):
        return None
    axis, target, dims = index.place.axis, x.place.axis, index.dim()
    at_rows = dim == 0 == x.place.dim == index.place.dim == source.place.dim and source.place.axis is axis
    alike = (dims == 1 or dims == x.dim()) and x.shape[1:] == source.shape[1:] and index.shape == source.shape[:dims]
    if not (at_rows and alike and type(axis.ranks) is GraphRanks):
        return None
    if axis.ranks.same_bits and x.dtype.is_floating_point:
        names = index.names
        if not isinstance(names, Names) or not _in_order(names, target):
            return None
    reach, length = reach_of(index, target), target.length
    if reach.halo is not None:
        if reach.halo is not target.halo or not x.dtype.is_floating_point:
            return None
        length += target.num_ghosts
    what, rows = settle(source).local, reach.rows
    rows = rows if rows.dim() == x.dim() else rows.view(-1, *(1,) * (x.dim() - 1))
    added = what.new_zeros((length, *what.shape[1:])).scatter_add_(0, rows.expand_as(what), what)
    return added, target.rows(0, reach.halo is not None)


_WRITES = {func: writing(func) for func in (aten.scatter_add_.default, aten.index_add_.default)}


@rule(aten.scatter, aten.index_copy, aten.index_fill, aten.scatter_reduce, aten.index_reduce)
def _combining(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim, index, source, *more = bound(func, args, kwargs)
    how, *more = more or ["set"]
    return scatter(x, dim, index, source, {"add": "sum", "multiply": "prod"}.get(how, how), *more)


@rule_of_rows(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(func: Any, args: Any, kwargs: Any) -> Any:
    """At indices of one dimension, or of several side by side: then by one index into all of them."""
    values, shape = args[2], args[0].shape
    accumulate = bool(argument(func, args, kwargs, "accumulate"))
    flat: Any = None
    x, indices = expand_masks(args[0], list(args[1]))
    given = [(at, one) for at, one in enumerate(indices) if one is not None]
    first, behind = given[0][0], given[0][0] + len(given)
    if given[-1][0] >= behind:
        raise NotExact("values put at indices of dimensions that do not lie side by side; permute them first")
    for at, one in given:
        if one.dtype in (torch.bool, torch.uint8):  # then it is the only one
            mask, rest = one if one.dtype is torch.bool else one != 0, x.dim() - at
            if is_rows(x) and x.place.dim == at:
                mask = as_rows(mask, x.place.axis, 0)
            if not accumulate and not is_rows(values) and (values.dim() < rest or values.size(-rest) == 1):
                out = torch.where(mask.view([-1] + [1] * (rest - 1)), values.to(x.dtype), x)  # the same for each row
                return out.reshape(shape)
            one = mask.nonzero().squeeze(1)
        known = isinstance(one, Placed) and isinstance(one.names, Names) and one.names.known
        one = one if known else wrapped(one, x.size(at))
        flat = one if flat is None else flat * x.size(at) + one
    values = values.expand([*x.shape[:first], *flat.shape, *x.shape[behind:]])
    if flat.dim() != 1:
        values, flat = values.reshape([*x.shape[:first], flat.numel(), *x.shape[behind:]]), flat.reshape(-1)
    x = x if len(given) == 1 else x.reshape([*x.shape[:first], math.prod(x.shape[first:behind]), *x.shape[behind:]])
    return scatter(x, first, flat, values.to(x.dtype), "sum" if accumulate else "set").reshape(shape)


@rule(aten._index_put_impl_.default)
def _index_put_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    return written(args[0], aten.index_put(*args[:4]), args)


@rule(aten.embedding_renorm_)
def embedding_renorm_(func: Any, args: Any, kwargs: Any) -> Any:
    """Renormalise the rows of a table that any rank reads, on all ranks."""
    table, ids, *how = args
    if isinstance(table, Placed):
        raise NotExact(f"{name_of(func)} of {table.place}: give the table no max_norm")
    func(table, whole_local(ids).contiguous(), *how)
    return table


@rule(aten.masked_scatter)
def _masked_scatter(func: Any, args: Any, kwargs: Any) -> Any:
    x, mask, source = args
    mask = mask.expand(x.shape)
    count = int(mask.sum())
    return aten.index_put(x, [mask], source.reshape(-1)[:count])
