"""The truth of an event, in the user's order of hits, and how far each hit is from the nearest border of a sector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events import detector
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray, Particles, surface_numbers
from domainpar.tracking.events.joining import grouped
from domainpar.tracking.events.store import StoredEvent, WholeEvent
from domainpar.tracking.events.targets import NO_PARTICLES, target_particles
from domainpar.tracking.events.truth_order import places_along_particles, rows_of_table
from domainpar.tracking.reco.ckf.detector_layout import Layout, layout_of
from partitioners import Sectors

if TYPE_CHECKING:
    from domainpar.tracking.reco.hit_table import TrackHits

TWO_PI = 2 * np.pi


@dataclass(frozen=True, eq=False)
class EventTruth:
    """The truth of the hits of one event. Hits are in the user's order, that of track ids.

    Attributes:
        particle_id: Particle of each hit, 0 for noise, int64 [N].
        surface: A number for the (volume, layer) of each hit, int64 [N].
        weight: Truth weight of each hit, [N]; None when the source gives none.
        position: x, y, z of each hit in mm, [N, 3]; None without a geometry.
        particles: The particle table; None when unknown.
        border: Distance of each hit to the nearest hit of another sector (`distance_to_other_sectors`), float32 [N],
            infinite where there is none; None without sectors or positions.
        border_sectors: The sectors, 8 or "8x2".
        field: That bent the particles, as of `TrackHits`.
        layout, measured: The surfaces, and errors of hits, as of `TrackHits`.
    """

    particle_id: IntArray
    surface: IntArray
    weight: FloatArray | None = None
    position: FloatArray | None = None
    particles: Particles | None = None
    border: FloatArray | None = None
    border_sectors: Sectors | None = None
    field: float | FloatArray | Field = 2.0
    layout: Layout | None = None
    measured: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.particle_id)

    def targets_among(self, particle_ids: IntArray, conditions: Mapping[str, Any]) -> BoolArray:
        """Whether each particle meets all conditions, bool [len(particle_ids)]; `nhits` are its hits in this event.

        Truth may lack hits that the table of particles counts: a target has those that a track can be made of. A
        particle that the table does not list meets no condition, and is a target only when there is none.

        Raises:
            ValueError: If there are conditions but no table, or the conditions cannot be understood.
        """
        if not conditions:
            return np.ones(len(particle_ids), bool)
        if self.particles is None:
            raise ValueError(NO_PARTICLES)
        return np.isin(particle_ids, self.particles.particle_id[target_particles(self._counted, conditions)])

    @cached_property
    def hits(self) -> TrackHits:
        """The hits as fits take them."""
        from domainpar.tracking.reco.hit_table import TrackHits  # its compiled code is loaded when tracks are fitted

        about = self.field, self.layout, self.measured
        return TrackHits(self.position, self.surface, np.zeros(len(self), np.int64), *about)

    @cached_property
    def places(self) -> IntArray | None:
        """`places_along_particles` of the hits; None without positions."""
        if self.position is None:
            return None
        return places_along_particles(self.particle_id, self.surface, self.position, self.particles)

    @cached_property
    def _counted(self) -> Particles:
        assert self.particles is not None
        return self.particles.counted_in(self.particle_id)


def truth_of(event: StoredEvent, border_sectors: Sectors | None = None) -> EventTruth | None:
    """Read the truth of a stored event.

    Args:
        event: The stored event.
        border_sectors: Measure the distance of hits to the borders between these sectors, 8 or "8x2", those that naive
            mode would cut the event into; None: do not.

    Returns:
        None if the source has no particle of each hit.

    Raises:
        ValueError: If the event cannot be read, or `border_sectors` are none.
    """
    whole = WholeEvent(event)
    hits = whole.hits
    if hits.particle_id is None:
        return None
    border = None
    if border_sectors is not None and hits.position is not None:
        from domainpar.tracking.part_loading import sector_of_tiles  # torch comes with it; reading counts needs none

        sector_of_node = np.repeat(sector_of_tiles(event, border_sectors), np.diff(event.node_ptr))
        border = distance_to_other_sectors(hits.position, sector_of_node[whole.node_ids])
    return EventTruth(
        particle_id=hits.particle_id,
        surface=surface_numbers(hits.volume, hits.layer),
        weight=hits.weight,
        position=hits.position,
        particles=hits.particles,
        border=border,
        border_sectors=border_sectors,
        field=detector.field_of(event.settings, hits.volume, hits.layer),
        layout=layout_of(event.settings),
        measured=hits.measured,
    )


def production_vertices(truth: EventTruth, particle_ids: IntArray) -> FloatArray:
    """Production vertex of each particle in mm, the origin where it is unknown, float64 [len(particle_ids), 3]."""
    vertex = rows_of_table(truth.particles, particle_ids, "vertex")
    vertex[~np.isfinite(vertex).all(axis=1)] = 0.0
    return vertex


def true_perigees(truth: EventTruth, particle_ids: IntArray) -> FloatArray:
    """d0, z0, phi, theta and q/p of particles at the beam line, as `reco.perigee` defines them, float64 [P, 5].

    They are flown back from their production vertex in the field, without material. NaN where their direction, vertex,
    momentum or charge is unknown.
    """
    if truth.particles is None or truth.particles.phi is None:
        return np.full((len(particle_ids), 5), np.nan)
    from domainpar.tracking.reco.perigee import flown_back  # its compiled code is loaded when it is needed only

    columns = [rows_of_table(truth.particles, particle_ids, name) for name in ("phi", "pt", "eta", "charge")]
    vertex = rows_of_table(truth.particles, particle_ids, "vertex")
    return flown_back(np.column_stack([vertex, *columns]), Field.of(truth.field))


# --- borders of sectors ----------------------------------------------------------------------------------------------


def distance_to_other_sectors(position: FloatArray, sector: IntArray) -> npt.NDArray[np.float32]:
    """Distance of each hit to the nearest hit of another sector, in the plane of eta and phi.

    The distance is Delta R = sqrt(Delta eta^2 + Delta phi^2) with phi wrapped; eta and phi are those of the hit as seen
    from the origin. Sectors may be any sets of hits. A hit is compared with those in the cells around it, some twenty
    each at the density of the HL-LHC; where most hits lie in a few cells the time grows with their square.

    Args:
        position: x, y, z of each hit in mm, [N, 3].
        sector: Sector of each hit, [N].

    Returns:
        float32 [N]; infinite where there is no hit of another sector.
    """
    eta, phi = directions(position)
    distance = np.full(len(eta), np.inf, np.float32)
    if len(eta) and (sector != sector[0]).any():
        row, column = cells(eta, phi)
        row -= row.min()
        cell, num_cells = row * NUM_COLUMNS + column, NUM_COLUMNS * (int(row.max()) + 1)
        low, high = np.full(num_cells, sector.max()), np.full(num_cells, sector.min())
        np.minimum.at(low, cell, sector)
        np.maximum.at(high, cell, sector)
        first, hits = grouped(cell, num_cells)
        of_hits = (values[hits] for values in (eta, phi, sector, row, column))  # cell by cell, as they are read
        distance[hits] = np.sqrt(_nearest_of_others(*of_hits, first, low, high))
    return distance


def directions(position: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Pseudorapidity and phi of each hit as seen from the origin, float64 [N] each."""
    x, y, z = np.asarray(position, np.float64).T
    # A hit on the beam line has no pseudorapidity; a micrometre away it has a finite one.
    return np.arcsinh(z / np.maximum(np.hypot(x, y), 1e-3)), np.arctan2(y, x)


