"""Tracks of one event from the scores of its edges: plain arrays on one rank, hits and edges in the user's order.

Two methods:

    greedy    segments join hits, the best first, while one helix goes through them (`greedy.py`)
    cc        connected components of the segments above a score, also of hits without positions
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import clock
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.reco.ckf.extending import extend_tracks
from domainpar.tracking.reco.greedy import link_greedily, refine, share
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.perigee import fit_perigees
from domainpar.tracking.reco.segments import NO_TRACK, Segments, components, long_enough, number_tracks
from domainpar.tracking.reco.track_pieces import stitch

Method = Literal["greedy", "cc"]
SCORE_CUT: dict[str, float] = {"greedy": 0.1, "cc": 0.5}
"""Score that a segment must exceed to be looked at at all, where none is given."""


@dataclass(frozen=True)
class TrackOptions:
    """The definition of a track.

    A score is compared as a logit, in float64: two scores that round to 1 still differ.

    Attributes:
        method: `greedy` or `cc`.
        score_cut: Segments at or below it are dropped; None: the method's own, `SCORE_CUT`.
        max_chi2: `greedy`, `refine` and `shared_hits` only: largest chi2 per degree of freedom of the hits of a track
            (`kalman.chi2_of`).
        min_hits: Tracks with fewer hits are dropped.
        refine: Grow each track anew from its own hits (`greedy.refine`): outliers fall off, wrong joins come apart.
        stitch: Join pieces of one helix (`reco.pieces`); hits without positions have none.
        extend: Follow each track through all hits of the TrackML detector at last (`ckf.extending`): hits that
            no segment leads to are added, and of two tracks that want a hit the better one has it.
        min_quality: Tracks of a smaller `quality` are dropped, and their hits are given to others.
        shared_hits: Let tracks have hits of other tracks as well (`shared_hits`).

    Raises:
        ValueError: If the method is unknown or a number impossible.
    """

    method: Method = "greedy"
    score_cut: float | None = None
    max_chi2: float = 12.0
    min_hits: int = 3
    refine: bool = False
    stitch: bool = True
    extend: bool = False
    min_quality: float = 0.0
    shared_hits: bool = False

    def __post_init__(self) -> None:
        if self.method not in SCORE_CUT:
            raise ValueError(f"track method is {self.method!r}; take {' or '.join(SCORE_CUT)}.")
        if self.min_hits < 1:
            raise ValueError(f"min_hits is {self.min_hits}; a track has at least 1 hit.")
        if self.score_cut is not None and not 0 <= self.score_cut < 1:
            raise ValueError(f"score_cut is {self.score_cut}; a score is compared with a number from 0 to below 1.")
        if not (math.isfinite(self.max_chi2) and self.max_chi2 > 0):
            raise ValueError(f"max_chi2 is {self.max_chi2}; it must be a positive number.")
        if not (math.isfinite(self.min_quality) and self.min_quality >= 0):
            raise ValueError(f"min_quality is {self.min_quality}; it must be 0 or a positive number.")

    @property
    def floor(self) -> float:
        """Score that a segment must exceed to be looked at at all."""
        return SCORE_CUT[self.method] if self.score_cut is None else self.score_cut

    def to_json(self) -> dict[str, Any]:
        """The options that this method looks at, as plain JSON values."""
        values = asdict(self) | {"score_cut": self.floor}
        if not (self.method == "greedy" or self.refine or self.shared_hits):
            del values["max_chi2"]
        if not self.shared_hits:
            del values["shared_hits"]
        return values


def build_tracks(edge_index: IntArray, logits: FloatArray, hits: TrackHits, options: TrackOptions) -> IntArray:
    """Build the tracks of one event from the scores of its edges.

    Where two choices are equally good, the one that comes first in the user's order is taken. So neither the tiles of
    an event nor the ranks that scored it matter.

    Args:
        edge_index: `src` and `dst` of each edge as rows of the hits, int64 [2, E].
        logits: Logit of each edge, [E].
        hits: The hits; without positions segments point as the edges run.
        options: The method and its numbers; stitching is left to `reco.pieces`.

    Returns:
        Track of each hit, int64 [N]: 0, 1, ... by their first hit, or -1 for none.

    Raises:
        ValueError: If tracks are to be grown without positions.
    """
    segments = Segments.of(edge_index, logits, hits, options.floor)
    if options.method == "cc":
        joined: IntArray = components(segments.inner, segments.outer, len(hits))
    else:
        joined = link_greedily(*segments.best_first(), hits, options.max_chi2)
    return number_tracks(long_enough(joined, options.min_hits))


def finished(
    tracks: IntArray, hits: TrackHits, options: TrackOptions, seconds: dict[str, float] | None = None
) -> IntArray:
    """Tracks of any finder refined, stitched and followed as the options say, int64 [N].

    Nothing is stitched without positions. `seconds` gains those of `following`.

    Raises:
        ValueError: If they are to be refined or followed without positions, or followed in another detector.
    """
    if options.refine:
        tracks = number_tracks(refine(tracks, hits, options.max_chi2, options.min_hits))
    if options.stitch and hits.position is not None:
        tracks = stitch(tracks, hits)
    if options.extend:
        began = clock()
        tracks = extend_tracks(tracks, hits, options.min_hits)
        if seconds is not None:
            seconds["following"] = seconds.get("following", 0.0) + clock() - began
    return tracks


def tracks_from_scores(
    edge_index: IntArray,
    logits: FloatArray,
    hits: TrackHits,
    options: TrackOptions,
    seconds: dict[str, float] | None = None,
    first: IntArray | None = None,
) -> IntArray:
    """Tracks built, `finished` and of enough quality; arguments, result and errors as of these.

    A wrong track that scores well takes hits of particles that score worse. So where tracks are dropped for their
    quality, what no track has is built again, without the segments along which the dropped ones ran.

    Args:
        first: The tracks of any quality, where they are known.
    """
    tracks, rows = np.full(len(hits), NO_TRACK, np.int64), np.arange(len(hits))
    for _ in range(PASSES):
        built, first = first, None
        if built is None:
            built = finished(build_tracks(edge_index, logits, hits, options), hits, options, seconds)
        kept = select_by_quality(built, edge_index, logits, hits, options)
        tracks[rows[kept >= 0]] = kept[kept >= 0] + tracks.max(initial=NO_TRACK) + 1
        src, dst = edge_index
        along = (built[src] == built[dst]) & (built[src] >= 0)
        left = (kept[src] < 0) & (kept[dst] < 0) & ~along
        if not left.any() or np.array_equal(kept >= 0, built >= 0):
            break
        free = kept < 0
        edge_index, logits = (np.cumsum(free) - 1)[edge_index[:, left]], logits[left]
        rows, hits = rows[free], hits.take(free)
    return number_tracks(tracks)


PASSES = 3
"""Times that tracks are built at most, where some are dropped: a third adds a tenth of what a second does."""


def select_by_quality(
    tracks: IntArray, edge_index: IntArray, logits: FloatArray, hits: TrackHits, options: TrackOptions
) -> IntArray:
    """Those tracks whose quality is `min_quality` or more, numbered anew, int64 [N]."""
    if options.min_quality == 0:
        return tracks
    enough = quality(tracks, Segments.of(edge_index, logits, hits, options.floor), hits) >= options.min_quality
    return number_tracks(np.where((tracks >= 0) & np.append(enough, False)[tracks], tracks, NO_TRACK))


REASONS = ("hits", "scores", "beam", "fit")
"""What the quality of a track consists of: a least quality means something for these only."""

HITS_FOR_SCORE, HITS_FOR_BEAM, HITS_FOR_FIT = 2.0, 2.0, 8.0
"""Hits that are as good a reason to believe in a track as a segment that is certain, a helix through the beam line, and
hits exactly on a helix. Chosen on simulated events: pixel hits and full events."""

NEAR_BEAM, NEAR_HELIX = 0.15, 4.0
"""The distance from the beam line in mm, and the chi2 per degree of freedom, at which half of that is left."""


def quality(tracks: IntArray, segments: Segments, hits: TrackHits) -> npt.NDArray[np.float64]:
    """The reasons to believe in each track, float64 [T]: its hits, twice the sum of their scores, up to two for a helix
    from the beam line, and up to eight for hits that lie on it.

    The score of a hit is that of the best segment which leads to it from another hit of its track. Most particles come
    from the beam line, and few wrong tracks lead to it; hits of several particles seldom lie on one helix as closely as
    they are measured. A track that has nothing of this must be long.
    """
    inner, outer = segments.inner, segments.outer
    inside = (tracks[inner] == tracks[outer]) & (tracks[inner] >= 0)
    best = np.zeros(len(tracks))
    np.maximum.at(best, outer[inside], np.exp(-np.logaddexp(0.0, -segments.logit[inside])))
    on = tracks >= 0
    reasons = np.asarray(np.bincount(tracks[on], weights=1 + HITS_FOR_SCORE * best[on]), np.float64)
    if hits.position is not None:
        fits = fit_perigees(hits, tracks, len(reasons), passes=1)
        off, chi2 = fits.value[:, 0] / NEAR_BEAM, fits.chi2 / fits.ndf
        # No fit, no reason.
        reasons += np.nan_to_num(HITS_FOR_BEAM / (1 + off * off) + HITS_FOR_FIT / (1 + chi2 / NEAR_HELIX))
    return reasons


def shared_hits(
    tracks: IntArray, edge_index: IntArray, logits: FloatArray, hits: TrackHits, options: TrackOptions
) -> IntArray | None:
    """Hits on several tracks: what each track, built and finished, takes of the others (`greedy.share`).

    Returns:
        Row of the hit, and the further track that it lies on, ascending, int64 [S, 2]; None without the option.

    Raises:
        ValueError: If hits are to be shared without positions.
    """
    if not options.shared_hits:
        return None
    segments = Segments.of(edge_index, logits, hits, options.floor)
    return share(tracks, *segments.best_first(), hits, options.max_chi2)
