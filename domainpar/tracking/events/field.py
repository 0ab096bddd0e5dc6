"""The magnetic field of a detector, symmetric about an axis along z: one number, a table along the beam, or a map.

A track of direction psi and slope dz/ds (s: arc length in the transverse plane) at azimuth phi about the axis is bent
in the transverse plane as by a field along z of B_z - slope B_r cos(psi - phi), and B_r sin(psi - phi) changes its
slope and its transverse momentum: the Lorentz force. Far forward the second term of the first matters as much as B_z.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.common.problems import Problem
from domainpar.tracking.events.graph import FloatArray

LARGEST = 50.0
"""No tracker has a field of more tesla than this: a file in another unit, or of something else."""

NODES = 6_000
"""Nodes of a map that are kept, about: each event's file has them. Solenoids change little over 60 mm."""

AZIMUTHS = 8
"""At which a field is averaged around the beam."""

_STEP = 60.0
"""mm between the nodes of a map that is made here."""

_HINT = (
    "a file has two columns, z and B_z, or four, r z B_r B_z, or six, x y z B_x B_y B_z, in mm and T, on a regular grid"
)


class Field(NamedTuple):
    """B at the nodes of an even grid, linear between them and constant beyond it.

    Attributes:
        r_step: Distance in mm of nodes in the transverse plane, from the beam on; of no meaning for one row.
        z_first, z_step: First node along z, and the distance to the next, in mm.
        bz, br: B_z and B_r in T, float64 [R, Z]; with one row they are the same at every radius, and B_r is 0.
        x, y: The axis of a map in mm: that of a magnet need not be the beam.
    """

    r_step: float
    z_first: float
    z_step: float
    bz: FloatArray
    br: FloatArray
    x: float = 0.0
    y: float = 0.0

    @classmethod
    def of(cls, value: Any) -> Field:
        """A field from B_z in T, a table of z in mm (increasing) and B_z, [K, 2], what `to_json` wrote, or a field.

        Raises:
            ValueError: If it is none of them.
        """
        if isinstance(value, Field):
            return value
        if isinstance(value, Mapping):
            bz, br = (np.array([row.split() for row in value[name]], np.float64) for name in ("bz", "br"))
            r_step, z_first, z_step = (float(value[name]) for name in ("r_step", "z_first", "z_step"))
            axis = float(value.get("x", 0.0)), float(value.get("y", 0.0))
            return cls(r_step, z_first, z_step, bz, br, *axis)._checked()
        table = np.asarray(value, np.float64)
        if table.ndim == 0:
            return cls.along([0.0, 1.0], [float(table)] * 2)
        if table.ndim != 2 or table.shape[1] != 2 or len(table) < 2:
            raise ValueError(
                f"the field has shape {table.shape}; give one B_z in T, or z and B_z at each step, (K, 2)."
            )
        return cls.along(*table.T)

    @classmethod
    def along(cls, z: Sequence[float] | FloatArray, bz: Sequence[float] | FloatArray) -> Field:
        """A table of B_z in T at increasing z in mm; of uneven steps to a quarter of the smallest."""
        z, bz = np.asarray(z, np.float64), np.asarray(bz, np.float64)
        steps = np.diff(z)
        if not (steps > 0).all():
            raise ValueError("the z of a field's table do not increase.")
        if np.ptp(steps) > 1e-6 * steps.min():
            even = np.linspace(z[0], z[-1], round(float((z[-1] - z[0]) / (steps.min() / 4))) + 1)
            z, bz = even, np.interp(even, z, bz)
        return cls(1.0, float(z[0]), float(z[1] - z[0]), bz[None].copy(), np.zeros((1, len(bz))))._checked()

    @classmethod
    def solenoid(cls, centre: Sequence[float], period: float, waves: Sequence[float], reach: Sequence[float]) -> Field:
        """A map of a field that is symmetric about its axis and its middle, without sources, as Maxwell has it.

        B_z is the sum of w_n cos(k z) I_0(k r), and B_r that of w_n sin(k z) I_1(k r), k = 2 pi n / period, with r and
        z from the centre.

        Args:
            centre: x, y, z of the middle in mm.
            period: In mm.
            waves: w_n in T, n from 0.
            reach: Largest distance from the axis, and largest |z| about the origin, of the map in mm.
        """
        r, z = np.arange(0.0, reach[0] + _STEP, _STEP), np.arange(-reach[1], reach[1] + _STEP, _STEP)
        angle = (np.arange(64) + 0.5) * np.pi / 64
        bz, br = np.zeros((2, len(r), len(z)))
        for n, wave in enumerate(waves):
            k = 2 * np.pi * n / period
            grown = np.exp(k * r[:, None] * np.cos(angle))  # the mean over all angles is I_0, with their cosine I_1
            along = k * (z - centre[2])
            bz += wave * grown.mean(axis=1)[:, None] * np.cos(along)
            br += wave * (grown * np.cos(angle)).mean(axis=1)[:, None] * np.sin(along)
        return cls(_STEP, -float(reach[1]), _STEP, bz, br, float(centre[0]), float(centre[1]))._checked()

    def _checked(self) -> Field:
        """Itself.

        Raises:
            ValueError: If its arrays do not fit.
        """
        if self.bz.shape != self.br.shape or self.bz.shape[1] < 2 or not (self.r_step > 0 and self.z_step > 0):
            raise ValueError(
                f"a field with B_z {self.bz.shape} and B_r {self.br.shape} at steps of {self.r_step} and {self.z_step}."
            )
        return self

    def to_json(self) -> float | dict[str, Any]:
        """One number where the field is the same everywhere, else plain values: of each radius a line, of six digits.

        Of a map that has more nodes than `NODES` every second, or third, ... is kept.
        """
        if np.ptp(self.bz) == 0 and not self.br.any():
            return float(self.bz[0, 0])
        each = 1 if len(self.bz) == 1 else math.ceil(math.sqrt(self.bz.size / NODES))
        lines = {
            name: [" ".join(f"{value:.6g}" for value in row[::each]) for row in getattr(self, name)[::each].tolist()]
            for name in ("bz", "br")
        }
        axis = {"x": self.x, "y": self.y} if self.x or self.y else {}
        return {"r_step": self.r_step * each, "z_first": self.z_first, "z_step": self.z_step * each, **axis, **lines}

    def __str__(self) -> str:
        least, most = float(self.bz.min()), float(self.bz.max())
        if least == most:
            return f"{least:g} T everywhere"
        text = f"B_z {least:.4g} to {most:.4g} T"
        if len(self.bz) == 1:
            return f"{text}, by z"
        about = f" about x {self.x:g}, y {self.y:g} mm" if self.x or self.y else ""
        return f"{text}, B_r up to {np.abs(self.br).max():.4g} T, by r and z{about}"

    @property
    def largest(self) -> float:
        """Largest |B_z| in T."""
        return float(np.abs(self.bz).max())

    def at(self, position: FloatArray) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """B_z, and B_r from the axis outward, in T at positions x, y, z in mm, [N, 3]; float64 [N] each."""
        x, y, z = np.asarray(position, np.float64).reshape(-1, 3).T
        bz, br = _components(self, np.hypot(x - self.x, y - self.y), z)
        return bz, br

    def bending(self, position: FloatArray) -> npt.NDArray[np.float64]:
        """What bends a track from the origin at these positions, as a field along z: B_z - z/r B_r, float64 [N].

        Where the axis of the field is not the beam, it is the mean over azimuths: tolerances go by it.
        """
        x, y, z = np.asarray(position, np.float64).reshape(-1, 3).T
        r = np.maximum(np.hypot(x, y), 1e-3)
        if not (self.x or self.y):
            bz, br = self.at(position)
            return np.asarray(bz - z / r * br)
        bent = np.zeros(len(r))
        for azimuth in np.linspace(0, 2 * np.pi, AZIMUTHS, endpoint=False):
            ahead, aside = np.cos(azimuth), np.sin(azimuth)
            bz, br = self.at(np.stack([r * ahead, r * aside, z], axis=1))
            from_x, from_y = r * ahead - self.x, r * aside - self.y
            outward = (from_x * ahead + from_y * aside) / np.maximum(np.hypot(from_x, from_y), 1e-3)
            bent += bz - z / r * br * outward
        return bent / AZIMUTHS


