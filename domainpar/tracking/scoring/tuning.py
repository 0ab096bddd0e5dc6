"""Cuts of track building chosen on validation events, and kept with the run in `tracks.json`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from domainpar.common.atomic_files import json_bytes, write_whole
from domainpar.common.models import plain
from domainpar.common.problems import Problem
from domainpar.common.words import PROGRESS_LOG, progress, several
from domainpar.runs.own_files import TUNED
from domainpar.runs.records import Table, read_file
from domainpar.tracking.config.infer import CountedTrackFlags, TrackFlags
from domainpar.tracking.events.store import EventRecord, StoredEvent, WholeEvent
from domainpar.tracking.reco.event_scores import Scores
from domainpar.tracking.reco.performance.counts import TrackCounts, count_tracks, total
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.rates import METRICS
from domainpar.tracking.reco.performance.truth import truth_of
from domainpar.tracking.reco.tracks import REASONS, TrackOptions, shared_hits, tracks_from_scores
from domainpar.tracking.scoring.event_tracks import hits_of
from domainpar.tracking.scoring.scorer import LeftOut, Scorer

GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "greedy": {"score_cut": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7), "max_chi2": (6.0, 12.0, 25.0)},
    "cc": {"score_cut": (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)},
}
"""The values of each method's cuts that are tried, all with all."""

QUALITIES = (0.0, 8.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0)
"""Those of `min_quality`, which is tried with each of them."""

RATES = {
    "efficiency": "efficiency", "fakes": "fake_rate", "unlabelled": "unlabelled_rate", "duplicates": "duplicate_rate",
}  # fmt: skip
"""What cuts are evaluated by: the names of metrics in `tracks.json`, and in `METRICS`."""

ENOUGH_TARGETS = 10_000
"""Target particles of the events that are taken: a rate of 0.9 is then known to 0.3 %, and two cuts, which see the same
particles, differ by less chance than that."""

CUTS = ("score_cut", "max_chi2", "min_quality")
"""The flags that may be tuned."""

REFINED, EXTENDED = ", refined", ", extended"


def grid(options: TrackOptions, given: dict[str, float]) -> Iterator[dict[str, float]]:
    """The cuts that are tried for a method; what is given stays."""
    of_method = GRIDS[options.method] | {"min_quality": QUALITIES}
    axes = {name: values for name, values in of_method.items() if name not in given}
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values)) | given


def tune(
    scorer: Scorer,
    records: Sequence[EventRecord],
    config: CountedTrackFlags,
    options: TrackOptions,
    cuts: TrackCuts,
    timeout: float,
) -> dict[str, Any]:
    """Score validation events and choose the best cuts. *Collective*.

    The best have the most efficiency less fakes, unlabelled tracks and duplicates; with `max_fake_rate`, the most
    efficiency among those that have no more fakes and unlabelled tracks, or the fewest where all have more. Events are
    taken in the order of the store until they have `ENOUGH_TARGETS`: the same ones on any number of ranks.

    Args:
        scorer: What scores the events; its tracks and evaluations are not used.
        config: The flags: a cut that is given stays, and the rates are of its matching style.
        options: The other options of track building.
        cuts: Which particles and tracks count.
        timeout: Seconds that a rank waits for the others.

    Returns:
        `cuts` by name, and each of `RATES` there, over how many `events`; `quality`, what that consisted of.

    Raises:
        Problem: If no event could be scored, or has truth.
    """
    tried = list(grid(options, given_cuts(config)))

    def evaluate(event: StoredEvent, scores: Scores) -> dict[str, Any]:
        truth = truth_of(event, 1)
        if truth is None:
            raise event.place.problem("it does not tell the particle of each hit", "tuning takes events with truth")
        hits, scored = hits_of(WholeEvent(event)), scores.edge_scored
        built: dict[str, dict[str, Any]] = {}
        edges = scores.edge_index[:, scored], scores.edge_logit[scored]
        of_all: TrackOptions | None = None
        for number, values in enumerate(tried):
            PROGRESS_LOG.phase = f"event {event.event_id}: {number + 1} of {len(tried)} cuts"
            chosen = replace(options, **values)  # type: ignore[arg-type]
            # One least quality after the other is tried on the same tracks.
            if of_all != (of_all := replace(chosen, min_quality=0.0)):
                tracks = tracks_from_scores(*edges, hits, of_all)
            kept = tracks_from_scores(*edges, hits, chosen, first=tracks)
            counts = count_tracks(kept, truth, cuts, shared_hits(kept, *edges, hits, chosen))
            built[str(number)] = plain(counts)
        return built

    evaluated: list[tuple[str, dict[str, Any]]] = []
    tuner, targets = replace(scorer, finish=lambda _, scores: scores, evaluate=evaluate), 0
    at_once = scorer.world.size * scorer.events_per_call
    with progress(f"tune {len(tried)} cuts", len(records), "event", scorer.world.is_root) as advance:
        for first in range(0, len(records), at_once):
            now: dict[str, dict[str, Any]] = {}
            for outcomes in tuner.rounds(records[first : first + at_once]):
                scorer.world.set_deadline(timeout)
                done = [outcome for outcome in outcomes if not isinstance(outcome, LeftOut)]
                now |= {outcome.scored.event: outcome.evaluation for outcome in done if outcome.evaluation is not None}
                advance(len(outcomes))
            for name in (record.event for record in records[first : first + at_once] if record.event in now):
                if targets < ENOUGH_TARGETS:
                    evaluated.append((name, now[name]))
                    targets += TrackCounts.read(now[name]["0"]).styles[config.matching_style].targets
            if targets >= ENOUGH_TARGETS:
                break
    if not evaluated:
        raise Problem(f"none of {len(records)} validation events could be scored", "tune on a store that has good ones")
    totals = [
        total(TrackCounts.read(evaluation[str(number)]) for _, evaluation in evaluated) for number in range(len(tried))
    ]
    # Nothing to divide by, no targets or no tracks, is 0.
    rates = [
        {name: METRICS[metric].value(counts, config.matching_style) or 0.0 for name, metric in RATES.items()}
        for counts in totals
    ]
    best = max(range(len(tried)), key=lambda number: merit(rates[number], config.max_fake_rate))  # the first of equals
    about = {"style": config.matching_style, "events": len(evaluated), "quality": list(REASONS)}
    return {"cuts": tried[best], **rates[best], **about}


