"""The memory and seconds of a step on a part of any size, before the first step: weighed on pieces that are run.

A network runs on a small piece of a graph and on one with four times as many edges. Most tensors have a row for each
node, ghost, edge or pair of the piece, and grow as these do in a part, however many edges a node has there. What has no
such rows, and seconds, are a line through the two pieces. Stages have no other tables that grow, so that one piece will
do for them.
"""

from __future__ import annotations

import resource
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from domainpar.common.agreement import Refused, gather
from domainpar.common.words import byte_size, several
from domainpar.nn.flops import counted
from domainpar.nn.program import PASSAGES
from domainpar.nn.stages import MOST_BYTES_OF_LAYERS
from domainpar.nn.uncompiled import UncompiledMode
from domainpar.parallel.allocator import give_back_freed
from domainpar.parallel.gpus import free_memory, uuid_of
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.plan import IntArray

EDGES_OF_PIECES = (5_000, 20_000)

OF_PROCESS = 2**24
"""Bytes that do not grow with a part: blocks that tiles are computed in, the optimiser, code not yet touched."""

OF_TORCH = 48 * 2**20
"""Code and buffers of torch that a process touches in its first steps; 35 to 60 MiB were seen."""

GAPS = 1.5
"""Memory that the C library takes for torch's tables on a CPU, over their own; 1.5 to 1.7 times was seen of `acorn2`
and of two networks of the examples, where it keeps what is freed."""


# --- pieces -----------------------------------------------------------------------------------------------------------


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


OWNED, GHOST, EDGE, PAIR = range(len(PerRow._fields))
Kinds = Mapping[int, Mapping[int, float]]
"""By the length of a tensor, what it has a row for, as places in `PerRow`, and which share of all rows of that kind."""


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
    def from_pieces(pieces: Sequence[Piece]) -> PartMemory:
        """The memory of two pieces: rows as in the larger one, and a line through what has none; of one, that is
        fixed."""
        few, many, weight = pieces[0], pieces[-1], pieces[-1].weight
        grows = max(weight.fixed - few.weight.fixed, 0) / max(many.edges - few.edges, 1)
        rows = weight.rows._replace(edge=weight.rows.edge + grows)
        return replace(weight, fixed=max(weight.fixed - grows * many.edges, 0.0), rows=rows)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> PartMemory:
        """The memory that another rank weighed, from `asdict` of it."""
        layers, (of_node, of_edge) = record["layers"], record["widest"]
        kept = [(is_of_edges, of_row) for is_of_edges, of_row in layers]
        return PartMemory(record["fixed"], PerRow(*record["rows"]), kept, (of_node, of_edge))

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
    """A pass over a piece of a graph, on one of the ranks that share it.

    Attributes:
        edges: Its local edges.
        bytes: The most bytes of tensors that were there at once, without the layers of stages.
        weight: What they are of, if all that has no rows is fixed.
    """

    edges: int
    bytes: int
    weight: PartMemory


def weigh(on_rank: Callable[..., Piece], pieces: Sequence[tuple[Any, ...]], ranks: int) -> PartMemory:
    """The memory of a pass from pieces, ascending, each run on ranks that are threads: of its fullest rank.

    `on_rank` is called with the world and what is listed of each piece.
    """
    of_ranks = [run_threads(on_rank, ranks, *piece, timeout=600.0) for piece in pieces]
    return PartMemory.from_pieces([max(of_piece, key=lambda piece: piece.bytes) for of_piece in of_ranks])


def weighed_pass(
    run: Callable[[], object], device: torch.device, num_edges: int, kinds: Kinds, keeps_layers: bool = False
) -> Piece:
    """Run a pass over a piece, and see what its tensors take. On a GPU also what its kernels take beside.

    `keeps_layers`: whether stages keep their layers for backward where they are few.
    """
    is_on_gpu, before = device.type == "cuda", 0
    if is_on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with TensorMeter(device, kinds) as meter, counted() as flops:
        result = run()
    del result
    beside = max(0, torch.cuda.max_memory_allocated(device) - before - meter.peak) if is_on_gpu else 0
    rows, widest = [0.0] * len(PerRow._fields), [0] * len(PerRow._fields)
    for length, of in kinds.items():
        for kind, share in of.items():
            rows[kind] += share * meter.at_peak.get(length, 0) / length
            widest[kind] = max(widest[kind], meter.widest.get(length, 0))
    layers = [(count == num_edges, of_row) for count, of_row in flops.layers if keeps_layers]
    weight = PartMemory(meter.at_peak.get(0, 0) + beside, PerRow(*rows), layers, (widest[OWNED], widest[EDGE]))
    return Piece(num_edges, meter.peak, weight)


