"""How tracks are built from scores: the method and its numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Method = Literal["cc", "walk", "junction"]
METHODS = ("cc", "walk", "junction")

SCORE_CUT = {"cc": 0.5, "walk": 0.01, "junction": 0.5}
"""Score that a segment must exceed to be looked at at all, where none is given."""


@dataclass(frozen=True)
class TrackOptions:
    """What makes a track.

    A score is compared as a logit, in float64: two scores that round to 1 are still told apart.

    Attributes:
        method: `cc`: connected components. `walk`: components, simple chains taken whole, the rest walked. `junction`:
            simple chains taken whole, then at a hit with several ways in or out only the best one is left.
        score_cut: Segments at or below it are dropped; None: the method's own, `SCORE_CUT`.
        chain_cut: `junction` only: segments above it are looked at for simple chains.
        walk_min: `walk` only: a road is followed along its best segment if that exceeds this.
        walk_add: `walk` only: it branches to every other segment above this.
        min_hits: Tracks with fewer hits are dropped.
        double_hits: Give a hit that no track has to the track that has another hit of the same surface, next to the
            same neighbour. `walk` and `junction` follow one hit a surface; modules overlap, and a quarter of the
            surfaces that a particle crosses give two. Nothing is given where no hit of the event has a layer.
        double_cut: Score that the segment to that neighbour must exceed.
        stitch: Join pieces of one helix where the tracks of an event come together (`reco.stitching`); hits without
            positions have none.

    Raises:
        ValueError: If the method is unknown or a number impossible.
    """

    method: Method = "walk"
    score_cut: float | None = None
    chain_cut: float = 0.01
    walk_min: float = 0.1
    walk_add: float = 0.6
    min_hits: int = 3
    double_hits: bool = True
    double_cut: float = 0.5
    stitch: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"track method is {self.method!r}; known: {', '.join(METHODS)}.")
        if self.min_hits < 1:
            raise ValueError(f"min_hits is {self.min_hits}; a track has at least 1 hit.")
        for name in ("score_cut", "chain_cut", "walk_min", "walk_add", "double_cut"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} is {value}; a score is compared with a number from 0 to below 1.")

    @property
    def floor(self) -> float:
        """Score that a segment must exceed to be looked at at all."""
        return SCORE_CUT[self.method] if self.score_cut is None else self.score_cut

    def told(self) -> dict[str, Any]:
        """The options that this method looks at, plain JSON values."""
        of_method = {"cc": (), "walk": ("walk_min", "walk_add"), "junction": ("chain_cut",)}[self.method]
        doubles = () if self.method == "cc" else ("double_hits", "double_cut")
        values = asdict(self) | {"score_cut": self.floor}
        return {name: values[name] for name in ("method", "score_cut", "min_hits", *of_method, *doubles, "stitch")}


def logit(score: float) -> float:
    """The logit of a score from 0 to below 1; -inf of 0."""
    return math.log(score) - math.log1p(-score) if score > 0 else -math.inf
