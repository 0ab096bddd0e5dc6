"""The rule of each call of torch: a table of ATen's calls, one place that writes, and calls without a rule.

A rule takes a call of ATen and its arguments and returns values; it never writes. A call in place runs as the call that
returns a new tensor, and then `written`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from domainpar.nn.uncompiled import never_compiled
from domainpar.placed.axes import Rows
from domainpar.placed.moves import moved_to, plain, rows_in, whole_local
from domainpar.placed.ranks import NotExact
from domainpar.placed.strides import dense_strides
from domainpar.placed.tensor import Form, OnlyShapes, Placed, SharedMemory, hold, is_rows, mapped, placed_in, settle

aten = torch.ops.aten
Rule = Callable[[Any, Any, Any], Any]
RULES: dict[Any, Rule] = {}
_FOUND: dict[int, Rule] = {}
_DECOMPOSED: dict[Any, Callable[..., Any]] = {}
INSTEAD = {  # of calls that have no exact form on rows that are divided among ranks
    "as_strided": "views by strides know no rows; write x[...], view or expand",
    "segment_reduce": "write index_add with the number of each row's segment",
    "_sparse_coo_tensor_with_dims_and_tensors": "give the layer edge_index, and leave out sparse=True of an embedding",
    "set_": "give the tensor another name",
    "resize_": "give the tensor another name",
}


def rule(*calls: Any) -> Callable[[Rule], Rule]:
    """Register a function as the rule of some calls of ATen, with all their overloads that return new tensors."""

    def add(function: Rule) -> Rule:
        for call in calls:
            if isinstance(call, torch._ops.OpOverload):
                RULES[call] = function
                continue
            for name in call.overloads():
                overload = getattr(call, name)
                if not any(argument.is_out for argument in overload._schema.arguments):
                    RULES[overload] = function
        return function

    return add


def rule_of_rows(*calls: Any) -> Callable[[Rule], Rule]:
    """As `rule`, for arguments with rows, whose shares have come home; without rows every rank makes the call."""

    def add(function: Rule) -> Rule:
        def by_placement(func: Any, args: Any, kwargs: Any) -> Any:
            placed = [settle(x) for x in placed_in((args, kwargs))]
            found = function if any(type(x.place) is Rows for x in placed) else on_whole
            return found(func, args, kwargs)

        rule(*calls)(by_placement)
        return function

    return add


def forget(func: Any) -> None:
    """Forget the rule that was found for a call."""
    _FOUND.pop(id(func), None)


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """A call of ATen with placed tensors among its arguments."""
    found = _FOUND.get(id(func))  # torch keeps its calls, and looks long at their names
    if found is None:
        found = _FOUND[id(func)] = RULES.get(func) or _rule_for(func)
    try:
        return found(func, args, kwargs)
    except OnlyShapes:
        shape = lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta")  # noqa: E731
        return func(*mapped(args, Tensor, shape), **mapped(kwargs, Tensor, shape))


class Decided(NamedTuple):
    """A decision on a call: it is made on what this rank holds, without communication.

    Attributes:
        form: Of the result.
        view: For a view, what distinguishes it from other views of the first argument; None for a new tensor.
        rest: The arguments after the first one, if they count this rank's rows; None for the given ones.
    """

    form: Form
    view: tuple[Any, ...] | None
    rest: tuple[Any, ...] | None


_REPEATED: set[int] = set()  # calls of which anything was decided
_FIRST_TIME = threading.local()  # the arguments of the call whose rule is at work, and what it says
MOST_DECIDED = 256  # of one form; the next one forgets them


def decided(func: Any, args: Any, out: Placed, view: Any = None, rest: Any = None) -> Placed:
    """Record that a result is the call on what this rank holds, so that later calls need no rule.

    It may depend only on the forms of tensors, on other arguments, and on whether this is backward.
    """
    _REPEATED.add(id(func))
    if getattr(_FIRST_TIME, "args", None) is args:
        _FIRST_TIME.said = view, rest
    return out


def __torch_dispatch__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if kwargs or id(func) not in _REPEATED or torch.is_inference_mode_enabled():
        return dispatch(func, args, kwargs or {})
    first: Any = None
    key: list[Any] = [id(func)]
    here, given = [], []
    for x in args:
        if type(x) is Placed:
            form = x._form
            if form is None or form.names is not None:
                form = x.form
            if first is None:
                first, of_first, form = x, form, None
            key.append(form)
            memory = x._memory
            x = x._local if memory is None or memory.origin is None else x.local
        elif isinstance(x, Tensor):
            key.append((x.shape, x.stride(), x.dtype, x.device))
            given.append(x)
        else:
            key.append((type(x), tuple(x) if type(x) is list else x))
        here.append(x)
    ranks = of_first.place.ranks
    key.append(2 * ranks.same_bits + (ranks.at_backward and not torch.is_grad_enabled()))
    known = of_first.decided.get(tuple(key))
    if known is None:
        return _first_time(func, args, of_first, key)
    for x in given:
        plain(x, ranks)
    local = func(*here) if known.rest is None else func(here[0], *known.rest)
    if known.view is None:
        return hold(local, known.form)
    return hold(local, known.form, *_shared(first, known.form.place, known.view))


def _first_time(func: Any, args: Any, form: Form, key: list[Any]) -> Any:
    """Apply the rule, and keep its decision, unless it communicated or changed how an argument is held."""
    forms: list[Any] = [x._form for x in args if type(x) is Placed]
    outer = getattr(_FIRST_TIME, "args", None)
    _FIRST_TIME.args, _FIRST_TIME.said = args, None
    try:
        out = dispatch(func, args, {})
        said = _FIRST_TIME.said
    finally:
        _FIRST_TIME.args, _FIRST_TIME.said = outer, None
    unchanged = said is not None and out.fresh is None and forms == [x._form for x in args if type(x) is Placed]
    # Tensors without rows outlive graphs, and must not keep decisions of one.
    if unchanged and (type(form.place) is Rows or not any(type(each.place) is Rows for each in forms)):
        if len(form.decided) >= MOST_DECIDED:
            form.decided.clear()
        form.decided[tuple(key)] = Decided(out.form, *said)
    return out


Placed.__torch_dispatch__ = classmethod(__torch_dispatch__)  # type: ignore[assignment]
# A compiled program calls them as they are.
never_compiled(__torch_dispatch__, Placed.__new__, Placed.backward, Placed.detach)


def _rule_for(func: Any) -> Rule:
    """The rule of a call that is not in the table, found once."""
    if func._schema.is_mutable and func._schema.name.removeprefix("aten::") not in INSTEAD:
        return writing(func)
    of_torch = func
    if func.namespace == "prims":  # of torch's own decompositions: number by number if ATen's call of the name is
        packet = getattr(aten, func._schema.name.removeprefix("prims::"), None)
        of_torch = func if packet is None else getattr(packet, packet.overloads()[0])
    if torch.Tag.pointwise in of_torch.tags and torch.Tag.nondeterministic_seeded not in of_torch.tags:
        return RULES[aten.clone.default]  # `rules.pointwise`
    return otherwise


def otherwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Without a rule: whole tensors, if no rows are divided; else torch's own decomposition; else refused."""
    placed = placed_in((args, kwargs))
    if all(type(x.place) is not Rows for x in placed):
        return on_whole(func, args, kwargs)
    rows = next(x.place for x in placed if type(x.place) is Rows)
    if instead := INSTEAD.get(func._schema.name.removeprefix("aten::")):
        raise NotExact(f"{name_of(func)} of {rows} has no exact form on a split graph: {instead}")
    if not _DECOMPOSED:
        from torch._decomp import decomposition_table

        _DECOMPOSED.update(decomposition_table)
    if func in _DECOMPOSED:
        return _DECOMPOSED[func](*args, **kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)
    raise NotExact(f"{name_of(func)} of {rows} has no exact form that is known here")


