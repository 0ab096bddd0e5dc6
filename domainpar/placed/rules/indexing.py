"""Rows read by numbers or masks: owned rows and ghosts where an edge reads them, else rows of any rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from domainpar.placed.axes import Axis, Names, Reach, Rows
from domainpar.placed.dispatch import aten, name_of, rule, rule_of_rows
from domainpar.placed.moves import gathered_at, local_rows, plain, table_of
from domainpar.placed.ranks import NotExact
from domainpar.placed.tensor import Placed, each_once, is_rows, same, settle


def reach_of(index: Placed, axis: Axis, wrap: bool = False) -> Reach:
    """Where the rows that an index names lie on this rank; kept with the index. *Collective* the first time.

    Args:
        index: Numbers of rows of the whole graph.
        axis: Whose rows.
        wrap: Whether negative numbers count from the end.
    """
    settle(index)
    memory = index.memory
    kept = index.cell.reaches.get(axis)
    if kept is None or kept[0] != memory.generation:
        numbers = index.local
        if index.dtype is not torch.int64:
            numbers = numbers.to(torch.int64)
        small = each_once(numbers)
        names = index.names
        known = names.known if isinstance(names, Names) and names.axis is axis else ""
        if wrap and not known:
            small = torch.where(small < 0, small + axis.total, small)
        kept = memory.generation, axis.reach(small, known)
        index.cell.reaches[axis] = kept
    return kept[1]


def taken(x: Placed, dim: int, reach: Reach, place: Rows) -> Placed:
    """Rows of a tensor at places, as rows of an axis. *Collective* if other ranks have them."""
    names = None if isinstance(x.names, tuple) and dim == 0 else moved_names(x.names, reach.halo is None, x.ranks)
    return Placed(table_of(settle(x), reach.halo).index_select(dim, reach.rows.expand(place.axis.length)), place, names)


def moved_names(names: Any, stays: bool, ranks: Any) -> Any:
    """The `names` of values whose rows came from other ranks: they may name rows that this rank does not hold.

    With `same_bits` this must not depend on whether any came.
    """
    if names is None or (stays and not ranks.same_bits):
        return names
    if isinstance(names, tuple):
        return tuple(Names(one.axis, "") for one in names)
    return Names(names.axis, "")


def check_numbers(ids: Tensor, axis: Axis) -> None:
    """Refuse row numbers, the same on every rank, if one of them is out of range."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= axis.total):
        raise IndexError(f"index out of range: there are {axis}, and it has {int(ids.min())} to {int(ids.max())}.")


def numbered(x: Placed, dim: int, ids: Tensor) -> Placed:
    """Rows by their numbers in the whole graph, which every rank knows; each comes from its owner. *Collective*."""
    settle(x)
    place = x.place
    assert type(place) is Rows
    axis, ranks = place.axis, place.ranks
    if ranks.size == 1:
        return same(x.local.index_select(dim, ids), ranks)
    check_numbers(ids, axis)
    rows = axis.table[ids]
    here = ((rows >= 0) & (rows < axis.length)).nonzero().view(-1)
    return same(gathered_at(x.local.index_select(dim, rows[here]), here, len(ids), dim, ranks), ranks)


def wrapped(ids: Tensor, total: int) -> Tensor:
    """Row numbers of which negative ones count from the end."""
    return torch.where(ids < 0, ids + total, ids)


