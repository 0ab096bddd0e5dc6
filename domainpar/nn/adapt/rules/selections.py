"""Calls that read rows by an index or a mask: nodes at the ends of edges, edges of a kind."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from domainpar.nn.adapt.across import summed
from domainpar.nn.adapt.calls import Call, one_axis
from domainpar.nn.adapt.rows import (
    Axis,
    NotExact,
    RowCount,
    RowIndex,
    Rows,
    check_enough_rows,
    mark,
    nothing_like,
    version_of,
)
from domainpar.nn.adapt.rules.shapes import piece_of
from domainpar.nn.adapt.watch import Watch, rule


@rule("index_select", takes="input dim index", knows_numbers=True)
def index_select(watch: Watch, call: Call) -> Any:
    """Rows by number, `index_select(tensor, dim, index)`."""
    tensor, dim, index = call.get("input"), call.get("dim"), call.get("index")
    return read_rows(watch, tensor, dim % tensor.dim(), index)


def read_rows(watch: Watch, tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """`tensor.index_select(dim, index)`: ghosts are brought up to date first, if the index may name one."""
    rows, by = watch.rows(tensor), watch.rows(index)
    if by is None:  # the same index on every rank: of features, or of places in the whole graph
        if rows is not None and dim == rows.dim:
            return rows_at(watch, tensor, index)
        names = None if rows is None else rows.names
        if names is not None and len(names) > 1:
            names = tuple(names[at] for at in index.tolist())
        return mark(tensor.index_select(dim, index), None if rows is None else rows.but(names=names))
    if rows is None:  # row numbers are those of the whole graph here, as its table is
        check_enough_rows(tensor, dim, by)
        return mark(tensor.index_select(dim, watch.as_values(index)), Rows(by.axis, dim, by.fresh))
    if rows.dim != dim:
        raise NotExact(f"features of {rows.axis.name} are picked by an index that differs from row to row.")
    if by.names is None or by.named.of is not rows.axis:
        raise NotExact(
            f"{rows.axis.name} are picked by numbers that were computed, or that number something else; only "
            "part.edge_index, part.src, part.dst, self-loops, and the results of nonzero are known to number them."
        )
    if rows.axis is watch.part.node_axis:
        watch.edges_read_nodes()
    if not by.named.only_owned:  # a ghost's row number means nothing to its owner, its value does
        tensor = watch.with_ghosts(watch.as_values(tensor))
    return mark(tensor.index_select(dim, index), Rows(by.axis, dim, by.fresh, names=watch.known(tensor).names))


def rows_at(watch: Watch, tensor: Tensor, index: Tensor) -> Tensor:
    """Rows by their places in the whole graph, which every rank asks for alike.

    Each comes from the rank that counts it; the result is the same on every rank.
    """
    tensor = watch.as_values(tensor)
    rows = watch.known(tensor)
    total, dim = rows.axis.total, rows.dim
    if index.numel() and not -total <= int(index.min()) <= int(index.max()) < total:
        raise IndexError(f"{index.tolist()} are picked of {total} {rows.axis.name}.")
    mine = watch.counted(tensor)
    places = rows.axis.places if rows.axis.counted is None else rows.axis.places[rows.axis.counted]
    order, wanted = places.argsort(), index % max(total, 1)
    if places.numel():
        nearest = order[torch.searchsorted(places[order], wanted).clamp(max=len(places) - 1)]
        here = (places[nearest] == wanted).view([-1 if at == dim else 1 for at in range(tensor.dim())])
        picked = mine.index_select(dim, nearest)
        # `where`, not a product: what lies at the nearest place may be infinite.
        picked = torch.where(here, picked, nothing_like(picked))
    else:  # made of these rows, as autograd knows: every rank takes part in the sum's backward
        shape = [len(wanted) if at == dim else size for at, size in enumerate(mine.shape)]
        picked = (-mine.sum(dim, keepdim=True)).expand(shape).to(tensor.dtype)
    return mark(summed(picked, watch.part).to(tensor.dtype), None)


def select_by_mask(watch: Watch, tensor: Tensor, dim: int, mask: Tensor) -> Tensor:
    """Rows where a mask is set, which are rows of a new kind; the same kind whichever tensor is masked by it."""
    rows = watch.rows(tensor)
    mask = watch.owned(mask) if (of := watch.rows(mask)) is not None else mask
    if rows is None or of is None or rows.dim != dim:
        raise NotExact(
            "a mask of rows is laid on something that is not rows; mark the tensor with part.nodes or part.edges."
        )
    one_axis([rows.axis, of.axis], "masking")
    tensor = watch.owned(tensor)
    names = rows.names
    if names is not None and watch.known(mask).equal_ends:  # loops: they begin where they end, at a node that is owned
        only_owned = watch.alone or watch.part.plan.edge_policy == "incoming"
        names = tuple(RowIndex(one.of, complete=True, only_owned=only_owned) for one in names)
    return mark(tensor[(slice(None),) * dim + (mask,)], Rows(selection_of(watch, mask), dim, names=names))


def selection_of(watch: Watch, mask: Tensor) -> Axis:
    """The axis of the rows where a mask of owned rows is set: one for each mask."""
    of = watch.known(mask)
    number = watch.numbering.of(mask)
    if number is not None:  # masks that were made alike select the same rows
        if number not in watch.selected:
            watch.selected[number] = of.axis.selected(mask)
            watch.selected[number].number = number
        return watch.selected[number]
    version = version_of(mask)
    if version not in of.selections:
        of.selections.clear()
        of.selections[version] = of.axis.selected(mask.detach())  # the mask itself would keep its own axis, and that it
    return of.selections[version]


@rule("getitem", knows_numbers=True)
def getitem(watch: Watch, call: Call) -> Any:
    """Square brackets: each dimension by a slice, a number, a mask or an index."""
    tensor, brackets = call.args[0], call.args[1]
    if isinstance(brackets, list) and any(isinstance(item, _MAKE_A_TUPLE) for item in brackets):
        raise NotExact("rows are picked by a list that torch takes for a tuple, and later releases will not.")
    items = _one_for_each_dimension(tensor, brackets if isinstance(brackets, tuple) else (brackets,))
    advanced = [at for at, item in enumerate(items) if isinstance(item, (Tensor, list))]
    rows = watch.rows(tensor)
    if not advanced:
        return _basic(watch, tensor, items)
    if len(advanced) > 1:
        return _several(watch, tensor, items, len(advanced))
    at = advanced[0]
    index = items[at]
    if isinstance(index, list):
        index = mark(torch.tensor(index, device=tensor.device), None)
    is_mask = index.dtype is torch.bool or index.dtype is torch.uint8
    if is_mask and index.dim() == 0:  # adds a dimension, of length 1 or 0
        raise NotExact("rows are picked by a single truth value; use torch.where, or a Python if.")
    if is_mask and index.dim() == 1 and watch.rows(index) is None:
        index, is_mask = mark(index.nonzero().view(-1), None), False
    if index.dim() != 1 and (rows is None or is_mask):
        return _table(watch, tensor, items, index)
    before, behind = items[:at], items[at + 1 :]
    if index.dim() == 0 and watch.rows(index) is None:
        return _basic(watch, tensor, [*before, int(index), *behind])
    dim = sum(item is not None for item in before)
    picked = select_by_mask(watch, tensor, dim, index) if is_mask else _read_any_shape(watch, tensor, dim, index)
    # The index took one dimension and left as many as it has itself.
    others = [*before, *[slice(None)] * index.dim(), *behind]
    return picked if _takes_all(others) else _basic(watch, picked, others)


_MAKE_A_TUPLE = (list, tuple, slice, Tensor, type(None), type(Ellipsis))


def _one_for_each_dimension(tensor: Tensor, items: tuple[Any, ...]) -> list[Any]:
    """Items without dots: an item for each dimension of the tensor, and None for each new one."""
    plain = [_plain(item) for item in items]
    dots = next((at for at, item in enumerate(plain) if item is Ellipsis), len(plain))
    taken = sum(item is not None and item is not Ellipsis for item in plain)
    return [*plain[:dots], *[slice(None)] * (tensor.dim() - taken), *plain[dots + 1 :]]


def _plain(item: Any) -> Any:
    """An item of square brackets as torch's own kinds.

    Raises:
        NotExact: If it is of another kind, which might pick rows in a way of its own.
    """
    if item is None or item is Ellipsis or isinstance(item, (Tensor, list, slice)):
        return item
    if isinstance(item, np.ndarray) and item.ndim:
        return mark(torch.from_numpy(item), None)
    try:
        if not isinstance(item, bool):
            return operator.index(item)
    except TypeError:
        pass
    raise NotExact(f"rows are picked by a {type(item).__name__}; use a tensor or a mask.")


def _read_any_shape(watch: Watch, tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    if index.dim() == 1:
        return read_rows(watch, tensor, dim, index)
    if tensor.dim() > 1:  # row numbers in a shape that cannot say of which rows each is: values like any other
        tensor = watch.as_values(tensor)
    by = watch.rows(index)
    if by is None or index.dim() != 2:
        raise NotExact(
            f"rows are picked by an index of {index.dim()} dimensions; pick by each column, or by index.view(-1)."
        )
    columns = index.unbind(1 - by.dim)
    if not columns:
        raise NotExact("rows are picked by an index without columns.")
    each = [
        read_rows(watch, tensor, dim, mark(column, by.but(dim=0, names=by.names_at(1 - by.dim, at))))
        for at, column in enumerate(columns)
    ]
    rows = watch.known(each[0])
    names = rows.names and rows.names * len(each)
    return mark(torch.stack(each, dim + 1 - by.dim), rows.but(dim=dim + by.dim, names=names))


def _table(watch: Watch, tensor: Tensor, items: list[Any], index: Tensor) -> Tensor:
    """A table that is the same on every rank, read by numbers that differ from row to row."""
    by = watch.rows(index)
    if watch.rows(tensor) is not None or by is None or not _takes_all(items[1:]):
        raise NotExact("rows are picked by a mask or index of several dimensions.")
    check_enough_rows(tensor, 0, by)
    return mark(tensor[watch.as_values(index)], by.but(names=None))


def _takes_all(items: Sequence[Any]) -> bool:
    return all(isinstance(item, slice) and item == slice(None) for item in items)


def _several(watch: Watch, tensor: Tensor, items: list[Any], count: int) -> Tensor:
    """Two or more indices: `x[arange(n), column_of_each_row]`, `table[type, class]`."""
    indices, rows = items[:count], watch.rows(tensor)
    plain = all(isinstance(item, Tensor) and item.dim() == 1 for item in indices) and _takes_all(items[count:])
    rows_of_indices = [by for item in indices if isinstance(item, Tensor) and (by := watch.rows(item)) is not None]
    if not plain or len(rows_of_indices) < count:
        raise NotExact("rows are picked by several indices of which some are the same on every rank.")
    axis, first = one_axis((by.axis for by in rows_of_indices), "indexing"), rows_of_indices[0]
    if rows is not None:
        if rows.dim != 0 or first.names is None or first.named.of is not rows.axis or not first.named.only_owned:
            raise NotExact("rows are picked by several indices of which the first does not number owned rows in order.")
        tensor = watch.owned(tensor)
    of_tables = int(rows is not None)  # the first of these that is for a dimension that every rank has whole
    for place in range(of_tables, count):
        check_enough_rows(tensor, place, rows_of_indices[place])
        indices[place] = watch.as_values(indices[place])
    return mark(tensor[tuple(map(watch.owned, indices))], Rows(axis, 0, watch.starts_fresh(axis)))


def _basic(watch: Watch, tensor: Tensor, items: Sequence[Any]) -> Tensor:
    """Slices, numbers and None: the rows stay whole, or are one of the pieces they were joined from.

    Args:
        items: One for each dimension of the tensor, and None for each new one.
    """
    rows = watch.rows(tensor)
    if rows is None:
        return mark(tensor[tuple(items)], None)
    whole, names = list(items), rows.names
    place = dim = row_dim = 0  # dimensions of the tensor, and of the result, before this item
    cut: Any = None
    for at, item in enumerate(items):
        if item is not None and place == rows.dim:
            row_dim, cut, whole[at] = dim, item, slice(None)
        elif item is not None and names is not None and len(names) > 1:
            names = names[item] if isinstance(item, slice) else (names[item],)
        place += item is not None
        dim += not isinstance(item, int)
    result = tensor[tuple(whole)]
    if names is not None and len(names) > 1 and result.dim() != 2:
        # Row numbers in a shape that cannot say of which rows each is: values like any other.
        result, names = watch.as_values(tensor)[tuple(whole)], None
    mark(result, rows.but(dim=row_dim, names=names))
    return result if cut == slice(None) else _cut(watch, result, cut)


def _cut(watch: Watch, tensor: Tensor, item: Any) -> Tensor:
    """`x[:n]` and `x[n:]` where n is a number of rows: all rows, or one of the pieces that rows were joined from.

    Any other number or slice picks rows by their place in the whole graph.
    """
    rows = watch.known(tensor)
    pieces = rows.axis.pieces
    if not isinstance(item, slice):
        result = rows_at(watch, tensor, torch.tensor([item], device=tensor.device)).squeeze(rows.dim)
        watch.versions.stands_in(result, tensor)
        return mark(result, None)
    start, stop = (item.start, item.stop) if item.step in (None, 1) else (0, 0)
    if start in (None, 0) and type(stop) is RowCount:
        if stop.axis is rows.axis:
            return tensor
        if pieces and stop.axis is pieces[0]:
            return piece_of(watch, tensor, rows, 0)
    if stop is None and type(start) is RowCount and len(pieces) == 2 and start.axis is pieces[0]:
        return piece_of(watch, tensor, rows, 1)
    result = select_by_mask(watch, tensor, rows.dim, _mask_of_places(watch, rows.axis, item))
    watch.versions.stands_in(result, tensor)
    return result


def _mask_of_places(watch: Watch, axis: Axis, item: slice) -> Tensor:
    """Which rows a slice of the whole graph picks; one mask for equal slices, so that they pick the same rows."""
    start, stop, step = item.indices(axis.total)
    key = (id(axis), start, stop, step)
    if key not in watch.slices:
        places = axis.places
        picked = (places >= start) & (places < stop) & ((places - start) % step == 0)
        # The axis is kept beside its mask, so that its id is not given to another one.
        watch.slices[key] = (axis, mark(picked, Rows(axis, 0, watch.starts_fresh(axis))))
    return watch.slices[key][1]


@rule("nonzero", takes="input", knows_numbers=True)
def nonzero(watch: Watch, call: Call) -> Any:
    """The numbers of the rows where a mask is set, [n, 1]."""
    mask = watch.owned(call.get("input"))
    rows = watch.known(mask)
    if mask.dim() != 1:
        raise NotExact(f"torch.nonzero of a tensor of {rows.axis.name} and features; take it of one column.")
    if mask.dtype is not torch.bool:
        raise NotExact("torch.nonzero of numbers; compare them first, so that it is a mask.")
    selected = Rows(selection_of(watch, mask), 0, names=(RowIndex(rows.axis, complete=True, only_owned=True),))
    numbers = mask.nonzero()
    return (mark(numbers.view(-1), selected),) if call.get("as_tuple", False) else mark(numbers, selected)


@rule("gather", takes="input dim index", knows_numbers=True)
@rule("take_along_dim", takes="input index|indices dim", knows_numbers=True)
def gather(watch: Watch, call: Call) -> Any:
    """Features of each row by numbers of its own; or an entry of another row for each entry of the index."""
    tensor, dim, index = call.get("input"), call.get("dim"), call.get("index")
    rows, by = watch.rows(tensor), watch.rows(index)
    if rows and by and dim is not None and rows.dim == by.dim:
        along_rows = dim % tensor.dim() == rows.dim
        if not along_rows and rows.axis is by.axis:
            call = call.mapped(watch.as_values)
            return mark(watch.common(call)(), Rows(rows.axis, rows.dim, rows.fresh and by.fresh))
        if along_rows and by.names:
            if by.named.of is not rows.axis:
                raise NotExact(f"{rows.axis.name} are gathered by numbers that number something else.")
            tensor = watch.as_values(tensor)
            tensor = tensor if by.named.only_owned else watch.with_ghosts(tensor)
            return mark(tensor.gather(rows.dim, index), Rows(by.axis, by.dim, by.fresh))
    raise NotExact(f"torch.{call.name} picks rows; use index_select.")