def name_of(func: Any) -> str:
    """The name of a call in messages."""
    return str(func._schema.name).replace("aten::", "torch.")


@lru_cache(maxsize=1024)
def _arguments(func: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((argument.name, argument.default_value) for argument in func._schema.arguments)


def bound(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """All arguments of a call in their order, with defaults for those that are not given."""
    return [*args, *(kwargs.get(name, default) for name, default in _arguments(func)[len(args) :])]


def argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """An argument of a call by its name, wherever it was passed; None if the call has none of the name."""
    if name in kwargs:
        return kwargs[name]
    for at, (one, default) in enumerate(_arguments(func)):
        if one == name:
            return args[at] if at < len(args) else default
    return None


def on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """A call of tensors that every rank holds, made on every rank."""
    ranks = placed_in((args, kwargs))[0].ranks
    out = func(*mapped(args, Tensor, lambda x: plain(x, ranks)), **mapped(kwargs, Tensor, lambda x: plain(x, ranks)))
    return mapped(out, Tensor, lambda local: Placed(local, ranks.same, strides=dense_strides(local)))


def writing(func: Any) -> Rule:
    """The rule of a call that writes or reshapes in place: the call that returns a new tensor, then that."""
    outs = [argument.name for argument in func._schema.arguments if argument.is_out]
    reshapes = torch.Tag.inplace_view in func.tags  # as `squeeze_` inside of matmul
    # The overload that takes the same arguments and returns a new tensor.
    name = func._schema.name.removeprefix("aten::")
    name = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")  # m <<= 1 is __ilshift__
    packet = getattr(aten, name, None) if func.namespace == "aten" else None
    wanted = [str(argument.type) for argument in func._schema.arguments if not argument.is_out]
    new: Any = None
    for overload in () if packet is None else packet.overloads():
        schema = getattr(packet, overload)._schema
        if not schema.is_mutable and [str(argument.type) for argument in schema.arguments] == wanted:
            new = getattr(packet, overload)
            break

    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]

    def write(func: Any, args: Any, kwargs: Any) -> Any:
        placed = placed_in((args, kwargs))
        if not outs and not reshapes and not any(type(x.place) is Rows for x in placed):  # in place on every rank
            targets = [value for is_written, value in zip(writes, args) if is_written]
            for target in placed_in(targets):
                _settled_to_write(target)
                target.local = writable(target.local)
            here = mapped((args, kwargs), Tensor, lambda x: plain(x, placed[0].ranks))
            func(*here[0], **here[1])
            for target in placed_in(targets):
                _changed(target)
            return targets[0] if len(targets) == 1 else tuple(targets) if len(func._schema.returns) else None
        if new is None or len(outs) > 1:
            raise NotExact(
                f"{name_of(func)} writes in place{' with out=' if outs else ''}, and has no form here that does not: "
                "write the result to a name instead"
            )
        given = {name: value for name, value in kwargs.items() if name not in outs}
        value = dispatch(new, args, given) if placed_in((args, given)) else new(*args, **given)
        if not reshapes:
            return written(kwargs[outs[0]] if outs else args[0], value, args)
        args[0].become(value)
        return return_and_correct_aliasing(func, args, kwargs, value)

    return write


_write_copy = writing(aten.copy_.default)


@rule(aten.copy_.default)
def copy_(func: Any, args: Any, kwargs: Any) -> Any:
    """Into a tensor that nothing else is a view of, what waits for its sum goes as it is, where no history is kept.

    Autograd takes over the gradient of a parameter, but copies it where anything else holds it, such as a hook. That
    may be so on one rank alone, so that the copy may not ask others.
    """
    target, source = args[:2]
    if (
        not torch.is_grad_enabled()
        and isinstance(target, Placed)
        and isinstance(source, Placed)
        and source.place.pending
        and (target.shape, target.dtype) == (source.shape, source.dtype)
        and _has_memory_alone(target)
    ):
        target.local, target.place = source.local.clone(), source.place
        _changed(target)
        return target
    return _write_copy(func, args, kwargs)


def written(target: Any, value: Any, made_of: Any) -> Any:
    """Write a value into a tensor, in place. Rows are written nowhere else.

    Args:
        target: A placed tensor, or a plain tensor of the user, which every rank holds.
        value: The new value, of the same shape.
        made_of: The tensors from which the value was made; it may share their memory.
    """
    if not isinstance(target, Placed):
        if tuple(value.shape) != tuple(target.shape):
            raise RuntimeError(f"a result of shape {tuple(value.shape)} does not fit one of {tuple(target.shape)}.")
        return target.copy_(whole_local(value))
    alone = _has_memory_alone(target)
    shares = alone and isinstance(value, Placed) and value.place is target.place and value.place.pending
    shares = shares and value.dtype is target.dtype
    if not shares:
        _settled_to_write(target)
        value = settle(value) if isinstance(value, Placed) else value
    if tuple(value.shape) != tuple(target.shape):
        raise RuntimeError(
            f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(value.shape)}"
        )
    place, fresh = target.place, None
    if shares:  # gradients that are added up
        target.local = value.local.clone() if _shares_memory(value.local, made_of) else value.local
    elif alone and is_rows(value):
        axis = place.axis if type(place) is Rows and place.dim == value.place.dim else value.place.axis
        local = moved_to(value, axis)
        local = local if local.dtype is target.dtype else local.to(target.dtype)
        target.local = local.clone() if _shares_memory(local, made_of) else local
        target.place, fresh = axis.rows(value.place.dim), value.fresh
    else:
        if type(place) is Rows and is_rows(value) and value.place.dim == place.dim:
            local = moved_to(value, place.axis)
        else:
            local = whole_local(value)
            local = rows_in(local, place.axis, place.dim) if type(place) is Rows else local
        target.local = writable(target.local)
        target._local.copy_(local)
    _changed(target)
    target.fresh = fresh  # its numbers may lie once in memory, as those of the value do
    return target


