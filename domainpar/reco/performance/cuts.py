"""Which particles one wants to find, which tracks count, and how much of the hits must agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from domainpar.events.graph import IntArray

DEFAULT_TARGET: Mapping[str, Any] = {"pt": [1.0, float("inf")], "nhits": [5, float("inf")]}
"""Particles of at least 1 GeV that left enough hits for a track of at least 5."""


@dataclass(frozen=True)
class TrackCuts:
    """What is counted. The defaults are those that acorn's users know.

    Attributes:
        min_hits: Only tracks of at least so many hits count, as reconstructed or as fake.
        fraction: Share of the hits of a track, or of a particle, that must agree. At 0.5 it must be more than half, so
            that no two particles match one track; any other share need only be reached. Between 0.5 and 1, taken to six
            digits and compared in integers.
        target: Conditions of `events.targets` on the particles one wants to find; empty: every particle. A target must
            also have at least one hit in the event.
        majority_pt: Smallest pT in GeV of the particles that the counts of gnn_tracking look at.

    Raises:
        ValueError: If a number is out of its range.
    """

    min_hits: int = 5
    fraction: float = 0.5
    target: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_TARGET))
    majority_pt: float = 1.0

    def __post_init__(self) -> None:
        if self.min_hits < 1:
            raise ValueError(f"min_hits is {self.min_hits}; a track has at least 1 hit.")
        if not 0.5 <= self.fraction <= 1:
            raise ValueError(
                f"fraction is {self.fraction}; the share of hits that must agree lies between 0.5 and 1: below it, "
                "several particles could match one track."
            )
        if not self.majority_pt >= 0:
            raise ValueError(f"majority_pt is {self.majority_pt}; a pT in GeV is not negative.")

    @property
    def target_without_pt(self) -> dict[str, Any]:
        """The conditions but that on pT: what is counted against pT, where a cut on it would hide the turn-on."""
        return {name: condition for name, condition in self.target.items() if name != "pt"}

    @property
    def target_text(self) -> str:
        """The conditions as the command line takes them, in alphabetical order; empty for every particle."""
        written = yaml.safe_dump(dict(self.target), default_flow_style=True, width=float("inf"))
        return written.strip().removeprefix("{").removesuffix("}")

    def agree(self, shared: IntArray, hits: IntArray) -> npt.NDArray[np.bool_]:
        """Whether `shared` is enough of `hits`, in exact integers."""
        share = Fraction(str(self.fraction)).limit_denominator(10**6)
        part, whole = shared * share.denominator, hits * share.numerator
        return np.asarray(part > whole if share == Fraction(1, 2) else part >= whole)
