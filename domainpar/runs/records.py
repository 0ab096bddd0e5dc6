"""The records of runs and scores: `run.json` and `scores.json` as frozen values, read and written here alone.

A field that a file lacks has its default, and is not written. So a record that is read and written again has the same
bytes, even that of another version, whose unknown names are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar

from msgspec import Struct
from msgspec.structs import force_setattr

from domainpar.common.agreement import Ranks, on_root
from domainpar.common.atomic_files import json_bytes, write_whole
from domainpar.common.models import plain, read_as
from domainpar.common.problems import Problem

RUN_FILE, SCORES_FILE = "run.json", "scores.json"

T = TypeVar("T")
Table = Mapping[str, Any]
Hashes = tuple[tuple[str, str], ...]
"""Name and sha256 of events, in order."""


class Record(Struct, frozen=True, kw_only=True):
    """Names with values, as a file has them. `content` is all that the file says, in plain values."""

    content: Table = {}

    @classmethod
    def of(cls, /, **values: Any) -> Self:
        """A record with these names, and no others."""
        return cls.read(_plain(values))

    @classmethod
    def read(cls, content: Table) -> Self:
        """The record of a file's content; ValueError if a value is not as it was written."""
        record = read_as(cls, content)
        _keep(record, content)
        return record

    def changed(self, **values: Any) -> Self:
        """The same with other values; names that were not there are now."""
        return self.read({**self.content, **_plain(values)})

    def without(self, *names: str) -> Self:
        """The same as if some names had never been there."""
        return self.read({name: value for name, value in self.content.items() if name not in names})


def _plain(values: Table) -> dict[str, Any]:
    return {name: value.content if isinstance(value, Record) else plain(value) for name, value in values.items()}


def _keep(record: Record, content: Table) -> None:
    """Let a record that was just read, and those in it, keep what the file says."""
    force_setattr(record, "content", content)
    for name, value in content.items():
        if isinstance(part := getattr(record, name, None), Record):
            _keep(part, value)


class EventHashes(TypedDict):
    """The events of a run, of each split."""

    train: Hashes
    val: Hashes


class StoreRecord(Record, frozen=True, kw_only=True):
    """The events of a run or of scores, and the place of their store.

    Events are known by the hashes of their files, a store by its events. A path only says where to look: seen from the
    file that keeps it, so that run and store may be moved together, and from the root, so that one of them may be.
    """

    path: str = ""  # of the store, seen from the directory of the file; empty where it is not known
    absolute: str = ""  # the same from the root
    digest: str | None = None  # of the store when the run began
    events: EventHashes | None = None  # None where they are not known
    feature_names: Sequence[str] = ()  # of nodes
    edge_feature_names: Sequence[str] = ()
    filter: Table | None = None  # the network that left edges out, and its minimum score; None for none
    scales: Mapping[str, Sequence[float]] | None = None  # divisors of features by flag; None where they are not known
    learned_from: Mapping[str, str] | None = None  # events, by name, of its module map; None of an imported network
    joined_by: str | None = None  # the shipped network whose module map joined the events; None for others
    surveyed: Table | None = None  # what the training events have in common, as the store records; None: not known


class Learning(Record, frozen=True, kw_only=True):
    """What both files say of the network."""

    # Of its events; of a run with no names given before it has begun.
    store: StoreRecord = StoreRecord()
    tasks: Table | None = None  # what it learns (`Tasks`)
    parameters_sha256: str | None = None  # of the last parameters, or those that scored; None before a run has ended
    bitwise_problem: str | None = None  # why results are the same to rounding only; None where they are to the bit
    # What was left out: `sample`, `event` and why.
    skipped: Sequence[Table] = ()

    @property
    def learns_edges(self) -> bool:
        """Whether the network scores edges; else it predicts labels alone."""
        return bool((self.tasks or {}).get("edge_weight", 1.0))


class RunRecord(Learning, frozen=True, kw_only=True):
    """`run.json`: how a run began, where it stands and how it ended.

    `argv`, `environment`, `git`, `host`, `machine`, `pid`, `started`, `versions` are those of its process (`origin`).
    """

    state: str = ""  # `starting`, `running`, `done`, `preempted` or `failed`; empty where the file does not say
    error: str | None = None  # why it failed; None if it did not
    saved: Mapping[str, str] | None = None  # hash of the parameters of each checkpoint, by step; None: not known
    steps: int | None = None  # at its end
    seconds: float | None = None  # of its steps
    began_at_step: int = 0  # this session
    memory: Table | None = None  # bytes of each rank, expected and taken
    disk_bytes: Table | None = None  # that came from disks and went there, where tables lie in files
    exchanges: Table | None = None  # of a step, forward and backward, and sums
    failed_saves: int = 0  # checkpoints that could not be written
    lost_records: int = 0  # lines of `metrics.jsonl` that could not
    model_code: str | None = None  # `package.module:factory` of a user's own network; None for others
    model_options: Sequence[str] | None = None  # options of flags that the network makes use of
    optimizer_code: str | None = None  # `package.module:Class` of a user's own optimiser; None for others
    ranks: int | None = None
    domain_size: int | None = None  # ranks to an event
    threads: int | None = None  # of each rank
    allocator: str | None = None  # the C library's way with freed memory, in words
    imported: Table | None = None  # the file and the framework that the network came from
    argv: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    git: str | None = None
    host: str = ""
    machine: str = ""
    pid: int | None = None
    started: str = ""
    versions: Mapping[str, str | None] = {}


