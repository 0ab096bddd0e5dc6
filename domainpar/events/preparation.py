"""From a source of events to a finished store: read, join by candidate edges, cut into tiles, write, split.

Events are dealt to ranks, one each at a time. An event that is in the store already, made with the same settings from
the same input, is kept: a preparation that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.agreement import Gathering, Ranks, agree_on, gather, on_all
from domainpar.atomic_files import PARTIAL
from domainpar.events.graph import EventGraph, Hits, IntArray
from domainpar.events.sources import Source
from domainpar.events.splits import with_splits
from domainpar.events.store import (
    MANIFEST,
    SUFFIX,
    EventRecord,
    EventStore,
    OtherVersion,
    Settings,
    Split,
    StoredEvent,
    StoreError,
    event_file_name,
    inspect_event,
    settings_digest,
    write_event,
    write_manifest,
)
from domainpar.events.stored_order import default_num_tiles
from domainpar.lock import STORE, Claim
from domainpar.problems import Place, Problem, expected
from domainpar.words import several
from partitioners import Topology, get_partitioner

AllGather = Callable[[bytes], list[bytes]]
OnEvent = Callable[[EventRecord, bool], None]
Look = Callable[[Hits, IntArray, IntArray | None], Any]


def prepare(
    source: Source,
    directory: str | Path,
    *,
    partitioner: str | None = None,
    num_tiles: int | None = None,
    val_split: float = 0.1,
    test_split: float = 0.1,
    seed: int = 0,
    overwrite: bool = False,
    rank: int = 0,
    size: int = 1,
    all_gather: AllGather | None = None,
    on_event: OnEvent | None = None,
    say: Callable[[str], None] = lambda line: None,
    look: Look | None = None,
    on_look: Callable[[Any], None] | None = None,
) -> EventStore:
    """Prepare a store. *Collective*: all ranks return the same store, or all raise.

    Events that are in the store already stay in their split. A store that is finished as it is asked for is only read;
    else it is locked, and another preparation of it is refused meanwhile.

    Args:
        source: The events; the same on all ranks.
        directory: The store; made where it is missing.
        partitioner: Makes the tiles, a name that `partitioners.get_partitioner` knows. Default: `phi-eta` where nodes
            have positions, `metis` where they have none.
        num_tiles: K of every event. Default: about 4,600 edges a tile.
        val_split: Share of the events kept for validation, where the source does not tell the splits.
        test_split: Share of the events kept for a final test, likewise.
        seed: Seed of the partitioner and of the split.
        overwrite: Replace a store that was made with other settings, or that holds events which the source has not.
        rank: This rank.
        size: Number of ranks.
        all_gather: Gives every rank the payloads of all, in their order. Needed with more than one rank.
        on_event: Called on every rank for every event, in order, with its record and whether it was kept as it was.
        say: Called on rank 0 with what the user should know, a line each.
        look: Given hits, `edge_index` and label of every event, on the rank that has it, in any order; returns what can
            travel as JSON.
        on_look: Called on every rank for every event, in order, with what `look` returned.

    Raises:
        Refused: On all ranks alike, if the store was made with other settings, or holds more events, and is not to be
            overwritten; if another preparation is at work in it; or if events cannot be read, cut or written, naming
            them. Finished events stay; there is no manifest that lists unfinished ones.
    """
    if size > 1 and all_gather is None:
        raise ValueError(f"{size} ranks were given but no all_gather to join them.")
    splits = {"val_split": val_split, "test_split": test_split, "split_seed": seed}
    own_splits = None if source.splits is not None else splits
    job = _Job(
        source=source,
        directory=Path(directory),
        partitioner=partitioner,
        num_tiles=num_tiles,
        seed=seed,
        splits=own_splits,
        look=look,
    )
    ranks = Gathering(rank, size, all_gather or (lambda payload: [payload]))
    # A shared file system may not show the same files everywhere; events would be dealt twice or not at all.
    agree_on(ranks, _source_values(source), "let all ranks see the same files, and give all the same flags")
    records: list[EventRecord] = []
    with contextlib.ExitStack() as held:
        recorded = _of_root(ranks, job.recorded_if_finished)
        locked = recorded is None
        if locked:
            recorded = _of_root(ranks, lambda: _claim_and_make_ready(job, overwrite, held, say))
        for start in range(0, len(source.names), size):
            # One event a rank, then all meet: a long silence of one rank would look like a hang to the others.
            mine = source.names[start + rank : start + rank + 1]
            kept = _of_all(ranks, lambda mine=mine: job.kept(mine[0]) if mine else None)  # type: ignore[misc]
            if not locked and None in kept[: len(source.names) - start]:  # a finished store that was damaged
                locked = True
                _of_root(ranks, lambda: _claim(job, held, say))
            here = kept[rank]
            found = _of_all(ranks, lambda mine=mine, here=here: job.event(mine[0], here) if mine else None)  # type: ignore[misc]
            for made, as_it_was in zip(found, kept):
                if made is not None:
                    records.append(_record(made["record"]))
                    if on_event is not None:
                        on_event(records[-1], as_it_was is not None)
                    if on_look is not None:
                        on_look(made["seen"])
        if source.splits is None:
            records = with_splits(records, val_split, test_split, seed, recorded, source.whole)
        else:
            records = [replace(record, split=source.splits[record.event]) for record in records]
        if locked:
            _of_root(ranks, lambda: _finish(job, records, say))
    return EventStore(directory)


@dataclass(frozen=True)
class _Job:
    """The work on each event."""

    source: Source
    directory: Path
    partitioner: str | None
    num_tiles: int | None
    seed: int
    splits: Settings | None
    look: Look | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the bytes of an event's file, besides its input."""
        return {
            **self.source.settings,
            "partitioner": self.partitioner or "phi-eta, or metis without positions",
            "tiles": self.num_tiles if self.num_tiles is not None else "some 4600 edges each, small events finer",
            "seed": self.seed if self.partitioner in (None, "metis", "random") else None,
        }

    def kept(self, name: str) -> dict[str, Any] | None:
        """The record, as JSON, of an event's file that is there, undamaged, and would be made the same again."""
        path = self.directory / event_file_name(name)
        if not path.exists():
            return None
        try:
            record, settings, source = inspect_event(path)
        except StoreError:
            return None  # damaged: it is made again
        same = (settings, source) == (settings_digest(self.settings), self._source_digest(name))
        return asdict(record) if same else None

    def event(self, name: str, kept: dict[str, Any] | None) -> dict[str, Any]:
        """An event's record, as JSON, and what is seen of it; its file is made unless it is kept."""
        path = self.directory / event_file_name(name)
        if kept is not None:
            return {"record": kept, "seen": self._seen_again(path)}
        graph = self.source.read(name)
        record = self._write(path, graph, self._source_digest(name))
        seen = None if self.look is None else self.look(graph.hits, graph.edge_index, graph.label)
        return {"record": asdict(record), "seen": seen}

    def _seen_again(self, path: Path) -> Any:
        """The result of `look` on an event that is there already."""
        if self.look is None:
            return None
        with StoredEvent(path) as event:
            nodes, edges = np.arange(event.num_nodes), np.arange(event.num_edges)
            hits = Hits(
                event_id=event.event_id,
                hit_id=event.read_nodes("hit_id", nodes),
                position=event.read_nodes("position", nodes) if event.has_positions else None,
                volume=event.read_nodes("volume", nodes),
                layer=event.read_nodes("layer", nodes),
                module=event.read_nodes("module", nodes),
                particle_id=event.read_nodes("particle_id", nodes) if event.has_particle_ids else None,
                particles=event.particles(),
            )
            edge_index = np.stack([event.read_edges("src", edges), event.read_edges("dst", edges)])
            return self.look(hits, edge_index, event.read_edges("label", edges) if event.has_labels else None)

    def _write(self, path: Path, graph: EventGraph, source_digest: str) -> EventRecord:
        num_tiles = default_num_tiles(graph) if self.num_tiles is None else self.num_tiles
        try:
            topology = Topology(graph.edge_index, graph.num_nodes, graph.hits.position)
            partitioner = self.partitioner or ("metis" if graph.hits.position is None else "phi-eta")
            assignment = get_partitioner(partitioner, self.seed)(topology, num_tiles)
        except (ValueError, RuntimeError) as error:  # partitioners see a graph, not whose it is
            raise Place(graph.hits.event_id).of(ValueError(error)) from error
        return write_event(path, graph, assignment, num_tiles, settings=self.settings, source_digest=source_digest)

    def recorded_if_finished(self) -> dict[str, Split] | None:
        """Splits of the events of a store that lies there and is just what is asked for; None where it is not."""
        store = _store_in(self.directory)
        asked = (self.source.names, self.splits, settings_digest(self.settings))
        if store is None or asked != (_names(store), store.split_settings, store.settings_digest):
            return None
        return _recorded(store)

    def _source_digest(self, name: str) -> str:
        digest = hashlib.sha256()
        files = self.source.files(name)
        for path in files:
            digest.update(path.name.encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest() if files else ""


def _claim_and_make_ready(
    job: _Job, overwrite: bool, held: contextlib.ExitStack, say: Callable[[str], None]
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
        job.directory.mkdir(parents=True, exist_ok=True)
        _claim(job, held, say)
        for partial in job.directory.glob(f"{PARTIAL}*"):
            partial.unlink(missing_ok=True)
    except OSError as error:
        what = f"cannot write a store to {job.directory}: {error.strerror} (errno {error.errno})"
        raise Problem(what, "choose another --store") from error
    store = _store_in(job.directory)
    foreign, drawn = _other_settings(job, store), _other_splits(job, store)
    if not overwrite:
        if foreign or drawn:
            raise Problem(
                f"{job.directory} was prepared with other settings: {'; '.join(filter(None, (foreign, drawn)))}",
                "name another --store, or replace this one with --overwrite",
            )
        _refuse_to_shrink(job, store)
    if foreign or drawn:
        # The manifest goes first: without it nobody takes the remains for a store.
        (job.directory / MANIFEST).unlink(missing_ok=True)
    for path in job.directory.glob(f"event*{SUFFIX}") if foreign else ():
        path.unlink()
    return {} if foreign or drawn or store is None else _recorded(store)


def _claim(job: _Job, held: contextlib.ExitStack, say: Callable[[str], None]) -> None:
    claim = Claim.take(job.directory, STORE)
    held.callback(claim.release)
    if claim.note:
        say(f"note: {claim.note}")


def _refuse_to_shrink(job: _Job, store: EventStore | None) -> None:
    """Refuse to take events out of a store that nobody asked to make smaller."""
    left_out = sorted(set(_names(store) if store else ()) - set(job.source.names))
    if store is not None and left_out:
        raise Problem(
            f"{job.directory} holds {several(len(store), 'event')}, and the {len(job.source.names)} that are asked for "
            f"now leave out {len(left_out)} of them ({_first(left_out)})",
            "ask for all of them (--events), name another --store, or leave them out with --overwrite",
        )


def _finish(job: _Job, records: Sequence[EventRecord], say: Callable[[str], None]) -> None:
    """Write the manifest, and name what lies beside it and is no part of the store."""
    write_manifest(job.directory, records, job.settings, job.splits)
    found = {path.name for path in job.directory.glob(f"event*{SUFFIX}")}
    if others := sorted(found - {record.path for record in records}):
        say(f"note: {several(len(others), 'file')} in {job.directory} do not belong to the store: {_first(others)}")


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _store_in(directory: Path) -> EventStore | None:
    """The finished store that lies in a directory, whatever has become of its events; None where there is none."""
    with contextlib.suppress(StoreError):  # what is damaged is made again
        return EventStore(directory, check_files=False)
    return None


def _names(store: EventStore) -> tuple[str, ...]:
    return tuple(record.event for record in store.records)


def _recorded(store: EventStore) -> dict[str, Split]:
    return {record.event: record.split for record in store.records}


def _other_settings(job: _Job, store: EventStore | None) -> str | None:
    """How the settings of the store in the directory differ; None where there is none, or they are the same."""
    files = sorted(job.directory.glob(f"event*{SUFFIX}")) if store is None else []
    found = [] if store is None else [store.settings]
    for path in files:  # of an interrupted preparation
        try:
            with StoredEvent(path) as event:
                found.append(event.settings)
        except OtherVersion as error:
            return error.what
        except StoreError:
            pass  # what is damaged is made again
    changed = (settings for settings in found if settings_digest(settings) != settings_digest(job.settings))
    return next((_changes(settings, job.settings) for settings in changed), None)


def _other_splits(job: _Job, store: EventStore | None) -> str | None:
    """How the split settings of the store in the directory differ; None where they are the same, or not known."""
    drawn = store.split_settings if store is not None and job.splits is not None else None
    return None if drawn is None else _changes(drawn, job.splits or {}) or None


def _changes(before: Settings, now: Settings) -> str:
    return "; ".join(
        f"{name} {_shown(before.get(name))}, not {_shown(now.get(name))}"
        for name in sorted(set(before) | set(now))
        if before.get(name) != now.get(name)
    )


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:50]}..."


