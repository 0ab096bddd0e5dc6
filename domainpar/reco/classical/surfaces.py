"""The detector's surfaces as a track meets them, and the hits lying on each by phi."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from domainpar.events import detector
from domainpar.events.detector import Barrel
from domainpar.events.graph import FloatArray, IntArray
from domainpar.reco.helix import check_finite, check_positions

PLACE_DTYPE = np.dtype(
    [("is_barrel", "?"), ("coordinate", "f8"), ("low", "f8"), ("high", "f8"), ("var_u", "f8"), ("var_v", "f8")]
)
"""A surface: radius of a barrel or z of a disk, its extent in z or r, and the variances in mm^2 of a hit's position
across (r phi) and along (z in a barrel, r in a disk): cell^2 / 12."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The 48 surfaces, in the order of `detector.SURFACES`.

    Attributes:
        places: `PLACE_DTYPE` [48].
        ways: Surfaces in the order of an outward track, int64 [3, 48]: barrels by radius; disks at negative z by |z|;
            disks at positive z by z. Rows are filled up with -1.
    """

    places: npt.NDArray[np.void]
    ways: IntArray


@lru_cache(maxsize=1)
def layout() -> Layout:
    """The surfaces, built once a process."""
    places = np.zeros(len(detector.SURFACES), PLACE_DTYPE)
    by_way: list[list[int]] = [[], [], []]
    for i, surface in enumerate(detector.SURFACES):
        variances = surface.sensor.pitch_u**2 / 12, surface.sensor.pitch_v**2 / 12
        if isinstance(surface, Barrel):
            half = (surface.num_rows - 1) / 2 * surface.row_pitch + surface.half_v
            places[i] = True, surface.radius, -half, half, *variances
            by_way[0].append(i)
        else:
            low = min(ring.radius - ring.half_v for ring in surface.rings)
            high = max(ring.radius + ring.half_v for ring in surface.rings)
            places[i] = False, surface.z, low, high, *variances
            by_way[1 if surface.z < 0 else 2].append(i)
    ways = np.full((3, len(places)), -1, np.int64)
    for way, of_way in zip(ways, by_way):
        # Disks of two volumes may have one z: the order of the detector's table decides.
        way[: len(of_way)] = sorted(of_way, key=lambda i: (abs(places["coordinate"][i]), i))
    return Layout(places, ways)


HIT_DTYPE = np.dtype(
    [("x", "f8"), ("y", "f8"), ("z", "f8"), ("r", "f8"), ("phi", "f8"), ("module", "i8"), ("surface", "i8")]
)


@dataclass(frozen=True, eq=False)
class HitTable:
    """Hits by (surface, phi, z, r).

    Attributes:
        hits: `HIT_DTYPE` [N].
        ptr: First hit of each surface, and N, int64 [49].
        rows: The caller's row of each, int64 [N].
    """

    hits: npt.NDArray[np.void]
    ptr: IntArray
    rows: IntArray


def table_of(position: FloatArray, volume: IntArray, layer: IntArray, module: IntArray) -> HitTable:
    """Sort the hits of an event, whatever order they come in.

    Raises:
        ValueError: If shapes do not agree, a position is not finite, or a hit lies on no TrackML surface.
    """
    position = np.asarray(position, np.float64)
    check_positions(position)
    for name, column in {"volume": volume, "layer": layer, "module": module}.items():
        if np.shape(column) != (len(position),):
            raise ValueError(f"{name} has shape {np.shape(column)} for {len(position)} hits; give one to each hit.")
    check_finite(position)
    hits = np.zeros(len(position), HIT_DTYPE)
    hits["x"], hits["y"], hits["z"] = position.T
    hits["r"], hits["phi"] = np.hypot(hits["x"], hits["y"]), np.arctan2(hits["y"], hits["x"])
    hits["module"] = module
    hits["surface"] = surface_of(np.asarray(volume), np.asarray(layer))
    rows = np.lexsort((hits["module"], hits["r"], hits["z"], hits["phi"], hits["surface"]))
    hits = hits[rows]
    return HitTable(hits, np.searchsorted(hits["surface"], np.arange(len(detector.SURFACES) + 1)), rows)


def surface_of(volume: IntArray, layer: IntArray) -> IntArray:
    """Place of each hit's surface in `detector.SURFACES`.

    Raises:
        ValueError: If a hit lies on none of them.
    """
    number = {(surface.volume, surface.layer): i for i, surface in enumerate(detector.SURFACES)}
    present, place = np.unique(np.stack([volume, layer], axis=1), axis=0, return_inverse=True)
    unknown = [(int(v), int(n)) for v, n in present if (int(v), int(n)) not in number]
    if unknown:
        raise ValueError(
            f"hits lie in volume {unknown[0][0]} layer {unknown[0][1]}, which is no surface of the TrackML detector "
            f"({len(unknown)} of {len(present)} layers are unknown); following helices needs the radius or z, extent "
            "and resolution of every surface, which are known for TrackML only."
        )
    surfaces = np.array([number[int(v), int(n)] for v, n in present], np.int64)
    return np.asarray(surfaces[place.reshape(-1)])  # numpy 2.0 gives `place` the shape of the pairs
