"""Sums, means, extremes and moments over the rows themselves: over all ranks, each row counted once."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.across import largest, summed, with_gradient_of
from domainpar.nn.adapt.calls import Call, axis_and_freshness, words
from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.rows import NotExact, Rows, mark
from domainpar.nn.adapt.watch import RULES, Watch, rule


class Reduced(NamedTuple):
    """The dimensions that are reduced, and whether they stay with length 1."""

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
    tensor = call.get("input")
    rows = watch.rows(tensor)
    if rows is None:
        raise NotExact(f"torch.{call.name} of a tensor that is the same on every rank takes an argument from rows.")
    dim = call.get("dim")
    dims = range(tensor.dim()) if dim is None or dim in ((), []) else (dim,) if isinstance(dim, int) else dim
    keep = call.get("keepdim", False)
    return Reduced(tensor, rows, tuple(one % tensor.dim() for one in dims), bool(keep), call.kwargs.get("dtype"))


def _local(call: Call, of: Reduced) -> Any:
    return _marked(call(), of)


def _marked(result: Any, of: Reduced) -> Any:
    for tensor in tensors_in(result):
        mark(tensor, of.rows.but(dim=of.row_dim_after()))
    return result


@rule("sum", "mean", "nansum", takes="input dim keepdim")
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
    mine = watch.counted(of.tensor).sum(of.dims, keepdim=of.keep, dtype=of.dtype)
    return summed(mine, watch.part)


@rule("var", "std", "var_mean", "std_mean", takes="input dim keepdim")
def spread(watch: Watch, call: Call) -> Any:
    """Variances in two passes: first the mean."""
    of = _reduced_with_correction(watch, call)
    reduced, correction = of
    if not reduced.over_rows:
        return _local(call, reduced)
    mean, variance = moments(watch, reduced, correction)
    spreads = _root(variance) if call.name.startswith("std") else variance
    if not reduced.keep:
        spreads, mean = (tensor.squeeze(reduced.dims) for tensor in (spreads, mean))
    mark(spreads, None)
    return (spreads, mark(mean, None)) if call.name.endswith("mean") else spreads


def _reduced_with_correction(watch: Watch, call: Call) -> tuple[Reduced, float]:
    args, unbiased, correction = list(call.args), call.get("unbiased"), call.get("correction")
    # `x.var(unbiased)` and `x.var(dim, unbiased, keepdim)`
    if (place := next((at for at in (1, 2) if at < len(args) and isinstance(args[at], bool)), None)) is not None:
        unbiased = args.pop(place)
    correction = float(unbiased) if unbiased is not None else 1 if correction is None else correction
    return _reduced(watch, replace(call, args=args)), correction


def moments(watch: Watch, of: Reduced, correction: float = 0) -> tuple[Tensor, Tensor]:
    """Mean and variance over rows of all ranks and other dimensions, which stay with length 1."""
    kept = of._replace(keep=True)
    if of.tensor.is_complex():
        raise NotExact("variances of complex numbers over rows.")
    mean = total_over_rows(watch, kept) / of.num_summed()
    apart = watch.counted(of.tensor) - mean
    squares = summed((apart * apart).sum(of.dims, keepdim=True), watch.part)
    return mean, squares / max(of.num_summed() - correction, 0) if of.num_summed() > correction else squares / 0.0


@rule("batch_norm", takes="input running_mean running_var weight bias training momentum eps")
@rule("instance_norm", takes="input running_mean running_var weight bias use_input_stats momentum eps")
def batch_norm(watch: Watch, call: Call) -> Any:
    """Statistics over rows; in evaluation with running statistics each row by itself.

    `batch_norm(x, mean, var, weight, bias, training, momentum, eps)`, and `instance_norm` alike: its statistics are
    taken over rows only where these are its length, as in PyG's InstanceNorm.
    """
    x = call.get("input")
    rows = watch.known(x)
    uses_own = call.get("training", False) if call.name == "batch_norm" else call.get("use_input_stats", True)
    per_entry = call.name == "instance_norm"
    if not uses_own or watch.alone or (per_entry and rows.dim == 0 and x.dim() > 2):
        if rows.dim == 1:
            raise NotExact(f"torch.{call.name} with a feature for each of the {rows.axis.name}.")
        return mark(call(), rows.but())
    if rows.dim == 1:
        raise NotExact(f"torch.{call.name} with a feature for each of the {rows.axis.name}.")
    dims = tuple(dim for dim in range(x.dim()) if dim != 1 and not (per_entry and dim == 0))
    of = Reduced(x, rows, dims, True, None)
    if of.num_summed() <= 1:
        raise ValueError(
            f"torch.{call.name} in training needs more than one value a feature; the graph has {of.num_summed()}."
        )
    mean, variance = moments(watch, of)
    _update_running(call, mean, variance, of.num_summed(), per_entry)
    result = (x - mean) * torch.rsqrt(variance + call.get("eps", 1e-5))
    return mark(_affine(result, call.get("weight"), call.get("bias")), rows.but())


def _update_running(call: Call, mean: Tensor, variance: Tensor, count: int, per_entry: bool) -> None:
    momentum = call.get("momentum", 0.1)
    running_mean, running_var = call.get("running_mean"), call.get("running_var")
    dims = [dim for dim in range(mean.dim()) if dim != 1]
    with torch.no_grad():
        for running, statistic in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None:
                running.lerp_(statistic.detach().mean(dims).to(running.dtype), momentum)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [1, -1] + [1] * (x.dim() - 2)
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


class ValuesOnly(NamedTuple):
    """The result of `max` over rows; the number of the row differs between ranks."""

    values: Tensor
    indices: None = None


@rule("amax", "amin", takes="input dim keepdim")
@rule("max", "min", takes="input dim|other keepdim")
def extreme(watch: Watch, call: Call) -> Any:
    """The largest or smallest; ties share the gradient, the numbers of the rows are not told."""
    if call.name in ("max", "min") and isinstance(call.get("dim"), Tensor):
        return RULES["maximum"](watch, call)
    of = _reduced(watch, call)
    if not of.over_rows:
        return _local(call, of)
    sign = 1 if call.name.endswith("max") else -1
    if call.name in ("max", "min") and call.get("dim") is not None:
        return ValuesOnly(mark(extreme_over_rows(watch, of, sign, only_first=True), None))
    return mark(extreme_over_rows(watch, of, sign), None)


def extreme_over_rows(watch: Watch, of: Reduced, sign: int, only_first: bool = False) -> Tensor:
    """The largest (sign 1) or smallest (-1) over rows of all ranks.

    Those that are equal share the gradient; or the first of them, by its global number, has it.
    """
    mine = watch.counted(of.tensor)
    dtype = mine.dtype
    mine = mine if dtype.is_floating_point else mine.to(torch.int64)
    best = sign * largest(_best_here(sign * mine.detach(), of), watch.part)
    if dtype.is_floating_point:
        chosen = mine.detach() == best
        share = (_first(watch, chosen, of) if only_first else chosen).to(dtype)
        ties = summed(share.sum(of.dims, keepdim=True), watch.part)
        carrier = torch.where(share > 0, mine, 0.0).sum(of.dims, keepdim=True)
        best = with_gradient_of(best, summed(carrier, watch.part) / ties)
    best = best.to(dtype)
    return best if of.keep else best.squeeze(of.dims)


def _best_here(values: Tensor, of: Reduced) -> Tensor:
    if values.numel():
        return values.amax(of.dims, keepdim=True)
    lowest = -math.inf if values.is_floating_point() else torch.iinfo(values.dtype).min + 1
    return values.new_full([1 if dim in of.dims else size for dim, size in enumerate(values.shape)], lowest)


def _first(watch: Watch, chosen: Tensor, of: Reduced) -> Tensor:
    """Of the chosen rows of each column the one of the smallest number."""
    axis = of.rows.axis
    keys = axis.keys if axis.counted is None else axis.keys[axis.counted]
    shape = [-1 if dim == of.rows.dim else 1 for dim in range(chosen.dim())]
    ours = torch.where(chosen, keys.view(shape), torch.iinfo(torch.int64).max)
    return ours == -largest(_best_here(-ours, of), watch.part)


@rule("any", "all", "count_nonzero", takes="input dim keepdim")
def truth(watch: Watch, call: Call) -> Any:
    """Whether, or how often, something holds anywhere in the whole graph."""
    of = _reduced(watch, call)
    if not of.over_rows:
        return _local(call, of)
    holds = watch.counted(of.tensor).bool()
    wanted = ~holds if call.name == "all" else holds
    number = summed(wanted.sum(of.dims, keepdim=of.keep), watch.part)
    result = number if call.name == "count_nonzero" else number == 0 if call.name == "all" else number > 0
    return mark(result, None)


@rule(
    "norm",
    "linalg_vector_norm",
    "vector_norm",
    "linalg_norm",
    "linalg_matrix_norm",
    takes="input|A p|ord dim keepdim",
)
def norm(watch: Watch, call: Call) -> Any:
    """Norms of features, of vectors and matrices; over rows the Euclidean one."""
    of_matrix = call.name == "linalg_matrix_norm"
    given = call.get("p", "fro" if of_matrix else None)
    power = 2 if given in (None, "fro") else given
    of = _reduced(watch, call if call.get("dim") is not None or not of_matrix else call.but(dim=(-2, -1)))
    of_matrix |= call.name == "linalg_norm" and given is not None and len(of.dims) == 2
    if not of.over_rows:
        return _local(call, of)
    if power != 2 or (of_matrix and given != "fro") or of.tensor.is_complex():
        kind = "norm of a matrix" if of_matrix else "norm"
        raise NotExact(f"a {kind} of order {power} over the {of.rows.axis.name}; only the Euclidean one is known here.")
    squares = of._replace(tensor=mark(of.tensor * of.tensor, of.rows.but()))
    return mark(_root(total_over_rows(watch, squares)), None)


def _root(squares: Tensor) -> Tensor:
    """The square root, with gradient 0 where it is 0, as torch's norm and std have it."""
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), squares)


