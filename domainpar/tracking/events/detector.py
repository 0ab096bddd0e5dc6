"""The TrackML detector: surfaces, modules, field, layer pairs and the particle spectra measured in it.

A generic all-silicon tracker of 48 surfaces, 10 barrel cylinders and 38 disks, made of 18,728 flat modules. The modules
repeat regularly, so a few numbers a surface give all of them; they reproduce the published detector file to 4 um.
Lengths are mm, momenta GeV, angles rad. "Outward" is away from the origin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import surface_numbers

FloatTable = npt.NDArray[np.float64]
Layer = tuple[int, int]
LayerPair = tuple[Layer, Layer]

GEV_PER_TESLA_MM = 0.299792e-3
"""Transverse momentum in GeV of charge 1 on a circle of 1 mm in 1 T."""


@dataclass(frozen=True)
class Sensor:
    """The silicon of a module: cell sizes along u (r phi) and v (z in a barrel, r in a disk), and thickness, in mm."""

    pitch_u: float
    pitch_v: float
    thickness: float


@dataclass(frozen=True)
class Barrel:
    """A cylinder of modules in rows of constant z.

    Attributes:
        volume: TrackML volume number.
        layer: TrackML layer number in the volume.
        coordinate: Mean radius of the module centres.
        num_phi: Modules around a row.
        num_rows: Rows along z, centred on z = 0.
        row_pitch: Distance of neighbouring rows in z.
        stagger: Rows lie at radius + stagger (even rows) or radius - stagger (odd rows).
        tilt: Angle from the radial direction to the module's normal.
        half_u: Half of the module's size across.
        half_v: Half of the module's size along z.
        sensor: Its silicon.
    """

    volume: int
    layer: int
    coordinate: float
    num_phi: int
    num_rows: int
    row_pitch: float
    stagger: float
    tilt: float
    half_u: float
    half_v: float
    sensor: Sensor
    is_barrel: ClassVar = True

    @property
    def extent(self) -> tuple[float, float]:
        """Where the modules begin and end in z."""
        half = (self.num_rows - 1) / 2 * self.row_pitch + self.half_v
        return -half, half


@dataclass(frozen=True)
class Ring:
    """A ring of trapezoidal modules of a disk, all facing along z.

    Attributes:
        radius: Radius of the module centres.
        num_phi: Modules around the ring.
        stagger: Outward offsets in z that the modules take in turn.
        half_inner: Half width of a module at its inner edge.
        half_outer: Half width at its outer edge.
        half_v: Half of the radial size.
    """

    radius: float
    num_phi: int
    stagger: tuple[float, ...]
    half_inner: float
    half_outer: float
    half_v: float


@dataclass(frozen=True)
class Disk:
    """A disk at one z, its `coordinate`, made of rings."""

    volume: int
    layer: int
    coordinate: float
    rings: tuple[Ring, ...]
    sensor: Sensor
    is_barrel: ClassVar = False

    @property
    def extent(self) -> tuple[float, float]:
        """Where the modules begin and end in r."""
        radii = [ring.radius + side * ring.half_v for ring in self.rings for side in (-1, 1)]
        return min(radii), max(radii)


Surface = Barrel | Disk

CHARGE_SHARING = (0.35, 0.1)
"""Share of a cell, in u and v, by which the mean moves at most where a track passes several, as charges fluctuate."""

MATERIAL = 0.02
"""Of a surface that a track crosses head on, in radiation lengths."""

PIXEL = Sensor(0.05, 0.05625, 0.3)
SHORT_STRIP = Sensor(0.08, 1.2, 0.5)
LONG_STRIP_BARREL = Sensor(0.12, 10.8, 0.7)
LONG_STRIP_DISK = Sensor(0.12, 10.4, 0.7)

PIXEL_RINGS = (Ring(66.0, 40, (2.5, -2.0, 2.0, -2.5), 8.4, 8.4, 36.0), Ring(140.0, 68, (2.0, -2.0), 8.4, 8.4, 36.0))
SHORT_STRIP_RINGS = (
    Ring(318.0, 54, (-1.5, -4.5), 16.4, 24.2, 78.0),
    Ring(470.0, 56, (4.5, 1.5), 24.2, 32.2, 78.0),
    Ring(622.0, 60, (-1.5, -4.5), 32.2, 40.0, 78.0),
)
LONG_STRIP_RINGS = (Ring(828.0, 48, (-2.5, -5.5), 54.0, 64.2, 78.0), Ring(942.0, 50, (5.5, 2.5), 66.0, 72.0, 78.0))
PIXEL_DISK_Z = (600.0, 700.0, 820.0, 960.0, 1100.0, 1300.0, 1500.0)
STRIP_DISK_Z = (1220.0, 1500.0, 1800.0, 2150.0, 2550.0, 2950.0)


# The modules of a barrel, the same in all its layers.
_PIXEL_MODULES: dict[str, Any] = {
    "num_rows": 14, "row_pitch": 70.0, "stagger": 0.25, "tilt": 0.14, "half_u": 8.4, "half_v": 36.0, "sensor": PIXEL,
}  # fmt: skip
_STRIP_MODULES = {
    "num_rows": 21, "row_pitch": 103.0, "stagger": 1.5, "tilt": -0.15, "half_u": 24.0, "half_v": 54.0,
}  # fmt: skip
# Volume, modules, and the layers as (layer, radius, modules around a row).
_BARRELS: tuple[tuple[int, dict[str, Any], tuple[tuple[int, float, int], ...]], ...] = (
    (8, _PIXEL_MODULES, ((2, 32.0, 16), (4, 72.0, 32), (6, 116.0, 52), (8, 172.0, 78))),
    (13, {**_STRIP_MODULES, "sensor": SHORT_STRIP}, ((2, 260.0, 40), (4, 360.0, 56), (6, 500.0, 78), (8, 660.0, 102))),
    (17, {**_STRIP_MODULES, "sensor": LONG_STRIP_BARREL}, ((2, 820.0, 120), (4, 1020.0, 152))),
)


def _disk_pairs(volume: int, outward_z: tuple[float, ...], rings: tuple[Ring, ...], sensor: Sensor) -> list[Disk]:
    """Disks at both ends; layers count from the most negative z, so outward at +z and inward at -z."""
    count = len(outward_z)
    negative = [Disk(volume, 2 * (count - i), -z, rings, sensor) for i, z in enumerate(outward_z)]
    positive = [Disk(volume + 2, 2 * (i + 1), z, rings, sensor) for i, z in enumerate(outward_z)]
    return negative + positive


def _surfaces() -> Iterator[Surface]:
    for volume, modules, layers in _BARRELS:
        for layer, radius, num_phi in layers:
            yield Barrel(volume, layer, radius, num_phi, **modules)
    yield from _disk_pairs(7, PIXEL_DISK_Z, PIXEL_RINGS, PIXEL)
    yield from _disk_pairs(12, STRIP_DISK_Z, SHORT_STRIP_RINGS, SHORT_STRIP)
    yield from _disk_pairs(16, STRIP_DISK_Z, LONG_STRIP_RINGS, LONG_STRIP_DISK)


SURFACES: tuple[Surface, ...] = tuple(sorted(_surfaces(), key=lambda surface: (surface.volume, surface.layer)))
"""The 48 surfaces, by (volume, layer)."""

KNOWN_LAYERS: frozenset[Layer] = frozenset((surface.volume, surface.layer) for surface in SURFACES)
"""(volume, layer) of the 48 surfaces."""

MODULE_DTYPE = np.dtype(
    [(name, "i4") for name in ("volume", "layer", "module")]
    + [(name, "f8", 3) for name in ("centre", "u_axis", "v_axis", "normal")]
    + [(name, "f8") for name in ("half_inner", "half_outer", "half_v", "pitch_u", "pitch_v", "thickness")]
)
"""One flat module: its numbers, frame (centre and three unit vectors), half sizes, cells. Half width runs from
`half_inner` at v = -half_v to `half_outer` at v = +half_v."""

GROUP_DTYPE = np.dtype([
    ("is_barrel", "?"), ("coordinate", "f8"), ("first_module", "i8"), ("num_phi", "i8"), ("num_rows", "i8"),
    ("row_pitch", "f8"), ("phi_reach", "i8"),
])  # fmt: skip
"""A barrel, or one ring of a disk: modules `first_module + row * num_phi + j`, the j-th centred at
phi = -pi + (j + 1/2) 2 pi / num_phi. `coordinate` is the barrel's radius or the disk's z; a track that passes there
can touch modules up to `phi_reach` places from the nearest."""

SURFACE_DTYPE = np.dtype([("is_barrel", "?"), ("coordinate", "f8"), ("first_group", "i8"), ("num_groups", "i8")])


@dataclass(frozen=True, eq=False)
class Geometry:
    """The detector as arrays, for compiled code and lookups.

    Attributes:
        surfaces: One record a surface, `SURFACE_DTYPE` [48], as in `SURFACES`.
        groups: Barrels and rings, `GROUP_DTYPE` [98], grouped by surface.
        modules: All modules, `MODULE_DTYPE` [18728], by (volume, layer, module). Modules of a barrel are numbered as in
            TrackML; those of a disk ring by ring, which TrackML does not do.
        field: That of the TrackML events: a table of B_z along the beam.
    """

    surfaces: npt.NDArray[np.void]
    groups: npt.NDArray[np.void]
    modules: npt.NDArray[np.void]
    field: Field


def _blank_modules(
    surface: Surface, part: Barrel | Ring, rows: int, first: int
) -> tuple[npt.NDArray[np.void], FloatTable]:
    """The modules of a barrel, row by row, or of a ring, without their frames; and the phi of each."""
    modules = np.zeros(rows * part.num_phi, MODULE_DTYPE)
    modules["volume"], modules["layer"] = surface.volume, surface.layer
    modules["module"] = first + np.arange(len(modules))
    modules["half_v"] = part.half_v
    for name in ("pitch_u", "pitch_v", "thickness"):
        modules[name] = getattr(surface.sensor, name)
    return modules, np.tile(-np.pi + (np.arange(part.num_phi) + 0.5) * (2 * np.pi / part.num_phi), rows)


def _barrel_modules(barrel: Barrel) -> npt.NDArray[np.void]:
    """Modules row by row, each standing along z and turned by the tilt."""
    modules, phi = _blank_modules(barrel, barrel, barrel.num_rows, 1)
    row = np.arange(len(modules)) // barrel.num_phi
    radius = barrel.coordinate + np.where(row % 2 == 0, barrel.stagger, -barrel.stagger)
    z = (row - (barrel.num_rows - 1) / 2) * barrel.row_pitch
    normal = phi + barrel.tilt
    zero = np.zeros(len(modules))
    modules["centre"] = np.stack([radius * np.cos(phi), radius * np.sin(phi), z], axis=1)
    modules["normal"] = np.stack([np.cos(normal), np.sin(normal), zero], axis=1)
    modules["u_axis"] = np.stack([-np.sin(normal), np.cos(normal), zero], axis=1)
    modules["v_axis"] = [0.0, 0.0, 1.0]
    modules["half_inner"] = modules["half_outer"] = barrel.half_u
    return modules


def _ring_modules(disk: Disk, ring: Ring, first: int) -> npt.NDArray[np.void]:
    """Modules around a ring: v points outward in r, the normal along the outward z."""
    modules, phi = _blank_modules(disk, ring, 1, first)
    side = np.sign(disk.coordinate)
    z = disk.coordinate + side * np.resize(ring.stagger, ring.num_phi)
    zero = np.zeros(ring.num_phi)
    modules["centre"] = np.stack([ring.radius * np.cos(phi), ring.radius * np.sin(phi), z], axis=1)
    modules["normal"] = [0.0, 0.0, side]
    modules["u_axis"] = side * np.stack([np.sin(phi), -np.cos(phi), zero], axis=1)
    modules["v_axis"] = np.stack([np.cos(phi), np.sin(phi), zero], axis=1)
    modules["half_inner"], modules["half_outer"] = ring.half_inner, ring.half_outer
    return modules


def _reach(half_width: float, radius: float, num_phi: int) -> int:
    """Places to either side that can cover one phi: those whose half width reaches over, and one for the tilt."""
    return int(np.ceil(half_width / radius / (2 * np.pi / num_phi)) + 1)


@lru_cache(maxsize=1)
def geometry() -> Geometry:
    """All surfaces and modules of the detector, built once a process."""
    surfaces: list[tuple[bool, float, int, int]] = []
    groups: list[tuple[bool, float, int, int, int, float, int]] = []
    modules: list[npt.NDArray[np.void]] = []
    count = 0
    for surface in SURFACES:
        first_group, first_module, coordinate = len(groups), count, surface.coordinate
        if isinstance(surface, Barrel):
            reach = _reach(surface.half_u, coordinate, surface.num_phi)
            groups.append((True, coordinate, count, surface.num_phi, surface.num_rows, surface.row_pitch, reach))
            modules.append(_barrel_modules(surface))
            count += len(modules[-1])
        else:
            for ring in surface.rings:
                # The half width at the inner edge covers the widest angle.
                reach = _reach(ring.half_inner, ring.radius - ring.half_v, ring.num_phi)
                groups.append((False, coordinate, count, ring.num_phi, 1, 0.0, reach))
                modules.append(_ring_modules(surface, ring, count - first_module + 1))
                count += ring.num_phi
        surfaces.append((surface.is_barrel, coordinate, first_group, len(groups) - first_group))
    return Geometry(
        surfaces=np.array(surfaces, SURFACE_DTYPE),
        groups=np.array(groups, GROUP_DTYPE),
        modules=np.concatenate(modules),
        field=Field.along(FIELD_Z, FIELD_BZ),
    )


# B_z along the beam, measured from true momenta. The asymmetry of the two ends is in the data. All nodes are multiples
# of 50 mm, a quarter of the smallest step.
# fmt: off
FIELD_Z = (-3000.0, -2550.0, -2250.0, -2000.0, -1800.0, -1600.0, -1400.0, -1200.0, -1000.0, -800.0, -600.0, -400.0,
           -200.0, 0.0, 200.0, 400.0, 600.0, 800.0, 1000.0, 1200.0, 1400.0, 1600.0, 1800.0, 2000.0, 2250.0, 2550.0,
           3000.0)
FIELD_BZ = (0.3, 0.42, 0.7, 1.2, 1.47, 1.64, 1.75, 1.85, 1.89, 1.94, 1.96, 1.985,
            1.997, 2.005, 1.995, 1.97, 1.945, 1.9, 1.83, 1.75, 1.62, 1.38, 1.02, 0.82, 0.58, 0.3,
            0.18)
# fmt: on


# The field of the events of the TrackML challenge is that of a solenoid whose middle lies aside. Fitted to the angles
# between the hits of 6 events with the momenta of their particles; the centre is known to 5 mm.
FIELD_CENTRE = (-150.0, -150.0, -150.0)
FIELD_PERIOD = 9000.0
FIELD_WAVES = (1.35972, 0.67344, 0.07083, -0.17009, 0.08266, -0.02129, 0.00256)


@lru_cache(maxsize=1)
def challenge_field() -> Field:
    """The field of the real events, whose middle lies aside of the beam: a track far forward is bent up to a fifth more
    or less, by its azimuth."""
    return Field.solenoid(FIELD_CENTRE, FIELD_PERIOD, FIELD_WAVES, (1260.0, 3000.0))


# Spectra of the charged particles with at least one hit, measured on 55 full events.
PROMPT_SHARE = 0.7428
NOISE_SHARE = 0.175
"""Share of the hits that no listed particle left. Noise falls evenly on modules, some 0.95 a module in a full event."""
PARTICLES_PER_VERTEX = 38.0
BEAM_SPOT = BeamSpot(0.0, 5.44)
BEAM_SPOT_XY = 0.016
PROMPT_POSITIVE_SHARE, SECONDARY_POSITIVE_SHARE = 0.50, 0.66

# fmt: off
QUANTILE_LEVELS = np.array([
    0.0005, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 0.225, 0.25, 0.275, 0.3, 0.325, 0.35, 0.375, 0.4, 0.425,
    0.45, 0.475, 0.5, 0.525, 0.55, 0.575, 0.6, 0.625, 0.65, 0.675, 0.7, 0.725, 0.75, 0.775, 0.8, 0.825, 0.85, 0.875,
    0.9, 0.925, 0.95, 0.975, 0.9995])
PROMPT_PT = np.array([
    0.116, 0.1658, 0.1815, 0.1966, 0.2113, 0.226, 0.2405, 0.2552, 0.27, 0.2847, 0.2999, 0.315, 0.3303, 0.3457, 0.3619,
    0.3783, 0.3955, 0.4133, 0.4316, 0.4502, 0.4702, 0.491, 0.513, 0.5358, 0.5602, 0.5865, 0.6151, 0.6462, 0.6803,
    0.718, 0.7604, 0.8076, 0.864, 0.93, 1.009, 1.1055, 1.2322, 1.4027, 1.6583, 2.1491, 13.1605])
PROMPT_ABS_ETA = np.array([
    0.0018, 0.0983, 0.1959, 0.2951, 0.3917, 0.4865, 0.584, 0.6809, 0.7769, 0.8717, 0.9681, 1.0618, 1.156, 1.2498,
    1.3425, 1.4359, 1.5284, 1.6226, 1.7175, 1.8099, 1.9024, 1.9961, 2.0927, 2.1867, 2.2837, 2.3821, 2.479, 2.5763,
    2.6742, 2.7733, 2.8741, 2.9775, 3.0893, 3.2043, 3.3257, 3.4365, 3.548, 3.6609, 3.7729, 3.886, 3.9977])
SECONDARY_PT = np.array([
    0.1002, 0.1117, 0.124, 0.137, 0.1504, 0.1567, 0.1624, 0.1681, 0.1739, 0.1799, 0.1862, 0.1924, 0.199, 0.2056,
    0.2129, 0.2201, 0.2275, 0.2354, 0.2435, 0.252, 0.2605, 0.2695, 0.279, 0.289, 0.3, 0.3109, 0.3226, 0.3354, 0.3488,
    0.3632, 0.3789, 0.3961, 0.4152, 0.4374, 0.4651, 0.5081, 0.5941, 0.7154, 0.9164, 1.3521, 15.8954])
SECONDARY_ABS_ETA = np.array([
    0.0006, 0.0349, 0.0699, 0.1035, 0.1365, 0.1705, 0.2029, 0.2356, 0.2682, 0.3019, 0.3346, 0.3687, 0.4025, 0.4374,
    0.4732, 0.5086, 0.5455, 0.5834, 0.6236, 0.6653, 0.7079, 0.7544, 0.802, 0.8513, 0.9075, 0.968, 1.0339, 1.1082,
    1.1916, 1.2862, 1.395, 1.5255, 1.6774, 1.8622, 2.0725, 2.3094, 2.5565, 2.8341, 3.1527, 3.5389, 3.9912])
SECONDARY_RADIUS = np.array([
    0.208, 1.293, 3.453, 6.341, 9.777, 14.23, 19.0, 19.0, 19.0, 22.293, 29.782, 31.701, 32.506, 35.412, 35.511, 35.511,
    41.213, 47.956, 56.313, 66.623, 71.899, 74.964, 78.453, 96.543, 115.535, 118.79, 141.641, 172.431, 200.0, 200.0,
    224.272, 255.391, 256.499, 265.117, 355.081, 359.241, 456.259, 498.895, 654.719, 814.585, 979.516])
# fmt: on


def _seed_layer_pairs() -> tuple[LayerPair, ...]:
    chains = [
        [(8, 2), (8, 4), (8, 6), (8, 8), (13, 2), (13, 4), (13, 6), (13, 8), (17, 2), (17, 4)],
        [(7, layer) for layer in range(14, 0, -2)],
        [(9, layer) for layer in range(2, 16, 2)],
        [(12, layer) for layer in range(12, 0, -2)],
        [(14, layer) for layer in range(2, 14, 2)],
    ]
    pairs = [pair for chain in chains for pair in itertools.pairwise(chain)]
    pairs += [((8, layer), first) for first in ((7, 14), (9, 2)) for layer in (2, 4, 6)]
    pairs += [((8, 6), (13, 2))]
    pairs += [((13, layer), first) for first in ((12, 12), (14, 2)) for layer in (2, 4, 6)]
    pairs += [((13, 8), (16, 12)), ((13, 8), (18, 2)), ((7, 14), (13, 2)), ((9, 2), (13, 2))]
    pairs += [((7, 6), (12, 8)), ((7, 8), (12, 10))]
    # The +z images of the last two, themselves just below the threshold: with them the list is symmetric in z.
    return (*pairs, ((9, 10), (14, 6)), ((9, 8), (14, 4)))


SEED_LAYER_PAIRS = _seed_layer_pairs()
"""The 52 (inner, outer) pairs of layers that the CKF begins its tracks in: 50 carry more than 0.2 % each of the
segments of particles above 0.5 GeV, and two are mirror images of such."""


def lines_cross(
    is_barrel: npt.NDArray[np.bool_], coordinate: FloatTable, low: FloatTable, high: FloatTable, skipped: int = 0
) -> list[tuple[int, int]]:
    """Pairs of surfaces that straight lines from the beam cross one after the other, (inner, outer), ascending.

    Lines begin within 200 mm of the origin and lead everywhere up to |eta| = 4.5. A surface counts as crossed also
    `NEAR_MISS` beside its modules, for tracks that turn.

    Args:
        is_barrel: Whether each is a barrel, else a disk, [S].
        coordinate: Radius of a barrel, z of a disk, [S].
        low, high: Where a barrel begins and ends in z, or a disk in radius, [S].
        skipped: Surfaces that may lie between the two.
    """
    z0, slope = np.meshgrid(np.linspace(-200.0, 200.0, 9), np.sinh(np.linspace(-4.5, 4.5, 601)))
    radius = np.full((*z0.shape, len(coordinate)), np.inf)  # of the crossing
    for i, place in enumerate(coordinate):
        with np.errstate(divide="ignore"):
            there = z0 + slope * place if is_barrel[i] else (place - z0) / slope
        crossed = (low[i] - NEAR_MISS < there) & (there < high[i] + NEAR_MISS)
        radius[crossed, i] = place if is_barrel[i] else there[crossed]
    turn = np.argsort(radius, axis=-1, kind="stable")
    crossed = np.isfinite(np.take_along_axis(radius, turn, axis=-1))
    pairs: set[tuple[int, int]] = set()
    for gap in range(1, skipped + 2):
        both = crossed[..., gap:]
        pairs |= set(zip(turn[..., :-gap][both].tolist(), turn[..., gap:][both].tolist()))
    return sorted(pairs)


def crossed_in_turn(skipped: int = 0, surfaces: Sequence[Surface] = SURFACES) -> tuple[LayerPair, ...]:
    """Pairs of layers that straight lines from the beam cross one after the other, in the order of the surfaces.

    Args:
        skipped: Layers that may lie between the two.
        surfaces: The detector's.
    """
    low, high = np.array([surface.extent for surface in surfaces]).T
    is_barrel = np.array([surface.is_barrel for surface in surfaces])
    coordinate = np.array([surface.coordinate for surface in surfaces])
    pairs = lines_cross(is_barrel, coordinate, low, high, skipped)
    layers = [(surface.volume, surface.layer) for surface in surfaces]
    return tuple((layers[inner], layers[outer]) for inner, outer in pairs)


def layers_passed(
    surface: npt.NDArray[np.integer], position: npt.NDArray[np.floating], follows: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Layers that lie between hits and those before them: a straight line in r and z crosses the middle of modules.

    Args:
        surface: Number of each hit's layer (`graph.surface_numbers`), [N], in the order along their particles.
        position: x, y, z of each, [N, 3].
        follows: Whether a hit follows the one before it, [N]; the first does not.

    Returns:
        How many between the hit before and this one, 0 where it follows none, int64 [N].
    """
    last = np.flatnonzero(follows)
    r, z = np.hypot(position[:, 0], position[:, 1]).astype(np.float64), position[:, 2].astype(np.float64)
    passed = np.zeros(len(surface), np.int64)
    for number, layer in zip(known_surfaces(), SURFACES):  # both by (volume, layer)
        along, across = (r, z) if layer.is_barrel else (z, r)
        start, end, at = along[last - 1], along[last], layer.coordinate
        between = (np.minimum(start, end) < at) & (at < np.maximum(start, end))
        # A hit lies a few mm before or behind its layer.
        between &= (surface[last - 1] != number) & (surface[last] != number)
        share = np.divide(at - start, end - start, out=np.zeros(len(last)), where=between)
        there = across[last - 1] + share * (across[last] - across[last - 1])
        low, high = layer.extent
        passed[last] += between & (there > low + NEAR_MISS) & (there < high - NEAR_MISS)
    return passed


