"""From a stored event to one rank's part of it: group the tiles, read what is needed, plan, put on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from domainpar.events.store import StoredEvent
from domainpar.parallel.halo import CompleteHalo, ask_owners
from domainpar.parallel.local import LocalGraph, TileRanges, localise
from domainpar.parallel.transport import Transport
from domainpar.plan import EdgePolicy, IntArray, LocalEdges, build_plan
from partitioners.grouping import TileGraph, group


@dataclass(frozen=True)
class Sector:
    """One of the independent sectors an event is cut into in naive mode: `number` of `of`."""

    number: int
    of: int


@dataclass(frozen=True, eq=False)
class Part:
    """One rank's part of an event (or of a sector of it), ready to compute on."""

    graph: LocalGraph
    halo: CompleteHalo


def load_part(
    event: StoredEvent,
    transport: Transport,
    *,
    grouping: str = "contiguous",
    sector: Sector | None = None,
    policy: EdgePolicy = "incident",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Part:
    """Read one rank's part of a stored event. *Collective* over the ranks that share the event.

    Args:
        event: The stored event; only the chunks this part needs are read.
        transport: Joins the ranks that share the event; part `p` lives on rank `p`.
        grouping: How tiles are grouped into parts: `contiguous`, `metis` or `random`.
        sector: Take only this sector, and none of the edges that leave it; None for the whole event.
        policy: Which edges are local.
        device: Where the part goes.
        dtype: Type of the features.
        seed: Seed of the grouping.

    Raises:
        ValueError: If the event holds values that cannot be computed on, or cannot be read.
        RuntimeError: If the ranks hold different plans.
    """
    part_of_tile = group_tiles(event, transport, grouping, sector, seed)
    ranges = TileRanges(event.node_ptr, event.edge_ptr, part_of_tile)
    owner = ranges.node_owner()
    edges = _read_edges(event, np.flatnonzero(part_of_tile == transport.rank), policy, owner)
    plan = build_plan(edges, owner, transport.rank, transport.size, policy, ask_owners(transport))
    graph = localise(
        plan,
        ranges,
        event.read_nodes("features", plan.local_ids),
        event.read_edges("features", plan.edge_ids),
        event.read_edges("label", plan.edge_ids) if event.has_labels else None,
        event_id=event.event_id,
        device=device,
        dtype=dtype,
    )
    return Part(graph, CompleteHalo(plan, transport, device))


def group_tiles(
    event: StoredEvent, transport: Transport, method: str, sector: Sector | None = None, seed: int = 0
) -> IntArray:
    """Part of each tile, int32 [K], -1 outside the sector; made on rank 0 and broadcast. *Collective*.

    METIS promises the same bits on one machine only, so one rank computes for all.
    """
    payload = None
    if transport.rank == 0:
        tiles = event.tile_graph()
        taken = np.arange(event.num_tiles)
        if sector is not None:
            taken = np.flatnonzero(sector_of_tiles(event, sector.of) == sector.number)
        parts = np.full(event.num_tiles, -1, dtype=np.int32)
        parts[taken] = group(_only(tiles, taken), transport.size, method, seed)
        payload = parts.tobytes()
    return np.frombuffer(transport.broadcast(payload), dtype=np.int32)


def sector_of_tiles(event: StoredEvent, num_sectors: int) -> IntArray:
    """Sector of each tile in naive mode, int32 [K]: contiguous ranges of tiles of equal cost, whatever the ranks."""
    return group(event.tile_graph(), num_sectors, "contiguous")


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


def _read_edges(event: StoredEvent, tiles: IntArray, policy: EdgePolicy, owner: IntArray) -> LocalEdges:
    """The local edges of a part, without those that leave its sector."""
    edge_ids, src, dst = event.read_part_edges(tiles, policy)
    kept = (owner[src] >= 0) & (owner[dst] >= 0)
    if kept.all():
        return LocalEdges(edge_ids, src, dst)
    return LocalEdges(edge_ids[kept], src[kept], dst[kept])
