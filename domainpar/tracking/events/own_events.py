"""The events of a run and the place of their store, as records keep them (`runs.records`). No torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from domainpar.common.problems import Problem
from domainpar.common.words import several
from domainpar.runs.records import Hashes, RunRecord, StoreRecord
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.store import EventRecord, EventStore, Split, StoredEvent, StoreError, WholeEvent

ALIKE = {"same_hits": "hits", "same_name": "name and seed"}
"""What an event may have in common with one that was trained on."""


@dataclass(frozen=True)
class OwnEvents:
    """The events of a run, name and sha256 of each, in the order in which it takes them.

    Attributes:
        train: Those it is trained on.
        val: Those it is validated with.
    """

    train: Hashes
    val: Hashes

    @classmethod
    def of(cls, store: EventStore) -> OwnEvents:
        """Those of a run that is begun on a store."""
        splits: tuple[Split, ...] = ("train", "val")
        return cls(*(tuple((record.event, record.sha256) for record in store.events(split)) for split in splits))

    @classmethod
    def read(cls, kept: StoreRecord) -> OwnEvents | None:
        """Those of the record of a run; None where it has none."""
        return None if kept.events is None else cls(kept.events["train"], kept.events["val"])

    def without(self, events: Collection[str]) -> OwnEvents:
        """The same without some events, by name."""
        return OwnEvents(*(tuple(pair for pair in split if pair[0] not in events) for split in (self.train, self.val)))

    def taken_from(self, store: EventStore, began_with: str) -> EventStore:
        """A store that may have grown since, as if it held these events only.

        Args:
            store: The store.
            began_with: The store they were taken from at first, to be named.

        Raises:
            StoreError: Naming the first of the events that it does not hold, or holds otherwise.
        """
        if (differs := difference(store, self.train + self.val)) is not None:
            event, what = differs
            raise StoreError(
                f"the run was trained on other events: {what}",
                f"it goes on with the events it began with only; it took them from {began_with}",
                event=event,
            )
        records = {record.event: record for record in store.records}
        splits: tuple[tuple[Split, Hashes], ...] = (("train", self.train), ("val", self.val))
        return store.only([replace(records[name], split=split) for split, own in splits for name, _ in own])

    @cached_property
    def _split_of(self) -> dict[str, Split]:
        # The last wins: what was trained on as well as validated with counts as trained on.
        return {**{sha256: "val" for _, sha256 in self.val}, **{sha256: "train" for _, sha256 in self.train}}

    def split_of(self, record: EventRecord) -> Split | None:
        """`train` or `val` if the run was trained on, or validated with, an event of these bytes; else None."""
        return self._split_of.get(record.sha256)

    def counted(
        self, records: Sequence[EventRecord], in_map: Mapping[str, bool], alike: Mapping[str, str]
    ) -> dict[str, dict[str, int]]:
        """Number of events of each split that were trained on: with the same bytes, or alike in other bytes.

        Args:
            records: The events.
            in_map: Whether a module map or an embedding was learned from each, by name.
            alike: What some have in common with those that were trained on (`alike_by_name`).
        """
        counts: dict[str, dict[str, int]] = {}
        for record in records:
            count = counts.setdefault(record.split, dict.fromkeys(("events", "trained_on", *ALIKE, "in_map"), 0))
            trained_on = self.split_of(record) == "train"
            count["events"] += 1
            count["trained_on"] += trained_on
            count["in_map"] += in_map[record.event]
            if not trained_on and (common := alike.get(record.event)):
                count[common] += 1
        return counts


@dataclass(frozen=True)
class InMaps:
    """The events that the module maps of a run and of a store were learned from.

    Attributes:
        fingerprints: Those of their hits (`Hits`).
    """

    fingerprints: frozenset[str]

    @classmethod
    def of(cls, run: RunRecord, store: EventStore) -> InMaps:
        """Those of a run and of a store."""
        return cls(frozenset({*(run.store.learned_from or {}).values(), *store.learned_from.values()}))

    def hold(self, event: StoredEvent) -> bool:
        """Whether one of the maps was learned from an event."""
        return bool(self.fingerprints) and _fingerprint(event) in self.fingerprints


def _fingerprint(event: StoredEvent) -> str:
    whole = WholeEvent(event)
    hit_id = whole.nodes("hit_id")
    assert hit_id is not None  # every store has them
    return Hits.bare(event.event_id, hit_id, whole.nodes("position")).fingerprint


def training_overlap(counts: Mapping[str, Mapping[str, int]] | None) -> list[str]:
    """Sentences on the scored events that the network was trained on, or the module map behind their edges."""
    if counts is None:
        return ["which of these events were trained on is not known: the run has no list of them"]
    lines = [] if any(count["trained_on"] for count in counts.values()) else ["none of these events was trained on"]
    for split, count in counts.items():
        if number := count["trained_on"]:
            lines.append(f"{_count_in_words(number, count, split)} {'was' if number == 1 else 'were'} trained on")
        if number := count["in_map"]:
            lines.append(f"the candidate edges were learned from {_count_in_words(number, count, split)}")
        for common, what in ALIKE.items():
            if number := count.get(common, 0):
                have = f"has the {what} of an event that was" if number == 1 else f"have the {what} of events that were"
                lines.append(f"{_count_in_words(number, count, split)} {have} trained on, and other content")
    return lines


def _count_in_words(number: int, count: Mapping[str, int | None], split: str) -> str:
    """That so many of the scored events of a split are meant."""
    if number == count["events"]:
        return f"the one {split} event" if number == 1 else f"all {number:,} {split} events"
    return f"{number:,} of these {several(count['events'] or 0, f'{split} event')}"


def own_events(run: RunRecord, before: RunRecord | None = None) -> OwnEvents | None:
    """The events that a run, or the one before it, learned from; None where a record has no list."""
    if before is not None:
        first, then = own_events(before), own_events(run)
        return None if first is None or then is None else OwnEvents(first.train + then.train, first.val + then.val)
    own = OwnEvents.read(run.store)
    # Of an event that was left out nothing was trained on. (Of one whose sector was, the others may have been.)
    left_out = {str(skip.get("event")) for skip in run.skipped if skip.get("sample") == skip.get("event")}
    return own if own is None or not left_out else own.without(left_out)


def difference(store: EventStore, events: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """The first of some events, name and sha256 of each, that a store lacks, and what is wrong with it; or None."""
    hashes = {record.event: record.sha256 for record in store.records}
    for event, sha256 in events:
        if event not in hashes:
            return event, f"{store.path} does not hold event {event}"
        if hashes[event] != sha256:
            return (
                event,
                f"{store.path} holds event {event} with sha256 {hashes[event][:12]}, then it was {sha256[:12]}",
            )
    return None


def kept_place(store: Path, beside: Path) -> dict[str, str]:
    """The place of a store, to be kept in a file in the directory `beside`."""
    return {"path": os.path.relpath(store, beside), "absolute": os.path.abspath(store)}


def places(kept: StoreRecord, beside: Path) -> list[Path]:
    """Possible places of the store that a file in the directory `beside` keeps: seen from there, and where it was."""
    if not kept.path:
        return []
    absolute = filter(None, (os.path.join(os.path.abspath(beside), kept.path), kept.absolute))
    paths, directory = map(Path, dict.fromkeys(map(os.path.normpath, absolute))), Path.cwd()
    # As they would be typed: relative below this directory.
    return [path.relative_to(directory) if path.is_relative_to(directory) else path for path in paths]


def not_there(kept: StoreRecord, beside: Path) -> str:
    """That none of its `places` is there, in words."""
    first, *others = map(str, places(kept, beside))
    return f"neither {first} nor {others[0]} is there" if others else f"{first} is not there"


def find_store(kept: StoreRecord, beside: Path, events: Sequence[tuple[str, str]]) -> Path | None:
    """The place of a store that holds some events: the first of its `places` that does, or else that exists.

    Args:
        kept: The record of the store.
        beside: The directory of the file that keeps it.
        events: Name and sha256 of events that it has to hold.
    """
    stores = [place for place in places(kept, beside) if place.is_dir()]
    for place in stores:
        with suppress(StoreError):  # opening it reports what is wrong
            if difference(EventStore(place, check_files=False), events) is None:
                return place
    return stores[0] if stores else None


def store_of_run(run: Path, kept: StoreRecord) -> Path:
    """The place of the store of a run.

    Raises:
        Problem: If it is in none of the places that its record knows.
    """
    if not kept.path:
        raise Problem(f"{run} does not say of which store it is", "name one with --store")
    own = OwnEvents.read(kept)
    place = find_store(kept, run, () if own is None else own.train + own.val)
    if place is None:
        what = f"the store that {run} was trained on is not found: {not_there(kept, run)}"
        raise Problem(what, "name its place with --store")
    return place


def alike_by_name(
    run: RunRecord, directory: Path, scored: EventStore, records: Sequence[EventRecord]
) -> dict[str, str]:
    """Events with the name of one that a run was trained on, and other bytes, by what both have in common (`ALIKE`).

    A name says nothing, as each source counts from 0, but of a simulated event, which is named after its seed. So hits
    are compared, if the store of the run, seen from its directory, is found.
    """
    own = own_events(run)
    trained = {} if own is None else dict(own.train)
    named = [record for record in records if trained.get(record.event, record.sha256) != record.sha256]
    seeds = named if scored.settings.get("source") == "simulate" else []
    alike = {record.event: "same_name" for record in seeds}
    place = find_store(run.store, directory, tuple(trained.items())) if named else None
    with suppress(StoreError):  # what lies there now may be another store, or damaged
        store = None if place is None else EventStore(place, check_files=False)
        there = (
            {} if store is None else {one.event: one for one in store.events() if one.sha256 == trained.get(one.event)}
        )
        for record in named:
            if store is not None and record.event in there:
                alike.pop(record.event, None)
                with scored.open(record) as event, store.open(there[record.event]) as other:
                    if _fingerprint(event) == _fingerprint(other):
                        alike[record.event] = "same_hits"
    return alike