def _has_memory_alone(target: Placed) -> bool:
    memory = target.memory
    return not memory.viewed and target._base is None and memory.origin is None


def _changed(target: Placed) -> None:
    """After a write: drop what was kept for the tensor, and write the tensor that it is a copy of."""
    memory = target.memory
    target.fresh = None
    memory.generation += 1
    if memory.origin is not None:
        of, put_back, _ = memory.origin
        memory.origin, parent = None, of()
        if parent is None:  # its base is not visible: so for gradients that autograd adds up
            return
        put_back(target)
        memory.origin = of, put_back, parent.memory.generation


def _shares_memory(local: Tensor, others: Any) -> bool:
    memory = local.untyped_storage().data_ptr()
    return any(other._local.untyped_storage().data_ptr() == memory for other in placed_in(others))


def writable(local: Tensor) -> Tensor:
    """The tensor with memory for each number: a copy if numbers share memory."""
    if 0 not in local.stride() or local.numel() <= 1:
        return local
    repeats = any(step == 0 and size > 1 for step, size in zip(local.stride(), local.shape))
    return local.clone(memory_format=torch.contiguous_format) if repeats else local


def ready(x: Placed) -> Placed:
    """A tensor before a view of it is taken: it waits for no shares, except in backward, where no view is written."""
    if x.fresh is not None or (0 in x._local.stride() and x.is_contiguous()):
        x.local = writable(x.local)  # all its numbers may be one in memory
    return settle(x) if x.place.pending and not x.ranks.in_backward else x


