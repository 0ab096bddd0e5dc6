"""The surfaces of a detector in the order in which a track meets them, and where tracks may begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.tracking.events import detector
from domainpar.tracking.events.detector import Layer, lines_cross
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.events.store import StoredEvent
from domainpar.tracking.events.surfaces import ASTRAY, FEWEST, PIXELS, SurfaceRow

PLACE_DTYPE = np.dtype(
    [
        ("is_barrel", "?"),
        ("by_angle", "?"),
        *((name, "f8") for name in ("coordinate", "low", "high", "var_u", "var_v", "material", "thickness")),
    ]
)
"""A surface: whether a slanted flight passes more of it, radius of a barrel or z of a disk, its extent in z or r, the
variances in mm^2 of a hit's position across (r phi) and along (z in a barrel, r in a disk), from one cell,
its material in radiation lengths, and its sensors' thickness in mm, 0 where the resolution is given, which then goes
by no number of cells."""

NOWHERE = np.array([(True, True, np.nan, 0.0, 0.0, 0.1**2, 0.2**2, 0.015, 0.0)], PLACE_DTYPE)
"""That of a hit which lies on no known surface."""

MATERIAL_OF_VOLUME = {
    **dict.fromkeys((7, 8, 9), 0.0107), 13: 0.0200, 17: 0.0255, **dict.fromkeys((12, 14), 0.0310),
    **dict.fromkeys((16, 18), 0.0440),
}  # fmt: skip
"""Of a surface of ACTS's generic detector in radiation lengths, so that pulls of muons of 1, 10 and 100 GeV are as wide
as they should be. Its silicon is .0173 in the pixels to .0402, of which Fatras's scattering has .56 within its middle
68 %, and the sum of many layers more; beryllium at a radius of 200 mm, which has no hits, is in the strips'."""

MOST_ASTRAY = 0.01
"""Share of the hits of a surface that may lie elsewhere."""

SIMULATED_SHARE = 0.75
"""Of a pixel surface of the built-in simulation: all of it scatters there, at any angle, some mm behind the hit, which
between two surfaces so near to each other is seen less."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The surfaces of one detector.

    Attributes:
        numbers: Row in `places` of each (volume, layer).
        places: The surfaces, `PLACE_DTYPE` [S].
        of_modules: Whether hits lie on the modules of `detector.geometry`.
        ways: Their rows in the order of an outward track, int64 [3, S + 1]: barrels by radius; disks at negative z by
            |z|; disks at positive z by z. Filled up with -1.
        prompt: Rows of three neighbouring surfaces, outward, on which tracks from the beam begin, int64 [C, 3].
        everywhere: Those and all others, int64 [C, 3].
    """

    numbers: Mapping[Layer, int]
    places: npt.NDArray[np.void]
    of_modules: bool
    ways: IntArray
    prompt: IntArray
    everywhere: IntArray

    @classmethod
    def of(
        cls, numbers: Mapping[Layer, int], places: npt.NDArray[np.void], pairs: Any, seeds: Any, of_modules: bool
    ) -> Layout:
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
        return cls(numbers, places, of_modules, ways, chains[inside], np.concatenate([chains[inside], chains[~inside]]))

    def surface_of(self, volume: IntArray, layer: IntArray, position: FloatArray | None = None) -> IntArray:
        """Row of each hit's surface.

        Args:
            volume, layer: Of each hit, [N].
            position: x, y, z in mm, [N, 3]; None: hits are not compared with their surfaces.

        Raises:
            ValueError: If a hit lies on none of them; if more than `MOST_ASTRAY` of the hits of a surface, and at least
                `FEWEST`, lie more than `ASTRAY` before or behind it.
        """
        rows, unknown, layers = self.rows_of(volume, layer)
        whose = "the TrackML detector" if self.of_modules else "--surfaces"
        needed = (
            "following helices needs the radius or z, extent and resolution of every surface: prepare --surfaces FILE "
            "has them, prepare --overwrite learns them from the hits."
        )
        if unknown:
            raise ValueError(
                f"hits lie in volume {unknown[0][0]} layer {unknown[0][1]}, which is no surface of {whose} "
                f"({len(unknown)} of {layers} layers are unknown); {needed}"
            )
        if position is None or not len(rows):
            return rows
        places, x, y, z = self.places[rows], *np.asarray(position, np.float64).T
        away = np.abs(np.where(places["is_barrel"], np.hypot(x, y), z) - places["coordinate"])
        counts, astray = np.bincount(rows), np.bincount(rows, away > ASTRAY).astype(np.int64)
        wrong = np.flatnonzero((astray > MOST_ASTRAY * counts) & (astray >= FEWEST))
        if len(wrong):
            worst = wrong[astray[wrong].argmax()]
            on_it = np.flatnonzero(rows == worst)
            raise ValueError(
                f"hits of volume {volume[on_it[0]]} layer {layer[on_it[0]]} lie {np.median(away[on_it]):.3g} mm from "
                f"where {whose} has their surface, {astray[worst]} of {counts[worst]} more than {ASTRAY:g} mm "
                f"({len(wrong)} of {layers} layers lie elsewhere); {needed}"
            )
        return rows

    def rows_of(self, volume: IntArray, layer: IntArray) -> tuple[IntArray, list[Layer], int]:
        """Row of each hit's surface, -1 on none; the (volume, layer) on none; and how many layers have hits."""
        present, place = np.unique(np.stack([volume, layer], axis=1), axis=0, return_inverse=True)
        layers = [(int(v), int(n)) for v, n in present]
        rows = np.array([self.numbers.get(of, -1) for of in layers], np.int64)
        unknown = [of for of in layers if of not in self.numbers]
        return rows[place.reshape(-1)], unknown, len(layers)  # numpy 2.0 gives `place` the shape of the pairs


