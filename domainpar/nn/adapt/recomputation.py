"""Recomputation: the backward pass computes operations of the forward pass again instead of keeping their results.

While a `Recomputation` is on, it records the operations that torch carries out, below autograd. So it sees the sums and
products that a layer, a rule or a library call consists of. Recorded operations belong to segments. Of the tensors that
autograd wants to keep, a segment keeps those that came into it from outside; for the others it keeps where they were
made. When backward asks for the first of these, the operations of the segment run once more, as far as needed.

The same operations run on the same numbers. The code that called them does not run again. So nothing is exchanged,
drawn or counted twice, results have the same bits, and ranks may choose different segments. Sums over ranks, rows of
ghost nodes, results of other libraries and random numbers count as coming from outside: they are kept.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from domainpar.nn.adapt.nested import flat, rebuilt, tensors_in
from domainpar.nn.adapt.rows import unwatched
from domainpar.nn.adapt.versions import memory_of
from domainpar.nn.uncompiled import UncompiledMode

_BLANK = frozenset(("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"))
"""Operations that make memory for others to write into."""

_RUNNING = ("running_mean", "running_var")
"""Arguments that norms change without saying so."""

_again = threading.local()
"""Says whether a segment runs again in this thread."""


class Recomputation(UncompiledMode):
    """Records the operations of passes, or of pieces of them, so that their results need not be kept.

    Args:
        every: Number of iterations in a segment: see `iterate`. None: only pieces that a model checkpoints are
            recorded.
    """

    def __init__(self, every: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.every = every
        self._open: list[Segment] = []
        self._seen, self._iterations = True, 0

    def whole(self) -> AbstractContextManager[None]:
        """Inside is a whole pass: in segments, if there are to be some."""
        return nullcontext() if self.every is None else self.segment()

    def piece(self) -> AbstractContextManager[None]:
        """Inside is a piece that a model wants to be computed again, as all else is where a pass is in segments."""
        return self.segment() if self.every is None else nullcontext()

    @contextmanager
    def segment(self) -> Iterator[None]:
        """Write down what happens inside; a segment inside another one keeps nothing that the other can make again."""
        if not torch.is_grad_enabled():  # nothing will be asked for
            yield
            return
        with ExitStack() as around:
            if not self._open:
                around.enter_context(saved_tensors_hooks(self._pack, lambda promise: promise.get()))
                around.enter_context(self)
            self._open.append(Segment(self._open[-1] if self._open else None))
            around.callback(lambda: self._open.pop().close())
            yield

    def iterate(self) -> None:
        """Begin another segment, where a pass begins an iteration and `every` of them are done."""
        self._iterations += 1
        if self.every is not None and len(self._open) == 1 and self._iterations % self.every == 0:
            self._open.pop().close()
            self._open.append(Segment())

    def in_one(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """The result of a function that writes where torch does not see it, written down as one operation."""
        return self.instead(lambda: function(*args), function, *args)

    def instead(self, run: Callable[[], Tensor], again: Callable[..., Tensor], *args: Any) -> Tensor:
        """The result of `run`, written down as that of `again(*args)`.

        What `again` is given has to be there after `run`, so tensors among `args` may be functions of the result.
        """
        seen, self._seen = self._seen, False
        try:
            result = run()
            if seen and self._open:
                with unwatched():
                    args = tuple(it(result) if callable(it) else it for it in args)
        finally:
            self._seen = seen
        with unwatched():
            for segment in self._open if seen else ():
                segment.write(again, args, {}, result)
        return result

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sees = self._seen and not getattr(_again, "runs", False)
        kwargs, segments = kwargs or {}, tuple(self._open) if sees else ()
        with unwatched():
            for segment in segments:
                segment.prepare(function, args, kwargs)
        result = function(*args, **kwargs)
        with unwatched():
            for segment in segments:
                segment.write(function, args, kwargs, result)
        return result

    def _pack(self, tensor: Tensor) -> Promise:
        with unwatched():
            return self._open[-1].promise(tensor)


class Promise(ABC):
    """Stands for a tensor that autograd wants to keep, or that a segment needs from outside; `get` returns it."""

    @abstractmethod
    def get(self) -> Tensor:
        """The tensor, as it was when it was promised.

        Raises:
            RuntimeError: If something was changed in place that must not be.
        """


class _Held(Promise):
    """A tensor that is kept."""

    def __init__(self, tensor: Tensor) -> None:
        # Without its history, which would hold what it holds. Below autograd the two do not count changes together.
        self._tensor = tensor.detach()
        self._origin, self._versions = weakref.ref(tensor), (_version(tensor), _version(self._tensor))

    def get(self) -> Tensor:
        origin = self._origin()
        versions = self._versions[0] if origin is None else _version(origin), _version(self._tensor)
        if versions != self._versions:
            raise _changed_in_place(self._tensor.shape)
        return self._tensor


class _MadeAgain(Promise):
    """A tensor of a segment, computed again when the first one of that segment is asked for."""

    def __init__(self, segment: Segment, view: _View, changes: int) -> None:
        self._segment, self.view, self.changes = segment, view, changes
        self.value: Tensor | None = None

    def get(self) -> Tensor:
        if self.value is None:
            self._segment.run_again()
        assert self.value is not None
        return self.value


class _View:
    """A tensor of a segment: the number of its memory there, and how it looks into that."""

    __slots__ = ("device", "dtype", "memory", "offset", "shape", "strides")

    def __init__(self, tensor: Tensor, memory: int) -> None:
        self.memory, self.offset, self.device, self.dtype = memory, tensor.storage_offset(), tensor.device, tensor.dtype
        self.shape, self.strides = tensor.shape, tensor.stride()

    def into(self, tensor: Tensor) -> Tensor:
        """This view, into the memory of a tensor."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(tensor.untyped_storage(), self.offset, self.shape, self.strides)

    def overlaps(self, other: _View) -> bool:
        """Whether a number of one is one of the other: cells of a recurrent network change columns of one table."""
        return np.shares_memory(self._places(), other._places())

    def _places(self) -> npt.NDArray[np.void]:
        """An array that lies as this view does, in memory that nobody has: for questions about places only."""
        size = self.dtype.itemsize
        places = SimpleNamespace(
            __array_interface__={
                "version": 3,
                "data": ((1 << 40) + self.offset * size, True),
                "shape": tuple(self.shape),
                "strides": tuple(stride * size for stride in self.strides),
                "typestr": f"|V{size}",
            }
        )
        return np.asarray(places)


