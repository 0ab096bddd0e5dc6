"""From a source of events to a finished store: read, join by candidate edges, cut into tiles, write, split.

Events are dealt to ranks, one each at a time. An event that is in the store already, made with the same settings from
the same input, is kept: a preparation that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from domainpar.common.agreement import Gathering, Ranks, agree, agree_on, gather, on_all, rounds
from domainpar.common.atomic_files import PARTIAL, write_whole
from domainpar.common.lock import STORE, Claim
from domainpar.common.models import plain, read_as
from domainpar.common.problems import EventPlace, Problem, as_problem
from domainpar.common.words import several, some_of
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.sources import Events
from domainpar.tracking.events.splits import splits_of
from domainpar.tracking.events.store import (
    MANIFEST,
    SUFFIX,
    EventRecord,
    EventStore,
    EventSurvey,
    OtherVersion,
    Settings,
    Split,
    StoredEvent,
    StoreError,
    WholeEvent,
    event_file_name,
    inspect_event,
    settings_digest,
    standardised_by,
    write_event,
    write_manifest,
)
from domainpar.tracking.events.stored_order import tiles_of
from domainpar.tracking.events.surfaces import ENOUGH_HITS, learned_surfaces
from partitioners import SEEDED, Topology, get_partitioner
from partitioners.topology import IntArray

OnEvent = Callable[[EventRecord, bool], object]
Look = Callable[[Hits, IntArray, IntArray | None], Any]


def prepare(
    source: Events,
    directory: str | Path,
    *,
    partitioner: str | None = None,
    num_tiles: int | None = None,
    val_split: float = 0.1,
    test_split: float = 0.1,
    seed: int = 0,
    overwrite: bool = False,
    beside: Mapping[str, bytes] | None = None,
    ranks: Ranks | None = None,
    on_event: OnEvent = lambda record, kept: None,
    say: Callable[[str], None] = lambda line: None,
    look: Look | None = None,
    on_look: Callable[[Any], None] = lambda seen: None,
    refused: Callable[[], Problem | None] = lambda: None,
) -> EventStore:
    """Prepare a store. *Collective*: all ranks return the same store, or all raise.

    Events that are in the store already stay in their split. A finished store with the same events and settings is only
    read; else it is locked, and another preparation of it is refused meanwhile.

    Args:
        source: The events; the same on all ranks.
        directory: The store; made where it is missing.
        partitioner: Makes the tiles, a name that `partitioners.get_partitioner` knows. Default: `phi-eta` where nodes
            have positions, `metis` where they have none.
        num_tiles: K of every event. Default: about 4,600 edges a tile.
        val_split: Share of the events kept for validation, where the source has no splits.
        test_split: Share of the events kept for a final test, likewise.
        seed: Seed of the partitioner and of the split.
        overwrite: Replace a store that was made with other settings, or that holds events which the source has not.
        beside: Files that the store keeps beside its events, by name.
        ranks: The ranks. Default: this one alone.
        on_event: Called on every rank for every event, in order, with its record and whether it was kept as it was.
        say: Called on rank 0 with what the user should know, a line each.
        look: Given hits, `edge_index` and label of every event, on the rank that has it, in any order; returns what can
            travel as JSON.
        on_look: Called on every rank for every event, in order, with what `look` returned.
        refused: Called on every rank before the store is listed; returns why it is of no use, alike on all; else None.

    Raises:
        Refused: On all ranks alike, if the store was made with other settings, or holds more events, and is not to be
            overwritten; if another preparation is at work in it; or if events cannot be read, cut or written, naming
            them. Finished events stay; there is no manifest that lists unfinished ones.
    """
    ranks = ranks or Gathering()
    splits = {"val_split": val_split, "test_split": test_split, "split_seed": seed}
    job = _PrepareJob(
        source=source,
        directory=Path(directory),
        partitioner=partitioner,
        num_tiles=num_tiles,
        seed=seed,
        splits=None if source.splits is not None else splits,
        look=look,
        beside=beside or {},
    )
    digest = hashlib.sha256(json.dumps([source.names, dict(source.settings)], sort_keys=True).encode()).hexdigest()
    events_and_settings = f"{digest[:12]} ({several(len(source.names), 'event')})"
    # A shared file system may not show the same files everywhere; events would be dealt twice or not at all.
    hint = "let all ranks see the same files, and give all the same flags"
    agree_on(ranks, {"the list of events and settings": events_and_settings}, hint)
    if (surveyed := source.surveyed) is not None and "surfaces" not in source.settings:
        job = replace(job, surfaces=_work_on_root(ranks, lambda: _surfaces(job, surveyed, overwrite)))
    records: list[EventRecord] = []
    with contextlib.ExitStack() as held:  # the lock, given back at the end, also after an error
        recorded = _work_on_root(ranks, job.recorded_if_finished)
        locked = recorded is None
        if locked:
            recorded = _work_on_root(ranks, lambda: _claim_and_make_ready(job, overwrite, held, say))
        for name, names in rounds(source.names, ranks):
            kept = _gather_work(ranks, partial(job.kept, name))[: len(names)]
            if not locked and None in kept:  # a finished store that was damaged
                locked = True
                _work_on_root(ranks, lambda: _claim(job, held, say))
            record = kept[ranks.rank] if name is not None else None
            for event, as_it_was in zip(_gather_work(ranks, partial(job.event, name, record)), kept):
                records.append(read_as(EventRecord, event["record"]))
                on_event(records[-1], as_it_was is not None)
                on_look(event["seen"])
        agree(ranks, refused())
        dealt = source.splits
        if dealt is None:
            events = [record.event for record in records]
            dealt = splits_of(events, val_split, test_split, seed, recorded, source.whole)
        records = [replace(record, split=dealt[record.event]) for record in records]
        if locked:
            surveys = _surveys(job.directory, standardised_by(records), ranks)
            _work_on_root(ranks, lambda: _finish(job, records, surveys, say))
    return EventStore(directory)


@dataclass(frozen=True)
class _PrepareJob:
    """The work on each event."""

    source: Events
    directory: Path
    partitioner: str | None
    num_tiles: int | None
    seed: int
    splits: Settings | None
    look: Look | None
    beside: Mapping[str, bytes]
    surfaces: Settings = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the bytes of an event's file, besides its input."""
        return {
            **self.source.settings,
            **self.surfaces,
            "partitioner": self.partitioner or "phi-eta, or metis without positions",
            "tiles": self.num_tiles if self.num_tiles is not None else "some 4600 edges each, small events finer",
            "seed": self.seed if self.partitioner in (None, *SEEDED) else None,
        }

    def settings_of(self, name: str) -> dict[str, Any]:
        """The settings, with those of one event alone."""
        return {**self.settings, **self.source.event_settings(name)}

    def kept(self, name: str | None) -> dict[str, Any] | None:
        """The record, as JSON, of an event's file that is there, undamaged, and would be made the same again."""
        if name is None or not (path := self.directory / event_file_name(name)).exists():
            return None
        try:
            record, settings, source = inspect_event(path)
        except StoreError:
            return None  # damaged: it is made again
        # A change of the input alone shows in no setting.
        same = (settings, source) == (settings_digest(self.settings_of(name)), self._source_digest(name))
        return plain(record) if same else None

    def event(self, name: str | None, kept: dict[str, Any] | None) -> dict[str, Any] | None:
        """An event's record, as JSON, and what is seen of it; its file is made unless it is kept."""
        if name is None:
            return None
        path = self.directory / event_file_name(name)
        if kept is not None:
            if self.look is None:
                return {"record": kept, "seen": None}
            with StoredEvent(path) as event:
                whole = WholeEvent(event)
                return {"record": kept, "seen": self.look(whole.hits, whole.edge_index, whole.edges("label"))}
        graph = self.source.read(name)
        try:
            topology = Topology(graph.edge_index, graph.num_nodes, graph.hits.position)
            assignment, num_tiles = tiles_of(topology, self.partitioner, self.num_tiles, self.seed)
        except (ValueError, RuntimeError) as error:  # partitioners see a graph, not whose it is
            raise EventPlace(graph.hits.event_id).attach_to(ValueError(error)) from error
        digest = self._source_digest(name)
        record = write_event(path, graph, assignment, num_tiles, settings=self.settings_of(name), source_digest=digest)
        seen = None if self.look is None else self.look(graph.hits, graph.edge_index, graph.label)
        return {"record": record, "seen": seen}

    def recorded_if_finished(self) -> dict[str, Split] | None:
        """Splits of the events of a finished store with the same events and settings; None where there is none."""
        store = _store_in(self.directory)
        if store is None or not store.survey or settings_digest(self.settings) != store.settings_digest:
            return None
        splits = _splits_of(store)
        return splits if (tuple(splits), store.split_settings) == (self.source.names, self.splits) else None

    def _source_digest(self, name: str) -> str:
        files = self.source.files(name)
        digest = hashlib.sha256()
        for path in files:
            digest.update(path.name.encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest() if files else ""


def _surfaces(job: _PrepareJob, surveyed: Callable[[str], Hits], overwrite: bool) -> dict[str, Any]:
    """The settings of surfaces that the hits of the first events lie on; a store that is there keeps its own."""
    store = _store_in(job.directory)
    if store is not None and not overwrite:
        learned = "surfaces_learned" in store.settings
        return {name: store.settings[name] for name in ("surfaces", "surfaces_learned")} if learned else {}
    events: list[Hits] = []
    for name in job.source.names:
        events.append(surveyed(name))
        if sum(map(len, events)) >= ENOUGH_HITS:
            break
    return learned_surfaces(events)


def _claim_and_make_ready(
    job: _PrepareJob, overwrite: bool, held: contextlib.ExitStack, say: Callable[[str], None]
) -> dict[str, Split]:
    """Make the directory and lock it, see to it that what lies there may stay, or with `overwrite` remove it.

    Returns:
        Splits of the events that stay in the store.
    """
    if job.partitioner is not None:
        get_partitioner(job.partitioner)  # refuses a name it does not know
    if job.directory.exists() and not job.directory.is_dir():
        raise Problem(f"{job.directory} is a file", "name a directory for the store")
    try:
        missing = [place for place in (job.directory, *job.directory.parents) if not place.exists()]
        held.callback(_remove_empty, missing)  # called after the lock is gone
        job.directory.mkdir(parents=True, exist_ok=True)
        _claim(job, held, say)
        for unfinished in job.directory.glob(f"{PARTIAL}*"):
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        what = f"cannot write a store to {job.directory}: {error.strerror} (errno {error.errno})"
        raise Problem(what, "choose another --store") from error
    store = _store_in(job.directory)
    foreign, drawn = _other_settings(job, store), ""
    if store is not None and store.split_settings is not None and job.splits is not None:
        drawn = _changes(store.split_settings, job.splits)
    if not overwrite:
        if foreign or drawn:
            raise Problem(
                f"{job.directory} was prepared with other settings: {'; '.join(filter(None, (foreign, drawn)))}",
                "name another --store, or replace this one with --overwrite",
            )
        # A store becomes smaller with --overwrite only.
        left_out = sorted(set(_splits_of(store) if store else ()) - set(job.source.names))
        if store is not None and left_out:
            raise Problem(
                f"{job.directory} holds {several(len(store), 'event')}, and the {len(job.source.names)} of "
                f"these flags leave out {len(left_out)} of them ({some_of(left_out, 4)})",
                "take all of them (--events), name another --store, or leave them out with --overwrite",
            )
    if foreign or drawn:
        # The manifest goes first: without it the remains are no store.
        (job.directory / MANIFEST).unlink(missing_ok=True)
    for path in job.directory.glob(f"event*{SUFFIX}") if foreign else ():
        path.unlink()
    return {} if foreign or drawn or store is None else _splits_of(store)


def _remove_empty(directories: Sequence[Path]) -> None:
    """Leave nothing of a preparation that was refused before it wrote an event: innermost directory first."""
    with contextlib.suppress(OSError):  # the first that holds something stays, and those around it
        for directory in directories:
            directory.rmdir()


def _claim(job: _PrepareJob, held: contextlib.ExitStack, say: Callable[[str], None]) -> None:
    claim = Claim.take(job.directory, STORE)
    held.callback(claim.release)
    if claim.note:
        say(f"note: {claim.note}")


def _surveys(directory: Path, records: Sequence[EventRecord], ranks: Ranks) -> list[EventSurvey]:
    """A survey of each of some events, dealt to ranks; no bit depends on how. *Collective*."""

    def survey(record: EventRecord | None) -> EventSurvey | None:
        if record is None:
            return None
        with StoredEvent(directory / record.path) as event:
            return EventSurvey.of(event)

    surveys: list[EventSurvey] = []
    for mine, of_round in rounds(records, ranks):
        surveys += map(EventSurvey.from_json, _gather_work(ranks, partial(survey, mine))[: len(of_round)])
    return surveys


def _finish(
    job: _PrepareJob, records: Sequence[EventRecord], surveys: Sequence[EventSurvey], say: Callable[[str], None]
) -> None:
    """Write the manifest, and name what lies beside it and is no part of the store."""
    for name, content in job.beside.items():
        write_whole(job.directory / name, content)
    write_manifest(job.directory, records, job.settings, job.splits, surveys, job.source.learned_from)
    files = {path.name for path in job.directory.glob(f"event*{SUFFIX}")}
    if others := sorted(files - {record.path for record in records}):
        say(f"note: {several(len(others), 'file')} in {job.directory} do not belong to the store: {some_of(others, 4)}")


def _store_in(directory: Path) -> EventStore | None:
    """The finished store that lies in a directory, whatever has become of its events; None where there is none."""
    with contextlib.suppress(StoreError):  # what is damaged is made again
        return EventStore(directory, check_files=False)
    return None


def _splits_of(store: EventStore) -> dict[str, Split]:
    return {record.event: record.split for record in store.records}


def _other_settings(job: _PrepareJob, store: EventStore | None) -> str:
    """How the settings of what lies in the directory differ; empty where nothing does, or they are the same."""
    if store is not None:
        return _changes(store.settings, job.settings)
    for path in sorted(job.directory.glob(f"event*{SUFFIX}")):  # of an interrupted preparation
        try:
            with StoredEvent(path) as event:
                if changes := _changes(event.settings, job.settings_of(event.event_id)):
                    return changes
        except OtherVersion as error:
            return error.what
        except StoreError:
            pass  # what is damaged is made again
    return ""


def _changes(before: Settings, now: Settings) -> str:
    def shown(settings: Settings, name: str) -> str:
        text = json.dumps(settings.get(name))
        return text if len(text) < 60 else f"{text[:50]}..."

    if settings_digest(before) == settings_digest(now):
        return ""
    changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    return "; ".join(f"{name} {shown(before, name)}, not {shown(now, name)}" for name in changed)


# --- ranks -----------------------------------------------------------------------------------------------------------


def _gather_work(ranks: Ranks, work: Callable[[], Any]) -> list[Any]:
    """Do every rank's own work and return what it gave on all; if any fails, all refuse. *Collective*."""

    def attempt() -> Any:
        try:
            return work()
        except (RuntimeError, OSError, MemoryError) as error:
            raise as_problem(error, "--store") or Problem(f"{type(error).__name__}: {error}") from error

    return gather(ranks, on_all(ranks, attempt))


def _work_on_root(ranks: Ranks, work: Callable[[], Any]) -> Any:
    """Do work on rank 0 alone and return on every rank what it gave. *Collective*."""
    return _gather_work(ranks, lambda: work() if ranks.rank == 0 else None)[0]
