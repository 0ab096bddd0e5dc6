"""A log of the whole tensors that a rank was given, by checksum, for a comparison of all ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, proxy, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from domainpar.common.agreement import Refused, gather, strays
from domainpar.nn.adapt.across import shape_and_type
from domainpar.nn.adapt.rows import unwatched, version_of
from domainpar.parallel.digests import digest
from domainpar.parallel.places import where
from domainpar.parallel.transport import Transport

HINT = (
    "give every rank the same whole tensor: draw random numbers from equal seeds, read the same files in the same order"
)
LEARNED = (
    "it wants a gradient, of which each rank has a share: before it is changed, t.grad = part.all_reduce(t.grad) on "
    "every rank; or make it a parameter of the model"
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
        return torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} is to be a tensor, but it is a {type(value).__name__}: {error}") from None


def in_words(tensor: Tensor) -> str:
    """Shape, type and checksum of a tensor; equal for equal tensors only."""
    with unwatched():
        checksum = digest({"": tensor.to_dense() if tensor.is_sparse else tensor})
    return f"{shape_and_type(tensor)}, checksum {checksum:08x}"


def input_log(transport: Transport) -> InputLog:
    """The log of all parts on a transport: the next forward pass may be on another part."""
    if transport not in _LOGS:
        log = _LOGS[transport] = InputLog(transport)
        transport.before_close.append(log.close)
    return _LOGS[transport]


class Alike(Protocol):
    """What every rank holds alike, as `Replicas` are."""

    def last_state(self) -> bytes:
        """This rank's, looked at anew."""

    def compare(self, states: Sequence[bytes], transport: Transport) -> None:
        """Raise on all ranks alike if those of the ranks differ; *collective*."""


class InputLog:
    """The whole tensors that the parts on this rank were given since the ranks last compared them.

    A checksum reads every byte, 0.16 s for 256 MB. It is kept for a tensor that is given again unchanged.

    Args:
        transport: Joins the ranks that share the graph. With one rank the log stays empty.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport: Transport = proxy(transport)  # which this must not keep
        self._calls: list[tuple[str, str, bool]] = []  # call and tensor in words, where, and whether it is learned
        self._words: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._models: list[ref[Alike]] = []

    def compare_at_the_end(self, model: Alike) -> None:
        """Compare what ranks hold of a model when the world closes, if all still have it. *Collective*."""
        self._models.append(ref(model))

    def remember(self, call: str, tensor: Tensor) -> None:
        """Note a tensor that every rank has to give in the same call."""
        if self._transport.size == 1:
            return
        version, words = self._words.get(tensor, (None, ""))
        if version is None or version != version_of(tensor):
            words = in_words(tensor)
            self._words[tensor] = (version_of(tensor), words)
        self._calls.append((f"{call} of {words}", where()[1], tensor.requires_grad))

    def compare(self, beside: bytes = b"") -> list[bytes]:
        """Compare what all ranks were given since the last time. *Collective*.

        Args:
            beside: Bytes that every other rank gets as well.

        Returns:
            These bytes of each rank, in the order of ranks.

        Raises:
            Refused: On all ranks alike, with the first call that differs, its line and the rank.
        """
        if self._transport.size == 1:
            return [beside]
        calls, self._calls = self._calls, []
        # A few bytes as long as all is well: the places in the program may differ between ranks, the calls may not.
        checksum = zlib.crc32(json.dumps([what for what, *_ in calls]).encode())
        answers = self._transport.all_gather(checksum.to_bytes(4, "little") + beside)
        if len({answer[:4] for answer in answers}) > 1:
            self._refuse(gather(self._transport, calls))
        return [answer[4:] for answer in answers]

    def close(self) -> None:
        """Compare what the ranks were given after their last pass, and what they hold of models. *Collective*.

        A rank may have been given more than others, to show it say: it is compared as far as all go.

        Raises:
            Refused: As `compare`.
            RanksDiffer: On all ranks alike, if parameters differ.
        """
        calls, self._calls = self._calls, []
        models = [model() for model in self._models]
        states = [None if model is None else model.last_state().hex() for model in models]
        of_ranks = gather(self._transport, [calls, states])
        shortest = min(len(calls) for calls, _ in of_ranks)
        self._refuse([calls[:shortest] for calls, _ in of_ranks])
        for model, *told in zip(models, *(states for _, states in of_ranks), strict=True):
            if model is not None and None not in told:  # else it is garbage on one rank, and not yet on another
                model.compare([bytes.fromhex(state) for state in told], self._transport)

    def _refuse(self, of_ranks: list[list[tuple[str, str, bool]]]) -> None:
        """Refuse the first call in which ranks differ; nothing where they do not."""
        nothing_more = ("nothing more", "the next forward pass", False)
        for number in range(max(map(len, of_ranks))):
            here = [calls[number] if number < len(calls) else nothing_more for calls in of_ranks]
            if odd := strays([what for what, *_ in here]):
                usual = next(rank for rank in range(len(here)) if rank not in odd)
                names = {rank: self._transport.name_ranks([rank]) for rank in (odd[0], usual)}
                both = ", ".join(f"{name} {here[rank][0]} at {here[rank][1]}" for rank, name in names.items())
                learned = any(here[rank][2] for rank in names)
                raise Refused(f"the ranks were given different tensors: {both}", LEARNED if learned else HINT)


_LOGS: WeakKeyDictionary[Transport, InputLog] = WeakKeyDictionary()
