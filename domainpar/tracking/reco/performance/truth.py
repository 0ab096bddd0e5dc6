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
from domainpar.tracking.events.store import StoredEvent, WholeEvent
from domainpar.tracking.events.targets import NO_PARTICLES, target_particles
from domainpar.tracking.events.truth_order import places_along_particles, rows_of_table
from domainpar.tracking.reco.ckf.detector_layout import Layout, layout_of
from partitioners import Sectors

if TYPE_CHECKING:
    from domainpar.tracking.reco.hit_table import TrackHits

HITS_PER_LEAF = 8
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
            infinite where there is none; None when no sectors were asked for, or without positions.
        border_sectors: The sectors that were asked for: 8, or "8x2".
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
        None if the source did not tell the particle of each hit.

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
    from domainpar.tracking.reco.perigee import flown_back  # its compiled code is loaded when it is asked for only

    columns = [rows_of_table(truth.particles, particle_ids, name) for name in ("phi", "pt", "eta", "charge")]
    vertex = rows_of_table(truth.particles, particle_ids, "vertex")
    return flown_back(np.column_stack([vertex, *columns]), Field.of(truth.field))


# --- borders of sectors ----------------------------------------------------------------------------------------------


def distance_to_other_sectors(position: FloatArray, sector: IntArray) -> npt.NDArray[np.float32]:
    """Distance of each hit to the nearest hit of another sector, in the plane of eta and phi.

    The distance is Delta R = sqrt(Delta eta^2 + Delta phi^2) with phi wrapped; eta and phi are those of the hit as seen
    from the origin. Sectors may be any sets of hits.

    Args:
        position: x, y, z of each hit in mm, [N, 3].
        sector: Sector of each hit, [N].

    Returns:
        float32 [N]; infinite where there is no hit of another sector.
    """
    eta, phi = directions(position)
    distance = np.full(len(eta), np.inf, np.float32)
    if len(eta) and (sector != sector[0]).any():
        # Along a curve that visits neighbours soon after each other, so that a range of it lies in a small box.
        hit = np.argsort(_places_on_curve(eta, phi), kind="stable")
        _, sector = np.unique(sector[hit], return_inverse=True)
        distance[hit] = np.sqrt(_nearest_of_others(*_tree(eta[hit], phi[hit], sector)))
    return distance


def directions(position: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Pseudorapidity and phi of each hit as seen from the origin, float64 [N] each."""
    x, y, z = np.asarray(position, np.float64).T
    # A hit on the beam line has no pseudorapidity; a micrometre away it has a finite one.
    return np.arcsinh(z / np.maximum(np.hypot(x, y), 1e-3)), np.arctan2(y, x)


def _tree(eta: FloatArray, phi: FloatArray, sector: IntArray) -> tuple[Any, ...]:
    """A binary tree of ranges of hits on a curve; at least one hit, and no leaf is empty.

    Node 0 is everything, nodes 2 i + 1 and 2 i + 2 are the halves of node i; the last half of the nodes are leaves.

    Returns:
        eta and phi along the curve, float64 [N, 2]; sector along the curve, int64 [N]; first hit of each leaf, and N,
        int64 [leaves + 1]; least and largest eta, least and largest phi of each node, float64 [nodes, 4]; the one
        sector that all hits of a node belong to, -1 where there are several, int64 [nodes].
    """
    depth = max(0, int(np.log2(len(eta) / HITS_PER_LEAF)))
    boxes, only = [], []
    for level in range(depth + 1):
        first = np.arange(2**level) * len(eta) >> level
        least, most = np.minimum.reduceat, np.maximum.reduceat
        boxes.append(np.stack([least(eta, first), most(eta, first), least(phi, first), most(phi, first)], axis=1))
        low, high = least(sector, first), most(sector, first)
        only.append(np.where(low == high, low, -1))
    leaves = np.append(first, len(eta))
    return np.stack([eta, phi], axis=1), sector, leaves, np.concatenate(boxes), np.concatenate(only)


def _places_on_curve(eta: FloatArray, phi: FloatArray) -> npt.NDArray[np.uint64]:
    """Place of each hit on the Z-order curve: the bits of its eta and phi in 16 bits each, one after the other."""
    place = np.zeros(len(eta), np.uint64)
    for values, shift in ((eta, 1), (phi, 0)):
        extent = float(np.ptp(values))
        bits = ((values - values.min()) * (65535 / extent if extent > 0 else 0.0)).astype(np.uint64)
        # Each bit moves to every other place, in halves, quarters and eighths of the word.
        for step, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
            bits = (bits | bits << np.uint64(step)) & np.uint64(mask)
        place |= bits << np.uint64(shift)
    return place


@compiled
def _from_box(box: Any, eta: float, phi: float) -> float:
    """Squared distance of a point to a box, 0 inside."""
    along_eta = max(box[0] - eta, eta - box[1], 0.0)
    along_phi = max(box[2] - phi, phi - box[3], 0.0)
    return float(along_eta * along_eta + along_phi * along_phi)


@compiled
def _nearest_of_others(point: Any, sector: Any, first: Any, box: Any, only: Any) -> Any:
    """Squared distance of each point to the nearest one of another sector, float64 [N]."""
    nearest, first_leaf = np.full(len(point), np.inf), len(box) // 2
    stack = np.empty(64, np.int64)
    for i in range(len(point)):
        best = np.inf
        for turn in (0.0, -TWO_PI, TWO_PI):  # the tree knows nothing of phi's turn: so the point is moved instead
            eta, phi = point[i, 0], point[i, 1] + turn
            stack[0] = 0
            height = 1
            while height:
                height -= 1
                node = stack[height]
                if only[node] == sector[i] or _from_box(box[node], eta, phi) >= best:
                    continue
                if node >= first_leaf:
                    leaf = node - first_leaf
                    for j in range(first[leaf], first[leaf + 1]):
                        if sector[j] != sector[i]:
                            best = min(best, (point[j, 0] - eta) ** 2 + (point[j, 1] - phi) ** 2)
                    continue
                # The nearer half is looked at first: what it finds often rules out the other.
                left, right = 2 * node + 1, 2 * node + 2
                swap = _from_box(box[left], eta, phi) <= _from_box(box[right], eta, phi)
                stack[height], stack[height + 1] = (right, left) if swap else (left, right)
                height += 2
        nearest[i] = best
    return nearest