# --- ranks -----------------------------------------------------------------------------------------------------------


def _of_all(ranks: Ranks, work: Callable[[], Any]) -> list[Any]:
    """Do every rank's own work and return what it gave on all; if any fails, all refuse. *Collective*."""

    def attempt() -> Any:
        try:
            return work()
        except (RuntimeError, OSError, MemoryError) as error:
            raise expected(error, "--store") or Problem(f"{type(error).__name__}: {error}") from error

    return gather(ranks, on_all(ranks, attempt))


def _of_root(ranks: Ranks, work: Callable[[], Any]) -> Any:
    """Do work on rank 0 alone and return on every rank what it gave. *Collective*."""
    return _of_all(ranks, lambda: work() if ranks.rank == 0 else None)[0]


def _source_values(source: Source) -> dict[str, str]:
    """The events and settings of a source, as ranks compare them."""
    digest = hashlib.sha256(json.dumps([source.names, dict(source.settings)], sort_keys=True).encode()).hexdigest()
    return {"the list of events and settings": f"{digest[:12]} ({several(len(source.names), 'event')})"}


def _record(item: dict[str, Any]) -> EventRecord:
    names = {name: tuple(item[name]) for name in ("feature_names", "edge_feature_names")}
    return EventRecord(**{**item, **names})
