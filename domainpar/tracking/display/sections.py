"""The page of a run, section by section, in the order in which a physicist asks. No HTML, no matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from domainpar.common.words import several, some_of, this_python
from domainpar.runs.own_files import PROFILE
from domainpar.runs.records import read_file
from domainpar.tracking.cost.cuts import Cut
from domainpar.tracking.display import run_facts as summary
from domainpar.tracking.display.chart import Chart
from domainpar.tracking.display.comparison import differing, label_runs, not_alike
from domainpar.tracking.display.edges import edge_chart, edge_curves
from domainpar.tracking.display.event_data import EventData
from domainpar.tracking.display.event_view import EventView, event_view, split_of
from domainpar.tracking.display.finders import BORDERS, RATES, Finder, finders_of, target_text, title_of, track_charts
from domainpar.tracking.display.losses import layer_table, lost_table
from domainpar.tracking.display.resolutions import CHARTS as OF_FITS
from domainpar.tracking.display.resolutions import resolution_charts
from domainpar.tracking.display.run_facts import ReportTable, percent, short
from domainpar.tracking.display.run_files import RunFiles
from domainpar.tracking.display.training import (
    MIB,
    layer_chart,
    operations,
    profile_chart,
    rank_chart,
    rank_times,
    training_chart,
)
from domainpar.tracking.reco.performance.lost import REASONS, SEGMENT
from domainpar.tracking.reco.performance.matching import STYLES
from domainpar.tracking.reco.performance.rates import METRICS, PERFECT_SCORES

NUM_PARTS = (2, 4, 8, 16)
"""Ranks for which the cost of a split is shown."""

NO_EDGES = "The network predicts labels and scores no edges; the first section has the metrics of its labels."

STYLE_MEANINGS = {
    "atlas": "atlas: most hits of the track are of the particle",
    "one_way": "one_way: most hits of the particle are on the track",
    "two_way": "two_way: both",
}

INFERENCE = {
    "all": ("seconds_all", "{:.3g} s"),
    "hits": ("hits", "{:,}"),
    "edges": ("edges", "{:,}"),
    "tracks found": ("tracks", "{:,}"),
}
"""Columns on an inferred event, beside those of its stages: its key in `timings.json`, and the form of the number."""


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    name: str  # its id in the page
    title: str  # its heading
    lead: tuple[str, ...] = ()  # an introduction: one paragraph each
    approximate: str = ""  # the approximation in it, named beside the heading; empty where there is none
    tables: tuple[ReportTable, ...] = ()  # its tables
    # buttons that choose a variant of the charts: value and label; none without variants
    styles: tuple[tuple[str, str], ...] = ()
    charts: tuple[Chart, ...] = ()  # its charts
    commands: tuple[tuple[str, str], ...] = ()  # commands to type, by their purpose
    event: EventView | None = None  # the event display
    absent: str = ""  # why there is nothing to show, and what to do; empty where there is
    left_out: Mapping[str, str] = field(default_factory=dict)  # pictures without content by name, and why


@dataclass(frozen=True)
class Page:
    """The whole report."""

    directory: Path  # the run
    facts: str  # the run in a line
    sections: tuple[Section, ...]  # its parts
    missing: tuple[str, ...] = ()  # a sentence for each part that the run lacks, with how to get it


def build_page(
    run: RunFiles, other: RunFiles | None = None, event_name: str | None = None, num_parts: int | None = None
) -> Page:
    """The report of a run, from which both the page and the pictures are made.

    Args:
        other: A run to lay beside it where both have the same; the page says what was not counted alike.
        event_name: The event to draw. Default: the first one that training did not see.
        num_parts: Ranks to split it over. Default: the run's own, or its sectors, or 8.

    Raises:
        StoreError: If the file of an event is damaged.
        ValueError: If there is no such event, or scores and events do not belong together.
    """
    both: tuple[Section, ...] = ()
    if other is not None:
        run, other = label_runs(run, other)
        both = (_comparison(run, other),)
    record = run.choose_event(event_name)
    event = None if record is None else run.read_event(record)
    sections = (
        _summary(run, other),
        *both,
        _training(run, other),
        _edges(run, other),
        _tracks(run, other),
        *_losses(run),
        _event(run, event, "" if record is None else run.describe_split(record), num_parts),
        partition(run, event),
        _ranks(run),
        *_profile(run),
    )
    facts = f"{run.how_scored} · {summary.STATES.get(run.record.state, 'state unknown')}"
    missing = run.missing + (() if other is None else tuple(f"{other.directory}: {text}" for text in other.missing))
    return Page(run.directory, facts, sections, missing)


def _absent(name: str, title: str, why: str, *pictures: str) -> Section:
    return Section(name, title, absent=why, left_out=dict.fromkeys(pictures, why))


def _why_missing(run: RunFiles, *subjects: str, otherwise: str) -> str:
    """The sentence that says why there is nothing to show: the first that is about one of the subjects."""
    sentences = (text for subject in subjects for text in run.missing if text.startswith(f"No {subject}"))
    return next(sentences, otherwise)


def _approximate(run: RunFiles, other: RunFiles | None = None) -> str:
    """The approximation of a run, or of the one beside it; empty where both are exact."""
    if run.approximate or run.scored_naive:
        return "approximate: naive mode"
    beside = other is not None and (other.approximate or other.scored_naive)
    return "the run beside it is approximate: naive mode" if beside else ""


def _targets(run: RunFiles) -> str:
    return f"Target particles: {target_text(run.tracking.cuts.target).replace('p_T', 'pT')}."


def _summary(run: RunFiles, other: RunFiles | None) -> Section:
    """The run, how it ended, and how to do it again."""
    commands = [("Train the same again", summary.command(run))]
    if started := summary.started_as(run):
        commands.append(("It was started with", started))
    tables = (summary.facts(run), *(summary.final_metrics(run) if other is None else ()))
    lead = summary.not_trained_here(run)
    return Section("summary", "Run", lead, _approximate(run, other), tables, commands=tuple(commands))


def _comparison(run: RunFiles, other: RunFiles) -> Section:
    """Two runs: the flags, facts and metrics in which they differ, and what was not counted alike."""
    lead = [f"Compared with {other.directory}: {other.called(other.how_scored)}."]
    lead += [sentence for sentences in not_alike(run, other).values() for sentence in sentences]
    unknown = [str(files.directory) for files in (run, other) if not files.settings]
    if unknown:
        lead.append(f"The flags of {' and of '.join(unknown)} are not known: no config.yaml.")
    differ = differing(run, other)
    if not (unknown or any(table.head[0] == "flag" for table in differ)):
        lead.append("No flag differs.")
    without = [str(files.directory) for files in (run, other) if files.scores is None]
    if without:
        lead.append(f"No scores of {' and of '.join(without)}: the report shows those of the training.")
    if other.approximate and other.scores is not None and not other.scored_naive:
        lead.append(
            "To see what sectors lose at their borders, score it as it was trained: "
            f"{this_python()} -m domainpar.infer --run {other.directory} --mode naive "
            f"--sectors {other.settings.get('sectors')} --tracks greedy --overwrite"
        )
    tables = (*differ, *summary.final_metrics(run, other))
    return Section("comparison", "Two runs", tuple(lead), _approximate(run, other), tables)


def _training(run: RunFiles, other: RunFiles | None) -> Section:
    """Loss, metrics and learning rate along the steps."""
    chart = training_chart(run, other)
    if chart is None:
        why = _why_missing(run, "metrics.jsonl", otherwise="No step of the training was finished.")
        return _absent("training", "Training", why, "training")
    leads, layers = [], layer_chart(run)
    if run.learns_edges:
        against = (run.records_of("train") or run.records_of("val") or [{}])[-1].get("counted_against")
        leads.append(
            f"Edge metrics are counted in the graph: against {against or 'candidate edges'}. "
            "A true segment that no candidate edge joins is in none of these numbers. A target edge is a "
            "candidate edge that is a true segment of a target particle."
        )
    if spikes := [record for record in run.records_of("train") if record.get("spike")]:
        steps = some_of([str(record["step"]) for record in spikes])
        leads.append(f"The loss has {several(len(spikes), 'spike')}: step {steps}.")
    charts = tuple(filter(None, (chart, layers)))
    return Section("training", "Training", tuple(leads), _approximate(run, other), charts=charts)


def _edges(run: RunFiles, other: RunFiles | None) -> Section:
    """Target edges against others, and the share of the true segments that the graph holds."""
    title = "Scores of edges"
    if not run.learns_edges:
        return _absent("edges", title, NO_EDGES, "edges")
    curves = edge_curves(run)
    if curves is None:
        otherwise = "None of the scored events has truth to count against."
        return _absent("edges", title, _why_missing(run, "scores", "events", otherwise=otherwise), "edges")
    beside = edge_curves(other) if other is not None else None
    chart = edge_chart(run, curves, other, beside)
    counts = [int(kind.sum()) for kind in (curves.targets, curves.fakes, curves.others)]
    lead = (
        f"{several(len(curves.events), 'event')} of the {curves.split} split: {sum(counts):,} scored edges, "
        f"{counts[0] + curves.unscored_targets:,} target edges among the candidates (true segments of target "
        "particles)."
    )
    if curves.unscored:
        why = "join two sectors and got no score (approximate: naive mode)"
        if run.scores is not None and run.scores.record.filter is not None:
            left = run.scores.record.filter
            why = f"were dropped by the filter {left['run']}, with scores below {left['min_score']:g}"
        lead += f" {curves.unscored:,} edges {why}; {curves.unscored_targets:,} of them are targets, and count as lost."
    if curves.left_out:
        lead += f" {several(curves.left_out, 'more event')} of the split not counted here."
    counted = [
        {
            "scores": files.called(files.how_scored),
            "true segments of target particles": f"{segments.segments:,}",
            "of them in the graph": percent(segments.construction_efficiency),
            "in the graph, score > 0.5": percent(segments.cumulative_efficiency),
        }
        for files, of_run in ((run, curves), (other, beside))
        if files is not None and of_run is not None and (segments := of_run.segments) is not None
    ]
    tables = ReportTable.of(counted, f"{SEGMENT[0].upper()}{SEGMENT[1:]}. {_targets(run)}")
    return Section("edges", title, (lead,), _approximate(run, other), tables=tables, charts=(chart,))


def _tracks(run: RunFiles, other: RunFiles | None) -> Section:
    """Efficiency, fakes and duplicates of every finder."""
    title = "Tracks"
    names = [*RATES, *([BORDERS] if other is not None else []), *OF_FITS]
    splits = run.splits_to_show(run.performance)
    if not (finders := finders_of(run, splits, other)):
        otherwise = "No event with tracks has truth to count against."
        why = _why_missing(run, "scores", "tracks", otherwise=otherwise) if run.learns_edges else NO_EDGES
        return _absent("tracks", title, why, *names)
    styles = sorted(STYLES, key=lambda style: style != run.tracking.style)  # the one that was asked for comes first
    where, line = f"the {' and '.join(splits)} split", title_of(run, splits, finders, styles[0])
    charts = (*track_charts(run, splits, finders, styles), *resolution_charts(run, splits, finders, line))
    seen = [split for split in run.performance if split not in splits]
    others = tuple(_rate_tables(finders_of(run, [split]), f"Of the {split} split alone.")[0] for split in seen)
    absent = dict.fromkeys(names, f"The run beside it has no tracks in {where}.")
    unfitted = f"No finder has parameters of its tracks, and truth of them, in {where}."
    absent |= dict.fromkeys(OF_FITS, _why_missing(run, "events", otherwise=unfitted))
    counts = finders[0].counts
    share = "more than half" if counts.fraction == 0.5 else f"at least {counts.fraction:g}"
    border = (
        f" Distances are to the borders of {counts.border_sectors} sectors."
        if counts.border_sectors not in (None, 1)
        else ""
    )
    lead = (
        f"{several(counts.events, 'event')} of {where}. {_targets(run)} Matching takes {share} of the "
        f"hits; tracks with fewer than {counts.min_hits} hits are not counted. Fake and unlabelled "
        "tracks match no particle; most hits of an unlabelled track have no particle in the truth. Both rates are "
        "fractions of the tracks whose fitted pT a target may have. "
        f"Intervals are Wilson's, 68.3 %.{border}"
    )
    return Section(
        "tracks",
        title,
        (lead,),
        _approximate(run, other),
        tables=_rate_tables(finders) + others,
        styles=tuple((style, STYLE_MEANINGS[style]) for style in styles),
        charts=charts,
        left_out={name: why for name, why in absent.items() if name not in {chart.name for chart in charts}},
    )


def _rate_tables(finders: list[Finder], note: str = "") -> tuple[ReportTable, ...]:
    """Rates of each finder in each style of matching, and its tracks by the share of their majority particle."""
    by_style = [metric for metric in METRICS.values() if metric.heading and metric.by_style]
    others = [metric for metric in METRICS.values() if metric.heading and not metric.by_style]
    rates, majorities = [], []
    for finder in finders:
        for style in STYLES:
            of = finder.counts.styles[style]
            row = {"found by": finder.label if style == STYLES[0] else "", "matching": style}
            row["targets found"] = f"{of.reconstructed:,} of {of.targets:,}"
            for metric in by_style:
                row[metric.heading] = short(metric.value(finder.counts, style))
                if metric.interval:
                    limits = metric.limits(finder.counts, style)
                    row["68.3 % interval"] = "–" if limits is None else f"{limits[0]:.4f} to {limits[1]:.4f}"
            rates.append(row)
        tracks = f"{finder.counts.styles[STYLES[0]].matchable:,}"
        of_finder = {metric.heading: short(metric.value(finder.counts, STYLES[0])) for metric in others}
        majorities.append({"found by": finder.label, "tracks": tracks, **of_finder})
    meanings = {metric.heading: metric.definition.replace("`", "") for metric in METRICS.values()}
    of_styles = ReportTable.of(rates, note, words=2, meanings=meanings)
    return of_styles + ReportTable.of(majorities, meanings=meanings)


def _losses(run: RunFiles) -> tuple[Section, ...]:
    """Why target particles are lost, and what found tracks hold of theirs on each layer; nothing without tracks."""
    splits = run.splits_to_show(run.performance)
    finders = [finder for finder in finders_of(run, splits) if finder.name != PERFECT_SCORES]
    if not finders:
        return ()
    lead = (
        f"Target particles without a matched track, {run.tracking.style.replace('_', '-')} matching, by the first step "
        "after which they could not be matched. Against pT, particles of any pT.",
        *(f"{reason}: {why}." for reason, why in REASONS.items()),
    )
    tables = lost_table(finders, run.tracking.style) + layer_table(finders)
    return (Section("lost", "Lost particles and hits", lead, _approximate(run), tables=tables),)


def _event(run: RunFiles, event: EventData | None, split_text: str, num_parts: int | None) -> Section:
    """The event display, split over the parts that were asked for; the targets and fakes of each finder."""
    title, pictures = "One event", ("event-parts", "event-tracks")
    if event is None:
        why = _why_missing(run, "events", otherwise="There is no event to show.")
        return _absent("event", title, why, *pictures)
    view = event_view(event, split_of(run, num_parts), run.tracking, run.in_legend(run.kind, None))
    if view is None:
        return _absent("event", title, f"Event {event.event_id} has no positions of hits to draw.", *pictures)
    targets = "" if event.target is None else f" {_targets(run)}"  # without truth nothing is known of particles
    lead = (
        f"Event {event.event_id} ({split_text}): {event.num_hits:,} hits, {event.num_edges:,} candidate edges, "
        f"split over {view.split.num_parts} {view.split.words}; {view.facts['cutEdges']:,} edges are cut.{targets}"
    )
    left_out = {}
    if event.num_hits == 0:
        left_out = dict.fromkeys(pictures, f"Event {event.event_id} has no hits to draw.")
    elif not view.finder:
        otherwise = f"Event {event.event_id} has no tracks."
        left_out = {"event-tracks": _why_missing(run, "scores", "tracks", otherwise=otherwise)}
    elif f"{view.finder}Found" not in view.arrays:
        left_out = {"event-tracks": f"The particles of event {event.event_id} are unknown."}
    finders = [
        {
            "found by": name,
            "targets found": f"{counts['found']:,} of {counts['targets']:,}",
            "tracks": f"{counts['tracks']:,}",
            "fakes": f"{counts['fakes']:,}",
            "unlabelled": f"{counts['unlabelled']:,}",
            "duplicates": f"{counts['duplicates']:,}",
            "too short to count": f"{counts['short']:,}",
        }
        for name in view.facts.get("finders", [])
        if (counts := view.facts.get(f"{name}Counts"))
    ]
    tables = ReportTable.of(finders, f"Matching: {run.tracking.style}.")
    return Section("event", title, (lead,), _approximate(run), tables=tables, event=view, left_out=left_out)


def partition(run: RunFiles, event: EventData | None) -> Section:
    """The cost of splitting the event over 2 to 16 ranks, with its tiles as they are stored: cut edges and ghosts."""
    if event is None:
        why = _why_missing(run, "events", otherwise="There is no event to split.")
        return _absent("partition", "Partition", why)
    own = split_of(run, 1)  # for its way of grouping alone
    rows = []
    for num_parts in NUM_PARTS:
        cut = Cut.of(event.tiling, own.grouping, num_parts, own.seed)
        quality, truth = cut.quality, cut.truth
        rows.append(
            {
                "parts": str(num_parts),
                "cut edges": percent(quality.cut_share),
                "number": f"{quality.cut_edges:,}",
                "halo nodes / owned": percent(quality.incident_ghost_ratio),
                "imbalance of hits": f"{quality.node_imbalance:.3f}",
                "imbalance of edges": f"{quality.incident_imbalance:.3f}",
                "most neighbours": str(int(quality.neighbours.max())),
                "true segments cut": percent(truth.segments_cut / truth.segments if truth and truth.segments else None),
                "tracks cut": percent(truth.tracks_cut / truth.tracks if truth and truth.tracks else None),
            }
        )
    lead = (
        f"Event {event.event_id}, its {event.tiles.num_tiles} tiles (grouping: {own.grouping}). Imbalance: largest "
        "part / mean part. A halo exchange loses no cut edge; independent sectors lose all of them."
    )
    return Section("partition", "Partition", (lead,), tables=ReportTable.of(rows))


def _profile(run: RunFiles) -> tuple[Section, ...]:
    """Operations, memory over time and rates, where some steps were profiled."""
    path = run.directory / PROFILE
    if not path.is_file():
        return ()
    profile = read_file(path, dict)
    lead = (
        f"{several(profile['steps'], 'step')} of {several(len(profile['ranks']), 'rank')}. profile/rank_N.json are "
        "traces for chrome://tracing or ui.perfetto.dev."
    )
    return (Section("profile", "Profile", (lead,), tables=operations(profile), charts=(profile_chart(profile),)),)


def _ranks(run: RunFiles) -> Section:
    """Time and memory of each rank, and the times of the inference."""
    title = "Time and memory"
    times = rank_times(run)
    if times is None:
        return _absent("ranks", title, "No step of the training was finished.", "ranks")
    lead = (
        f"{several(times.num_ranks, 'rank')}; a step takes {times.step_seconds:.3g} s (median of the slowest rank). "
        f"Imbalance: {times.node_imbalance:.3f} in hits, {times.compute_imbalance:.3f} in computing time."
    )
    if times.other_sizes:
        lead += f" {several(times.other_sizes, 'earlier step')} on another number of ranks are not in it."
    ranks = [
        {
            "rank": str(rank),
            "computing": f"{times.phases['seconds_compute'][rank]:.4g} s",
            "communication": f"{times.phases['seconds_exchange'][rank]:.4g} s",
            "waiting": f"{times.phases['seconds_wait'][rank]:.4g} s",
            "loading, all steps": "–" if math.isnan(times.load[rank]) else f"{times.load[rank]:.4g} s",
            "hits owned": f"{times.owned[rank]:,.0f}",
            "halo nodes": f"{times.ghosts[rank]:,.0f}",
            "sent per step": f"{times.halo_bytes[rank] / MIB:.2f} MiB",
            "peak memory": f"{times.peak_bytes[rank] / MIB:,.0f} MiB",
        }
        for rank in range(times.num_ranks)
    ]
    timings = (run.scores.timings if run.scores else None) or {}
    events = timings.get("events") or []
    inference = [
        {"event": str(event.get("event"))}
        | {stage: f"{seconds:.3g} s" for stage, seconds in (event.get("stages") or {}).items()}
        | {
            heading: "–" if event.get(key) is None else form.format(event[key])
            for heading, (key, form) in INFERENCE.items()
        }
        for event in events[:12]  # more would push everything else off the page
    ]
    more = f", the first {len(inference)} of {several(len(events), 'event')}" if len(inference) < len(events) else ""
    note = f"Inference on {several(int(timings.get('ranks') or 1), 'rank')}{more}."
    tables = ReportTable.of(ranks) + ReportTable.of(inference, note)
    return Section("ranks", title, (lead,), tables=tables, charts=(rank_chart(times),))
