"""From a stored event to one rank's part of it: group the tiles, read what is needed, plan, put on the device.

Ranks read on their own and talk in between. An event that one of them cannot read is given up by all that share it
before any of them waits for what will not come: after each piece of reading they agree whether it went well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from domainpar.common import faults
from domainpar.common.agreement import Refused, agree, on_all
from domainpar.common.problems import EventPlace, Problem
from domainpar.common.words import several
from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.halo import CompleteHalo, ask_owners
from domainpar.parallel.local import LocalGraph, TileRanges, localise
from domainpar.parallel.transport import Transport
from domainpar.plan import IntArray, LocalEdges, complete_plan, draft_plan
from domainpar.tracking.events.store import EventRecord, Events, EventStore, StoredEvent
from partitioners import Sectors, TileGraph, group, number_of_sectors, sectors_of_tiles

T = TypeVar("T")


class BadEvent(Problem):
    """An event that a rank could not read or compute on: all ranks that share it give it up.

    Attributes:
        rank: The first rank of the run that could not.
        here: Whether this rank could not.
    """

    def __init__(self, problem: Problem, rank: int, here: bool) -> None:
        super().__init__(problem.what, problem.hint, event=problem.event, file=problem.file)
        self.rank, self.here = rank, here

    def for_this_rank(self) -> Exception:
        """The error with which this rank ends the run: the rank that has the problem reports it, the others do not."""
        return self if self.here else RanksFailed(f"rank {self.rank}: {self.what}")


def together(transport: Transport, place: EventPlace, work: Callable[[], T]) -> T:
    """Do a rank's own share of work on an event; all ranks that share it go on, or none. *Collective*.

    Args:
        transport: Joins the ranks that share the event.
        place: The event and its file.
        work: Without communication.

    Raises:
        BadEvent: On all of them alike, if the work raised a ValueError or OSError on any.
    """
    return on_all(transport, work, partial(_settle, place))


def _settle(place: EventPlace, transport: Transport, error: ValueError | OSError | None) -> None:
    """Raise a BadEvent on all ranks if one has a problem. *Collective*; costs one small sum where none has."""
    failed = torch.tensor([int(error is not None)], dtype=torch.int64, device="cpu")
    transport.all_reduce(failed)
    if not failed[0]:  # the usual case: texts travel only where there is a problem
        return
    problem: Problem | None = None
    if isinstance(error, OSError):
        problem = place.problem(f"cannot be read: {error.strerror or error}")
    elif error is not None:
        problem = place.attach_to(error)
    try:
        agree(transport, problem)
    except Refused as refused:
        raise BadEvent(refused.first, refused.ranks[0], error is not None) from error


@contextmanager
def open_together(
    store: EventStore, record: EventRecord, transport: Transport, check_bytes: bool = False
) -> Iterator[StoredEvent]:
    """Open an event on all ranks that share it. *Collective*.

    Args:
        store: The events.
        record: Which.
        transport: Joins the ranks that share the event.
        check_bytes: Read the whole file first, each rank a share of it, so that nothing of it can fail later.

    Raises:
        BadEvent: On all of them alike, if one cannot open it.
    """
    with ExitStack() as opened:

        def work() -> StoredEvent:
            faults.reach("load")
            event = opened.enter_context(store.open(record))
            if check_bytes:
                event.check_bytes(transport.rank, transport.size)
            return event

        yield together(transport, EventPlace(record.event, store.path / record.path), work)


@dataclass(frozen=True)
class Sector:
    """One of the independent sectors an event is cut into in naive mode: `number` of `of`, 3 of 8 or of 8x2."""

    number: int
    of: Sectors


@dataclass(frozen=True, eq=False)
class Part:
    """One rank's part of an event (or of a sector of it), ready to compute on."""

    graph: LocalGraph
    halo: CompleteHalo


