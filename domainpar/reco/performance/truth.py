"""What is true of an event, in the user's order of hits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from domainpar.events import detector
from domainpar.events.graph import BoolArray, FloatArray, IntArray, Particles, surface_numbers
from domainpar.events.store import StoredEvent
from domainpar.events.targets import NO_PARTICLES, target_particles
from domainpar.reco.performance.borders import distance_to_other_sectors


@dataclass(frozen=True, eq=False)
class EventTruth:
    """What is true of the hits of one event. Hits are in the user's order, that of track ids.

    Attributes:
        particle_id: Particle of each hit, 0 for noise, int64 [N].
        surface: A number for the (volume, layer) of each hit, int64 [N].
        weight: Truth weight of each hit, [N]; None when the source gives none.
        position: x, y, z of each hit in mm, [N, 3]; None without a geometry.
        particles: The particle table; None when unknown.
        border: Distance of each hit to the nearest hit of another sector (see `borders`), float32 [N], infinite where
            there is none; None when no sectors were asked for, or without positions.
        border_sectors: The number of sectors that was asked for.
        field: B_z in T that bent the particles, or a table of z in mm and B_z, [K, 2].
    """

    particle_id: IntArray
    surface: IntArray
    weight: FloatArray | None = None
    position: FloatArray | None = None
    particles: Particles | None = None
    border: FloatArray | None = None
    border_sectors: int | None = None
    field: float | FloatArray = 2.0

    def __len__(self) -> int:
        return len(self.particle_id)


def truth_of(event: StoredEvent, border_sectors: int | None = None) -> EventTruth | None:
    """Read what is true of a stored event.

    Args:
        event: The stored event.
        border_sectors: Measure the distance of hits to the borders between so many sectors, those that naive mode
            would cut the event into; None: do not.

    Returns:
        None if the source did not tell the particle of each hit. The field is that of TrackML where all hits lie on its
        layers, otherwise 2 T.

    Raises:
        ValueError: If the event cannot be read, or `border_sectors` is below 1.
    """
    if not event.has_particle_ids:
        return None
    ids = event.ids_in_users_order()
    position = event.read_nodes("position", ids) if event.has_positions else None
    border = None
    if border_sectors is not None and position is not None:
        border = distance_to_other_sectors(position, _sector_of_nodes(event, border_sectors)[ids])
    volume, layer = event.read_nodes("volume", ids), event.read_nodes("layer", ids)
    return EventTruth(
        particle_id=event.read_nodes("particle_id", ids),
        surface=surface_numbers(volume, layer),
        weight=event.read_nodes("weight", ids) if event.has_weights else None,
        position=position,
        particles=event.particles(),
        border=border,
        border_sectors=border_sectors,
        field=detector.field_of_surfaces(volume, layer),
    )


def targets_among(particle_ids: IntArray, particles: Particles | None, conditions: Mapping[str, Any]) -> BoolArray:
    """Whether each particle meets all conditions, bool [len(particle_ids)].

    A particle that the table does not list meets no condition, and is a target only when there is none.

    Raises:
        ValueError: If there are conditions but no table, or the conditions cannot be understood.
    """
    if not conditions:
        return np.ones(len(particle_ids), bool)
    if particles is None:
        raise ValueError(NO_PARTICLES)
    return np.isin(particle_ids, particles.particle_id[target_particles(particles, conditions)])


def production_vertices(truth: EventTruth, particle_ids: IntArray) -> FloatArray:
    """Production vertex of each particle in mm, the origin where it is unknown, float64 [len(particle_ids), 3]."""
    vertex = rows_of_table(truth, particle_ids, "vertex")
    vertex[~np.isfinite(vertex).all(axis=1)] = 0.0
    return vertex


def rows_of_table(truth: EventTruth, particle_ids: IntArray, name: str) -> FloatArray:
    """One quantity of the particle table for each of some particles, NaN where it is unknown, float64."""
    table = truth.particles
    shape = (3,) if name == "vertex" else ()
    found = np.full((len(particle_ids), *shape), np.nan)
    if table is None or len(table.particle_id) == 0:
        return found
    order = np.argsort(table.particle_id, kind="stable")
    at = np.minimum(np.searchsorted(table.particle_id, particle_ids, sorter=order), len(order) - 1)
    listed = table.particle_id[order[at]] == particle_ids
    found[listed] = getattr(table, name)[order[at[listed]]]
    return found


def _sector_of_nodes(event: StoredEvent, num_sectors: int) -> IntArray:
    from domainpar.parallel.part_loading import sector_of_tiles  # torch comes with it; reading counts needs none

    return np.repeat(sector_of_tiles(event, num_sectors), np.diff(event.node_ptr))
