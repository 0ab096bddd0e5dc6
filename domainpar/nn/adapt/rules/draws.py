"""Random numbers that do not depend on who draws them: the same for a row wherever it is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.calls import DROPS, Call, words
from domainpar.nn.adapt.rows import Axis, NotExact, RowCount, Rows, mark
from domainpar.nn.adapt.watch import RULES, Watch, rule
from domainpar.nn.noise import dropout_mask, random_bits


@rule("dropout", "native_dropout", takes="input p training inplace")
def dropout(watch: Watch, call: Call) -> Any:
    """Numbers that are dropped by the global number of their row, so that ghosts agree with their owners."""
    given, rate, training = call.get("input"), call.get("p", 0.5), call.drops
    rows = watch.rows(given)
    if call.name == "native_dropout":
        raise NotExact("torch.native_dropout; use torch.nn.functional.dropout.")
    if not training or rate == 0:
        return given
    kept = torch.zeros_like(given) if rate >= 1 else _mask(watch, given, rows, rate)
    result = given.mul_(kept) if call.in_place or call.get("inplace", False) else given * kept
    return mark(result, None if rows is None else rows.but())


@rule("rand", takes="size*")
@rule("rand_like", takes="input")
def uniform(watch: Watch, call: Call) -> Any:
    """Uniform numbers in [0, 1), one for each row's global number."""
    if call.name == "rand_like":
        like = call.get("input")
        rows, shape, device, dtype = watch.rows(like), like.shape, like.device, like.dtype
    else:
        sizes = call.get("size", [])
        dims = [dim for dim, length in enumerate(sizes) if type(length) is RowCount]
        rows = Rows(sizes[dims[0]].axis, dims[0]) if dims else None
        if len(dims) > 1:
            raise NotExact("torch.rand of rows by rows would join every row with every other one.")
        if rows is not None:
            rows.fresh = watch.starts_fresh(rows.axis)
        lengths = [length.axis.length if type(length) is RowCount else length for length in sizes]
        shape, device, dtype = torch.Size(lengths), call.kwargs.get("device"), None
    dtype = call.kwargs.get("dtype") or dtype or torch.get_default_dtype()
    bits = _bits(watch, shape, rows, device or "cpu")
    return mark((bits >> 8).to(dtype) * 2.0**-24, None if rows is None else rows.but())


def _mask(watch: Watch, given: Tensor, rows: Rows | None, rate: float) -> Tensor:
    table = _Table.of(watch, given.shape, rows)
    return table.shaped(dropout_mask(table.ids, watch.noise_key(), table.width, rate, given))


def _bits(watch: Watch, shape: torch.Size, rows: Rows | None, device: Any) -> Tensor:
    """32 random bits for each number of a tensor, in int64."""
    table = _Table.of(watch, shape, rows)
    return table.shaped(random_bits(table.ids, watch.noise_key(), table.width, device))


class _Table(NamedTuple):
    """A tensor seen as a table of rows with ids.

    Attributes:
        ids: Of the rows, the same on every rank that has them.
        others: The other dimensions.
        dim: Where the rows are.
    """

    ids: Tensor
    others: tuple[int, ...]
    dim: int | None

    @classmethod
    def of(cls, watch: Watch, shape: torch.Size, rows: Rows | None) -> _Table:
        if not shape:
            return cls(torch.zeros(1, dtype=torch.int64), (), None)
        dim = 0 if rows is None else rows.dim
        others = tuple(length for at, length in enumerate(shape) if at != dim)
        return cls(torch.arange(shape[0]) if rows is None else _ids(watch, rows.axis, shape[dim]), others, dim)

    @property
    def width(self) -> int:
        return math.prod(self.others)

    def shaped(self, table: Tensor) -> Tensor:
        """A table [rows, width] in the shape of the tensor."""
        return table[0, 0] if self.dim is None else table.view(-1, *self.others).movedim(0, self.dim)


def _ids(watch: Watch, axis: Axis, length: int) -> Tensor:
    with_ghosts = axis is watch.part.node_axis and length == watch.part.plan.num_local
    return watch.part.local_ids if with_ghosts else axis.keys


@rule(
    *words(
        "alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d feature_dropout bernoulli randn randn_like "
        "randint randint_like randperm normal uniform multinomial exponential poisson rrelu cauchy geometric "
        "log_normal random"
    ),
    takes="input lower upper training",
)
def other_draws(watch: Watch, call: Call) -> Any:
    """All other random numbers; nothing is drawn in evaluation."""
    if call.name in DROPS and not call.drops:
        return call.get("input")
    if call.name == "rrelu" and not call.get("training", False):
        return RULES["leaky_relu"](watch, call)
    raise NotExact(
        f"torch.{call.name} draws random numbers that would be others on each rank; dropout, rand and rand_like are "
        "drawn by the global number of a row and may be used."
    )