@dataclass(frozen=True)
class _Operation:
    """An operation, with views in the place of tensors.

    Attributes:
        function: What is called.
        args, kwargs: With what.
        reads: Memory that it reads or changes.
        changes: Memory that it changes.
        makes: New memory, by its place among the tensors of the result.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    reads: frozenset[int]
    changes: frozenset[int]
    makes: dict[int, int] = field(default_factory=dict)

    def touches(self, memory: set[int]) -> bool:
        """Whether it makes or changes some of this memory."""
        return not memory.isdisjoint(self.changes) or not memory.isdisjoint(self.makes.values())


class Segment:
    """The operations of a piece of a pass.

    Args:
        outer: The segment in which it lies, if any: what is made there is not kept here.
    """

    def __init__(self, outer: Segment | None = None) -> None:
        self._outer, self._is_open = outer, True
        self._operations: list[_Operation] = []
        self._outside: dict[int, Promise] = {}
        self._changes: defaultdict[int, list[_View]] = defaultdict(list)
        self._promised: list[weakref.ref[_MadeAgain]] = []
        # A weak reference keeps an address from being used again while it is a key.
        self._memory: dict[int, tuple[int, StorageWeakRef]] = {}
        self._blank: set[int] = set()
        self._count = itertools.count()

    def close(self) -> None:
        """Take nothing more."""
        self._is_open, self._memory, self._blank = False, {}, set()

    def promise(self, tensor: Tensor) -> Promise:
        """What is kept in place of a tensor: itself, if it came from outside."""
        if not _is_plain(tensor):
            return _Held(tensor)
        memory = self._number(tensor)
        if memory is None or memory in self._outside:
            return _Held(tensor) if self._outer is None else self._outer.promise(tensor)
        promise = _MadeAgain(self, _View(tensor, memory), len(self._changes[memory]))
        self._promised.append(weakref.ref(promise))
        return promise

    def prepare(self, function: Any, args: Any, kwargs: Any) -> None:
        """Before an operation: what came from outside and is about to change is kept as it was."""
        for tensor in _changed(function, args, kwargs):
            address = memory_of(tensor) if _is_plain(tensor) else None
            if address is None or (address in self._memory and self._memory[address][0] not in self._outside):
                continue
            # All that has read it so far reads this copy; all that follows, a copy of the copy, changed once more.
            before, whole = self._view(tensor).memory, _whole(tensor).clone()
            self._outside[before] = _Held(whole)
            self._note(torch.clone, (_View(whole, before),), {}, frozenset()).makes[0] = self._new(tensor)

    def write(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Write an operation down, after it was carried out."""
        given, made, changed = tensors_in((args, kwargs)), tensors_in(result), _changed(function, args, kwargs)
        if not all(map(_is_plain, (*given, *made))) or not _may_run_again(function):
            for tensor in filter(_is_plain, changed):  # nobody here knows how: from now on it came from outside
                self._memory.pop(memory_of(tensor), None)
            return
        known = set(map(memory_of, given))
        fresh = [it for it in enumerate(made) if not {memory_of(it[1])} & (known | self._memory.keys())]
        if not fresh and not changed:  # it made a view, or a number for the host
            return
        changes = frozenset(self._memory[memory_of(tensor)][0] for tensor in changed)
        self._blank -= changes
        for tensor in _changed(function, args, kwargs, unsaid=False):
            self._changes[self._memory[memory_of(tensor)][0]].append(self._view(tensor))
        args, kwargs = rebuilt((args, kwargs), lambda value: self._view(value) if isinstance(value, Tensor) else value)
        makes = self._note(function, args, kwargs, changes).makes
        for at, tensor in fresh:
            if memory_of(tensor) not in self._memory:  # results may share their memory
                makes[at] = self._new(tensor)
                if getattr(function, "overloadpacket", function).__name__ in _BLANK:
                    self._blank.add(makes[at])

    def run_again(self) -> None:
        """Compute what is still wanted of this segment.

        Raises:
            RuntimeError: If something was changed in place that must not be.
        """
        promised = [it for reference in self._promised if (it := reference()) is not None and it.value is None]
        for promise in promised:
            if any(map(promise.view.overlaps, self._changes[promise.view.memory][promise.changes :])):
                raise _changed_in_place(promise.view.shape)
        wanted = {promise.view.memory for promise in promised}
        needed, operations = set(wanted), list[tuple[_Operation, frozenset[int]]]()
        for operation in reversed(self._operations):
            if operation.touches(needed):
                operations.append((operation, operation.reads - needed))  # the last one, in order, to read those
                needed |= operation.reads
        tables: dict[int, Tensor] = {}

        def found(value: Any) -> Any:
            if not isinstance(value, _View):
                return value
            if value.memory not in tables:
                tables[value.memory] = self._outside[value.memory].get()
            return value.into(tables[value.memory])

        with _alone():
            for operation, last in reversed(operations):
                args, kwargs = rebuilt((operation.args, operation.kwargs), found)
                results = tensors_in(operation.function(*args, **kwargs))
                tables |= {memory: results[at] for at, memory in operation.makes.items() if memory in needed}
                for memory in last:
                    tables.pop(memory, None)
                del args, kwargs, results
            for promise in promised:
                promise.value = promise.view.into(tables[promise.view.memory])
        if not self._is_open:  # nobody can want anything else
            self._operations, self._outside, self._promised = [], {}, []

    def _note(self, function: Any, args: Any, kwargs: Any, changes: frozenset[int]) -> _Operation:
        reads = frozenset(value.memory for value in flat((args, kwargs)) if isinstance(value, _View))
        self._operations.append(_Operation(function, args, kwargs, reads, changes))
        return self._operations[-1]

    def _view(self, tensor: Tensor) -> _View:
        """A tensor as it looks into the memory of this segment; of memory that is not known, it came from outside."""
        memory = self._number(tensor)
        if memory is None:
            outside = _Held(tensor) if self._outer is None else self._outer.promise(tensor)
            memory = self._new(tensor)
            self._outside[memory] = outside
        return _View(tensor, memory)

    def _number(self, tensor: Tensor) -> int | None:
        """The number of a tensor's memory; None of what came from outside, or was written where torch does not see."""
        memory = self._memory.get(memory_of(tensor), (None,))[0]
        return None if memory in self._blank else memory

    def _new(self, tensor: Tensor) -> int:
        memory = next(self._count)
        self._memory[memory_of(tensor)] = memory, StorageWeakRef(tensor.untyped_storage())
        return memory


