"""A module map: the regions of a detector that the tracks of many events join, and between which bounds.

Cuts are the same everywhere; a map knows that a pair of regions is met by tracks from the beam only, or at slopes of
one kind only. It is learned from the segments of target particles in many events, and is a file:

    module_map.safetensors   volume, layer and part of each region, and one row for each box: regions and kind of its
                             pairs of hits, smallest and largest of each quantity among the segments of targets, how
                             many segments it held, and how many pairs of hits lie in it; boxes by their purity
        its metadata         JSON: how regions and kinds are cut, numbers of events, the margin, where it comes from

Counts and extrema of events are merged exactly: the same map from any number of ranks.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from domainpar.common.problems import EventPlace, Problem
from domainpar.common.words import several
from domainpar.tracking.events.graph import Hits, surface_numbers
from domainpar.tracking.events.joining import (
    DPHI,
    PHI_SLOPE,
    QUANTITIES,
    Z0,
    Boxes,
    Regions,
    cylindrical,
    kinds,
    quantities,
)
from domainpar.tracking.events.store.layout import sha256_of
from domainpar.tracking.events.targets import target_particles
from domainpar.tracking.events.triplets import TripletCounts, Triplets
from domainpar.tracking.events.truth_order import places_along_particles, segments_of
from partitioners.topology import FloatArray, IntArray

ETA_WIDTH = 0.4
Z0_LIMITS = (15.0, 40.0, 100.0, 300.0, 1000.0)
SLOPE_LIMITS = (2e-4, 3e-4, 4e-4, 8e-4, 2e-3, 1e-2)

MARGIN = 0.1
"""Bounds move outward by this share of the width between them, and by the usual width of their kind over the number of
segments: one segment alone does not know how wide its box is."""

CERTAIN = 0.005
"""Purity of a box whose edges need no triplet: as pure as candidate edges of cuts are."""

ASTRAY = (40.0, 8e-4)
"""|z0| in mm or |phi_slope| in rad/mm from which on a segment points away from the beam."""

WELL_KNOWN = 10
"""The width of a box of as many segments is known."""


@dataclass(frozen=True, eq=False)
class SegmentCounts:
    """Segments of the targets of some events, counted by regions and kind.

    Attributes:
        keys: Volume, layer and part of the regions at both ends, and the kind, ascending by rows, int64 [B, 7].
        segments: How many, int64 [B].
        low, high: Smallest and largest of each quantity, of `phi_slope` and `dphi` by absolute value, float64 [B, 5].
        triplets: Their triplets.
        events: Number of events.
        learned_from: Fingerprint of the hits of each, by name.
    """

    keys: IntArray
    segments: IntArray
    low: FloatArray
    high: FloatArray
    triplets: TripletCounts
    events: int = 1
    learned_from: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, hits: Hits, target: Mapping[str, Any]) -> Self:
        """Count the segments of one event.

        Raises:
            ValueError: If it has no positions or no truth, or does not know its targets.
        """
        cylinder, edges = segments_outward(hits, target)
        values = quantities(cylinder, edges)
        regions = Regions.keys_of(hits, cylinder, "eta", ETA_WIDTH)
        kind = kinds(values, np.array(Z0_LIMITS), np.array(SLOPE_LIMITS))
        # Particles of both charges turn alike: a box holds what its mirror image holds.
        values[:, [PHI_SLOPE, DPHI]] = np.abs(values[:, [PHI_SLOPE, DPHI]])
        keys = np.concatenate([regions[edges[0]], regions[edges[1]], kind[:, None]], axis=1)
        astray = (np.abs(values[:, Z0]) >= ASTRAY[0]) | (values[:, PHI_SLOPE] >= ASTRAY[1])
        triplets = TripletCounts.of(hits, edges, astray)
        learned_from = {hits.event_id: hits.fingerprint}
        return cls(keys, np.ones(len(keys), np.int64), values, values, triplets, learned_from=learned_from)._merged()

    @classmethod
    def nothing(cls) -> Self:
        """The segment_counts of no event."""
        none = np.empty((0, len(QUANTITIES)))
        return cls(np.empty((0, 7), np.int64), np.empty(0, np.int64), none, none, TripletCounts.nothing(), 0)

    @classmethod
    def together(cls, tallies: Sequence[Self]) -> Self:
        """The segment_counts of all their events."""
        joined = {
            name: np.concatenate([getattr(segment_counts, name) for segment_counts in tallies])
            for name in ("keys", "segments", "low", "high")
        }
        triplets = TripletCounts.together([segment_counts.triplets for segment_counts in tallies])
        learned_from = {name: of for segment_counts in tallies for name, of in segment_counts.learned_from.items()}
        events = sum(segment_counts.events for segment_counts in tallies)
        return cls(**joined, triplets=triplets, events=events, learned_from=learned_from)._merged()

    def _merged(self) -> Self:
        """The same with one row for each key."""
        keys, row = np.unique(self.keys, axis=0, return_inverse=True)
        row = row.reshape(-1)
        segments = np.zeros(len(keys), np.int64)
        low, high = np.full((len(keys), 5), np.inf), np.full((len(keys), 5), -np.inf)
        np.add.at(segments, row, self.segments)
        np.minimum.at(low, row, self.low)
        np.maximum.at(high, row, self.high)
        return replace(self, keys=keys, segments=segments, low=low, high=high)

    def to_bytes(self) -> bytes:
        """All of it, to travel between ranks."""
        arrays = {name: getattr(self, name) for name in ("keys", "segments", "low", "high")}
        arrays |= {"triplet_keys": self.triplets.keys, "triplets": self.triplets.counts}
        arrays["learned_from"] = np.frombuffer(json.dumps(dict(self.learned_from), sort_keys=True).encode(), np.uint8)
        return bytes(save({**arrays, "events": np.array([self.events])}))

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """What `to_bytes` gave."""
        arrays = load(content)
        events, learned_from = int(arrays.pop("events")[0]), json.loads(arrays.pop("learned_from").tobytes())
        triplets = TripletCounts(arrays.pop("triplet_keys"), arrays.pop("triplets"))
        return cls(**arrays, triplets=triplets, events=events, learned_from=learned_from)


def segments_outward(hits: Hits, target: Mapping[str, Any]) -> tuple[FloatArray, IntArray]:
    """What candidate edges are learned from: `cylindrical` of the hits, and the segments of targets, int64 [2, S].

    A segment runs to the larger radius; one that does not change the radius is left out.

    Raises:
        ValueError: If the event has no positions or no truth, or does not know its targets.
    """
    if hits.position is None or hits.particle_id is None or hits.particles is None:
        raise EventPlace(hits.event_id).problem(
            "has no positions, or no true particles, and candidate edges are learned from both",
            "learn from events with truth, such as simulated ones",
        )
    of_target = np.isin(hits.particle_id, hits.particles.particle_id[target_particles(hits.particles, target)])
    surface = surface_numbers(hits.volume, hits.layer)
    places = places_along_particles(hits.particle_id, surface, hits.position, hits.particles)
    cylinder = cylindrical(hits.position)
    src, dst = segments_of(hits.particle_id, np.where(of_target, places, -1))
    outward = cylinder[src, 0] < cylinder[dst, 0]
    edges = np.stack([np.where(outward, src, dst), np.where(outward, dst, src)])
    return cylinder, edges[:, cylinder[edges[0], 0] < cylinder[edges[1], 0]]  # an edge needs a larger radius to run to


@dataclass(frozen=True, eq=False, kw_only=True)
class LearnedCandidates(ABC):
    """`Candidates` of a graph that were learned from events, and their file: safetensors, with metadata in JSON.

    Attributes:
        WHAT: Their name: `module map`.
        FORMAT: The `format` that the metadata has.
        events: Number of the events that they were learned from.
        origin: What these are: plain JSON values.
        learned_from: Fingerprint of the hits of each, by name.
    """

    WHAT: ClassVar[str]
    FORMAT: ClassVar[str]
    events: int
    origin: Mapping[str, Any]
    learned_from: Mapping[str, str]

    @abstractmethod
    def _content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arrays and metadata of the file, without what is alike in all."""

    @classmethod
    @abstractmethod
    def _from_content(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any], common: Mapping[str, Any]) -> Self:
        """The reverse, given the fields that are alike in all; a KeyError, TypeError or ValueError refuses a file."""

    @property
    def _training(self) -> str:
        target = ", ".join(f"{name}: {condition}" for name, condition in self.origin["target"].items())
        return f"learned from segments of {several(self.events, 'event')} ({target or 'all particles'})"

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the edges: the hash of the file, but for the events that they were learned from."""
        return {self.WHAT.replace(" ", "_"): sha256_of(self._file())[:16]}

    def to_bytes(self) -> bytes:
        """The content of the file; see the head of its module."""
        return self._file(learned_from=dict(self.learned_from))

    def _file(self, **further: Any) -> bytes:
        arrays, meta = self._content()
        meta |= {"format": self.FORMAT, "events": self.events, "origin": self.origin, **further}
        arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
        # One entry: several would stand in an order that differs from process to process.
        return bytes(save(arrays, {"map": json.dumps(meta, sort_keys=True)}))

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file.

        Raises:
            Problem: If it cannot be read, or holds something else.
        """
        try:
            content = Path(path).read_bytes()
            # A header of JSON follows its length in 8 bytes.
            arrays, header = load(content), json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            meta: dict[str, Any] = json.loads(header["__metadata__"]["map"])
            if meta["format"] != cls.FORMAT:
                raise ValueError(f"its format is {meta['format']!r}, not {cls.FORMAT!r}")
            common = {"events": meta["events"], "origin": meta["origin"], "learned_from": dict(meta["learned_from"])}
            return cls._from_content(arrays, meta, common)
        except OSError as error:
            raise Problem(f"cannot read the {cls.WHAT}: {error.strerror} (errno {error.errno})", file=path) from error
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            flag, file = cls.WHAT.replace(" ", "-"), cls.WHAT.replace(" ", "_")
            hint = f"give a file that `prepare --{flag} build` made: {file}.safetensors in its store"
            raise Problem(f"this is no {cls.WHAT}, {type(error).__name__}: {error}", hint, file=path) from error


