"""Events scored as they come into a store, each written when it is done, until a request to stop.

    stream.json                        the network and options that the files are of; figures of the last session
    event000001001.scores.zarr.zip     ... as `infer` writes it, byte for byte

What is done is known by the files alone: they appear whole, so a session that is killed is taken up by the next one,
and no event is written twice. Nothing is kept of an event but its name.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.common.agreement import gather, on_all, on_root
from domainpar.common.atomic_files import write_whole
from domainpar.common.models import read_as
from domainpar.common.problems import Problem
from domainpar.common.words import several
from domainpar.parallel.signals import StopFlag
from domainpar.runs.own_files import STREAM, strangers_in_scores
from domainpar.runs.records import read_file
from domainpar.tracking.config import InferConfig
from domainpar.tracking.events.store import (
    MANIFEST,
    SUFFIX,
    EventRecord,
    EventStore,
    Split,
    event_file_name,
    read_arrays,
)
from domainpar.tracking.scoring import infer_summary as summary
from domainpar.tracking.scoring.score_files import LIST, SCORES_SUFFIX
from domainpar.tracking.scoring.scorer import LeftOut, Outcome, Scorer
from domainpar.tracking.training.monitor.failure import fail_alike

LOOK_EVERY = 0.5
"""Seconds between two looks at a store that has nothing new."""

TELL_EVERY = 10.0
"""Seconds between two lines of figures."""

ROUNDS_AT_ONCE = 4
"""Rounds of events between two looks at the store."""

LATENCIES = 10_000
"""Events, the last of which make the percentiles."""


@dataclass
class Figures:
    """How a session goes, on rank 0."""

    busy: float = 0.0  # seconds that events were worked on
    events: int = 0  # events scored
    left_out: dict[str, str] = field(default_factory=dict)  # events left out, and why
    # seconds of the last events from being seen in the store to being written
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES))

    def as_record(self) -> dict[str, Any]:
        """Plain values."""
        rate = self.events / max(self.busy, 1e-9)
        record: dict[str, Any] = {"events": self.events, "events_per_second": rate, "left_out": self.left_out}
        if self.latencies:
            seconds = np.percentile(np.array(self.latencies), [50, 95, 99])
            record["seconds"] = {**dict(zip(("p50", "p95", "p99"), seconds.tolist())), "longest": max(self.latencies)}
        return record

    def line(self) -> str:
        """The same in words."""
        record = self.as_record()
        parts = [several(self.events, "event")]
        if self.events:
            parts[0] += f", {record['events_per_second']:.3g} per second while there were some"
        if "seconds" in record:
            parts.append(", ".join(f"{name} {seconds:.3g} s" for name, seconds in record["seconds"].items()))
        if self.left_out:
            parts.append(f"{len(self.left_out)} left out")
        return "stream   : " + "; ".join(parts)


def stream(config: InferConfig, scorer: Scorer, identity: dict[str, Any], stop: StopFlag) -> Figures:
    """Score what comes into a store until a stop is asked, or nothing came for `idle_seconds`. *Collective*.

    Args:
        scorer: Scores events of the store as it is now.
        identity: What the files of a directory have in common, plain values.
        stop: Asks to end after the events under way.

    Returns:
        The figures of this session; those of rank 0 count.

    Raises:
        Refused: On all ranks alike, before anything is computed, if the directory holds files of other scores.
    """
    world, figures, path = scorer.world, Figures(), scorer.store.path
    on_root(world.transport, lambda: _claim(scorer.directory, identity))
    inbox = _Inbox(scorer.directory, None if config.split == "all" else config.split)
    told, most = time.monotonic(), ROUNDS_AT_ONCE * world.size * scorer.events_per_call
    while not any(gather(world.transport, stop.requested)):
        seen = on_root(world.transport, lambda: inbox.look(path, most, config.idle_seconds))
        if "problem" in seen:  # not refused: work has begun
            fail_alike(world, Problem(seen["problem"], "what is done stays; start it again when the store is there"), 0)
        if seen["over"]:
            break
        if not seen["records"]:
            time.sleep(LOOK_EVERY)
            continue
        began, records = time.monotonic(), read_as(list[EventRecord], seen["records"])
        store = on_all(world.transport, lambda: EventStore(path, check_files=False)).only(records)
        of_batch = replace(scorer, store=store, evaluate=lambda event, scores: None)
        for finished in of_batch.rounds(records):
            world.set_deadline(config.timeout)
            for outcome in finished if world.is_root else ():
                print(summary.event_line(outcome), flush=True)
                inbox.done(outcome, figures)
        figures.busy += time.monotonic() - began
        if world.is_root and time.monotonic() - told >= TELL_EVERY:
            told = time.monotonic()
            print(figures.line(), flush=True)
    if world.is_root:
        content = {**identity, "session": figures.as_record()}
        write_whole(scorer.directory / STREAM, (json.dumps(content, indent=1) + "\n").encode())
    return figures


def _claim(directory: Path, identity: dict[str, Any]) -> None:
    """Make the directory ready; on rank 0.

    Raises:
        Problem: If it holds files of other scores, or others.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if (stranger := next(strangers_in_scores(directory), None)) is not None:
        raise Problem(f"{directory} holds files that are not scores ({stranger.name})", "choose another --out")
    if (directory / LIST).exists():
        raise Problem(f"{directory} holds finished scores", "choose another --out, or remove them")
    path = directory / STREAM
    if not path.exists():
        if any(directory.glob(f"*{SCORES_SUFFIX}")):
            raise Problem(
                f"{directory} holds scores of which no {STREAM} says what they are of", "choose another --out"
            )
        write_whole(path, (json.dumps(identity, indent=1) + "\n").encode())
        return
    there = read_file(path, dict, "copy it anew, or run infer again")
    if differing := [name for name in identity if there.get(name) != identity[name]]:
        name = differing[0]
        raise Problem(
            f"{directory} holds a stream of another {name}: {there.get(name)}, now {identity[name]}",
            "choose another --out",
        )


