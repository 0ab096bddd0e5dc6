"""Products with matrices, of each row, or over all rows with a share on each rank; norms of layers and batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from domainpar.placed import exact
from domainpar.placed.dispatch import aten, bound, decided, name_of, otherwise, rule, rule_of_rows
from domainpar.placed.moves import local_rows, plain
from domainpar.placed.ranks import NotExact, Sum
from domainpar.placed.rules.each_row import call_each_row, share
from domainpar.placed.rules.reductions import total_of
from domainpar.placed.tensor import Placed, is_rows, placed_in, same, settle


@rule(aten.mm, aten.bmm)
def _mm(func: Any, args: Any, kwargs: Any) -> Any:
    a, b = args[0], args[1]
    for x in (a, b):
        if isinstance(x, Placed) and type(x.place) is not Sum:
            settle(x)
    rows = a if is_rows(a) else b if is_rows(b) else None
    if rows is None:
        ranks = placed_in(args)[0].ranks
        shares = [isinstance(x, Placed) and type(x.place) is Sum for x in (a, b)]
        alone = shares[0] != shares[1]
        here = [x.local if alone and of_sum else plain(x, ranks) for x, of_sum in zip((a, b), shares)]
        return Placed(func(*here), ranks.total if alone else ranks.same)
    axis, dim, ranks = rows.place.axis, rows.place.dim, rows.ranks
    last = a.dim() - 1
    if a.size(last) != b.size(last - 1):
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({tuple(a.shape)} and {tuple(b.shape)})")
    if last == 2 and dim == 0:
        both = [local_rows(a, axis, 0), local_rows(b, axis, 0)]
        out = Placed(exact.by_rows(func, both, {}, ranks, (0, 0), 0), axis.rows(0))
        alike = is_rows(a) and is_rows(b) and a.place is b.place and not ranks.same_bits
        return decided(func, args, out) if alike else out
    if dim == (last if rows is a else last - 1):
        out = _over_rows(func, local_rows(a, axis, last), local_rows(b, axis, last - 1), axis)
        alike = is_rows(a) and is_rows(b) and a.place.axis is b.place.axis and type(out.place) is Sum
        return decided(func, args, out) if alike else out
    if is_rows(a) and is_rows(b):
        if b.place.dim == last - 1:
            axis = b.place.axis
            return _over_rows(func, local_rows(a, axis, last), b.local, axis)
        raise NotExact(
            f"{name_of(func)} of {a.place} and {b.place}: all rows against all rows, as in attention over a whole "
            "graph, has no form on a split graph; write it with edges, or pool one side first"
        )
    one, other = (x.local if x is rows else plain(x, ranks) for x in (a, b))
    to = axis.rows(last - 1 if rows is a else last)
    if ranks.same_bits:
        return Placed(exact.times(one, other, rows is a), to)
    return decided(func, args, Placed(func(one, other), to))


def _over_rows(func: Any, a: Tensor, b: Tensor, axis: Any) -> Placed:
    """A product [.., n, rows] by [.., rows, m], which is a sum over all rows."""
    ranks = axis.ranks
    if not ranks.same_bits:
        return share(func(a, b), ranks)
    if a.dim() == 2:
        return same(exact.contracted(a.t(), b, ranks, axis.total), ranks)
    each = [exact.contracted(one.t(), other, ranks, axis.total) for one, other in zip(a, b)]
    return same(torch.stack(each) if each else func(a, b), ranks)


@rule(aten.addmm)
def _addmm(func: Any, args: Any, kwargs: Any) -> Any:
    bias, a, b = args
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if is_rows(a) and a.place.dim == 0 and not is_rows(b) and not is_rows(bias) and bias.dim() == 1:
        ranks = settle(a).ranks
        if ranks.same_bits and a.size(1) == b.size(0) and beta == alpha == 1 and len(bias) == b.size(1):
            return Placed(exact.times(a.local, plain(b, ranks), bias=plain(bias, ranks)), a.place)
        if not ranks.same_bits and not any(isinstance(x, Placed) and type(x.place) is Sum for x in (bias, b)):
            return decided(func, args, Placed(func(plain(bias, ranks), a.local, plain(b, ranks), **kwargs), a.place))
    return _added(bias, aten.mm(a, b), beta, alpha)


def _added(bias: Any, product: Any, beta: Any, alpha: Any) -> Any:
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (bias if beta == 1 else bias * beta)


@rule(aten.addbmm)
def _addbmm(func: Any, args: Any, kwargs: Any) -> Any:
    return _added(args[0], aten.bmm(*args[1:]).sum(0), kwargs.get("beta", 1), kwargs.get("alpha", 1))


@rule(aten.mv)
def _mv(func: Any, args: Any, kwargs: Any) -> Any:
    return aten.mm(args[0], args[1].unsqueeze(1)).squeeze(1)


@rule_of_rows(aten.native_layer_norm)
def _layer_norm(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    along_features = is_rows(x) and x.place.dim < x.dim() - len(args[1])
    return call_each_row(func, args, kwargs, x.place) if along_features else otherwise(func, args, kwargs)


@rule_of_rows(aten.native_group_norm)
def _group_norm(func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias, _, *sizes = args
    if not is_rows(x) or x.place.dim:
        return otherwise(func, args, kwargs)
    weights = [plain(w, x.ranks) if isinstance(w, Tensor) else w for w in (weight, bias)]
    return call_each_row(lambda rows: func(rows.contiguous(), *weights, len(rows), *sizes), (x,), {}, x.place)


@rule_of_rows(aten.native_layer_norm_backward, aten.native_group_norm_backward)
def _norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Torch's kernel on this rank's rows, with shares of the gradients of weights.

    With `same_bits` by other calls: bits of the kernel depend on which rows a thread has.
    """
    x, mask = args[1], args[-1]
    of_groups = func is aten.native_group_norm_backward.default
    if not is_rows(x) or x.ranks.same_bits or x.place.dim >= (1 if of_groups else x.dim() - len(args[2])):
        return otherwise(func, args, kwargs)
    axis, at, ranks = x.place.axis, x.place.dim, x.ranks
    here = [value if not isinstance(value, Tensor) else plain(value, ranks) if one.name in ("weight", "bias") else
            local_rows(value, axis, at).contiguous() for one, value in zip(func._schema.arguments, args)]  # fmt: skip
    here[5:6] = [axis.length] if of_groups else here[5:6]
    first, *shares = func(*here)
    more = (share(each, ranks) if wanted else None for each, wanted in zip(shares, mask[1:]))
    return Placed(first, x.place) if mask[0] else None, *more


