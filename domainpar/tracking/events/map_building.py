"""A module map from the events of a source: their segments counted and merged, then the pairs of hits in each box."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from domainpar.common.agreement import Ranks, agree, on_all, rounds
from domainpar.common.problems import Problem
from domainpar.common.words import several
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.module_map import ModuleMap, SegmentCounts
from partitioners.topology import IntArray

COUNTED_EVENTS = 8
"""Pairs of hits are counted in as many events: there are a thousand times as many as segments."""


def build_map(
    read: Callable[[str], Hits],
    names: Sequence[str],
    target: Mapping[str, Any],
    origin: Mapping[str, Any],
    ranks: Ranks,
    on_event: Callable[[], object] = lambda: None,
) -> ModuleMap:
    """Learn a map; the same on any number of ranks. *Collective*.

    Args:
        read: Reads or makes the hits of an event, with truth.
        names: The events to learn from.
        target: Conditions on the particles whose segments the map is to hold.
        origin: What they are, for the reader of the map: plain JSON values.
        ranks: The ranks, to which events are dealt, one each at a time.
        on_event: Called on every rank, once for each event that was looked at, some of them twice.

    Raises:
        Refused: On all ranks alike, if an event cannot be read or has no truth, or no event has a segment.
    """

    def count_segments(name: str | None) -> SegmentCounts:
        return SegmentCounts.nothing() if name is None else SegmentCounts.of(read(name), target)

    segment_counts = SegmentCounts.nothing()
    for mine, of_round in rounds(names, ranks):
        counts = on_all(ranks, partial(count_segments, mine))
        segment_counts = SegmentCounts.together(
            [segment_counts, *map(SegmentCounts.from_bytes, ranks.all_gather(counts.to_bytes()))]
        )
        for _ in of_round:
            on_event()
    agree(ranks, None if len(segment_counts.keys) else without_segments("a module map", names))
    module_map = ModuleMap.of(segment_counts, {**origin, "target": dict(target)})

    def count_pairs(name: str | None) -> IntArray:
        """Hits of an event, and its pairs of hits in each box, int64 [1 + B]."""
        if name is None:
            return np.zeros(1 + len(pairs), np.int64)
        hits = read(name)
        return np.concatenate([[len(hits)], module_map.pairs_in_boxes(hits)])

    pairs, num_hits = np.zeros_like(segment_counts.segments), 0
    for mine, of_round in rounds(names[:COUNTED_EVENTS], ranks):
        pair_counts = on_all(ranks, partial(count_pairs, mine))
        for content in ranks.all_gather(pair_counts.tobytes()):
            of_rank = np.frombuffer(content, np.int64)
            pairs, num_hits = pairs + of_rank[1:], num_hits + int(of_rank[0])
        for _ in of_round:
            on_event()
    return module_map.with_pairs(pairs, len(names[:COUNTED_EVENTS]), num_hits)


def without_segments(what: str, names: Sequence[str]) -> Problem:
    """That nothing can be learned from events in which no target has a segment."""
    problem = f"no target particle in {several(len(names), 'event')} has two hits that follow each other"
    return Problem(problem, f"{what} needs other events, or a wider target of --map-target")
