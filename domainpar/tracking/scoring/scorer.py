"""Scores of many events: dealt to data groups, each event shared by the ranks of its group, finished on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from domainpar.common import faults
from domainpar.common.agreement import gather
from domainpar.common.compiling import clock
from domainpar.common.models import read_as
from domainpar.parallel.world import World
from domainpar.runs.records import ScoredEvent
from domainpar.tracking.events.store import EventRecord, EventStore, StoredEvent
from domainpar.tracking.part_loading import BadEvent, open_together
from domainpar.tracking.reco.event_scores import Scores
from domainpar.tracking.scoring.score_files import write_scores

EventEvaluator = Callable[[StoredEvent, Scores], dict[str, Any] | None]
"""Compares an event's scores and tracks with its truth, in plain JSON values; called on the rank that has them."""

Finish = Callable[[StoredEvent, Scores], Scores]
"""Adds tracks to the scores of an event, and writes other files of them; called on the rank that has them."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one event."""

    scored: ScoredEvent  # its file
    # time from opening the event to its scores, and of tracks built from them; compiling, waiting for other events,
    # comparing and writing are not in it. Events of one call have an equal share of its time each.
    seconds_all: float
    evaluation: dict[str, Any] | None  # its counts against the truth, plain JSON values
    hits: int = 0  # its hits
    # seconds_network, seconds_tracks: of these the network, and building tracks from its scores; on one rank
    seconds_network: float = 0.0
    seconds_tracks: float | None = None
    # seconds of each stage that there was: `load` (reading, planning, gathering scores), `filter` (the network before
    # this one, and dropping edges), `network`, `building` of tracks, `following` them, `fitting` their parameters,
    # `writing` scores, and `comparing` with truth and with the tracks of other finders
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LeftOut:
    """An event that was not scored, since it cannot be used: its name, and what is wrong with it."""

    event: str
    why: str


@dataclass(frozen=True, eq=False)
class Scorer:
    """Scores the events of a store with one network, a file each.

    A group of P ranks makes P calls of the network one after the other, all ranks together, and the scores of each go
    to another rank. Then every rank finishes its own events: tracks, evaluation, files. So tracks cannot depend on the
    ranks, P events are finished at a time, and no rank ever holds the scores of two calls.
    """

    # `score_events` with its network and options: called with the events of a call, the transport of the ranks that
    # share them, and `root`
    score: Callable[..., list[Scores] | None]
    store: EventStore  # the events
    world: World  # the ranks
    directory: Path  # for the files
    finish: Finish  # called with an event and its scores before they are written; returns what to write
    evaluate: EventEvaluator  # called with an event and what was written
    origin: Mapping[str, Any] = field(default_factory=dict)  # attributes of every file that say where scores come from
    # for an event that cannot be used: `fail` ends the work, `skip` leaves it out
    on_bad_event: Literal["fail", "skip"] = "fail"
    events_per_call: int = 1  # events of a call, at most

    def rounds(self, records: Sequence[EventRecord]) -> Iterator[list[Outcome | LeftOut]]:
        """Score events, a call for each rank at a time. *Collective*; every rank gets every outcome.

        Raises:
            BadEvent: If an event cannot be read or computed on, and is not to be left out, on the ranks where it
                failed; RanksFailed on those that share it with them.
            RuntimeError: If an edge of it did not get exactly one score.
        """
        # Events of like size at the same time. Then all meet: a long silence of one group would look like a hang.
        by_size = sorted(records, key=lambda record: -record.num_edges)
        num_groups, of_group = self.world.num_data_groups, self.world.domain.size
        of_call = min(self.events_per_call, -(-len(by_size) // num_groups))  # no group goes without
        calls = [by_size[first : first + of_call] for first in range(0, len(by_size), of_call)]
        for first in range(0, len(calls), self.world.size):
            ours = calls[first + self.world.data_group : first + self.world.size : num_groups]
            answers = gather(self.world.transport, self._round(ours, first // num_groups))
            # By size again: the ranks of a group hold its calls one after the other.
            in_order = [answers[group * of_group + rank] for rank in range(of_group) for group in range(num_groups)]
            yield [
                read_as(Outcome, answer) if "scored" in answer else read_as(LeftOut, answer)
                for of_rank in in_order
                for answer in of_rank
            ]

    def _round(self, calls: Sequence[Sequence[EventRecord]], number: int) -> list[Outcome | LeftOut]:
        """Score some events with the ranks of this group; the outcomes of this rank's own events. *Collective*.

        Args:
            calls: The events of each call, at most as many calls as the group has ranks; each rank finishes one.
            number: Calls of the group before.
        """
        own: list[tuple[EventRecord, Scores | LeftOut, float]] = []
        for root, records in enumerate(calls):
            self.world.mark("score", number + root, ", ".join(record.event for record in records))
            results = self._called(records, root)
            own = results if root == self.world.domain.rank else own
        answers: list[Outcome | LeftOut] = []
        for record, scores, seconds in own:
            if isinstance(scores, LeftOut):
                answers.append(scores)
            else:
                self.world.mark("write", number + self.world.domain.rank, record.event)
                answers.append(self._finished(record, scores, seconds))
        return answers

    def _called(self, records: Sequence[EventRecord], root: int) -> list[tuple[EventRecord, Scores | LeftOut, float]]:
        """The scores of the events of a call on `root`, and the seconds of each. *Collective*."""
        began = clock()
        try:
            with ExitStack() as opened:
                # All of it is read, so all is looked through first: later nobody waits for a rank that cannot read on.
                events = [
                    opened.enter_context(open_together(self.store, record, self.world.domain, check_bytes=True))
                    for record in records
                ]
                scores = self.score(events, self.world.domain, root=root)
        except BadEvent as bad:
            if len(records) > 1:  # one by one: the bits of the good ones are the same
                return [result for record in records for result in self._called([record], root)]
            if self.on_bad_event == "fail":
                raise bad.for_this_rank() from bad.__cause__
            return [(records[0], LeftOut(records[0].event, bad.what), 0.0)]
        if scores is None:
            return []
        return [(record, of_event, (clock() - began) / len(records)) for record, of_event in zip(records, scores)]

    def _finished(self, record: EventRecord, scores: Scores, seconds: float) -> Outcome:
        """Find the tracks of an event, write and evaluate them; on one rank."""
        began = clock()
        with self.store.open(record) as event:
            scores = self.finish(event, scores)
            faults.reach("write")
            began_to_write = clock()
            scored = write_scores(self.directory, scores, {**self.origin, "event_sha256": record.sha256})
            writing = clock() - began_to_write
            evaluation = self.evaluate(event, scores)
        of, seconds_tracks = scores.seconds, scores.seconds.get("tracks")
        following, fitting = of.get("following", 0.0), of.get("fitting", 0.0)
        stages = {
            "load": seconds - of["network"] - of.get("filter", 0.0),
            "filter": of.get("filter"),
            "network": of["network"],
            "building": None if seconds_tracks is None else seconds_tracks - following,
            "following": of.get("following"),
            "fitting": of.get("fitting"),
            "writing": writing,
            "comparing": clock() - began - (seconds_tracks or 0.0) - fitting - writing,
        }
        return Outcome(
            scored=scored,
            seconds_all=seconds + (seconds_tracks or 0.0),
            evaluation=evaluation,
            hits=len(scores.hit_id),
            seconds_network=scores.seconds["network"],
            seconds_tracks=seconds_tracks,
            stages={name: spent for name, spent in stages.items() if spent is not None},
        )
