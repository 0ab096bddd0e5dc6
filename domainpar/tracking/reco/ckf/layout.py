"""The surfaces of a detector in the order in which a track meets them, and where tracks may begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.tracking.events import detector
from domainpar.tracking.events.detector import Barrel, Layer, lines_cross
from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.events.surfaces import SurfaceRow

PIXELS = (7, 8, 9)
"""Volumes of the pixel detector of TrackML."""

PLACE_DTYPE = np.dtype(
    [
        ("is_barrel", "?"),
        *((name, "f8") for name in ("coordinate", "low", "high", "var_u", "var_v", "material", "thickness", "tilt")),
    ]
)
"""A surface: radius of a barrel or z of a disk, its extent in z or r, the variances in mm^2 of a hit's position across
(r phi) and along (z in a barrel, r in a disk), where one cell tells it, and its material in radiation lengths. With
them come its sensors' thickness in mm, 0 where the resolution is told, which then goes by no number of cells, and their
angle from the radial direction."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The surfaces of one detector.

    Attributes:
        numbers: Row in `places` of each (volume, layer).
        places: The surfaces, `PLACE_DTYPE` [S].
        ways: Their rows in the order of an outward track, int64 [3, S + 1]: barrels by radius; disks at negative z by
            |z|; disks at positive z by z. Filled up with -1.
        prompt: Rows of three neighbouring surfaces, outward, on which tracks from the beam begin, int64 [C, 3].
        everywhere: Those and all others, int64 [C, 3].
    """

    numbers: Mapping[Layer, int]
    places: npt.NDArray[np.void]
    ways: IntArray
    prompt: IntArray
    everywhere: IntArray

    @classmethod
    def of(cls, numbers: Mapping[Layer, int], places: npt.NDArray[np.void], pairs: Any, seeds: Any) -> Layout:
        """From the surfaces, pairs of neighbours (inner, outer) as rows, and whether each is one to begin on."""
        by_way: list[list[int]] = [[], [], []]
        for i, place in enumerate(places):
            by_way[0 if place["is_barrel"] else 1 if place["coordinate"] < 0 else 2].append(i)
        ways = np.full((3, len(places) + 1), -1, np.int64)
        for way, of_way in zip(ways, by_way):
            # Disks of two volumes may have one z: the order of the detector's table decides.
            way[: len(of_way)] = sorted(of_way, key=lambda i: (abs(places["coordinate"][i]), i))
        chains = np.array([(a, b, c) for a, b in pairs for again, c in pairs if again == b], np.int64).reshape(-1, 3)
        inside = np.asarray(seeds)[chains].all(axis=1)
        return cls(numbers, places, ways, chains[inside], np.concatenate([chains[inside], chains[~inside]]))

    def surface_of(self, volume: IntArray, layer: IntArray) -> IntArray:
        """Row of each hit's surface.

        Raises:
            ValueError: If a hit lies on none of them.
        """
        rows, unknown, layers = self._rows(volume, layer)
        if unknown:
            whose = "the TrackML detector" if self is trackml() else "--surfaces"
            raise ValueError(
                f"hits lie in volume {unknown[0][0]} layer {unknown[0][1]}, which is no surface of {whose} "
                f"({len(unknown)} of {layers} layers are unknown); following helices needs the radius or z, "
                "extent and resolution of every surface: prepare --surfaces FILE."
            )
        return rows

    def resolution_of(self, volume: IntArray, layer: IntArray) -> npt.NDArray[np.float64]:
        """Sigma of each hit across and along its surface in mm, float64 [N, 2]; 0 on a surface that is not known."""
        variance = np.stack([self.places["var_u"], self.places["var_v"]], axis=1)
        variance = np.append(variance, np.zeros((1, 2)), axis=0)  # the last, row -1, is that of no surface
        return np.asarray(np.sqrt(variance[self._rows(volume, layer)[0]]))

    def _rows(self, volume: IntArray, layer: IntArray) -> tuple[IntArray, list[Layer], int]:
        """Row of each hit's surface, -1 on none; the (volume, layer) on none; and how many layers have hits."""
        present, place = np.unique(np.stack([volume, layer], axis=1), axis=0, return_inverse=True)
        layers = [(int(v), int(n)) for v, n in present]
        rows = np.array([self.numbers.get(of, -1) for of in layers], np.int64)
        unknown = [of for of in layers if of not in self.numbers]
        return rows[place.reshape(-1)], unknown, len(layers)  # numpy 2.0 gives `place` the shape of the pairs


@lru_cache(maxsize=1)
def trackml() -> Layout:
    """The 48 surfaces of the TrackML detector; neighbours are the measured layer pairs."""
    places = np.zeros(len(detector.SURFACES), PLACE_DTYPE)
    for i, surface in enumerate(detector.SURFACES):
        barrel = isinstance(surface, Barrel)
        variances = surface.sensor.pitch_u**2 / 12, surface.sensor.pitch_v**2 / 12
        coordinate = surface.radius if isinstance(surface, Barrel) else surface.z
        tilt = surface.tilt if isinstance(surface, Barrel) else 0.0
        reach, of_sensor = detector.reach_across(surface), (surface.sensor.thickness, tilt)
        places[i] = (barrel, coordinate, *reach, *variances, detector.MATERIAL, *of_sensor)
    numbers = {(surface.volume, surface.layer): i for i, surface in enumerate(detector.SURFACES)}
    pairs = [(numbers[inner], numbers[outer]) for inner, outer in detector.SEED_LAYER_PAIRS]
    return Layout.of(numbers, places, pairs, [surface.volume in PIXELS for surface in detector.SURFACES])


def layout_of(settings: Mapping[str, Any]) -> Layout:
    """The surfaces that the settings of a store tell; those of TrackML where they tell none."""
    given = settings.get("surfaces")
    return trackml() if given is None else _given(tuple(tuple(row) for row in given))


@lru_cache(maxsize=4)
def _given(rows: Sequence[Any]) -> Layout:
    """The surfaces of a file; neighbours are those that straight lines from the beam cross one after the other."""
    surfaces = [SurfaceRow(*row) for row in rows]
    places = np.zeros(len(surfaces), PLACE_DTYPE)
    for i, row in enumerate(surfaces):
        variances = row.sigma_u**2, row.sigma_v**2
        places[i] = (row.kind == "barrel", row.place, row.low, row.high, *variances, row.material, 0.0, 0.0)
    pairs = lines_cross(places["is_barrel"], places["coordinate"], places["low"], places["high"])
    numbers = {(row.volume, row.layer): i for i, row in enumerate(surfaces)}
    return Layout.of(numbers, places, pairs, [row.seeds == 1 for row in surfaces])
