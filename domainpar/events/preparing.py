"""From a source of events to a finished store: read, join by candidate edges, cut into tiles, write, split.

Events are dealt to ranks, one each at a time. An event that is in the store already, made with the same settings from
the same input, is kept: a preparation that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from domainpar.events.construct import Cuts, build_graph
from domainpar.events.graph import EventGraph
from domainpar.events.place import Place
from domainpar.events.store import (
    MANIFEST,
    PARTIAL,
    SUFFIX,
    EventRecord,
    EventStore,
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
from domainpar.problems import NotWritten, Problem, expected, told
from domainpar.words import several
from partitioners import Topology, get_partitioner

if TYPE_CHECKING:
    from domainpar.events.acorn import AcornOptions

SourceKind = Literal["simulate", "trackml", "heptrkx", "pyg", "acorn"]
AllGather = Callable[[bytes], list[bytes]]
OnEvent = Callable[[EventRecord, bool], None]

DEFAULT_SIMULATED_EVENTS = 10


@dataclass(frozen=True)
class Source:
    """Where events come from.

    Attributes:
        names: Names of the events, in order.
        read: Reads or makes one, with candidate edges.
        files: The input files of one, empty for a simulated one.
        settings: All that decides what `read` returns, besides the files; plain JSON values.
        splits: Split of each event where the source itself tells; None: events are dealt into splits.
    """

    names: tuple[str, ...]
    read: Callable[[str], EventGraph]
    files: Callable[[str], list[Path]]
    settings: Settings
    splits: Mapping[str, Split] | None = None


def open_source(
    kind: SourceKind,
    *,
    directory: str | Path | None = None,
    num_events: int | None = None,
    cuts: Cuts | None = None,
    num_hits: int = 100_000,
    seed: int = 0,
    num_phi_sectors: int = 1,
    acorn: AcornOptions | None = None,
) -> Source:
    """List the events of a source.

    Args:
        kind: `simulate`, `trackml` (hits), `heptrkx`, `pyg` or `acorn` (graphs).
        directory: Where the files are; needed but for `simulate`.
        num_events: Take the first so many. Default: all, or 10 simulated ones.
        cuts: Candidate edges, for sources of hits.
        num_hits: Hits of a simulated event, about.
        seed: Event i is simulated from seed + i.
        num_phi_sectors: Sectors that a heptrkx event was cut into.
        acorn: How acorn files are read.

    Raises:
        ValueError: If the source is unknown, its directory holds no events, or fewer than were asked for.
    """
    cuts = cuts or Cuts()
    if kind == "simulate":
        count = DEFAULT_SIMULATED_EVENTS if num_events is None else num_events
        return _simulated(count, seed, num_hits, cuts)
    if directory is None:
        raise Problem(f"source {kind} needs the directory of its files", "name it with --input")
    if kind == "trackml":
        source = _trackml(Path(directory), cuts)
    elif kind == "heptrkx":
        source = _heptrkx(Path(directory), num_phi_sectors)
    elif kind == "pyg":
        source = _pyg(Path(directory))
    elif kind == "acorn":
        source = _acorn(Path(directory), acorn)
    else:
        raise ValueError(f"unknown source {kind!r}; known: simulate, trackml, heptrkx, pyg, acorn.")
    if num_events is not None and num_events > len(source.names):
        raise Problem(
            f"{several(num_events, 'event')} asked for, but {directory} holds {len(source.names)}",
            "ask for fewer --events",
        )
    return replace(source, names=source.names[:num_events])


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
) -> EventStore:
    """Prepare a store. *Collective*: all ranks return the same store, or all raise.

    Args:
        source: The events; the same on all ranks.
        directory: The store; made where it is missing.
        partitioner: How nodes become tiles, a name that `partitioners.get_partitioner` knows. Default: `phi-eta`
            where nodes have positions, `metis` where they have none.
        num_tiles: K of every event. Default: about 4,600 edges a tile.
        val_split: Share of the events kept for validation, where the source does not tell the splits.
        test_split: Share of the events kept for a final test, likewise.
        seed: Seed of the partitioner and of the split.
        overwrite: Replace a store that was made with other settings.
        rank: This rank.
        size: Number of ranks.
        all_gather: Gives every rank the payloads of all, in their order. Needed with more than one rank.
        on_event: Called on every rank for every event, in order, with its record and whether it was kept as it was.

    Raises:
        Problem: If the store was made with other settings and is not to be overwritten, or if an event cannot be
            read or cut: naming the first such event, and how many there are. Finished events stay; there is no
            manifest.
        NotWritten: If an event or the manifest cannot be written; finished events stay likewise.
    """
    if size > 1 and all_gather is None:
        raise ValueError(f"{size} ranks were given but no all_gather to join them.")
    job = _Job(source, Path(directory), partitioner, num_tiles, seed)
    share = _Share(rank, size, all_gather or (lambda payload: [payload]))
    share.agree(lambda: _refuse_if_not_same(share, source))
    share.agree(lambda: _make_ready(job, overwrite) if rank == 0 else None)
    records: list[EventRecord] = []
    for start in range(0, len(source.names), size):
        # One event a rank, then all meet: a long silence of one rank would look like a hang to the others.
        mine = source.names[start + rank : start + rank + 1]
        for found in share.agree(lambda mine=mine: job.event(mine[0]) if mine else None):  # type: ignore[misc]
            if found is not None:
                records.append(_record(found["record"]))
                if on_event is not None:
                    on_event(records[-1], found["kept"])
    if source.splits is None:
        records = with_splits(records, val_split, test_split, seed)
    else:
        records = [replace(record, split=source.splits[record.event]) for record in records]
    share.agree(lambda: write_manifest(job.directory, records, job.settings) if rank == 0 else None)
    return EventStore(directory)


def with_splits(records: Sequence[EventRecord], val_split: float, test_split: float, seed: int) -> list[EventRecord]:
    """Deal events into train, val and test by a permutation that depends on their number and the seed only.

    A share above 0 gets at least one event while at least one is left to train on; validation comes first. A single
    event is trained on.

    Raises:
        ValueError: If the shares are not in [0, 1) or leave nothing to train on.
    """
    if not (0 <= val_split < 1 and 0 <= test_split < 1 and val_split + test_split < 1):
        raise ValueError(f"val_split {val_split} and test_split {test_split} must be shares whose sum is below 1.")
    left = len(records) - 1
    num_val = min(_share_of(val_split, len(records)), left)
    num_test = min(_share_of(test_split, len(records)), left - num_val)
    splits: list[Split] = ["train"] * len(records)
    order = np.random.default_rng(seed).permutation(len(records))
    for place in order[:num_val]:
        splits[place] = "val"
    for place in order[num_val : num_val + num_test]:
        splits[place] = "test"
    return [replace(record, split=split) for record, split in zip(records, splits)]


def _share_of(share: float, count: int) -> int:
    return max(1, round(share * count)) if share > 0 and count > 0 else 0


# --- sources ---------------------------------------------------------------------------------------------------------
# Readers are imported when they are used: pandas and torch take seconds to load, and a simulation needs neither.


def _simulated(num_events: int, seed: int, num_hits: int, cuts: Cuts) -> Source:
    from domainpar.events.simulate import simulate_event

    seeds = {f"{seed + i:09d}": seed + i for i in range(num_events)}

    def read(name: str) -> EventGraph:
        return build_graph(simulate_event(seeds[name], num_hits, name), cuts)

    settings = {"source": "simulate", "num_hits": num_hits, **_cut_settings(cuts)}
    return Source(tuple(seeds), read, lambda _: [], settings)


def _trackml(directory: Path, cuts: Cuts) -> Source:
    from domainpar.events import trackml

    return Source(
        tuple(trackml.list_events(directory)),
        lambda name: build_graph(trackml.read_event(directory, name), cuts),
        lambda name: trackml.event_files(directory, name),
        {"source": "trackml", **_cut_settings(cuts)},
    )


def _heptrkx(directory: Path, num_phi_sectors: int) -> Source:
    from domainpar.events import heptrkx

    return Source(
        tuple(heptrkx.list_events(directory)),
        lambda name: heptrkx.read_event(directory, name, num_phi_sectors),
        lambda name: heptrkx.event_files(directory, name),
        {"source": "heptrkx", "num_phi_sectors": num_phi_sectors},
    )


def _pyg(directory: Path) -> Source:
    from domainpar.events import pyg

    return Source(
        tuple(pyg.list_events(directory)),
        lambda name: pyg.read_event(pyg.event_path(directory, name)),
        lambda name: [pyg.event_path(directory, name)],
        {"source": "pyg"},
    )


def _acorn(directory: Path, options: AcornOptions | None) -> Source:
    from domainpar.events import acorn

    events = acorn.find_events(directory)
    paths = {name: event.path for name, event in events.items()}
    options = options or acorn.AcornOptions()
    if options.pt_unit is None:
        # One unit for all events: guessed anew for each, a small event could differ.
        options = replace(options, pt_unit=acorn.guess_pt_unit(paths.values()))
    splits = {name: event.split for name, event in events.items() if event.split is not None}
    return Source(
        tuple(paths),
        lambda name: acorn.read_event(paths[name], options),
        lambda name: [paths[name]],
        {"source": "acorn", **json.loads(json.dumps(asdict(options)))},
        splits or None,
    )


def _cut_settings(cuts: Cuts) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(json.dumps(asdict(cuts)))  # tuples become lists, as in a manifest read back
    return settings


# --- one event -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What is to be done with each event."""

    source: Source
    directory: Path
    partitioner: str | None
    num_tiles: int | None
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the bytes of an event's file, besides its input."""
        return {
            **self.source.settings,
            "partitioner": self.partitioner or "phi-eta, or metis without positions",
            "tiles": self.num_tiles if self.num_tiles is not None else "some 4600 edges each, small events finer",
            "seed": self.seed if self.partitioner in (None, "metis", "random") else None,
        }

    def event(self, name: str) -> dict[str, Any]:
        """Make one event's file, or keep the one that is there; its record as JSON."""
        path = self.directory / event_file_name(name)
        source_digest = self._source_digest(name)
        kept = self._finished(path, source_digest)
        return {"record": asdict(kept or self._write(path, name, source_digest)), "kept": kept is not None}

    def _write(self, path: Path, name: str, source_digest: str) -> EventRecord:
        graph = self.source.read(name)
        num_tiles = default_num_tiles(graph) if self.num_tiles is None else self.num_tiles
        try:
            topology = Topology(graph.edge_index, graph.num_nodes, graph.hits.position)
            partitioner = self.partitioner or ("metis" if graph.hits.position is None else "phi-eta")
            assignment = get_partitioner(partitioner, self.seed)(topology, num_tiles)
        except (ValueError, RuntimeError) as error:  # partitioners see a graph, not whose it is
            raise Place(name).of(ValueError(error)) from error
        return write_event(path, graph, assignment, num_tiles, settings=self.settings, source_digest=source_digest)

    def _finished(self, path: Path, source_digest: str) -> EventRecord | None:
        """The record of a file that is there, undamaged, and would be made the same again."""
        if not path.exists():
            return None
        try:
            record, settings, source = inspect_event(path)
        except StoreError:
            return None  # damaged: it is made again
        return record if (settings, source) == (settings_digest(self.settings), source_digest) else None

    def _source_digest(self, name: str) -> str:
        digest = hashlib.sha256()
        files = self.source.files(name)
        for path in files:
            digest.update(path.name.encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest() if files else ""


def _make_ready(job: _Job, overwrite: bool) -> None:
    """Make the directory, or see to it that what lies there may stay; with `overwrite`, remove what may not."""
    if job.partitioner is not None:
        get_partitioner(job.partitioner)  # refuses a name it does not know
    if job.directory.exists() and not job.directory.is_dir():
        raise Problem(f"{job.directory} is a file", "name a directory for the store")
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
        for partial in job.directory.glob(f"{PARTIAL}*"):
            partial.unlink(missing_ok=True)
    except OSError as error:
        what = f"cannot write a store to {job.directory}: {error.strerror} (errno {error.errno})"
        raise Problem(what, "choose another --store") from error
    foreign = _other_settings(job)
    if foreign is None:
        return
    if not overwrite:
        raise Problem(
            f"{job.directory} was prepared with other settings: {foreign}",
            "name another --store, or replace this one with --overwrite",
        )
    # The manifest goes first: without it nobody takes the remains for a store.
    (job.directory / MANIFEST).unlink(missing_ok=True)
    for path in job.directory.glob(f"event*{SUFFIX}"):
        path.unlink()


def _other_settings(job: _Job) -> str | None:
    """How a store that lies there was made differently; None where there is none or it was made alike."""
    for settings in _settings_found(job.directory):
        if settings_digest(settings) != settings_digest(job.settings):
            names = sorted(set(settings) | set(job.settings))
            changes = [
                f"{name} {_shown(settings.get(name))}, not {_shown(job.settings.get(name))}"
                for name in names
                if settings.get(name) != job.settings.get(name)
            ]
            return "; ".join(changes) or "by another version of this program"
    return None


def _settings_found(directory: Path) -> list[Settings]:
    """Settings of a finished store, or of every event's file of an interrupted one. What is damaged is made again."""
    with contextlib.suppress(StoreError):
        return [EventStore(directory).settings]
    found: list[Settings] = []
    for path in sorted(directory.glob(f"event*{SUFFIX}")):
        with contextlib.suppress(StoreError), StoredEvent(path) as event:
            found.append(event.settings)
    return found


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:50]}..."


