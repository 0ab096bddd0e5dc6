"""Value numbering: which tensors of a forward pass hold the same values, because the same calls made them.

Layers that normalise by degrees each compute the degrees anew. If two tensors come from the same calls of the same
inputs they are the same, and ghost rows that were fetched for one need not be fetched for the other.

These keys identify calls and tensors under the watch, here and elsewhere:

- a call: the function itself, its arguments by number or by repr, torch's default dtype; no random function (here)
- a tensor as it is now: its number and its version; an argument by its place among them (here)
- a rule: the name of a function of torch; for other libraries with the library's name before it (`calls`)
- a tensor that every rank has: its `id`, while the pass keeps it alive (`Watch.rows`)
- rows: the axis as an object; a mask by its number or version, a slice by axis and bounds (`rules/selections`), joined
  pieces by `id` and identity (`GraphPart.joined`); the number of rows may be no key (`RowCount`)
- memory: its address, with a weak reference that shows when it is used again (`versions`)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from domainpar.nn.adapt.rows import Axis, RowCount, Rows, rows_of, version_of

PLAIN = (int, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unnumbered(Exception):
    """Something in a call has no number: a weight, or what was made of one."""


class ValueNumbers:
    """Gives equal numbers to tensors that the same calls made. Tensors that require a gradient get none."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of_call(self, func: Hashable, args: Any, kwargs: Any) -> int | None:
        """The number of a call, None if something in it has none.

        The function itself is part of it: `torch.where` and `Tensor.where` go by one name and mean two things. So is
        what torch decides by besides the arguments.
        """
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return None  # it makes other values of the same arguments
        try:
            if getattr(func, "__name__", "").startswith("new_") and args:  # of the tensor only type and device matter
                args = (args[0].dtype, args[0].device, *args[1:])
            named = tuple((name, self._frozen(kwargs[name])) for name in kwargs)
            key = (func, torch.get_default_dtype(), tuple(map(self._frozen, args)), named)
        except Unnumbered:
            return None
        return self._number(key)

    def of(self, tensor: Tensor) -> int | None:
        """The number of a tensor as it is now, None if it has none."""
        rows = rows_of(tensor)
        if not isinstance(rows, Rows) or rows.number is None or tensor.requires_grad:
            return None
        number, version = rows.number
        return number if version == version_of(tensor) else None

    def give(self, tensors: Iterable[Tensor], origin: Hashable) -> None:
        """Number what a call made or changed, and the arguments of the pass, by their origin and place."""
        for place, tensor in enumerate(tensors):
            rows = rows_of(tensor)
            if isinstance(rows, Rows):
                rows.number = (self._number((origin, place)), version_of(tensor))

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _frozen(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            number = self.of(value)
            if number is None:
                raise Unnumbered
            return ("tensor", number)
        if type(value) is RowCount:
            return ("rows", self._of_axis(value.axis))
        if isinstance(value, float):  # repr tells 0.0 from -0.0
            return ("float", repr(value))
        if isinstance(value, PLAIN):
            return (type(value).__name__, value)
        if isinstance(value, slice):
            return ("slice", *map(self._frozen, (value.start, value.stop, value.step)))
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(self._frozen, value))
        raise Unnumbered

    def _of_axis(self, axis: Axis) -> Hashable:
        # Not the axis itself, of which a layer may make another one for the same rows.
        if axis.pieces:
            return ("joined", *map(self._of_axis, axis.pieces))
        if axis.number is not None:
            return ("selected", axis.number)
        if axis.each is None and axis.selected_from is None:  # nodes or edges
            return axis.name
        raise Unnumbered
