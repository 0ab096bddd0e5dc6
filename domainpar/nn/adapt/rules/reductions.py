"""Sums, means, extremes and moments over the rows themselves: over all ranks, each row counted once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.across import GroupRank, largest, once_differentiable, shared_by, summed
from domainpar.nn.adapt.calls import Call, axis_and_freshness, words
from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.rows import NotExact, Rows, mark, places_of
from domainpar.nn.adapt.watch import RULES, Watch, rule


class Reduced(NamedTuple):
    """A tensor and its dimensions that are reduced; here they always stay, with length 1.

    Attributes:
        keep: Whether they stay in the result of the call.
        dtype: The type in which numbers are summed, if not their own.
    """

    tensor: Tensor
    rows: Rows
    dims: tuple[int, ...]
    keep: bool = True
    dtype: torch.dtype | None = None

    def num_summed(self) -> int:
        """How many numbers of the whole graph go into each result. *Collective* the first time."""
        return self.rows.axis.total * math.prod(self.tensor.size(dim) for dim in self.dims if dim != self.rows.dim)

    def counted_here(self) -> Tensor | None:
        """1 for each row that this rank counts, 0 for others, of a shape to multiply the tensor by; None for all 1."""
        axis, length = self.rows.axis, self.tensor.size(self.rows.dim)
        counted = axis.counted
        if counted is None and length > axis.length:  # ghosts lie behind the nodes that are owned
            counted = torch.arange(length, device=self.tensor.device) < axis.length
        shape = [-1 if dim == self.rows.dim else 1 for dim in range(self.tensor.dim())]
        return None if counted is None else counted.to(self.tensor.dtype).view(shape)

    def whole(self, tensor: Tensor) -> Tensor:
        """A result over rows as the call has it, the same on every rank."""
        return mark(tensor if self.keep else tensor.squeeze(self.dims), None)


OverRows = Callable[[Watch, Call, Reduced], Any]


def reduction(*names: str, takes: str = "input dim keepdim") -> Callable[[OverRows], OverRows]:
    """Make a function the rule of calls that reduce over rows; where the rows stay, each is reduced by itself."""

    def register(over_rows: OverRows) -> OverRows:
        @rule(*names, takes=takes)
        def reduce(watch: Watch, call: Call) -> Any:
            if isinstance(call.get("dim"), Tensor):  # `x.max(y)`
                return RULES["maximum"](watch, call)
            of = _reduced(watch, call)
            if of.rows.dim in of.dims:
                return over_rows(watch, call, of)
            result = call()
            dim = of.rows.dim if of.keep else of.rows.dim - sum(dim < of.rows.dim for dim in of.dims)
            for tensor in tensors_in(result):
                mark(tensor, of.rows.but(dim=dim))
            return result

        return over_rows

    return register


def _reduced(watch: Watch, call: Call) -> Reduced:
    tensor = call.get("input")
    rows = watch.rows(tensor)
    if rows is None:
        raise NotExact(f"torch.{call.name} of a tensor that is the same on every rank takes an argument from rows.")
    dim = call.get("dim")
    # No dimensions are all; a bool is not one: `x.var(unbiased)`.
    is_all = dim is None or dim in ((), []) or isinstance(dim, bool)
    dims = range(tensor.dim()) if is_all else (dim,) if isinstance(dim, int) else dim
    keep, dtype = bool(call.get("keepdim", False)), call.kwargs.get("dtype")
    return Reduced(tensor, rows, tuple(each % tensor.dim() for each in dims), keep, dtype)


@reduction("sum", "mean")
def add_up(watch: Watch, call: Call, of: Reduced) -> Any:
    """Sums, and means as sums divided by the number of the whole graph."""
    total = total_over_rows(watch, of, divided_by=of.num_summed() if call.name == "mean" else 1)
    return of.whole(total)


HALVES = (torch.float16, torch.bfloat16)
"""Types that torch sums in float32, and so do we."""


def total_over_rows(watch: Watch, of: Reduced, divided_by: int = 1) -> Tensor:
    """The sum over rows, of all ranks, and other dimensions, divided by a number; of `HALVES` in float32."""
    dtype = of.tensor.dtype if of.dtype is None and of.tensor.dtype in HALVES else None
    total = summed(
        watch.counted(of.tensor).sum(of.dims, keepdim=True, dtype=of.dtype if dtype is None else torch.float32),
        watch.part,
    )
    total = total if divided_by == 1 else total / divided_by
    return total if dtype is None else total.to(dtype)


@reduction("var", "std", "var_mean", "std_mean", takes="input dim unbiased keepdim")
def spread(watch: Watch, call: Call, of: Reduced) -> Any:
    """Variances and their roots, with means or without."""
    first = call.get("dim")
    unbiased = first if isinstance(first, bool) else call.get("unbiased")
    correction = call.get("correction") if unbiased is None else float(unbiased)
    mean, variance = moments(watch, of, 1 if correction is None else correction)
    spreads = of.whole(_root(variance) if call.name.startswith("std") else variance)
    return (spreads, of.whole(mean)) if call.name.endswith("mean") else spreads


def moments(watch: Watch, of: Reduced, correction: float = 0) -> tuple[Tensor, Tensor]:
    """Mean and variance over rows of all ranks and other dimensions, in two passes: first the mean."""
    if of.tensor.is_complex():
        raise NotExact("variances of complex numbers over rows.")
    mean = total_over_rows(watch, of, divided_by=of.num_summed())
    apart = watch.counted(of.tensor) - mean
    squares = summed((apart * apart).sum(of.dims, keepdim=True), watch.part)
    return mean, squares / float(max(of.num_summed() - correction, 0))  # of too few numbers nan or inf, as in torch


@rule("batch_norm", takes="input running_mean running_var weight bias training momentum eps")
@rule("instance_norm", takes="input running_mean running_var weight bias use_input_stats momentum eps")
def batch_norm(watch: Watch, call: Call) -> Any:
    """Statistics over rows; in evaluation with running statistics each row by itself.

    `batch_norm(x, mean, var, weight, bias, training, momentum, eps)`, and `instance_norm` alike: its statistics are
    taken over rows only where these are its length, as in PyG's InstanceNorm.
    """
    x = call.get("input")
    rows = watch.known(x)
    per_entry = call.name == "instance_norm"
    uses_own = call.get("use_input_stats", True) if per_entry else call.get("training", False)
    if rows.dim == 1:
        raise NotExact(f"torch.{call.name} with a feature for each of the {rows.axis.name}.")
    if not uses_own or (per_entry and rows.dim == 0 and x.dim() > 2):
        return mark(call(), rows.but())
    watch.combines_rows()
    if watch.alone:
        return mark(call(), rows.but())
    half = x.dtype in HALVES
    x, dtype = mark(x.float(), rows.but()) if half else x, x.dtype  # torch takes such statistics in float32, too
    of = Reduced(x, rows, tuple(dim for dim in range(x.dim()) if dim != 1 and not (per_entry and dim == 0)))
    count = of.num_summed()
    if count <= 1:
        raise ValueError(f"torch.{call.name} in training needs more than one value a feature; the graph has {count}.")
    with torch.no_grad():  # `_Normed` knows the way back
        mean, variance = moments(watch, of)
        averages = (("running_mean", mean), ("running_var", variance * (count / (count - 1))))
        for name, statistic in averages:
            if (running := call.get(name)) is not None:
                of_features = statistic.detach().mean([dim for dim in range(x.dim()) if dim != 1])
                running.lerp_(of_features.to(running.dtype), call.get("momentum", 0.1))
    weight, bias, shape = call.get("weight"), call.get("bias"), [1, -1] + [1] * (x.dim() - 2)
    scale, shift = (one if one is None else one.view(shape) for one in (weight, bias))
    normed = _Normed.apply(x, scale, shift, mean, torch.rsqrt(variance + call.get("eps", 1e-5)), of, watch.part)  # type: ignore[no-untyped-call]
    return mark(normed.to(dtype), rows.but())


class _Normed(torch.autograd.Function):
    """Rows less their mean, over the root of their variance, scaled and shifted; of all tables only the rows are kept.

    Every row here is normed, also a copy of one that another rank counts; mean and variance are of counted rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        of: Reduced,
        part: GroupRank,
    ) -> Tensor:
        ctx.save_for_backward(x, scale, mean, inverse)
        ctx.dims, ctx.count, ctx.counted = of.dims, of.num_summed(), of.counted_here()  # not `of`, which holds the rows
        ctx.part, ctx.has_shift = part, shift is not None
        normed = (x - mean).mul_(inverse)
        normed = normed if scale is None else normed.mul_(scale)
        return normed if shift is None else normed.add_(shift)

    @staticmethod
    @once_differentiable("batch norm in training", "call eval(), use LayerNorm, or ask for no forces (create_graph)")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, mean, inverse = ctx.saved_tensors
        gradient = grads[0]
        normed = (x - mean).mul_(inverse)
        shifts, scales = (it.sum(ctx.dims, keepdim=True) for it in (gradient, gradient * normed))
        factor = inverse if scale is None else inverse * scale
        # What mean and variance took from counted rows of all ranks goes back to them.
        of_all = ctx.part.sum_over_ranks(torch.stack([shifts, scales])) / ctx.count
        through = normed.mul_(of_all[1]).add_(of_all[0])
        if ctx.counted is not None:
            through = through.mul_(ctx.counted)
        to_x = (gradient - through).mul_(factor)
        to_scale, to_shift = (
            it.sum([dim for dim in range(x.dim()) if dim != 1], keepdim=True) if wanted else None
            for it, wanted in ((scales, scale is not None), (shifts, ctx.has_shift))
        )
        return to_x, to_scale, to_shift, None, None, None, None


