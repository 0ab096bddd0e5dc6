"""Calls that treat each row by itself: the result has the rows of the arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.calls import Call, axis_and_freshness, words
from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.rows import MARK_IT, Axis, NotExact, Rows, check_enough_rows, mark
from domainpar.nn.adapt.watch import Watch, rule

ELEMENTWISE = words(
    "abs absolute acos acosh add addcdiv addcmul and angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin "
    "asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil "
    "celu clamp clamp_max clamp_min clip complex conj conj_physical copy copysign cos cosh "
    "deg2rad digamma div divide elu eq erf erfc exp exp2 expm1 fill float_power floor floor_divide floordiv fmax "
    "fmin fmod frac ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot imag "
    "invert isclose isfinite isinf isnan ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 "
    "logaddexp logical_and logical_not logical_or logical_xor logit logsigmoid lshift lt masked_fill maximum "
    "minimum mish mod mul multiply nan_to_num ne neg negative not_equal or pos positive pow prelu rad2deg radd rdiv "
    "real reciprocal reflected_and relu relu6 remainder rfloordiv rmod rmul ror round rpow rshift rsqrt rsub "
    "rtruediv rxor selu sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract "
    "tan tanh tanhshrink threshold true_divide truediv trunc where xlogy xor zero "
    # what else torch.special has, and kin of the above
    "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx erfinv expit fix frexp gammainc gammaincc gammaln gcd "
    "i0 i0e i1 i1e isneginf isposinf isreal lcm log_ndtr modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 "
    "modified_bessel_k1 multigammaln mvlgamma ndtr ndtri nextafter polar psi scaled_modified_bessel_k0 "
    "scaled_modified_bessel_k1 signbit spherical_bessel_j0 xlog1py zeta"
)
ONLY_KEEPS = words(
    "bfloat16 bool byte clone contiguous cpu cuda data deepcopy detach double float half int long short to type type_as"
)


class RowsDim(NamedTuple):
    """The dimension of the rows in a result of broadcasting, counted from its end."""

    axis: Axis
    from_end: int
    fresh: bool


@rule(*ELEMENTWISE, knows_numbers=True)
@rule("polygamma", takes="n input", knows_numbers=True)
def elementwise(watch: Watch, call: Call) -> Any:
    """Arguments are broadcast against each other; rows must meet the same rows."""
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        with watch.in_other_words():
            return call.args[0].nonzero(as_tuple=True)
    call = _compared_or_values(watch, call)
    place = find_place(watch, call)
    if call.name == "prelu" and call.args[1].numel() > 1:  # a slope for each index of the second dimension
        x = call.args[0]
        if x.dim() - place.from_end == min(1, x.dim() - 1):
            raise NotExact("prelu with a slope for each row.")
    equal_ends = _equal_ends(watch, call)
    result = watch.common(call)()
    if call.in_place:
        return changed(watch, call.args[0], place.fresh)
    for tensor in tensors_in(result):
        mark(tensor, Rows(place.axis, tensor.dim() - place.from_end, place.fresh))
    if equal_ends is not None:
        watch.known(result).equal_ends = equal_ends
    return result


def without_rows(watch: Watch, call: Call, dim: int) -> Any:
    """The call; where this rank has no rows, which torch does not always allow, made of a row of zeros.

    Args:
        dim: The dimension of the rows in each tensor of the result.
    """
    tensor = call.tensors[0]
    rows = watch.rows(tensor)
    if rows is None or tensor.size(rows.dim):
        return call()

    def one_row(value: Tensor) -> Tensor:
        if (of := watch.rows(value)) is None:
            return value
        return value.new_zeros([1 if at == of.dim else size for at, size in enumerate(value.shape)])

    def without(part: Tensor) -> Tensor:
        empty = part.narrow(dim, 0, 0)
        if not (part.is_floating_point() or part.is_complex()):
            return empty
        # Known to autograd as made of all that was given: all ranks go the same way back.
        for nothing in (tensor.sum() * 0 for tensor in call.tensors if tensor.requires_grad):
            empty = empty + (nothing if part.is_complex() else torch.real(nothing)).to(part.dtype)
        return empty

    result = call.mapped(one_row)()
    cut = [without(part) for part in tensors_in(result)]
    return type(result)(cut) if isinstance(result, tuple) else cut[0]


def _equal_ends(watch: Watch, call: Call) -> bool | None:
    """Whether the result, a mask, tells by True or by False that both ends of an edge are one node."""
    first = watch.rows(call.args[0]) if call.args and isinstance(call.args[0], Tensor) else None
    if first is None:
        return None
    if first.names is not None:
        named = [watch.known(tensor).names for tensor in call.tensors]
        both = {id(names[0]) for names in named if names is not None and len(names) == 1}
        return call.name == "eq" if both == set(map(id, watch.part.ends)) else None
    if call.name in ("invert", "logical_not", "bitwise_not") and first.equal_ends is not None:
        return not first.equal_ends
    return None


def find_place(watch: Watch, call: Call) -> RowsDim:
    """Where the rows of the result lie.

    Raises:
        NotExact: If rows meet other rows, or a tensor that nobody said anything of, or row numbers are computed with.
    """
    rows_of_each = [watch.rows(tensor) for tensor in call.tensors]
    axis, fresh = axis_and_freshness(rows_of_each, call.name)
    ends = {tensor.dim() - rows.dim for tensor, rows in zip(call.tensors, rows_of_each) if rows}
    if len(ends) > 1:
        raise NotExact(f"torch.{call.name} lets rows of {axis.name} meet all other ones, an outer product of rows.")
    from_end = ends.pop()
    for tensor, rows in zip(call.tensors, rows_of_each):
        if rows is None and tensor.dim() >= from_end and tensor.size(-from_end) != 1:
            raise NotExact(
                f"torch.{call.name} puts a tensor of shape {tuple(tensor.shape)}, the same on every rank, beside rows "
                f"of {axis.name}; {MARK_IT} if it holds one row for each of them."
            )
    return RowsDim(axis, from_end, fresh)


def _compared_or_values(watch: Watch, call: Call) -> Call:
    """Row numbers of one kind may be compared as they are; for all else they are values like any other."""
    named = [rows.names if rows else None for rows in map(watch.rows, call.tensors)]
    if not any(named):
        return call
    kinds = {id(name.of) for names in named for name in names or ()}
    if call.name in ("eq", "ne", "not_equal") and len(named) == 2 and all(named) and len(kinds) == 1:
        return call
    if call.in_place and named[0]:
        raise NotExact(f"torch.{call.name}_ writes over row numbers, which are others on each rank; make a new tensor.")
    return watch.with_values(call)


def changed(watch: Watch, tensor: Tensor, fresh: bool) -> Tensor:
    """A tensor after a call that changed it in place.

    Args:
        fresh: Whether the ghosts of what it was changed by are up to date.
    """
    before = watch.rows(tensor)
    if before is None:
        raise NotExact("a tensor that is the same on every rank is changed, in place, by rows that are not.")
    mark(tensor, before.but())
    if before.fresh and not fresh:  # it, or a view of it, may have been seen with its ghosts
        watch.fill_in_place(tensor)
    return tensor


@rule(*ONLY_KEEPS, takes="input", knows_numbers=True)
def keep(watch: Watch, call: Call) -> Any:
    """The same values in another place or of another type."""
    tensor = call.args[0]
    rows = watch.rows(tensor)
    if call.name == "deepcopy":
        result: Any = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    else:  # what is written into `x.data` does not count as a change of x; into x.detach() it does
        result = tensor.detach() if call.name == "data" else call()
    if not isinstance(result, Tensor):
        return result
    if rows is None:  # another argument gave type or device
        return mark(result, None)
    if rows.names is not None and result.dtype not in (torch.int64, torch.int32):  # smaller ones hold other numbers
        return keep(watch, call.but(input=watch.as_values(tensor)))
    return result if result is tensor else mark(result, rows.but())


@rule("embedding", takes="input weight padding_idx max_norm norm_type scale_grad_by_freq", knows_numbers=True)
def embedding(watch: Watch, call: Call) -> Any:
    """A row of a table for each number, `embedding(numbers, table)`."""
    numbers, table = call.get("input"), call.get("weight")
    if call.get("max_norm") is not None or call.get("scale_grad_by_freq", False):
        raise NotExact("an embedding with max_norm or scale_grad_by_freq looks at one rank's numbers only.")
    if watch.rows(table) is not None:
        if call.get("padding_idx") not in (None, -1):
            raise NotExact("an embedding with padding_idx whose table is divided among ranks; index it as x[numbers].")
        with watch.in_other_words():
            return table[numbers]
    check_enough_rows(table, 0, watch.known(numbers))
    numbers = watch.as_values(numbers)
    return mark(call.but(input=numbers)(), watch.known(numbers).but())


@rule("one_hot", takes="input|tensor num_classes")
def one_hot(watch: Watch, call: Call) -> Any:
    """A column for each class; their number has to be said."""
    rows = watch.known(call.args[0])
    if call.get("num_classes", -1) == -1:
        raise NotExact("one_hot without num_classes counts the classes of one rank only; pass num_classes.")
    return mark(call(), rows.but())
