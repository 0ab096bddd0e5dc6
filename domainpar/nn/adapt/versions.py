"""Which version of each tensor the watch has seen, so that what changes one behind its back is noticed.

Scripted functions and extensions may write into a tensor without a torch call that could be watched. Torch counts every
change of a tensor and its views in one version counter. A counter that moved between two watched calls was moved by
somebody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from domainpar.nn.adapt.rows import NotExact


class Versions:
    """The last known version of every tensor of a forward pass.

    Views share memory and counter, so versions are kept by memory. Parameters may share memory and still count by
    themselves (`p.data = ...`), so each tensor that the model held before has an entry of its own.

    Args:
        held: Tensors that the model held before, by their `id`; the caller keeps them alive.
    """

    def __init__(self, held: Mapping[int, Tensor]) -> None:
        self._held = {key: one for key, one in held.items() if _counts(one)}
        self._of_held = {key: one._version for key, one in self._held.items()}
        self._sharing: dict[int, list[int]] = {}
        for key, one in self._held.items():
            self._sharing.setdefault(_memory(one), []).append(key)
        # A weak reference keeps an address from being used again while it is a key here.
        self._of_memory: dict[int, tuple[StorageWeakRef, int]] = {}
        self._spoiled: dict[int, StorageWeakRef] = {}
        self._given: set[int] = set()
        self._in_place_of_views: dict[int, tuple[StorageWeakRef, int, Tensor, int]] = {}

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Refuse a tensor that was changed since it was last seen.

        Raises:
            NotExact: If one was.
        """
        for tensor in tensors:
            if not _counts(tensor):
                continue
            if self._spoiled and _memory(tensor) in self._spoiled:
                raise NotExact(
                    f"a tensor of shape {tuple(tensor.shape)} is used after rows were summed into it in place; use "
                    "what that call returned, or make the tensor as x.new_zeros(x.size(0), ...)."
                )
            self._check_in_place_of_view(tensor)
            known = self._of_held.get(id(tensor)) if id(tensor) in self._held else self._last_seen(tensor)
            if known is not None and known != tensor._version:
                raise NotExact(
                    f"a tensor of shape {tuple(tensor.shape)} was changed in place where torch does not tell (a "
                    "scripted function, an extension, a kernel of your own), so nobody knows what it holds now; use a "
                    "torch function, or one that returns a new tensor."
                )

    def seen(self, tensors: Iterable[Tensor]) -> None:
        """Note the versions of tensors as they are now."""
        for tensor in tensors:
            if not _counts(tensor):
                continue
            self._check_in_place_of_view(tensor)
            memory = _memory(tensor)
            for key in self._sharing.get(memory, ()):
                self._of_held[key] = self._held[key]._version
            if memory not in self._sharing:
                entry = self._of_memory.get(memory)
                reference = StorageWeakRef(tensor.untyped_storage()) if entry is None else entry[0]
                self._of_memory[memory] = (reference, tensor._version)

    def spoil(self, tensor: Tensor) -> None:
        """Refuse a tensor, and all its views, from now on: torch would have changed it in place, and we did not."""
        storage = tensor.untyped_storage()
        self._spoiled[int(storage._cdata)] = StorageWeakRef(storage)

    def stands_for_view(self, made: Tensor, of: Tensor) -> None:
        """Refuse the use of a new tensor where torch has a view, once one of the two is changed in place."""
        if _counts(made) and _counts(of):
            storage = made.untyped_storage()
            key = int(storage._cdata)
            self._in_place_of_views[key] = (StorageWeakRef(storage), made._version, of, of._version)

    def _check_in_place_of_view(self, tensor: Tensor) -> None:
        if not self._in_place_of_views or (kept := self._in_place_of_views.get(_memory(tensor))) is None:
            return
        _, version, of, version_of_it = kept
        if (tensor._version, of._version) != (version, version_of_it):
            raise NotExact(
                f"a tensor of shape {tuple(tensor.shape)} is a view of another one (rows picked by their place, row "
                "numbers in another shape), and one of the two is changed in place; clone() it where it is made."
            )
        self._check_in_place_of_view(of)  # which may stand for a view itself

    def given(self, arguments: Iterable[Tensor]) -> None:
        """Note the arguments of the pass, which the caller has before and afterwards."""
        arguments = list(arguments)
        self.seen(arguments)
        self._given.update(_memory(one) for one in arguments if _counts(one))

    def outlives_the_pass(self, tensor: Tensor) -> bool:
        """Whether it is, or is a view of, an argument or what the model held before."""
        return _counts(tensor) and (_memory(tensor) in self._sharing or _memory(tensor) in self._given)

    def check_held(self) -> None:
        """Refuse a change of what the model holds, at the end of a pass."""
        self.check(self._held.values())

    def _last_seen(self, tensor: Tensor) -> int | None:
        entry = self._of_memory.get(_memory(tensor))
        return None if entry is None else entry[1]


def _counts(tensor: Tensor) -> bool:
    """Tensors of inference mode have no version; sparse ones and those of `vmap` have no memory of their own."""
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
