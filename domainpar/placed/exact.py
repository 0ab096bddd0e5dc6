"""The same bits on any number of ranks: sums over rows as integers, and calls that compute each row by itself.

Here is all arithmetic that would depend on which rows a rank has. With `GraphRanks.same_bits` rules
call these functions, also on one rank; the collectives run on every rank. `docs/same_bits.md` says why they suffice.

A sum over rows takes its scale from the largest magnitude in each column, over all ranks. Non-finite numbers have no
integer: if a column has any, they alone are summed as floats, and their sum, NaN or infinite in any order, replaces
that of the integers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from domainpar.nn import COLUMN_BLOCK
from domainpar.placed import exact_kernels as kernels
from domainpar.placed.ranks import GraphRanks, NotExact

ALIKE = 64  # rows; torch computes the last few numbers of a tensor by other formulas, unless there are no last few
ONE_THREAD = 32_768  # numbers that torch leaves to one thread
SLICE_BITS, SUM_BITS = 21, 50  # of an integer; fewer where there are so many rows that their sum would not fit 63
LOWEST = -960  # of exponents; smaller numbers would overflow when they are scaled
_BITS = {torch.float32: (torch.int32, 0x7F80_0000, 23, 126), torch.float64: (torch.int64, 0x7FF << 52, 52, 1022)}

# Calls whose numbers torch computes each by one operation, rounded at most once, wherever it lies.
_ROUNDED_ONCE = """
add.Tensor sub.Tensor mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default abs.default sqrt.default clone.default
_to_copy.default ceil.default floor.default round.default trunc.default where.self where.ScalarOther where.ScalarSelf
where.Scalar masked_fill.Scalar masked_fill.Tensor fill.Scalar fill.Tensor threshold_backward.default eq.Tensor
eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar
isnan.default isinf.default logical_and.default logical_or.default logical_not.default bitwise_and.Tensor
bitwise_or.Tensor bitwise_not.default nan_to_num.default lift_fresh.default zeros_like.default ones_like.default
"""
ROUNDED_ONCE = {getattr(getattr(torch.ops.aten, name), of) for name, of in re.findall(r"(\w+)\.(\w+)", _ROUNDED_ONCE)}


class _Table:
    """Numbers [n, C] whose columns are summed.

    Attributes:
        rows: The numbers; those that are not finite as 0.
        exponents: The magnitudes of each column are below 2 to this power, on all ranks; int64 [C].
        rest: What is not finite, beside zeros; None if all numbers of all ranks are.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.contiguous()
        self.exponents = rows.new_zeros(rows.size(1), dtype=torch.int64)
        self.rest: Tensor | None = None

    def largest(self) -> Tensor:
        """Bits of the largest magnitude of each column here, int64 [C]."""
        integers, infinite, _, _ = _BITS[self.rows.dtype]
        out = self.rows.new_zeros(self.rows.size(1), dtype=integers)
        magnitude = infinite | (infinite & -infinite) - 1
        kind = out.numpy().dtype.type
        kernels.largest_bits(self.rows.view(integers).numpy(), kind(magnitude), out.numpy())
        return out.long()

    def scales(self, bits: int) -> Any:
        """The factor that turns each column into integers of some bits, float64 [C]."""
        return _power(bits - self.exponents).numpy()


def _power(exponents: Tensor) -> Tensor:
    """Two to the power of integers, float64, exactly."""
    return torch.from_numpy(np.ldexp(1.0, exponents.numpy()))


def _tables(given: Sequence[Tensor], ranks: GraphRanks) -> list[_Table]:
    """Tables with the exponents of their columns. *Collective*."""
    tables = [_Table(rows.detach()) for rows in given]
    infinite = torch.cat([x.new_full((x.size(1),), _BITS[x.dtype][1], dtype=torch.int64) for x in given])
    largest = _largest(tables, ranks)
    if bool((largest >= infinite).any()):  # all ranks see it, and compute the exponents again without such numbers
        for table in tables:
            finite = table.rows.isfinite()
            table.rest = table.rows.masked_fill(finite, 0.0)
            table.rows = table.rows.masked_fill(~finite, 0.0)
        largest = _largest(tables, ranks)
    for table, bits in zip(tables, largest.split([x.size(1) for x in given])):
        _, _, mantissa, bias = _BITS[table.rows.dtype]
        table.exponents = ((bits >> mantissa) - bias).clamp_min(LOWEST)
    return tables


def _largest(tables: list[_Table], ranks: GraphRanks) -> Tensor:
    bits = torch.cat([table.largest() for table in tables])
    if ranks.size > 1:
        ranks.num_sums += 1
        ranks.log.call(f"the largest magnitudes of {len(bits)} columns")
        ranks.transport.all_reduce(bits, "max")
    return bits


def _wide(x: Tensor) -> Tensor:
    """Numbers in the type of their sum: half precision in float32."""
    if x.is_complex():
        raise NotExact("a sum of complex numbers over rows, with the same bits asked for: sum torch.view_as_real(x)")
    return x if x.dtype in _BITS else x.float()


