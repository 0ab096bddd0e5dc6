"""Scores of whole events, computed by the ranks that share them: each edge exactly once, in the user's own order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from domainpar import faults
from domainpar.compiling import clock
from domainpar.events.store import Events, JoinedEvents, StoredEvent, WholeEvent
from domainpar.parallel.part_loading import Sector, load_part, sector_of_tiles, together
from domainpar.parallel.transport import RanksFailed, Transport
from domainpar.plan import BoolArray, IntArray, PartitionPlan

BETWEEN_SECTORS = -1

NETWORK, CEILING, CLASSICAL = "network", "ceiling", "classical"
"""Finders of tracks: the network's scores; perfect scores of the same edges, built alike; helices through the hits."""


@dataclass(frozen=True, eq=False)
class EventScores:
    """The scores of one event. Nodes and edges are in the user's order.

    Attributes:
        event_id: The event.
        hit_id: The user's own number of each hit, int64 [N].
        edge_index: `src` and `dst` of each edge as rows of `hit_id`, int64 [2, E].
        edge_logit: Logit of each edge, in the precision of the network, [E]; 0 where it has none.
        edge_score: The sigmoid of it, [E]; 0 where there is no logit.
        edge_scored: False where the network never saw the edge, which joins two sectors, bool [E].
        tracks: Track of each hit, of several the first, -1 for none, int64 [N], by finder.
        shared_hits: Row of each hit that lies on several tracks, and each track of it but the first, ascending, int64
            [S, 2], by finder; of those alone whose tracks share hits.
        seconds: Time of the network, an equal share of that of a call for several events, and of building tracks from
            its scores, on this rank; compiling is left out.
    """

    event_id: str
    hit_id: IntArray
    edge_index: IntArray
    edge_logit: npt.NDArray[np.floating]
    edge_score: npt.NDArray[np.floating]
    edge_scored: BoolArray
    tracks: Mapping[str, IntArray] = field(default_factory=dict)
    shared_hits: Mapping[str, IntArray] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_edges(self) -> int:
        return len(self.edge_logit)

    @property
    def num_unscored(self) -> int:
        return int(np.count_nonzero(~self.edge_scored))


def score_event(model: nn.Module, event: StoredEvent, transport: Transport, **how: Any) -> EventScores | None:
    """Score every edge of one event, as `score_events` does with several. *Collective* over the ranks that share it."""
    scores = score_events(model, [event], transport, **how)
    return None if scores is None else scores[0]


