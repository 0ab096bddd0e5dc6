"""Events of several stores as one source: what a network that is to know several kinds of events is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.common.problems import EventPlace, Problem
from domainpar.common.words import some_of
from domainpar.tracking.events.construct import Candidates, Cuts, build_graph
from domainpar.tracking.events.features import NODE_FEATURES
from domainpar.tracking.events.graph import EventGraph, Hits
from domainpar.tracking.events.selection import Selection
from domainpar.tracking.events.sources import Events
from domainpar.tracking.events.store import LEARNED, EventRecord, EventStore, Settings, WholeEvent

OF_EVENTS = ("field", "beam_spot", "surfaces")
"""Settings that may differ from store to store: each event keeps its own."""

OF_ALL = ("hard_cuts", "volumes", "filter")
"""Settings that may not: a store says them of all its events, and they decide what an event is."""


def mixed_events(paths: Sequence[str], cuts: Candidates | None = None, selection: Selection | None = None) -> Events:
    """The events of several stores, in their splits: one of the first store, one of the second, and so on.

    Args:
        paths: The stores. Events are named after them: `NAME.EVENT` for each event of `stores/NAME`.
        cuts: What joins the hits anew; None: events keep their candidate edges.
        selection: Which hits are joined anew; by default all.

    Raises:
        Problem: If two stores have one name, or differ in `OF_ALL`; or, from `read`, if features of an event cannot be
            made again.
        StoreError: If a store or, from `read`, a file of it is missing or damaged.
    """
    select = selection or Selection()
    stores = {Path(path).resolve().name: EventStore(path) for path in paths}
    if len(stores) < len(paths):
        raise Problem(f"of {', '.join(paths)} two have one name", "events are named after their store; rename one")
    events: dict[str, tuple[EventStore, EventRecord]] = {}
    for records in zip_longest(*(store.records for store in stores.values())):
        for (name, store), record in zip(stores.items(), records):
            if record is not None:
                events[f"{name}.{record.event}"] = store, record

    def hits(name: str) -> Hits:
        store, record = events[name]
        with store.open(record) as event:
            return select.select(replace(WholeEvent(event).hits, event_id=name))

    def read(name: str) -> EventGraph:
        store, record = events[name]
        lost = [feature for feature in record.feature_names if feature not in NODE_FEATURES]
        if cuts is not None and lost:
            what = f"features {some_of(lost, 4)} are of the files that {store.path} was made from"
            hint = "prepare each store with this --module-map, then mix them without one"
            raise EventPlace(name).problem(f"{what}, and cannot be made of its hits", hint)
        with store.open(record) as event:
            graph = WholeEvent(event).graph()
        named = replace(graph.hits, event_id=name)
        if cuts is None:
            return replace(graph, hits=named)
        joined = build_graph(select.select(named), cuts)
        kept = np.isin(named.hit_id, joined.hits.hit_id)
        labels = {of: values[kept] for of, values in graph.node_labels.items()}
        return replace(joined, node_labels=labels, graph_labels=graph.graph_labels)

    made_by = {} if cuts is None else {"rejoined": True, **select.settings, **cuts.settings}
    common = _common_settings(stores, made_by)
    digests = {name: store.settings_digest for name, store in stores.items()}

    def event_settings(name: str) -> dict[str, Any]:
        if name not in events:  # a file of an earlier preparation
            return {}
        store, record = events[name]
        settings = {**store.settings, **store.own_settings(record)}
        kept = {key: settings[key] for key in OF_EVENTS if key in settings and key not in common}
        # Field and material of some follow from where they are from.
        return {**kept, "source": settings["source"]} if settings.get("source") in ("trackml", "simulate") else kept

    return Events(
        names=tuple(events),
        read=read,
        hits=hits,
        files=lambda name: [events[name][0].path / events[name][1].path],
        settings={**common, "source": "stores", "stores": digests, **made_by},
        event_settings=event_settings,
        splits={name: record.split for name, (_, record) in events.items()},
        learned_from={key: of for store in stores.values() for key, of in store.learned_from.items()},
    )


def _common_settings(stores: Mapping[str, EventStore], made_by: Settings) -> dict[str, Any]:
    """The settings that are the same in all stores; `made_by`: those of events that are joined anew, or none.

    Raises:
        Problem: If they differ in `OF_ALL`, and are not joined anew alike.
    """
    # Those of edges that are joined anew are another's.
    gone = {*Cuts().settings, *LEARNED, "edges_from", "filter"} if made_by else set()
    each = {
        name: {key: value for key, value in store.settings.items() if key not in gone} for name, store in stores.items()
    }
    first, *others = each.values()
    for key in OF_ALL:
        if key not in made_by and any(first.get(key) != other.get(key) for other in others):
            values = "; ".join(f"{name} {settings.get(key, 'without')}" for name, settings in each.items())
            raise Problem(
                f"the stores differ in {key}: {values}", "mix stores of alike events, or join them anew alike"
            )
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
