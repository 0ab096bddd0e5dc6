"""From scores to tracks: one part of an event on each rank, the same tracks on any number of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from domainpar.events.store import StoredEvent
from domainpar.parallel.deliver import deliver
from domainpar.parallel.halo import Halo
from domainpar.parallel.part_loading import Part
from domainpar.parallel.transport import Transport
from domainpar.plan import IntArray, PartitionPlan
from domainpar.reco.tracks.agreeing import owners_logits
from domainpar.reco.tracks.chains import find_chains
from domainpar.reco.tracks.components import connect
from domainpar.reco.tracks.double_hits import with_double_hits
from domainpar.reco.tracks.junctions import without_junctions
from domainpar.reco.tracks.moving import NO_TRACK, walk_components
from domainpar.reco.tracks.options import TrackOptions
from domainpar.reco.tracks.segments import Floats, LocalHits, Segments, passing_segments


@dataclass(frozen=True, eq=False)
class TrackBuilder:
    """Builds the tracks of one part of an event, together with the ranks that hold the others.

    Attributes:
        part: This rank's part, of an `incident` plan.
        event: The stored event.
        hits: What is looked at of the part's hits.
        options: The method and its numbers.
        halo: What exchanges rows that lie on the host.
    """

    part: Part
    event: StoredEvent
    hits: LocalHits
    options: TrackOptions
    halo: Halo

    @classmethod
    def of(cls, part: Part, event: StoredEvent, options: TrackOptions) -> TrackBuilder:
        """Read what track building needs of a part. *Collective*.

        Raises:
            ValueError: If the plan is not `incident`, or a walk is asked for where hits have no positions.
        """
        if part.graph.plan.policy != "incident":
            raise ValueError(
                f"tracks need 'incident' plans, got {part.graph.plan.policy!r}: a hit must see all its edges."
            )
        if options.method == "walk" and not event.has_positions:
            raise event.place.problem(
                "a walk goes outward, but its hits have no positions", "take --tracks cc or junction"
            )
        plan, on_host = part.graph.plan, part.graph.src.device.type == "cpu"
        halo = part.halo if on_host else Halo(plan, part.halo.transport)  # labels and hits are looked at on the host
        return cls(part, event, LocalHits.read(event, plan), options, halo)

    def build(self, logits: npt.NDArray[np.floating]) -> IntArray:
        """Track of each owned hit: the smallest global id on it, `NO_TRACK` for none; int64 [num_owned]. *Collective*.

        Args:
            logits: Logits of the local edges, [num_edges]; of a cut edge its owner's counts.
        """
        logits = owners_logits(logits.astype(np.float64), self.part.graph.plan, self.halo.transport)
        method = {"cc": self._components, "walk": self._walk, "junction": self._junctions}[self.options.method]
        return method(logits)

    def _segments(self, logits: Floats, score: float) -> Segments:
        return passing_segments(logits, self.part.graph.plan, self.event, self.hits, score)

    def _components(self, logits: Floats) -> IntArray:
        return self._long_components(self._segments(logits, self.options.floor))

    def _walk(self, logits: Floats) -> IntArray:
        segments = self._segments(logits, self.options.floor)
        components = connect(segments, self.halo)
        chains = find_chains(components, segments)
        walked = walk_components(~chains.simple, segments, self.hits, self.halo, self.options)
        long_chain = chains.simple & (chains.size >= self.options.min_hits)
        return self._finished(np.where(long_chain, components.label, walked), segments)

    def _junctions(self, logits: Floats) -> IntArray:
        loose = self._segments(logits, min(self.options.chain_cut, self.options.floor))
        components = connect(loose.above(self.options.chain_cut), self.halo)
        chains = find_chains(components, loose.above(self.options.chain_cut))
        whole = chains.simple & (chains.size >= self.options.min_hits)
        resolved = without_junctions(loose.above(self.options.floor), self.halo)
        rest = self._long_components(resolved)
        return self._finished(np.where(whole, components.label, rest), loose)

    def _long_components(self, segments: Segments) -> IntArray:
        """Components with enough hits. *Collective*."""
        components = connect(segments, self.halo)
        size = components.total(np.ones(len(components.label), np.int64))
        return np.where(size >= self.options.min_hits, components.label, NO_TRACK)

    def _finished(self, tracks: IntArray, segments: Segments) -> IntArray:
        if not (self.options.double_hits and self._surfaces_are_known()):
            return tracks
        return with_double_hits(tracks, segments, self.hits, self.halo, self.options.double_cut)

    def _surfaces_are_known(self) -> bool:
        """Whether any hit of the event has a volume or layer. *Collective*."""
        known = torch.tensor([int((self.hits.surface != 0).any())])
        self.halo.transport.all_reduce(known, "max")
        return bool(known.item())


def gather_tracks(tracks: IntArray, plan: PartitionPlan, transport: Transport) -> tuple[IntArray, IntArray] | None:
    """Bring the tracks of all owned hits to rank 0: ids and tracks, int64 [n] each; None elsewhere. *Collective*."""
    rows = np.stack([plan.owned_ids, tracks], axis=1)
    found = deliver(rows, np.zeros(len(rows), np.int64), transport).rows
    return (found[:, 0], found[:, 1]) if transport.rank == 0 else None