@rule(aten.index_select)
def _index_select(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim, index = args
    dim %= max(1, x.dim())
    if index.dim() == 0:
        index = index.unsqueeze(0)
    return select_rows(x, dim, index, False)


def select_rows(x: Any, dim: int, index: Any, wrap: bool) -> Any:
    """`index_select` of anything by anything; `wrap` as for `reach_of`."""
    if is_rows(index):
        place = settle(index).place
        if is_rows(x) and x.place.dim == dim:
            return taken(x, dim, reach_of(index, x.place.axis, wrap), place.axis.rows(dim))
        if is_rows(x):
            raise NotExact(f"a table of all rows against all rows: {x.place} by an index with {place}")
        ids = index.local
        table = plain(x, place.ranks)
        return Placed(table.index_select(dim, wrapped(ids, x.size(dim)) if wrap else ids), place.axis.rows(dim))
    ranks = (x if isinstance(x, Placed) else index).ranks
    ids = plain(index, ranks)
    ids = wrapped(ids, x.size(dim)) if wrap else ids
    if not is_rows(x):
        return same(plain(x, ranks).index_select(dim, ids), ranks)
    if x.place.dim == dim:
        return numbered(x, dim, ids)
    settle(x)
    names: Any = x.names if isinstance(x.names, Names) else None
    if isinstance(x.names, tuple) and dim == 0:
        names = tuple(x.names[int(i)] for i in ids)
    return Placed(x.local.index_select(dim, ids), x.place, names)


@rule_of_rows(aten.gather)
def _gather(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim, index = args[:3]
    dim %= max(1, x.dim())
    rows = index if is_rows(index) else x
    axis, at, ranks = rows.place.axis, rows.place.dim, rows.ranks
    if is_rows(x) and is_rows(index) and (x.place.dim == dim) != (at == dim):
        raise NotExact(f"{name_of(func)}: a table of all rows against all rows: {x.place} by {index.place}")
    if at == dim and not is_rows(index):  # along rows, by numbers that every rank has
        ids = plain(index, ranks)
        numbers, where = ids.unique(return_inverse=True)
        return same(numbered(x, dim, numbers).local.gather(dim, where), ranks)
    if at == dim and not is_rows(x):
        return Placed(plain(x, ranks).gather(dim, index.local), index.place)
    if at == dim:
        reach = reach_of(index, x.place.axis)
        return Placed(table_of(x, reach.halo).gather(dim, reach.rows.expand(index.local.shape)), index.place)
    if index.size(at) != axis.total:
        return aten.gather(x.narrow(at, 0, index.size(at)), dim, index)
    if x.size(at) != axis.total:
        x = aten.slice(x, at, 0, axis.total)
    return Placed(local_rows(x, axis, at).gather(dim, local_rows(index, axis, at)), axis.rows(at))


@rule_of_rows(aten.embedding)
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    weight, index = args[:2]
    if is_rows(weight):
        return select_rows(weight, 0, index.reshape(-1), False).view([*index.shape, *weight.shape[1:]])
    return Placed(func(plain(weight, index.ranks), index.local), index.place)


def mask_axis(mask: Placed) -> Axis:
    """The axis of the rows that a mask of rows selects. *Collective* the first time for each mask."""
    settle(mask)
    cell = mask.cell
    axis: Axis = mask.place.axis
    return axis.select(mask.local, ("mask", id(cell), mask.memory.generation), cell)


def expand_masks(x: Any, indices: list[Any]) -> tuple[Any, list[Any]]:
    """Masks of one dimension become the numbers where they are true; of several, they and the tensor are flattened."""
    given = [at for at, index in enumerate(indices) if index is not None]
    masks = [at for at in given if indices[at].dtype in (torch.bool, torch.uint8)]
    if len(given) == 1 and masks and indices[given[0]].dim() > 1:
        at, mask = given[0], indices[given[0]]
        width = mask.dim()
        if tuple(x.shape[at : at + width]) != tuple(mask.shape):
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} does not match the shape of the indexed tensor "
                f"{list(x.shape)} at index {at}"
            )
        flat = x.reshape([*x.shape[:at], -1, *x.shape[at + width :]])
        return flat, [*indices[:at], mask.reshape(-1)]
    out: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8) or len(given) == 1:
            out.append(index)
        else:
            out.extend(index.nonzero().unbind(1))
    return x, out


