"""Scores of whole events, computed by the ranks that share them: each edge exactly once, in the user's own order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from domainpar.common import faults
from domainpar.common.compiling import clock
from domainpar.nn.heads import Readings
from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.halo import CompleteHalo
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.transport import Transport
from domainpar.plan import BoolArray, IntArray, PartitionPlan
from domainpar.tracking.events.store import Events, JoinedEvents, StoredEvent, WholeEvent
from domainpar.tracking.part_loading import all_sectors, load_part, sector_of_tiles, together
from domainpar.tracking.reco.event_scores import Scores
from partitioners import Sectors

BETWEEN_SECTORS = -1
EDGES = ""
"""The name of the logits of edges among tables of labels, which have one."""

Network = Callable[[LocalGraph, CompleteHalo], Tensor | Readings]


def score_events(
    model: Network,
    events: Sequence[StoredEvent],
    transport: Transport,
    *,
    root: int = 0,
    sectors: Sectors | None = None,
    grouping: str = "contiguous",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Scores] | None:
    """Score every edge of some events in one call of the network. *Collective* over the ranks that share them.

    A network built on stages gives each event the bits that it has in a call of its own, on CPU.

    Args:
        model: Called with (graph, halo) of a part; returns the logits of its local edges, [num_edges], or `Readings`.
            Several events are one graph to it, so that it must not have norms or other sums over a whole graph.
        events: The stored events, at least one.
        transport: Joins the ranks that share the events.
        sectors: Independent sectors that each event is cut into (naive mode, approximate), 8 or "8x2": edges between
            them get no score. None: the whole event at once.
        grouping: How tiles are grouped into parts.
        dtype: Type of features, weights and logits.

    Returns:
        The scores of each event on `root`, None elsewhere.

    Raises:
        BadEvent: On all ranks alike, if an event holds values that cannot be computed on, or cannot be read, on any.
        RuntimeError: If an edge or a node got nothing or several, or what is not finite; on all ranks.
    """
    is_root = transport.rank == root
    event: Events = events[0] if len(events) == 1 else JoinedEvents(events)
    wholes = [WholeEvent(one) for one in events]

    def sectors_of_all() -> tuple[IntArray, IntArray] | None:
        each = [_sectors(whole, sectors) for whole in wholes] if is_root else []
        return tuple(map(np.concatenate, zip(*each))) if each else None  # type: ignore[return-value]

    # Read by the root alone, before any rank computes: a damaged file then stops all ranks alike.
    sector_of = together(transport, event.place, sectors_of_all)
    tables: dict[str, Tensor] = {}  # in stored order
    seconds = 0.0
    for number, sector in enumerate(all_sectors(sectors)):
        part = load_part(event, transport, grouping=grouping, sector=sector, device=device, dtype=dtype, seed=seed)
        began = _clock(part.graph.features.device)
        with torch.no_grad():
            output = model(part.graph, part.halo)
        seconds += _clock(part.graph.features.device) - began
        readings = output if isinstance(output, Readings) else Readings(output)
        faults.reach("score")
        wanted_edges, wanted_nodes = (None, None) if sector_of is None else (of == number for of in sector_of)
        plan, rows = part.graph.plan, {}
        try:
            if readings.edges is not None:
                rows[EDGES] = wanted_edges, gather_scores(readings.edges, plan, transport, wanted_edges, root)
            for name, local in readings.others.items():
                if local.dim() == 1:  # of the event as a whole, the same on every rank
                    tables[name] = local.detach().cpu()
                else:
                    gathered = _gathered("node", plan.owned_ids, local.detach(), transport, wanted_nodes, root)
                    rows[name] = wanted_nodes, gathered
        except RuntimeError as error:
            of_sector = f", sector {number} of {sectors}" if sectors else ""
            error.add_note(f"event {event.event_id}{of_sector}")
            raise
        for name, (wanted, gathered) in rows.items():
            if gathered is not None and wanted is not None:
                if name not in tables:
                    tables[name] = gathered.new_zeros(len(wanted), *gathered.shape[1:])
                tables[name][torch.from_numpy(wanted)] = gathered
    if sector_of is None:
        return None
    scored = sector_of[0] != BETWEEN_SECTORS if EDGES in tables else np.zeros(event.num_edges, np.bool_)
    tables.setdefault(EDGES, torch.zeros(event.num_edges, dtype=dtype))
    scores = []
    first_edge = first_node = 0
    for whole in wholes:
        edges = slice(first_edge, first_edge := first_edge + whole.event.num_edges)
        nodes = slice(first_node, first_node := first_node + whole.event.num_nodes)
        own = {
            name: table[edges] if name == EDGES else table if table.dim() == 1 else table[nodes]
            for name, table in tables.items()
        }
        scores.append(_in_users_order(whole, own, scored[edges], seconds / len(events)))
    return scores


def _clock(device: torch.device) -> float:
    """Seconds at which a device has finished all work that was queued so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


