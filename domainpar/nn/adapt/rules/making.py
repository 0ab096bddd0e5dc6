"""Calls that make tensors of as many rows as others have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from domainpar.nn.adapt.calls import Call
from domainpar.nn.adapt.rows import Axis, Names, NotExact, RowCount, Rows, mark
from domainpar.nn.adapt.watch import Watch, rule


@rule("zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full", knows_numbers=True)
def filled(watch: Watch, call: Call) -> Any:
    """A tensor of one value; where a size is a number of rows, it has those rows."""
    first = 1 if call.name.startswith("new_") else 0
    sizes, rest = _sizes(call, first)
    dims = [dim for dim, length in enumerate(sizes) if type(length) is RowCount]
    if len(dims) > 1:
        raise NotExact(f"a tensor of {sizes[dims[0]]} by {sizes[dims[1]]} would join every row with every other one.")
    if not dims:  # made like rows, but not of them
        return mark(call.but(*call.args[:first], tuple(sizes), *rest, **_without_size(call))(), None)
    return _with_rows(watch, call, sizes, dims[0], (call.args[:first], rest))


def _with_rows(watch: Watch, call: Call, sizes: list[Any], dim: int, around: tuple[Any, Any]) -> Tensor:
    axis: Axis = sizes[dim].axis
    before, after = around
    kwargs = _without_size(call)

    def make(length: int) -> Tensor:
        lengths = [length if at == dim else size for at, size in enumerate(sizes)]
        made: Tensor = call.func(*before, tuple(lengths), *after, **kwargs)
        return made

    if axis is not watch.part.node_axis:
        return mark(make(axis.length), Rows(axis, dim))
    return mark(make(room(watch)), Rows(axis, dim, fresh=watch.alone))


def _sizes(call: Call, first: int) -> tuple[list[Any], list[Any]]:
    """The sizes, however given, and the positional arguments behind them."""
    if "size" in call.kwargs:
        return _as_list(call.kwargs["size"]), list(call.args[first:])
    given = call.args[first]
    if isinstance(given, (tuple, list)):
        return list(given), list(call.args[first + 1 :])
    return list(call.args[first:]), []


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _without_size(call: Call) -> dict[str, Any]:
    return {name: value for name, value in call.kwargs.items() if name != "size"}


@rule("zeros_like", "ones_like", "empty_like", "full_like", knows_numbers=True)
def filled_like(watch: Watch, call: Call) -> Any:
    """A tensor of one value, with the rows of another."""
    like = call.get(0, "input")
    rows = watch.rows(like)
    if rows is None:
        return mark(call(), None)
    if rows.axis is not watch.part.node_axis:
        return mark(call(), rows.but(names=None))
    shape = [room(watch) if dim == rows.dim else size for dim, size in enumerate(like.shape)]
    made = call.but(like.detach().new_empty(shape), *call.args[1:], **call.kwargs)()
    return mark(made, Rows(rows.axis, rows.dim, fresh=watch.alone))


def room(watch: Watch) -> int:
    """The length of new tensors of nodes: sums over edges at ghosts need a place, which nobody reads: `Watch.owned`."""
    plan = watch.part.plan
    return plan.num_local if plan.policy == "incident" else plan.num_owned


@rule("arange")
def arange(watch: Watch, call: Call) -> Any:
    """The numbers of all rows, as in self-loops."""
    bounds = [arg for arg in call.args if not isinstance(arg, torch.dtype)]
    start, stop = (0, bounds[0]) if len(bounds) == 1 else (*bounds[:2], 0, None)[:2]
    start, stop = call.kwargs.get("start", start), call.kwargs.get("end", stop)
    step = bounds[2] if len(bounds) > 2 else call.kwargs.get("step", 1)
    if start != 0 or step != 1 or type(stop) is not RowCount:
        raise NotExact(
            "torch.arange from, or in steps of, a number of rows; only the numbers of all rows are known here."
        )
    axis = stop.axis
    kwargs = {name: value for name, value in call.kwargs.items() if name not in ("start", "end", "step")}
    numbers = torch.arange(axis.length, **kwargs)
    fresh = watch.fresh_of(axis is not watch.part.node_axis)
    if numbers.dtype not in (torch.int64, torch.int32):
        numbers = (watch.part.local_ids[: axis.length] if axis is watch.part.node_axis else axis.places).to(numbers)
        return mark(numbers, Rows(axis, 0, fresh))
    return mark(numbers, Rows(axis, 0, fresh, names=(Names(axis, complete=True, only_owned=True),)))


@rule("tensor", "as_tensor", "scalar_tensor")
def of_numbers(watch: Watch, call: Call) -> Any:
    """A number of rows as a value: that of the whole graph."""
    value = call.args[0]
    if type(value) is not RowCount:
        raise NotExact(f"torch.{call.name} is given rows or their number inside a list.")
    return mark(call.but(value.axis.total, *call.args[1:], **call.kwargs)(), None)
