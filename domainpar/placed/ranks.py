"""The ranks that share placed tensors: sums and extremes over them, keys of random numbers, and what they compare."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from domainpar.parallel.digests import bits_of
from domainpar.parallel.integer_sums import sum_exactly
from domainpar.parallel.places import line_of_user
from domainpar.parallel.transport import OfThisProcess, Transport
from domainpar.placed.input_log import InputLog

GATHERED = 16_384  # numbers; larger sums travel as integers, whose bytes do not grow with the number of ranks


class NotExact(Exception):
    """A call that has no exact form on a split graph; every rank raises it before it computes.

    Attributes:
        place: The layer and the line of the user's program.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe(1)))
        modules = [owner for owner in owners if isinstance(owner, torch.nn.Module)]
        layer = ""
        if modules:  # the innermost one that runs, by its name in the outermost one
            names = {id(module): name for name, module in modules[-1].named_modules()}
            layer = f"{names.get(id(modules[0])) or 'the model'} ({type(modules[0]).__name__})"
        self.place = ", ".join(text for text in (layer, line_of_user()) if text)

    def __str__(self) -> str:
        return f"{self.place}: {super().__str__()}" if self.place else super().__str__()


class Same:
    """Every rank holds the whole tensor."""

    pending = False

    def __init__(self, ranks: GraphRanks) -> None:
        self.ranks = ranks
        self.forms: dict[Any, Any] = {}  # of tensors that lie so

    def __repr__(self) -> str:
        return "the same on every rank"


class Sum(Same):
    """Each rank holds a share, and the tensor is the sum of all shares, for which it waits."""

    pending = True

    def __repr__(self) -> str:
        return "a share on every rank"


