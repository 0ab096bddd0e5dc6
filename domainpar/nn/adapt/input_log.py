"""Whole tensors as the ranks' input, which must be the same on all of them: remembered by checksum, and compared."""

from __future__ import annotations

import json
import zlib
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from domainpar.agreement import Refused, gather, strays
from domainpar.nn.adapt.across import shape_and_type
from domainpar.nn.adapt.rows import unwatched, version_of
from domainpar.parallel.digests import digest
from domainpar.parallel.places import where
from domainpar.parallel.transport import Transport

HINT = (
    "give every rank the same whole tensor: draw random numbers from equal seeds, read the same files in the same order"
)


def tensor_given(value: Any, what: str) -> Tensor:
    """A tensor, or what can be made one: an array of numpy, a list of numbers.

    Args:
        value: What was given.
        what: What it is to be, for the message.

    Raises:
        ValueError: If it cannot.
    """
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} is to be a tensor, but it is a {type(value).__name__}: {error}") from None


def in_words(tensor: Tensor) -> str:
    """Shape, type and checksum of a tensor; equal for equal tensors only."""
    with unwatched():
        checksum = digest({"": tensor.to_dense() if tensor.is_sparse else tensor})
    return f"{shape_and_type(tensor)}, checksum {checksum:08x}"


def input_log(transport: Transport) -> InputLog:
    """The log of all parts on a transport: the next forward pass may be on another part."""
    return _LOGS.setdefault(transport, InputLog(transport))


class InputLog:
    """The whole tensors that parts took since the ranks last compared them.

    A checksum costs a look at every byte, 0.16 s for 256 MB. It is kept for a tensor that is taken again unchanged.

    Args:
        transport: Joins the ranks that share the graph. One rank remembers nothing.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport: Transport = proxy(transport)  # which this must not keep
        self._calls: list[tuple[str, str]] = []  # call and tensor in words, and where in the program
        self._words: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def remember(self, call: str, tensor: Tensor) -> None:
        """Note a tensor that every rank has to give in the same call."""
        if self._transport.size == 1:
            return
        version, words = self._words.get(tensor, (None, ""))
        if version is None or version != version_of(tensor):
            words = in_words(tensor)
            self._words[tensor] = (version_of(tensor), words)
        self._calls.append((f"{call} of {words}", where()[1]))

    def compare(self, asked: int = 0) -> int:
        """Compare what all ranks were given since the last time. *Collective*.

        Args:
            asked: Something to ask all ranks on the way.

        Returns:
            The largest number that a rank asked.

        Raises:
            Refused: On all ranks alike, naming the first call that differs, where it is and on which rank.
        """
        if self._transport.size == 1:
            return 0
        calls, self._calls = self._calls, []
        # A few bytes as long as all is well: the places in the program may differ between ranks, the calls may not.
        checksum = zlib.crc32(json.dumps([what for what, _ in calls]).encode())
        answers = self._transport.all_gather(bytes([asked, *checksum.to_bytes(4, "little")]))
        if len({answer[1:] for answer in answers}) == 1:
            return max(answer[0] for answer in answers)
        of_ranks = gather(self._transport, calls)
        nothing_more = ["nothing more", "the next forward pass"]
        for number in range(max(map(len, of_ranks))):
            here = [calls[number] if number < len(calls) else nothing_more for calls in of_ranks]
            if odd := strays([what for what, _ in here]):
                usual = next(rank for rank in range(len(here)) if rank not in odd)
                names = {rank: self._transport.name_ranks([rank]) for rank in (odd[0], usual)}
                both = ", ".join(f"{name} {here[rank][0]} at {here[rank][1]}" for rank, name in names.items())
                raise Refused(f"the ranks were given different tensors: {both}", HINT)
        raise AssertionError("checksums differ where calls do not")


_LOGS: WeakKeyDictionary[Transport, InputLog] = WeakKeyDictionary()
