"""Two networks one after the other, in one process: what the first, the filter, leaves of the edges the second scores.

The bits are those of two commands with a store in between (`prepare --source scores`): the edges that are left are cut
into the tiles that the store would have. But scores are of all edges of the event: those that the filter dropped have
none, as those between two sectors, and count as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import clock
from domainpar.parallel.transport import Transport
from domainpar.plan import BoolArray
from domainpar.tracking.events.store import FilteredEvent, StoredEvent, WholeEvent
from domainpar.tracking.events.stored_order import tiles_of
from domainpar.tracking.part_loading import together
from domainpar.tracking.reco.event_scores import Scores
from partitioners import Topology

Score = Callable[..., list[Scores] | None]
"""`score_events` with its network: called with the events of a call, the transport of the ranks that share them, and
`root`."""


def kept_by(edge_score: npt.NDArray[np.floating], edge_scored: BoolArray, min_score: float) -> BoolArray:
    """Which edges a filter keeps, bool [E]."""
    return edge_scored & (edge_score >= min_score)


def score_what_is_left(
    first: Score, min_score: float, second: Score, events: Sequence[StoredEvent], transport: Transport, *, root: int = 0
) -> list[Scores] | None:
    """Score the edges that a filter keeps, of some events. *Collective* over the ranks that share them.

    Args:
        first: The filter.
        min_score: Score that it asks for, at least.
        second: The network whose scores are wanted.
        events, transport, root: As of `score_events`.

    Returns:
        The scores of each event on `root`, None elsewhere.
    """
    began = clock()
    everything = first(events, transport, root=root)
    left = [
        _left(event, transport, root, None if everything is None else everything[number], min_score)
        for number, event in enumerate(events)
    ]
    seconds = (clock() - began) / len(events)
    scores = second(left, transport, root=root)
    if scores is None or everything is None:
        return None
    of_all_edges = []
    for before, after in zip(everything, scores):
        kept = kept_by(before.edge_score, before.edge_scored, min_score)
        spread: dict[str, Any] = {}
        for name in ("edge_logit", "edge_score", "edge_scored"):
            values = getattr(after, name)
            spread[name] = np.zeros(len(kept), values.dtype)
            spread[name][kept] = values
        took = {**after.seconds, "filter": seconds}
        of_all_edges.append(replace(after, edge_index=before.edge_index, **spread, seconds=took))
    return of_all_edges


def _left(
    event: StoredEvent, transport: Transport, root: int, scores: Scores | None, min_score: float
) -> FilteredEvent:
    """An event with the edges that its scores, on `root`, keep. *Collective*."""

    def cut() -> bytes | None:
        # By one rank for all: METIS repeats its bits on one machine only.
        if scores is None:
            return None
        kept = kept_by(scores.edge_score, scores.edge_scored, min_score)
        edges, position = scores.edge_index[:, kept], WholeEvent(event).nodes("position")
        assignment, num_tiles = tiles_of(Topology(edges, event.num_nodes, position))
        head = np.array([num_tiles], np.int64)
        return head.tobytes() + assignment.astype(np.int32).tobytes() + np.packbits(kept).tobytes()

    message = transport.broadcast(together(transport, event.place, cut), root)
    of_nodes = 8 + 4 * event.num_nodes
    kept = np.unpackbits(np.frombuffer(message[of_nodes:], np.uint8), count=event.num_edges).astype(np.bool_)
    assignment = np.frombuffer(message[8:of_nodes], np.int32)
    return FilteredEvent(event, kept, assignment, int(np.frombuffer(message[:8], np.int64)[0]))