@rule("logsumexp", takes="input dim keepdim")
def logsumexp(watch: Watch, call: Call) -> Any:
    """The logarithm of a sum of exponentials."""
    of = _reduced(watch, call)
    if not of.over_rows:
        return _local(call, of)
    top = extreme_over_rows(watch, of._replace(keep=True), 1).detach()
    above = of._replace(tensor=mark((of.tensor - top).exp(), of.rows.but()), keep=True)
    result = total_over_rows(watch, above).log() + top
    return mark(result if of.keep else result.squeeze(of.dims), None)


def softmax_over_rows(watch: Watch, call: Call, dim: int) -> Tensor:
    """Softmax of each column over all rows of the graph."""
    tensor = call.get("input")
    rows = watch.known(tensor)
    if call.kwargs.get("dtype") is not None:
        tensor = mark(tensor.to(call.kwargs["dtype"]), rows.but())
    of = Reduced(tensor, rows, (dim % tensor.dim(),), True, None)
    apart = tensor - extreme_over_rows(watch, of, 1).detach()
    total = total_over_rows(watch, of._replace(tensor=mark(apart.exp(), rows.but())))
    result = apart - total.log() if call.name == "log_softmax" else apart.exp() / total
    return mark(result, rows.but())


@rule(
    *words(
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits nll_loss "
        "cross_entropy kl_div"
    )
)
def loss(watch: Watch, call: Call) -> Any:
    """Losses of rows: their sum or mean over the whole graph."""
    if not inspect.isfunction(call.func):
        raise NotExact(f"torch.{call.name}; use torch.nn.functional.{call.name}.")
    given = inspect.signature(call.func).bind(*call.args, **call.kwargs).arguments
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise NotExact(
            f"{call.name} with size_average or reduce, which torch is to drop; pass reduction='sum' or 'mean'."
        )
    how = given.pop("reduction", "mean")
    by_class = call.name in ("nll_loss", "cross_entropy")
    if given.get("weight") is not None and how == "mean" and (by_class or call.name not in _WEIGHT_IN_SUMMANDS):
        raise NotExact(f"a weighted mean inside {call.name}; take reduction='none' and divide by the weights' sum.")
    if how not in ("none", "mean", "sum", "batchmean"):
        raise NotExact(f"{call.name} with reduction={how!r}.")
    tensors = [given["input"], given["target"]]
    known = [watch.rows(tensor) if isinstance(tensor, Tensor) else None for tensor in tensors]
    if any(rows is None or rows.dim != 0 for rows in known) or not (by_class or tensors[0].dim() == tensors[1].dim()):
        raise NotExact(f"{call.name} compares rows with something else than the same rows.")
    axis, fresh = axis_and_freshness(known, call.name)
    others = {name: value for name, value in given.items() if name not in ("input", "target")}
    call = watch.common(replace(call, args=tensors, kwargs={**others, "reduction": "none"}))
    each = mark(call(), Rows(axis, 0, fresh))
    return each if how == "none" else _over_all(watch, call, each, tensors[1], how)


_WEIGHT_IN_SUMMANDS = ("binary_cross_entropy", "binary_cross_entropy_with_logits")  # their mean is over all entries


def _over_all(watch: Watch, call: Call, each: Tensor, target: Tensor, how: str) -> Tensor:
    """The sum or mean of the losses of all rows."""
    of = Reduced(each, watch.known(each), tuple(range(each.dim())), False, None)
    total = total_over_rows(watch, of)
    if how == "sum":
        return mark(total, None)
    if call.name in ("nll_loss", "cross_entropy") and not target.is_floating_point():
        with watch.in_other_words():
            number = (target != call.kwargs.get("ignore_index", -100)).sum()
        return mark(total / number, None)
    return mark(total / (of.rows.axis.total if how == "batchmean" else of.num_summed()), None)
