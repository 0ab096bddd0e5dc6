"""Sections about one event: what it looks like, and what it costs to split it."""

from __future__ import annotations

from typing import Any

from domainpar.display.event_data import EventData
from domainpar.display.event_view import EventView, event_view
from domainpar.display.partitions import splits_of
from domainpar.display.reading import RunFiles
from domainpar.display.sections import Section, approximate, percent, target_words, why_missing
from domainpar.display.summary import Rows

DEFAULT_PARTS = 8


def one_event(run: RunFiles, event: EventData | None, known_as: str, num_parts: int | None) -> Section:
    """The event display, split over the parts that were asked for; what each finder found of it."""
    title = "One event"
    if event is None:
        absent = why_missing(run, "events", otherwise="There is no event to show.")
        return Section("event", title, absent=absent)
    parts, what = _parts(run, num_parts)
    view = event_view(event, parts, run.tracking, _grouping(run), int(run.settings.get("seed") or 0))
    if view is None:
        return Section("event", title, absent=f"Event {event.event_id} has no positions of hits to draw.")
    targets = "" if event.target is None else f" {target_words(run)}"  # without truth nothing is known of particles
    lead = (
        f"Event {event.event_id} ({known_as}): {event.num_hits:,} hits, {event.num_edges:,} candidate edges, "
        f"split over {parts} {what}; {view.facts['cutEdges']:,} edges are cut.{targets}"
    )
    return Section("event", title, (lead,), approximate(run), tables=_found(view, run.tracking.style), event=view)


def _found(view: EventView, style: str) -> tuple[Rows, ...]:
    """What each finder found in this event; no table without tracks and truth."""
    counted = {name: view.facts.get(f"{name}Counts") for name in view.facts.get("finders", [])}
    rows = tuple(_found_by(name, counts) for name, counts in counted.items() if counts)
    head = ("found by", "targets found", "tracks", "fakes", "duplicates", "too short to count")
    return (Rows(head, rows, f"Matching: {style}."),) if rows else ()


def _found_by(name: str, counts: dict[str, Any]) -> tuple[str, ...]:
    found = f"{counts['found']:,} of {counts['targets']:,}"
    return (name, found, *(f"{counts[what]:,}" for what in ("tracks", "fakes", "duplicates", "short")))


def _parts(run: RunFiles, named: int | None) -> tuple[int, str]:
    if named is not None:
        return named, "parts, as asked for"
    sectors = run.scores.about.get("sectors") if run.scores and run.scores.approximate else None
    if sectors := sectors or (run.settings.get("sectors") if run.approximate else None):
        return int(sectors), "independent sectors (approximate: naive mode)"
    if run.ranks_of_an_event > 1:
        return run.ranks_of_an_event, "parts, as in the training"
    return DEFAULT_PARTS, "parts"


def _grouping(run: RunFiles) -> str:
    return "contiguous" if run.approximate else str(run.settings.get("grouping") or "contiguous")


def partition(run: RunFiles, event: EventData | None) -> Section:
    """What splitting the event over 2 to 16 ranks cuts and borrows."""
    title = "Partition"
    if event is None:
        absent = why_missing(run, "events", otherwise="There is no event to split.")
        return Section("partition", title, absent=absent)
    rows = []
    for split in splits_of(event, _grouping(run), int(run.settings.get("seed") or 0)):
        quality, truth = split.quality, split.truth
        rows.append(
            (
                str(split.num_parts),
                percent(quality.cut_share),
                f"{quality.cut_edges:,}",
                percent(quality.incident_ghost_ratio),
                f"{quality.node_imbalance:.3f}",
                f"{quality.incident_imbalance:.3f}",
                str(int(quality.neighbours.max())),
                percent(truth.segments_cut / truth.segments if truth and truth.segments else None),
                percent(truth.tracks_cut / truth.tracks if truth and truth.tracks else None),
            )
        )
    head = (
        *("parts", "cut edges", "number", "ghosts / owned", "imbalance of hits", "imbalance of edges"),
        *("most neighbours", "true segments cut", "tracks cut"),
    )
    lead = (
        f"Event {event.event_id}, its {event.tiles.num_tiles} tiles (grouping: {_grouping(run)}). Imbalance: largest "
        "part / mean part. An exact halo loses nothing of what is cut; independent sectors lose all of it."
    )
    return Section("partition", title, (lead,), tables=(Rows(head, tuple(rows)),))