def merit(rates: dict[str, float], max_fake_rate: float | None) -> float:
    """What cuts are chosen by; negative for too many fakes. Whether truth lacks a hit or it is noise is not known."""
    fakes = rates["fakes"] + rates["unlabelled"]
    if max_fake_rate is None:
        return rates["efficiency"] - fakes - rates["duplicates"]
    return rates["efficiency"] if fakes <= max_fake_rate else -fakes


def given_cuts(config: TrackFlags) -> dict[str, float]:
    """The cuts that flags give."""
    return {name: value for name in CUTS if (value := getattr(config, name)) is not None}


def key_of(options: TrackOptions) -> str:
    """The name that cuts are kept by: refined and extended tracks have cuts of their own."""
    return options.method + REFINED * options.refine + EXTENDED * options.extend


def keep(run: Path, options: TrackOptions, chosen: dict[str, Any]) -> None:
    """Write the cuts that were chosen for such tracks into the directory of their run; those of others stay."""
    content = read(run) | {key_of(options): chosen}
    write_whole(run / TUNED, json_bytes(content))


def read(run: Path) -> dict[str, Any]:
    """What was chosen for a run, by `key_of`; nothing if it was never tuned.

    Raises:
        Problem: If the file cannot be read.
    """
    path = run / TUNED
    if not path.is_file():
        return {}

    def checked(content: Table) -> dict[str, Any]:
        for key, chosen in content.items():
            # Refuses a method that is none, what is no cut, or has no possible value.
            TrackOptions(**{"method": key.removesuffix(EXTENDED).removesuffix(REFINED), **chosen["cuts"]})
            for name in ("min_quality", "max_chi2"):
                if chosen["cuts"].get(name) and chosen.get("quality") != list(REASONS):
                    what = f"{name} {chosen['cuts'][name]:g} of {key!r} was chosen when other things counted as quality"
                    then = ", ".join(chosen.get("quality", ["which, it does not say"]))
                    raise ValueError(f"{what} ({then}; now {', '.join(REASONS)})")
        return dict(content)

    return read_file(path, checked, "remove it, and tune again")


def describe(options: TrackOptions, chosen: dict[str, Any]) -> str:
    """The choice, in a sentence for the user."""
    values = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in chosen["cuts"].items())
    rates = ", ".join(f"{name} {chosen[name]:.4f}" for name in RATES)
    over = f"{several(chosen['events'], 'validation event')}, {chosen['style']}"
    return f"tuned    : {key_of(options)}, {values} ({over}: {rates})"
