"""Strides of tensors of the whole graph, which decide whether torch views or copies.

Those of this rank's rows would differ on a rank that has none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}  # in the layout of what they copy


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor: those of local rows would differ on a rank that has none."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))


def dense_strides(x: Tensor) -> tuple[int, ...] | None:
    """The strides of a new tensor in the layout of another one; None if it is contiguous."""
    return None if x.layout is not torch.strided or x.is_contiguous() else strides_of(torch.empty_like, (x,))


class Shape(NamedTuple):
    """The tensor without data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def empty(self) -> Tensor:
        """A tensor on torch's meta device."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def strides_of(func: Any, args: Any, kwargs: Any = None) -> tuple[int, ...]:
    """The strides of a call's result on the whole graph, by torch's own call on tensors without data.

    Raises:
        Exception: As torch does; `TypeError` for arguments that have no hash.
    """
    named = tuple((name, _without_numbers(x)) for name, x in (kwargs or {}).items())
    return _strides_of(func, tuple(map(_without_numbers, args)), named)


def layout_of(func: Any, args: Any, kwargs: Any) -> Any:
    """The strides that torch gives a result on the whole graph; None if it is contiguous."""
    if func in _COPIES:
        kept = kwargs.get("memory_format") in (None, torch.preserve_format)
        return dense_strides(args[0]) if kept else None
    try:
        return strides_of(func, args, kwargs)
    except (TypeError, RuntimeError):  # an argument without a hash; a call that has no form without numbers
        return None


def _without_numbers(x: Any) -> Any:
    x = tuple(x) if isinstance(x, list) else x
    return Shape(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x


@lru_cache(maxsize=4096)
def _strides_of(func: Any, args: tuple[Any, ...], named: tuple[Any, ...]) -> tuple[int, ...]:
    given = [x.empty if type(x) is Shape else x for x in args]
    out: Tensor = func(*given, **{name: x.empty if type(x) is Shape else x for name, x in named})
    return out.stride()
