"""The lines that `infer` prints, made on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from domainpar.common.words import between, exactness_text, several, this_python
from domainpar.parallel.world import World
from domainpar.runs.records import ScoresRecord
from domainpar.tracking.events.store import EventRecord, EventStore
from domainpar.tracking.reco.performance.counts import TrackCounts
from domainpar.tracking.reco.performance.rates import short, table
from domainpar.tracking.scoring.score_files import LIST, SCORES_SUFFIX
from domainpar.tracking.scoring.scorer import LeftOut, Outcome
from domainpar.tracking.training.metrics import EDGE_METRICS
from domainpar.tracking.training.summary import ranks_line
from partitioners import number_of_sectors


def first_lines(
    world: World,
    store: EventStore,
    records: Sequence[EventRecord],
    record: ScoresRecord,
    allocator: str | None,
    targets: str | None,
) -> list[str]:
    """Ranks, network and events, the allocator, and the target particles of tracks; None without."""
    sizes = [record.num_edges for record in records]
    mode = "whole events, halo exchange"
    if record.mode == "naive":
        mode = f"APPROXIMATE: {record.sectors} sectors per event, edges between them get no score"
    in_bf16 = " with edges in bf16" if record.precision == "bf16" else ""
    trained = "" if record.trained_mode == record.mode else f", trained in {record.trained_mode} mode"
    sectors = record.trained_sectors
    trained_on = several(number_of_sectors(sectors or 1), "sector")
    otherwise = (
        f"note: trained on {trained_on} of an event, scored on whole events here; "
        f"as it was trained: --mode naive --sectors {sectors}"
    )
    (learned, here), left = record.filters, record.filter
    unlike = (
        f"note: trained on edges {f'that filter {learned} left' if learned else 'of no filter'}, scored here on those "
        f"{f'that filter {here} left' if here else 'of none'}: python -m domainpar.prepare --source scores"
    )
    of_filter = ""
    if left is not None:
        kept = f"edges with a score of at least {left['min_score']:g} are left"
        of_filter = f"filter   : {left['run']}, {kept}, parameters sha256 {left['parameters_sha256'][:16]}"
    return [
        f"{ranks_line(world)}, {mode}",
        f"network  : {record.run}, {record.checkpoint} checkpoint (step {record.step}){trained}, "
        f"{record.dtype}{in_bf16}, parameters sha256 {record.parameters_sha256[:16]}",
        *([of_filter] if of_filter else []),
        *([otherwise] if sectors and record.mode == "halo" else []),
        *([unlike] if learned != here else []),
        *other_events(record.outside, record.joined_by),
        *([] if allocator is None else [f"allocator: {allocator}"]),
        f"exactness: {exactness_text(record.bitwise_problem)}",
        f"events   : {store.path}: {len(sizes)} of its {several(len(store), 'event')}, "
        f"{between(sizes, 'candidate edge')}",
        *([] if targets is None else [f"targets  : {targets}"]),
    ]


def other_events(outside: Sequence[str], joined_by: str | None) -> list[str]:
    """That events lie outside of what a network was trained on, and in what.

    Args:
        outside: In what (`events.store.outside`).
        joined_by: The name of the module map that comes with the network; None for none, and if it joined these.
    """
    if not outside:
        return []
    alike = f"join hits as for it (prepare --module-map {joined_by}), " if joined_by else ""
    return [
        f"WARNING: events lie outside of what the network was trained on (in brackets): {'; '.join(outside)}. It may "
        f"lose tracks and find more fakes; {alike}train on such events, or begin with its weights (train --init)"
    ]


def event_line(outcome: Outcome | LeftOut) -> str:
    """One event, scored or left out: the same line on any number of ranks."""
    if isinstance(outcome, LeftOut):
        return f"event {outcome.event}: left out: {outcome.why}"
    scored = outcome.scored
    unscored = f", {scored.unscored:,} of them unscored" if scored.unscored else ""
    edges = f"{scored.edges:,} edges{unscored}" if scored.unscored < scored.edges else several(outcome.hits, "node")
    tracks = "" if scored.tracks is None else f", {several(scored.tracks, 'track')}"
    return f"event {scored.event}: {edges}{tracks}, logits sha256 {scored.logits_sha256[:16]}"


def performance_lines(
    performance: Mapping[str, Mapping[str, TrackCounts]], style: str, *, naive: bool, shared: bool
) -> list[str]:
    """Rates of tracks, a table for each split; whether they lack edges between sectors, and may share hits."""
    note = ["Naive mode: network and perfect scores lack the edges between sectors; approximate."] if naive else []
    lines = []
    for split, counts in performance.items():
        lines += [f"tracks, {split} events:", *table(counts, style), *note]
        if shared:
            of_finders = ", ".join(f"{finder} {of.shared:,}" for finder, of in counts.items())
            lines.append(f"Shared hits, counted for each track after the first: {of_finders}.")
        lines.append("")
    return lines


def last_lines(
    outcomes: Sequence[Outcome],
    directory: Path,
    record: ScoresRecord,
    beside: Path | None,
    other_files: str | None,
) -> list[str]:
    """Totals, metrics, the directory and the next command; `beside` is a run to compare this one with.

    `other_files` says what was written besides the scores.
    """
    seconds = [outcome.seconds_all for outcome in outcomes]
    edges = sum(outcome.scored.edges for outcome in outcomes)
    unscored = sum(outcome.scored.unscored for outcome in outcomes)
    share = f" ({unscored / edges:.2%}; edge_scored is false, score 0)" if unscored else ""
    of_edges = f"{edges:,} edges, {unscored:,} without a score{share}; " if record.learns_edges else ""
    and_tracks = "" if record.tracks is None else " and tracks"
    stages = {name: sum(outcome.stages.get(name, 0.0) for outcome in outcomes) for name in outcomes[0].stages}
    built = between([outcome.scored.tracks or 0 for outcome in outcomes], "track")
    of_stages = (
        f"{name}{f' {built}' * (name == 'building')} {seconds_of / len(outcomes):.3g}"
        for name, seconds_of in stages.items()
    )
    lines = [
        f"scored {several(len(outcomes), 'event')}, {of_edges}"
        f"{sum(seconds) / len(seconds):.3g} s per event on average from its file to scores{and_tracks}, "
        f"{max(seconds):.3g} s at most",
        f"seconds per event: {', '.join(of_stages)}",
        *metric_lines(record),
    ]
    blind = sum(outcome.evaluation is None or outcome.evaluation["edges"] is None for outcome in outcomes)
    if blind and record.learns_edges:
        wanted = " for --target" if record.target else ""
        lines.append(f"{several(blind, 'event')} without truth to count against{wanted}")
    run = quote(str(record.run))
    if beside is not None:  # the report is of the run on whole events, with the naive one at its side
        whole, naive = (beside, record.run) if record.mode == "naive" else (record.run, beside)
        run = f"{quote(str(whole))} {quote(str(naive))} --png pictures"
    first = directory / min(outcome.scored.path for outcome in outcomes)
    shown = "edge_score[:10]" if record.tracks is None else "track_id[:10]"
    if not record.learns_edges:
        shown = "labels"
    elsewhere = "" if directory == Path(record.run) / "scores" else f" --scores {quote(str(directory))}"
    opened = f"from domainpar import read_scores; print(read_scores('{first}').{shown})"
    return [
        *lines,
        f"scores in {directory}: {LIST} and one event<name>{SCORES_SUFFIX} per event, edges in the order of your files",
        *([] if other_files is None else [f"beside them: {other_files}"]),
        f'read one: {this_python()} -c "{opened}"',
        f"next: {this_python()} -m domainpar.report {run}{elsewhere}",
    ]


def metric_lines(record: ScoresRecord) -> list[str]:
    """The metrics of each split: of edges, of what a filter left, of labels, and losses of graph construction."""
    of_edges, of_filter, of_labels, of_segments = [], [], [], []
    approximate = ", approximate" if record.mode == "naive" else ""
    for split, values in record.metrics.items():
        if "target_edges" in values:
            names = (metric.mean or metric.name for metric in EDGE_METRICS)
            shown = " ".join(f"{name}={short(values[name])}" for name in names)
            of_edges.append(
                f"split={split} events={values['events']} {shown} (score above 0.5, against "
                f"{values['target_edges']:,} target edges among the candidates; AUC: the mean over events{approximate})"
            )
        if (of := values.get("filter")) is not None:  # of edges whose truth is known
            share = short(of["targets_kept"] / of["targets"] if of["targets"] else None)
            of_filter.append(
                f"split={split} filter kept {of['kept']:,} of {of['edges']:,} edges, {of['targets_kept']:,} of "
                f"{of['targets']:,} target edges among them ({share}); the others count as lost"
            )
        if labels := values.get("labels"):
            figures = [(label, *it) for label, each in labels.items() for it in each.items() if it[0] != "known"]
            shown = " ".join(f"{label}_{figure}={short(value)}" for label, figure, value in figures)
            counts = {name: each["known"] for name, each in labels.items()}
            known = ", ".join(f"{'some' if of is None else f'{of:,}'} {name}" for name, of in counts.items())
            of_labels.append(f"split={split} events={values['events']} {shown} (of those known: {known})")
        if of := values.get("segments"):  # what edge metrics do not see
            held, passing = (of[name] / max(of["segments"], 1) for name in ("in_graph", "passing"))
            lost = "the target particles of --track-target have no segments"
            if of["segments"]:
                lost = f"{held:.4f} of {of['segments']:,} segments of the target particles of --track-target are "
                lost += f"candidate edges, {passing:.4f} also have a score above 0.5"
            of_segments.append(f"split={split} against the truth: {lost}")
    return of_edges + of_filter + of_labels + of_segments
