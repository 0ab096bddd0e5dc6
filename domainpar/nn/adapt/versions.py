"""The version of each tensor that the watch saw last, so that changes which it did not see are noticed.

Scripted functions and extensions may write into a tensor without a torch call. Torch counts every change of a tensor
and its views in one version counter. If it moved between two watched calls, something else wrote into the tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from domainpar.nn.adapt.rows import Axis, NotExact, Rows, check_written, last_noted, note_version, rows_of, was_written

_STANDS_IN = (
    "one tensor stands for another or a view of it here (node values with those of other ranks, rows picked by their "
    "place, row numbers in another shape), and one of the two is changed in place; use an operation that makes a new "
    "tensor, or clone() it first."
)


class _StandIn(NamedTuple):
    """A tensor that is a new one here, and in torch another one or a view of it; nothing of both is kept alive."""

    reference: StorageWeakRef
    tensor: weakref.ref[Tensor]
    version: int
    of: weakref.ref[Tensor]
    memory_of_it: int
    version_of_it: int


class Versions:
    """The last known version of every tensor of a forward pass.

    Views share memory and counter, so versions are kept by memory. Parameters may share memory and still count by
    themselves (`p.data = ...`), so each tensor that the model held before has an entry of its own.

    Args:
        held: Tensors that the model held before, by their `id`; the caller keeps them alive.
        with_ghosts: The rows of which other ranks hold copies; None if there is no other rank.
    """

    def __init__(self, held: Mapping[int, Tensor], with_ghosts: Axis | None = None) -> None:
        self._with_ghosts = with_ghosts
        self._held = {key: tensor for key, tensor in held.items() if _counts(tensor)}
        self._of_held = {key: tensor._version for key, tensor in self._held.items()}
        self._sharing: dict[int, list[int]] = {}
        for key, tensor in self._held.items():
            self._sharing.setdefault(memory_of(tensor), []).append(key)
        # A weak reference keeps an address from being used again while it is a key here.
        self._of_memory: dict[int, tuple[StorageWeakRef, int]] = {}
        self._spoiled: dict[int, StorageWeakRef] = {}  # for the same reason not a set
        self._of_caller: set[int] = set()
        self._stand_ins: dict[int, _StandIn] = {}
        self._marked: dict[int, Tensor] = {}  # outside of passes, and seen in this one

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Refuse a tensor that was changed since it was last seen.

        Raises:
            NotExact: If one was.
        """
        for tensor in tensors:
            if not _counts(tensor):
                continue
            if was_written(tensor) and id(tensor) not in self._marked:
                self._check_written(tensor)
            if self._spoiled and memory_of(tensor) in self._spoiled:
                raise NotExact(
                    f"a tensor of shape {tuple(tensor.shape)} is used after rows were summed into it in place; use "
                    "what that call returned, or make the tensor as x.new_zeros(x.size(0), ...)."
                )
            self._check_stand_in(memory_of(tensor), tensor._version)
            _, version = self._of_memory.get(memory_of(tensor), (None, tensor._version))
            if self._of_held.get(id(tensor), version) != tensor._version:
                raise NotExact(
                    f"a tensor of shape {tuple(tensor.shape)} was changed in place where torch does not tell (a "
                    "scripted function, an extension, a kernel of your own), so nobody knows what it holds now; use a "
                    "torch function, or one that returns a new tensor."
                )

    def _check_written(self, tensor: Tensor) -> None:
        """Refuse what the model keeps, somebody wrote into between two passes, and other ranks hold copies of."""
        rows = rows_of(tensor)
        if self._with_ghosts is None or not isinstance(rows, Rows):
            return
        check_written(tensor, rows)
        if rows.axis is self._with_ghosts and rows.fresh:
            raise NotExact(
                f"a tensor of nodes of shape {tuple(tensor.shape)} that the model keeps was written in place between "
                "two passes, and other ranks hold copies of its rows; give it to the model as an argument."
            )

    def seen(self, tensors: Iterable[Tensor]) -> None:
        """Note the versions of tensors as they are now."""
        for tensor in tensors:
            if not _counts(tensor):
                continue
            if last_noted(tensor) is not None:
                self._marked[id(tensor)] = tensor
            memory = memory_of(tensor)
            self._check_stand_in(memory, tensor._version)
            for key in self._sharing.get(memory, ()):
                self._of_held[key] = self._held[key]._version
            if memory not in self._sharing:
                reference, _ = self._of_memory.get(memory) or (StorageWeakRef(tensor.untyped_storage()), 0)
                self._of_memory[memory] = (reference, tensor._version)

    def spoil(self, tensor: Tensor) -> None:
        """Refuse a tensor, and all its views, from now on: torch would have changed it in place, and we did not."""
        self._spoiled[memory_of(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def stands_in(self, tensor: Tensor, of: Tensor) -> None:
        """Note a new tensor where torch has a view of another one, or that one itself.

        What is written into one of the two, torch writes into both. So from then on the new one is refused.
        """
        if _counts(tensor) and _counts(of) and memory_of(of) not in self._sharing:
            self.seen((of,))
            reference, stand_in = StorageWeakRef(tensor.untyped_storage()), weakref.ref(tensor)
            self._stand_ins[memory_of(tensor)] = _StandIn(
                reference, stand_in, tensor._version, weakref.ref(of), memory_of(of), of._version
            )

    def _check_stand_in(self, memory: int, version: int) -> None:
        stand_in = self._stand_ins.get(memory)
        if stand_in is None:
            return
        of = stand_in.of()
        version_of_it = self._of_memory[stand_in.memory_of_it][1] if of is None else of._version
        if (version, version_of_it) != (stand_in.version, stand_in.version_of_it):
            raise NotExact(_STANDS_IN)
        self._check_stand_in(stand_in.memory_of_it, version_of_it)  # which may stand for another one itself

    def keep(self, arguments: Sequence[Tensor]) -> None:
        """Note the arguments of the pass, which the caller has before and afterwards."""
        self.seen(arguments)
        self._of_caller.update(memory_of(tensor) for tensor in arguments if _counts(tensor))

    def outlives_the_pass(self, tensor: Tensor) -> bool:
        """Whether it is, or is a view of, an argument or what the model held before."""
        return _counts(tensor) and (memory_of(tensor) in self._sharing or memory_of(tensor) in self._of_caller)

    def check_at_the_end(self, result: Iterable[Tensor]) -> None:
        """Refuse what was changed since it was last seen: the result, what the model holds, what stands for another."""
        self.check([*self._held.values(), *result])
        for stand_in in self._stand_ins.values():
            if (tensor := stand_in.tensor()) is not None and tensor._version != stand_in.version:
                raise NotExact(_STANDS_IN)
        for tensor in self._marked.values():  # what the pass wrote into them left their marks true
            note_version(tensor)


def _counts(tensor: Tensor) -> bool:
    """Tensors of inference mode have no version; sparse ones and those of `vmap` have no memory of their own."""
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def memory_of(tensor: Tensor) -> int:
    """The memory that a tensor looks into, as a number: all views of it have the same, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)
