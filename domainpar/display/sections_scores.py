"""Sections about what the network found: scores of edges, and tracks."""

from __future__ import annotations

from collections.abc import Sequence

from domainpar.display.edges import EdgeCurves, edge_curves
from domainpar.display.efficiency import Found, found_tracks, how_scored
from domainpar.display.figures_edges import edge_figures
from domainpar.display.figures_tracks import track_figures
from domainpar.display.reading import SPLITS, RunFiles
from domainpar.display.sections import Section, approximate, percent, target_words, why_missing
from domainpar.display.summary import Rows, short
from domainpar.reco.performance.ceiling import SEGMENT
from domainpar.reco.performance.matching import STYLES
from domainpar.reco.performance.rates import (
    duplicate_rate,
    efficiency,
    fake_rate,
    majority_rates,
    mean_trackml_score,
    wilson,
)
from domainpar.words import several

STYLE_MEANINGS = {
    "atlas": "atlas: most hits of the track are of the particle",
    "one_way": "one_way: most hits of the particle are on the track",
    "two_way": "two_way: both",
}


def edges(run: RunFiles, other: RunFiles | None) -> Section:
    """How well target edges are told from others, and what the graph holds of the true segments."""
    title = "Scores of edges"
    curves = edge_curves(run)
    if curves is None:
        return Section(
            "edges",
            title,
            absent=why_missing(
                run, "scores", "events", otherwise="None of the scored events has truth to count against."
            ),
        )
    theirs = edge_curves(other) if other is not None else None
    figures = edge_figures(curves, how_scored(run), theirs, how_scored(other) if other else "")
    tables = tuple(table for table in (_ceiling(run, curves, theirs, other),) if table)
    return Section("edges", title, _edge_lead(curves), approximate(run, other), tables=tables, figures=tuple(figures))


def _edge_lead(curves: EdgeCurves) -> tuple[str, ...]:
    counts = [int(kind.sum()) for kind in (curves.targets, curves.fakes, curves.others)]
    text = (
        f"{several(len(curves.events), 'event')} of the {curves.split} split: {sum(counts):,} scored edges, "
        f"{counts[0] + curves.unscored_targets:,} target edges among the candidates. Counted in the graph."
    )
    if curves.unscored:
        text += (
            f" {curves.unscored:,} edges join two sectors and got no score (approximate: naive mode); "
            f"{curves.unscored_targets:,} of them are targets, and count as lost."
        )
    if curves.left_out:
        text += f" {several(curves.left_out, 'more event')} of the split not counted here."
    return (text,)


def _ceiling(run: RunFiles, curves: EdgeCurves, theirs: EdgeCurves | None, other: RunFiles | None) -> Rows | None:
    rows = []
    for files, of_run in ((run, curves), (other, theirs)):
        if files is not None and of_run is not None and of_run.ceiling is not None:
            ceiling = of_run.ceiling
            rows.append(
                (
                    how_scored(files),
                    f"{ceiling.segments:,}",
                    percent(ceiling.construction_efficiency),
                    percent(ceiling.cumulative_efficiency),
                )
            )
    head = (
        "scores",
        "true segments of target particles",
        "of them in the graph (ceiling)",
        "in the graph, score > 0.5",
    )
    note = f"{SEGMENT[0].upper()}{SEGMENT[1:]}. {target_words(run)}"
    return Rows(head, tuple(rows), note) if rows else None


def tracks(run: RunFiles, other: RunFiles | None) -> Section:
    """Efficiency, fakes and duplicates of everybody who found tracks."""
    title = "Tracks"
    split = next((split for split in SPLITS if run.performance.get(split)), None)
    if split is None:
        absent = why_missing(run, "scores", "tracks", otherwise="No event with tracks has truth to count against.")
        return Section("tracks", title, absent=absent)
    found = found_tracks(run, split, other)
    styles = sorted(STYLES, key=lambda style: style != run.tracking.style)  # the one that was asked for comes first
    return Section(
        "tracks",
        title,
        _track_lead(run, found, split),
        approximate(run, other),
        tables=(_rates(found), _majorities(found)),
        styles=tuple((style, STYLE_MEANINGS[style]) for style in styles),
        figures=tuple(track_figures(found, styles)),
    )


def _track_lead(run: RunFiles, found: Sequence[Found], split: str) -> tuple[str, ...]:
    counts = found[0].counts
    share = "more than half" if counts.fraction == 0.5 else f"at least {counts.fraction:g}"
    sectors = counts.border_sectors
    border = f" Distances are to the borders of {sectors} sectors." if sectors else ""
    return (
        f"{several(counts.events, 'event')} of the {split} split. {target_words(run)} Matching takes {share} of the "
        f"hits; tracks with fewer than {counts.min_hits} hits are not counted. Intervals are Wilson's, 68.3 %.{border}",
    )


def _rates(found: Sequence[Found]) -> Rows:
    rows = []
    for one in found:
        for row, style in enumerate(STYLES):
            counts = one.counts.styles[style]
            interval = wilson(counts.reconstructed, counts.targets)
            rows.append(
                (
                    "" if row else one.label,
                    style,
                    f"{counts.reconstructed:,} of {counts.targets:,}",
                    short(efficiency(counts)),
                    "–" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}",
                    short(fake_rate(counts)),
                    short(duplicate_rate(counts)),
                )
            )
    head = ("found by", "matching", "targets found", "efficiency", "68.3 % interval", "fake rate", "duplicates")
    return Rows(head, tuple(rows), words=2)


def _majorities(found: Sequence[Found]) -> Rows:
    rows = []
    for one in found:
        rates = majority_rates(one.counts.majority)
        rows.append(
            (
                one.label,
                f"{one.counts.tracks:,}",
                *(short(rates[name]) for name in ("perfect", "double_majority", "lhc")),
                short(mean_trackml_score(one.counts)),
            )
        )
    return Rows(("found by", "tracks", "perfect", "double majority", "LHC", "TrackML score"), tuple(rows))