def _in_users_order(whole: WholeEvent, tables: Mapping[str, Tensor], scored: BoolArray, seconds: float) -> Scores:
    """The scores of an event, given all predictions for it in stored order, and which of its edges have a score."""
    logits, nodes = tables[EDGES], torch.from_numpy(whole.node_ids)
    of_labels = {name: table if table.dim() == 1 else table[nodes] for name, table in tables.items() if name != EDGES}
    # One tensor of all edges in one order, whatever the ranks: an edge's place decides how its sigmoid is rounded.
    edge_logit = logits[torch.from_numpy(whole.edge_ids)]
    edge_scored = scored[whole.edge_ids]
    return Scores(
        event_id=whole.event.event_id,
        hit_id=whole.event.read_nodes("hit_id", whole.node_ids),
        edge_index=whole.edge_index,
        edge_logit=edge_logit.numpy(),
        edge_score=torch.where(torch.from_numpy(edge_scored), torch.sigmoid(edge_logit), 0.0).numpy(),
        edge_scored=edge_scored,
        readings={name: table.numpy() for name, table in of_labels.items()},
        seconds={"network": seconds},
    )


def _sectors(whole: WholeEvent, sectors: Sectors | None) -> tuple[IntArray, IntArray]:
    """Sector of each stored edge, `BETWEEN_SECTORS` where its ends differ, [E], and node, [N]; 0 in a whole event."""
    ends = whole.edge_index
    sector_of_edge, sector_of_node = (
        np.zeros(whole.event.num_edges, np.int32),
        np.zeros(whole.event.num_nodes, np.int32),
    )
    if sectors is not None:
        sector_of_node = np.repeat(sector_of_tiles(whole.event, sectors), np.diff(whole.event.node_ptr))
        src, dst = sector_of_node[whole.node_ids][ends]
        sector_of_edge[whole.edge_ids] = np.where(src == dst, dst, BETWEEN_SECTORS)
    return sector_of_edge, sector_of_node


def gather_scores(
    logits: Tensor, plan: PartitionPlan, transport: Transport, wanted: BoolArray | None, root: int = 0
) -> Tensor | None:
    """Bring the logits of all owned edges to one rank, each edge exactly once. *Collective*; no float is added.

    Args:
        logits: Logits of this part's local edges, [num_edges].
        wanted: Which edges of the event the parts own together, bool [E]; needed on `root` only.

    Returns:
        On `root` the logits of the wanted edges by increasing global id, [wanted.sum()], on the CPU; None elsewhere.

    Raises:
        RuntimeError: On all ranks, if an edge got no logit or several, or one that is not finite.
    """
    owned = np.flatnonzero(plan.edge_owned)
    owned_logits = logits.detach().index_select(0, torch.from_numpy(owned).to(logits.device))
    table = _gathered("edge", plan.edge_ids[owned], owned_logits[:, None], transport, wanted, root)
    return None if table is None else table[:, 0]


def _gathered(
    what: str, ids: IntArray, rows: Tensor, transport: Transport, wanted: BoolArray | None, root: int
) -> Tensor | None:
    """Rows of all ranks by increasing id on `root`, on the CPU; None on the others. *Collective*."""
    # The root alone makes room, and so must know first what comes.
    counts = [int.from_bytes(count, "little") for count in transport.all_gather(len(rows).to_bytes(8, "little"))]
    is_root = transport.rank == root
    send_counts = [0 if is_root or peer != root else len(rows) for peer in range(transport.size)]
    receive_counts = [count if is_root and peer != root else 0 for peer, count in enumerate(counts)]
    tables, pending = [], []
    # On the rows' device: NCCL carries nothing else, the other transports take either.
    for values in (torch.from_numpy(ids)[:, None].to(rows.device), rows):  # under way together, the root's own first
        kept, sent = (values, values[:0]) if is_root else (values[:0], values)
        table = values.new_empty(sum(counts) if is_root else 0, values.shape[1])
        table[: len(kept)] = kept
        pending.append(transport.start(sent.contiguous(), send_counts, table[len(kept) :], receive_counts))
        tables.append(table)
    for exchange in pending:
        exchange.finish()
    all_ids, all_rows = tables[0][:, 0].cpu(), tables[1].cpu()
    # Only the root can tell, but all must stop with it.
    problem = b""
    if is_root:
        assert wanted is not None, "the root knows what is to be scored"
        problem = _problem(what, all_ids.numpy(), all_rows, wanted).encode()
    if text := transport.broadcast(problem, root).decode():
        raise RuntimeError(text) if is_root else RanksFailed(text)
    return all_rows[torch.argsort(all_ids)] if is_root else None


def _problem(what: str, ids: IntArray, rows: Tensor, wanted: BoolArray) -> str:
    """A sentence if the scores of these edges or nodes are wrong; empty if each that is wanted has exactly one."""
    count = int(np.count_nonzero(wanted))
    of_event = (ids >= 0) & (ids < len(wanted))
    times = np.bincount(ids[of_event], minlength=len(wanted))
    missing, twice = np.count_nonzero(times[wanted] == 0), np.count_nonzero(times[wanted] > 1)
    strange = len(ids) - int(times[wanted].sum())
    if missing or twice or strange:
        others = f", and {strange} scores belong to none of them" if strange else ""
        return (
            f"{missing} of {count} {what}s got no score and {twice} got two{others}; "
            "the plans of this event do not come from one assignment."
        )
    if bad := int((~torch.isfinite(rows)).any(1).sum()):
        return f"{bad} of {count} {what}s got a score that is not finite; take another checkpoint."
    return ""
