"""Connected components of an event that lies on many ranks, without bringing it together.

Each rank joins what its owned hits join. Then only pairs of components that a cut segment connects travel, and every
rank merges them alike. A component is called after the smallest global id in it: the same name on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from domainpar.parallel.halo import Halo
from domainpar.parallel.transport import Transport
from domainpar.plan import IntArray
from domainpar.reco.tracks.segments import Segments
from domainpar.reco.tracks.unions import smallest_connected


@dataclass(frozen=True, eq=False)
class Components:
    """The connected components that this part's owned hits belong to.

    Attributes:
        label: Smallest global id in the component of each owned hit, int64 [num_owned].
        spanning: Labels of all components of the event that lie on several ranks, ascending; the same on every rank.
        transport: Joins the ranks.
    """

    label: IntArray
    spanning: IntArray
    transport: Transport

    @cached_property
    def _own(self) -> tuple[IntArray, IntArray, IntArray]:
        """Labels of this part's components, ascending; which of them each owned hit has; and how many owned hits."""
        return np.unique(self.label, return_inverse=True, return_counts=True)

    def total(self, values: IntArray) -> IntArray:
        """Sum of a number over all hits of the component of each owned hit. *Collective*.

        Args:
            values: A number of each owned hit, int64 [num_owned].

        Returns:
            int64 [num_owned].
        """
        labels, component, _ = self._own
        sums = np.zeros(len(labels), np.int64)
        np.add.at(sums, component, values)
        shared, place = self._spanning_among(labels)
        ours = np.zeros(len(self.spanning), np.int64)
        ours[place] = sums[shared]
        everywhere = torch.from_numpy(ours)
        self.transport.all_reduce(everywhere)
        sums[shared] = everywhere.numpy()[place]
        total: IntArray = sums[component]
        return total

    def homes(self) -> IntArray:
        """Rank that holds the most hits of each spanning component, the lowest of equals, int64. *Collective*."""
        labels, _, counts = self._own
        shared, place = self._spanning_among(labels)
        ours = np.zeros(len(self.spanning), np.int64)
        ours[place] = counts[shared]
        by_rank = [np.frombuffer(row, np.int64) for row in self.transport.all_gather(ours.tobytes())]
        homes: IntArray = np.argmax(np.stack(by_rank), axis=0)
        return homes

    def _spanning_among(self, labels: IntArray) -> tuple[IntArray, IntArray]:
        """Which of some labels, ascending, span ranks, and the place of each of those among `spanning`."""
        _, shared, place = np.intersect1d(labels, self.spanning, assume_unique=True, return_indices=True)
        return shared, place


def connect(segments: Segments, halo: Halo) -> Components:
    """Find the connected components of an event. *Collective*.

    Args:
        segments: This part's segments; both parts of a cut one have it.
        halo: The halo of this part's plan.
    """
    plan, transport = halo.plan, halo.transport
    inside = (segments.inner < plan.num_owned) & (segments.outer < plan.num_owned)
    roots = smallest_connected(plan.num_owned, segments.inner[inside], segments.outer[inside])
    label = plan.owned_ids[roots]
    ghosts = halo.fill_ghosts(torch.from_numpy(label.reshape(-1, 1)))
    labels = np.concatenate([label, ghosts.numpy()[:, 0]])
    cut = segments.owned & ~inside
    ours = np.unique(np.stack([labels[segments.inner[cut]], labels[segments.outer[cut]]], axis=1), axis=0)
    return _merged(label, _from_all(ours, transport), transport)


def _from_all(pairs: IntArray, transport: Transport) -> IntArray:
    gathered = transport.all_gather(np.ascontiguousarray(pairs, np.int64).tobytes())
    return np.frombuffer(b"".join(gathered), np.int64).reshape(-1, 2)


def _merged(label: IntArray, pairs: IntArray, transport: Transport) -> Components:
    """Join components that pairs of labels connect; each rank for itself, all alike."""
    known, numbers = np.unique(pairs, return_inverse=True)
    numbers = numbers.reshape(-1, 2)
    merged = known[smallest_connected(len(known), numbers[:, 0], numbers[:, 1])]
    place = np.minimum(np.searchsorted(known, label), max(len(known) - 1, 0))
    joined = label.copy()
    if len(known):
        among = known[place] == label
        joined[among] = merged[place[among]]
    return Components(joined, np.unique(merged), transport)