class Extreme(NamedTuple):
    """The result of `max` over rows: the numbers, and the place of the first row in the whole graph that has them."""

    values: Tensor
    indices: Any


class Untold:
    """Stands for row numbers that are not known on a split graph: any use of them is refused."""

    def __init__(self, call: str) -> None:
        self._call = call

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotExact(f"{self._call} gives on a split graph the largest number, but not its row.")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotExact("row numbers of the largest values are used, which are not known on a split graph.")

    __index__ = __int__ = __bool__ = __len__ = __iter__ = __getitem__ = __invert__ = __neg__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __rand__ = __ror__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = _refuse
    __hash__ = object.__hash__


@reduction("amax", "amin")
@reduction("max", "min", takes="input dim|other keepdim")
def extreme(watch: Watch, call: Call, of: Reduced) -> Any:
    """The largest or smallest; ties share the gradient, or the first has it where torch tells which it was."""
    sign = 1 if call.name.endswith("max") else -1
    _refuse_nothing(call, of)
    if call.name in ("max", "min") and call.get("dim") is not None:
        best, first = first_over_rows(watch, of, sign)
        return Extreme(of.whole(best), of.whole(first))
    return of.whole(extreme_over_rows(watch, of, sign))


@reduction("argmax", "argmin")
def place_of_extreme(watch: Watch, call: Call, of: Reduced) -> Any:
    """The place in the whole graph of the first row that has the largest or smallest number."""
    if call.get("dim") is None:  # among all numbers, in the order of the whole graph
        with watch.in_other_words():
            flat = call.get("input").reshape(-1)
            place = flat.argmax(0) if call.name == "argmax" else flat.argmin(0)
            return place.reshape([1] * of.tensor.dim()) if of.keep else place
    _refuse_nothing(call, of)
    return of.whole(first_over_rows(watch, of, 1 if call.name == "argmax" else -1)[1])


