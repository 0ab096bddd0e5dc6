"""Calls that make tensors of as many rows as others have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from domainpar.nn.adapt.calls import Call
from domainpar.nn.adapt.rows import Axis, Names, NotExact, RowCount, Rows, mark
from domainpar.nn.adapt.watch import Watch, rule


@rule("zeros", "ones", "empty", takes="size*", knows_numbers=True)
@rule("full", takes="size", knows_numbers=True)
@rule("new_zeros", "new_ones", "new_empty", takes="input size*", knows_numbers=True)
@rule("new_full", takes="input size", knows_numbers=True)
def filled(watch: Watch, call: Call) -> Any:
    """A tensor of one value; where a size is a number of rows, it has those rows."""
    size = call.get("size")
    sizes = list(size) if isinstance(size, (tuple, list)) else [size]
    dims = [dim for dim, length in enumerate(sizes) if type(length) is RowCount]
    if len(dims) > 1:
        raise NotExact(f"a tensor of {sizes[dims[0]]} by {sizes[dims[1]]} would join every row with every other one.")
    if not dims:  # made like rows, but not of them
        return mark(call.but(size=tuple(sizes))(), None)
    axis: Axis = sizes[dims[0]].axis
    sizes[dims[0]] = axis.length if axis is not watch.part.node_axis else room(watch)
    return mark(call.but(size=tuple(sizes))(), Rows(axis, dims[0], watch.starts_fresh(axis)))


@rule("zeros_like", "ones_like", "empty_like", "full_like", takes="input", knows_numbers=True)
def filled_like(watch: Watch, call: Call) -> Any:
    """A tensor of one value, with the rows of another."""
    like = call.get("input")
    rows = watch.rows(like)
    if rows is None:
        return mark(call(), None)
    if rows.axis is not watch.part.node_axis:
        return mark(call(), rows.but(names=None))
    shape = [room(watch) if dim == rows.dim else size for dim, size in enumerate(like.shape)]
    result = call.but(input=like.detach().new_empty(shape))()
    return mark(result, Rows(rows.axis, rows.dim, fresh=watch.alone))


def room(watch: Watch) -> int:
    """The length of new tensors of nodes: sums over edges at ghosts need a place, which nobody reads: `Watch.owned`."""
    plan = watch.part.plan
    return plan.num_local if plan.policy == "incident" else plan.num_owned


@rule("arange", takes="start end step")
def arange(watch: Watch, call: Call) -> Any:
    """The numbers of all rows, as in self-loops."""
    start, stop, step = call.get("start", 0), call.get("end"), call.get("step", 1)
    if stop is None:  # of one number it is the end
        start, stop = 0, start
    if start != 0 or step != 1 or type(stop) is not RowCount:
        raise NotExact(
            "torch.arange from, or in steps of, a number of rows; only the numbers of all rows are known here."
        )
    axis = stop.axis
    kwargs = {name: value for name, value in call.kwargs.items() if name not in ("start", "end", "step")}
    numbers, fresh = torch.arange(axis.length, **kwargs), watch.starts_fresh(axis)
    if numbers.dtype not in (torch.int64, torch.int32):
        numbers = (watch.part.local_ids[: axis.length] if axis is watch.part.node_axis else axis.places).to(numbers)
        return mark(numbers, Rows(axis, 0, fresh))
    return mark(numbers, Rows(axis, 0, fresh, names=(Names(axis, complete=True, only_owned=True),)))


@rule("tensor", "as_tensor", takes="data")
@rule("scalar_tensor", takes="s")
def of_numbers(watch: Watch, call: Call) -> Any:
    """A number of rows as a value: that of the whole graph."""
    value = call.args[0]
    if type(value) is not RowCount:
        raise NotExact(f"torch.{call.name} is given rows or their number inside a list.")
    return mark(replace(call, args=[value.axis.total, *call.args[1:]])(), None)
