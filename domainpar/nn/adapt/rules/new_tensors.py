"""Sizes that remember which rows they count, and new tensors with these rows: of one value, of row numbers, or random.

Random numbers do not depend on the rank that draws them: a row has the same numbers on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from domainpar.nn.adapt.calls import DROPS, Call, words
from domainpar.nn.adapt.rows import Axis, NotExact, RowCount, RowIndex, Rows, mark
from domainpar.nn.adapt.watch import RULES, Watch, rule
from domainpar.nn.noise import dropout_mask, random_bits


@rule("size", "shape", takes="input dim", knows_numbers=True)
def size(watch: Watch, call: Call) -> Any:
    """Sizes, in which the number of rows knows what it counts."""
    tensor, dim = call.args[0], call.get("dim")
    rows = watch.known(tensor)
    count = RowCount(rows.axis)
    if dim is None:
        return torch.Size([count if at == rows.dim else length for at, length in enumerate(tensor.shape)])
    return count if dim % tensor.dim() == rows.dim else tensor.size(dim)


@rule("python len", "numel", "nelement", knows_numbers=True)
def count(watch: Watch, call: Call) -> Any:
    """Numbers of the whole graph. Python makes that of `len` a plain integer, which does not know what it counts."""
    tensor = call.args[0]
    rows = watch.known(tensor)
    sizes = [rows.axis.total if dim == rows.dim else length for dim, length in enumerate(tensor.shape)]
    return sizes[0] if call.name == "python len" else math.prod(sizes)


def _rows_of_sizes(watch: Watch, sizes: Sequence[Any]) -> Rows | None:
    """The rows of a new tensor; None if no size is a number of rows."""
    dims = [dim for dim, size in enumerate(sizes) if type(size) is RowCount]
    if len(dims) > 1:
        raise NotExact(f"a tensor of {sizes[dims[0]]} by {sizes[dims[1]]} would join every row with every other one.")
    if not dims:
        return None
    axis = sizes[dims[0]].axis
    return Rows(axis, dims[0], watch.starts_fresh(axis))


@rule("zeros", "ones", "empty", takes="size*", knows_numbers=True)
@rule("full", takes="size", knows_numbers=True)
@rule("new_zeros", "new_ones", "new_empty", takes="input size*", knows_numbers=True)
@rule("new_full", takes="input size", knows_numbers=True)
def filled(watch: Watch, call: Call) -> Any:
    """A tensor of one value; where a size is a number of rows, it has those rows. Else it is made like rows only."""
    size = call.get("size")
    sizes = list(size) if isinstance(size, (tuple, list)) else [size]
    rows = _rows_of_sizes(watch, sizes)
    if rows is not None:
        sizes[rows.dim] = room(watch) if rows.axis is watch.part.node_axis else rows.axis.length
    return mark(call.but(size=tuple(sizes))(), rows)


@rule("zeros_like", "ones_like", "empty_like", "full_like", takes="input", knows_numbers=True)
def filled_like(watch: Watch, call: Call) -> Any:
    """A tensor of one value, with the rows of another."""
    like = call.get("input")
    rows = watch.rows(like)
    if rows is None:
        return mark(call(), None)
    if rows.axis is watch.part.node_axis:
        shape = [room(watch) if dim == rows.dim else size for dim, size in enumerate(like.shape)]
        call = call.but(input=like.detach().new_empty(shape))
    return mark(call(), rows.but(names=None, fresh=watch.starts_fresh(rows.axis)))


def room(watch: Watch) -> int:
    """The length of new tensors of nodes: sums over edges at ghosts need a place, which nobody reads: `Watch.owned`."""
    plan = watch.part.plan
    return plan.num_local if plan.edge_policy == "incident" else plan.num_owned


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
    # Integers stay this rank's numbers, as those of edge_index; of another type they are values of the whole graph.
    if numbers.dtype not in (torch.int64, torch.int32):
        numbers = (watch.part.local_ids[: axis.length] if axis is watch.part.node_axis else axis.places).to(numbers)
        return mark(numbers, Rows(axis, 0, fresh))
    return mark(numbers, Rows(axis, 0, fresh, names=(RowIndex(axis, complete=True, only_owned=True),)))


@rule("new_tensor", takes="input data")
def new_tensor(watch: Watch, call: Call) -> Any:
    """Numbers as a tensor of the type of rows."""
    like, data = call.args[0], call.get("data")
    kwargs = {name: value for name, value in call.kwargs.items() if name != "data" and value is not None}
    with watch.in_other_words():
        return torch.tensor(data, **({"dtype": like.dtype, "device": like.device} | kwargs))


@rule("dropout", takes="input p training inplace")
def dropout(watch: Watch, call: Call) -> Any:
    """Numbers that are dropped by the global number of their row, so that ghosts agree with their owners."""
    x, rate = call.get("input"), call.get("p", 0.5)
    rows = watch.rows(x)
    if not call.drops or rate == 0:
        return x
    if rate >= 1:  # the mask of this rate would be divided by 0
        mask = torch.zeros_like(x)
    else:
        like = x.new_empty(0)  # of the same type and place; the values have no part in the mask
        draw = partial(watch.recomputation.in_one, dropout_mask)
        mask = _drawn(watch, x.shape, rows, lambda ids, key, width: draw(ids, key, width, rate, like))
    result = x.mul_(mask) if call.in_place or call.get("inplace", False) else x * mask
    return mark(result, None if rows is None else rows.but())


@rule("rand", "randn", takes="size*")
@rule("rand_like", "randn_like", takes="input")
def numbers(watch: Watch, call: Call) -> Any:
    """Uniform numbers in [0, 1), or normal ones, one for each row's global number."""
    if call.name.endswith("like"):
        like = call.get("input")
        rows, shape, device, dtype = watch.rows(like), like.shape, like.device, like.dtype
    else:
        sizes = call.get("size", [])
        rows, device, dtype = _rows_of_sizes(watch, sizes), call.kwargs.get("device") or "cpu", None
        shape = torch.Size([size.axis.length if type(size) is RowCount else size for size in sizes])
    dtype = call.kwargs.get("dtype") or dtype or torch.get_default_dtype()
    _drawn_by_rows(call)
    if dtype.is_complex:
        raise NotExact(f"torch.{call.name} of {dtype} is not drawn; use torch.complex of two draws of real numbers.")
    draw = partial(_normal if call.name.startswith("randn") else _uniform, device=device, dtype=dtype)
    table = _drawn(watch, shape, rows, draw)
    return mark(table, None if rows is None else rows.but())