def _refuse_nothing(call: Call, of: Reduced) -> None:
    if not of.num_summed():
        raise ValueError(f"torch.{call.name} of no rows.")


def extreme_over_rows(watch: Watch, of: Reduced, sign: int) -> Tensor:
    """The largest (sign 1) or smallest (-1) over rows of all ranks; those that are equal share the gradient."""
    mine, best = _extreme(watch, of, sign)
    if mine.dtype.is_floating_point:
        best = shared_by(best, mine, mine.detach() == best, of.dims, watch.part)
    return best.to(of.tensor.dtype)


def first_over_rows(watch: Watch, of: Reduced, sign: int) -> tuple[Tensor, Tensor]:
    """The same, and the place of the first row that has it, which has the gradient; NaN is beyond all numbers."""
    mine, best = _extreme(watch, of, sign)
    chosen = mine.detach() == best
    if mine.dtype.is_floating_point:
        chosen |= mine.detach().isnan() & best.isnan()
    axis = of.rows.axis
    shape = [-1 if dim == of.rows.dim else 1 for dim in range(mine.dim())]
    keys = torch.where(chosen, axis.counted_keys.view(shape), torch.iinfo(torch.int64).max)
    first = ~largest(_best_here(~keys, of), watch.part)
    if mine.dtype.is_floating_point:
        best = shared_by(best, mine, keys == first, of.dims, watch.part)
    return best.to(of.tensor.dtype), places_of(axis, first, watch.part)


