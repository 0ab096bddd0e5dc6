"""The pieces that may be joined: their hits, their helices, where they begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.events.detector import GEV_PER_TESLA_MM
from domainpar.events.graph import FloatArray, IntArray
from domainpar.reco.helix import field_at, fit_helices

PT_IS_RADIUS = 1 / GEV_PER_TESLA_MM
"""The field in T in which a particle of charge 1 flies on a circle of as many mm as its pT has GeV."""

PIECE_DTYPE = np.dtype(
    [(name, np.float64) for name in ("rho", "phi", "d", "z0", "slope", "eta", "pt", "bend", "lever", "begin", "end")]
    + [(name, np.float64, 3) for name in ("first", "last")]
    + [("track", np.int64), ("fresh", np.bool_)]
)
"""A piece: its helix, with rho in 1/mm positive for a turn to the right and d in mm positive where the beam line lies
to the left; pT in GeV, and what rho would be at 1 GeV; the transverse distance from its first to its last hit, the
distances of both from the origin, and both hits, in mm; its track, and whether it was not there in an earlier round."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Tracks that have a helix, by pseudorapidity.

    Attributes:
        table: One row a piece, `PIECE_DTYPE` [P].
        ptr: First hit of each piece in the three arrays below, int64 [P + 1]; hits of a piece go outward.
        rows: These hits as rows of the event, int64 [n].
        position: Their x, y, z in mm, float64 [n, 3].
        bz: |B_z| there in T, float64 [n].
    """

    table: npt.NDArray[Any]
    ptr: IntArray
    rows: IntArray
    position: FloatArray
    bz: FloatArray

    def __len__(self) -> int:
        return len(self.table)

    @classmethod
    def of(cls, track_id: IntArray, position: FloatArray, min_hits: int, field: float | FloatArray) -> Pieces:
        """Fit the tracks that have enough hits.

        Args:
            track_id: Track of each hit, -1 for none, [N].
            position: x, y, z of each hit in mm, float64 [N, 3].
            min_hits: Fewest hits of a piece.
            field: B_z in T, or a table of z in mm and B_z, [K, 2].

        Raises:
            ValueError: If the position of a hit on these tracks is not finite, or the field has another shape.
        """
        on = np.flatnonzero(track_id >= 0)
        _, number, counts = np.unique(track_id[on], return_inverse=True, return_counts=True)
        enough = counts[number] >= min_hits
        on, track = on[enough], track_id[on[enough]]
        return cls._fitted(on, track, position[on], np.abs(field_at(field, position[on, 2])))

    def joined(self, inner: IntArray, outer: IntArray) -> Pieces:
        """The pieces after joining pairs of them, each in at most one: only what is new is fitted, and `fresh`."""
        track = self.table["track"].copy()
        track[outer] = track[inner]
        places = self.hits_of(np.concatenate([inner, outer]))[0]
        owner = np.repeat(track, np.diff(self.ptr))
        new = self._fitted(self.rows[places], owner[places], self.position[places], self.bz[places])
        is_old = np.ones(len(self), bool)
        is_old[inner] = is_old[outer] = False
        old = self._take(np.flatnonzero(is_old))
        old.table["fresh"] = False
        return Pieces(
            table=np.concatenate([old.table, new.table]),
            ptr=np.concatenate([old.ptr, old.ptr[-1] + new.ptr[1:]]),
            rows=np.concatenate([old.rows, new.rows]),
            position=np.concatenate([old.position, new.position]),
            bz=np.concatenate([old.bz, new.bz]),
        ).by_eta()

    def hits_of(self, members: IntArray) -> tuple[IntArray, IntArray]:
        """Places in `rows` of all hits of some pieces, piece after piece, and how many each has."""
        counts = np.diff(self.ptr)[members]
        starts = self.ptr[:-1][members] - np.cumsum(counts) + counts
        return np.repeat(starts, counts) + np.arange(counts.sum()), counts

    @classmethod
    def _fitted(cls, rows: IntArray, track: IntArray, position: FloatArray, bz: FloatArray) -> Pieces:
        """Pieces of these hits on these tracks; those through which no helix goes are left out."""
        outward = np.lexsort((np.sum(position**2, axis=1), track))
        rows, position, bz = rows[outward], position[outward], bz[outward]
        names, counts = np.unique(track, return_counts=True)
        ptr = np.concatenate([[0], np.cumsum(counts)])
        helices = fit_helices(position, np.repeat(np.arange(len(counts)), counts), len(counts), PT_IS_RADIUS)
        table = np.zeros(len(counts), PIECE_DTYPE)
        table["rho"], table["phi"], table["d"] = helices.charge / helices.pt, helices.phi, -helices.d0
        table["z0"], table["eta"], table["slope"] = helices.z0, helices.eta, np.sinh(helices.eta)
        table["bend"] = GEV_PER_TESLA_MM * np.add.reduceat(bz, ptr[:-1]) / counts
        table["pt"] = helices.pt * table["bend"]
        table["first"], table["last"] = position[ptr[:-1]], position[ptr[1:] - 1]
        table["begin"], table["end"] = (np.linalg.norm(table[name], axis=1) for name in ("first", "last"))
        table["lever"] = np.hypot(*(table["last"] - table["first"])[:, :2].T)
        table["track"], table["fresh"] = names, True
        pieces = cls(table=table, ptr=ptr, rows=rows, position=position, bz=bz)
        return pieces._take(np.flatnonzero(helices.fitted & (table["lever"] > 0)))

    def _take(self, members: IntArray) -> Pieces:
        places, counts = self.hits_of(members)
        ptr = np.concatenate([[0], np.cumsum(counts)])
        return Pieces(self.table[members], ptr, self.rows[places], self.position[places], self.bz[places])

    def by_eta(self) -> Pieces:
        """The same, ordered by geometry alone: names of tracks and the order of hits must not decide anything."""
        return self._take(np.lexsort((self.table["begin"], self.table["eta"])))