# --- for compiled code -----------------------------------------------------------------------------------------------


@compiled
def field_at(field: Any, r: float, z: float) -> Any:
    """(B_z, B_r) in T at a distance from the axis and z in mm."""
    bz = field.bz
    place = min(max((z - field.z_first) / field.z_step, 0.0), bz.shape[1] - 1.0)
    node = min(int(place), bz.shape[1] - 2)
    share = place - node
    if bz.shape[0] == 1:
        return bz[0, node] + share * (bz[0, node + 1] - bz[0, node]), 0.0
    out = min(max(r / field.r_step, 0.0), bz.shape[0] - 1.0)
    ring = min(int(out), bz.shape[0] - 2)
    out -= ring
    br = field.br
    inner_z = bz[ring, node] + share * (bz[ring, node + 1] - bz[ring, node])
    outer_z = bz[ring + 1, node] + share * (bz[ring + 1, node + 1] - bz[ring + 1, node])
    inner_r = br[ring, node] + share * (br[ring, node + 1] - br[ring, node])
    outer_r = br[ring + 1, node] + share * (br[ring + 1, node + 1] - br[ring + 1, node])
    return inner_z + out * (outer_z - inner_z), inner_r + out * (outer_r - inner_r)


@compiled
def forces(field: Any, x: float, y: float, z: float, psi: float, slope: float) -> Any:
    """(bend, twist, lean) in T of a track at a point: B_z + slope lean, B_r sin(psi - phi), -B_r cos(psi - phi)."""
    if field.bz.shape[0] == 1:
        return field_at(field, 0.0, z)[0], 0.0, 0.0
    x, y = x - field.x, y - field.y
    r = max(np.hypot(x, y), 1e-9)
    bz, br = field_at(field, r, z)
    sine, cosine = np.sin(psi), np.cos(psi)
    lean = -br * (x * cosine + y * sine) / r
    return bz + slope * lean, br * (x * sine - y * cosine) / r, lean


