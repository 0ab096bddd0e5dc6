"""Junctions: at a hit with several ways in, or several ways out, only the best of them is left."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from domainpar.parallel.halo import Halo
from domainpar.plan import IntArray
from domainpar.reco.tracks.segments import Segments


def without_junctions(segments: Segments, halo: Halo) -> Segments:
    """The segments that are the best way out of their inner hit and the best way into their outer one. *Collective*.

    Of equally good ones the first in the user's order. What is left are simple chains.

    Args:
        segments: This part's segments; both parts of a cut one have it.
        halo: The halo of this part's plan.
    """
    num_owned = halo.plan.num_owned
    out, into = (_best_at(ends, segments, num_owned) for ends in (segments.inner, segments.outer))
    # A hit's owner sees all its segments; what it chose is told to whoever holds the hit as a ghost.
    ghosts = halo.fill_ghosts(torch.from_numpy(np.stack([out, into], axis=1))).numpy()
    out, into = np.concatenate([out, ghosts[:, 0]]), np.concatenate([into, ghosts[:, 1]])
    chosen = (out[segments.inner] == segments.position) & (into[segments.outer] == segments.position)
    return segments.take(chosen)


def _best_at(ends: IntArray, segments: Segments, num_owned: int) -> IntArray:
    """Position of the best segment at each owned hit, of those that have it for this end, int64 [num_owned]."""
    best: IntArray = _positions_of_best(ends, segments.logit, segments.position, num_owned)
    return best


@numba.njit(cache=True)
def _positions_of_best(ends: Any, logits: Any, position: Any, num_owned: int) -> Any:
    best = np.full(num_owned, -1, np.int64)
    for s in range(len(ends)):
        hit = ends[s]
        if hit >= num_owned:
            continue
        now = best[hit]
        if now < 0 or logits[s] > logits[now] or (logits[s] == logits[now] and position[s] < position[now]):
            best[hit] = s
    for hit in range(num_owned):
        if best[hit] >= 0:
            best[hit] = position[best[hit]]
    return best
