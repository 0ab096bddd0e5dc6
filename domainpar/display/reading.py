"""What lies in the directory of a run: read once, checked, frozen. No figures, no torch.

Only `run.json` has to be there. What else is missing is told in `RunFiles.missing`: a sentence each, with how to get
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from domainpar.config import ConfigError, target_conditions
from domainpar.display.checking import check_scores, check_timings
from domainpar.display.event_data import EventData, read_event_data
from domainpar.events.own_events import Hashes, OwnEvents, difference, find_store, not_there, own_events, places
from domainpar.events.store import EventRecord, EventStore, StoreError
from domainpar.reco.performance.counts import TrackCounts
from domainpar.reco.performance.matching import STYLES, TrackCuts
from domainpar.training.rundir import state_of
from domainpar.words import this_python

Table = Mapping[str, Any]
T = TypeVar("T")

SPLITS = ("val", "test", "train")
"""Splits in the order in which one wants to look at them: what training did not see comes first."""


@dataclass(frozen=True, eq=False)
class ScoreFiles:
    """The directory that `infer` wrote.

    Attributes:
        directory: Where it is.
        about: What `scores.json` says.
        timings: What `timings.json` says; None where it is missing.
    """

    directory: Path
    about: Table
    timings: Table | None

    @property
    def approximate(self) -> bool:
        """Whether events were cut into independent sectors."""
        return self.about.get("mode") == "naive"

    @property
    def events(self) -> dict[str, Table]:
        """What `scores.json` says of each event, by name."""
        return {str(listed["event"]): listed for listed in self.about["events"]}

    @property
    def store(self) -> Table:
        """What is kept of the store that was scored: places and digest; empty where nothing is."""
        kept = self.about.get("store") or {}
        return {"digest": self.about.get("store_digest"), **(kept if isinstance(kept, dict) else {"path": kept})}

    @property
    def tracks(self) -> Table | None:
        """What was done to find tracks: method, options, who found them; None without tracks."""
        found: Table | None = self.about.get("tracks")
        return found

    @cached_property
    def performance(self) -> dict[str, dict[str, TrackCounts]]:
        """Counts of tracks by split and by who found them: `network`, `classical`, `ceiling`; empty without tracks.

        Raises:
            ValueError: If they were written by another version.
        """
        splits: Table = (self.tracks or {}).get("performance") or {}
        return {
            split: {name: TrackCounts.from_json(counts) for name, counts in by_finder.items()}
            for split, by_finder in splits.items()
        }


@dataclass(frozen=True)
class Tracking:
    """How tracks are compared with particles.

    Attributes:
        cuts: Which tracks and particles count, and how much of their hits must agree.
        style: The one of `styles.STYLES` that was asked for.
    """

    cuts: TrackCuts
    style: str


@dataclass(frozen=True, eq=False)
class RunFiles:
    """A run: what it was asked to do, how it went, and what was found with its network.

    Attributes:
        directory: Where it is.
        about: What `run.json` says.
        settings: What `config.yaml` says; empty where it is missing.
        records: The lines of `metrics.jsonl`, in order; none where it is missing.
        scores: What `infer` wrote; None where it did not run.
        store: The events: those that were scored, or else those that were trained on; None where they are not there.
        missing: What is not there and how to get it, a sentence each.
    """

    directory: Path
    about: Table
    settings: Table
    records: tuple[Table, ...]
    scores: ScoreFiles | None
    store: EventStore | None
    missing: tuple[str, ...]

    @property
    def mode(self) -> str:
        """`halo` or `naive`; `halo` where nothing is said."""
        return str(self.settings.get("mode") or "halo")

    @property
    def approximate(self) -> bool:
        """Whether the network was trained on independent sectors of events."""
        return self.mode == "naive"

    @property
    def ranks_of_an_event(self) -> int:
        """Ranks that shared an event in training."""
        return int(self.about.get("domain_size") or 1)

    @property
    def target(self) -> str:
        """Target particles of the training, as the user wrote them; empty for every particle."""
        told = self.scores.about.get("target") if self.scores else self.settings.get("target")
        return str(told or "")

    @cached_property
    def tracking(self) -> Tracking:
        """What was counted of tracks, and so what the event display shows; the defaults without tracks."""
        counts = [one for by_finder in self.performance.values() for one in by_finder.values()]
        if not counts:
            return Tracking(TrackCuts(), STYLES[0])
        first = counts[0]
        cuts = TrackCuts(first.min_hits, first.fraction, _conditions(first.target), first.majority_pt)
        tracks: Table = (self.scores.tracks if self.scores else None) or {}
        style = tracks.get("matching_style")
        return Tracking(cuts, style if style in STYLES else STYLES[0])

    @cached_property
    def own(self) -> OwnEvents | None:
        """The events of the run; None where they are not known."""
        return own_events(self.about, self.store)

    def known_as(self, record: EventRecord) -> str:
        """The split of an event, and what the event was to the training: by its bytes, whatever store it lies in."""
        if self.own is None:
            return f"{record.split} split of its store"
        seen = self.own.split_of(record)
        if seen == record.split:
            return f"{seen} split"
        what = {"train": "but trained on", "val": "but validated with"}.get(seen or "", "not seen in training")
        return f"{record.split} split, {what}"

    @property
    def performance(self) -> dict[str, dict[str, TrackCounts]]:
        """`ScoreFiles.performance`; empty without scores."""
        return {} if self.scores is None else self.scores.performance

    def records_of(self, split: str) -> list[Table]:
        """The records of one split, in order."""
        return [record for record in self.records if record.get("split") == split]

    def split_to_judge(self) -> str | None:
        """The split whose scores are shown: of those scored, the first of `SPLITS`; None without scores or events."""
        return next((split for split in SPLITS if self.events(split)), None) if self.scores else None

    def events(self, split: str) -> list[EventRecord]:
        """The events of one split that can be shown: where there are scores, those that were scored."""
        if self.store is None:
            return []
        records = [record for record in self.store.events() if record.split == split]
        return records if self.scores is None else [record for record in records if record.event in self.scores.events]

    def choose_event(self, name: str | None = None) -> EventRecord | None:
        """The event of a name; without a name the first event of the first of `SPLITS` that has one.

        Returns:
            The event; None if no name is given and there is no event.

        Raises:
            ValueError: If there is no event of this name, or it was not scored.
        """
        known = [record for split in SPLITS for record in self.events(split)]
        if name is None:
            return known[0] if known else None
        for record in known:
            if record.event == name:
                return record
        names = ", ".join(record.event for record in known[:8]) + (", ..." if len(known) > 8 else "")
        raise ValueError(f"{self.directory} has no event {name!r} to show; it has {names or 'none'}.")

    def read_event(self, record: EventRecord) -> EventData:
        """One event with its truth, its scores and its tracks, as far as they are there.

        Raises:
            StoreError: If a file of it is missing or damaged.
            ValueError: If the scores are not those of this event, or the target cannot be understood.
        """
        if self.store is None:
            raise ValueError(f"{self.directory}: its events are not there; name their place with --store.")
        scores = None
        if self.scores is not None and record.event in self.scores.events:
            scores = self.scores.directory / str(self.scores.events[record.event]["path"])
        return read_event_data(self.store, record, scores, _conditions(self.target), self.tracking.cuts.target)


def read_run_files(directory: Path, scores: Path | None = None, store: Path | None = None) -> RunFiles:
    """Read what lies in the directory of a run.

    Args:
        directory: The run.
        scores: Directory of its scores. Default: `scores` in the run.
        store: The events. Default: where the scores, or else the run, say they are.

    Raises:
        ValueError: If there is no run, or one of its files is there but cannot be read; if a directory that was named
            is not what it should be.
    """
    missing: list[str] = []
    written = _required(directory / "run.json")
    about = {**written, "state": state_of(directory, written)}
    settings = _settings(directory / "config.yaml", missing)
    records = _records(directory / "metrics.jsonl", missing)
    found_scores = _scores(directory, about, scores, missing)
    found_store = _store(directory, about, found_scores, store, missing)
    if found_scores is not None and found_scores.tracks is None:
        missing.append(
            f"No tracks, so no efficiency of tracks: {this_python()} -m domainpar.infer --run {directory} "
            "--tracks walk --overwrite"
        )
    if found_scores is not None and found_scores.timings is None:
        missing.append("No times of the inference: timings.json is not beside scores.json; infer writes it.")
    return RunFiles(directory, about, settings, records, found_scores, found_store, tuple(missing))


def _required(path: Path) -> Table:
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a run: it has no run.json; name the directory of one.")
    return _json(path)


def _json(path: Path) -> Table:
    content = _read(path, json.loads)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; it is not what it should be.")
    return content


def _read(path: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}.") from error


def _settings(path: Path, missing: list[str]) -> Table:
    if not path.is_file():
        missing.append("No config.yaml: the run ended before it wrote its configuration.")
        return {}
    settings: Any = _read(path, yaml.safe_load)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds no settings.")
    return settings


def _records(path: Path, missing: list[str]) -> tuple[Table, ...]:
    """The lines of `metrics.jsonl`; the last one of a run that is under way may not be finished and is left out."""
    if not path.is_file():
        missing.append("No metrics.jsonl: the run has not finished a step.")
        return ()
    lines = _read(path, str.splitlines)
    finished = [line for line in lines[:-1] if line] + [line for line in lines[-1:] if line.endswith("}")]
    try:
        records = tuple(json.loads(line) for line in finished)
        _ = [(record["split"], record["step"]) for record in records]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}.") from error
    return records


def _scores(run: Path, of_run: Table, named: Path | None, missing: list[str]) -> ScoreFiles | None:
    directory = named or run / "scores"
    if not (directory / "scores.json").is_file():
        if named is not None:
            raise ValueError(f"{named} holds no scores: it has no scores.json; name what infer wrote.")
        missing.append(
            "No scores, so no ROC curve, no efficiency and no tracks in the event display: "
            f"{this_python()} -m domainpar.infer --run {run} --tracks walk"
        )
        return None
    about = _json(directory / "scores.json")
    check_scores(about, directory / "scores.json", run, of_run)
    path = directory / "timings.json"
    timings = _json(path) if path.is_file() else None
    if timings is not None:
        check_timings(timings, path)
    return ScoreFiles(directory, about, timings)


def _store(
    run: Path, about: Table, scores: ScoreFiles | None, named: Path | None, missing: list[str]
) -> EventStore | None:
    """The store that holds the events that were scored, or else those of the run, by their hashes."""
    kept, beside, events = _kept_store(run, about, scores)
    path = named or find_store(kept, beside, events)
    if path is None and not places(kept, beside):
        missing.append("No events: the run does not say where they are; name their place with --store.")
        return None
    if path is None:
        missing.append(
            f"No events: {not_there(kept, beside)}, so neither the event display nor the quality of the partition can "
            "be shown; name its place with --store."
        )
        return None
    try:
        store = EventStore(path)
    except StoreError as error:
        if named is not None:
            raise
        missing.append(f"No events: {error}")
        return None
    if (differs := difference(store, events, kept.get("digest"))) is not None:
        text = f"{path} holds other events than these ({differs[1]})"
        if named is not None:
            raise ValueError(f"{text}; name the store that was used.")
        missing.append(f"No events: {text}; name the store that was used with --store.")
        return None
    return store


def _kept_store(run: Path, about: Table, scores: ScoreFiles | None) -> tuple[Table, Path, Hashes]:
    """What the scores, or else the run, keep of their store; where they keep it; and the events it must hold."""
    if scores is not None and scores.store:
        hashes = tuple((name, str(listed.get("event_sha256") or "")) for name, listed in scores.events.items())
        told = all(sha256 for _, sha256 in hashes)  # an earlier version kept the digest of the store alone
        return scores.store, scores.directory, hashes if told else ()
    own = OwnEvents.read(about.get("store") or {})
    return about.get("store") or {}, run, () if own is None else own.train + own.val


def _conditions(target: str) -> Table:
    try:
        return target_conditions(target) if target else {}
    except ConfigError as error:
        raise ValueError(f"{error}; {error.hint}.") from error