def score_events(
    model: nn.Module,
    events: Sequence[StoredEvent],
    transport: Transport,
    *,
    root: int = 0,
    num_sectors: int | None = None,
    grouping: str = "contiguous",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[EventScores] | None:
    """Score every edge of some events in one call of the network. *Collective* over the ranks that share them.

    A network built on stages gives each event the bits that it has in a call of its own, on CPU.

    Args:
        model: Called with (graph, halo) of a part; returns the logits of its local edges, [num_edges]. Several events
            are one graph to it, so that it must not have norms or other sums over a whole graph.
        events: The stored events, at least one.
        transport: Joins the ranks that share the events.
        root: The rank that gets the scores.
        num_sectors: Number of independent sectors that each event is cut into (naive mode, approximate): edges between
            them get no score. None: the whole event at once.
        grouping: How tiles are grouped into parts.
        device: Where to compute.
        dtype: Type of features, weights and logits.
        seed: Seed of the grouping.

    Returns:
        The scores of each event on `root`, None elsewhere.

    Raises:
        BadEvent: On all ranks alike, if an event holds values that cannot be computed on, or cannot be read, on any.
        RuntimeError: If an edge got no score or several, or one that is not finite; on all ranks.
    """
    is_root = transport.rank == root
    event: Events = events[0] if len(events) == 1 else JoinedEvents(events)
    wholes = [WholeEvent(one) for one in events]

    def sectors() -> IntArray | None:
        return np.concatenate([_sectors(whole, num_sectors) for whole in wholes]) if is_root else None

    # Read by the root alone, before anybody computes: a damaged file then stops all ranks alike.
    sector_of_edge = together(transport, event.place, sectors)
    logits = torch.zeros(event.num_edges if is_root else 0, dtype=dtype)  # in stored order
    seconds = 0.0
    for number in range(num_sectors or 1):
        sector = None if num_sectors is None else Sector(number, num_sectors)
        part = load_part(event, transport, grouping=grouping, sector=sector, device=device, dtype=dtype, seed=seed)
        began = _clock(part.graph.features.device)
        with torch.no_grad():
            local = model(part.graph, part.halo)
        seconds += _clock(local.device) - began
        wanted = None if sector_of_edge is None else sector_of_edge == number
        faults.reach("score")
        try:
            gathered = gather_scores(local, part.graph.plan, transport, wanted, root)
        except RuntimeError as error:
            of_sector = f", sector {number} of {num_sectors}" if num_sectors else ""
            error.add_note(f"event {event.event_id}{of_sector}")
            raise
        if gathered is not None and wanted is not None:
            logits[torch.from_numpy(wanted)] = gathered
    if sector_of_edge is None:
        return None
    counts = [one.num_edges for one in events]
    of_events = zip(wholes, logits.split(counts), np.split(sector_of_edge != BETWEEN_SECTORS, np.cumsum(counts)[:-1]))
    return [_in_users_order(*of_event, seconds / len(events)) for of_event in of_events]


def _clock(device: torch.device) -> float:
    """Seconds at which a device has done what it was told so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


def _in_users_order(whole: WholeEvent, logits: Tensor, scored: BoolArray, seconds: float) -> EventScores:
    """The scores of an event, given its logits in stored order and which of its edges have one."""
    # One tensor of all edges in one order, whatever the ranks: an edge's place decides how its sigmoid is rounded.
    edge_logit = logits[torch.from_numpy(whole.edge_ids)]
    edge_scored = scored[whole.edge_ids]
    return EventScores(
        event_id=whole.event.event_id,
        hit_id=whole.event.read_nodes("hit_id", whole.node_ids),
        edge_index=whole.edge_index,
        edge_logit=edge_logit.numpy(),
        edge_score=torch.where(torch.from_numpy(edge_scored), torch.sigmoid(edge_logit), 0.0).numpy(),
        edge_scored=edge_scored,
        seconds={"network": seconds},
    )


def _sectors(whole: WholeEvent, num_sectors: int | None) -> IntArray:
    """Sector of each stored edge: that of both ends, `BETWEEN_SECTORS` where they differ, [E]; 0 in a whole event."""
    ends = whole.edge_index
    sector_of_edge = np.zeros(whole.event.num_edges, np.int32)
    if num_sectors is not None:
        of_tiles = sector_of_tiles(whole.event, num_sectors)
        sector_of_hit = np.repeat(of_tiles, np.diff(whole.event.node_ptr))[whole.node_ids]
        src, dst = sector_of_hit[ends]
        sector_of_edge[whole.edge_ids] = np.where(src == dst, dst, BETWEEN_SECTORS)
    return sector_of_edge


def gather_scores(
    logits: Tensor, plan: PartitionPlan, transport: Transport, wanted: BoolArray | None, root: int = 0
) -> Tensor | None:
    """Bring the logits of all owned edges to one rank, each edge exactly once. *Collective*; no float is added.

    Args:
        logits: Logits of this part's local edges, [num_edges].
        plan: This part's plan.
        transport: Joins the ranks that share the event.
        wanted: Which edges of the event the parts own together, bool [E]; needed on `root` only.
        root: The rank that gets them.

    Returns:
        On `root` the logits of the wanted edges by increasing global id, [wanted.sum()], on the CPU; None elsewhere.

    Raises:
        RuntimeError: On all ranks, if an edge got no logit or several, or one that is not finite.
    """
    owned = np.flatnonzero(plan.edge_owned)
    # On the logits' device: NCCL carries nothing else, the other transports take either.
    edge_ids = torch.from_numpy(plan.edge_ids[owned]).to(logits.device)
    owned_logits = logits.detach().index_select(0, torch.from_numpy(owned).to(logits.device))
    edge_ids, owned_logits = _to_root(edge_ids, owned_logits, transport, root)
    # Only the root can tell, but all must stop with it.
    problem = b""
    if transport.rank == root:
        assert wanted is not None, "the root knows which edges are to be scored"
        problem = _problem(edge_ids.numpy(), owned_logits, wanted).encode()
    if text := transport.broadcast(problem, root).decode():
        raise RuntimeError(text) if transport.rank == root else RanksFailed(text)
    return owned_logits[torch.argsort(edge_ids)] if transport.rank == root else None


def _to_root(edge_ids: Tensor, logits: Tensor, transport: Transport, root: int) -> tuple[Tensor, Tensor]:
    """Rows of all ranks on `root`, its own first, on the CPU; nothing on the others. *Collective*."""
    # The root alone makes room, and so must know first what comes.
    counts = [int.from_bytes(count, "little") for count in transport.all_gather(len(logits).to_bytes(8, "little"))]
    is_root = transport.rank == root
    send_counts = [0 if is_root or peer != root else len(logits) for peer in range(transport.size)]
    receive_counts = [count if is_root and peer != root else 0 for peer, count in enumerate(counts)]
    tables, pending = [], []
    for values in (edge_ids, logits):
        kept, sent = (values, values[:0]) if is_root else (values[:0], values)
        # Transports take tables, so a column of one. Ids and logits are under way together.
        table = values.new_empty(sum(counts) if is_root else 0, 1)
        table[: len(kept), 0] = kept
        pending.append(transport.start(sent.reshape(-1, 1), send_counts, table[len(kept) :], receive_counts))
        tables.append(table[:, 0])
    for exchange in pending:
        exchange.finish()
    return tables[0].cpu(), tables[1].cpu()


def _problem(edge_ids: IntArray, logits: Tensor, wanted: BoolArray) -> str:
    """A sentence if the logits of these edges are wrong; empty if every wanted edge has exactly one finite logit."""
    num_edges = int(np.count_nonzero(wanted))
    of_event = (edge_ids >= 0) & (edge_ids < len(wanted))
    times = np.bincount(edge_ids[of_event], minlength=len(wanted))
    missing, twice = np.count_nonzero(times[wanted] == 0), np.count_nonzero(times[wanted] > 1)
    strange = len(edge_ids) - int(times[wanted].sum())
    if missing or twice or strange:
        others = f", and {strange} scores belong to none of them" if strange else ""
        return (
            f"{missing} of {num_edges} edges got no score and {twice} got two{others}; "
            "the plans of this event do not come from one assignment."
        )
    if bad := int((~torch.isfinite(logits)).sum()):
        return f"{bad} of {num_edges} edges got a score that is not finite; take another checkpoint."
    return ""
