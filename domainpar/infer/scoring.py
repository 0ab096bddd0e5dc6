"""From an order to score events to a directory of scores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from domainpar.agreement import on_root
from domainpar.config import InferConfig
from domainpar.display.comparison import run_beside
from domainpar.events.own_events import kept_place, told_of
from domainpar.events.store import EventRecord
from domainpar.infer.judging import about_tracks, metrics_of_splits, not_counted, performance_of_splits
from domainpar.infer.setting_up import Job, set_up
from domainpar.parallel.world import World
from domainpar.problems import Problem
from domainpar.reco import summary
from domainpar.reco.score_files import choose_directory, publish, write_list, write_timings
from domainpar.reco.scorer import LeftOut, Outcome, Scorer


def score_store(config: InferConfig, world: World, allocator: str | None) -> None:
    """Score the events of a store and show how it goes (`domainpar.infer.infer`). *Collective*."""
    job = set_up(config, world)
    on_root(world.transport, lambda: str(choose_directory(job.scorer.directory.parent, config.overwrite)))
    if world.is_root:
        print(*summary.first_lines(world, job.scorer.store, job.records, job.about, allocator), sep="\n", flush=True)
    outcomes, left_out = _score(job.scorer, job.records, config.timeout)
    if not outcomes:
        raise Problem(f"none of {len(job.records)} events could be scored: {left_out[0].why}", event=left_out[0].event)
    if world.is_root:
        _tell(config, job, outcomes, sorted([*job.left_out, *left_out], key=lambda one: one.event))


def _score(scorer: Scorer, records: Sequence[EventRecord], timeout: float) -> tuple[dict[str, Outcome], list[LeftOut]]:
    """Score all events, with a bar and a line for each; outcomes by event, in no order. *Collective*."""
    is_root = scorer.world.is_root
    outcomes: dict[str, Outcome] = {}
    left_out: list[LeftOut] = []
    with tqdm(total=len(records), desc="score", unit="event", disable=None if is_root else True) as bar:
        for finished in scorer.rounds(records):
            scorer.world.set_deadline(timeout)  # the first events may take longer
            outcomes |= {one.scored.event: one for one in finished if isinstance(one, Outcome)}
            left_out += [one for one in finished if isinstance(one, LeftOut)]
            bar.update(len(finished))
            for one in finished if is_root else ():
                bar.write(summary.event_line(one) if isinstance(one, Outcome) else summary.left_out_line(one))
    return outcomes, left_out


def _tell(config: InferConfig, job: Job, outcomes: dict[str, Outcome], left_out: Sequence[LeftOut]) -> None:
    """Write what is said of all events together, and print it; on rank 0."""
    job.scorer.world.mark("write", len(outcomes))
    records = [record for record in job.records if record.event in outcomes]
    in_order = [outcomes[record.event] for record in records]
    metrics, performance = metrics_of_splits(records, outcomes), performance_of_splits(records, outcomes)
    seen = None if job.own is None else job.own.counted(records)
    told = {
        "metrics": metrics,
        "tracks": about_tracks(config, performance),
        "skipped": list(map(asdict, left_out)),
        "trained_on": seen,
    }
    about, directory = {**job.about, **told}, job.scorer.directory
    place = directory.parent  # where they are published
    kept = {"run": os.path.relpath(about["run"], place), "store": kept_place(job.scorer.store.path, place)}
    write_timings(directory, job.scorer.world.size, [summary.timing(outcome) for outcome in in_order])
    write_list(directory, [outcome.scored for outcome in in_order], about | kept)
    directory = publish(directory)
    run = Path(about["run"])
    beside = run_beside(run) if directory == run / "scores" else None
    lines = summary.last_lines(in_order, metrics, directory, about, beside)
    tables = summary.performance_lines(performance, config.matching_style, config.mode == "naive")
    notes = [*told_of(seen), *not_counted(records, outcomes), *summary.left_out_lines(left_out)]
    print(*tables, *notes, *lines, sep="\n", flush=True)
