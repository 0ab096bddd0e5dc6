"""Tracks of one event from the scores of its edges: plain arrays on one rank, hits and edges in the user's order.

Four methods, the last three in the words of the acorn framework:

    greedy      segments join hits, the best first, while one helix goes through them (`greedy.py`)
    cc          connected components of the segments above a score
    walk        components; simple chains are tracks as they are, the others are walked (`walk.py`)
    junction    simple chains are tracks as they are; then only the best way in and the best way out of each hit is left

A simple chain is a component in which no hit has two ways in or two ways out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import clock
from domainpar.plan import BoolArray
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.reco.ckf.extending import extend_tracks
from domainpar.tracking.reco.greedy import link_greedily, refine, share
from domainpar.tracking.reco.helix import ERRORS, chi2_of_tracks, fit_helices
from domainpar.tracking.reco.pieces import stitch
from domainpar.tracking.reco.segments import NO_TRACK, Segments, TrackHits, long_enough, number_tracks
from domainpar.tracking.reco.walk import walk

Method = Literal["greedy", "cc", "walk", "junction"]
METHODS = ("greedy", "cc", "walk", "junction")
OF_POSITIONS = ("greedy", "walk")
"""Methods that ask for positions."""

SCORE_CUT = {"greedy": 0.1, "cc": 0.5, "walk": 0.01, "junction": 0.5}
"""Score that a segment must exceed to be looked at at all, where none is given."""


@dataclass(frozen=True)
class TrackOptions:
    """The definition of a track.

    A score is compared as a logit, in float64: two scores that round to 1 still differ.

    Attributes:
        method: `greedy`, `cc`, `walk` or `junction`.
        score_cut: Segments at or below it are dropped; None: the method's own, `SCORE_CUT`.
        chain_cut: `junction` only: segments above it are looked at for simple chains.
        walk_min: `walk` only: a path is followed along its best segment if that exceeds this.
        walk_add: `walk` only: it branches to every other segment above this.
        max_chi2: `greedy`, `refine` and `shared_hits` only: largest chi2 of the hits of a track from its helix
            (`helix.chi2`).
        min_hits: Tracks with fewer hits are dropped.
        double_hits: Give a hit that no track has to the track that has another hit of the same surface, next to the
            same neighbour. `walk` and `junction` follow one hit a surface; modules overlap, and a quarter of the
            surfaces that a particle crosses give two. Nothing is given where no hit of the event has a layer.
        double_cut: Score that the segment to that neighbour must exceed.
        refine: Grow each track anew from its own hits (`greedy.refine`): outliers fall off, wrong joins come apart.
        stitch: Join pieces of one helix (`reco.pieces`); hits without positions have none.
        extend: Follow each track through all hits of the TrackML detector at last (`ckf.extending`): hits that
            no segment leads to are added, and of two tracks that want a hit the better one has it.
        min_quality: Tracks of a smaller `quality` are dropped, and their hits are given to others.
        shared_hits: Let tracks have hits of other tracks as well (`shared_hits`).

    Raises:
        ValueError: If the method is unknown or a number impossible.
    """

    method: Method = "walk"
    score_cut: float | None = None
    chain_cut: float = 0.01
    walk_min: float = 0.1
    walk_add: float = 0.6
    max_chi2: float = 1.0
    min_hits: int = 3
    double_hits: bool = True
    double_cut: float = 0.5
    refine: bool = False
    stitch: bool = True
    extend: bool = False
    min_quality: float = 0.0
    shared_hits: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"track method is {self.method!r}; known: {', '.join(METHODS)}.")
        if self.min_hits < 1:
            raise ValueError(f"min_hits is {self.min_hits}; a track has at least 1 hit.")
        for name in ("score_cut", "chain_cut", "walk_min", "walk_add", "double_cut"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} is {value}; a score is compared with a number from 0 to below 1.")
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
        of_method = {
            "greedy": ("max_chi2",),
            "walk": ("walk_min", "walk_add"),
            "junction": ("chain_cut",),
            "cc": (),
        }[self.method]
        doubles = ("double_hits", "double_cut") if self.method in ("walk", "junction") else ()
        refined = ("max_chi2",) if self.refine else ()
        shared = ("shared_hits", "max_chi2") if self.shared_hits else ()
        values = asdict(self) | {"score_cut": self.floor}
        at_last = ("refine", *refined, "stitch", "extend", "min_quality", *shared)
        names = ("method", "score_cut", "min_hits", *of_method, *doubles, *at_last)
        return {name: values[name] for name in names}


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
        ValueError: If a method asks for positions, and there are none.
    """
    if options.method in OF_POSITIONS and hits.position is None:
        raise ValueError(f"the method {options.method} goes outward, but its hits have no positions")
    distance = hits.distance
    segments = _segments(edge_index, logits, hits, options)
    if options.method == "cc":
        tracks = long_enough(segments.components(), options.min_hits)
    elif options.method == "greedy":
        grown = link_greedily(*segments.best_first(), hits, options.max_chi2)
        tracks = long_enough(grown, options.min_hits)
    elif options.method == "junction" or distance is None:
        tracks = _without_junctions(segments, options)
    else:
        tracks = _walked(segments, distance, options)
    if options.double_hits and options.method in ("walk", "junction") and hits.surface.any():
        tracks = _with_double_hits(number_tracks(tracks), segments, hits.surface, logit(options.double_cut))
    return number_tracks(tracks)


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
        tracks = stitch(tracks, hits.position, field=hits.field, error=hits.error)
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
        kept = worthy(built, edge_index, logits, hits, options)
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


