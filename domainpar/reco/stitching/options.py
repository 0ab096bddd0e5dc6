"""What pieces of a track may differ by and still be joined."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StitchOptions:
    """How far stitching looks and what it accepts; the defaults were chosen on simulated events.

    Hits that are off by e over a lever arm l leave a helix off by e (1 + g / l)^2 in the transverse plane, and by
    e (1 + g / l) along z, a distance g beyond them. Here e is `position` (`along` for z) and what scattering adds,
    `scattering` l / pT.

    Attributes:
        min_hits: Tracks with fewer hits are left alone; a helix takes three.
        eta: Largest difference in pseudorapidity of two pieces.
        reach: Longest gap between two pieces, in mm of the transverse plane.
        beside: Where pieces overlap in distance from the origin, the hits of the outer one must each have a hit of the
            inner one within so many mm.
        position: What hits may be off in the transverse plane, in mm.
        along: What hits may be off along z (in a disk: along r), seen across the flight, in mm.
        scattering: Angle in rad by which a particle of 1 GeV may leave its helix: scattering, loss of energy, and a
            field that changes along the way.
        residual: Largest mean square distance, in units of e, of the hits of a pair from their common helix.
        residual_beside: The same where the pieces overlap: hits beside each other were scattered alike.

    Raises:
        ValueError: If a number is not positive and finite, or a helix would have too few hits.
    """

    min_hits: int = 3
    eta: float = 0.02
    reach: float = 400.0
    beside: float = 25.0
    position: float = 0.4
    along: float = 1.0
    scattering: float = 0.008
    residual: float = 0.08
    residual_beside: float = 0.04

    def __post_init__(self) -> None:
        if self.min_hits < 3:
            raise ValueError(f"stitching option min_hits is {self.min_hits}; a helix takes at least 3 hits.")
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"stitching option {name} is {value}; it must be a positive number.")
