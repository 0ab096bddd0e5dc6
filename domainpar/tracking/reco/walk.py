"""The walk through components that branch: longest paths along good segments, from the innermost hits outward.

Hits are visited from the innermost one. From each that no track has yet, paths follow the best free neighbour further
out, if its score exceeds `walk_min`, and branch to every other one whose score exceeds `walk_add`. The longest path,
the last of equals, takes its hits; it is a track if it is long enough. So the acorn framework's `cc_and_walk` defines
it, where all paths are written down. There may be more of them than atoms; here each hit keeps the length of the
longest path from it, and only lengths that a new track changed are computed again.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.plan import IntArray
from domainpar.tracking.reco.segments import grouped

FREE = -1
SPENT = -2  # on a path too short to be a track


def walk(
    inner: IntArray,
    outer: IntArray,
    logits: npt.NDArray[np.float64],
    num_hits: int,
    *,
    min_logit: float,
    add_logit: float,
    min_hits: int,
) -> IntArray:
    """Number of the track of each hit, int64 [num_hits]; -1 for none.

    Args:
        inner, outer: The two ends of each segment, int64 [S]: hits numbered in the order in which they are visited, so
            that inner < outer. The segments of one inner hit in the order in which paths are listed.
        logits: Of each segment, [S].
        num_hits: Hits are 0 to num_hits - 1.
        min_logit, add_logit: Logits that the best and every other neighbour must exceed.
        min_hits: Shorter paths take their hits, but are no tracks.
    """
    first, outward = grouped(inner, num_hits)
    first_in, inward = grouped(outer, num_hits)
    logits = np.asarray(logits, np.float64)[outward]
    track = _walk(first, outer[outward], logits, first_in, inner[inward], min_logit, add_logit, min_hits)
    return np.where(track == SPENT, FREE, track)


@compiled
def _onward(node: int, first: Any, outer: Any, logits: Any, track: Any, length: Any, min_logit: float,
            add_logit: float) -> Any:  # fmt: skip
    """(hits of the longest path from a hit, itself counted; the neighbour that the last of these goes to, -1 for none).

    The best neighbour is listed before the others; of equally good ones it is the first.
    """
    best = -1
    for s in range(first[node], first[node + 1]):
        if track[outer[s]] == -1 and (best < 0 or logits[s] > logits[best]):
            best = s
    if best < 0 or not logits[best] > min_logit:
        return 1, -1
    chosen = int(outer[best])
    for s in range(first[node], first[node + 1]):
        free_and_good = track[outer[s]] == -1 and logits[s] > add_logit
        if s != best and free_and_good and length[outer[s]] >= length[chosen]:
            chosen = int(outer[s])
    return int(length[chosen]) + 1, chosen


@compiled
def _ask_again(node: int, start: int, first_in: Any, inner: Any, track: Any, waiting: Any, changed: Any) -> None:
    """Note the free hits inside of one that changed. Those before `start` are all taken."""
    for s in range(first_in[node], first_in[node + 1]):
        before = inner[s]
        if before > start and track[before] == -1 and not waiting[before]:
            waiting[before] = True
            heapq.heappush(changed, -before)


@compiled
def _walk(first: Any, outer: Any, logits: Any, first_in: Any, inner: Any, min_logit: float, add_logit: float,
          min_hits: int) -> Any:  # fmt: skip
    num_hits = len(first) - 1
    track = np.full(num_hits, -1, np.int64)
    length = np.zeros(num_hits, np.int64)
    # From the outside in: a path goes on from hits further out.
    for node in range(num_hits - 1, -1, -1):
        length[node] = _onward(node, first, outer, logits, track, length, min_logit, add_logit)[0]
    num_tracks = 0
    waiting = np.zeros(num_hits, np.bool_)
    changed = [0]  # a heap; its numbers are negative, so that the outermost hit comes first: inner ones ask it
    changed.pop()
    for start in range(num_hits):
        if track[start] != -1:
            continue
        number = num_tracks if length[start] >= min_hits else -2
        num_tracks += number >= 0
        node = start
        while node >= 0:
            following = _onward(node, first, outer, logits, track, length, min_logit, add_logit)[1]
            track[node] = number
            _ask_again(node, start, first_in, inner, track, waiting, changed)
            node = following
        # Paths of the hits inside the track may have become shorter; each that did asks those inside of it in turn.
        while len(changed) > 0:
            node = -heapq.heappop(changed)
            waiting[node] = False
            if track[node] == -1:
                now = _onward(node, first, outer, logits, track, length, min_logit, add_logit)[0]
                if now != length[node]:
                    length[node] = now
                    _ask_again(node, start, first_in, inner, track, waiting, changed)
    return track