def worthy(
    tracks: IntArray, edge_index: IntArray, logits: FloatArray, hits: TrackHits, options: TrackOptions
) -> IntArray:
    """Those tracks whose quality is `min_quality` or more, numbered anew, int64 [N]."""
    if options.min_quality == 0:
        return tracks
    enough = quality(tracks, _segments(edge_index, logits, hits, options), hits) >= options.min_quality
    return number_tracks(np.where((tracks >= 0) & np.append(enough, False)[tracks], tracks, NO_TRACK))


REASONS = ("hits", "scores", "beam", "helix")
"""What the quality of a track consists of: a least quality means something for these only."""

WORTH_OF_SCORE, WORTH_OF_BEAM, WORTH_OF_FIT = 2.0, 2.0, 8.0
"""Hits that are as good a reason to believe in a track as a segment that is certain, a helix through the beam line, and
hits exactly on a helix. Chosen on simulated events: pixel hits and full events."""

NEAR_BEAM, NEAR_HELIX = 0.15, 0.05
"""The distance from the beam line in mm, and the chi2 per degree of freedom, at which half of that is left."""


def quality(tracks: IntArray, segments: Segments, hits: TrackHits) -> npt.NDArray[np.float64]:
    """The reasons to believe in each track, float64 [T]: its hits, twice the sum of their scores, up to two for a helix
    from the beam line, and up to eight for hits that lie on it.

    The score of a hit is that of the best segment which leads to it from another hit of its track. Most particles come
    from the beam line, and few wrong tracks lead to it; hits of several particles seldom lie on one helix as closely as
    they are measured (`chi2_of_tracks`). A track that has nothing of this must be long.
    """
    inner, outer = segments.inner, segments.outer
    inside = (tracks[inner] == tracks[outer]) & (tracks[inner] >= 0)
    best = np.zeros(len(tracks))
    np.maximum.at(best, outer[inside], np.exp(-np.logaddexp(0.0, -segments.logit[inside])))
    on = tracks >= 0
    reasons = np.asarray(np.bincount(tracks[on], weights=1 + WORTH_OF_SCORE * best[on]), np.float64)
    if hits.position is not None:
        position = np.ascontiguousarray(hits.position, np.float64)
        bz = np.abs(Field.of(hits.field).bending(position))
        error = np.where(hits.resolution > 0, hits.resolution, ERRORS)  # what is not known is allowed
        off = fit_helices(position, tracks, len(reasons), hits.field).d0 / NEAR_BEAM
        reasons += np.nan_to_num(WORTH_OF_BEAM / (1 + off * off))  # no helix, no reason
        chi2 = chi2_of_tracks(position, error, bz, tracks, len(reasons))
        reasons += WORTH_OF_FIT / (1 + chi2 / NEAR_HELIX)
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
    segments = _segments(edge_index, logits, hits, options)
    return share(tracks, *segments.best_first(), hits, options.max_chi2)


def _segments(edge_index: IntArray, logits: FloatArray, hits: TrackHits, options: TrackOptions) -> Segments:
    """The segments that a method looks at."""
    floor = min(options.floor, options.chain_cut) if options.method == "junction" else options.floor
    return Segments.of(edge_index, logits, hits.distance, len(hits), logit(floor))


def logit(score: float) -> float:
    """The logit of a score from 0 to below 1; -inf of 0."""
    return math.log(score) - math.log1p(-score) if score > 0 else -math.inf


