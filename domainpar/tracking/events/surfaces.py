"""The surfaces of another detector, from a file: cylinders and disks with the resolution of their hits."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from domainpar.common.problems import Problem
from domainpar.tracking.events.detector import MATERIAL

KINDS = ("barrel", "disk")


class SurfaceRow(NamedTuple):
    """One surface, a line of the file; lengths in mm.

    Attributes:
        volume, layer: Numbers of its hits.
        kind: `barrel`, a cylinder around the beam, or `disk`, across it.
        place: Radius of a barrel, z of a disk.
        low, high: Its extent: z of a barrel, radius of a disk.
        sigma_u, sigma_v: Errors (sigma) of its hits: across, along r phi; and along z of a barrel, r of a disk.
        seeds: 1 where tracks from the beam may begin, most often on pixels; else 0.
        material: What a track crosses head on, in radiation lengths.
    """

    volume: int
    layer: int
    kind: str
    place: float
    low: float
    high: float
    sigma_u: float
    sigma_v: float
    seeds: int
    material: float = MATERIAL

    def wrong(self) -> str | None:
        """What is impossible about it, if something is."""
        if self.kind not in KINDS:
            return f"kind is {self.kind!r}, not {' or '.join(KINDS)}"
        if not all(math.isfinite(value) for value in self[3:]):
            return "a number is not finite"
        if not self.low < self.high or (self.kind == "disk" and self.low < 0):
            return f"it reaches from {self.low:g} to {self.high:g}"
        if self.kind == "barrel" and self.place <= 0:
            return f"the radius is {self.place:g}"
        if not (self.sigma_u > 0 and self.sigma_v > 0):
            return f"errors are {self.sigma_u:g} and {self.sigma_v:g}, not above 0"
        if not 0 < self.material < 1:
            return f"material is {self.material:g} radiation lengths, not between 0 and 1"
        return None if self.seeds in (0, 1) else f"seeds is {self.seeds}, not 0 or 1"


def read_surfaces(path: str | Path) -> list[SurfaceRow]:
    """The surfaces that a CSV file tells, a line each, with the names of `SurfaceRow` as its heading.

    Raises:
        Problem: If it cannot be read so, a value is impossible, or a surface is there twice.
    """
    path, names = Path(path), list(SurfaceRow._fields)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines: Sequence[dict[str | Any, str | Any]] = list(csv.DictReader(file, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Problem(f"the surfaces cannot be read: {error}", file=path) from error
    optional = ", ".join(SurfaceRow._field_defaults)
    hint = f"columns are {', '.join(names)}; lengths in mm; {optional} may be left out"
    rows: dict[tuple[int, int], SurfaceRow] = {}
    for number, line in enumerate(lines, 2):
        try:
            told = [name for name in names if name in line or name not in SurfaceRow._field_defaults]
            row = SurfaceRow(*(_TYPES[name](line[name]) for name in told))
            wrong = row.wrong()
        except KeyError as error:
            raise Problem(f"no column {error.args[0]} of surfaces", hint, file=path) from error
        except (ValueError, TypeError) as error:
            wrong = str(error)
        if wrong is not None:
            raise Problem(f"line {number}: {wrong}", hint, file=path)
        if (row.volume, row.layer) in rows:
            raise Problem(f"line {number}: volume {row.volume} layer {row.layer} is there twice", hint, file=path)
        rows[row.volume, row.layer] = row
    if len(rows) < 3:
        raise Problem(f"it has {len(rows)} surfaces; a track crosses at least three", hint, file=path)
    return list(rows.values())


_TYPES: dict[str, type[Any]] = {
    "volume": int, "layer": int, "kind": str, "place": float, "low": float, "high": float, "sigma_u": float,
    "sigma_v": float, "seeds": int, "material": float,
}  # fmt: skip
