"""Scores of many events: dealt to data groups, each event shared by the ranks of its group, finished on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from domainpar import faults
from domainpar.agreement import gather
from domainpar.compiling import clock
from domainpar.events.store import EventRecord, EventStore, StoredEvent
from domainpar.parallel.part_loading import BadEvent, open_together
from domainpar.parallel.world import World
from domainpar.reco.score_files import ScoredEvent, write_scores
from domainpar.reco.scores import EventScores

Judge = Callable[[StoredEvent, EventScores], dict[str, Any] | None]
"""Compares an event's scores and tracks with its truth, in plain JSON values; called on the rank that has them."""

Finish = Callable[[StoredEvent, EventScores], EventScores]
"""Adds tracks to the scores of an event, and writes other files of them; called on the rank that has them."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one event.

    Attributes:
        scored: Its file.
        seconds: Time from opening the event to its scores, and of tracks built from them; compiling, waiting for other
            events, comparing and writing are not in it.
        judgement: Its counts against the truth, plain JSON values.
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

    A group of P ranks scores P events one after the other, all ranks together, and the scores of each go to another
    rank. Then every rank finishes its own event: tracks, judgement, files. So tracks cannot depend on the ranks, P
    events are finished at a time, and no rank ever holds the scores of two.

    Attributes:
        score: `score_event` with its network and options: called with an event, the transport of the ranks that share
            it, and `root`.
        store: The events.
        world: The ranks.
        directory: For the files.
        finish: Called with an event and its scores before they are written; returns what to write.
        judge: Called with an event and what was written.
        origin: Attributes of every file that say where scores come from.
        on_bad_event: For an event that cannot be used: `fail` ends the work, `skip` leaves it out.
    """

    score: Callable[..., EventScores | None]
    store: EventStore
    world: World
    directory: Path
    finish: Finish
    judge: Judge
    origin: Mapping[str, Any] = field(default_factory=dict)
    on_bad_event: Literal["fail", "skip"] = "fail"

    def rounds(self, records: Sequence[EventRecord]) -> Iterator[list[Outcome | LeftOut]]:
        """Score events, one for each rank at a time. *Collective*; every rank gets every outcome.

        Raises:
            BadEvent: If an event cannot be read or computed on, and is not to be left out, on the ranks where it
                failed; RanksFailed on those that share it with them.
            RuntimeError: If an edge of it did not get exactly one score.
        """
        # Events of like size at the same time. Then all meet: a long silence of one group would look like a hang.
        by_size = sorted(records, key=lambda record: -record.num_edges)
        num_groups, of_group = self.world.num_data_groups, self.world.domain.size
        for first in range(0, len(by_size), self.world.size):
            ours = by_size[first + self.world.data_group : first + self.world.size : num_groups]
            answers = gather(self.world.transport, self._round(ours, first // num_groups))
            # By size again: the ranks of a group hold its events one after the other.
            in_order = [answers[group * of_group + rank] for rank in range(of_group) for group in range(num_groups)]
            yield [
                Outcome(**answer | {"scored": ScoredEvent(**answer["scored"])})
                if "scored" in answer
                else LeftOut(**answer)
                for answer in in_order
                if answer is not None
            ]

    def _round(self, records: Sequence[EventRecord], number: int) -> dict[str, Any] | None:
        """Score some events with the ranks of this group; the outcome of this rank's own event. *Collective*.

        Args:
            records: At most as many as the group has ranks; each rank finishes one.
            number: Events that the group has scored before.
        """
        own: tuple[EventScores, float] | None = None
        answer: Outcome | LeftOut | None = None
        rank = self.world.domain.rank
        for root, record in enumerate(records):
            self.world.mark("score", number + root, record.event)
            began = clock()
            try:
                # All of it is read, so all is looked through first: later nobody waits for a rank that cannot read on.
                with open_together(self.store, record, self.world.domain, check_bytes=True) as event:
                    scores = self.score(event, self.world.domain, root=root)
            except BadEvent as bad:
                if self.on_bad_event == "fail":
                    raise bad.for_this_rank() from bad.__cause__
                answer = LeftOut(record.event, bad.what) if root == rank else answer
                continue
            if scores is not None:
                own = scores, clock() - began
        if own is not None:
            self.world.mark("write", number + rank, records[rank].event)
            answer = self._finished(records[rank], *own)
        return None if answer is None else asdict(answer)

    def _finished(self, record: EventRecord, scores: EventScores, seconds: float) -> Outcome:
        """Find the tracks of an event, write and judge them; on one rank."""
        with self.store.open(record) as event:
            scores = self.finish(event, scores)
            faults.reach("write")
            scored = write_scores(self.directory, scores, {**self.origin, "event_sha256": record.sha256})
            judgement = self.judge(event, scores)
        seconds_tracks = scores.seconds.get("tracks")
        return Outcome(
            scored=scored,
            seconds=seconds + (seconds_tracks or 0.0),
            judgement=judgement,
            hits=len(scores.hit_id),
            seconds_network=scores.seconds["network"],
            seconds_tracks=seconds_tracks,
        )