class _Inbox:
    """What rank 0 knows of events: those that are done, and when the others were first seen."""

    def __init__(self, directory: Path, split: Split | None) -> None:
        self._directory, self._split = directory, split
        self._waiting: dict[str, tuple[float, EventRecord]] = {}  # since when, in the order of the store
        self._over: set[str] = set()
        self._stamp: tuple[int, int] | None = None
        self._quiet_since = time.monotonic()

    def look(self, path: Path, most: int, patience: float | None) -> dict[str, Any]:
        """Some events that are not done, in the order of the store; `over`: none came for so many seconds.

        Or the `problem` of a store that is gone.
        """
        try:
            about = (path / MANIFEST).stat()
        except OSError as error:
            return {"problem": f"store {path} cannot be read any more: {error.strerror}"}
        if (stamp := (about.st_mtime_ns, about.st_size)) != self._stamp:
            self._stamp, now = stamp, time.monotonic()
            for record in EventStore(path, check_files=False).events(self._split):
                if record.event not in self._over and record.event not in self._waiting:
                    if self._is_done(record):
                        self._over.add(record.event)
                    else:
                        self._waiting[record.event] = now, record
        first = list(islice(self._waiting.items(), 2 * most))
        ahead = [path / record.path for _, (_, record) in first[most:]]
        threading.Thread(target=_read_ahead, args=(ahead,), daemon=True).start()
        now = time.monotonic()
        if first:
            self._quiet_since = now
        over = not first and patience is not None and now - self._quiet_since >= patience
        # Whole records: other ranks may see an older list of events, on a shared file system.
        return {"records": [record for _, (_, record) in first[:most]], "over": over}

    def done(self, outcome: Outcome | LeftOut, figures: Figures) -> None:
        """An event is scored, or left out."""
        name = outcome.event if isinstance(outcome, LeftOut) else outcome.scored.event
        since, _ = self._waiting.pop(name)
        self._over.add(name)
        self._quiet_since = time.monotonic()
        if isinstance(outcome, LeftOut):
            figures.left_out[name] = outcome.why
        else:
            figures.events += 1
            figures.latencies.append(time.monotonic() - since)

    def _is_done(self, record: EventRecord) -> bool:
        """Whether there are scores of this very event: one that was prepared anew is scored anew."""
        path = self._directory / (event_file_name(record.event).removesuffix(SUFFIX) + SCORES_SUFFIX)
        return path.exists() and read_arrays(path, names=())[1].get("event_sha256") == record.sha256


def _read_ahead(paths: Sequence[Path]) -> None:
    """Have the system read files that come next, and forget them."""
    for path in paths:
        try:
            with path.open("rb") as file:
                while file.read(2**20):
                    pass
        except OSError:
            return  # the reader of the file reports it