@rule("uniform", takes="input from|a to|b")
@rule("normal", takes="input mean std")
def written_over(watch: Watch, call: Call) -> Any:
    """`x.normal_(mean, std)` and `x.uniform_(low, high)`."""
    if not call.in_place:
        raise NotExact(f"torch.{call.name} draws anew; use mean + std * torch.randn_like(mean), or torch.randn.")
    _drawn_by_rows(call)
    x = call.get("input")
    uniform = call.name == "uniform"
    first, second = call.get("from" if uniform else "mean", 0.0), call.get("to" if uniform else "std", 1.0)
    scale = second - first if uniform else second
    with watch.in_other_words():
        return x.copy_((torch.rand_like(x) if uniform else torch.randn_like(x)).mul_(scale).add_(first))


@rule("bernoulli", takes="input p")
def bernoulli(watch: Watch, call: Call) -> Any:
    """1 with a probability of each number's own, or of one for all; by the global numbers of rows."""
    x, p = call.get("input"), call.get("p")
    _drawn_by_rows(call)
    with watch.in_other_words():
        drawn = (torch.rand_like(x, dtype=torch.float64) < (x if p is None else p)).to(x.dtype)
        return x.copy_(drawn) if call.in_place else drawn


def _drawn_by_rows(call: Call) -> None:
    if call.kwargs.get("generator") is not None:
        raise NotExact(
            f"torch.{call.name} is given a generator, which draws one number after the other, while a row here gets "
            "the number of its place in the whole graph. Leave it out: the seed of `parallelize`, or --seed, decides."
        )


# Of 32 bits as many as each float holds exactly: the numbers are the same in each type, and below 1.
_BITS = {torch.float16: 11, torch.bfloat16: 8}


def _uniform(ids: Tensor, key: int, width: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    bits = _BITS.get(dtype, 24)
    return (random_bits(ids, key, width, device) >> (32 - bits)).double().mul_(2.0**-bits).to(dtype)


def _normal(ids: Tensor, key: int, width: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """By Box and Muller: a radius and an angle, of 32 bits each, for each number."""
    radius, angle = (random_bits(ids, key, 2 * width, device).double() + 0.5).mul_(2.0**-32).chunk(2, 1)
    return ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).to(dtype)


Draw = Callable[[Tensor, int, int], Tensor]
"""Numbers of a table, [rows, width], by the ids of its rows, the key of the call, and the width."""


def _drawn(watch: Watch, shape: torch.Size, rows: Rows | None, draw: Draw) -> Tensor:
    """Random numbers of a shape, seen as a table of rows with ids that are the same on every rank that has them."""
    if not shape:
        return draw(torch.zeros(1, dtype=torch.int64, device="cpu"), watch.noise_key(), 1)[0, 0]
    dim = 0 if rows is None else rows.dim
    others = [size for at, size in enumerate(shape) if at != dim]
    ids = torch.arange(shape[0], device="cpu") if rows is None else _ids(watch, rows.axis, shape[dim])
    return draw(ids, watch.noise_key(), math.prod(others)).view(len(ids), *others).movedim(0, dim)


def _ids(watch: Watch, axis: Axis, length: int) -> Tensor:
    # A ghost draws by its global number what its owner draws.
    with_ghosts = axis is watch.part.node_axis and length == watch.part.plan.num_local
    return watch.part.local_ids if with_ghosts else axis.keys


@rule(
    *words(
        "alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d feature_dropout randint randint_like "
        "randperm multinomial exponential poisson rrelu cauchy geometric log_normal random"
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
        f"torch.{call.name} draws random numbers that would be others on each rank; dropout, rand, randn, "
        "rand_like, randn_like and bernoulli are drawn by the global number of a row and may be used."
    )


@rule("gumbel_softmax", takes="logits tau hard eps dim")
def gumbel_softmax(watch: Watch, call: Call) -> Any:
    """A random choice of classes, drawn by the global numbers of rows as all that is drawn."""
    logits, dim = call.get("logits"), call.get("dim", -1)
    with watch.in_other_words():
        uniform = torch.rand_like(logits).clamp(min=2.0**-25)  # neither 0 nor 1: what is made of it stays finite
        soft = ((logits - (-uniform.log()).log()) / call.get("tau", 1)).softmax(dim)
        if not call.get("hard", False):
            return soft
        chosen = torch.zeros_like(logits).scatter(dim, soft.detach().argmax(dim, keepdim=True), 1.0)
        return chosen - soft.detach() + soft
