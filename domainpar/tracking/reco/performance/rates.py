"""Metrics of tracks, each declared once in `METRICS`, their intervals, and the table of them that is printed.

A metric is None where there is nothing to divide by.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from domainpar.common.text_table import text_table
from domainpar.common.words import several
from domainpar.tracking.reco.performance.counts import TRUE_WEIGHTS, Binned, TrackCounts
from domainpar.tracking.reco.performance.lost import REASONS
from domainpar.tracking.reco.performance.matching import STYLES, StyleCounts


def ratio(part: float, whole: float) -> float | None:
    """One count over another."""
    return part / whole if whole else None


def wilson(part: int, whole: int, z: float = 1.0) -> tuple[float, float] | None:
    """The interval of a share that was counted: Wilson's, which stays within 0 and 1 and works at both ends.

    E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209: all p with |part / whole - p| <= z sqrt(p (1 - p) / whole).

    Args:
        part: Successes.
        whole: Trials.
        z: Standard deviations; 1 gives 68.3 %.

    Raises:
        ValueError: If there are more successes than trials, or a count is negative.
    """
    if not 0 <= part <= whole:
        raise ValueError(f"{part} of {whole} is no share; an interval needs 0 <= part <= whole.")
    if whole == 0:
        return None
    centre = (part + z * z / 2) / (whole + z * z)
    half = z * math.sqrt(part * (whole - part) / whole + z * z / 4) / (whole + z * z)
    # Exact at the ends, where rounding would leave a last bit.
    return (0.0 if part == 0 else centre - half, 1.0 if part == whole else centre + half)


# --- the metrics -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BinnedRate:
    """A metric in bins of one quantity after the other: its chart in the report.

    Attributes:
        chart: Name of the chart and of its picture.
        axis: Label of its axis.
        heading: Above its panels.
        caption: Their content.
        counted: Part and whole, [B] each, of the counts in bins.
        of_tracks: Whether quantities are those fitted to tracks; else they are the true ones of particles.
        near_one: Whether it is large where tracks are found well: its axis then ends at 1 and need not begin at 0.
        is_share: Whether the part is one of the whole; else there may be more of it.
        zero: Why panels that are zero everywhere are not drawn; empty where they are.
    """

    chart: str
    axis: str
    heading: str
    caption: str
    counted: Callable[[Binned], tuple[Sequence[int], Sequence[int]]]
    of_tracks: bool = False
    near_one: bool = False
    is_share: bool = True
    zero: str = ""


@dataclass(frozen=True)
class TrackMetric:
    """A metric of tracks, one count over another: how it is counted, where it is shown, and what it means.

    Attributes:
        counted: Part and whole, of the counts of a style of matching, and of all counts.
        definition: For docs/tracks.md, and for who points at its heading in the report.
        column: Its heading in the table that is printed; empty: it has no column.
        line: Its words below that table; empty: it has no line.
        heading: Its heading in the report; empty: it is not in its tables.
        note: On its column, printed below the table; `{pt}` is the smallest pT of the particles of `majority`.
        by_style: Whether it depends on the style of matching.
        interval: Whether it is shown with its interval: the part is one of the whole.
        duplicates: Whether it counts duplicates, of which there may be none by construction.
        origin: Who defined it, for docs/tracks.md.
        binned: Its chart in the report; None without.
    """

    counted: Callable[[StyleCounts, TrackCounts], tuple[float, float]]
    definition: str
    column: str = ""
    line: str = ""
    heading: str = ""
    note: str = ""
    by_style: bool = True
    interval: bool = False
    duplicates: bool = False
    origin: str = ""
    binned: BinnedRate | None = None

    def value(self, counts: TrackCounts, style: str) -> float | None:
        """The metric in a style of matching; None where there is nothing to divide by, or no duplicate is possible."""
        possible = not self.duplicates or has_duplicates(counts, style)
        return ratio(*self.counted(counts.styles[style], counts)) if possible else None

    def limits(self, counts: TrackCounts, style: str) -> tuple[float, float] | None:
        """The interval of 68.3 %; None where there is nothing to divide by."""
        part, whole = self.counted(counts.styles[style], counts)
        return wilson(int(part), int(whole))


def has_duplicates(counts: TrackCounts, style: str) -> bool:
    """Whether a particle can have several tracks: not where more than half of its hits are on each, and none is shared.

    Rates of duplicates are 0 by construction there, and `-` where they are shown.
    """
    return style == "atlas" or counts.shared > 0


def _trackml(counts: TrackCounts) -> tuple[float, int]:
    """As the challenge takes it: the mean over the events that have a score."""
    scores = [score for score in counts.trackml_score if score is not None]
    return math.fsum(scores), len(scores)


METRICS: Mapping[str, TrackMetric] = {
    "efficiency": TrackMetric(
        lambda of, _: (of.reconstructed, of.targets),
        "target particles that a track reconstructs, of all target particles",
        column="efficiency",
        heading="efficiency",
        interval=True,
        origin="acorn; `atlas`: also ATLAS",
        binned=BinnedRate(
            "track-efficiency",
            "track efficiency",
            "Efficiency",
            "Fraction of the target particles that a track reconstructs, against the true quantity of the particle. "
            "Against pT the condition on pT is left out, so that the turn-on shows.",
            lambda of: (of.reconstructed, of.targets),
            near_one=True,
        ),
    ),
    "fake_rate": TrackMetric(
        lambda of, _: (of.fakes, of.in_range),
        "tracks in range that match no particle and are not unlabelled, of all tracks in range. With `two_way`, a "
        "track that has no more than half of its particle's hits matches none.",
        column="fake rate",
        heading="fake rate",
        binned=BinnedRate(
            "track-fakes",
            "fake rate",
            "Fakes",
            "Fraction of the tracks that match no particle, without unlabelled ones, against the quantity of the helix "
            "fitted to the track; local hit density: the mean over its hits; distance to a border: the smallest of "
            "them. Only tracks count whose fitted pT a target may have; against pT, all tracks count.",
            lambda of: (of.fakes, of.tracks),
            of_tracks=True,
            zero="no fakes in any bin",
        ),
    ),
    "unlabelled_rate": TrackMetric(
        lambda of, _: (of.unlabelled, of.in_range),
        "tracks in range that match no particle, and more than half of whose hits have no particle in the truth "
        "(noise, or hits that the truth does not know), of all tracks in range",
        column="unlabelled",
        heading="unlabelled",
        note="fake rate, unlabelled: of the tracks with a fitted pT in the range of the targets, those that match no "
        "particle; most hits of an unlabelled track have no particle in the truth",
    ),
    "fakes_per_target": TrackMetric(
        lambda of, _: (of.fakes, of.targets),
        "fake tracks in range, per target particle: it compares the numbers of fakes of two finders, however many "
        "tracks they make. Some publications divide by particles.",
        line="fake tracks per target particle",
    ),
    "unmatched_rate": TrackMetric(
        lambda of, _: (of.matchable - of.matched, of.matchable),
        "fake and unlabelled tracks of any pT, of all matchable tracks",
        line="fraction of tracks of any pT that match no particle",
        origin="acorn's fake rate",
    ),
    "duplicate_rate": TrackMetric(
        lambda of, _: (of.target_pairs - of.reconstructed, of.reconstructed),
        "further tracks of a target particle that is found, per found target particle; `-` for `one_way` and "
        "`two_way` without shared hits: no second track can have more than half of a particle's hits",
        column="duplicates",
        heading="duplicates",
        duplicates=True,
        origin="acorn",
        binned=BinnedRate(
            "track-duplicates",
            "duplicates per found target",
            "Duplicates",
            "Further tracks of target particles that already have one, per target particle that was found.",
            lambda of: (of.duplicated, of.reconstructed),
            is_share=False,
            zero="no duplicates in any bin",
        ),
    ),
    "duplicates_per_track": TrackMetric(
        lambda of, _: (of.pairs - of.particles, of.matchable),
        "tracks of a particle that another track reconstructs, of all matchable tracks",
        line="duplicates per track",
        duplicates=True,
    ),
    "perfect": TrackMetric(
        lambda _, counts: (counts.majority.perfect, counts.majority.particles),
        "tracks with all hits of a particle and no others, per particle of at least 1 GeV, |eta| < 4, with hits on "
        "3 surfaces",
        column="perfect",
        heading="perfect",
        by_style=False,
        origin="gnn_tracking",
    ),
    "double_majority": TrackMetric(
        lambda _, counts: (counts.majority.double_majority, counts.majority.particles),
        "tracks that are pure and complete for the particle of most of their hits, per particle of the same selection",
        column="double maj.",
        heading="double majority",
        note="perfect and double majority: per particle of {pt:g} GeV or more, as in gnn_tracking",
        by_style=False,
        origin="gnn_tracking",
    ),
    "lhc": TrackMetric(
        lambda _, counts: (counts.majority.lhc, counts.majority.clusters),
        "tracks with more than 75 % of their hits from one particle, of the tracks most of whose hits are from a "
        "particle of the same selection",
        line="LHC, of the tracks of such particles",
        heading="LHC",
        by_style=False,
        origin="gnn_tracking",
    ),
    "trackml": TrackMetric(
        lambda _, counts: _trackml(counts),
        "weight of the hits on tracks that are pure and complete, of the weight of all hits. It counts all particles, "
        "also soft ones.",
        column="TrackML",
        heading="TrackML score",
        by_style=False,
        origin="TrackML challenge, arXiv:1904.06778",
    ),
}
"""All metrics of tracks, in their order."""


def definitions() -> list[str]:
    """The table of docs/tracks.md, line by line."""
    lines = ["| metric | definition | as defined by |", "| --- | --- | --- |"]
    for of in METRICS.values():
        definition, origin = of.definition.replace("|", r"\|"), f" {of.origin} " if of.origin else " "
        lines.append(f"| {of.heading or of.line} | {definition} |{origin}|")
    return lines


# --- the table -------------------------------------------------------------------------------------------------------

WIDTH = 110

NETWORK, CKF, PERFECT_SCORES = "network", "ckf", "perfect_scores"

FINDERS: Mapping[str, str] = {
    NETWORK: "network",
    CKF: "CKF (no network)",
    PERFECT_SCORES: "perfect scores, same edges and track builder",
}
"""Rows in their order, and their names in a legend; other finders follow."""


def in_order(counts: Mapping[str, TrackCounts]) -> dict[str, TrackCounts]:
    """Counts by finder, in the order in which they are shown."""
    return {name: counts[name] for name in dict.fromkeys([*FINDERS, *counts]) if name in counts}


def table(performance_by_finder: Mapping[str, TrackCounts], style: str = "atlas") -> list[str]:
    """A row for each track finder, and before and after it what was counted. At most 110 columns.

    Args:
        performance_by_finder: Counts of the same events by who found the tracks; `FINDERS` come first.
        style: One of `STYLES`.

    Returns:
        No lines without counts.

    Raises:
        ValueError: If the style is unknown.
    """
    if style not in STYLES:
        raise ValueError(f"matching style {style!r} is unknown; choose one of {', '.join(STYLES)}.")
    if not performance_by_finder:
        return []
    finders = in_order(performance_by_finder)
    rows = []
    for name, counts in finders.items():
        row = {"": name, "tracks": f"{counts.styles[style].matchable:,}"}
        for metric in METRICS.values():
            if metric.column:
                row[metric.column] = short(metric.value(counts, style))
            if metric.interval:
                limits = metric.limits(counts, style)
                row["68 % interval"] = "-" if limits is None else f"{limits[0]:.4f}..{limits[1]:.4f}"
        rows.append(row)
    lines = text_table([*rows[0]], [[*row.values()] for row in rows], width=WIDTH)
    first = next(iter(finders.values()))
    targets = several(first.styles[style].targets, "target particle") + (f" ({first.target})" if first.target else "")
    share = "more than half" if first.fraction == 0.5 else f"at least {first.fraction:g}"
    about = (
        f"{several(first.events, 'event')}, {targets}, tracks of at least {several(first.min_hits, 'hit')}, {style} "
        f"matching of {share} of the hits:"
    )
    notes = [line for note in _notes(finders, style) for line in textwrap.wrap(note, WIDTH, subsequent_indent="  ")]
    return [*textwrap.wrap(about, WIDTH), *lines, *notes]


def _notes(finders: Mapping[str, TrackCounts], style: str) -> list[str]:
    """What the columns of the table count, and metrics that have none."""

    def each(words: str, values: Iterable[str]) -> str:
        return f"{words}: {', '.join(map(' '.join, zip(finders, values)))}"

    def lost(counts: TrackCounts) -> str:
        of_style = counts.styles[style].lost
        by_reason = ", ".join(f"{reason} {of_style[reason]:,}" for reason in REASONS if of_style[reason])
        return f"{sum(of_style.values()):,}" + (f" ({by_reason})" if by_reason else "")

    notes = [each("target particles lost, by the first step that lost them", map(lost, finders.values()))]
    some_duplicates = any(has_duplicates(counts, style) for counts in finders.values())
    for metric in METRICS.values():
        if metric.line and (some_duplicates or not metric.duplicates):
            notes.append(each(metric.line, [short(metric.value(counts, style)) for counts in finders.values()]))
        if metric.note:
            notes.append(metric.note.format(pt=next(iter(finders.values())).majority_pt))
    if any(counts.unfitted for counts in finders.values()):
        unfitted = [f"{counts.unfitted:,}" for counts in finders.values()]
        notes.append(each("tracks without a fitted pT, taken to be in range", unfitted))
    if any(counts.weights != TRUE_WEIGHTS for counts in finders.values()):
        notes.append("TrackML score: weight 1 for every labelled hit where the source gives no weights")
    if PERFECT_SCORES in finders:
        notes.append(
            f"{PERFECT_SCORES}: tracks that the same track builder makes of the same candidate edges with perfect "
            "scores; no upper bound, since stitching and following join hits without an edge"
        )
    return notes


def short(value: float | None) -> str:
    """A rate as it is printed; `-` where there is none."""
    return "-" if value is None else f"{value:.4f}"
