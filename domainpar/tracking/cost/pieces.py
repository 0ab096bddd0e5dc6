"""Pieces of an event that are weighed: what a step takes on a part of any size is known from two of them.

Two sectors of an event, of some thousand edges and of four times as many, are taken through both passes of a network.
What an edge more took, with its share of the nodes, is what an edge takes; what is left does not grow with the event.
Of memory more is known. Most tensors have a row for each node, edge or pair of the piece, and grow as these do in a
part, however many edges a node has there: only of the others an edge more is asked. Stages have none that grow, so that
one piece will do for them.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.flops import counted
from domainpar.nn.program import PASSAGES
from domainpar.nn.stages import MOST_BYTES_OF_LAYERS, Stage
from domainpar.nn.uncompiled import UncompiledMode, pass_back
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.plan import IntArray
from domainpar.tracking.events.store import EventRecord, EventStore
from domainpar.tracking.networks.catalogue import message_of
from domainpar.tracking.part_loading import Sector, load_part

EDGES_OF_PIECES = (5_000, 20_000)
EDGES_OF_ONE = 8_000
"""Of the piece that tells the memory of stages: all that grows in them has rows."""


@dataclass(frozen=True)
class Line:
    """Seconds that grow with the edges of a part."""

    fixed: float
    of_edge: float

    @classmethod
    def through(cls, few: tuple[float, float], many: tuple[float, float]) -> Line:
        """The line through two measured points (edges, value), of which neither number is negative."""
        if many[0] <= few[0] or many[1] <= few[1]:
            return cls(0.0, many[1] / max(many[0], 1))
        slope = (many[1] - few[1]) / (many[0] - few[0])
        return cls(0.0, many[1] / many[0]) if slope * few[0] > few[1] else cls(few[1] - slope * few[0], slope)


class PerRow(NamedTuple):
    """Bytes for each owned node, ghost, local edge, and (tile, owned `src`) pair of a part."""

    owned: float = 0.0
    ghost: float = 0.0
    edge: float = 0.0
    pair: float = 0.0


@dataclass(frozen=True)
class PartMemory:
    """The memory of a pass over a part, as a function of its sizes.

    Attributes:
        fixed: Bytes that do not grow with the part.
        rows: Bytes of its rows.
        layers: Layers that stages keep for backward where they are few: whether of edges, else of owned nodes, and
            bytes of a row.
        widest: Bytes of a row of the widest table of nodes, and of edges.
    """

    fixed: float
    rows: PerRow
    layers: Sequence[tuple[bool, int]] = ()
    widest: tuple[int, int] = (0, 0)

    @staticmethod
    def of_pieces(pieces: Sequence[Piece]) -> PartMemory:
        """The memory of two pieces: rows as in the larger one, and a line through what has none; of one, that is
        fixed."""
        few, many, weight = pieces[0], pieces[-1], pieces[-1].weight
        grows = max(weight.fixed - few.weight.fixed, 0) / max(many.edges - few.edges, 1)
        rows = weight.rows._replace(edge=weight.rows.edge + grows)
        return replace(weight, fixed=max(weight.fixed - grows * many.edges, 0.0), rows=rows)

    def plus(self, fixed: float = 0.0, of_row: float = 0.0, times: float = 1.0) -> PartMemory:
        """The same with all tensors so many times as large, and more bytes: fixed ones, and of each node and edge."""
        owned, ghost, edge, pair = (each * times for each in self.rows)
        rows = PerRow(owned + of_row, ghost + of_row, edge + of_row, pair)
        return replace(self, fixed=self.fixed * times + fixed, rows=rows)

    def of(self, owned: Any, ghosts: Any, edges: Any, pairs: Any = None) -> IntArray:
        """Bytes at the peak on a part, or on several, by its sizes; `pairs`: default as many as nodes."""
        counts = [np.asarray(count, np.int64) for count in (owned, ghosts, edges)]
        counts.append(counts[0] + counts[1] if pairs is None else np.asarray(pairs, np.int64))
        total = self.fixed + sum(of_row * count for of_row, count in zip(self.rows, counts))
        for of_edges, of_row in self.layers:
            of_stage = of_row * counts[2 if of_edges else 0]
            total = total + np.where(of_stage <= MOST_BYTES_OF_LAYERS, of_stage, 0)
        return np.asarray(total, np.int64)

    def through_files(self, nodes: Any, edges: Any) -> IntArray:
        """Bytes of tables in files that are in memory at once: of one stage, with what was not let go yet.

        It works on some five states of nodes, of which sums and products are the widest with two side by side, and on
        four of edges, of which it lets go again and again.
        """
        of_node, of_edge = self.widest
        return np.asarray(2.5 * of_node * nodes + 4 * of_edge * edges / PASSAGES, np.int64)


class Piece(NamedTuple):
    """Both passes of a network over a piece of an event, on ranks that share it.

    Attributes:
        edges: Local edges of the rank that took most memory.
        bytes: The most bytes of tensors that were there at once on it, without the layers of stages.
        exchanges: Exchanges of rows.
        bytes_of_ghost: Bytes that ranks sent, for each ghost of all of them.
        weight: What they are of, if all that has no rows is fixed.
    """

    edges: int
    bytes: int
    exchanges: int
    bytes_of_ghost: float
    weight: PartMemory


def sectors_of(record: EventRecord, ranks: int = 1, sizes: Sequence[int] = ()) -> list[Sector]:
    """The pieces of an event for each of so many ranks: of a small event, a quarter and all of it.

    `sizes`: edges of each piece, ascending; default: `EDGES_OF_PIECES`.
    """
    numbers = [min(max(record.num_edges // (ranks * of), 1), record.num_tiles) for of in sizes or EDGES_OF_PIECES]
    if len(numbers) > 1 and numbers[0] == numbers[-1]:
        numbers[0] = min(4 * numbers[-1], max(record.num_tiles, 1))
    return [Sector(number // 2, number) for number in numbers]


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
    sizes: Sequence[int] = (),
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Piece]:
    """Take a network through both passes over the pieces of an event, on ranks that are threads.

    Args:
        model: The network. Copies of it compute: its running means stay as they are. Weigh it before its first step,
            after which it may know its ranks.
        store, record: The event.
        every: Iterations of a segment that is computed again in backward.
        ranks: Ranks that share a piece, which is so many times as large.
        device, dtype: Of the part.
        trains: Whether there is a backward pass.
        sizes: As of `sectors_of`.
        around: Is entered around the forward pass.

    Raises:
        ValueError: If the network cannot be run.
    """

    def on_rank(world: World, sector: Sector, copies: Sequence[EdgeClassifier]) -> tuple[Piece, int, int]:
        with store.open(record) as event:
            part = load_part(event, world.domain, sector=sector, device=device, dtype=dtype)
        own, domain, graph = copies[world.rank], world.domain, part.graph
        tensors_made = _Tensors(device, kinds := _kinds(graph))
        own.recompute(every)
        for module in own.layers.modules():
            if isinstance(module, Stage):
                module.keeps_layers = False  # they are counted by themselves: larger parts keep none
        exchanges, sent, gradients = domain.num_exchanges, domain.bytes_sent, own.gradients()
        try:
            with tensors_made, counted() as flops, torch.set_grad_enabled(trains):
                with around():
                    tensors = own.read(graph, part.halo, 1 if trains else None).tensors
                if trains:
                    pass_back(tensors, [torch.ones_like(tensor) for tensor in tensors])
        except Exception as error:  # a user's own code may raise anything
            raise ValueError(f"the network cannot be run on a piece of an event: {message_of(error)}") from error
        del gradients
        made = domain.num_exchanges - exchanges
        kept = flops.layers if trains and every is None else []
        layers = [(rows == graph.num_edges, of_row) for rows, of_row in kept]
        weight = _by_rows(tensors_made, kinds, layers)
        piece = Piece(graph.num_edges, tensors_made.peak, made, 0.0, weight)
        return piece, domain.bytes_sent - sent, graph.plan.num_ghosts

    pieces = []
    for sector in sectors_of(record, ranks, sizes):
        copies = [copy.deepcopy(model).to(device) for _ in range(ranks)]  # before threads: they share torch's generator
        of_ranks = run_threads(on_rank, ranks, sector, copies, timeout=600.0)
        sent, ghosts = (sum(counts) for counts in list(zip(*of_ranks))[1:])
        fullest: Piece = max((piece for piece, _, _ in of_ranks), key=lambda piece: piece.bytes)
        pieces.append(fullest._replace(bytes_of_ghost=sent / max(ghosts, 1)))
    return pieces


OWNED, GHOST, EDGE, PAIR = range(len(PerRow._fields))


def _kinds(graph: LocalGraph) -> dict[int, list[int]]:
    """By the length of a tensor, what it has a row for, as places in `PerRow`."""
    plan = graph.plan
    # Rows are sent for about as many ghosts as there are. Some tensors hold those edges alone that a rank counts.
    kinds = {len(plan.send_rows): [GHOST], plan.num_ghosts: [GHOST], len(graph.tiles.pair_rows): [PAIR]}
    # Without a ghost these two are one, since nothing tells what a ghost takes: as much as a node.
    kinds |= {plan.num_owned: [OWNED], plan.num_local: [OWNED, GHOST]}
    kinds |= {int(plan.edge_owned.sum()): [EDGE], plan.num_edges: [EDGE]}
    return {length: kind for length, kind in kinds.items() if length > 1}


def _by_rows(tensors: _Tensors, kinds: Mapping[int, Sequence[int]], layers: Sequence[tuple[bool, int]]) -> PartMemory:
    """What tensors took at their peak, by the kinds of their rows."""
    rows, widest = [0.0] * len(PerRow._fields), [0] * len(PerRow._fields)
    for length, of in kinds.items():
        for kind in of:
            rows[kind] += tensors.at_peak.get(length, 0) / length
            widest[kind] = max(widest[kind], tensors.widest.get(length, 0))
    return PartMemory(tensors.at_peak.get(0, 0), PerRow(*rows), layers, (widest[OWNED], widest[EDGE]))


class _Tensors(UncompiledMode):
    """Counts the memory of tensors that are made while it is on.

    Args:
        device: On which they are counted.
        lengths: Those that are told apart.

    Attributes:
        peak: The most bytes that were there at once.
        at_peak: Those bytes, by the length of their tensors; 0: of others.
        widest: By that length, the most bytes of a row at any time.
    """

    def __init__(self, device: torch.device | str, lengths: Container[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind, self._lengths = torch.device(device).type, lengths
        self.peak = self._now = 0
        self.at_peak: Mapping[int, int] = {}
        self.widest: dict[int, int] = {}
        self._alive: set[int] = set()
        self._of_rows: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.are_plain(types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        known = set(map(_memory_of, _with_memory((args, kwargs or {}))))
        is_table = function.overloadpacket is torch.ops.aten.set_  # in memory of our own: `empty_table`
        known = set() if is_table else known
        for tensor in _with_memory(result):
            address = _memory_of(tensor)
            if tensor.device.type == self._kind and address not in known and address not in self._alive:
                # A table may lie in a block that was there, and is somewhat larger.
                size = tensor.nbytes if is_table else tensor.untyped_storage().nbytes()
                rows = next((length for length in tensor.shape if length in self._lengths), 0)
                self._alive.add(address)
                self._now += size
                self._of_rows[rows] += size
                self.widest[rows] = max(self.widest.get(rows, 0), size // max(rows, 1))
                if self._now > self.peak:
                    self.peak, self.at_peak = self._now, dict(self._of_rows)
                weakref.finalize(tensor.untyped_storage(), self._gone, address, size, rows)
        return result

    def _gone(self, address: int, size: int, rows: int) -> None:
        self._alive.discard(address)
        self._now -= size
        self._of_rows[rows] -= size


def _with_memory(values: Any) -> list[torch.Tensor]:
    return [it for it in tree_leaves(values) if isinstance(it, torch.Tensor) and it.layout is torch.strided]


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