class GraphRanks(OfThisProcess):
    """The ranks that share graphs: one object for each transport, `ranks_of(transport)`.

    Attributes:
        transport: Joins them.
        rank: This rank.
        size: Number of ranks.
        same, total: The placements `Same` and `Sum`.
        log: What every rank was given whole, compared between ranks.
        num_exchanges: How often rows were fetched from other ranks, or brought home to them.
        num_sums: How often something was summed or compared over ranks.
        at_backward: Whether `backward` of a placed tensor is running.
        same_bits: Whether results may not depend on the number of ranks in any bit (`exact`).
    """

    def __init__(self, transport: Transport) -> None:
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self.same, self.total = Same(self), Sum(self)
        self.log = InputLog(transport)
        transport.before_close.append(self.log.close)
        self.num_exchanges = self.num_sums = 0
        self.at_backward = self.same_bits = False
        self.after_backward: dict[int, Any] = {}  # functions to call when it ends, by the object that added them

    @property
    def in_backward(self) -> bool:
        """Whether calls belong to a backward pass, whose sums are collected and made together.

        Recomputation by a checkpoint, and a backward pass with `create_graph`, count as forward passes.
        """
        return self.at_backward and not torch.is_grad_enabled()

    def gathered(self, local: Tensor) -> list[Tensor]:
        """The tensor of every rank, all of one shape and type. *Collective*."""
        if self.size == 1:
            return [local]
        return [tensor_of(payload, local).view(local.shape) for payload in self.log.compare(payload_of(local))]

    def gathered_rows(self, rows: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which may differ in their first length. *Collective*."""
        if self.size == 1:
            return [rows]
        if rows.shape[1:].numel() == 0:  # rows without columns: only their number matters
            lengths = self.gathered(torch.tensor(len(rows), device="cpu"))
            return [rows.new_empty(int(length), *rows.shape[1:]) for length in lengths]
        return [tensor_of(each, rows).view(-1, *rows.shape[1:]) for each in self.log.compare(payload_of(rows))]

    def added(self, local: Tensor, any_order: bool = False) -> Tensor:
        """The sum over ranks, the same bits on every rank. *Collective*.

        Small ones are added in the order of ranks, large ones as integers.

        Args:
            local: This rank's share.
            any_order: Whether the sum of the shares has the same bits in any order and number of them.

        Raises:
            NotExact: With `same_bits`, if a float's share has been rounded.
        """
        if self.same_bits and not any_order:
            self.check_integers(local)
        if self.size == 1:
            return local
        self.num_sums += 1
        self.log.call(f"a sum over ranks, {tuple(local.shape)}")
        if local.is_complex():
            return torch.view_as_complex(self.added(torch.view_as_real(local.resolve_conj()).contiguous()))
        if not local.is_floating_point():
            values = local.to(torch.int64).contiguous().cpu().clone()
            self.transport.all_reduce(values)
            return values.to(local.device, local.dtype)
        if local.numel() > GATHERED and (sums := sum_exactly([local], self.transport)) is not None:
            return sums[0].to(local.dtype)
        shares = self.gathered(local)
        total = shares[0].to(torch.promote_types(local.dtype, torch.float32))
        for share in shares[1:]:
            total = total + share
        return total.to(local.dtype)

    def check_integers(self, share: Tensor) -> None:
        """Refuse to add rounded shares, also on one rank."""
        if share.is_floating_point() or share.is_complex():
            raise NotExact("a sum of floats over rows that has no form with the same bits on any number of ranks")

    def extreme(self, local: Tensor, largest: bool) -> Tensor:
        """The elementwise maximum or minimum over ranks; NaN where any has one. *Collective*."""
        if self.size == 1:
            return local
        self.num_sums += 1
        self.log.call(f"an extreme over ranks, {tuple(local.shape)}")
        first, *others = self.gathered(local)
        for other in others:
            first = torch.maximum(first, other) if largest else torch.minimum(first, other)
        return first

    def largest(self, number: int) -> int:
        """The largest number that any rank has. *Collective*."""
        if self.size == 1:
            return number
        values = torch.tensor([number], device="cpu")
        self.transport.all_reduce(values, "max")
        return int(values)

    def draw(self) -> int:
        """A key of random numbers: rank 0 takes it from torch's generator, and all others from it. *Collective*.

        So numbers depend on `torch.manual_seed` of rank 0 alone, and torch's checkpoint, which keeps the state of the
        generator, draws them again.
        """
        kept = kept_now()
        return self._draw() if kept is None else int(kept.next(self._draw))

    def _draw(self) -> int:
        # Every rank draws, so that the generators of ranks stay alike.
        key = int(torch.randint(2**62, (), device="cpu"))
        if self.size == 1:
            return key
        self.log.call("random numbers, of a dropout in training say")
        return int(self.gathered(torch.tensor(key, device="cpu"))[0])

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context around a backward pass: shares of sums wait, and at its end the added functions are called."""
        outer, self.at_backward = self.at_backward, True
        try:
            yield
        finally:
            self.at_backward = outer
            waiting, self.after_backward = ({}, self.after_backward) if outer else (self.after_backward, {})
        for call in waiting.values():
            call()


class OneBlock(GraphRanks):
    """The ranks of an axis that is one block of rows: nothing may run over these rows, except sums in backward."""

    def __init__(self, ranks: GraphRanks) -> None:
        self._all = ranks
        self.size = max(2, ranks.size)  # also on one rank a block has not all rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all, name)

    def draw(self) -> int:
        """A key, as for all rows."""
        return self._all.draw()

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotExact("in_blocks applies a module to each edge by itself, and this runs over all edges: do it outside")

    gathered = gathered_rows = added = extreme = largest = _refuse  # type: ignore[assignment]


class Kept:
    """Ghost rows and random keys of a piece of a program, kept for its recomputation.

    Attributes:
        complete: Whether it has been computed once.
        with_ghosts: Whether ghost rows are kept, not only keys.
    """

    def __init__(self) -> None:
        self.complete, self.with_ghosts = False, True
        self.values: list[Any] = []
        self.at: int | None = None  # of the next one, if it is computed again

    def next(self, make: Callable[[], Any]) -> Any:
        """The next ghost rows or key: made the first time, and kept."""
        if self.at is None:
            self.values.append(make())
            return self.values[-1]
        self.at += 1
        return self.values[self.at - 1]


class _OfThread(threading.local):
    """The pieces of a program that a thread is computing, inner ones last."""

    def __init__(self) -> None:
        self.pieces: list[Kept] = []


_HERE = _OfThread()


def kept_now() -> Kept | None:
    """The memory of the piece of a program that this thread computes; None if nothing is kept."""
    return _HERE.pieces[-1] if _HERE.pieces else None


class keeping(AbstractContextManager[None]):
    """A context around the computation of a piece of a program, the first time and each time again."""

    def __init__(self, kept: Kept, again: bool, ghosts: bool = True) -> None:
        self._kept, self._again, self._ghosts = kept, again, ghosts

    def __enter__(self) -> None:
        kept = self._kept
        kept.with_ghosts = self._ghosts
        kept.values, kept.at = (kept.values, 0) if self._again else ([], None)
        _HERE.pieces.append(kept)

    def __exit__(self, *raised: Any) -> None:
        _HERE.pieces.pop()


def payload_of(tensor: Tensor) -> bytes:
    """The bits of a tensor, to be sent."""
    payload: bytes = bits_of(tensor.detach().cpu().contiguous()).numpy().tobytes()
    return payload


def tensor_of(payload: bytes, like: Tensor) -> Tensor:
    """A tensor from bits that were sent, in one dimension, of the type and on the device of `like`."""
    if not payload:  # of which torch makes no tensor
        return torch.empty(0, dtype=like.dtype, device=like.device)
    return torch.frombuffer(bytearray(payload), dtype=like.dtype).to(like.device)


def ranks_of(transport: Transport) -> GraphRanks:
    """The ranks that a transport joins; one object for each."""
    with _LOCK:
        known = vars(transport)
        if "placed_ranks" not in known:
            known["placed_ranks"] = GraphRanks(transport)
        return known["placed_ranks"]  # type: ignore[no-any-return]


_LOCK = threading.Lock()
