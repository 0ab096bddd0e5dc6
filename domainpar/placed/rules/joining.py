"""Tensors side by side, and rows one after the other."""

from __future__ import annotations

from typing import Any

import torch

from domainpar.placed.axes import Names, joined
from domainpar.placed.dispatch import aten, rule_of_rows
from domainpar.placed.moves import local_rows, plain, rows_in
from domainpar.placed.ranks import NotExact
from domainpar.placed.rules.indexing import taken
from domainpar.placed.tensor import Placed, is_rows


@rule_of_rows(aten.cat, aten.concat, aten.concatenate)
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    pieces, dim = list(args[0]), args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = next(piece for piece in pieces if is_rows(piece))
    pieces = [piece for piece in pieces if not (piece.dim() == 1 and piece.numel() == 0 and first.dim() > 1)]
    dim %= first.dim()
    axis, at = first.place.axis, first.place.dim
    dtype = pieces[0].dtype
    for piece in pieces[1:]:
        dtype = torch.promote_types(dtype, piece.dtype)
    if dim != at:
        for piece in pieces:
            if piece.size(at) != axis.total:
                raise RuntimeError(
                    f"Sizes of tensors must match except in dimension {dim}. Expected {axis.total} in dimension {at} "
                    f"but got {piece.size(at)}."
                )
        names = [piece.names if is_rows(piece) and piece.place.axis is axis else None for piece in pieces]
        out = torch.cat([local_rows(piece, axis, at).to(dtype) for piece in pieces], dim)
        return Placed(out, axis.rows(at), names[0] if isinstance(names[0], Names) and len(set(names)) == 1 else None)
    axes, locals_, names = [], [], []
    for piece in pieces:
        if is_rows(piece):
            if piece.place.dim != dim:
                raise NotExact(f"{piece.place} behind rows along dimension {dim}: a table of all rows and all rows")
            axes.append(piece.place.axis)
            locals_.append(piece.local.to(dtype))
            names.append(piece.names)
            continue
        given, dealt = plain(piece, axis.ranks), axis.dealt(piece.size(dim))
        axes.append(dealt)
        locals_.append(rows_in(given, dealt, dim).to(dtype))
        counts = dtype == torch.int64 and given.size(dim) > 0  # 0, 1, 2 ... along the dimension, as those of self-loops
        counts = counts and bool((given.movedim(dim, -1) == torch.arange(given.size(dim), device=given.device)).all())
        names.append(Names(dealt, "owned") if counts else None)
    axis = axes[0] if len(axes) == 1 else joined(axes)
    return Placed(torch.cat(locals_, dim), axis.rows(dim), _all_names(names))


def _all_names(names: list[Any]) -> Any:
    """The `names` of joined rows: of one axis, with `known` as weak as that of any piece."""
    if None in names:
        return None
    several = next((len(it) for it in names if isinstance(it, tuple)), 0)
    columns = []
    for at in range(max(1, several)):
        column = [it[at] if isinstance(it, tuple) else it for it in names]
        if len({it.axis for it in column}) != 1:
            return None
        known = {it.known for it in column}
        columns.append(Names(column[0].axis, "owned" if known == {"owned"} else "" if "" in known else "held"))
    return tuple(columns) if several else columns[0]


@rule_of_rows(aten.stack)
def _stack(func: Any, args: Any, kwargs: Any) -> Any:
    pieces, dim = list(args[0]), args[1] if len(args) > 1 else kwargs.get("dim", 0)
    dim %= pieces[0].dim() + 1
    first = next(piece for piece in pieces if is_rows(piece)).place.axis
    names = [piece.names if is_rows(piece) and piece.place.axis is first else None for piece in pieces]
    out = aten.cat([piece.unsqueeze(dim) for piece in pieces], dim)
    if dim == 0 and all(isinstance(it, Names) for it in names):
        out.names = tuple(names)
    return out


@rule_of_rows(aten.flip)
def _flip(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dims = [dim % x.dim() for dim in args[1]]
    others = [dim for dim in dims if dim != x.place.dim]
    names = x.names
    if isinstance(names, tuple):
        names = tuple(reversed(names)) if dims == [0] else None
    if x.place.dim in dims:
        axis = x.place.axis
        rows = axis.reach(axis.total - 1 - axis.ids)
        x = taken(x, x.place.dim, rows, axis.rows(x.place.dim))
        names = x.names if isinstance(x.names, Names) else None
    return Placed(x.local.flip(others), x.place, names)


@rule_of_rows(aten.roll)
def _roll(func: Any, args: Any, kwargs: Any) -> Any:
    x, shifts, dims = args[0], args[1], args[2] if len(args) > 2 else []
    if not dims:
        return aten.roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, [dim % x.dim() for dim in dims]):
        if dim != x.place.dim:
            x = Placed(x.local.roll(shift, dim), x.place)
        else:
            axis = x.place.axis
            x = taken(x, dim, axis.reach((axis.ids - shift) % max(1, axis.total)), axis.rows(dim))
    return x


@rule_of_rows(aten.repeat)
def _repeat(func: Any, args: Any, kwargs: Any) -> Any:
    x, times = args[0], list(args[1])
    new = len(times) - x.dim()
    at = x.place.dim + new
    outer, times[at] = times[at], 1
    out = Placed(x.local.repeat(times), x.place.axis.rows(at))
    if outer == 1:
        return out
    return torch.cat([out] * outer, at) if outer else out.narrow(at, 0, 0)
