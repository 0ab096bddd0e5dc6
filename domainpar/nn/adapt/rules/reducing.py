"""Sums, means, extremes and moments over the rows themselves: over all ranks, each row counted once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.across import largest, summed
from domainpar.nn.adapt.rows import NotExact, Rows, mark
from domainpar.nn.adapt.watch import Call, Watch, rule


class Reduced(NamedTuple):
    """What is reduced: the dimensions, and whether they stay with length 1."""

    tensor: Tensor
    rows: Rows
    dims: tuple[int, ...]
    keep: bool
    dtype: torch.dtype | None

    @property
    def over_rows(self) -> bool:
        return self.rows.dim in self.dims

    def row_dim_after(self) -> int:
        """Where the rows are afterwards, if they are not reduced."""
        return self.rows.dim if self.keep else self.rows.dim - sum(dim < self.rows.dim for dim in self.dims)

    def num_summed(self) -> int:
        """How many numbers of the whole graph go into each result. *Collective* the first time."""
        return self.rows.axis.total * math.prod(self.tensor.size(dim) for dim in self.dims if dim != self.rows.dim)


def _reduced(watch: Watch, call: Call) -> Reduced:
    tensor = call.get(0, "input")
    rows = watch.rows(tensor)
    if rows is None:
        raise NotExact(f"torch.{call.name} of a tensor that is the same on every rank takes an argument from rows.")
    dim = call.get(1, "dim", call.kwargs.get("axis"))
    dims = range(tensor.dim()) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    if rows.names is not None:
        raise NotExact(
            f"torch.{call.name} of row numbers, which are others on each rank; if it guesses the number of nodes from "
            "edge_index, pass num_nodes=x.size(0)."
        )
    keep = call.get(2, "keepdim", False)
    return Reduced(tensor, rows, tuple(one % tensor.dim() for one in dims), bool(keep), call.kwargs.get("dtype"))


def _local(call: Call, of: Reduced) -> Any:
    made = call()
    for tensor in made if isinstance(made, tuple) else (made,):
        mark(tensor, of.rows.but(dim=of.row_dim_after()))
    return made


@rule("sum", "mean", "nansum")
def add_up(watch: Watch, call: Call) -> Any:
    """Sums, and means as sums divided by the number of the whole graph."""
    of = _reduced(watch, call)
    if not of.over_rows:
        return _local(call, of)
    if call.name == "nansum":
        raise NotExact("torch.nansum over rows; use torch.where and sum.")
    total = total_over_rows(watch, of)
    return mark(total / of.num_summed() if call.name == "mean" else total, None)


def total_over_rows(watch: Watch, of: Reduced) -> Tensor:
    """The sum over rows, of all ranks, and other dimensions."""
    watch.check_not_recomputed("sums over ranks")
    mine = watch.counted(of.tensor).sum(of.dims, keepdim=of.keep, dtype=of.dtype)
    return summed(mine, watch.part)


@rule("var", "std", "var_mean", "std_mean")
def spread(watch: Watch, call: Call) -> Any:
    """Variances in two passes: first the mean."""
    of = _reduced_with_correction(watch, call)
    reduced, correction = of
    if not reduced.over_rows:
        return _local(call, reduced)
    mean, variance = moments(watch, reduced, correction)
    found = variance.sqrt() if call.name.startswith("std") else variance
    if not reduced.keep:
        found, mean = (tensor.squeeze(reduced.dims) for tensor in (found, mean))
    mark(found, None)
    return (found, mark(mean, None)) if call.name.endswith("mean") else found


def _reduced_with_correction(watch: Watch, call: Call) -> tuple[Reduced, float]:
    args, kwargs = list(call.args), dict(call.kwargs)
    unbiased = kwargs.pop("unbiased", None)
    if len(args) > 1 and isinstance(args[1], bool):
        unbiased = args.pop(1)
    elif len(args) > 2 and isinstance(args[2], bool):
        unbiased = args.pop(2)
    correction = kwargs.pop("correction", 1)
    correction = 1 if correction is None else correction
    return _reduced(watch, call.but(*args, **kwargs)), float(unbiased) if unbiased is not None else correction


def moments(watch: Watch, of: Reduced, correction: float = 0) -> tuple[Tensor, Tensor]:
    """Mean and variance over rows of all ranks and other dimensions, which stay with length 1."""
    kept = of._replace(keep=True)
    mean = total_over_rows(watch, kept) / of.num_summed()
    apart = watch.counted(of.tensor) - mean
    squares = summed((apart * apart).sum(of.dims, keepdim=True), watch.part)
    return mean, squares / max(of.num_summed() - correction, 0) if of.num_summed() > correction else squares / 0.0


class ValuesOnly(NamedTuple):
    """What `max` over rows returns; which row it was has another number on each rank."""

    values: Tensor
    indices: None = None


@rule("amax", "amin", "max", "min")
def extreme(watch: Watch, call: Call) -> Any:
    """The largest or smallest; ties share the gradient, the numbers of the rows are not told."""
    if call.name in ("max", "min") and len(call.args) > 1 and isinstance(call.args[1], Tensor):
        from domainpar.nn.adapt.rules.elementwise import elementwise

        return elementwise(watch, call)
    of = _reduced(watch, call)
    if not of.over_rows:
        return _local(call, of)
    found = mark(extreme_over_rows(watch, of, 1 if call.name.endswith("max") else -1), None)
    if call.name in ("max", "min") and call.get(1, "dim") is not None:
        return ValuesOnly(found)
    return found


def extreme_over_rows(watch: Watch, of: Reduced, sign: int) -> Tensor:
    """The largest (sign 1) or smallest (-1) over rows of all ranks."""
    watch.check_not_recomputed("compares over ranks")
    mine = watch.counted(of.tensor)
    kept = [1 if dim in of.dims else size for dim, size in enumerate(mine.shape)]
    if mine.dtype is torch.bool:
        mine = mine.to(torch.uint8)
    lowest = mine.new_full(kept, _lowest(mine.dtype, sign))
    of_mine = (sign * mine.detach()).amax(of.dims, keepdim=True) if mine.numel() else sign * lowest
    best = sign * largest(of_mine, watch.part)
    if mine.is_floating_point():
        here = (mine.detach() == best).to(mine.dtype)
        ties = summed(here.sum(of.dims, keepdim=True), watch.part)
        share = summed((mine * here).sum(of.dims, keepdim=True), watch.part) / ties
        best = best + (share - share.detach())
    return best if of.keep else best.squeeze(of.dims)


def _lowest(dtype: torch.dtype, sign: int) -> float | int:
    if dtype.is_floating_point:
        return -sign * math.inf
    info = torch.iinfo(dtype)
    return info.min + 1 if sign > 0 else info.max


@rule("any", "all", "count_nonzero")
def truth(watch: Watch, call: Call) -> Any:
    """Whether, or how often, something holds anywhere in the whole graph."""
    of = _reduced(watch, call)
    if not of.over_rows:
        return _local(call, of)
    watch.check_not_recomputed("counts over ranks")
    holds = watch.counted(of.tensor).bool()
    wanted = ~holds if call.name == "all" else holds
    number = summed(wanted.sum(of.dims, keepdim=of.keep), watch.part)
    made = number if call.name == "count_nonzero" else number == 0 if call.name == "all" else number > 0
    return mark(made, None)


@rule("norm", "linalg_vector_norm", "vector_norm")
def norm(watch: Watch, call: Call) -> Any:
    """Norms of features; over rows the Euclidean one."""
    power = call.get(1, "p", call.kwargs.get("ord", 2))
    power = 2 if power in (None, "fro") else power
    args = [call.args[0], *call.args[2:]]
    kwargs = {name: value for name, value in call.kwargs.items() if name not in ("p", "ord", "x", "input")}
    of = _reduced(watch, call.but(*args, **kwargs))
    if not of.over_rows:
        return _local(call, of)
    if power != 2:
        raise NotExact(f"a norm of order {power} over the {of.rows.axis.name}; only the Euclidean one is known here.")
    squares = of._replace(tensor=mark(of.tensor * of.tensor, of.rows.but()))
    return mark(total_over_rows(watch, squares).sqrt(), None)


@rule("logsumexp")
def logsumexp(watch: Watch, call: Call) -> Any:
    """The logarithm of a sum of exponentials."""
    of = _reduced(watch, call)
    if not of.over_rows:
        return _local(call, of)
    top = extreme_over_rows(watch, of._replace(keep=True), 1).detach()
    above = of._replace(tensor=mark((of.tensor - top).exp(), of.rows.but()), keep=True)
    made = total_over_rows(watch, above).log() + top
    return mark(made if of.keep else made.squeeze(of.dims), None)


def softmax_over_rows(watch: Watch, call: Call, dim: int) -> Tensor:
    """Softmax of each column over all rows of the graph."""
    tensor = call.get(0, "input")
    rows = watch.rows(tensor)
    assert rows is not None
    of = Reduced(tensor, rows, (dim % tensor.dim(),), True, None)
    apart = tensor - extreme_over_rows(watch, of, 1).detach()
    total = total_over_rows(watch, of._replace(tensor=mark(apart.exp(), rows.but())))
    made = apart - total.log() if call.name == "log_softmax" else apart.exp() / total
    return mark(made, rows.but())


@rule("prod", "median", "nanmedian", "quantile", "mode", "argmax", "argmin", "aminmax")
def only_features(watch: Watch, call: Call) -> Any:
    """Other reductions: over features only."""
    position = 2 if call.name in ("quantile",) else 1
    dim = call.get(position, "dim")
    tensor = call.args[0]
    rows = watch.rows(tensor)
    assert rows is not None
    if not isinstance(dim, int) or dim % tensor.dim() == rows.dim:
        raise NotExact(
            f"torch.{call.name} over the {rows.axis.name} has no exact form that is known here; sum, mean, max, "
            "min, var and std have one."
        )
    keep = call.get(position + 1, "keepdim", False)
    return _local(call, Reduced(tensor, rows, (dim % tensor.dim(),), bool(keep), None))


@rule(
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "nll_loss",
    "cross_entropy",
    "kl_div",
)
def loss(watch: Watch, call: Call) -> Any:
    """Losses of rows: their sum or mean over the whole graph."""
    how = call.kwargs.get("reduction", "mean")
    if call.name in ("nll_loss", "cross_entropy") and call.get(2, "weight") is not None and how == "mean":
        raise NotExact(f"a weighted mean inside {call.name}; take reduction='none' and divide by the weights' sum.")
    rows = next(one for tensor in call.args[:2] if (one := watch.rows(tensor)) is not None)
    call = watch.common(call)
    kwargs = {name: value for name, value in call.kwargs.items() if name not in ("size_average", "reduce")}
    each = call.func(*call.args[:2], *call.args[2:], **(kwargs | {"reduction": "none"}))
    known = [one for tensor in call.args[:2] if (one := watch.rows(tensor)) is not None]
    if len(known) != 2 or known[0].axis is not known[1].axis or rows.dim != 0:
        raise NotExact(f"{call.name} compares rows with something else than the same rows.")
    mark(each, Rows(rows.axis, 0, all(one.fresh for one in known)))
    if how == "none":
        return each
    of = Reduced(each, watch.rows(each) or rows, tuple(range(each.dim())), False, None)
    total = total_over_rows(watch, of)
    return mark(total / of.num_summed() if how == "mean" else total, None)