CELL = 0.0997
"""Width of a cell in rad, at least: 63 go round in phi. In eta they are 0.1 wide."""

NUM_COLUMNS = 64
"""Cells around: the last one holds the directions of phi = pi alone, and has no width."""


def cells(eta: FloatArray, phi: FloatArray) -> tuple[IntArray, IntArray]:
    """The cell of each direction: its row along eta, and its column around, in [0, `NUM_COLUMNS`), int64 [N] each."""
    return np.floor(10 * eta).astype(np.int64), np.floor((phi + np.pi) * 63 / TWO_PI).astype(np.int64)


@compiled
def _nearest_of_others(eta: Any, phi: Any, sector: Any, row: Any, column: Any, first: Any, low: Any, high: Any) -> Any:
    """Squared distance of each hit to the nearest one of another sector, float64 [N].

    Args:
        eta, phi, sector, row, column: Of each hit, cell by cell, [N].
        first: First hit of each cell, and N, [cells + 1].
        low, high: Smallest and largest sector in each cell, [cells].
    """
    nearest, num_rows = np.full(len(eta), np.inf), len(low) // NUM_COLUMNS
    for i in range(len(eta)):
        # Rings of cells around that of the hit. Between it and those of a ring lie all rings but one, and a column that
        # may have no width.
        ring, best = 0, np.inf
        while ring <= max(num_rows, NUM_COLUMNS) and (max(ring - 2, 0) * CELL) ** 2 < best:
            for at in range(max(row[i] - ring, 0), min(row[i] + ring + 1, num_rows)):
                on_the_ring = abs(at - row[i]) == ring
                for around in range(column[i] - ring, column[i] + ring + 1, 1 if on_the_ring else 2 * ring):
                    cell = at * NUM_COLUMNS + around % NUM_COLUMNS
                    if low[cell] == high[cell] == sector[i]:
                        continue
                    own_phi = phi[i] - around // NUM_COLUMNS * TWO_PI
                    for other in range(first[cell], first[cell + 1]):
                        if sector[other] != sector[i]:
                            best = min(best, (eta[other] - eta[i]) ** 2 + (phi[other] - own_phi) ** 2)
            ring += 1
        nearest[i] = best
    return nearest
