"""New tensors beside placed ones: their placement is guessed by their length; a wrong guess costs only time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from domainpar.placed.axes import Rows
from domainpar.placed.dispatch import aten, rule
from domainpar.placed.ranks import Sum
from domainpar.placed.strides import dense_strides
from domainpar.placed.tensor import Placed, hold


def _rows_for(place: Any, size: tuple[int, ...]) -> Rows | None:
    """The placement of a new tensor of a size beside another one, if it is to have rows."""
    if type(place) is not Rows:
        return None
    axis, dim = place.axis, place.dim
    if dim < len(size) and size[dim] == axis.total > 1:
        others = [other for other in axis.family if other is not axis and other.total == axis.total]
        return None if others else axis.rows(dim)
    if dim < len(size):  # another one of that length may be of features
        found = [other for other in axis.family if other.total == size[dim] > 1]
        if len(found) == 1:
            return found[0].rows(dim)
    return None


@lru_cache(maxsize=256)
def _one(dims: int, value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full([1] * dims, value, dtype=dtype, device=device)


def _repeated(size: tuple[int, ...], value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of one value that is once in memory; a write copies it first."""
    one = _one(len(size), value, dtype, device).expand(size)
    return one if one.numel() > 1 else one.clone()


def filled_with(x: Placed, size: Any, value: Any, dtype: Any) -> Placed:
    """A tensor of one value beside another: one number in memory, until it is written."""
    forms, key = x.place.forms, (tuple(size), value, dtype, x.device)
    known = forms.get(key)
    if known is None or torch.is_inference_mode_enabled():
        place: Any = _rows_for(x.place, key[0]) or x.place.ranks.same
        here = list(key[0])
        if type(place) is Rows:
            here[place.dim] = place.axis.length
        out = Placed(_repeated(tuple(here), value, dtype, x.device), place)
    else:
        out = hold(*known)
    out.fresh = value
    if known is None and out._local.numel() > 1:  # alone it may be written where it lies
        forms[key] = out._local, out.form
    return out


@rule(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided, aten.empty_strided)
def _new(func: Any, args: Any, kwargs: Any) -> Any:
    value = args[2] if func is _NEW_FULL else int(func is _NEW_ONES)
    if isinstance(value, torch.Tensor):
        value = value.item()
    return filled_with(args[0], args[1], value, kwargs.get("dtype") or args[0].dtype)


@rule(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like)
def _like(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    kwargs = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format")}
    place, local = x.place, x._local
    if type(place) is Sum:
        place = place.ranks.same
    elif type(place) is Rows and place.pending:
        local, place = local.narrow(place.dim, 0, place.axis.length), place.axis.rows(place.dim)
    strides = dense_strides(x) if kwargs.get("memory_format") in (None, torch.preserve_format) else None
    value = _VALUES.get(func)
    if value is None or local.dim() == 0:
        return Placed(func(local, *args[1:], **kwargs), place, strides=strides)
    # One number in memory, until it is written.
    numbers = _repeated(tuple(local.shape), value, kwargs.get("dtype") or x.dtype, x.device)
    out = Placed(numbers, place, strides=strides)
    out.fresh = value
    return out


_NEW_ONES, _NEW_FULL = aten.new_ones.default, aten.new_full.default
_VALUES = {aten.zeros_like.default: 0, aten.ones_like.default: 1}