@rule_of_rows(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(func: Any, args: Any, kwargs: Any) -> Any:
    x, indices = expand_masks(args[0], list(args[1]))
    given = [(at, one) for at, one in enumerate(indices) if one is not None]
    if len(given) > 1:
        return _several(func, x, indices, given)
    at, one = given[0]
    if one.dtype in (torch.bool, torch.uint8):
        one = one if one.dtype is torch.bool else one != 0
        if x.size(at) != one.size(0):
            raise IndexError(
                f"The shape of the mask {list(one.shape)} at index 0 does not match the shape of the indexed "
                f"tensor {list(x.shape)} at index {at}"
            )
        if not is_rows(one) and is_rows(x) and x.place.dim == at:
            one = Placed(local_rows(one, x.place.axis, 0), x.place.axis.rows(0))
        if is_rows(one):
            part, axis = mask_axis(one), one.place.axis
            names = None
            if is_rows(x) and not (isinstance(x.names, tuple) and at == 0):
                names = x.names if x.place.axis is axis else moved_names(x.names, False, x.ranks)
            rows = local_rows(x, axis, at).index_select(at, one.local.nonzero().view(-1))
            return Placed(rows, part.rows(at), names)
        one = plain(one, x.ranks).nonzero().view(-1)
    found = select_rows(x, at, one if one.dim() == 1 else one.reshape(-1), True)
    return found if one.dim() == 1 else found.view([*x.shape[:at], *one.shape, *x.shape[at + 1 :]])


def _several(func: Any, x: Any, indices: list[Any], given: list[Any]) -> Any:
    """By indices of several dimensions at once."""
    ranks = next(each for each in (x, *indices) if isinstance(each, Placed)).ranks
    rows = next((one for _, one in given if is_rows(one)), None)
    together = given[-1][0] - given[0][0] < len(given)
    shape = torch.broadcast_shapes(*(tuple(one.shape) for _, one in given))
    first = given[0][0] if together else 0
    if rows is None and any(at == x.place.dim for at, _ in given):  # numbers of rows that every rank has
        at = x.place.dim
        ids = wrapped(plain(indices[at], ranks), x.size(at)).expand(shape).reshape(-1)
        indices[at] = torch.arange(len(ids), device=ids.device).view(shape)
        return aten.index(numbered(x, at, ids), indices)
    if rows is None:
        out = func(x.local, [None if one is None else plain(one, ranks) for one in indices])
        before = x.place.dim - sum(at < x.place.dim for at, _ in given)
        return Placed(out, x.place.axis.rows(before if before < first else before + len(shape)))
    axis, from_end = rows.place.axis, rows.place.dim - rows.dim()
    table, here = None if is_rows(x) else plain(x, ranks), list(indices)
    for at, one in given:
        dim = one.dim() + from_end
        along = dim >= 0 and one.size(dim) == axis.total and (is_rows(one) or axis.total != 1)
        own = here[at] = local_rows(one, axis, dim) if along else plain(one, ranks)
        if is_rows(x) and x.place.dim == at:
            if not along:
                raise NotExact(f"{name_of(func)} of {x.place} by one row beside an index of many")
            reach = reach_of(one if is_rows(one) else Placed(own, axis.rows(dim)), x.place.axis, True)
            table, here[at] = table_of(x, reach.halo), reach.rows.expand(own.shape)
    if table is None:
        raise NotExact(f"{name_of(func)}: a table of all rows against all rows: {x.place} by {rows.place}")
    return Placed(func(table, here), axis.rows(first + len(shape) + from_end))


@rule_of_rows(aten.nonzero)
def _nonzero(func: Any, args: Any, kwargs: Any) -> Any:
    x: Any = args[0]
    if x.dim() == 1:
        mask: Any = x if x.dtype is torch.bool else x != 0
        part, axis = mask_axis(mask), x.place.axis
        return Placed(axis.ids[mask.local].unsqueeze(1), part.rows(0), Names(axis, "owned"))
    return torch.stack(torch.unravel_index(x.reshape(-1).nonzero().squeeze(1), x.shape), 1)


@rule(aten.masked_select)
def _masked_select(func: Any, args: Any, kwargs: Any) -> Any:
    x, mask = torch.broadcast_tensors(args[0], args[1])
    return aten.index(x, [mask])