NEAR_MISS = 5.0
"""mm beside a layer's modules at which a straight line still counts as crossing it, or only just does."""

DEFAULT_LAYER_PAIRS: tuple[LayerPair, ...] = crossed_in_turn()
"""The 110 pairs of layers that follow each other along some straight line from the beam."""


def known_surfaces() -> npt.NDArray[np.integer]:
    """Numbers of the 48 surfaces (`graph.surface_numbers`), ascending."""
    return surface_numbers(*np.array(sorted(KNOWN_LAYERS)).T)


def lie_on_known_surfaces(volume: npt.NDArray[np.integer], layer: npt.NDArray[np.integer]) -> bool:
    """Whether all hits, of these volumes and layers, [N] each, lie on surfaces of this detector."""
    return bool(np.isin(surface_numbers(volume, layer), known_surfaces()).all())


FIELD_ELSEWHERE = 2.0
"""B_z in T of a detector whose field is not given: that of the inner trackers of ATLAS and of most simulations."""


def field_of(settings: Mapping[str, Any], volume: npt.NDArray[np.integer], layer: npt.NDArray[np.integer]) -> Field:
    """The field around the hits of an event: as the settings of its store have it.

    Where they have none it is that of the TrackML events if all hits, of these volumes and layers, [N] each, lie on
    surfaces of this detector, and `FIELD_ELSEWHERE` if not. Simulated ones have a table of it, by z alone.
    """
    x, y = settings.get("beam_line", (0.0, 0.0))  # positions are from there on, and those of a field are not
    if (given := settings.get("field")) is not None:
        field = Field.of(given)
        return field._replace(x=field.x - x, y=field.y - y) if field.br.any() else field
    if not lie_on_known_surfaces(volume, layer):
        return Field.of(FIELD_ELSEWHERE)
    if settings.get("source") != "trackml":
        return geometry().field
    field = challenge_field()
    return field._replace(x=field.x - x, y=field.y - y) if x or y else field
