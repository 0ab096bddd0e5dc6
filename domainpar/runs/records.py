"""The records of runs and scores: `run.json` and `scores.json` as frozen values, read and written here alone.

A field that a file lacks has its default, and is not written. So a record that is read and written again has the same
bytes, even that of another version, whose unknown names are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from domainpar.common.agreement import Ranks, on_root
from domainpar.common.atomic_files import json_bytes, write_whole
from domainpar.common.problems import Problem

RUN_FILE, SCORES_FILE = "run.json", "scores.json"

T = TypeVar("T")
Table = Mapping[str, Any]
Hashes = tuple[tuple[str, str], ...]
"""Name and sha256 of events, in order."""


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("Table", "Mapping", "StoreRecord"), dict),
    **{"Sequence": list, "str": str, "int": int, "float": (int, float), "None": type(None)},
}
"""What JSON makes of the types of fields."""

_ALL = frozenset({"*"})
"""All fields are given: those of a record that is made and not read."""


@dataclass(frozen=True)
class Record:
    """Names with values, as a file has them.

    Attributes:
        given: Names of fields that the file has.
        others: What it has besides, of another version.
    """

    given: frozenset[str] = field(default=_ALL, kw_only=True, repr=False)
    others: Table = field(default_factory=dict, kw_only=True, repr=False)

    @staticmethod
    def nested() -> Mapping[str, Callable[[Any], Any]]:
        """How values of some fields are read, by name; not called for null."""
        return {}

    def __post_init__(self) -> None:
        if self.given is _ALL:
            object.__setattr__(self, "given", self.names())

    @classmethod
    def names(cls) -> frozenset[str]:
        """Names of the fields that a file may have."""
        return frozenset(it.name for it in fields(cls)) - {"given", "others"}

    @classmethod
    def of(cls, /, **values: Any) -> Self:
        """A record with these names, and no others."""
        own = cls.names()
        others = {name: value for name, value in values.items() if name not in own}
        kept = {name: value for name, value in values.items() if name in own}
        return cls(**kept, given=frozenset(kept), others=others)

    @classmethod
    def read(cls, content: Table) -> Self:
        """The record of a file's content.

        Raises:
            TypeError, ValueError, KeyError: If a value is not as it was written.
        """
        values = dict(content)
        types = {it.name: str(it.type).split(" | ") for it in fields(cls)}
        for name in cls.names() & values.keys():
            kinds = [kind.partition("[")[0] for kind in types[name]]
            if not any(isinstance(values[name], _KINDS[kind]) for kind in kinds):
                raise TypeError(f"{name} is {values[name]!r}, expected {' or '.join(types[name])}")
        for name, read in cls.nested().items():
            if values.get(name) is not None:
                values[name] = read(values[name])
        return cls.of(**values)

    def changed(self, **values: Any) -> Self:
        """The same with other values; names that were not there are now."""
        return replace(self, **values, given=frozenset(self.given | values.keys()))

    def without(self, *names: str) -> Self:
        """The same as if some names had never been there."""
        defaults: dict[str, Any] = {it.name: it.default for it in fields(self)}
        return replace(self, **{name: defaults[name] for name in names}, given=self.given - set(names))

    def plain(self) -> dict[str, Any]:
        """What the file says, as plain values."""
        return {**self.others, **{name: _plain(getattr(self, name)) for name in self.given}}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.plain() if isinstance(value, Record) else value


def _hashes(events: Mapping[str, Any]) -> dict[str, Hashes]:
    return {split: tuple((str(name), str(sha256)) for name, sha256 in events[split]) for split in ("train", "val")}


@dataclass(frozen=True)
class StoreRecord(Record):
    """The events of a run or of scores, and the place of their store.

    Events are known by the hashes of their files, a store by its events. A path only says where to look: seen from the
    file that keeps it, so that run and store may be moved together, and from the root, so that one of them may be.

    Attributes:
        path: The store, seen from the directory of the file; empty where it is not known.
        absolute: The same from the root.
        digest: Digest of the store when the run began.
        events: Name and sha256 of the events of each split, `train` and `val`; None where they are not known.
        feature_names: Of nodes.
        edge_feature_names: Of edges.
        filter: The network that left edges out, and the score that it asked for; None for none.
        scales: Divisors of features, by the names of their flags; None where they are not known.
        learned_from: Fingerprints of the events that its module map was learned from, by name; None of an imported
            network.
        joined_by: The shipped network whose module map joined the events; None for others.
        surveyed: What those to train on have in common, in the words of whoever keeps the store; None where that is not
            known.
    """

    path: str = ""
    absolute: str = ""
    digest: str | None = None
    events: Mapping[str, Hashes] | None = None
    feature_names: Sequence[str] = ()
    edge_feature_names: Sequence[str] = ()
    filter: Table | None = None
    scales: Mapping[str, Sequence[float]] | None = None
    learned_from: Mapping[str, str] | None = None
    joined_by: str | None = None
    surveyed: Table | None = None

    @staticmethod
    def nested() -> Mapping[str, Callable[[Any], Any]]:
        """Events are pairs."""
        return {"events": _hashes}


_NO_STORE = StoreRecord.of()


@dataclass(frozen=True)
class RunRecord(Record):
    """`run.json`: how a run began, where it stands and how it ended.

    Attributes:
        state: `starting`, `running`, `done`, `preempted` or `failed`; empty where the file does not say.
        error: Why it failed; None if it did not.
        store: Its events; with no names given before it has begun.
        tasks: What it learns (`Tasks`).
        saved: Hash of the parameters of each checkpoint that it ever saved, by step; None where that is not known.
        parameters_sha256: That of the last parameters; None before it has ended.
        steps: Steps at its end.
        seconds: Seconds of its steps.
        began_at_step: The step that this session began at.
        bitwise_problem: Why its results are the same to rounding only; None where they are to the bit.
        memory: Bytes of each rank, expected and taken.
        disk_bytes: Bytes that came from disks and went there, where tables lie in files.
        exchanges: Exchanges of a step, forward and backward, and sums.
        failed_saves: Checkpoints that could not be written.
        lost_records: Lines of `metrics.jsonl` that could not.
        skipped: Samples that were left out: `sample`, `event` and why.
        model_code: `package.module:factory` of a user's own network; None for others.
        model_options: The options of flags that the network makes use of.
        ranks, domain_size, threads: Ranks, those to an event, and threads of each.
        allocator: The C library's way with freed memory, in words.
        imported: The file and the framework that the network came from.
        argv, environment, git, host, machine, pid, started, versions: The process (`origin`).
    """

    state: str = ""
    error: str | None = None
    store: StoreRecord = _NO_STORE
    tasks: Table | None = None
    saved: Mapping[str, str] | None = None
    parameters_sha256: str | None = None
    steps: int | None = None
    seconds: float | None = None
    began_at_step: int = 0
    bitwise_problem: str | None = None
    memory: Table | None = None
    disk_bytes: Table | None = None
    exchanges: Table | None = None
    failed_saves: int = 0
    lost_records: int = 0
    skipped: Sequence[Table] = ()
    model_code: str | None = None
    model_options: Sequence[str] | None = None
    ranks: int | None = None
    domain_size: int | None = None
    threads: int | None = None
    allocator: str | None = None
    imported: Table | None = None
    argv: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    git: str | None = None
    host: str = ""
    machine: str = ""
    pid: int | None = None
    started: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)

    @staticmethod
    def nested() -> Mapping[str, Callable[[Any], Any]]:
        """The store is a record, and what was left out tables."""
        return {"store": StoreRecord.read, "skipped": lambda samples: [dict(sample) for sample in samples]}

    @property
    def learns_edges(self) -> bool:
        """Whether the network scores edges; else it tells labels alone."""
        return bool((self.tasks or {}).get("edge_weight", 1.0))


@dataclass(frozen=True)
class ScoredEvent(Record):
    """An event in `scores.json`.

    Attributes:
        event: Its name.
        path: Name of its file, in the directory of the scores.
        sha256: Hash of that file.
        logits_sha256: Hash of its logits, and of what the network said of labels, in the user's order: equal on any
            number of ranks.
        edges: Candidate edges.
        unscored: Those without a score.
        tracks: Tracks; None where none were asked for.
        event_sha256: Hash of the event's own file; empty where it is not known.
    """

    event: str = ""
    path: str = ""
    sha256: str = ""
    logits_sha256: str = ""
    edges: int = 0
    unscored: int = 0
    tracks: int | None = None
    event_sha256: str = ""


@dataclass(frozen=True)
class ScoresRecord(Record):
    """`scores.json`: the network, how it scored which events, and how good that is.

    Attributes:
        format, schema_version: What tells such a file.
        run: The directory of the run, seen from the scores.
        checkpoint: `best` or `last`.
        step: Its step.
        parameters_sha256: Hash of the parameters.
        dtype, precision: Of the network.
        mode, sectors: How events were scored, whole or in sectors, and how many.
        trained_mode, trained_sectors: How the network was trained.
        target: Target particles of its training; None for all.
        tasks: What it was trained on (`Tasks`).
        bitwise_problem: Why scores are the same to rounding only; None where they are to the bit.
        filter: The network that left edges out before this one, its `run` seen from the scores, `parameters_sha256`,
            and the `min_score` it asked for; None where all were scored.
        filters: The filter of the run's events, and of these, in words; empty for none.
        joined_by: The shipped network whose module map joined the run's events, and not these.
        outside: In what the events lie outside of what the network was trained on, in words.
        store: The place of the events.
        store_digest: Digest of their store.
        events: Each event.
        metrics: Metrics of edges and labels, by split.
        tracks: How tracks were built and counted; None without tracks.
        skipped: Events that were left out, and why.
        trained_on: How many events of each split the network was trained on; None where that is not known.
    """

    format: str = ""
    schema_version: int = 0
    run: str = ""
    checkpoint: str = ""
    step: int = 0
    parameters_sha256: str = ""
    dtype: str = ""
    precision: str = ""
    mode: str = "halo"
    sectors: int | str | None = None
    trained_mode: str = ""
    trained_sectors: int | str | None = None
    target: str | None = None
    tasks: Table | None = None
    bitwise_problem: str | None = None
    filter: Table | None = None
    filters: Sequence[str] = ("", "")
    joined_by: str | None = None
    outside: Sequence[str] = ()
    store: StoreRecord = _NO_STORE
    store_digest: str | None = None
    events: Sequence[ScoredEvent] = ()
    metrics: Mapping[str, Table] = field(default_factory=dict)
    tracks: Table | None = None
    skipped: Sequence[Table] = ()
    trained_on: Mapping[str, Mapping[str, int]] | None = None

    @staticmethod
    def nested() -> Mapping[str, Callable[[Any], Any]]:
        """Store and events are records."""
        return {"store": StoreRecord.read, "events": lambda listed: [ScoredEvent.read(it) for it in listed]}

    @property
    def learns_edges(self) -> bool:
        """Whether the network scores edges; else it tells labels alone."""
        return bool((self.tasks or {}).get("edge_weight", 1.0))

    @property
    def by_event(self) -> dict[str, ScoredEvent]:
        """The events by name."""
        return {listed.event: listed for listed in self.events}


@dataclass
class RunFile:
    """`run.json` of a run under way.

    Attributes:
        path: The file.
        record: What it says.
    """

    path: Path
    record: RunRecord = field(default_factory=RunRecord.of)

    def update(self, **changes: Any) -> None:
        """Change some entries and replace the file.

        Raises:
            OSError: If that is impossible; the file is as it was then.
        """
        self.record = self.record.changed(**changes)
        write_whole(self.path, json_bytes(self.record.plain()))


def run_record(path: Path) -> RunRecord:
    """Read a `run.json`.

    Raises:
        Problem: If it cannot be read, or does not say what it should.
    """
    return read_file(path, RunRecord.read, "copy it anew, or name another run")


def scores_record(path: Path) -> ScoresRecord:
    """Read a `scores.json`.

    Raises:
        Problem: If it cannot be read, or does not say what it should.
    """
    return read_file(path, ScoresRecord.read, "copy it anew, or run infer again")


def read_file(
    path: Path, read: Callable[[Table], T], remedy: str = "copy it anew", parse: Callable[[str], Any] = json.loads
) -> T:
    """Read a file of names with values.

    Args:
        path: The file.
        read: What is made of its content.
        remedy: What a user can do if it is damaged.
        parse: From its text to its content.

    Raises:
        Problem: Naming the file, if it cannot be read, holds something else, or a value is not as it was written.
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
    """The record that rank 0 reads, on every rank. *Collective*.

    Raises:
        Refused: On all ranks alike, if it cannot be read.
    """

    def plain() -> dict[str, Any] | None:
        record = read()
        return None if record is None else record.plain()

    kept = on_root(ranks, plain)
    return None if kept is None else RunRecord.read(kept)
