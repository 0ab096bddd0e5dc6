"""The files in the directory of a run: read once, checked, frozen. No figures, no torch.

Only `run.json` has to be there. `RunFiles.missing` names everything else that is missing: a sentence each, with how to
get it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from domainpar.common.words import some_of, this_python
from domainpar.runs.directory import state_of
from domainpar.runs.records import (
    RUN_FILE,
    SCORES_FILE,
    Hashes,
    RunRecord,
    ScoredEvent,
    ScoresRecord,
    Table,
    read_file,
    run_record,
)
from domainpar.tracking.config import Conditions, ConfigError
from domainpar.tracking.config.yaml_text import loaded_yaml
from domainpar.tracking.display.event_data import EventData, read_event_data
from domainpar.tracking.events.own_events import (
    InMaps,
    OwnEvents,
    difference,
    find_store,
    not_there,
    own_events,
    places,
)
from domainpar.tracking.events.store import EventRecord, EventStore
from domainpar.tracking.reco.performance.counts import TrackCounts, read_performance, total
from domainpar.tracking.reco.performance.matching import STYLES, TrackCuts

SPLITS = ("val", "test", "train")
"""Splits in the order of interest: events that training did not see come first."""


EXACT = "halo (exact)"
"""Whole events, as one rank would do them."""

MOST_EDGES = 12_000_000
"""Of more edges the scores of the first events only are read, and the report says so."""


@dataclass(frozen=True, eq=False)
class ScoreFiles:
    """A directory of scores."""

    directory: Path  # its path
    record: ScoresRecord  # what `scores.json` says
    timings: Table | None  # the content of `timings.json`; None where it is missing

    @cached_property
    def events(self) -> dict[str, ScoredEvent]:
        """The scored events, by name."""
        return self.record.by_event


@dataclass(frozen=True)
class Tracking:
    """The comparison of tracks with particles."""

    cuts: TrackCuts  # conditions on tracks and particles, and the share of their hits that must agree
    style: str  # one of `styles.STYLES`
    score_cut: float = 0.0  # score that an edge had to exceed for the track builder to look at it


@dataclass(frozen=True, eq=False)
class RunFiles:
    """A run: its configuration, its records, and the scores and tracks of its network."""

    directory: Path  # its path
    record: RunRecord  # what `run.json` says, with the state as it is now
    settings: Table  # the content of `config.yaml`; empty where it is missing
    records: tuple[Table, ...]  # the lines of `metrics.jsonl`, in order; none where it is missing
    scores: ScoreFiles | None  # the output of `infer`; None where it did not run
    # the events: those that were scored, or else those that were trained on; None where they are not there
    store: EventStore | None
    missing: tuple[str, ...]  # a sentence for each part that is not there, with how to get it
    name: str = ""  # its name beside another run; empty where its mode is the difference
    # what of it was not counted as in the run that it lies beside: `scores`, `training`
    counted_otherwise: frozenset[str] = frozenset()

    def called(self, how: str, of: str = "scores") -> str:
        """The run beside another: how it was trained or scored, what `of` says was counted."""
        return ": ".join(filter(None, (self.name, how))) + ", counted otherwise" * (of in self.counted_otherwise)

    def in_legend(self, how: str, other: RunFiles | None, of: str = "scores") -> str:
        """As `called`, in a chart: of a run without another beside it, and of one with a name, nobody asks whether it
        is exact."""
        return self.called("" if how == EXACT and (other is None or self.name) else how, of)

    @property
    def learns_edges(self) -> bool:
        """Whether the network scores edges; else it predicts labels alone."""
        return self.record.learns_edges

    @property
    def approximate(self) -> bool:
        """Whether the network was trained on independent sectors of events."""
        return self.settings.get("mode") == "naive"

    @property
    def scored_naive(self) -> bool:
        """Whether its scores are of independent sectors, however it was trained; False without scores."""
        return self.scores is not None and self.scores.record.mode == "naive"

    @property
    def how_trained(self) -> str:
        """How the run trained and validated, which need not be how it scored."""
        return f"naive, {self.settings.get('sectors')} sectors (approximate)" if self.approximate else EXACT

    @property
    def how_scored(self) -> str:
        """How the run trained and scored: exactly on whole events, or approximately on sectors, and of which kind."""
        if self.scores is not None and self.scored_naive:
            return f"naive, {self.scores.record.sectors} sectors (approximate)"
        if self.scores is not None and self.approximate:
            return f"trained naive on {self.settings.get('sectors')} sectors (approximate), scored whole"
        return self.how_trained

    @property
    def kind(self) -> str:
        """How the run was scored, in the few words that a legend has room for."""
        if self.scored_naive:
            return "naive (approximate)"
        return "trained naive (approximate)" if self.approximate else EXACT

    @property
    def target(self) -> str:
        """Target particles of the training, as the user wrote them; empty for every particle."""
        target = self.scores.record.target if self.scores else self.settings.get("target")
        return str(target or "")

    @cached_property
    def tracking(self) -> Tracking:
        """How tracks were counted, and so how the event display matches them; the defaults without tracks."""
        first = next((counts for by_finder in self.performance.values() for counts in by_finder.values()), None)
        if first is None:
            return Tracking(TrackCuts(), STYLES[0])
        tracks: Table = (self.scores.record.tracks if self.scores else None) or {}
        style = tracks.get("matching_style")
        score_cut = (tracks.get("options") or {}).get("score_cut", 0.0)
        return Tracking(first.cuts, style if style in STYLES else STYLES[0], score_cut)

    @cached_property
    def own(self) -> OwnEvents | None:
        """The events of the run; None where they are not known."""
        return own_events(self.record)

    def describe_split(self, record: EventRecord) -> str:
        """The split of an event, and its part in the training: by its bytes, whatever store it lies in."""
        if self.own is None:
            return f"{record.split} split of its store"
        own_split = self.own.split_of(record)
        if own_split == record.split:
            return f"{own_split} split"
        if own_split is not None:
            return f"{record.split} split, but {'trained on' if own_split == 'train' else 'validated with'}"
        assert self.store is not None  # a record is one of a store
        in_maps = InMaps.of(self.record, self.store)
        with self.store.open(record) as event:
            if in_maps.hold(event):
                return f"{record.split} split, not trained on, but the candidate edges were learned from it"
        return f"{record.split} split, not seen in training"

    @cached_property
    def performance(self) -> dict[str, dict[str, TrackCounts]]:
        """Counts of tracks by split and finder: `network`, `ckf`, `perfect_scores`; empty without tracks.

        Raises:
            ValueError: If they were written by another version.
        """
        return read_performance(self.scores.record.tracks if self.scores else None)

    def records_of(self, split: str) -> list[Table]:
        """The records of one split, in order."""
        return [record for record in self.records if record.get("split") == split]

    def splits_to_show(self, known: Container[str] | None = None) -> tuple[str, ...]:
        """The splits whose scored events are shown together: all with nothing that the network was trained on, or else
        the first of `SPLITS`; none without scores or events.

        Args:
            known: Splits to choose from; by default those of which there are events.
        """
        trained_on = (self.scores.record.trained_on if self.scores else None) or {}
        there = [split for split in SPLITS if (split in known if known is not None else self.events(split))]
        unseen = [split for split in there if split in trained_on and not trained_on[split]["trained_on"]]
        return tuple(unseen or there[:1]) if self.scores else ()

    def pooled(self, splits: Sequence[str]) -> dict[str, TrackCounts]:
        """Counts of tracks in the events of some splits together, of each finder that all of these have."""
        each = [self.performance.get(split, {}) for split in splits]
        finders = [finder for finder in (each[0] if each else {}) if all(finder in of for of in each)]
        return {finder: total(of[finder] for of in each) for finder in finders}

    def events(self, split: str) -> list[EventRecord]:
        """The events of one split that can be shown: where there are scores, those that were scored."""
        if self.store is None:
            return []
        records = [record for record in self.store.events() if record.split == split]
        return records if self.scores is None else [record for record in records if record.event in self.scores.events]

    def events_to_read(self, splits: Sequence[str]) -> tuple[list[EventRecord], int]:
        """The first events of some splits that can be shown, of `MOST_EDGES` together, and how many more there are."""
        records = [record for split in splits for record in self.events(split)]
        # The first event is read however large it is: a report without any curve would say less.
        total = np.cumsum([record.num_edges for record in records])
        few = [record for record, edges in zip(records, total) if edges <= MOST_EDGES or record is records[0]]
        return few, len(records) - len(few)

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
        names = some_of([record.event for record in known]) or "none"
        raise ValueError(f"{self.directory} has no event {name!r} to show; it has {names}.")

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
            scores = self.scores.directory / self.scores.events[record.event].path
        try:
            target = Conditions(self.target).value if self.target else {}
        except ConfigError as error:
            raise ValueError(f"{error}; {error.hint}.") from error
        return read_event_data(self.store, record, scores, target, self.tracking.cuts.target)


def read_run_files(directory: Path, scores: Path | None = None, store: Path | None = None) -> RunFiles:
    """Read the files in the directory of a run.

    Args:
        scores: Directory of its scores. Default: `scores` in the run.
        store: The events. Default: those that the scores, or else the run, name.

    Raises:
        ValueError: If there is no run, or one of its files is there but cannot be read; if a directory that was named
            is not one of scores or events.
    """
    if not (directory / RUN_FILE).is_file():
        raise ValueError(f"{directory} is not a run: it has no {RUN_FILE}; name the directory of one.")
    missing: list[str] = []
    record = run_record(directory / RUN_FILE)
    # A killed process leaves `running` behind; the state as it is now is another.
    record = record.changed(state=state_of(directory, record))
    settings: Table = {}

    def of_yaml(text: str) -> Any:
        try:
            return loaded_yaml(text)
        except yaml.YAMLError as error:
            raise ValueError(error) from error

    if (directory / "config.yaml").is_file():
        settings = read_file(directory / "config.yaml", dict, parse=of_yaml)
    else:
        missing.append("No config.yaml: the run ended before it wrote its configuration.")

    def of_lines(text: str) -> dict[str, list[Table]]:
        written = text.splitlines()
        # The last line of a run that is under way may be half written.
        finished = [line for line in written[:-1] if line] + [line for line in written[-1:] if line.endswith("}")]
        records = [json.loads(line) for line in finished]
        _ = [(record["split"], record["step"]) for record in records]
        return {"records": records}

    records: tuple[Table, ...] = ()
    if (directory / "metrics.jsonl").is_file():
        records = read_file(directory / "metrics.jsonl", lambda content: tuple(content["records"]), parse=of_lines)
    else:
        made_by = f"{record.imported['framework']} trained the network" if record.imported else ""
        missing.append(f"No metrics.jsonl: {made_by or 'the run has not finished a step'}.")
    score_files = _scores(directory, record, scores, missing)
    event_store = _store(directory, record, score_files, store, missing)
    if score_files is not None and score_files.record.tracks is None and record.learns_edges:
        missing.append(
            f"No tracks, so no efficiency of tracks: {this_python()} -m domainpar.infer --run {directory} "
            "--tracks greedy --overwrite"
        )
    if score_files is not None and score_files.timings is None:
        missing.append("No times of the inference: timings.json is not beside scores.json; infer writes it.")
    return RunFiles(directory, record, settings, records, score_files, event_store, tuple(missing))


def _scores(run: Path, of_run: RunRecord, named: Path | None, missing: list[str]) -> ScoreFiles | None:
    """The scores, all that is shown of them being there, and made with weights of this run."""
    directory = named or run / "scores"
    path, of_times = directory / SCORES_FILE, directory / "timings.json"
    if not path.is_file():
        if named is not None:
            raise ValueError(f"{named} holds no scores: it has no {SCORES_FILE}; name a directory that infer wrote.")
        missing.append(
            "No scores, so no ROC curve, no efficiency and no tracks in the event display: "
            f"{this_python()} -m domainpar.infer --run {run}"
            + ("" if of_run.store.path else " --store STORE")
            + (" --tracks greedy" if of_run.learns_edges else "")
        )
        return None

    def shown(content: Table) -> ScoresRecord:
        record = ScoresRecord.read(content)
        if lacking := {"events", "metrics"} - record.content.keys():
            raise ValueError(f"it does not say {min(lacking)}")
        for listed in record.events:
            # A file of scores must not be able to make us open a file elsewhere.
            if not listed.path or Path(listed.path).name != listed.path or not isinstance(listed.event, str):
                what = f"the file of event {listed.event!r} is {listed.path!r}, expected a name in this directory"
                raise ValueError(what)
        _ = [(str(split), int(of_split["events"])) for split, of_split in record.metrics.items()]
        read_performance(record.tracks)
        return record

    record = read_file(path, shown, "run infer again")
    sha256 = record.parameters_sha256
    # Wherever both lie now. A shipped run does not name its weights, and is trusted.
    if of_run.saved is not None and sha256 not in of_run.saved.values():
        origin = f" ({os.path.normpath(directory / record.run)})" if record.run else ""
        raise ValueError(
            f"{path} holds the scores of another run{origin}, with weights (sha256 {sha256[:12]}) that {run} never "
            "had; show that run, or infer with this one."
        )

    def times(content: Table) -> Table:
        _ = [(of["event"], float(of["seconds_network"]), float(of["seconds_all"])) for of in content["events"]]
        return content

    timings = read_file(of_times, times, "run infer again") if of_times.is_file() else None
    return ScoreFiles(directory, record, timings)


def _store(
    run: Path, of_run: RunRecord, scores: ScoreFiles | None, named: Path | None, missing: list[str]
) -> EventStore | None:
    """The store that holds the events that were scored, or else those of the run, by their hashes."""
    if scores is not None and scores.record.store.path:
        kept, beside = scores.record.store, scores.directory
        hashes: Hashes = tuple((name, listed.event_sha256) for name, listed in scores.events.items())
    else:
        kept, beside = of_run.store, run
        own = OwnEvents.read(kept)
        hashes = () if own is None else own.train + own.val
    path = named or find_store(kept, beside, hashes)
    if path is None:
        reason = "the run does not say where its store is"
        if places(kept, beside):
            reason = f"{not_there(kept, beside)}, so neither an event nor the quality of the partition can be shown"
        missing.append(f"No events: {reason}; name its place with --store.")
        return None
    try:
        store = EventStore(path)
        if (differs := difference(store, hashes)) is None:
            return store
        raise ValueError(
            f"{path} holds other events than these ({differs[1]}); name with --store the one that was used."
        )
    except ValueError as error:
        if named is not None:
            raise  # a store that was asked for is never passed over
        missing.append(f"No events: {error}".replace("\nhint: ", "; "))  # one sentence of the page
        return None
