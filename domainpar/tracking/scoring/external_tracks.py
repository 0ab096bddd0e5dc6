"""Tracks of others, counted against the truth as those of `infer` are: alone, or as one more row of scored events."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np

from domainpar.common.problems import Problem
from domainpar.common.words import progress, several, some_of, this_python
from domainpar.tracking.config.evaluate import EvaluateConfig
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.given_tracks import GivenTracks, plain_name, read_tracks, rows_of
from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.events.store import EventRecord, EventStore, StoredEvent, WholeEvent
from domainpar.tracking.reco.performance.counts import TrackCounts, count_tracks, read_performance, total
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.rates import FINDERS
from domainpar.tracking.scoring.event_metrics import Performance, counts_of_tracks, track_cuts, truth_to_count
from domainpar.tracking.scoring.infer_summary import performance_lines
from domainpar.tracking.scoring.score_files import list_of, store_of_scores, write_list
from partitioners import Sectors


def evaluate(config: EvaluateConfig) -> list[str]:
    """Count the tracks of some files, and keep the counts with the scores that are named; the lines to be printed.

    Raises:
        Problem: If the files cannot be read, or name events or hits that are not there; if events have no truth; if
            scores have no tracks, or events without tracks here.
    """
    scores = None if config.scores is None else list_of(Path(config.scores))
    beside: Performance = {}  # counts of other finders in the same events
    if scores is None:
        store = EventStore(Path(str(config.store)))
        records = store.events(None if config.split == "all" else config.split)
        cuts, borders, style = track_cuts(config), None, str(config.matching_style)
    else:  # as the tracks of the scored events were counted
        directory, listed = scores
        tracks, beside = listed.tracks or {}, read_performance(listed.tracks)
        one = next((counts for of_split in beside.values() for counts in of_split.values()), None)
        if one is None:
            raise Problem(f"{directory} has no tracks that were counted", "infer with --tracks, or name a --store")
        store, scored = store_of_scores(directory, listed)
        records = [record for record in scored.values() if record.split in beside]
        cuts, borders, style = one.cuts, one.border_sectors, tracks["matching_style"]
    lines: list[str] = []
    counts: dict[str, dict[str, list[TrackCounts]]] = {}
    notes: Counter[str] = Counter()
    rows = _rows(config, store, records, lines)
    for name, given in rows.items():
        if scores is not None and name in FINDERS:
            raise Problem(f"--name {name}: infer counts tracks of its own under this name", "take another --name")
        lines += _left_out(given, store, records, bool(beside))
        for record in records:
            if (of_event := given.get(plain_name(record.event))) is not None:
                with store.open(record) as event:
                    of_split = counts.setdefault(record.split, {})
                    of_split.setdefault(name, []).append(_counted(event, of_event, cuts, borders, notes))
    performance = {
        split: {**beside.get(split, {}), **{name: total(each) for name, each in of_split.items()}}
        for split, of_split in counts.items()
    }
    lines += [f"{what}: {several(number, 'event')}" for what, number in notes.items()]
    shared = any(of[name].shared for of in performance.values() for name in rows)
    naive = scores is not None and listed.mode == "naive"
    lines += performance_lines(performance, style, naive=naive, shared=shared)
    if scores is None:
        return lines
    write_list(directory, listed.changed(tracks={**(listed.tracks or {}), **counts_of_tracks(performance)}))
    run = os.path.normpath(directory / listed.run)
    following = f"{this_python()} -m domainpar.report {run} --scores {directory}"
    return [*lines, f"kept with the scores; next: {following}"]


def _rows(
    config: EvaluateConfig, store: EventStore, records: Sequence[EventRecord], lines: list[str]
) -> dict[str, dict[str, GivenTracks]]:
    """The tracks of each row of the table by events: of the files that are named, or found now."""
    if config.compare is None:
        given = read_tracks(str(config.tracks))
        return {config.name or Path(str(config.tracks)).name.split(".")[0].replace("*", ""): given}
    field = store.settings.get("field")
    made_by = import_module(f"domainpar.tracking.scoring.{config.compare}_finder").TrackFinder
    finder = made_by(Path(str(config.input)), None if field is None else Field.of(field))
    events = [record.event for record in records]
    rows = {}
    for point, settings in finder.points(config.acts_settings).items():
        name = f"{config.compare}-{point}"
        with progress(name, len(events), "event", True) as advance:
            rows[name], seconds = finder.find(events, settings, advance)
        parts = ", ".join(f"{part} {spent:.2f}" for part, spent in seconds.items())
        lines.append(f"{name}: {sum(seconds.values()):.2f} s per event ({parts}), one thread")
    return rows


def _left_out(
    given: Mapping[str, GivenTracks], store: EventStore, records: Sequence[EventRecord], all_needed: bool
) -> list[str]:
    """Refuse tracks of unknown events; sentences on events of which only one side has something."""
    known = {plain_name(record.event) for record in store.events()}
    wanted = {plain_name(record.event): record.event for record in records}
    for event, of_event in given.items():
        if event not in known:
            raise of_event.place.problem(f"{store.path} holds no such event", "name the store of its hits")
    absent = [record for event, record in wanted.items() if event not in given]
    if len(absent) == len(wanted) or (absent and all_needed):
        what = f"no tracks of {len(absent)} of the {len(wanted)} events to count: {some_of(absent)}"
        raise Problem(what, "an event without tracks has a row of track -1; or take another --split, or --store")
    others = [of_event.place.event for event, of_event in given.items() if event not in wanted]
    sides = (absent, "have no tracks here, and are left out"), (others, "are of another split, and are left out")
    return [f"events that {what}: {some_of(names)}" for names, what in sides if names]


def _counted(
    event: StoredEvent, given: GivenTracks, cuts: TrackCuts, borders: Sectors | None, notes: Counter[str]
) -> TrackCounts:
    """The tracks of an event against its truth."""
    if isinstance(truth := truth_to_count(event, cuts, borders), str):
        raise event.place.problem(f"tracks of such events cannot be counted: {truth}")
    hit_id = WholeEvent(event).nodes("hit_id")
    assert hit_id is not None  # every store has them
    hit, track = given.hit, given.track
    on_track = track >= 0
    if given.of_acts:  # which counts from 0, TrackML from 1
        first = 0 if (hit_id == 0).any() else 1
        hit = hit + first
        notes[f"measurement 0 of ACTS is hit_id {first}"] += 1
    elif on_track.all() and len(np.unique(hit)) == len(hit) and np.isin(hit_id, hit).all():
        notes["each hit is there once and no track is negative, so track 0 means no track, as for TrackML"] += 1
        on_track = track > 0
    hit, track = hit[on_track], track[on_track]
    if not (known := np.isin(hit, hit_id)).all():
        what = f"{(~known).sum():,} of {len(hit):,} hits on tracks are none of its {len(hit_id):,} hits in the store"
        hint = "if the store keeps only some hits (--volumes, --hard-cuts), leave out the others or prepare all"
        raise given.place.problem(f"{what}, the first is hit_id {hit[~known][0]}", hint)
    track_id, shared = _memberships(rows_of(hit, hit_id), track, len(hit_id))
    return count_tracks(track_id, truth, cuts, shared)


def _memberships(row: IntArray, track: IntArray, num_hits: int) -> tuple[IntArray, IntArray | None]:
    """The first track of each hit, -1 for none, [num_hits]; rows of hits and their further tracks, [S, 2], or None.

    A pair that is there twice counts once.
    """
    pairs, first = np.unique(np.stack([row, track]), axis=1, return_index=True)
    pairs = pairs[:, np.argsort(first)]  # as in the file: its first track is the one of a hit
    track_id = np.full(num_hits, -1, np.int64)
    hits, of_hit = np.unique(pairs[0], return_index=True)
    track_id[hits] = pairs[1][of_hit]
    further = np.delete(pairs, of_hit, axis=1).T
    return track_id, further[np.lexsort(further.T[::-1])] if len(further) else None
