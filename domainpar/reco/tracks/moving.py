"""What is to be walked comes together: components that span ranks move to one of them, whole.

A road takes no segment below `walk_min` and `walk_add`. What only such segments join is walked apart: most of an event
hangs together at a score of 0.01, and little of it spans ranks at 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from domainpar.parallel.deliver import deliver
from domainpar.parallel.halo import Halo
from domainpar.plan import BoolArray, IntArray
from domainpar.reco.tracks.components import Components, connect
from domainpar.reco.tracks.options import TrackOptions, logit
from domainpar.reco.tracks.segments import LocalHits, Segments
from domainpar.reco.tracks.walking import walk

NO_TRACK = -1


@dataclass(frozen=True, eq=False)
class _Gathered:
    """Whole components on the rank that walks them.

    Attributes:
        ids, distance, row: Of each hit, as in `LocalHits`, int64 and float64 [n].
        sender: Rank that owns each hit, [n].
        inner, outer: Global ids of the two hits of each segment, int64 [S].
        logit, position: As in `Segments`.
    """

    ids: IntArray
    distance: np.ndarray
    row: IntArray
    sender: IntArray
    inner: IntArray
    outer: IntArray
    logit: np.ndarray
    position: IntArray


def walk_components(
    walked: BoolArray, segments: Segments, hits: LocalHits, halo: Halo, options: TrackOptions
) -> IntArray:
    """Walk some components and name each owned hit's track, int64 [num_owned]; `NO_TRACK` where it is on none.

    A track is called after the smallest global id on it. *Collective*.

    Args:
        walked: Whether the component of each owned hit is to be walked, bool [num_owned].
        segments: This part's segments.
        hits: This part's hits; they have positions.
        halo: The halo of this part's plan.
        options: How to walk.
    """
    followed = segments.above(min(options.walk_min, options.walk_add))  # no road takes any other
    gathered = _gather(walked, connect(followed, halo), followed, hits, halo)
    named = _walk(gathered, options)
    answers = deliver(np.stack([gathered.ids, named], axis=1), gathered.sender, halo.transport).rows
    tracks = np.full(halo.plan.num_owned, NO_TRACK, np.int64)
    tracks[np.searchsorted(halo.plan.owned_ids, answers[:, 0])] = answers[:, 1]
    return tracks


def _gather(
    walked: BoolArray, components: Components, segments: Segments, hits: LocalHits, halo: Halo
) -> _Gathered:  # fmt: skip
    """Send the hits and the owned segments of components to where they are walked. *Collective*."""
    transport = halo.transport
    home = np.full(halo.plan.num_owned, transport.rank, np.int64)
    homes = components.homes()
    if len(components.spanning):
        place = np.minimum(np.searchsorted(components.spanning, components.label), len(homes) - 1)
        home = np.where(components.spanning[place] == components.label, homes[place], home)
    assert hits.distance is not None
    rows = np.flatnonzero(walked)
    nodes = deliver(
        np.stack([hits.ids[rows], hits.distance[rows].view(np.int64), hits.row[rows]], axis=1), home[rows], transport
    )
    # An owned edge ends at an owned hit, which may be the inner or the outer end of its segment.
    our_end = np.where(segments.outer < halo.plan.num_owned, segments.outer, segments.inner)
    ours = np.flatnonzero(segments.owned)
    ours = ours[walked[our_end[ours]]]
    chosen = segments.take(ours)
    edges = deliver(
        np.stack(
            [hits.ids[chosen.inner], hits.ids[chosen.outer], chosen.logit.view(np.int64), chosen.position], axis=1
        ),
        home[our_end[ours]],
        transport,
    ).rows
    ids, distance, row = (np.ascontiguousarray(column) for column in nodes.rows.T)
    inner, outer, logits, position = (np.ascontiguousarray(column) for column in edges.T)
    return _Gathered(ids, distance.view(np.float64), row, nodes.sender, inner, outer, logits.view(np.float64), position)


def _walk(gathered: _Gathered, options: TrackOptions) -> IntArray:
    """Track of each gathered hit: the smallest id on it."""
    visited = np.lexsort((gathered.row, gathered.distance))
    place = np.empty(len(visited), np.int64)
    place[visited] = np.arange(len(visited))
    by_id = np.argsort(gathered.ids)
    ends = [place[by_id[np.searchsorted(gathered.ids[by_id], side)]] for side in (gathered.inner, gathered.outer)]
    listed = np.argsort(gathered.position)
    number = walk(
        ends[0][listed],
        ends[1][listed],
        gathered.logit[listed],
        len(visited),
        min_logit=logit(options.walk_min),
        add_logit=logit(options.walk_add),
        min_hits=options.min_hits,
    )[place]
    return smallest_id_of_each(number, gathered.ids)


def smallest_id_of_each(number: IntArray, ids: IntArray) -> IntArray:
    """The smallest id among the hits of each hit's track, int64; `NO_TRACK` where its number is negative."""
    smallest = np.full(int(number.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    on_track = number >= 0
    np.minimum.at(smallest, number[on_track], ids[on_track])
    named = np.full(len(number), NO_TRACK, np.int64)
    named[on_track] = smallest[number[on_track]]
    return named