@cache
def trackml(flown: bool = False) -> Layout:
    """The 48 surfaces of the TrackML detector, which is ACTS's generic one; neighbours are the measured layer pairs.

    Args:
        flown: Material is that of ACTS's detector, for events that Fatras made; else that of the built-in simulation.
    """
    places = np.zeros(len(detector.SURFACES), PLACE_DTYPE)
    for i, surface in enumerate(detector.SURFACES):
        variances = surface.sensor.pitch_u**2 / 12, surface.sensor.pitch_v**2 / 12
        simulated = detector.MATERIAL * (SIMULATED_SHARE if surface.volume in PIXELS else 1.0)
        material = MATERIAL_OF_VOLUME[surface.volume] if flown else simulated
        place = surface.is_barrel, flown, surface.coordinate, *surface.extent
        places[i] = (*place, *variances, material, surface.sensor.thickness)
    numbers = {(surface.volume, surface.layer): i for i, surface in enumerate(detector.SURFACES)}
    pairs = [(numbers[inner], numbers[outer]) for inner, outer in detector.SEED_LAYER_PAIRS]
    return Layout.of(numbers, places, pairs, [surface.volume in PIXELS for surface in detector.SURFACES], True)


def layout_of(settings: Mapping[str, Any]) -> Layout:
    """The surfaces in the settings of a store; without any, those of TrackML."""
    if (surfaces := settings.get("surfaces")) is None:
        return trackml(settings.get("source", "simulate") != "simulate")
    return _layout_of_rows(tuple(tuple(row) for row in surfaces))


def why_not_followed(event: StoredEvent) -> str | None:
    """Why no helix can be followed through an event, nor tracks be fitted at the beam line, in a sentence; None where
    they can."""
    if not event.has_positions:
        return "their hits have no positions"
    rows = np.arange(event.num_nodes)
    try:
        layout_of(event.settings).surface_of(event.read_nodes("volume", rows), event.read_nodes("layer", rows))
    except ValueError as error:
        return str(error).removesuffix(".")
    return None


@lru_cache(maxsize=4)
def _layout_of_rows(rows: Sequence[Any]) -> Layout:
    """The surfaces of a file; neighbours are those that straight lines from the beam cross one after the other."""
    surfaces = [SurfaceRow(*row) for row in rows]
    places = np.zeros(len(surfaces), PLACE_DTYPE)
    for i, row in enumerate(surfaces):
        variances = row.sigma_u**2, row.sigma_v**2
        places[i] = (row.kind == "barrel", True, row.place, row.low, row.high, *variances, row.material, 0.0)
    pairs = lines_cross(places["is_barrel"], places["coordinate"], places["low"], places["high"])
    numbers = {(row.volume, row.layer): i for i, row in enumerate(surfaces)}
    return Layout.of(numbers, places, pairs, [row.seeds == 1 for row in surfaces], False)
