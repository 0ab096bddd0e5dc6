"""Events as a source, with those candidate edges only that a network gave a score: small graphs for a larger network.

The GNN4ITk and Exa.TrkX pipelines call this stage the filter: a small network leaves out most of the edges that are
false, and a large one, which could not hold all of them, learns from what is left.
"""

from __future__ import annotations

import json
from pathlib import Path

from domainpar.common.problems import Problem
from domainpar.tracking.events.graph import EventGraph, Hits, IntArray
from domainpar.tracking.events.sources import Events
from domainpar.tracking.events.store import WholeEvent, read_arrays
from domainpar.tracking.scoring.filtering import kept_by
from domainpar.tracking.scoring.score_files import list_of, store_of_scores


def scored_events(path: str | Path, min_score: float) -> Events:
    """The events that `infer` scored, in the splits of their store, with the edges of at least a score.

    The segments that are left out are missing from then on: efficiencies count against all particles, but a report
    on edges only knows those that are there.

    Args:
        path: A run, or a directory of scores; the store of its events must be there.
        min_score: Score of an edge that stays, at least.

    Raises:
        Problem: If there are no scores, or the events they belong to are not found.
        StoreError: From `read`, if a file is missing or damaged.
    """
    directory, record = list_of(Path(path))
    if not record.learns_edges:
        raise Problem(f"{directory} holds labels, and no scores of edges", "name a run that scores edges")
    events = record.by_event
    store, records = store_of_scores(directory, record)

    def read(name: str) -> EventGraph:
        arrays, _ = read_arrays(directory / events[name].path, ("edge_score", "edge_scored"))
        kept = kept_by(arrays["edge_score"], arrays["edge_scored"], min_score)
        with store.open(records[name]) as event:
            return WholeEvent(event).graph().take_edges(kept)

    def unfiltered(name: str) -> tuple[Hits, IntArray]:
        with store.open(records[name]) as event:
            whole = WholeEvent(event)
            return whole.hits, whole.edge_index

    # Not the digest of that store: it depends on splits, and an event has the same bytes in any of them.
    by = {"parameters_sha256": record.parameters_sha256, "min_score": min_score}
    if record.filter is not None:
        by["after"] = {name: record.filter[name] for name in ("parameters_sha256", "min_score")}
    if record.mode == "naive":
        by["sectors"] = record.sectors
    return Events(
        names=tuple(records),
        read=read,
        files=lambda name: [directory / events[name].path],
        settings={**store.settings, "filter": json.loads(json.dumps(by))},
        splits={name: record.split for name, record in records.items()},
        learned_from=store.learned_from,
        unfiltered=unfiltered,
        event_settings=lambda name: store.own_settings(records[name]) if name in records else {},
    )