def _with_rest(total: Tensor, rest: Tensor | None) -> Tensor:
    """Sums, replaced by `rest` where numbers were not finite."""
    if rest is None:
        return total
    return torch.where(rest.isfinite(), total, torch.where(rest.isnan(), math.nan, rest).to(total.dtype))


def summed(local: Tensor, dims: Sequence[int], keepdim: bool, ranks: GraphRanks, count: int) -> Tensor:
    """The sum along dimensions, one of them that of rows; the same on every rank. *Collective*.

    Args:
        local: This rank's rows.
        dims: The dimensions.
        keepdim: Whether they stay, with length 1.
        ranks: The ranks.
        count: Number of terms on all ranks.

    Raises:
        NotExact: If it is complex.
    """
    if not local.dtype.is_floating_point and not local.is_complex():
        return ranks.added(local.sum(list(dims), keepdim))
    kept = [dim for dim in range(local.dim()) if dim not in dims]
    shape = [1 if dim in dims else size for dim, size in enumerate(local.shape)]
    shape = shape if keepdim else [local.size(dim) for dim in kept]
    columns = math.prod(local.size(dim) for dim in kept)
    rows = local.permute(*dims, *kept).reshape(math.prod(local.size(dim) for dim in dims), columns)
    places = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    return added_at(rows, places, 1, ranks, count, lambda sums: ranks.added(sums, any_order=True)).view(shape)


def added_at(
    what: Tensor, rows: Tensor, places: int, ranks: GraphRanks, terms: int, home: Callable[..., Tensor]
) -> Tensor:
    """Rows [n, C] added up at places, [places, C] after `home` has combined those of all ranks. *Collective*.

    Args:
        what: This rank's rows.
        rows: The place of each, int64 [n].
        places: How many there are here.
        ranks: The ranks.
        terms: Number of rows on all ranks.
        home: Combines sums of all ranks, of integers or floats, [places, any].
    """
    wide = _wide(what)
    (table,) = _tables([wide], ranks)
    bits = min(SUM_BITS, 61 - max(1, terms).bit_length())  # of integers of which so many fit into 63
    integers = 1 if wide.dtype is torch.float32 else 2
    sums = wide.new_zeros(places, integers, wide.size(1), dtype=torch.int64)
    kernels.add_integers(table.rows.numpy(), table.scales(bits), 2.0**bits, rows.contiguous().numpy(), sums.numpy())
    rest = None
    if table.rest is not None:
        rest = home(table.rest.new_zeros(places, table.rest.size(1)).index_add_(0, rows, table.rest))
    total = home(sums.view(places, integers * wide.size(1)))
    total = total.view(len(total), integers, wide.size(1)).contiguous()
    out = table.rows.new_empty(len(total), wide.size(1))
    kernels.as_floats(total.numpy(), 2.0**bits, _power(table.exponents - bits).numpy(), out.numpy())
    return _with_rest(out, rest).to(what.dtype)


