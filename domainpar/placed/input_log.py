"""A log of the whole tensors that a rank was given and of its calls, by checksum, to compare all ranks."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from domainpar.common.agreement import Refused, differing_ranks, gather
from domainpar.parallel.digests import digest
from domainpar.parallel.places import where
from domainpar.parallel.transport import Transport

HINT = (
    "give every rank the same whole tensor: draw random numbers from equal seeds, read the same files in the same order"
)
LEARNED = "change it on every rank alike: its gradient is whole on every rank when backward returns"
LOOK_EVERY = 100  # comparisons
MOST_ENTRIES = 10_000


def tensor_given(value: Any, what: str) -> Tensor:
    """A tensor from a tensor, a numpy array or a list of numbers.

    Args:
        value: What was given.
        what: Its meaning, for the message.

    Raises:
        ValueError: If it is none of these.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ValueError(f"{what} is a sparse tensor ({value.layout}); give its entries as edges, or x.to_dense().")
        return value.as_subclass(Tensor) if type(value).__name__ == "EdgeIndex" else value
    if hasattr(value, "edge_index") or hasattr(value, "edge_types"):
        raise ValueError(
            f"{what} is to be a tensor, but it is a {type(value).__name__}; give its fields: "
            "part.nodes(data.x), part.edges(data.edge_attr). split_graph(data, world=world), part.place(data) take it."
        )
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biufc" or isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"its numbers are {type(value).__name__} of {array.dtype}")
        # Of ROOT and FITS files the bytes are the other way round; a view backwards has no form in torch.
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(array.shape)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} is to be a tensor, but it is a {type(value).__name__}: {error}") from None


def array_given(value: Any, what: str) -> npt.NDArray[Any]:
    """As `tensor_given`, as a numpy array."""
    array: npt.NDArray[Any] = tensor_given(value, what).detach().cpu().numpy()
    return array


def whole_number(value: Any, what: str, least: int = 0) -> int:
    """An integer from an integer, one of numpy, or a tensor of one.

    Raises:
        ValueError: If it is none, or below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{what} is {value!r} ({type(value).__name__}); pass an integer, {least} or more.")
    return number


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def shape_and_type(tensor: Tensor) -> str:
    """In words, as messages about ranks say it."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def in_words(tensor: Tensor) -> str:
    """Shape, type and checksum of a tensor; equal for equal tensors only."""
    checksum = digest({"": tensor.to_dense() if tensor.is_sparse else tensor})
    return f"{shape_and_type(tensor)}, checksum {checksum:08x}"


class InputLog:
    """The whole tensors that this rank was given, and its calls, since the last comparison.

    A checksum reads every byte, 0.16 s for 256 MB. It is kept for a tensor that is given again unchanged.

    Args:
        transport: Joins the ranks that share the graph. With one rank the log stays empty.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # A call in words; or a whole tensor that was given, with the line of the program, and whether it is learned.
        self._entries: list[tuple[str, str, bool]] = []
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of a tensor: its version and words
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of parameters and buffers
        self._compared = 0

    def give(self, call: str, tensor: Tensor) -> None:
        """Note a tensor that every rank has to give in the same call, with the line of the program."""
        if self._transport.size > 1:
            self._entries.append((f"{call} of {self._words(tensor)}", where()[1], tensor.requires_grad))

    def remember(self, tensor: Tensor) -> None:
        """Note a user's tensor that every rank holds, such as a parameter, where it meets rows."""
        self.call(self._words(tensor if tensor._base is None else tensor._base))

    def name(self, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors names for messages."""
        for name, tensor in tensors.items():
            self._names[tensor] = f"{name}, "

    def call(self, words: str) -> None:
        """Note a call that every rank makes alike. *Collective* once in thousands, so that the log does not grow."""
        self._entries.append((words, "", False))
        if len(self._entries) >= MOST_ENTRIES and self._transport.size > 1:
            self.compare()

    def _words(self, tensor: Tensor) -> str:
        version, words = self._known.get(tensor, (None, ""))
        if version is None or version != version_of(tensor):
            words = self._names.get(tensor, "") + in_words(tensor)
            self._known[tensor] = (version_of(tensor), words)
        return words  # type: ignore[no-any-return]

    def compare(self, beside: bytes = b"") -> list[bytes]:
        """Compare what all ranks were given and called since the last time. *Collective*.

        Args:
            beside: Further bytes for every other rank.

        Returns:
            These bytes of each rank, in the order of ranks.

        Raises:
            Refused: On all ranks alike, with the first thing that differs, its line and the rank.
        """
        if self._transport.size == 1:
            return [beside]
        entries, self._entries = self._entries, []
        self._compared += 1
        if self._compared % LOOK_EVERY == 0:  # changes through `.data` are not counted by torch
            self._known = WeakIdKeyDictionary()
        # Four bytes as long as all is well: the places in the program may differ between ranks, the calls may not.
        checksum = zlib.crc32("\0".join([what for what, _, _ in entries]).encode())
        answers = self._transport.all_gather(checksum.to_bytes(4, "little") + beside)
        if len({answer[:4] for answer in answers}) > 1:
            self._refuse(gather(self._transport, entries))
        return [answer[4:] for answer in answers]

    def close(self) -> None:
        """Compare what the ranks were given after the last time. *Collective*.

        A rank may have made more calls than others, for printing say: the common ones are compared.

        Raises:
            Refused: As `compare`.
        """
        entries, self._entries = self._entries, []
        of_ranks = gather(self._transport, entries)
        shortest = min(map(len, of_ranks))
        self._refuse([entries[:shortest] for entries in of_ranks])

    def _refuse(self, of_ranks: list[list[Any]]) -> None:
        """Refuse the first entry in which ranks differ; nothing where they do not."""
        nothing_more: list[Any] = ["nothing more", "the next comparison", False]
        for number in range(max(map(len, of_ranks))):
            here = [entries[number] if number < len(entries) else nothing_more for entries in of_ranks]
            if odd := differing_ranks([what for what, _, _ in here]):
                usual = next(rank for rank in range(len(here)) if rank not in odd)
                both = ", ".join(
                    f"{self._transport.name_ranks([rank])} {' at '.join(filter(None, here[rank][:2]))}"
                    for rank in (odd[0], usual)
                )
                what = f"the ranks differ in what they were given or called: {both}"
                raise Refused(what, LEARNED if here[odd[0]][2] or here[usual][2] else HINT)
