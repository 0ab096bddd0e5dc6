"""The surfaces of another detector, from a file or from its hits: cylinders and disks, and how they measure."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from domainpar.common.problems import Problem
from domainpar.common.words import several
from domainpar.tracking.events.detector import MATERIAL, PIXEL, SHORT_STRIP, SURFACES
from domainpar.tracking.events.graph import FloatArray, Hits

KINDS = ("barrel", "disk")

PIXELS = (7, 8, 9)
"""Volumes of the pixel detector of TrackML."""

ENOUGH_HITS, FEWEST = 20_000, 10
"""Hits that surfaces are learned from, of as many events as have them; and those that one surface takes."""

ASTRAY = 30.0
"""mm from its surface beyond which a hit does not lie on it: rings of a disk may stand 20 mm before and behind it."""

OFF = 10.0
"""mm from where TrackML has it within which a surface is TrackML's; those of its hits lie within 6 mm."""


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
    """The surfaces of a CSV file, a line each, with the names of `SurfaceRow` as its heading.

    Raises:
        Problem: If it cannot be read so, a value is impossible, or a surface is there twice.
    """
    path, types = Path(path), get_type_hints(SurfaceRow)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines: Sequence[dict[str | Any, str | Any]] = list(csv.DictReader(file, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Problem(f"the surfaces cannot be read: {error}", file=path) from error
    optional = ", ".join(SurfaceRow._field_defaults)
    hint = f"columns are {', '.join(types)}; lengths in mm; {optional} may be left out"
    rows: dict[tuple[int, int], SurfaceRow] = {}
    for number, line in enumerate(lines, 2):
        try:
            named = [name for name in types if name in line or name not in SurfaceRow._field_defaults]
            row = SurfaceRow(*(types[name](line[name]) for name in named))
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


# --- from hits -------------------------------------------------------------------------------------------------------


def learned_surfaces(events: Sequence[Hits]) -> dict[str, Any]:
    """The surfaces on which the hits of some events lie, as the settings of a store keep them: plain JSON values.

    A layer is a cylinder or a disk, whichever is thinner, in the middle of its hits, and reaches as far as they do. Its
    errors are those of `Hits.measured`, and where it has none those of TrackML's sensors. Tracks begin on
    TrackML's pixels; of other numbers on the innermost third of the cylinders and on disks that begin within it.

    Args:
        events: Their hits; layers of fewer than `FEWEST` in all of them are not learned.

    Returns:
        `surfaces`, rows of `SurfaceRow`, and `surfaces_learned`: from how many events, and on how many surfaces the
        errors are known. Empty where all hits lie on TrackML's surfaces, where no layers or positions are known, and
        where fewer than three layers are thin.
    """
    events = [hits for hits in events if hits.position is not None and np.any([hits.volume, hits.layer])]
    if not events:
        return {}
    x, y, z = np.concatenate([np.asarray(hits.position, np.float64) for hits in events]).T
    r = np.hypot(x, y)
    measured = [np.full((len(hits), 8), np.nan) if hits.measured is None else hits.measured for hits in events]
    sigmas = np.concatenate(measured)[:, 6:].astype(np.float64)
    numbers = np.concatenate([np.stack([hits.volume, hits.layer], axis=1) for hits in events])
    layers, of_layer = np.unique(numbers, axis=0, return_inverse=True)
    known = {(surface.volume, surface.layer): surface for surface in SURFACES}
    surfaces: list[SurfaceRow] = []
    with_errors, trackmls, in_place = 0, True, True  # numbers that are TrackML's, and places
    for i, (volume, layer) in enumerate(layers.tolist()):
        rows = np.flatnonzero(of_layer.reshape(-1) == i)
        ends = np.quantile(np.stack([r[rows], z[rows]]), (0.01, 0.99), axis=1).T
        middle, spread = ends.mean(axis=1), np.diff(ends, axis=1)[:, 0]
        if (usual := known.get((volume, layer))) is None:
            trackmls = False
        else:
            in_place &= abs(middle[0 if usual.is_barrel else 1] - usual.coordinate) < OFF
        thin = int(spread[0] > spread[1])  # 0: in r
        across = (z, r)[thin][rows]
        reach = across.max() - across.min()
        if len(rows) < FEWEST or spread[thin] >= min(2 * ASTRAY, reach):
            continue
        u, v = (_usual_error(sigmas[rows, axis]) for axis in range(2))
        u, v, place, low, high = (
            round(float(value), 4) for value in (u, min(v, reach / 12**0.5), middle[thin], across.min(), across.max())
        )
        with_errors += min(u, v) > 0
        surfaces.append(SurfaceRow(volume, layer, KINDS[thin], place, low, high, u, v, 0))
    if (trackmls and in_place) or len(surfaces) < 3:
        return {}
    radii = sorted(row.place for row in surfaces if row.kind == "barrel")
    innermost = radii[min(max(2, (len(radii) - 1) // 3), len(radii) - 1)] if radii else math.inf  # seeds take three
    for i, row in enumerate(surfaces):
        inside = (row.place if row.kind == "barrel" else row.low) <= innermost
        seeds = row.volume in PIXELS if trackmls else inside
        if min(row.sigma_u, row.sigma_v) == 0:
            sensor = known[row[:2]].sensor if trackmls else PIXEL if seeds else SHORT_STRIP
            row = row._replace(sigma_u=round(sensor.pitch_u / 12**0.5, 4), sigma_v=round(sensor.pitch_v / 12**0.5, 4))
        surfaces[i] = row._replace(seeds=int(seeds))
    return {
        "surfaces": [list(row) for row in surfaces],
        "surfaces_learned": {"events": len(events), "told": with_errors},
    }


def described_surfaces(rows: Sequence[Sequence[Any]], learned: Mapping[str, int] | None) -> str:
    """What the surfaces of a store are: those of a file, or with `surfaces_learned` those learned from its hits."""
    kinds = [SurfaceRow(*row).kind for row in rows]
    line = f"surfaces: {several(kinds.count('barrel'), 'cylinder')} and {several(kinds.count('disk'), 'disk')}"
    if learned is None:
        return f"{line}, as given"
    known = learned["told"]
    return (
        f"{line}, learned from the hits of {several(learned['events'], 'event')}: they are not TrackML's\n"
        f"  (resolution of {known} as in the files, of {len(rows) - known} that of TrackML's sensors; material "
        f"{MATERIAL:g}; --surfaces FILE replaces them)"
    )


def _usual_error(sigma: FloatArray) -> float:
    """That of most hits of a surface, without the few that are far worse; 0 where none is known."""
    sigma = sigma[~np.isnan(sigma)]
    if not len(sigma):
        return 0.0
    middle = np.median(sigma)
    return float(np.sqrt(np.mean(sigma[sigma <= 5 * middle] ** 2)))
