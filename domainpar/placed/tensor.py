"""A tensor of the whole graph of which this rank holds its rows, below autograd.

A `Placed` tensor reports the shape of the whole graph, [N, F], and holds the rows of this rank. Its placement says what
it holds: `Rows` of an axis (nodes, edges, what a mask selected), a share of a `Sum`, or the whole tensor, the `Same` on
every rank. Numbers of rows as *values*, as in `edge_index`, are those of the whole graph: arithmetic on them needs no
rule. They become local rows where they are used as an index.

Nothing that a tensor reports (shape, strides, flags) depends on the rows of a rank, so all ranks take the same branches
inside of torch. Strides are those of the whole graph, because they decide whether `reshape` and `contiguous` copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from domainpar.placed.axes import Axis, Names, Reach, Rows
from domainpar.placed.ranks import GraphRanks, NotExact, Same, Sum
from domainpar.placed.strides import contiguous_strides

Placement = Rows | Same | Sum
MOST_FORMS = 1024  # kept for one placement; one more clears them


class Cell:
    """Values kept for a tensor, shared by tensors with the same memory and shape.

    Attributes:
        ghosts: Received ghost rows, by their exchange, each with the generation of that time.
        reaches: The reach of its values on an axis, each with the generation of that time.
    """

    __slots__ = ("ghosts", "reaches")

    def __init__(self) -> None:
        self.ghosts: dict[Any, tuple[int, Tensor]] = {}
        self.reaches: dict[Axis, tuple[int, Reach]] = {}


class SharedMemory:
    """State that all views of a tensor share.

    Attributes:
        generation: How often it was written.
        viewed: Whether there ever was a view of it.
        origin: The tensor of which it is a copy where torch has a view: a function that returns it, one that writes
            changed rows back, and its generation at the copy.
        cells: The values kept for each view, by the calls that lead to it.
    """

    __slots__ = ("cells", "generation", "origin", "viewed")

    def __init__(self, origin: tuple[Callable[[], Placed | None], Callable[[Placed], None], int] | None = None) -> None:
        self.generation, self.viewed, self.origin = 0, False, origin
        self.cells: dict[Any, Cell] | None = None


class Form:
    """All properties of a tensor, except its numbers, that decide what a call of ATen does; one object for equal ones.

    Attributes:
        place, shape, strides, dtype, device, names: As the tensor has them (and `fresh`).
        decided: Decisions on calls whose first tensor has this form, by their other arguments (`dispatch`).
    """

    __slots__ = ("decided", "device", "dtype", "names", "place", "shape", "strides")

    def __init__(self, x: Placed) -> None:
        self.place, self.shape, self.dtype, self.device, self.names = x.place, x.shape, x.dtype, x.device, x.names
        self.strides = x.stride() if x.layout is torch.strided else ()
        self.decided: dict[Any, Any] = {}


class Placed(Tensor):
    """A tensor of the whole graph of which this rank holds its rows, its share, or all.

    Attributes:
        place: What this rank holds.
        names: Which rows its values number, if any: `Names`, or one for each item of the first dimension.
        path: The calls that lead to it from the first tensor in its memory; None if they are not unique.
        fresh: Its constant value, if it was made with one and not written since.
    """

    # Most tensors have none of these, and hundreds are made in a step.
    place: Any
    path: tuple[Any, ...] | None = ()
    fresh: float | None = None
    _local: Tensor
    _names: Any = None
    _memory: SharedMemory | None = None
    _cell: Cell | None = None
    _form: Form | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[Placed],
        local: Tensor,
        place: Placement,
        names: Any = None,
        strides: Any = None,
        memory: SharedMemory | None = None,
        path: tuple[Any, ...] | None = (),
    ) -> Placed:
        shape: Any = local.shape
        if type(place) is Rows:
            dim = place.dim
            shape = (*shape[:dim], place.axis.total, *shape[dim + 1 :])
        strides = strides or contiguous_strides(shape)
        if torch.is_inference_mode_enabled():  # whose tensors cannot be views of others
            with torch.inference_mode(False):
                self = _wrapper(cls, shape, strides, dtype=local.dtype, device=local.device)
        else:
            self = _wrapper(cls, shape, strides, dtype=local.dtype, device=local.device)
        self._local, self.place = local, place
        if names is not None:
            self._names = names
        if memory is not None:
            self._memory, self.path = memory, path
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("the rules of domainpar.placed.dispatch are not loaded")

    @property
    def local(self) -> Tensor:
        """What this rank holds; refused for a copy in place of a view, once the original has changed."""
        if self._memory is not None and self._memory.origin is not None:
            of, _, generation = self._memory.origin
            parent = of()
            if parent is not None:
                parent.local  # noqa: B018  # which may be a copy itself
                if parent.memory.generation != generation:
                    raise NotExact(
                        "rows that were taken from a tensor are read after it was changed in place; write clone() there"
                    )
        return self._local

    @local.setter
    def local(self, value: Tensor) -> None:
        self._local, self._form = value, None

    @property
    def names(self) -> Names | tuple[Names, ...] | None:
        """Which rows its values number; None once they were written."""
        return self._names if self._memory is None or not self._memory.generation else None

    @names.setter
    def names(self, value: Any) -> None:
        self._names, self._form = value, None

    @property
    def form(self) -> Form:
        """Its form."""
        form = self._form
        if form is None or (form.names is not None and self.names is None):
            local = self._local
            strides = (local.stride(), self.stride()) if local.layout is torch.strided else local.layout
            key = local.shape, strides, local.dtype, local.device, self.names, self.fresh
            form = self._form = self.place.forms.get(key)
            if form is None:
                forms = self.place.forms
                if len(forms) >= MOST_FORMS:
                    forms.clear()
                form = self._form = forms[key] = Form(self)
        return form

    @property
    def memory(self) -> SharedMemory:
        """The state that it shares with all its views."""
        if self._memory is None:
            self._memory = SharedMemory()
        return self._memory

    @property
    def cell(self) -> Cell:
        """Its kept values, the same for views by the same calls."""
        if self._cell is None:
            cells = {} if self.path is None else self.memory.cells
            if cells is None:
                cells = self.memory.cells = {}
            self._cell = cells.get(self.path)
            if self._cell is None:
                self._cell = cells[self.path] = Cell()
        return self._cell

    @property
    def ranks(self) -> GraphRanks:
        """The ranks that hold it."""
        return self.place.ranks  # type: ignore[no-any-return]

    # Methods that torch implements in C++ without dispatch.

    @property
    def data(self) -> Any:
        """The tensor without a history; set, it takes the place of this one."""
        settle(self)  # so that both have one memory
        return torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: Any) -> None:
        torch._C.TensorBase.data.__set__(self, other)  # type: ignore[attr-defined]
        other.memory.viewed = True
        self.become(other)

    def become(self, other: Placed) -> None:
        """Take the rows and memory of another tensor."""
        self.local, self.place, self.names, self.fresh = other._local, other.place, other.names, None
        self._memory, self.path, self._cell = other._memory, other.path, other._cell

    def detach(self) -> Tensor:
        """The tensor without a history, in the same memory. *Collective* if it waits for shares."""
        return Tensor.detach(settle(self))

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """As `Tensor.backward`. *Collective*; gradients of parameters are whole when it returns."""
        with self.ranks.backward():
            super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def numpy(self, **kwargs: Any) -> Any:
        """The numbers of a tensor that is the same on every rank."""
        return self.held("an array").numpy(**kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.held("an array").__array__(*args, **kwargs)

    def tolist(self) -> Any:
        return self.held("a list").tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.held("bytes")
        return plain.requires_grad_(self.requires_grad and self.is_leaf).__reduce_ex__(protocol)

    def __copy__(self) -> Tensor:
        return self.detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("only a tensor without a history can be copied deeply; write x.detach() first.")
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    def held(self, what: str) -> Tensor:
        """The whole tensor, if this rank holds it, without history.

        Raises:
            NotExact: If its rows are divided.
        """
        if type(self.place) is Rows:
            raise NotExact(
                f"{what} of a tensor whose rows are divided among ranks ({self.place}); "
                "part.whole(tensor) is the whole one, on every rank."
            )
        local = settle(self).local.detach()
        return local.clone() if 0 in local.stride() else local

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if type(self.place) is Same:
            return repr(self.local.detach())
        return f"Placed(shape {tuple(self.shape)}, {self.place}; here {tuple(self._local.shape)})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else format(repr(self), spec)


_wrapper = torch.Tensor._make_wrapper_subclass


def hold(local: Tensor, form: Form, memory: SharedMemory | None = None, path: tuple[Any, ...] | None = ()) -> Placed:
    """A tensor of a known form."""
    x = _wrapper(Placed, form.shape, form.strides, dtype=form.dtype, device=form.device)
    x._local, x.place, x._form = local, form.place, form
    if form.names is not None:
        x._names = form.names
    if memory is not None:
        x._memory, x.path = memory, path
    return x


class OnlyShapes(Exception):
    """Raised in a call on tensors without data, by which torch computes the shape of a result."""


def is_rows(x: Any) -> bool:
    """Whether a value has rows that are divided among ranks."""
    return isinstance(x, Placed) and type(x.place) is Rows


def settle(x: Placed) -> Placed:
    """Bring shares home: those of ghost rows to their owners, those of a sum to every rank. *Collective* if any.

    The tensor is the same as before; only what ranks hold of it changes.
    """
    place = x.place
    if place.pending and type(place) is Rows:
        x.local = brought_home(x.local, place.axis, place.dim, place.axis.halo)
        x.place = place.axis.rows(place.dim)
    elif place.pending:
        x.local = place.ranks.added(x.local)
        x.place = place.ranks.same
    return x


def brought_home(local: Tensor, axis: Axis, dim: int, halo: Any, how: str = "sum", any_order: bool = False) -> Tensor:
    """Owned rows combined with their ghost rows on other ranks; `any_order` as in `added`.

    *Collective*.
    """
    if axis.ranks.same_bits and how in ("sum", "prod") and not any_order:
        axis.ranks.check_integers(local)
    if axis.ranks.size == 1 or halo is None:
        return local
    axis.ranks.num_exchanges += 1
    rows = local.movedim(dim, 0)
    return halo.combine(rows[: axis.length], rows[axis.length :], how).movedim(0, dim)  # type: ignore[no-any-return]


def each_once(tensor: Tensor) -> Tensor:
    """A tensor whose numbers repeat along dimensions, with each once there, as in memory."""
    for dim, (step, size) in enumerate(zip(tensor.stride(), tensor.shape)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def same(local: Tensor, ranks: GraphRanks) -> Placed:
    """A tensor that is the same on every rank."""
    return Placed(local, ranks.same)


def placed_in(value: Any) -> list[Placed]:
    """All placed tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Placed):
        return [value]
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in placed_in(item)]
    if isinstance(value, dict):
        return placed_in(list(value.values()))
    return []


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Nested lists, tuples and dictionaries with each value of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(item, kind, change) for item in value])
    if isinstance(value, dict):
        return {name: mapped(item, kind, change) for name, item in value.items()}
    return value
