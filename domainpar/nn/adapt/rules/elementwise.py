"""Calls that treat each row by itself: the rows of the result are those of the arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.calls import Call, one_axis, tensors_in, words
from domainpar.nn.adapt.rows import MARK_IT, Axis, NotExact, Rows, mark
from domainpar.nn.adapt.watch import RULES, Watch, rule

ELEMENTWISE = words(
    "abs absolute acos add addcdiv addcmul and angle arccos arcsin arctan arctan2 asin atan atan2 bitwise_and "
    "bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip conj copy copysign cos cosh "
    "deg2rad digamma div divide elu eq erf erfc exp exp2 expm1 fill float_power floor floor_divide floordiv fmax "
    "fmin fmod frac ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot imag "
    "invert isclose isfinite isinf isnan ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 "
    "logaddexp logical_and logical_not logical_or logical_xor logit logsigmoid lshift lt masked_fill maximum "
    "minimum mish mod mul multiply nan_to_num ne neg negative not_equal or pos positive pow prelu rad2deg radd rdiv "
    "real reciprocal reflected_and relu relu6 remainder rfloordiv rmod rmul ror round rpow rshift rsqrt rsub "
    "rtruediv rxor selu sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract "
    "tan tanh tanhshrink threshold true_divide truediv trunc where xlogy xor zero"
)
ONLY_KEEPS = words(
    "bfloat16 bool byte clone contiguous cpu cuda data deepcopy detach double float half int long short to type type_as"
)
ALONG_ONE_DIMENSION = words(
    "argsort cosine_similarity cross cummax cummin cumprod cumsum diff glu kthvalue log_softmax logcumsumexp normalize "
    "softmax softmin sort topk"
)


class Place(NamedTuple):
    """Where the rows of a result of broadcasting are: so many dimensions from its end."""

    axis: Axis
    from_end: int
    fresh: bool


@rule(*ELEMENTWISE)
def elementwise(watch: Watch, call: Call) -> Any:
    """Arguments are broadcast against each other; rows must meet the same rows."""
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        return RULES["nonzero"](watch, call.but(call.get(0, "condition"), as_tuple=True))
    place = find_place(watch, call)
    if (
        call.name == "prelu"
        and call.args[1].numel() > 1
        and call.args[0].dim() - place.from_end == min(1, call.args[0].dim() - 1)
    ):
        raise NotExact("prelu with a slope for each row.")
    given = call.args[0] if call.args else None
    equal_ends = _equal_ends(watch, call)
    call = watch.common(call)
    made = call()
    if call.in_place:
        assert isinstance(given, Tensor)
        if (before := watch.rows(given)) is not None:
            before.without_numbers(f"torch.{call.name}_")
        return changed(watch, given, place)
    marked(made, place)
    if equal_ends is not None:
        watch.known(made).equal_ends = equal_ends
    return made


def without_rows(watch: Watch, call: Call) -> Any:
    """The call; where this rank has no rows, which torch does not always allow, made of a row of zeros."""
    tensor = call.get(0, "input")
    rows = watch.rows(tensor)
    if rows is None or tensor.size(rows.dim):
        return call()
    args = [_one_row(watch, arg) for arg in call.args]
    made = call.func(*args, **call.kwargs)
    place = tensor.dim() - rows.dim
    cut = [none_of(one, max(one.dim() - place, 0), tensor) for one in tensors_in(made)]
    return type(made)(cut) if isinstance(made, tuple) else cut[0]


def none_of(made: Tensor, dim: int, given: Tensor) -> Tensor:
    """No rows of a result, known to autograd as made of what was given: all ranks go the same way back."""
    empty = made.narrow(dim, 0, 0)
    return empty + given.sum() * 0 if made.is_floating_point() and given.requires_grad else empty


def _one_row(watch: Watch, value: Any) -> Any:
    if not isinstance(value, Tensor) or (rows := watch.rows(value)) is None:
        return value
    return value.new_zeros([1 if dim == rows.dim else size for dim, size in enumerate(value.shape)])


def _equal_ends(watch: Watch, call: Call) -> bool | None:
    """Whether the result, a mask, tells by True or by False that both ends of an edge are one node."""
    first = watch.rows(call.args[0]) if call.args and isinstance(call.args[0], Tensor) else None
    if first is None:
        return None
    if first.names is not None:
        found = [watch.known(tensor).names for tensor in tensors_in((call.args, call.kwargs))]
        both = {id(names[0]) for names in found if names is not None and len(names) == 1}
        return call.name == "eq" if both == set(map(id, watch.part.ends)) else None
    if call.name in ("invert", "logical_not", "bitwise_not") and first.equal_ends is not None:
        return not first.equal_ends
    return None


def find_place(watch: Watch, call: Call) -> Place:
    """Where the rows of the result lie.

    Raises:
        NotExact: If rows meet other rows, or a tensor that nobody said anything of, or row numbers are computed with.
    """
    tensors = tensors_in((call.args, call.kwargs))
    known, others = [], []
    for tensor in tensors:
        if (rows := watch.rows(tensor)) is None:
            others.append(tensor)
        else:
            known.append((tensor.dim() - rows.dim, rows))
    axis, from_end = one_axis([rows.axis for _, rows in known], call), known[0][0]
    if any(end != from_end for end, _ in known):
        raise NotExact(f"torch.{call.name} lets rows of {axis.name} meet all other ones, an outer product of rows.")
    for tensor in others:
        if tensor.dim() >= from_end and tensor.size(-from_end) != 1:
            raise NotExact(
                f"torch.{call.name} puts a tensor of shape {tuple(tensor.shape)}, the same on every rank, beside rows "
                f"of {axis.name}; {MARK_IT} if it holds one row for each of them."
            )
    _check_names(call, [rows for _, rows in known], len(tensors))
    return Place(axis, from_end, all(rows.fresh for _, rows in known))


def _check_names(call: Call, known: list[Rows], num_tensors: int) -> None:
    named = [rows for rows in known if rows.names is not None]
    if not named:
        return
    numbered = {id(names.of) for rows in named for names in rows.names or ()}
    compares = call.name in ("eq", "ne", "not_equal") and len(named) == num_tensors == 2 and len(numbered) == 1
    if not compares:
        raise NotExact(
            f"torch.{call.name} computes with row numbers, which are others on each rank; whether two are equal is all "
            "that may be asked of them."
        )


def marked(made: Any, place: Place) -> Any:
    """Mark what broadcasting made."""
    for tensor in (made,) if isinstance(made, Tensor) else tensors_in(made):
        mark(tensor, Rows(place.axis, tensor.dim() - place.from_end, place.fresh))
    return made


def changed(watch: Watch, given: Tensor, place: Place) -> Tensor:
    """A tensor after a call that changed it in place."""
    before = watch.rows(given)
    if before is None:
        raise NotExact("a tensor that is the same on every rank is changed, in place, by rows that are not.")
    mark(given, before.but())
    if before.fresh and not place.fresh:
        watch.fill_in_place(given)
    return given


@rule(*ONLY_KEEPS)
def keep(watch: Watch, call: Call) -> Any:
    """The same values in another place or of another type."""
    rows = watch.rows(call.args[0])
    # What is written into `x.data` does not count as a change of x; into x.detach() it does.
    if call.name == "deepcopy":
        made: Any = call.args[0].detach().clone().requires_grad_(call.args[0].requires_grad)
    else:
        made = call.args[0].detach() if call.name == "data" else call()
    if not isinstance(made, Tensor):
        return made
    if rows is None:  # another argument gave type or device
        return mark(made, None)
    if made.is_floating_point() or made.is_complex() or made.dtype is torch.bool:
        rows.without_numbers(f"torch.{call.name}")
    return made if made is call.args[0] else mark(made, rows.but())


@rule(*ALONG_ONE_DIMENSION)
def along_features(watch: Watch, call: Call) -> Any:
    """Calls along one dimension, which may not be that of the rows."""
    position, default = _DIMENSION.get(call.name, (1, -1))
    dim = call.get(position, "dim", default)
    for tensor in tensors_in((call.args, call.kwargs)):
        rows = watch.rows(tensor)
        if rows is not None and (dim is None or dim % tensor.dim() == rows.dim):
            if call.name in ("softmax", "log_softmax") and dim is not None:
                from domainpar.nn.adapt.rules.reducing import softmax_over_rows

                return softmax_over_rows(watch, call, dim)
            raise NotExact(
                f"torch.{call.name} runs along the {rows.axis.name}, whose order and number are the whole graph's, not "
                "one rank's; sums, means, maxima and softmax over rows have an exact form."
            )
    place = find_place(watch, call)
    made = without_rows(watch, watch.common(call))
    if call.name in ("cosine_similarity", "kthvalue"):  # these reduce it
        num_dims = max(tensor.dim() for tensor in tensors_in((call.args, call.kwargs)))
        if dim % num_dims > num_dims - place.from_end and not call.get(position + 1, "keepdim", False):
            place = place._replace(from_end=place.from_end - 1)
    return marked(made, place)


_DIMENSION = {
    "cross": (2, None),
    "topk": (2, -1),
    "normalize": (2, 1),
    "kthvalue": (2, -1),
    "cosine_similarity": (2, 1),
    "diff": (2, -1),
    "cumsum": (1, None),
    "cumprod": (1, None),
}


@rule("embedding")
def embedding(watch: Watch, call: Call) -> Any:
    """A row of a table for each number, `embedding(numbers, table)`."""
    numbers, table = call.get(0, "input"), call.get(1, "weight")
    if call.get(3, "max_norm") is not None or call.get(5, "scale_grad_by_freq", False):
        raise NotExact("an embedding with max_norm or scale_grad_by_freq looks at one rank's numbers only.")
    if watch.rows(table) is not None:
        raise NotExact("an embedding's table is itself dealt over the ranks; index it as x[numbers].")
    rows = watch.rows(numbers)
    assert rows is not None
    if rows.names is not None:
        raise NotExact(
            "an embedding is looked up by row numbers, which are others on each rank; look up the table of all nodes "
            "before: x = part.nodes(embedding.weight)."
        )
    return mark(call(), rows.but())


@rule("one_hot")
def one_hot(watch: Watch, call: Call) -> Any:
    """A column for each class; their number has to be said."""
    rows = watch.rows(call.args[0])
    assert rows is not None
    if call.get(1, "num_classes", -1) == -1:
        raise NotExact("one_hot without num_classes counts the classes of one rank only; pass num_classes.")
    return mark(call(), rows.without_numbers("one_hot").but())


@rule("layer_norm", "rms_norm")
def layer_norm(watch: Watch, call: Call) -> Any:
    """Statistics of each row by itself."""
    rows = watch.rows(call.args[0])
    assert rows is not None
    rows.without_numbers(f"torch.{call.name}")
    if rows.dim >= call.args[0].dim() - len(call.get(1, "normalized_shape")):
        raise NotExact(f"torch.{call.name} runs over the {rows.axis.name}; normalise over features only.")
    return mark(call(), rows.but())
