"""Scores of many events: dealt to data groups, each event shared by the ranks of its group."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from domainpar import faults
from domainpar.compiling import clock
from domainpar.events.store import EventRecord, EventStore, StoredEvent
from domainpar.parallel.part_loading import BadEvent, open_together
from domainpar.parallel.world import World
from domainpar.reco.score_files import ScoredEvent, write_scores
from domainpar.reco.scores import EventScores, score_event
from domainpar.reco.tracks import TrackOptions

Judge = Callable[[StoredEvent, EventScores], dict[str, Any] | None]
"""Says more of an event, in plain JSON values; called where its scores are."""

Finish = Callable[[StoredEvent, EventScores], EventScores]
"""Adds to the scores of an event what else is to be written, and writes other files of it; called where they are."""


@dataclass(frozen=True)
class Outcome:
    """What became of one event.

    Attributes:
        scored: Its file.
        seconds: Time from opening the event to its scores and tracks; compiling, comparing and writing are not in it.
        judgement: What the judge said of it.
        hits: Its hits.
        seconds_network, seconds_tracks: Of these the network, and building tracks from its scores; on one rank.
    """

    scored: ScoredEvent
    seconds: float
    judgement: dict[str, Any] | None
    hits: int = 0
    seconds_network: float = 0.0
    seconds_tracks: float | None = None


@dataclass(frozen=True)
class LeftOut:
    """An event that was not scored, since it cannot be used: its name, and what is wrong with it."""

    event: str
    why: str


@dataclass(frozen=True, eq=False)
class Scorer:
    """Scores the events of a store with one network, a file each.

    Attributes:
        model: The network, on the world's device.
        store: The events.
        world: The ranks.
        directory: Where the files go.
        sectors: Independent sectors of an event in naive mode; None for whole events.
        grouping: How tiles are grouped into parts.
        dtype: Type of features, weights and logits.
        seed: Seed of the grouping.
        origin: What every file says of its origin.
        judge: What else to say of an event.
        tracks: How tracks are built; None for none.
        finish: Called with an event and its scores before they are written; returns what to write.
        on_bad_event: What becomes of an event that cannot be used: `fail` ends the work, `skip` leaves it out.
    """

    model: nn.Module
    store: EventStore
    world: World
    directory: Path
    sectors: int | None = None
    grouping: str = "contiguous"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    origin: Mapping[str, Any] = field(default_factory=dict)
    judge: Judge | None = None
    tracks: TrackOptions | None = None
    finish: Finish | None = None
    on_bad_event: Literal["fail", "skip"] = "fail"

    def rounds(self, records: Sequence[EventRecord]) -> Iterator[list[Outcome | LeftOut]]:
        """Score events, one for each data group at a time. *Collective*; every rank gets every outcome.

        Raises:
            BadEvent: If an event cannot be read or computed on, and is not to be left out, on the ranks that found it
                so; RanksFailed on those that share it with them.
            RuntimeError: If an edge of it did not get exactly one score.
        """
        # Events of like size at the same time. Then all meet: a long silence of one group would look like a hang.
        by_size = sorted(records, key=lambda record: -record.num_edges)
        num_groups, group = self.world.num_data_groups, self.world.data_group
        for number, first in enumerate(range(0, len(by_size), num_groups)):
            ours = by_size[first : first + num_groups][group : group + 1]
            answers = [self._score(record, number) for record in ours]
            yield [_outcome(answer) for answer in self.world.transport.all_gather(b"".join(answers)) if answer]

    def _score(self, record: EventRecord, number: int) -> bytes:
        """Score one event with the ranks of this group; the outcome as JSON on its first rank, else nothing."""
        self.world.mark("score", number, record.event)
        try:
            answer = self._answer(record)
        except BadEvent as bad:
            if self.on_bad_event == "fail":
                raise bad.for_this_rank() from bad.__cause__
            answer = {"left_out": asdict(LeftOut(record.event, bad.what))} if self.world.domain.rank == 0 else None
        return b"" if answer is None else json.dumps(answer).encode()

    def _answer(self, record: EventRecord) -> dict[str, Any] | None:
        """What became of one event, on the first rank of this group."""
        began = clock()
        # All of it is read, so all of it is looked through first: later nobody waits for one that cannot read on.
        with open_together(self.store, record, self.world.domain, check_bytes=True) as event:
            scores = score_event(
                self.model,
                event,
                self.world.domain,
                num_sectors=self.sectors,
                grouping=self.grouping,
                device=self.world.device,
                dtype=self.dtype,
                seed=self.seed,
                tracks=self.tracks,
            )
            return None if scores is None else self._finished(event, scores, record, clock() - began)

    def _finished(self, event: StoredEvent, scores: EventScores, record: EventRecord, seconds: float) -> dict[str, Any]:
        """Write and judge the scores of an event; on one rank."""
        faults.reach("write")
        scores = scores if self.finish is None else self.finish(event, scores)
        scored = write_scores(self.directory, scores, {**self.origin, "event_sha256": record.sha256})
        judgement = None if self.judge is None else self.judge(event, scores)
        outcome = Outcome(
            scored, seconds, judgement, len(scores.hit_id), scores.seconds["network"], scores.seconds.get("tracks")
        )  # fmt: skip
        return asdict(outcome)


def _outcome(answer: bytes) -> Outcome | LeftOut:
    found = json.loads(answer)
    if "left_out" in found:
        return LeftOut(**found["left_out"])
    return Outcome(**{**found, "scored": ScoredEvent(**found["scored"])})