class ScoredEvent(Struct, frozen=True):
    """An event in `scores.json`."""

    event: str = ""  # its name
    path: str = ""  # name of its file, in the directory of the scores
    sha256: str = ""  # of that file
    logits_sha256: str = ""  # of logits and labels in the user's order: equal on any number of ranks
    edges: int = 0  # candidates
    unscored: int = 0  # those without a score
    tracks: int | None = None  # None without tracks
    event_sha256: str = ""  # of the event's own file; empty where it is not known


class ScoresRecord(Learning, frozen=True, kw_only=True):
    """`scores.json`: the network, how it scored which events, and how good that is.

    `filter` has the `run` of the network that left edges out before this one, seen from the scores, its
    `parameters_sha256` and its `min_score`; None where all were scored.
    """

    format: str = ""
    schema_version: int = 0
    run: str = ""  # its directory, seen from the scores
    checkpoint: str = ""  # `best` or `last`
    step: int = 0  # of the checkpoint
    parameters_sha256: str = ""
    dtype: str = ""  # of the network, as precision
    precision: str = ""
    mode: str = "halo"  # how events were scored, whole or in sectors, and how many
    sectors: int | str | None = None
    trained_mode: str = ""  # how the network was trained
    trained_sectors: int | str | None = None
    target: str | None = None  # particles of its training; None for all
    filter: Table | None = None
    filters: Sequence[str] = ("", "")  # those of the run's events, and of these, in words; empty for none
    joined_by: str | None = None  # the shipped network whose module map joined the run's events, and not these
    outside: Sequence[str] = ()  # in what the events lie outside of what the network was trained on, in words
    store_digest: str | None = None
    events: Sequence[ScoredEvent] = ()
    metrics: Mapping[str, Table] = {}  # of edges and labels, by split
    tracks: Table | None = None  # how they were built and counted; None without tracks
    trained_on: Mapping[str, Mapping[str, int]] | None = None  # events of each split in training; None: not known

    @property
    def by_event(self) -> dict[str, ScoredEvent]:
        """The events by name."""
        return {listed.event: listed for listed in self.events}


@dataclass
class RunFile:
    """`run.json` of a run under way: the file, and what it says."""

    path: Path
    record: RunRecord = field(default_factory=RunRecord.of)

    def update(self, **changes: Any) -> None:
        """Change some entries and replace the file.

        Raises:
            OSError: If that is impossible; the file is as it was then.
        """
        self.record = self.record.changed(**changes)
        write_whole(self.path, json_bytes(self.record.content))


def run_record(path: Path) -> RunRecord:
    """Read a `run.json`; a Problem if that cannot be, or it does not say what it should."""
    return read_file(path, RunRecord.read, "copy it anew, or name another run")


def scores_record(path: Path) -> ScoresRecord:
    """Read a `scores.json`; a Problem if that cannot be, or it does not say what it should."""
    return read_file(path, ScoresRecord.read, "copy it anew, or run infer again")


def read_file(
    path: Path, read: Callable[[Table], T], remedy: str = "copy it anew", parse: Callable[[str], Any] = json.loads
) -> T:
    """What `read` makes of a file of names with values; `parse`: from its text to its content.

    Raises:
        Problem: Naming the file and the remedy, if it cannot be read, or a value is not as it was written.
    """
    try:
        content = parse(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, expected names with values")
        return read(content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        what = error.what if isinstance(error, Problem) else f"{type(error).__name__}: {error}"
        raise Problem(f"{path} cannot be read: {what}", remedy, file=path) from error


def record_of_root(ranks: Ranks, read: Callable[[], RunRecord | None]) -> RunRecord | None:
    """The record that rank 0 reads, on every rank; all refuse if it cannot be read. *Collective*."""
    kept = on_root(ranks, lambda: None if (record := read()) is None else record.content)
    return None if kept is None else RunRecord.read(kept)