def _chains(segments: Segments) -> tuple[BoolArray, IntArray]:
    """Whether each hit's component is a simple chain, bool [N], and the first hit of that component, int64 [N]."""
    component = segments.components()
    # Weights of bincount: hits that branch, counted by component.
    ways_in, ways_out = (np.bincount(ends, minlength=segments.num_hits) for ends in (segments.outer, segments.inner))
    branches = np.maximum(ways_in, ways_out) > 1
    return np.bincount(component, branches)[component] == 0, component


def _walked(segments: Segments, distance: npt.NDArray[np.float64], options: TrackOptions) -> IntArray:
    """Track of each hit by the walk, int64 [N]; any names."""
    simple, component = _chains(segments)
    size = np.bincount(component)[component]
    followed = min(options.walk_min, options.walk_add)  # no path takes a segment at or below it
    walked = segments.take(~simple[segments.inner] & (segments.logit > logit(followed)))
    visited = np.argsort(distance, kind="stable")
    place = np.empty(len(visited), np.int64)
    place[visited] = np.arange(len(visited))
    path = walk(
        place[walked.inner],
        place[walked.outer],
        walked.logit,
        len(visited),
        min_logit=logit(options.walk_min),
        add_logit=logit(options.walk_add),
        min_hits=options.min_hits,
    )[place]
    path[path >= 0] += len(visited)  # behind the names of components
    return np.where(simple & (size >= options.min_hits), component, path)


def _without_junctions(segments: Segments, options: TrackOptions) -> IntArray:
    """Track of each hit by the method `junction`, int64 [N]; any names."""
    simple, component = _chains(segments.above(logit(options.chain_cut)))
    whole = simple & (np.bincount(component)[component] >= options.min_hits)
    tight = segments.above(logit(options.floor))
    best = tight.take(tight.best_at(tight.inner) & tight.best_at(tight.outer))
    rest = long_enough(best.take(~(whole[best.inner] | whole[best.outer])).components(), options.min_hits)
    return np.where(whole, component, rest)


def _with_double_hits(tracks: IntArray, segments: Segments, surface: IntArray, min_logit: float) -> IntArray:
    """Give hits that no track has to tracks that have another hit of their surface.

    Where two modules of a surface overlap a particle leaves a hit on each, and a path takes only one. A free hit
    belongs to a track if a segment above `min_logit` joins it to a hit of the track that another segment joins, on the
    same side, to one of the track's hits on the free hit's own surface. Of several tracks the one with the most such
    segments has it, then the one with the best, then the one with the first hit.

    Args:
        tracks: Number of each hit's track, by first hits, int64 [N].
        segments: All segments.
        surface: Surface of each hit, int64 [N].
        min_logit: Logit that the segment to the hit must exceed.

    Returns:
        Track of each hit, int64 [N].
    """
    outward = _offers(segments.inner, segments.outer, segments.logit, tracks, surface, min_logit)
    inward = _offers(segments.outer, segments.inner, segments.logit, tracks, surface, min_logit)
    hit, track, logits = (np.concatenate(columns) for columns in zip(outward, inward))
    # By hit, then by track, the best offer of each track first.
    order = np.lexsort((-logits, track, hit))
    hit, track, logits = hit[order], track[order], logits[order]
    starts = np.ones(len(hit), np.bool_)
    starts[1:] = (hit[1:] != hit[:-1]) | (track[1:] != track[:-1])
    first = np.flatnonzero(starts)  # of the offers of one track to one hit: the best
    support = np.diff(np.append(first, len(hit)))
    hit, track, logits = hit[first], track[first], logits[first]
    ranked = np.lexsort((track, -logits, -support, hit))
    chosen = ranked[np.diff(hit[ranked], prepend=-1) != 0]
    grown = tracks.copy()
    grown[hit[chosen]] = track[chosen]
    return grown


def _offers(
    near: IntArray, far: IntArray, logits: FloatArray, tracks: IntArray, surface: IntArray, min_logit: float
) -> tuple[IntArray, IntArray, FloatArray]:
    """Free hits that may join the track of a hit beside them, that track, and the logit of the segment, [n] each."""
    on_track = tracks[near] != NO_TRACK
    inside = np.flatnonzero(on_track & (tracks[near] == tracks[far]))
    offered = np.flatnonzero(on_track & (tracks[far] == NO_TRACK) & (logits > min_logit))
    looked_at = np.concatenate([inside, offered])
    surfaces, number = np.unique(surface[far[looked_at]], return_inverse=True)
    # A hit and the surface of its neighbour as one number, to look up pairs.
    near_and_surface = near[looked_at] * len(surfaces) + number
    offered = offered[np.isin(near_and_surface[len(inside) :], near_and_surface[: len(inside)])]
    return far[offered], tracks[near[offered]], logits[offered]