@dataclass(frozen=True, eq=False)
class ModuleMap(LearnedCandidates):
    """Boxes that segments of tracks were seen in, the purest first.

    Attributes:
        boxes: The boxes, with the extrema that were seen as bounds.
        segments: Segments of targets in each, over all events, int64 [B].
        pairs: Pairs of hits in each, bounds moved outward, over the counted events, int64 [B].
        counted: Events whose pairs of hits were counted.
        counted_hits: Their hits; 0: pairs were not counted.
        triplets: What confirms edges of boxes that are not `CERTAIN`; None: nothing does, all edges stay.
        usual: Median width of each quantity over the well-known boxes of each kind, float64 [K, 5]: what a single
            segment lacks to know how wide its box is.
        margin: See `MARGIN`; 0 where bounds are used as they are.
    """

    WHAT = "module map"
    FORMAT = "domainpar module map 1"
    boxes: Boxes
    segments: IntArray
    pairs: IntArray
    counted: int
    counted_hits: int
    triplets: Triplets | None
    usual: FloatArray
    margin: float

    @classmethod
    def of(cls, segment_counts: SegmentCounts, origin: Mapping[str, Any]) -> Self:
        """The map of a segment_counts; its pairs of hits are not counted yet."""
        ends = segment_counts.keys[:, :6].reshape(-1, 3)
        regions, number = np.unique(ends, axis=0, return_inverse=True)
        src, dst = number.reshape(-1, 2).T
        low, high = segment_counts.low.copy(), segment_counts.high
        low[:, [PHI_SLOPE, DPHI]] = -high[:, [PHI_SLOPE, DPHI]]
        limits = np.array(Z0_LIMITS), np.array(SLOPE_LIMITS)
        boxes = Boxes(Regions(regions, "eta", ETA_WIDTH), *limits, src, dst, segment_counts.keys[:, 6], low, high)
        pairs, usual = np.zeros_like(segment_counts.segments), np.zeros((boxes.num_kinds, 5))
        for kind in range(len(usual)):
            of_kind = boxes.kind == kind
            known = of_kind & (
                segment_counts.segments >= min(WELL_KNOWN, segment_counts.segments[of_kind].max(initial=1))
            )
            usual[kind] = np.median((boxes.high - boxes.low)[known], axis=0) if known.any() else 0.0
        triplets, known = Triplets.of(segment_counts.triplets), segment_counts.learned_from
        common: dict[str, Any] = {"origin": origin, "events": segment_counts.events, "learned_from": known}
        return cls(boxes, segment_counts.segments, pairs, 0, 0, triplets, usual, MARGIN, **common)

    def __str__(self) -> str:
        pairs = len(np.unique(np.stack([self.boxes.src, self.boxes.dst]), axis=1).T)
        words = f"module map: {len(self.segments):,} boxes of {several(pairs, 'pair')} of regions"
        if self.counted_hits:
            words += f", {self.pairs.sum() / self.counted_hits:.3g} pairs of hits per hit"
        return f"{words}; {self._training}"

    def moved(self) -> Boxes:
        """The boxes with bounds moved outward, for segments that were not seen."""
        boxes, away = self.boxes, np.zeros_like(self.boxes.low)
        if self.margin:
            away = self.margin * (boxes.high - boxes.low) + self.usual[boxes.kind] / self.segments[:, None]
        return replace(boxes, low=np.nextafter(boxes.low - away, -np.inf), high=np.nextafter(boxes.high + away, np.inf))

    @property
    def purity(self) -> FloatArray:
        """Segments over pairs of hits of each box, on average over events; one pair more: it may not have been seen."""
        return np.asarray(self.segments / self.events / ((self.pairs + 1) / max(self.counted, 1)))

    def with_pairs(self, pairs: IntArray, events: int, hits: int) -> Self:
        """The map with the pairs of hits in its boxes, counted in events with so many hits; its boxes by purity."""
        counted = replace(self, pairs=pairs, counted=events, counted_hits=hits)
        return counted._take(np.argsort(-counted.purity, kind="stable"))

    def best(self, edges_per_hit: float) -> Self:
        """The purest boxes, as many as hold this many pairs of hits a hit, on average over the events counted."""
        most = edges_per_hit * self.counted_hits
        return self._take(np.arange(np.searchsorted(np.cumsum(self.pairs), most, side="right")))

    def _take(self, rows: IntArray) -> Self:
        names = ("src", "dst", "kind", "low", "high")
        boxes = replace(self.boxes, **{name: getattr(self.boxes, name)[rows] for name in names})
        return replace(self, boxes=boxes, segments=self.segments[rows], pairs=self.pairs[rows])

    def edges(self, hits: Hits, cylinder: FloatArray) -> IntArray:
        """Pairs of hits in the boxes (see `Candidates`).

        Raises:
            Problem: If no hit lies in a region of the map.
        """
        if len(hits) and (self.boxes.regions.assign(hits, cylinder) < 0).all():
            raise EventPlace(hits.event_id).problem(
                f"none of {len(hits):,} hits lies in a region of the module map",
                "it was learned in another detector: build one from events of this one, --module-map build",
            )
        *edges, box = self.moved().join(hits, cylinder)
        edge_index = np.stack(edges)
        if self.triplets is None:
            return edge_index
        return edge_index[:, self.triplets.confirmed(hits, edge_index, (self.purity >= CERTAIN)[box])]

    def pairs_in_boxes(self, hits: Hits) -> IntArray:
        """How many pairs of hits of an event lie in each box, int64 [B]."""
        assert hits.position is not None
        return self.moved().count(hits, cylindrical(hits.position))

    def _content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        boxes = self.boxes
        meta = {
            "by": boxes.regions.by, "width": boxes.regions.width, "z0_limits": boxes.z0_limits.tolist(),
            "slope_limits": boxes.slope_limits.tolist(), "counted": self.counted, "counted_hits": self.counted_hits,
            "margin": self.margin, "quantities": QUANTITIES,
        }  # fmt: skip
        arrays = {
            "regions": boxes.regions.keys, "src": boxes.src, "dst": boxes.dst, "kind": boxes.kind, "low": boxes.low,
            "high": boxes.high, "segments": self.segments, "pairs": self.pairs, "usual": self.usual,
        }  # fmt: skip
        if self.triplets is not None:
            arrays |= {"triplets": self.triplets.keys, "triplet_most": self.triplets.most}
        return arrays, meta

    @classmethod
    def _from_content(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any], common: Mapping[str, Any]) -> Self:
        limits = np.array(meta["z0_limits"], float), np.array(meta["slope_limits"], float)
        names = ("src", "dst", "kind", "low", "high")
        regions = Regions(arrays["regions"], meta["by"], meta["width"])
        boxes = Boxes(regions, *limits, **{name: arrays[name] for name in names})
        rest: dict[str, Any] = {name: arrays[name] for name in ("segments", "pairs", "usual")}
        rest |= {name: meta[name] for name in ("counted", "counted_hits", "margin")}
        triplets = Triplets(arrays["triplets"], arrays["triplet_most"]) if "triplets" in arrays else None
        return cls(boxes, triplets=triplets, **rest, **common)