class TensorMeter(UncompiledMode):
    """Counts the memory of tensors that are made while it is on.

    Args:
        device: On which they are counted.
        lengths: Those that are counted apart.

    Attributes:
        peak: The most bytes that were there at once.
        now: The bytes that are there.
        at_peak: Those bytes, by the length of their tensors; 0: of others.
        widest: By that length, the most bytes of a row at any time.
    """

    def __init__(self, device: torch.device | str, lengths: Kinds | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind, self._lengths = torch.device(device).type, lengths or {}
        self.peak = self.now = 0
        self.at_peak: Mapping[int, int] = {}
        self.widest: dict[int, int] = {}
        self._alive: set[int] = set()
        self._of_rows: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.are_plain(types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        is_table = function.overloadpacket is torch.ops.aten.set_  # in memory of our own: `empty_table`
        earlier = set() if is_table else set(map(_memory_of, _with_memory((args, kwargs or {}))))
        for tensor in _with_memory(result):
            address = _memory_of(tensor)
            if tensor.device.type == self._kind and address not in earlier and address not in self._alive:
                # A table may lie in a block that was there, and is somewhat larger.
                size = tensor.nbytes if is_table else tensor.untyped_storage().nbytes()
                rows = next((length for length in tensor.shape if length in self._lengths), 0)
                self._alive.add(address)
                self.now += size
                self._of_rows[rows] += size
                self.widest[rows] = max(self.widest.get(rows, 0), size // max(rows, 1))
                if self.now > self.peak:
                    self.peak, self.at_peak = self.now, dict(self._of_rows)
                weakref.finalize(tensor.untyped_storage(), self._gone, address, size, rows)
        return result

    def _gone(self, address: int, size: int, rows: int) -> None:
        self._alive.discard(address)
        self.now -= size
        self._of_rows[rows] -= size


def _with_memory(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# --- parts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """The nodes, edges and bytes of a graph on one rank.

    Attributes:
        owned: Nodes it owns.
        ghosts: Copies of others' nodes.
        edges: Local edges.
        expected: Bytes it will hold at its peak, above `bare`.
        bare: Bytes its process holds before.
        where: The memory all this lies in: a machine, or one of its GPUs.
        free: Bytes that are free there.
        in_files: Bytes of tables that will lie in files.
        card: UUID of a GPU; empty for a machine.
    """

    owned: int
    ghosts: int
    edges: int
    expected: int
    bare: int
    where: str
    free: int
    in_files: int = 0
    card: str = ""


@dataclass(frozen=True)
class Forecast:
    """The memory and seconds of a step before the first one; the same on every rank.

    Attributes:
        shares: Nodes, edges and bytes of each rank.
        seconds: Seconds that the slowest rank computes, without messages; None where only memory was forecast.
        sample: Name of the event, if it is one.
        recompute_every: Iterations of a segment that is computed again; None: all are kept.
        leaner: The `recompute_every` that would take least; None where that is no less.
    """

    shares: tuple[Share, ...]
    seconds: float | None = None
    sample: str = ""
    recompute_every: int | None = None
    leaner: int | None = None

    @property
    def in_files(self) -> bool:
        """Whether tables will lie in files."""
        return any(share.in_files for share in self.shares)

    @property
    def fullest(self) -> int:
        """The rank that will hold most."""
        return max(range(len(self.shares)), key=lambda rank: self.shares[rank].expected)

    @property
    def largest(self) -> int:
        """Bytes of that rank, with those of its bare process."""
        share = self.shares[self.fullest]
        return share.expected + share.bare

    @property
    def needed(self) -> int:
        """Bytes that all ranks of the fullest memory will take there, above what they hold now."""
        return sum(share.expected for share in self._tightest)

    @property
    def free(self) -> int:
        """Bytes that are free in that memory."""
        return min(share.free for share in self._tightest)

    @property
    def fits(self) -> bool:
        """Whether there is room for all ranks, as far as is known now."""
        return self.needed <= self.free

    def check(self) -> Forecast:
        """Return this if it fits, refuse otherwise.

        Raises:
            Refused: On all ranks alike, with the bytes needed and free, and the remedy.
        """
        if self.fits:
            return self
        edges = sum(share.edges for share in self._tightest)
        raise Refused(
            f"{several(len(self._tightest), 'rank')} on {self._tightest[0].where} need {byte_size(self.needed)} for "
            f"{several(edges, 'edge')}, and {byte_size(self.free)} are free",
            "take more ranks on more machines, or recompute: torch's checkpoint with context_fn=domainpar.kept_ghosts, "
            "or domainpar.in_blocks",
        )

    def as_record(self, taken: Sequence[int | None] = ()) -> dict[str, Any]:
        """For `run.json`: bytes of each rank, expected and (when the run is over) taken."""
        return {
            "sample": self.sample,
            "bare_bytes": [share.bare for share in self.shares],
            "expected_bytes": [share.expected for share in self.shares],
            "peak_bytes": list(taken) or None,
            "in_files_bytes": [share.in_files for share in self.shares],
        }

    def shortages(self) -> list[list[Share]]:
        """The ranks of each memory that is too small for them, as far as that is known now."""
        return [here for here in self._places() if _left(here) < 0]

    @property
    def _tightest(self) -> list[Share]:
        return min(self._places(), key=_left)

    def _places(self) -> list[list[Share]]:
        places: dict[str, list[Share]] = {}
        for share in self.shares:
            places.setdefault(share.card or share.where, []).append(share)  # ranks of one machine share its memory
        return list(places.values())


def _left(here: Sequence[Share]) -> int:
    """Bytes that some ranks leave free in the memory that they share."""
    return min(share.free for share in here) - sum(share.expected for share in here)


def forecast_of(
    transport: Transport,
    device: torch.device,
    sizes: tuple[int, int, int],
    expected: int,
    bare: int,
    in_files: int = 0,
    **of_all: Any,
) -> Forecast:
    """The forecast of all ranks. *Collective*.

    Args:
        transport: The ranks.
        device: Where this rank computes.
        sizes: Owned nodes, ghosts and edges of this rank's part.
        expected, bare, in_files: As of `Share`.
        of_all: What is the same on every rank: `seconds`, `sample`, `recompute_every`, `leaner`.
    """
    where, free = free_memory(device)
    card = uuid_of(device) if device.type == "cuda" else ""
    own = Share(*sizes, expected + OF_PROCESS, bare, where, free, in_files, card)
    return Forecast(tuple(Share(**each) for each in gather(transport, asdict(own))), **of_all)


class MemoryMeter:
    """Measures the memory of this rank. Make it before data are loaded: the bare process is what is held then.

    Args:
        device: Where the rank computes: host memory is measured, or that of its GPU.

    Attributes:
        device: That device.
        bare: Bytes that were held when it was made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.forget_peak()
        self.bare = held_bytes(device)

    def forget_peak(self) -> None:
        """Count peaks from now on; where the system does not allow it they count from the start of the process."""
        give_back_freed()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        self._peak_before = self._peak()

    def taken(self, world: World) -> list[int | None]:
        """Bytes of each rank's peak above its bare process; None where it held more before. *Collective*."""
        peak = self._peak()
        return gather(world.transport, peak - self.bare if peak > self._peak_before else None)

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_rss_bytes()


def held_bytes(device: torch.device) -> int:
    """Bytes that this process holds now, in host memory or on its GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """The most memory this process ever held, or has held since a run began to watch it, in bytes."""
    # Not ru_maxrss, where Linux has better: a process inherits it from the one that started it, such as a launcher.
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
