"""Which candidate tracks are kept when several claim the same hits."""

from __future__ import annotations

from typing import Any

from domainpar.nn.compiled import compiled


@compiled
def resolve(starts: Any, rows: Any, order: Any, track_of: Any, next_track: int, max_shared: int, min_hits: int) -> int:
    """Accept candidates in turn: each takes its hits that are still free.

    Args:
        starts: Where the hits of each candidate begin, int64 [C + 1].
        rows: Their hits.
        order: Candidates, best first, int64 [C].
        track_of: Track of each hit, -1 for none, int64 [N]; filled in.
        next_track: Number of the next track.
        max_shared: A candidate that has lost more hits than this to better tracks is dropped.
        min_hits: So is one with fewer hits left than this.

    Returns:
        The number after the last track's.
    """
    for candidate in order:
        mine = rows[starts[candidate] : starts[candidate + 1]]
        left = 0
        for row in mine:
            left += track_of[row] < 0
        if len(mine) - left > max_shared or left < min_hits:
            continue
        for row in mine:
            if track_of[row] < 0:
                track_of[row] = next_track
        next_track += 1
    return next_track
