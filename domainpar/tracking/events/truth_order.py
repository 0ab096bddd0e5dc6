"""The order of hits along true particles: which hits follow each other, and which pairs are segments of a track."""

from __future__ import annotations

import numpy as np

from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray, Particles


def places_along_particles(
    particle_id: IntArray, surface: IntArray, position: FloatArray, particles: Particles | None
) -> IntArray:
    """Place of each hit along its particle.

    The hits of a particle on one surface form one group. Groups are ordered by the distance of their nearest hit from
    the production vertex, or from the origin where that is unknown.

    Args:
        particle_id: Particle of each hit, 0 for noise, [N].
        surface: A number for the surface of each hit, [N].
        position: x, y, z of each hit in mm, [N, 3].
        particles: The particle table; None when unknown.

    Returns:
        0 for the hits of a particle's first group, 1 for those of its next, ...; -1 for noise, int64 [N].
    """
    places = np.full(len(particle_id), -1, np.int64)
    rows = np.flatnonzero(particle_id != 0)
    if len(rows) == 0:
        return places
    vertex = rows_of_table(particles, particle_id[rows], "vertex")
    vertex[~np.isfinite(vertex).all(axis=1)] = 0.0
    distance = np.linalg.norm(position[rows] - vertex, axis=1)
    particle, surface = particle_id[rows], surface[rows]
    # Nearest hit first within each group, so that a group's first row gives its distance.
    order = np.lexsort((distance, surface, particle))
    starts = _run_starts(particle[order], surface[order])
    group_of_row = np.cumsum(starts) - 1
    first = order[starts]
    by_distance = np.lexsort((surface[first], distance[first], particle[first]))
    # 0, 1, 2, ... along each particle: the count less that of the particle's first group.
    count = np.arange(len(first))
    place_of_group = np.empty(len(first), np.int64)
    place_of_group[by_distance] = count - np.maximum.accumulate(count * _run_starts(particle[first][by_distance]))
    places[rows[order]] = place_of_group[group_of_row]
    return places


def segments_of(particle_id: IntArray, place: IntArray) -> tuple[IntArray, IntArray]:
    """Pairs of hits on consecutive places along one particle: the earlier and the later hit of each, int64 [S] twice.

    Args:
        particle_id: Particle of each hit, [N].
        place: Place of each hit along it, of `places_along_particles`; hits at -1 are left out.
    """
    rows = np.flatnonzero(place >= 0)
    order = rows[np.lexsort((place[rows], particle_id[rows]))]
    visits = np.flatnonzero(_run_starts(particle_id[order], place[order]))
    sizes = np.diff(np.append(visits, len(order)))
    follows = np.flatnonzero(
        (particle_id[order[visits[1:]]] == particle_id[order[visits[:-1]]]) & (place[order[visits[1:]]] > 0)
    )
    # Each hit of a group with each of the next one: the later group's hits in turn, for each of the earlier one's.
    pairs = sizes[follows] * sizes[follows + 1]
    group = np.repeat(follows, pairs)
    within = np.arange(len(group)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    earlier, later = visits[group] + within // sizes[group + 1], visits[group + 1] + within % sizes[group + 1]
    return order[earlier], order[later]


def rows_of_table(table: Particles | None, particle_ids: IntArray, name: str) -> FloatArray:
    """One quantity of the particle table for each of some particles, NaN where it is unknown, float64."""
    shape = (3,) if name == "vertex" else ()
    values = np.full((len(particle_ids), *shape), np.nan)
    if table is not None:
        rows = table.rows(particle_ids)
        values[rows >= 0] = getattr(table, name)[rows[rows >= 0]]
    return values


def _run_starts(*columns: IntArray) -> BoolArray:
    """True where a row differs from the row before it."""
    starts = np.ones(len(columns[0]), bool)
    starts[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return starts