@contextmanager
def _alone() -> Iterator[None]:
    """As operations are carried out below autograd, written down by nobody."""
    before, _again.runs = getattr(_again, "runs", False), True
    try:
        with unwatched(), torch.no_grad(), torch.inference_mode(False), ExitStack() as casts:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    casts.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        _again.runs = before


def _changed_in_place(shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {tuple(shape)} that backward needs was changed in place after it was used; use an "
        "operation that makes a new tensor, and step the optimiser after backward."
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a view into memory and nothing else."""
    if tensor.layout is not torch.strided or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return False
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _whole(tensor: Tensor) -> Tensor:
    """All memory that a tensor looks into, in its type."""
    storage = tensor.untyped_storage()
    numbers = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (numbers,), (1,))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _may_run_again(function: Any) -> bool:
    """Whether a function makes the same of the same: torch's own that draw nothing, and what stands for ours."""
    if not isinstance(function, torch._ops.OpOverload):
        return True
    return function.namespace == "aten" and torch.Tag.nondeterministic_seeded not in function.tags


def _changed(function: Any, args: Any, kwargs: Any, unsaid: bool = True) -> list[Tensor]:
    """The tensors that an operation changes, among its arguments; also running means, of which it does not say so."""
    if not isinstance(function, torch._ops.OpOverload):
        return []
    written = [
        args[place] if place < len(args) else kwargs.get(name)
        for place, name, is_said in _writes(function)
        if is_said or unsaid
    ]
    return tensors_in(written)


@cache
def _writes(function: torch._ops.OpOverload) -> tuple[tuple[int, str, bool], ...]:
    """The arguments that an operation changes: their places, names, and whether its signature says so."""
    named = [(place, argument.name, argument.alias_info) for place, argument in enumerate(function._schema.arguments)]
    said = {name for _, name, alias in named if alias is not None and alias.is_write}
    return tuple((place, name, name in said) for place, name, _ in named if name in said or name in _RUNNING)
