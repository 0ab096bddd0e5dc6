"""Simple chains: components in which no hit has two ways in or two ways out. They are tracks as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from domainpar.plan import BoolArray, IntArray
from domainpar.reco.tracks.components import Components
from domainpar.reco.tracks.segments import Segments


@dataclass(frozen=True, eq=False)
class Chains:
    """What each owned hit's component is.

    Attributes:
        simple: Whether it is a simple chain, bool [num_owned].
        size: Its hits, over all ranks, int64 [num_owned].
    """

    simple: BoolArray
    size: IntArray


def find_chains(components: Components, segments: Segments) -> Chains:
    """Tell simple chains from components that branch. *Collective*."""
    num_owned = len(components.label)
    ways = [np.bincount(ends, minlength=num_owned)[:num_owned] for ends in (segments.outer, segments.inner)]
    branches = np.maximum(*ways) > 1
    branching = components.total(branches.astype(np.int64))
    return Chains(branching == 0, components.total(np.ones(num_owned, np.int64)))