def load_part(
    event: Events,
    transport: Transport,
    *,
    grouping: str = "contiguous",
    sector: Sector | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Part:
    """Read one rank's part of a stored event, or of several. *Collective* over the ranks that share them.

    Args:
        event: The stored event, or several read as one; only the chunks this part needs are read.
        transport: Joins the ranks that share the event; part `p` lives on rank `p`.
        grouping: How tiles are grouped into parts: `contiguous`, `metis` or `random`.
        sector: Take only this sector, and none of the edges that leave it; None for the whole event.
        device: Where the part goes.
        dtype: Type of the features.
        seed: Seed of the grouping.

    Raises:
        BadEvent: On all ranks alike, if the event holds values that cannot be computed on, or cannot be read, on any.
        RuntimeError: If the ranks hold different plans.
    """
    part_of_tile = group_tiles(event, transport, grouping, sector, seed)
    rank, size = transport.rank, transport.size
    work = partial(read_part, event, part_of_tile, rank, size, device=device, dtype=dtype)
    return joined_part(together(transport, event.place, work), transport, device)


def read_part(
    event: Events, part_of_tile: IntArray, part: int, num_parts: int, *, device: torch.device | str, dtype: torch.dtype
) -> LocalGraph:
    """Read one part of an event. Without communication: its plan does not know yet what others need of it.

    Args:
        event: The stored event, or several read as one.
        part_of_tile: Part of each tile, int32 [K]; -1 outside the sector.
        part: Which part.
        num_parts: How many there are.
        device: Where it goes.
        dtype: Type of the features.

    Raises:
        ValueError: If the event is damaged, or holds values that cannot be computed on.
        OSError: If it cannot be read.
    """
    ranges = TileRanges(event.node_ptr, event.edge_ptr, part_of_tile)
    owner = ranges.node_owner()
    edge_ids, src, dst = event.read_part_edges(np.flatnonzero(part_of_tile == part), "incident")
    kept = (owner[src] >= 0) & (owner[dst] >= 0)  # the others leave the sector
    edges = LocalEdges(edge_ids, src, dst)
    if not kept.all():  # most often all are: nothing is copied
        edges = LocalEdges(edge_ids[kept], src[kept], dst[kept])
    plan = draft_plan(edges, owner, part, num_parts, "incident")
    return localise(
        plan,
        ranges,
        event.read_nodes("features", plan.local_ids),
        event.read_edges("features", plan.edge_ids),
        event.read_edges("label", plan.edge_ids) if event.has_labels else None,
        event_id=event.event_id,
        device=device,
        dtype=dtype,
    )


def joined_part(graph: LocalGraph, transport: Transport, device: torch.device | str = "cpu") -> Part:
    """A part that `read_part` read, which now knows what the others need of it. *Collective*.

    Raises:
        RuntimeError: If the ranks hold different plans.
    """
    plan = complete_plan(graph.plan, ask_owners(transport))
    return Part(replace(graph, plan=plan), CompleteHalo(plan, transport, device))


def group_tiles(
    event: Events, transport: Transport, method: str, sector: Sector | None = None, seed: int = 0
) -> IntArray:
    """Part of each tile, int32 [K], -1 outside the sector; made on rank 0 and broadcast. *Collective*.

    METIS repeats its bits on one machine only, so one rank computes for all.
    """

    def payload() -> bytes | None:
        return parts_of(event, transport.size, method, sector, seed).tobytes() if transport.rank == 0 else None

    return np.frombuffer(transport.broadcast(together(transport, event.place, payload)), dtype=np.int32)


def all_sectors(sectors: Sectors | None) -> list[Sector | None]:
    """The sectors that an event is cut into; None, the whole of it, where it is not."""
    return [None] if sectors is None else [Sector(number, sectors) for number in range(number_of_sectors(sectors))]


def check_sectors(store: EventStore, records: Sequence[EventRecord], sectors: Sectors | None) -> None:
    """Refuse sectors that tiles cannot make. Without communication; the events of a store are of one kind.

    Raises:
        Problem: If there are more sectors than an event has tiles; of a grid, also if hits have no positions, or tiles
            reach over all of phi or of eta.
    """
    if sectors is None or not records:
        return
    number, least = number_of_sectors(sectors), min(records, key=lambda record: record.num_tiles)
    if number > least.num_tiles:  # some would be empty, and scores of 64 sectors would be those of 32
        tiles = several(least.num_tiles, "tile")
        raise Problem(
            f"{number} sectors are made of whole tiles, and event {least.event} of store {store.path} has {tiles}",
            f"prepare it anew with --tiles {number}, or ask for at most {least.num_tiles} sectors",
        )
    if isinstance(sectors, int):
        return
    along = str(store.settings.get("partitioner"))
    if along in ("phi", "eta") and "1" not in sectors.split("x"):
        raise Problem(
            f"sectors of {sectors} need tiles cut in phi and eta, and those of store {store.path} follow {along} only",
            "prepare it anew with --partitioner phi-eta, or ask for a number of sectors, such as 8",
        )
    with store.open(records[0]) as event:
        if not event.has_positions:
            raise event.place.problem(
                f"its hits have no positions, and sectors of {sectors} are cut in phi and eta",
                f"ask for a number of sectors, such as {number_of_sectors(sectors)}",
            )


def empty_parts(event: StoredEvent, num_parts: int, method: str, sectors: Sectors | None, seed: int) -> list[int]:
    """The parts that own no node of an event, or of at least one of its sectors; ascending."""
    counts = np.diff(event.node_ptr)
    empty: set[int] = set()
    for sector in all_sectors(sectors):
        parts = parts_of(event, num_parts, method, sector, seed)
        owned = np.bincount(parts[parts >= 0], counts[parts >= 0], num_parts)
        empty |= set(np.flatnonzero(owned == 0).tolist())
    return sorted(empty)


def parts_of(event: Events, num_parts: int, method: str, sector: Sector | None, seed: int) -> IntArray:
    """Part of each tile, int32 [K], -1 outside the sector."""
    taken = np.arange(event.num_tiles)  # in naive mode, the sector's: its tiles are grouped as if there were no others
    if sector is not None:
        taken = np.flatnonzero(sector_of_tiles(event, sector.of) == sector.number)
    parts = np.full(event.num_tiles, -1, dtype=np.int32)
    parts[taken] = group(_only(event.tile_graph(), taken), num_parts, method, seed)
    return parts


def sector_of_tiles(event: Events, sectors: Sectors) -> IntArray:
    """Sector of each tile in naive mode, int32 [K], of equal cost, whatever the ranks.

    Raises:
        ValueError: If the sectors are a grid, and an event has no positions.
    """
    found = []
    for one in event.events:
        position = None
        if not isinstance(sectors, int) and one.has_positions:  # ranges of tiles are known without it
            position = one.read_nodes("position", np.arange(one.num_nodes))
        tile_of_node = np.repeat(np.arange(one.num_tiles), np.diff(one.node_ptr))
        found.append(sectors_of_tiles(one.tile_graph(), sectors, tile_of_node, position))
    return np.concatenate(found)


def _only(tiles: TileGraph, taken: IntArray) -> TileGraph:
    """The tile graph of some tiles, renumbered from 0."""
    number = np.full(tiles.num_tiles, -1, dtype=np.int64)
    number[taken] = np.arange(len(taken))
    inside = (number[tiles.src_tile] >= 0) & (number[tiles.dst_tile] >= 0)
    return TileGraph(
        node_counts=tiles.node_counts[taken],
        edge_counts=tiles.edge_counts[taken],
        src_tile=number[tiles.src_tile[inside]].astype(np.int32),
        dst_tile=number[tiles.dst_tile[inside]].astype(np.int32),
        joining=tiles.joining[inside],
    )
