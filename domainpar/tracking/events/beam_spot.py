"""Where collisions lie along the beam: given by a flag, or measured from events with truth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from domainpar.tracking.events.graph import Particles

NEAR_BEAM = 1.0
"""mm from the beam line within which a particle counts as one of a collision."""

FEWEST = 10
"""Particles that a width is measured of, at least."""

WITHIN_ONE_WIDTH = (0.1587, 0.8413)


class BeamSpot(NamedTuple):
    """The places of collisions along the beam, as of a normal distribution: its middle and its width (sigma), in mm."""

    z: float
    width: float

    @classmethod
    def from_particles(cls, particles: Particles | None) -> BeamSpot | None:
        """Median, and half of what holds 68 % of the prompt particles that left hits; None where they are too few."""
        if particles is None:
            return None
        x, y, z = np.asarray(particles.vertex, np.float64).T
        with np.errstate(invalid="ignore"):
            prompt = z[(np.hypot(x, y) < NEAR_BEAM) & np.isfinite(z) & (particles.nhits > 0)]
        if len(prompt) < FEWEST:
            return None
        low, high = np.quantile(prompt, WITHIN_ONE_WIDTH)
        return cls(round(float(np.median(prompt)), 3), round(float(high - low) / 2, 3))

    @classmethod
    def from_events(cls, measured: Iterable[Any]) -> BeamSpot | None:
        """The one that holds those of several events (z and width each, or None); None where there is none."""
        known = np.array([spot for spot in measured if spot is not None], np.float64).reshape(-1, 2)
        if not len(known):
            return None
        middle = float(known[:, 0].mean())
        return cls(middle, float(np.sqrt(np.mean(known[:, 1] ** 2 + (known[:, 0] - middle) ** 2))))

    @property
    def reach(self) -> float:
        """Largest |z| within four widths of its middle, in mm."""
        return abs(self.z) + 4 * self.width

    def __str__(self) -> str:
        return f"z {self.z:.4g} mm, width {self.width:.4g} mm"
