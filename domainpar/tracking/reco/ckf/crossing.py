"""Which surface a track meets next, and which hits lie there near it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.tracking.events.motion import advance, arc_to_radius
from domainpar.tracking.reco.kalman import EVEN_FIELD, bend_at, fly, residual

TWO_PI = 2 * np.pi
STAGGER = 6.0
"""Hits of one surface lie this far from its nominal radius or z at most, in mm."""

LONGEST_FLIGHT = 500.0
"""mm of the transverse plane between two surfaces at most. A track that leaves the outermost barrel meets a far disk
after metres, if at all, and any hit lies within its errors there."""


class Scene(NamedTuple):
    """Hits, surfaces and field around a track, as of `hit_table`, `layout` and `events.field`.

    Attributes:
        hits: The hit table.
        phi: Its column phi, by itself.
        ptr: First hit of each surface, and N.
        free: Whether a hit may be taken, bool [N].
        places: The surfaces.
        ways: Their orders.
        field: The field.
        gate: Largest chi^2 of a hit.
        outward, inward: The two ways to fly, 1 and -1: as values, since a kernel is compiled for each constant anew.
    """

    hits: Any
    phi: Any
    ptr: Any
    free: Any
    places: Any
    ways: Any
    field: Any
    gate: float
    outward: int = 1
    inward: int = -1


@compiled
def set_out(state: Any, hit: Any, scene: Any, side: int) -> None:
    """Find the next barrel and disk of the way on from a hit, outward or inward."""
    way = 2 if state.slope * side > 0 else 1
    z = hit.z if way == 2 else -hit.z
    barrels, disks = scene.ways[0], scene.ways[way]
    state.barrel, state.disk = 0, 0
    while barrels[state.barrel] >= 0 and scene.places[barrels[state.barrel]].coordinate < hit.r + side * (STAGGER + 1):
        state.barrel += 1
    while disks[state.disk] >= 0 and abs(scene.places[disks[state.disk]].coordinate) < z + side * (STAGGER + 1):
        state.disk += 1
    if side < 0:
        state.barrel -= 1
        state.disk -= 1


@compiled
def _arc_to_barrel(state: Any, radius: float, bend: float, side: int) -> float:
    """Arc length ahead to a radius in an even field; negative if it is not reached, or only after much of a turn."""
    curvature = state.k * bend
    s = arc_to_radius(state.x, state.y, state.psi, curvature, radius, side)
    # More than 2.4 rad of the circle: it curls up before.
    if abs(0.5 * curvature * s) > 1.2:
        return -1.0
    x, y, _, psi = advance(state.x, state.y, 0.0, state.psi, 0.0, curvature, s)
    # It only grazes the radius.
    return s if side * (x * np.cos(psi) + y * np.sin(psi)) > 0.05 * radius else -1.0


@compiled
def _choose(state: Any, scene: Any, side: int) -> Any:
    """(the next surface or -1, whether it is a disk) of those whose turn it is."""
    way = 2 if state.slope * side > 0 else 1
    bz = bend_at(scene.field, state)
    barrel = scene.ways[0, state.barrel] if state.barrel >= 0 else -1
    disk = scene.ways[way, state.disk] if state.disk >= 0 and abs(state.slope) > 1e-3 else -1
    arc = _arc_to_barrel(state, scene.places[barrel].coordinate, bz, side) if barrel >= 0 else -1.0
    if arc > LONGEST_FLIGHT:
        arc = -1.0
    # The hits of a disk may lie behind the next one, of the same z: the step to it is then a short one back.
    to_disk = (scene.places[disk].coordinate - state.z) / state.slope if disk >= 0 else 0.0
    if disk >= 0 and (to_disk * abs(state.k * bz) > 2.5 or to_disk > LONGEST_FLIGHT):
        disk = -1
    if disk >= 0 and (arc < 0 or to_disk < arc):
        return disk, True
    return (barrel if arc >= 0 else -1), False


@compiled
def _fly_to(state: Any, place: Any, field: Any, side: int) -> bool:
    """Move a state to a surface in steps over which the field is even; false if it turns away before."""
    for _ in range(40):
        if place.is_barrel:
            s = _arc_to_barrel(state, place.coordinate, bend_at(field, state), side)
            if s < 0:
                return False
        else:
            s = (place.coordinate - state.z) / state.slope
        most = EVEN_FIELD / max(abs(state.slope), 1e-3)
        arrives = s <= most
        s = min(s, most)
        fly(state, s, field)
        if arrives:
            return True
    return False


@compiled
def next_surface(state: Any, scene: Any, side: int) -> Any:
    """Move a state to the next surface whose extent it meets: (that, or -1 at the end; whether well inside)."""
    while True:
        target, is_disk = _choose(state, scene, side)
        if target < 0:
            return -1, False
        place = scene.places[target]
        if not _fly_to(state, place, scene.field, side):
            return -1, False
        if is_disk:
            state.disk += side
            v = np.hypot(state.x, state.y)
            error = 3 * np.sqrt(state.cov[3, 3]) / abs(state.slope) + STAGGER
        else:
            state.barrel += side
            v = state.z
            error = 3 * np.sqrt(state.cov[3, 3]) + STAGGER
        # Missed beyond three standard deviations only, and well inside only as far from the rim.
        if place.low - error < v < place.high + error:
            return target, place.low + error < v < place.high - error


@compiled
def _half_window(state: Any, place: Any, turned: float, gate: float) -> float:
    """Half the width around a surface, in mm, in which hits within the gate of a state on it can lie."""
    if place.is_barrel:
        # Across the track is less than around the surface.
        side = np.sqrt(gate * (state.cov[0, 0] + place.var_u)) / max(np.cos(turned), 0.2)
        return 0.1 + side + STAGGER * min(abs(np.tan(turned)), 5.0)  # type: ignore[no-any-return]
    side = np.sqrt(gate * (state.cov[0, 0] + place.var_u + place.var_v * np.sin(turned) ** 2))
    along = (STAGGER + np.sqrt(gate * state.cov[3, 3])) / max(abs(state.slope), 1e-3) + np.sqrt(gate * place.var_v)
    return 0.1 + side + min(along, 100.0) * abs(np.sin(turned))  # type: ignore[no-any-return]


@compiled
def hits_near(state: Any, target: int, scene: Any, rows: Any, chi2s: Any) -> int:
    """Free hits of a surface within the gate of a state on it, best first, in `rows`; returns their number."""
    place, ptr = scene.places[target], scene.ptr
    middle = np.arctan2(state.y, state.x)
    # Near the beam line an angle says nothing: at least a millimetre of radius.
    half = _half_window(state, place, state.psi - middle, scene.gate) / max(np.hypot(state.x, state.y), 1.0)
    bend = bend_at(scene.field, state)
    count = 0
    # phi is cut at +-pi, and the window may reach over the cut.
    for turn in range(-1, 2):
        low, high = middle - half + turn * TWO_PI, middle + half + turn * TWO_PI
        if low > np.pi or high < -np.pi:
            continue
        first = np.searchsorted(scene.phi[ptr[target] : ptr[target + 1]], low) + ptr[target]
        for row in range(first, ptr[target + 1]):
            if scene.phi[row] > high:
                break
            if scene.free[row]:
                chi2 = residual(state, scene.hits[row], bend)[0]
                if chi2 < scene.gate:
                    count = _insert(rows, chi2s, count, row, chi2)
    return count


@compiled
def _insert(rows: Any, chi2s: Any, count: int, row: int, chi2: float) -> int:
    """Insert into a list sorted by chi^2; the worst falls off a full one."""
    place = min(count, len(rows) - 1)
    if count == len(rows) and chi2 >= chi2s[place]:
        return count
    while place > 0 and chi2s[place - 1] > chi2:
        rows[place], chi2s[place] = rows[place - 1], chi2s[place - 1]
        place -= 1
    rows[place], chi2s[place] = row, chi2
    return min(count + 1, len(rows))
