"""Pieces of an event that are weighed: whatever has no formula is known from two of them.

Two sectors of an event, of some thousand edges and of four times as many, are taken through both passes of a network.
What an edge more took, with its share of the nodes, is what an edge takes; what is left does not grow with the event.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.flops import counted
from domainpar.nn.uncompiled import UncompiledMode, pass_back
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.tracking.events.store import EventRecord, EventStore
from domainpar.tracking.networks.catalogue import message_of
from domainpar.tracking.part_loading import Sector, load_part

EDGES_OF_PIECES = (5_000, 20_000)


@dataclass(frozen=True)
class Line:
    """What grows with the edges of a part: seconds, bytes or operations."""

    fixed: float
    of_edge: float

    @classmethod
    def through(cls, few: tuple[float, float], many: tuple[float, float]) -> Line:
        """The line through two measured points (edges, value), of which neither number is negative."""
        if many[0] <= few[0] or many[1] <= few[1]:
            return cls(0.0, many[1] / max(many[0], 1))
        slope = (many[1] - few[1]) / (many[0] - few[0])
        return cls(0.0, many[1] / many[0]) if slope * few[0] > few[1] else cls(few[1] - slope * few[0], slope)

    def at(self, edges: Any) -> Any:
        """The value of a part of so many edges, or of several."""
        return self.fixed + self.of_edge * edges


class Piece(NamedTuple):
    """Both passes of a network over a piece of an event, on ranks that share it.

    Attributes:
        edges: Local edges of the rank that took most memory.
        bytes: The most bytes of tensors that were there at once on it.
        operations: Floating-point operations of it.
        exchanges: Exchanges of rows.
        bytes_of_ghost: Bytes that ranks sent, for each ghost of all of them.
    """

    edges: int
    bytes: int
    operations: int
    exchanges: int
    bytes_of_ghost: float


def sectors_of(record: EventRecord, ranks: int = 1) -> list[Sector]:
    """The two pieces of an event for each of so many ranks: of a small event, a quarter and all of it."""
    smaller, larger = (min(max(record.num_edges // (ranks * of), 1), record.num_tiles) for of in EDGES_OF_PIECES)
    if smaller == larger:
        smaller = min(4 * larger, max(record.num_tiles, 1))
    return [Sector(number // 2, number) for number in (smaller, larger)]


def weighed(
    model: EdgeClassifier,
    store: EventStore,
    record: EventRecord,
    *,
    every: int | None = None,
    ranks: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    trains: bool = True,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Piece]:
    """Take a network through both passes over the two pieces of an event, on ranks that are threads.

    Args:
        model: The network. Copies of it compute: its running means stay as they are. Weigh it before its first step,
            after which it may know its ranks.
        store, record: The event.
        every: Iterations of a segment that is computed again in backward.
        ranks: Ranks that share a piece, which is so many times as large.
        device, dtype: Of the part.
        trains: Whether there is a backward pass.
        around: Is entered around the forward pass.

    Raises:
        ValueError: If the network cannot be run.
    """

    def on_rank(world: World, sector: Sector, copies: Sequence[EdgeClassifier]) -> tuple[Piece, int, int]:
        with store.open(record) as event:
            part = load_part(event, world.domain, sector=sector, device=device, dtype=dtype)
        own, domain, tensors_made = copies[world.rank], world.domain, _Tensors(device)
        own.recompute(every)
        exchanges, sent, gradients = domain.num_exchanges, domain.bytes_sent, own.gradients()
        try:
            with tensors_made, counted() as flops, torch.set_grad_enabled(trains):
                with around():
                    tensors = own.read(part.graph, part.halo, 1 if trains else None).tensors
                if trains:
                    pass_back(tensors, [torch.ones_like(tensor) for tensor in tensors])
        except Exception as error:  # a user's own code may raise anything
            raise ValueError(f"the network cannot be run on a piece of an event: {message_of(error)}") from error
        del gradients
        made = domain.num_exchanges - exchanges
        piece = Piece(part.graph.num_edges, tensors_made.peak, flops.total, made, 0.0)
        return piece, domain.bytes_sent - sent, part.graph.plan.num_ghosts

    pieces = []
    for sector in sectors_of(record, ranks):
        copies = [copy.deepcopy(model).to(device) for _ in range(ranks)]  # before threads: they share torch's generator
        of_ranks = run_threads(on_rank, ranks, sector, copies, timeout=600.0)
        sent, ghosts = (sum(counts) for counts in list(zip(*of_ranks))[1:])
        fullest: Piece = max((piece for piece, _, _ in of_ranks), key=lambda piece: piece.bytes)
        pieces.append(fullest._replace(bytes_of_ghost=sent / max(ghosts, 1)))
    return pieces


class _Tensors(UncompiledMode):
    """Counts the memory of tensors that are made while it is on.

    Args:
        device: On which they are counted.

    Attributes:
        peak: The most bytes that were there at once.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = torch.device(device).type
        self.peak = self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.are_plain(types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        known = set(map(_memory_of, _with_memory((args, kwargs or {}))))
        if function.overloadpacket is torch.ops.aten.set_:  # a table into memory of our own: `empty_table`
            known = set()
        for tensor in _with_memory(result):
            address = _memory_of(tensor)
            if tensor.device.type == self._kind and address not in known and address not in self._alive:
                size = tensor.untyped_storage().nbytes()
                self._alive.add(address)
                self._now += size
                self.peak = max(self.peak, self._now)
                weakref.finalize(tensor.untyped_storage(), self._gone, address, size)
        return result

    def _gone(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self._now -= size


def _with_memory(values: Any) -> list[torch.Tensor]:
    return [it for it in tree_leaves(values) if isinstance(it, torch.Tensor) and it.layout is torch.strided]


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