@rule(aten.native_batch_norm, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats)
def batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Statistics over the rows of all ranks, around the mean of all; running ones are written as torch does."""
    x, weight, bias, *running, training, momentum, eps = bound(func, args, kwargs)
    running_mean, running_var = running or (None, None)
    if not is_rows(x) or settle(x).place.dim == 1:
        return otherwise(func, args, kwargs)
    ranks, count, local = x.ranks, x.numel() // max(1, x.size(1)), _in_full(x.local)
    if training:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        mean = total_of(local, dims, False, ranks, count) / max(1, count)
        var = total_of((local - mean.view(_channels(x))).square_(), dims, False, ranks, count) / max(1, count)
        saved = mean, (var + eps).rsqrt()
        if running_mean is not None and running_var is not None:
            for before, new in ((running_mean, mean), (running_var, var * (count / max(1, count - 1)))):
                before.copy_(same(momentum * new + (1 - momentum) * plain(before, ranks), ranks))
    else:
        mean, var = _in_full(plain(running_mean, ranks)), _in_full(plain(running_var, ranks))
        saved = mean.new_zeros(0), mean.new_zeros(0)
    weights = [_in_full(plain(w, ranks)) if isinstance(w, Tensor) else w for w in (weight, bias)]

    def normed(rows: Tensor) -> Tensor:
        out: Tensor = aten.native_batch_norm(rows, *weights, mean, var, False, 0.0, eps)[0]
        return out

    out = exact.by_rows(normed, [local], {}, ranks, [x.place.dim], x.place.dim).to(x.dtype)
    return Placed(out, x.place), *(same(each, ranks) for each in saved)


def _in_full(x: Tensor) -> Tensor:
    """Half precision converted to float32, in which torch computes its statistics."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _channels(x: Any) -> list[int]:
    return [-1 if dim == 1 else 1 for dim in range(x.dim())]


@rule(aten.native_batch_norm_backward)
def _batch_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, x, weight, running_mean, running_var, mean, rstd, training, eps, mask = args
    if not is_rows(x) or settle(x).place.dim == 1:
        return otherwise(func, args, kwargs)
    axis, at, ranks, shape = x.place.axis, x.place.dim, x.ranks, _channels(x)
    dims, count = [dim for dim in range(x.dim()) if dim != 1], x.numel() // max(1, x.size(1))
    if not training:
        mean, rstd = running_mean, (plain(running_var, ranks) + eps).rsqrt()
    mean, rstd = _in_full(plain(mean, ranks)).view(shape), _in_full(plain(rstd, ranks)).view(shape)
    grad, around = _in_full(local_rows(grad, axis, at)), _in_full(x.local) - mean
    summed, dtype = training or not ranks.in_backward, x.dtype if weight is None else weight.dtype
    both, along = torch.stack([grad, around * grad]), [dim + 1 for dim in dims]
    summed = summed or ranks.same_bits
    sums = total_of(both, along, False, ranks, count) if summed else both.sum(along)
    of_grad, with_grad = sums.unbind()
    scale = rstd if weight is None else rstd * plain(weight, ranks).view(shape)

    def through(grad: Tensor, around: Tensor) -> Tensor:
        if not training:
            return grad.mul(scale)
        by_spread = with_grad.view(shape) * rstd * rstd / -count
        out: Tensor = (grad - (of_grad.view(shape) / count)).addcmul_(around, by_spread)
        return out.mul_(scale)

    first = exact.by_rows(through, [grad, around], {}, ranks, [at, at], at)
    of_weights = ((with_grad * rstd.view(-1)).to(dtype), of_grad.to(dtype))
    others = [Placed(each, ranks.same if summed else ranks.total) for each in of_weights]
    first = Placed(first.to(x.dtype), axis.rows(at))
    return first, *(each if wanted else None for each, wanted in zip(others, mask[1:]))