# --- ranks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Share:
    """This rank among the ranks that prepare together."""

    rank: int
    size: int
    all_gather: AllGather

    def agree(self, work: Callable[[], Any]) -> list[Any]:
        """Do this rank's work and return what all ranks' work gave. *Collective*: if one rank fails, all raise."""
        try:
            mine: dict[str, Any] = {"value": work()}
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            problem = expected(error, "--store")
            mine = {
                "error": told(problem or f"{type(error).__name__}: {error}"),
                "running": isinstance(problem, NotWritten),
            }
        everyone = [json.loads(payload) for payload in self.all_gather(json.dumps(mine).encode())]
        errors = {rank: answer["error"] for rank, answer in enumerate(everyone) if "error" in answer}
        if errors:
            running = any(answer.get("running") for answer in everyone)
            raise _first_of(errors, self.size, NotWritten if running else Problem)
        return [answer["value"] for answer in everyone]


def _first_of(errors: Mapping[int, Mapping[str, Any]], size: int, kind: type[Problem]) -> Problem:
    """One error for those of all ranks: the first and whose it is, and which other events have one."""
    rank, first = next(iter(errors.items()))
    others = [error["event"] or error["what"] for error in errors.values() if error != first]
    what = str(first["what"]).rstrip(".") + (f" (on rank {rank})" if 1 < size != len(errors) else "")
    if others:
        what += f"; and {len(others)} more: {', '.join(others)}"
    return kind(what, first["hint"], event=first["event"], file=first["file"])


def _refuse_if_not_same(share: _Share, source: Source) -> None:
    """A shared file system may not show the same files everywhere; events would be dealt twice or not at all."""
    mine = _sha(source)
    others = [payload.decode() for payload in share.all_gather(mine.encode())]
    if len(set(others)) > 1:
        differing = [rank for rank, other in enumerate(others) if other != others[0]]
        raise Problem(
            f"ranks {differing} see other events or settings than rank 0 ({len(source.names)} events here)",
            "let all ranks see the same files, and give all the same flags",
        )


def _sha(source: Source) -> str:
    return hashlib.sha256(json.dumps([source.names, dict(source.settings)], sort_keys=True).encode()).hexdigest()


def _record(item: dict[str, Any]) -> EventRecord:
    names = {name: tuple(item[name]) for name in ("feature_names", "edge_feature_names")}
    return EventRecord(**{**item, **names})
