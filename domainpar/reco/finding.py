"""The tracks of one event as they are found, part after part, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from domainpar.compiling import clock
from domainpar.events.detector import field_of_surfaces
from domainpar.events.store import StoredEvent
from domainpar.parallel.part_loading import Part
from domainpar.parallel.transport import Transport
from domainpar.plan import IntArray
from domainpar.reco.numbering import number_tracks
from domainpar.reco.stitching import stitch
from domainpar.reco.tracks import TrackBuilder, TrackOptions, gather_tracks

NETWORK, CEILING, CLASSICAL = "network", "ceiling", "classical"
"""Who found tracks: the network's scores; perfect scores of the same edges, built alike; helices through the hits."""

CERTAIN = 20.0  # as a logit: what a perfect network would say of a true segment


@dataclass(eq=False)
class EventTracks:
    """Builds the tracks of one event, from the network's scores and from perfect ones.

    In naive mode parts are those of one sector after another, and only stitching joins tracks of two sectors.

    Attributes:
        event: The stored event.
        transport: Joins the ranks that share it.
        options: How tracks are built.
        seconds: What building tracks from the network's scores took on this rank, compiling left out.
    """

    event: StoredEvent
    transport: Transport
    options: TrackOptions
    seconds: float = 0.0
    _named: dict[str, IntArray] = field(default_factory=dict)

    def add(self, part: Part, logits: npt.NDArray[np.floating]) -> None:
        """Find the tracks of a part. *Collective* over the ranks that share the event.

        Args:
            part: This rank's part of the event or of a sector.
            logits: Logits of its local edges, [num_edges].

        Raises:
            ValueError: If the event cannot be walked through.
        """
        began = clock()
        builder = TrackBuilder.of(part, self.event, self.options)
        self._keep(NETWORK, builder.build(logits), part)
        self.seconds += clock() - began
        if part.graph.label is not None:
            label = part.graph.label.cpu().numpy()
            self._keep(CEILING, builder.build(np.where(label > 0, CERTAIN, -CERTAIN)), part)

    def _keep(self, finder: str, tracks: IntArray, part: Part) -> None:
        gathered = gather_tracks(tracks, part.graph.plan, self.transport)
        if gathered is not None:
            ids, names = gathered
            self._named.setdefault(finder, np.full(self.event.num_nodes, -1, np.int64))[ids] = names

    def in_users_order(self) -> Mapping[str, IntArray]:
        """Track of each hit by finder, -1 for none, int64 [N] in the user's order; nothing but on rank 0."""
        if not self._named:
            return {}
        ids = self.event.ids_in_users_order()
        found = {}
        for finder, names in self._named.items():
            began = clock()
            found[finder] = self._stitched(number_tracks(names[ids]), ids)
            if finder == NETWORK:
                self.seconds += clock() - began
        return found

    def _stitched(self, track_id: IntArray, ids: IntArray) -> IntArray:
        """Join pieces of one helix. On one rank, of plain arrays: it cannot depend on ranks."""
        if not (self.options.stitch and self.event.has_positions):
            return track_id
        position, volume, layer = (self.event.read_nodes(name, ids) for name in ("position", "volume", "layer"))
        return stitch(track_id, position, field=field_of_surfaces(volume, layer))