def _extreme(watch: Watch, of: Reduced, sign: int) -> tuple[Tensor, Tensor]:
    """The numbers that this rank counts, and the largest or smallest of all ranks, without gradient."""
    mine = watch.counted(of.tensor)
    mine = mine if mine.dtype.is_floating_point else mine.to(torch.int64)  # bools and bytes have no negative
    if sign > 0:
        return mine, largest(_best_here(mine.detach(), of), watch.part)
    turned = torch.neg if mine.dtype.is_floating_point else torch.bitwise_not  # the least integer has no negative
    return mine, turned(largest(_best_here(turned(mine.detach()), of), watch.part))


def _best_here(values: Tensor, of: Reduced) -> Tensor:
    if values.numel():
        return values.amax(of.dims, keepdim=True)
    lowest = -math.inf if values.is_floating_point() else torch.iinfo(values.dtype).min
    return values.new_full([1 if dim in of.dims else size for dim, size in enumerate(values.shape)], lowest)


@reduction("any", "all", "count_nonzero")
def truth(watch: Watch, call: Call, of: Reduced) -> Any:
    """Whether, or how often, something holds anywhere in the whole graph."""
    holds = watch.counted(of.tensor).bool()
    number = summed((~holds if call.name == "all" else holds).sum(of.dims, keepdim=True), watch.part)
    return of.whole(number if call.name == "count_nonzero" else number == 0 if call.name == "all" else number > 0)


@reduction(*words("norm linalg_vector_norm vector_norm linalg_norm"), takes="input|A p|ord dim keepdim")
def norm(watch: Watch, call: Call, of: Reduced) -> Any:
    """Norms of vectors over rows, of order 1 and above."""
    order = call.get("p")
    power = 2 if order in (None, "fro") else order
    is_matrix = call.name == "linalg_norm" and order not in (None, "fro") and len(of.dims) == 2
    if is_matrix or not isinstance(power, int | float) or not 1 <= power < math.inf or of.tensor.is_complex():
        raise NotExact(
            f"a norm of order {power} over the {of.rows.axis.name}; known are those of real vectors, of order 1 and "
            "above, and x.abs().amax(dim) for infinity."
        )
    # Powers of halves do not fit them; torch takes these in float32, too.
    wide = torch.float32 if of.dtype is None and of.tensor.dtype in HALVES else of.dtype
    dtype, x = of.dtype or of.tensor.dtype, of.tensor if wide is None else of.tensor.to(wide)
    powers = x * x if power == 2 else x.abs() ** power
    total = total_over_rows(watch, of._replace(tensor=mark(powers, of.rows.but()), dtype=None))
    return of.whole(_root(total, power).to(dtype))