def viewed(
    x: Placed, local: Tensor, dim: int, call: Any, names: Any = None, axis: Any = None, strides: Any = None
) -> Placed:
    """A view of a tensor: its rows along a dimension, its memory shared.

    Args:
        x: The tensor.
        local: The view of what this rank holds.
        dim: The dimension of its rows.
        call: What distinguishes the view from other views of the tensor; None if nothing does.
        names: What its values number.
        axis: The axis of its rows, if it is another one.
        strides: Those of the view in the whole graph; None if it is contiguous.
    """
    place = x.place
    if type(place) is Rows and (dim != place.dim or axis is not None):
        place = (place.axis if axis is None else axis).rows(dim, place.pending)
    return Placed(local, place, names, strides, *_shared(x, place, call))


def copied(
    x: Placed, local: Tensor, place: Any, put_back: Callable[[Placed], Any], names: Any = None, strides: Any = None
) -> Placed:
    """A copy where torch has a view: writes into it, or into a view of it, are copied back.

    Args:
        x: What it is a copy of.
        local: The copy, in memory of its own.
        place: Its placement.
        put_back: Makes the changed `x` from the changed copy.
        names: What its values number.
        strides: Those of torch's view in the whole graph; None if it is contiguous.
    """

    def put(_: Placed) -> None:
        written(x, put_back(Placed(local, place)), (x,))

    return Placed(local, place, names, strides, SharedMemory(((lambda: x), put, x.memory.generation)))


def _shared(x: Placed, place: Any, call: Any) -> tuple[SharedMemory, Any]:
    """The memory of a view of a tensor, and the calls that lead to it."""
    memory = x.memory
    memory.viewed = True
    if call == ():
        return memory, x.path
    if place.pending:  # in backward; written, it is made anew
        return SharedMemory((weakref.ref(x), _made_anew, memory.generation)), ()
    return memory, None if call is None or x.path is None else (*x.path, call)


def _made_anew(_: Placed) -> None:
    raise NotExact("a view of what waits for its sum is written; write clone() first")


def _settled_to_write(target: Placed) -> None:
    """Before a write: bring home the shares that a tensor, and its base, wait for."""
    origin, base = target.memory.origin, target._base
    if isinstance(base, Placed) and origin is not None and origin[1] is _made_anew:
        settle(base)
        view: Any = target._view_func_unsafe(base)
        target.become(view)
    settle(target)
