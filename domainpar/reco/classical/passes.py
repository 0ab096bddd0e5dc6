"""In what order seeds are looked for: the easiest tracks first, whose hits are then out of the way of the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from domainpar.events import detector
from domainpar.events.graph import IntArray
from domainpar.reco.classical.options import FinderOptions

PROMPT_PT = (0.8, 0.4)
"""Prompt seeds are looked for down to each of these in turn, in GeV, then down to the smallest asked for."""

SOFT_PT = 0.4
PIXELS = (7, 8, 9)


@dataclass(frozen=True, eq=False)
class Pass:
    """One search over the hits that earlier ones left.

    Attributes:
        chains: Places in `detector.SURFACES` of the three surfaces of a seed, outward, int64 [S, 3].
        min_pt: Smallest transverse momentum of a seed in GeV.
        d0: Its largest distance from the beam line in mm.
        z0: Largest |z| in mm at which it leaves that line.
        min_hits: Fewest hits of a track.
        max_holes: Most surfaces without a hit.
    """

    chains: IntArray
    min_pt: float
    d0: float
    z0: float
    min_hits: int
    max_holes: int


def passes(options: FinderOptions) -> list[Pass]:
    """Prompt tracks from the pixels, by falling momentum; then displaced ones from anywhere."""
    pixel, everywhere = _chains()
    found = []
    for min_pt in [*(pt for pt in PROMPT_PT if pt > options.min_pt), options.min_pt]:
        holes = options.max_holes if min_pt >= SOFT_PT else min(options.max_holes, 1)
        found.append(Pass(pixel, min_pt, options.prompt_d0, options.prompt_z0, options.min_hits, holes))
    min_pt, min_hits = max(options.min_pt, options.displaced_min_pt), max(options.min_hits, options.displaced_min_hits)
    return [*found, Pass(everywhere, min_pt, options.d0, options.z0, min_hits, min(options.max_holes, 1))]


@lru_cache(maxsize=1)
def _chains() -> tuple[IntArray, IntArray]:
    """Three neighbouring surfaces: those in the pixels, and all. Neighbours are the measured layer pairs."""
    number = {(surface.volume, surface.layer): i for i, surface in enumerate(detector.SURFACES)}
    pairs = detector.DEFAULT_LAYER_PAIRS
    found = [(a, b, c) for a, b in pairs for again, c in pairs if again == b]
    inside = [all(volume in PIXELS for volume, _layer in chain) for chain in found]
    places = np.array([[number[layer] for layer in chain] for chain in found], np.int64)
    pixel, other = places[np.array(inside)], places[~np.array(inside)]
    return pixel, np.concatenate([pixel, other])
