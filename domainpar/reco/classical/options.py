"""What a search for helices may be told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FinderOptions:
    """How far the finder looks and what it accepts; the defaults were chosen on simulated events.

    Attributes:
        min_pt: Smallest transverse momentum in GeV of a seed.
        d0: Largest distance in mm from the beam line of a displaced seed.
        z0: Largest |z| in mm at which a displaced seed leaves the beam line.
        prompt_d0: The same for prompt seeds, which are looked for first.
        prompt_z0: The same for prompt seeds.
        displaced_min_pt: Smallest transverse momentum in GeV of a displaced seed.
        min_hits: Fewest hits of a track.
        displaced_min_hits: Fewest hits of a track from a displaced seed: there are many more of these to pick from.
        max_holes: Most surfaces a track may cross between its hits without leaving one; at most one from displaced
            seeds and below 0.4 GeV.
        max_shared: Most hits a track may lose to better ones and still be one, if enough remain.
        gate: Largest chi^2, with 2 degrees of freedom, of a hit against the prediction.
        ways: Ways to go on that are kept at once for each seed.
        radiation_lengths: Thickness of one surface, which scatters, in radiation lengths.

    Raises:
        ValueError: If a number is not positive, or a count is too small.
    """

    min_pt: float = 0.2
    d0: float = 20.0
    z0: float = 200.0
    prompt_d0: float = 2.0
    prompt_z0: float = 30.0
    displaced_min_pt: float = 0.4
    min_hits: int = 5
    displaced_min_hits: int = 7
    max_holes: int = 2
    max_shared: int = 2
    gate: float = 16.0
    ways: int = 3
    radiation_lengths: float = 0.02

    def __post_init__(self) -> None:
        lengths = ("min_pt", "d0", "z0", "prompt_d0", "prompt_z0", "displaced_min_pt", "gate", "radiation_lengths")
        for name in lengths:
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"finder option {name} is {value}; it must be a positive number.")
        counts = {"min_hits": 4, "displaced_min_hits": 4, "max_holes": 0, "max_shared": 0, "ways": 1}
        for name, least in counts.items():
            if getattr(self, name) < least:
                raise ValueError(f"finder option {name} is {getattr(self, name)}; it must be at least {least}.")