@compiled
def _components(field: Any, r: Any, z: Any) -> Any:
    bz, br = np.empty(len(r)), np.empty(len(r))
    for i in range(len(r)):
        bz[i], br[i] = field_at(field, r[i], z[i])
    return bz, br


# --- files -----------------------------------------------------------------------------------------------------------


def read_field(text: str) -> Field:
    """The field that a flag names: a number in T, or a file.

    A file is one of ACTS's text maps, (r, z, B_r, B_z) or (x, y, z, B_x, B_y, B_z) in mm and T, a table (z, B_z), or
    JSON as `Field.to_json` writes it. Lines that do not begin with a number are its heading. Of a map in x, y and z its
    half plane y = 0, x >= 0 is taken: the field is symmetric about the beam.

    Raises:
        Problem: If it is no number and no file can be read so.
    """
    field = _parse_field(text)
    if not (largest := float(max(np.abs(field.bz).max(), np.abs(field.br).max()))) <= LARGEST:
        raise Problem(f"--field {text}: its largest component is {largest:g} T", "a field is in T, here at most 50")
    return field


def _parse_field(text: str) -> Field:
    try:
        return Field.of(float(text))
    except ValueError:
        path = Path(text)
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"--field {text}: no number, and no file that can be read ({error})", _HINT) from error
    try:
        if content.lstrip().startswith("{"):
            return Field.of(json.loads(content))
        return _from_columns(_numbers(content))
    except (ValueError, KeyError, TypeError) as error:
        raise Problem(f"the field cannot be read: {error}", _HINT, file=path) from error


def _numbers(content: str) -> npt.NDArray[np.float64]:
    """The numbers of a table of text, float64 [rows, columns]."""
    rows: list[list[float]] = []
    for number, line in enumerate(content.splitlines(), 1):
        words = line.replace(",", " ").replace(";", " ").split()
        try:
            values = [float(word) for word in words]
        except ValueError:
            if rows:
                raise ValueError(f"line {number} is {line[:60]!r}") from None
            continue  # the heading
        if values:
            if rows and len(values) != len(rows[0]):
                raise ValueError(f"line {number} has {len(values)} numbers, the lines before have {len(rows[0])}")
            rows.append(values)
    return np.array(rows, np.float64, ndmin=2)


def _from_columns(values: npt.NDArray[np.float64]) -> Field:
    if not np.isfinite(values).all():
        raise ValueError("a number is not finite")
    if values.shape[1] == 2:
        return Field.of(values[np.argsort(values[:, 0], kind="stable")])
    if values.shape[1] == 6:
        x, y, z, b_x, _, b_z = values.T
        values = np.stack([x, z, b_x, b_z], axis=1)[(y == 0) & (x >= 0)]
    if values.shape[1] != 4 or not len(values):
        raise ValueError(f"it has {len(values)} rows of {values.shape[1]} numbers")
    values = values[np.lexsort((values[:, 1], values[:, 0]))]
    r, z = np.unique(values[:, 0]), np.unique(values[:, 1])
    grid = values.reshape(len(r), len(z), 4) if len(values) == len(r) * len(z) else values[:0].reshape(0, 0, 4)
    if not (len(grid) and (grid[:, :, 0] == r[:, None]).all() and (grid[:, :, 1] == z).all()):
        raise ValueError(f"{len(values):,} rows are no grid of {len(r)} radii and {len(z)} z")
    if len(r) < 2 or len(z) < 2 or r[0] != 0:
        raise ValueError(f"a map begins at radius 0 and has two radii and two z; this one has {len(r)} from {r[0]:g}")
    if max(np.ptp(np.diff(r)) / (r[1] - r[0]), np.ptp(np.diff(z)) / (z[1] - z[0])) > 1e-3:
        raise ValueError("its steps are not even")
    bz, br = np.ascontiguousarray(grid[:, :, 3]), np.ascontiguousarray(grid[:, :, 2])
    return Field(float(r[1]), float(z[0]), float(z[-1] - z[0]) / (len(z) - 1), bz, br)._checked()
