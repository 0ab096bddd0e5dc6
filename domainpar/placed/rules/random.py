"""Random numbers: functions of a key that all ranks share and of the number of a row in the whole graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from domainpar.nn.noise import dropout_mask, random_bits
from domainpar.placed.axes import Rows
from domainpar.placed.dispatch import aten, bound, name_of, rule, written
from domainpar.placed.exact import alike
from domainpar.placed.ranks import NotExact
from domainpar.placed.tensor import Placed, settle

Uniform = Callable[[int], Tensor]


def _keyed(x: Placed) -> tuple[int, Tensor, int]:
    """A key that all ranks share, the numbers of this rank's rows, and numbers a row. *Collective*."""
    settle(x)
    key, place = x.ranks.draw(), x.place
    if type(place) is Rows:
        return key, place.axis.ids, x.numel() // max(1, place.axis.total)
    total = x.size(0) if x.dim() else 1
    return key, torch.arange(total, device=x.device), x.numel() // max(1, total)


def _in_shape(numbers: Tensor, x: Placed) -> Placed:
    """Numbers of rows, [rows, numbers a row], in the shape of a tensor."""
    dim = x.place.dim if type(x.place) is Rows else 0
    rest = [size for at, size in enumerate(x.shape) if at != dim]
    numbers = numbers.view(len(numbers), *rest).movedim(0, dim) if x.dim() else numbers.view(())
    return Placed(numbers.contiguous(), x.place)


def drawn(x: Placed, dtype: torch.dtype, make: Callable[[Uniform], Tensor]) -> Placed:
    """Random numbers in the shape of a tensor. *Collective*.

    Args:
        x: The tensor.
        dtype: Of the numbers.
        make: Makes them from numbers uniform in (0, 1), float64; it is called with a function that gives set 0, 1, ...
    """
    key, ids, width = _keyed(x)

    def made(ids: Tensor) -> Tensor:
        return make(lambda number: (random_bits(ids, key + number, width, x.device).double() + 0.5) * 2.0**-32)

    numbers = alike(made, [ids], [0], 0) if x.ranks.same_bits else made(ids)
    return _in_shape(numbers.to(dtype), x)


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name.

    Raises:
        NotExact: If a generator is one of them.
    """
    given = dict(zip((argument.name for argument in func._schema.arguments), bound(func, args, kwargs)))
    if given.pop("generator", None) is not None:
        raise NotExact(f"{name_of(func)} with a generator, which each rank has for itself; leave it out")
    return given


@rule(aten.bernoulli_.float)
def bernoulli_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """The masks of dropout, by a compiled kernel on the host."""
    x, chance = _given(func, args, kwargs).values()
    if not 0 < chance < 1:
        return x.fill_(float(chance >= 1))
    return written(x, _in_shape(_kept(x, 1 - chance).to(x.dtype), x), ())


def _kept(x: Placed, rate: float) -> Tensor:
    """What a dropout keeps, bool [rows, numbers a row], on a GPU as on a CPU. *Collective*."""
    key, ids, width = _keyed(x)
    return dropout_mask(ids, key, width, rate, torch.empty(0, dtype=torch.float32, device=x.device)) != 0


def _normal(uniform: Uniform) -> Tensor:
    return (-2 * uniform(0).log()).sqrt() * (2 * math.pi * uniform(1)).cos()  # Box and Muller


@rule(aten.rand_like, aten.randn_like)
def _like(func: Any, args: Any, kwargs: Any) -> Any:
    make = _normal if func is aten.randn_like.default else (lambda uniform: uniform(0))
    return drawn(args[0], kwargs.get("dtype") or args[0].dtype, make)


@rule(aten.randint_like.default, aten.randint_like.low_dtype)
def _randint_like(func: Any, args: Any, kwargs: Any) -> Any:
    low, high = (0, args[1]) if func is aten.randint_like.default else args[1:3]
    dtype = kwargs.get("dtype") or args[0].dtype
    return drawn(args[0], dtype, lambda uniform: (low + (high - low) * uniform(0)).floor())


@rule(aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli_.Tensor)
def _bernoulli(func: Any, args: Any, kwargs: Any) -> Any:
    x, *more = _given(func, args, kwargs).values()
    out = (drawn(x, torch.float64, lambda uniform: uniform(0)) < (more[0] if more else x)).to(x.dtype)
    return written(x, out, ()) if func is aten.bernoulli_.Tensor else out


@rule(aten.native_dropout.default)
def _native_dropout(func: Any, args: Any, kwargs: Any) -> Any:
    x, rate, train = args
    if not train or rate == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask: Any = _in_shape(_kept(x, rate), x) if rate < 1 else torch.zeros_like(x, dtype=torch.bool)
    return x * mask * (1 / (1 - rate) if rate < 1 else 0.0), mask


@rule(aten.uniform_.default, aten.normal_.default, aten.exponential_.default,
      aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default)  # fmt: skip
def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    given = _given(func, args, kwargs)
    x, make = given.pop("self"), _MAKE[func]
    return written(x, drawn(x, x.dtype, lambda uniform: make(uniform, **given)), ())


_MAKE: dict[Any, Callable[..., Tensor]] = {
    aten.uniform_.default: lambda uniform, to=1.0, **more: more["from"] + (to - more["from"]) * uniform(0),
    aten.normal_.default: lambda uniform, mean=0.0, std=1.0: mean + std * _normal(uniform),
    aten.exponential_.default: lambda uniform, lambd=1.0: -uniform(0).log() / lambd,
    aten.log_normal_.default: lambda uniform, mean=1.0, std=2.0: (mean + std * _normal(uniform)).exp(),
    aten.cauchy_.default: lambda uniform, median=0.0, sigma=1.0: median + sigma * (math.pi * (uniform(0) - 0.5)).tan(),
    aten.geometric_.default: lambda uniform, p=0.5: (uniform(0).log() / math.log1p(-p)).ceil().clamp(min=1),
}


@rule(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def _normal_rule(func: Any, args: Any, kwargs: Any) -> Any:
    mean, std = (*args, *((1.0,) if len(args) < 2 else ()))[:2]
    like_one = mean if isinstance(mean, Placed) else std
    return mean + std * drawn(like_one, like_one.dtype, _normal)


@rule(aten.multinomial.default)
def multinomial(func: Any, args: Any, kwargs: Any) -> Any:
    """One of each row's columns, by its weights."""
    x, count = args[0], args[1]
    if x.dim() != 2 or count != 1 or (type(x.place) is Rows and x.place.dim != 0):
        raise NotExact(f"{name_of(func)} of {x.place}: draws among all rows; draw one of the columns of each row")
    sums = x.double().cumsum(1)
    where = drawn(x[:, :1], torch.float64, lambda uniform: uniform(0)) * sums[:, -1:]
    return (sums <= where).sum(1, keepdim=True).clamp(max=x.size(1) - 1)


@rule(aten.rrelu_with_noise.default)
def _rrelu(func: Any, args: Any, kwargs: Any) -> Any:
    x, noise, lower, upper, training, *_ = bound(func, args, kwargs)
    if not training:
        return aten.leaky_relu(x, (lower + upper) / 2)
    slopes = torch.where(x <= 0, drawn(x, x.dtype, lambda uniform: lower + (upper - lower) * uniform(0)), 1.0)
    written(noise, slopes, ())
    return x * slopes