def _root(powers: Tensor, order: float = 2) -> Tensor:
    """The root of some order, with gradient 0 where it is 0, as torch's norm and std have it."""
    positive = powers > 0
    safe = torch.where(positive, powers, 1.0)
    return torch.where(positive, safe.sqrt() if order == 2 else safe ** (1 / order), powers)


@reduction("logsumexp")
def logsumexp(watch: Watch, call: Call, of: Reduced) -> Any:
    """The logarithm of a sum of exponentials."""
    top = _extreme(watch, of, 1)[1].to(of.tensor.dtype)
    above = of._replace(tensor=mark((of.tensor - top).exp(), of.rows.but()))
    return of.whole(total_over_rows(watch, above).log() + top)


def softmax_over_rows(watch: Watch, call: Call, dim: int) -> Tensor:
    """Softmax of each column over all rows of the graph."""
    tensor = call.get("input")
    rows = watch.known(tensor)
    if call.kwargs.get("dtype") is not None:
        tensor = mark(tensor.to(call.kwargs["dtype"]), rows.but())
    of = Reduced(tensor, rows, (dim,))
    apart = tensor - _extreme(watch, of, 1)[1].to(of.tensor.dtype)
    total = total_over_rows(watch, of._replace(tensor=mark(apart.exp(), rows.but())))
    result = apart - total.log() if call.name == "log_softmax" else apart.exp() / total
    return mark(result, rows.but())


_OF_CLASSES = ("nll_loss", "cross_entropy")
_WEIGHT_IN_SUMMANDS = ("binary_cross_entropy", "binary_cross_entropy_with_logits")  # their mean is over all entries


@rule(*_OF_CLASSES, *_WEIGHT_IN_SUMMANDS, *words("mse_loss l1_loss smooth_l1_loss huber_loss kl_div"))
def loss(watch: Watch, call: Call) -> Any:
    """Losses of rows: their sum or mean over the whole graph."""
    name = call.name
    if not inspect.isfunction(call.func):
        raise NotExact(f"torch.{name}; use torch.nn.functional.{name}.")
    arguments = inspect.signature(call.func).bind(*call.args, **call.kwargs).arguments
    if arguments.pop("size_average", None) is not None or arguments.pop("reduce", None) is not None:
        raise NotExact(f"{name} with size_average or reduce, which torch is to drop; pass reduction='sum' or 'mean'.")
    how = arguments.pop("reduction", "mean")
    if arguments.get("weight") is not None and how == "mean" and name not in _WEIGHT_IN_SUMMANDS:
        raise NotExact(f"a weighted mean inside {name}; take reduction='none' and divide by the weights' sum.")
    if how not in ("none", "mean", "sum", "batchmean"):
        raise NotExact(f"{name} with reduction={how!r}.")
    logits, target = tensors = [arguments.pop("input"), arguments.pop("target")]
    of_both = [watch.rows(tensor) if isinstance(tensor, Tensor) else None for tensor in tensors]
    alike = name in _OF_CLASSES or logits.dim() == target.dim()
    if any(rows is None or rows.dim != 0 for rows in of_both) or not alike:
        raise NotExact(f"{name} compares rows with something else than the same rows.")
    axis, fresh = axis_and_freshness(of_both, name)
    each = watch.common(replace(call, args=tensors, kwargs={**arguments, "reduction": "none"}))()
    rows = Rows(axis, 0, fresh)
    mark(each, rows)
    if how == "none":
        return each
    of = Reduced(each, rows, tuple(range(each.dim())), keep=False)
    total = total_over_rows(watch, of)
    if how == "sum":
        return of.whole(total)
    if how == "batchmean":
        return of.whole(total / axis.total)
    if name in _OF_CLASSES and not target.is_floating_point():  # rows whose label is left out are not counted
        with watch.in_other_words():
            count = (target != arguments.get("ignore_index", -100)).sum()
        return of.whole(total / count)
    return of.whole(total / of.num_summed())
