"""Calls that change the order or number of dimensions. Rows are never merged with other numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from domainpar.nn.adapt.calls import Call, axis_and_freshness, one_axis, words
from domainpar.nn.adapt.rows import Axis, NotExact, RowCount, RowIndex, Rows, mark
from domainpar.nn.adapt.watch import Watch, rule


def _rows_of_input(watch: Watch, call: Call) -> tuple[Tensor, Rows]:
    tensor = call.get("input")
    rows = watch.rows(tensor)
    if rows is None:
        raise NotExact(f"torch.{call.name} takes a size from rows for a tensor that is the same on every rank.")
    return tensor, rows


def _moved(rows: Rows, result: Tensor, dim: int, keeps_names: bool = False) -> Tensor:
    """Mark a result whose rows lie along another dimension."""
    if rows.names is not None and len(rows.names) > 1 and not keeps_names:
        raise NotExact("row numbers of both ends of edges are reshaped; take edge_index[0] and edge_index[1] first.")
    return mark(result, rows.but(dim=dim))


@rule("view", "reshape", "view_as", "reshape_as", takes="input shape|size|other*", knows_numbers=True)
def view(watch: Watch, call: Call) -> Any:
    """Another shape that leaves the rows apart: the numbers before and behind them stay as many."""
    tensor, rows = _rows_of_input(watch, call)
    wanted = call.get("shape", [])
    if "dtype" in call.kwargs or any(isinstance(size, torch.dtype) for size in wanted):
        raise NotExact("torch.view of another type takes numbers to pieces; use .to(dtype).")
    if any(isinstance(size, Tensor) for size in wanted):
        wanted = _sizes_of(watch, wanted[0])
    if _parts_the_pieces(tensor, rows, wanted):
        # A stack of pieces holds copies where torch makes a view: changes in place of either are refused.
        pieces = [piece_of(watch, tensor, rows, at) for at in range(len(rows.axis.pieces))]
        result = torch.stack(pieces)
        watch.versions.stands_in(result, tensor)
        fresh = watch.known(pieces[0]).fresh
        return mark(result.view(*result.shape[:2], *wanted[2:]), Rows(rows.axis.pieces[0], 1, fresh))
    if (other := _split_or_merged(tensor, rows, wanted)) is not None:
        shape = [other.length, *wanted[1:]]
        tensor = watch.owned(tensor)
        result = tensor.reshape(shape) if call.name.startswith("reshape") else tensor.view(shape)
        return mark(result, Rows(other, 0, watch.starts_fresh(other)))
    dim, shape = _row_dim_and_shape(tensor, rows, wanted)
    result = tensor.reshape(shape) if call.name.startswith("reshape") else tensor.view(shape)
    return _moved(rows, result, dim, keeps_names=dim == rows.dim and result.shape == tensor.shape)


def _parts_the_pieces(tensor: Tensor, rows: Rows, wanted: list[Any]) -> bool:
    """Whether `view(2, -1)` puts rows joined of two equal kinds, both directions of edges say, side by side."""
    pieces = rows.axis.pieces
    if rows.dim != 0 or rows.names is not None or len(wanted) < 2 or len({id(piece) for piece in pieces}) != 1:
        return False
    count, each, *behind = wanted
    of_pieces = each.axis is pieces[0] if type(each) is RowCount else each == -1
    fits = _solved(behind, math.prod(tensor.shape[1:])) is not None
    return type(count) is int and count == len(pieces) and of_pieces and fits


def _split_or_merged(tensor: Tensor, rows: Rows, wanted: list[Any]) -> Axis | None:
    """The axis of a view that splits each row into pieces side by side, or puts such pieces together again.

    None where rows stay what they are, or where something else is wanted. Rows lie along the first dimension, so the
    pieces of a row stay on its rank, side by side and in their order.
    """
    first, *behind = wanted or [None]
    if rows.dim != 0 or rows.names is not None or any(type(size) is RowCount or size == -1 for size in behind):
        return None
    have, want = math.prod(tensor.shape[1:]), math.prod(behind)
    if have == want or not have or not want or not (type(first) is RowCount or first == -1):
        return None
    if have % want == 0:
        other = rows.axis.split(have // want)
    elif rows.axis.each is not None and want == have * rows.axis.each[1]:
        other = rows.axis.each[0]
    else:
        return None
    return other if first == -1 or first.axis is other else None


def _sizes_of(watch: Watch, other: Tensor) -> list[Any]:
    rows = watch.rows(other)
    return [RowCount(rows.axis) if rows and at == rows.dim else size for at, size in enumerate(other.shape)]


def _row_dim_and_shape(tensor: Tensor, rows: Rows, wanted: list[Any]) -> tuple[int, list[int]]:
    """Which of the wanted sizes is that of the rows, and all of them as they are on this rank.

    It is one that says so, or -1; or, where none of the others is, one that is their number in the whole graph (`len`).
    """
    counts = [at for at, size in enumerate(wanted) if type(size) is RowCount]
    if any(wanted[at].axis is not rows.axis for at in counts) or len(counts) > 1:
        raise NotExact(f"rows of {rows.axis.name} are to become rows of something else by a view.")
    before, behind = math.prod(tensor.shape[: rows.dim]), math.prod(tensor.shape[rows.dim + 1 :])
    # Rows are not mixed with others where as many numbers as before stand before and behind each of them.
    for at in counts or _may_be_rows(rows, wanted):
        first, last = _solved(wanted[:at], before), _solved(wanted[at + 1 :], behind)
        if first is not None and last is not None:
            return at, [*first, tensor.size(rows.dim), *last]
    shape = tuple(-1 if type(size) is RowCount else size for size in wanted)
    raise NotExact(
        f"a view of shape {shape} merges rows of {rows.axis.name} with other dimensions; write x.view(x.size(0), ...) "
        "or -1 where the rows are."
    )


def _may_be_rows(rows: Rows, wanted: list[Any]) -> Iterator[int]:
    """Where a size is -1; if the rows are not there, where it is their number, for which ranks may have to be asked."""
    yield from (at for at, size in enumerate(wanted) if size == -1)
    yield from (at for at, size in enumerate(wanted) if size == rows.axis.total)


def _solved(sizes: list[Any], numbers: int) -> list[int] | None:
    """Sizes with -1 filled in for so many numbers; None if they are others."""
    fixed = math.prod(size for size in sizes if size != -1)
    if fixed != numbers and (-1 not in sizes or fixed == 0 or numbers % fixed != 0):
        return None
    return [numbers // max(fixed, 1) if size == -1 else size for size in sizes]


@rule("flatten", "ravel", takes="input start_dim end_dim", knows_numbers=True)
def flatten(watch: Watch, call: Call) -> Any:
    """Features joined; not with rows."""
    tensor, _ = _rows_of_input(watch, call)
    start, stop = call.get("start_dim", 0) % tensor.dim(), call.get("end_dim", -1) % tensor.dim()
    if start > stop:  # torch says what is wrong
        return call()
    sizes = _sizes_of(watch, tensor)
    with watch.in_other_words():
        # A number of rows times 1 is still one; times any other number it is plain, which `view` refuses.
        return tensor.reshape([*sizes[:start], math.prod(sizes[start : stop + 1]), *sizes[stop + 1 :]])


@rule("squeeze", takes="input dim", knows_numbers=True)
def squeeze(watch: Watch, call: Call) -> Any:
    """Dimensions of length 1 less; that of the rows stays, however few one rank has."""
    tensor, rows = _rows_of_input(watch, call)
    dims = call.get("dim")
    asked = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % tensor.dim() for dim in asked}
    if rows.dim in gone and rows.axis.total == 1:
        raise NotExact("torch.squeeze of a graph of one node, where it would take the dimension of the rows away.")
    gone = {dim for dim in gone if dim != rows.dim and tensor.size(dim) == 1}
    if call.in_place:
        result = tensor.squeeze_(tuple(gone)) if gone else tensor
    else:  # a view in any case, as torch makes
        result = tensor.squeeze(tuple(gone)) if gone else tensor.view_as(tensor)
    return _moved(rows, result, rows.dim - sum(dim < rows.dim for dim in gone))


@rule(
    *words("transpose swapaxes swapdims t T mT H mH permute movedim moveaxis adjoint unsqueeze"),
    takes="input",
    knows_numbers=True,
)
def reorder(watch: Watch, call: Call) -> Any:
    """The same numbers with dimensions in another order, or one of length 1 more."""
    tensor, rows = _rows_of_input(watch, call)
    # Where the rows went is asked of a tensor of the same number of dimensions, all of different lengths.
    probe = torch.empty(tuple(range(2, 2 + tensor.dim())), device="meta")
    went = list(call.but(input=probe)().shape).index(2 + rows.dim)
    result = call()
    return _moved(rows, result, went, keeps_names=result.dim() == 2)


@rule("expand", "expand_as", "broadcast_to", takes="input size|other*", knows_numbers=True)
def expand(watch: Watch, call: Call) -> Any:
    """The same rows beside themselves; also a constant given to each row."""
    tensor = call.get("input")
    rows = watch.rows(tensor)
    wanted = call.get("size")
    if isinstance(wanted[0], Tensor):
        beside = watch.rows(wanted[0])
        if rows is not None and beside is not None and rows.fresh and not beside.fresh:
            tensor = watch.owned(tensor)
            rows = watch.rows(tensor)
        wanted = _sizes_of(watch, wanted[0])
    added = len(wanted) - tensor.dim()
    counts = [at for at, size in enumerate(wanted) if type(size) is RowCount]
    if rows is None:
        return _given_to_each(watch, tensor, wanted, counts)
    dim = rows.dim + added
    if any(at != dim for at in counts) or (wanted[dim] != -1 and dim not in counts):
        raise NotExact(f"torch.{call.name} would repeat a tensor of {rows.axis.name} for rows of something.")
    if counts:
        one_axis([rows.axis, wanted[dim].axis], call.name)
    shape = [tensor.size(rows.dim) if at == dim else int(size) for at, size in enumerate(wanted)]
    result = tensor.expand(shape)
    return mark(result, rows.but(dim=dim, names=_names_of_copies(rows.names, result, dim)))


def _given_to_each(watch: Watch, tensor: Tensor, wanted: list[Any], counts: list[int]) -> Tensor:
    if len(counts) != 1:
        raise NotExact("a tensor is expanded to rows of two kinds.")
    axis: Axis = wanted[counts[0]].axis
    at_rows = counts[0] - len(wanted) + tensor.dim()
    if at_rows >= 0 and tensor.size(at_rows) != 1:
        raise NotExact(f"a tensor of shape {tuple(tensor.shape)}, the same on every rank, is taken for {axis.name}.")
    shape = [axis.length if at == counts[0] else int(size) for at, size in enumerate(wanted)]
    return mark(tensor.expand(shape), Rows(axis, counts[0], watch.starts_fresh(axis)))


@rule("repeat", "tile", takes="input dims|repeats*", knows_numbers=True)
def repeat(watch: Watch, call: Call) -> Any:
    """Copies beside each other; the rows themselves only once. Or a constant given to each row."""
    tensor = call.get("input")
    times = call.get("dims")
    times = [1] * (tensor.dim() - len(times)) + times
    rows = watch.rows(tensor)
    if rows is None:
        return _repeated_for_each(watch, tensor, times)
    dim = rows.dim + len(times) - tensor.dim()
    if any(type(count) is RowCount for count in times) or times[dim] != 1:
        raise NotExact(f"torch.{call.name} makes copies of rows of {rows.axis.name}, which would be rows of their own.")
    result = tensor.repeat(times)
    return mark(result, rows.but(dim=dim, names=_names_of_copies(rows.names, result, dim)))


def _names_of_copies(names: tuple[RowIndex, ...] | None, result: Tensor, dim: int) -> tuple[RowIndex, ...] | None:
    """The rows that copies of row numbers number; of copies on top of each other, as ends of edges are, for each."""
    if names is None or (len(names) == 1 and (result.dim() != 2 or dim == 0)):
        return names
    if result.dim() != 2:
        raise NotExact("row numbers of both ends of edges are copied; take edge_index[0] and edge_index[1] first.")
    return names * max(result.size(1 - dim) // len(names), 1)


def _repeated_for_each(watch: Watch, tensor: Tensor, times: list[Any]) -> Tensor:
    """Copies of a tensor that is the same on every rank, one for each row."""
    counts = [at for at, count in enumerate(times) if type(count) is RowCount]
    once = tensor.repeat([1 if at in counts else count for at, count in enumerate(times)])
    wanted = [times[at] if at in counts else size for at, size in enumerate(once.shape)]
    copies = _given_to_each(watch, once, wanted, counts)
    return mark(copies.contiguous(), watch.known(copies))


@rule("unbind", "iter", takes="input dim", knows_numbers=True)
def unbind(watch: Watch, call: Call) -> Any:
    """The slices of a dimension that is not that of the rows."""
    tensor, rows = _rows_of_input(watch, call)
    dim = call.get("dim", 0) % tensor.dim()
    if dim == rows.dim:
        raise NotExact(f"it takes the {rows.axis.name} one by one; each rank has others.")
    pieces = tensor.unbind(dim)
    for at, piece in enumerate(pieces):
        mark(piece, rows.but(dim=rows.dim - (dim < rows.dim), names=rows.names_at(dim, at)))
    return pieces if call.name == "unbind" else iter(pieces)


@rule(
    *words("chunk split split_with_sizes tensor_split"),
    takes="input chunks|split_size|split_size_or_sections|split_sizes|indices_or_sections|sections|indices dim",
    knows_numbers=True,
)
def split(watch: Watch, call: Call) -> Any:
    """Pieces of the features; or, of rows that were joined, the pieces they were joined from."""
    tensor, rows = _rows_of_input(watch, call)
    dim = call.get("dim", 0) % tensor.dim()
    if dim != rows.dim:
        pieces, names, first = call(), rows.names, 0
        for piece in pieces:
            behind = first + piece.size(dim)
            mark(piece, rows.but(names=names if names is None or len(names) == 1 else names[first:behind]))
            first = behind
        return pieces
    parts = rows.axis.pieces
    asked = call.get("chunks")
    if call.name == "chunk":  # equal pieces: those of one axis
        fits = len(parts) == asked and len({id(part) for part in parts}) == 1
    else:
        sizes = list(asked) if isinstance(asked, (tuple, list)) else [asked] * len(parts)
        axes = [size.axis if type(size) is RowCount else None for size in sizes]
        fits = bool(parts) and axes == list(parts) and call.name != "tensor_split"  # which takes places, not sizes
    if not fits:
        raise NotExact(f"torch.{call.name} cuts the {rows.axis.name} at a place that is not the same on every rank.")
    return tuple(piece_of(watch, tensor, rows, at) for at in range(len(parts)))


def piece_of(watch: Watch, tensor: Tensor, rows: Rows, number: int) -> Tensor:
    """One of the pieces that rows were joined from."""
    axis, start = rows.axis.pieces[number], sum(piece.length for piece in rows.axis.pieces[:number])
    piece = tensor.narrow(rows.dim, start, axis.length)
    return mark(piece, Rows(axis, rows.dim, watch.starts_fresh(axis), names=rows.names))


@rule("cat", "concat", "concatenate", takes="tensors dim", knows_numbers=True)
def cat(watch: Watch, call: Call) -> Any:
    """Features beside each other; or rows behind each other, which makes rows of a new kind."""
    # torch lets empty vectors stand beside anything
    tensors = [
        tensor
        for tensor in call.get("tensors")
        if tensor.dim() != 1 or tensor.numel() or watch.rows(tensor) is not None
    ]
    dim = call.get("dim", 0) % tensors[0].dim()
    rows_of_each = [watch.rows(tensor) for tensor in tensors]
    of_rows = [rows for rows in rows_of_each if rows is not None]
    several = [rows.names for rows in of_rows]
    if any(rows.dim == dim for rows in of_rows):
        if any(rows is None or rows.dim != dim for rows in rows_of_each):
            raise NotExact(
                "torch.cat puts rows that are the same on every rank (a virtual node?) behind rows that are divided "
                "among the ranks; add such a node to the graph itself, or keep its state in a tensor of its own."
            )
        tensors = [watch.owned(tensor) for tensor in tensors]
        axis = watch.part.joined([rows.axis for rows in of_rows])
        return mark(torch.cat(tensors, dim), Rows(axis, dim, names=_names_behind_each_other(several)))
    for tensor, rows in zip(tensors, rows_of_each):
        if rows is None:
            raise NotExact(
                f"torch.cat puts a tensor of shape {tuple(tensor.shape)}, the same on every rank, beside rows."
            )
    axis, fresh = axis_and_freshness(of_rows, call.name)
    if len({rows.dim for rows in of_rows}) > 1:
        raise NotExact(f"torch.cat joins rows of {axis.name} that lie along different dimensions.")
    result = torch.cat(tensors if fresh else [watch.owned(tensor) for tensor in tensors], dim)
    names: tuple[RowIndex, ...] | None = None
    if all(several) and result.dim() == 2:  # a name for each column; one that is for all stands for each
        columns = [(names, tensor.size(dim)) for names, tensor in zip(several, tensors) if names]
        names = tuple(name for names, count in columns for name in names * (count // len(names)))
    elif any(several):
        raise NotExact(
            "torch.cat puts row numbers beside what numbers something else: edges from nodes to graphs, say, have no "
            "form here; sum at graphs with new_zeros(num_graphs, ...).index_add(0, batch, rows)."
        )
    return mark(result, Rows(axis, of_rows[0].dim, fresh, names=names))


def _names_behind_each_other(several: list[tuple[RowIndex, ...] | None]) -> tuple[RowIndex, ...] | None:
    named = [names for names in several if names is not None]
    if not named:
        return None
    if len(named) < len(several):
        raise NotExact("torch.cat puts row numbers and other numbers behind each other.")
    if len({len(names) for names in named}) != 1:
        raise NotExact("torch.cat puts row numbers of one end behind those of both.")
    columns = list(zip(*named))
    if any(names.of is not column[0].of for column in columns for names in column):
        raise NotExact("torch.cat puts numbers of rows of two kinds behind each other.")
    return tuple(reduce(RowIndex.joined_with, column) for column in columns)


@rule("stack", takes="tensors dim", knows_numbers=True)
@rule("vstack", "hstack", takes="tensors", knows_numbers=True)
def stacks(watch: Watch, call: Call) -> Any:
    """Along a new dimension; or along the first, which is made where it is missing, or the second."""
    tensors = list(call.get("tensors"))
    with watch.in_other_words():
        if call.name == "stack":
            dim = call.get("dim", 0)
            return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)
        if call.name == "hstack":
            return torch.cat(tensors, min(1, tensors[0].dim() - 1))
        return torch.cat([tensor if tensor.dim() > 1 else tensor.unsqueeze(0) for tensor in tensors], 0)


@rule("flip", takes="input dims*", knows_numbers=True)
def flip(watch: Watch, call: Call) -> Any:
    """Another order of features; of ends, if it is those of edges."""
    tensor, rows = _rows_of_input(watch, call)
    dims = call.get("dims")
    if any(dim % tensor.dim() == rows.dim for dim in dims):
        raise NotExact(f"torch.flip turns the order of the {rows.axis.name} round.")
    return mark(call(), rows.but(names=rows.names[::-1] if rows.names and dims else rows.names))


@rule("repeat_interleave", takes="input repeats dim")
def repeat_interleave(watch: Watch, call: Call) -> Any:
    """Features repeated; or a constant for each row."""
    tensor, count, dim = call.get("input"), call.get("repeats"), call.get("dim")
    rows = watch.rows(tensor)
    if rows is None and type(count) is RowCount:
        tensor, dim = (tensor.flatten(), 0) if dim is None else (tensor, dim % tensor.dim())
        return _repeated_for_each(watch, tensor, [count if at == dim else 1 for at in range(tensor.dim())])
    if rows is None or not isinstance(count, int) or dim is None or dim % tensor.dim() == rows.dim:
        raise NotExact("torch.repeat_interleave makes copies of rows, or of something by rows; index with x[numbers].")
    return mark(call(), rows.but())


@rule("select", takes="input dim index", knows_numbers=True)
@rule("narrow", takes="input dim start length", knows_numbers=True)
def in_brackets(watch: Watch, call: Call) -> Any:
    """One or some indices of a dimension, as square brackets have it."""
    tensor, dim, first = call.get("input"), call.get("dim"), call.get("start", call.get("index"))
    rows = watch.rows(tensor)
    if call.name == "narrow" and rows is not None and dim % tensor.dim() != rows.dim:
        return mark(call(), rows.but())  # torch refuses what is out of its range, which brackets would cut
    with watch.in_other_words():
        if call.name == "narrow":
            start = first if first >= 0 else first + tensor.size(dim)
            if not 0 <= start <= start + call.get("length") <= tensor.size(dim):
                raise IndexError(
                    f"start ({start}) + length ({call.get('length')}) exceeds the rows ({tensor.size(dim)})."
                )
            item: Any = slice(start, start + call.get("length"))
        else:
            item = first
        return tensor[(slice(None),) * (dim % tensor.dim()) + (item,)]


@rule("unflatten", takes="input dim sizes", knows_numbers=True)
def unflatten(watch: Watch, call: Call) -> Any:
    """Features parted."""
    tensor, dim = call.get("input"), call.get("dim")
    sizes = _sizes_of(watch, tensor)
    with watch.in_other_words():
        return tensor.view([*sizes[:dim], *call.get("sizes"), *sizes[dim % tensor.dim() + 1 :]])