def contracted(a: Tensor, b: Tensor, ranks: GraphRanks, terms: int) -> Tensor:
    """`a.T @ b` of [n, K] and [n, M]: a sum over the rows of all ranks, [K, M]. *Collective*.

    Three products of integers for float32, which keep 2^-42 of the largest number of each column; six for float64.
    """
    dtype = a.dtype
    of_a, of_b = _tables([_wide(a), _wide(b)], ranks)
    bits, columns = min(SLICE_BITS, (60 - max(1, terms).bit_length()) // 2), b.size(1)
    padded = -(-columns // COLUMN_BLOCK) * COLUMN_BLOCK
    levels = 2 if of_a.rows.dtype is torch.float32 else 3
    out = a.new_zeros(levels, a.size(1), padded, dtype=torch.int64)
    scales = of_a.scales(bits), of_b.scales(bits)
    kernels.add_products(of_a.rows.numpy(), of_b.rows.numpy(), *scales, 2.0**bits, padded, out.numpy())
    sums = ranks.added(out)[..., :columns].double()  # in each level of what the one before left
    value = torch.zeros_like(sums[0])
    for number, of_level in enumerate(sums):
        value += of_level * 2.0 ** (-bits * number)
    value = value * _power(of_a.exponents - bits).view(-1, 1) * _power(of_b.exponents - bits)
    if of_a.rest is None:
        return value.to(dtype)
    odd = [ranks.added((~x.isfinite()).sum(0)) > 0 for x in (a, b)]
    rest = ranks.added(a.double().t() @ b.double(), any_order=True)
    return _with_rest(value, torch.where(odd[0].view(-1, 1) | odd[1], rest, 0.0)).to(dtype)


def times(a: Tensor, b: Tensor, rows_first: bool = True, bias: Tensor | None = None) -> Tensor:
    """`a @ b`, where `a` has rows along its second last dimension, or else `b` along its last one.

    Each row of the result is a chain of multiply-adds in the order of the row's numbers, whatever other rows there are.
    """
    if a.is_complex() or b.is_complex():
        raise NotExact("a product of complex rows, with the same bits asked for: multiply real and imaginary parts")
    if not rows_first:
        return times(b.mT, a.mT).mT
    if a.dim() == 3:
        return torch.stack([times(one, other) for one, other in zip(a, b)]) if len(a) else a @ b
    if a.dtype is not b.dtype or (bias is not None and bias.dtype is not a.dtype):
        return a[:0] @ b  # torch's own error
    dtype, rows, columns = a.dtype, _wide(a.detach()).contiguous(), b.size(1)
    padded = -(-columns // COLUMN_BLOCK) * COLUMN_BLOCK
    weight, beside = rows.new_zeros(b.size(0), padded), rows.new_zeros(padded)
    weight[:, :columns] = b.detach()
    if bias is not None:
        beside[:columns] = bias.detach()
    out = rows.new_empty(len(rows), columns)
    kernels.times(rows.numpy(), weight.numpy(), beside.numpy(), out.numpy())
    return out.to(dtype)


def alike(call: Callable[..., Any], rows: Sequence[Tensor], dims: Sequence[int], out_dim: int) -> Any:
    """Call a function of rows so that the bits of each row do not depend on the other rows.

    Torch computes a tensor's last few numbers, and those where a thread's share ends, by other formulas than all
    others. So the last rows are computed again, among `ALIKE` rows, and threads get whole calls.

    Args:
        call: The function of the tensors; it treats each row by itself.
        rows: The tensors.
        dims: The dimension of rows of each.
        out_dim: That of the result, or of each of several.
    """
    length = rows[0].size(dims[0])
    tables = [x.movedim(dim, 0).contiguous() for x, dim in zip(rows, dims)]
    several = True

    def run(first: int, last: int, filled: bool = True) -> list[Tensor]:
        nonlocal several
        count, pieces = last - first, [x[first:last] for x in tables]
        if filled and (count % ALIKE or not count):
            more = -count % ALIKE or ALIKE
            last_row = [x[-1:] if count else x.new_ones(1, *x.shape[1:]) for x in pieces]
            pieces = [torch.cat([x, one.expand(more, *x.shape[1:])]) for x, one in zip(pieces, last_row)]
        out = call(*(x.movedim(0, dim) for x, dim in zip(pieces, dims)))
        several = isinstance(out, (tuple, list))
        return [each.movedim(out_dim, 0)[:count] for each in (out if several else [out])]

    last = length - length % ALIKE
    if last and torch.get_num_threads() > 1:
        bounds = [*range(0, last, _rows_of_one_thread(run(0, ALIKE), tables)), last]
        bounds += [length] if last < length else []
        made = [torch.cat(of_one) for of_one in zip(*(run(*pair) for pair in pairwise(bounds)))]
    elif last:
        made = run(0, length, False)
        for each, tail in zip(made, run(last, length) if last < length else ()):
            each[last:] = tail
    else:
        made = run(0, length)
    made = [each.movedim(0, out_dim) for each in made]
    return tuple(made) if several else made[0]


def _rows_of_one_thread(out: list[Tensor], tables: list[Tensor]) -> int:
    """A number of rows, a multiple of `ALIKE`, that torch leaves to one thread, or deals out evenly."""
    width = max(1, *(math.prod(x.shape[1:]) for x in (*out, *tables)))
    threads = min(torch.get_num_threads(), -(-ALIKE * width // ONE_THREAD))
    if ALIKE % threads:
        raise NotExact(
            f"rows of {width} numbers by {torch.get_num_threads()} threads, with the same bits asked for: use one, two "
            "or four (torch.set_num_threads)"
        )
    return max(ALIKE, ONE_THREAD // width // ALIKE * ALIKE)


def by_rows(func: Any, here: Sequence[Any], kwargs: Any, ranks: GraphRanks, dims: Sequence[Any], out_dim: int) -> Any:
    """A call on what this rank holds that treats each row by itself; with the same bits if `same_bits` is set.

    Args:
        func: The call.
        here: Its arguments, of which this rank holds rows.
        kwargs: Its arguments by name.
        ranks: The ranks.
        dims: For each argument, then for each by name, the dimension of its rows; None where it has none.
        out_dim: The dimension of rows of the result.
    """
    if not ranks.same_bits or (func in ROUNDED_ONCE and "alpha" not in kwargs):
        return func(*here, **kwargs)
    values = [*here, *kwargs.values()]
    at = [number for number, dim in enumerate(dims) if dim is not None]

    def call(*rows: Tensor) -> Any:
        every = list(values)
        for number, x in zip(at, rows):
            every[number] = x
        return func(*every[: len(here)], **dict(zip(kwargs, every[len(here) :])))

    return alike(call, [values[number] for number in at], [dims[number] for number in at], out_dim)
