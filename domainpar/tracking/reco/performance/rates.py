"""Rates of tracks with their intervals, and the table of them that is printed.

A rate is None where there is nothing to divide by.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping

from domainpar.common.text_table import text_table
from domainpar.common.words import several
from domainpar.tracking.reco.performance.counts import TRUE_WEIGHTS, TrackCounts
from domainpar.tracking.reco.performance.lost import REASONS
from domainpar.tracking.reco.performance.matching import STYLES, MajorityCounts, StyleCounts


def efficiency(counts: StyleCounts) -> float | None:
    """Share of the target particles that at least one matchable track reconstructs."""
    return ratio(counts.reconstructed, counts.targets)


def fake_rate(counts: StyleCounts) -> float | None:
    """Share of the tracks in the range of the targets that match no particle, and are not unlabelled."""
    return ratio(counts.fakes, counts.in_range)


def unlabelled_rate(counts: StyleCounts) -> float | None:
    """Share of the same tracks that match no particle, since enough of their hits have none: noise, or unknown."""
    return ratio(counts.unlabelled, counts.in_range)


def unmatched_rate(counts: StyleCounts) -> float | None:
    """Share of the matchable tracks, of any pT, that match no particle, target or not, as acorn counts fakes."""
    return ratio(counts.matchable - counts.matched, counts.matchable)


def duplicate_rate(counts: StyleCounts) -> float | None:
    """Further tracks that reconstruct a target, after the first, per reconstructed target, as acorn counts them."""
    return ratio(counts.target_pairs - counts.reconstructed, counts.reconstructed)


def has_duplicates(counts: TrackCounts, style: str) -> bool:
    """Whether a particle can have several tracks: not where more than half of its hits are on each, and none is shared.

    Rates of duplicates are 0 by construction there, and `-` where they are shown.
    """
    return style == "atlas" or counts.shared > 0


def fakes_per_target(counts: StyleCounts) -> float | None:
    """The same fakes per target particle; above 1 where there are more of them."""
    return ratio(counts.fakes, counts.targets)


def duplicates_per_track(counts: StyleCounts) -> float | None:
    """Share of the matchable tracks that reconstruct a particle, target or not, which another one reconstructs."""
    return ratio(counts.pairs - counts.particles, counts.matchable)


def majority_rates(counts: MajorityCounts) -> dict[str, float | None]:
    """The rates of gnn_tracking: `perfect` and `double_majority` per particle, `lhc` per cluster, and `fake_` of each:
    the share of the clusters that are not such."""
    rates = {
        "perfect": ratio(counts.perfect, counts.particles),
        "double_majority": ratio(counts.double_majority, counts.particles),
        "lhc": ratio(counts.lhc, counts.clusters),
    }
    fakes = {f"fake_{name}": ratio(counts.clusters - getattr(counts, name), counts.clusters) for name in rates}
    return {**rates, **fakes}


def mean_trackml_score(counts: TrackCounts) -> float | None:
    """The TrackML score, as the challenge takes it: the mean over the events that have one."""
    scores = [score for score in counts.trackml_score if score is not None]
    return math.fsum(scores) / len(scores) if scores else None


def ratio(part: int, whole: int) -> float | None:
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


# --- the table -------------------------------------------------------------------------------------------------------

WIDTH = 110

NETWORK, CKF, PERFECT_SCORES = "network", "ckf", "perfect_scores"

FINDERS: Mapping[str, str] = {
    NETWORK: "network",
    CKF: "CKF (no network)",
    PERFECT_SCORES: "perfect scores, same edges and track builder",
}
"""Rows in their order, and their names in a legend; other finders follow."""

HEADINGS = (
    "tracks", "efficiency", "68 % interval", "fake rate", "unlabelled", "duplicates", "perfect", "double maj.",
    "TrackML",
)  # fmt: skip


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
    names = [name for name in FINDERS if name in performance_by_finder]
    names += [name for name in performance_by_finder if name not in FINDERS]
    finders = {name: performance_by_finder[name] for name in names}
    rows = []
    for name, counts in finders.items():
        of_style, of_majority = counts.styles[style], majority_rates(counts.majority)
        interval = wilson(of_style.reconstructed, of_style.targets)
        limits = "-" if interval is None else f"{interval[0]:.4f}..{interval[1]:.4f}"
        rates = [fake_rate(of_style), unlabelled_rate(of_style)]
        rates.append(duplicate_rate(of_style) if has_duplicates(counts, style) else None)
        rates += [of_majority[rate] for rate in ("perfect", "double_majority")]
        rates.append(mean_trackml_score(counts))
        rows.append((name, f"{of_style.matchable:,}", short(efficiency(of_style)), limits, *map(short, rates)))
    lines = text_table(("", *HEADINGS), rows, width=WIDTH)
    first = finders[names[0]]
    targets = several(first.styles[style].targets, "target particle") + (f" ({first.target})" if first.target else "")
    share = "more than half" if first.fraction == 0.5 else f"at least {first.fraction:g}"
    about = (
        f"{several(first.events, 'event')}, {targets}, tracks of at least {several(first.min_hits, 'hit')}, {style} "
        f"matching of {share} of the hits:"
    )
    notes = [line for note in _notes(finders, style) for line in textwrap.wrap(note, WIDTH, subsequent_indent="  ")]
    return [*textwrap.wrap(about, WIDTH), *lines, *notes]


def _notes(finders: Mapping[str, TrackCounts], style: str) -> list[str]:
    """What the columns of the table count, and rates that have none."""

    def each(words: str, value: Callable[[TrackCounts], str]) -> str:
        return f"{words}: {', '.join(f'{name} {value(counts)}' for name, counts in finders.items())}"

    def style_rate(rate: Callable[[StyleCounts], float | None]) -> Callable[[TrackCounts], str]:
        return lambda counts: short(rate(counts.styles[style]))

    def lost(counts: TrackCounts) -> str:
        of_style = counts.styles[style].lost
        by_reason = ", ".join(f"{reason} {of_style[reason]:,}" for reason in REASONS if of_style[reason])
        return f"{sum(of_style.values()):,}" + (f" ({by_reason})" if by_reason else "")

    some_duplicates = any(has_duplicates(counts, style) for counts in finders.values())
    notes = [
        each("target particles lost, by the first step that lost them", lost),
        "fake rate, unlabelled: of the tracks with a fitted pT in the range of the targets, those that match no "
        "particle; most hits of an unlabelled track have no particle in the truth",
        each("fake tracks per target particle", style_rate(fakes_per_target)),
        each("fraction of tracks of any pT that match no particle", style_rate(unmatched_rate)),
        *([each("duplicates per track", style_rate(duplicates_per_track))] if some_duplicates else []),
        f"perfect and double majority: per particle of {next(iter(finders.values())).majority_pt:g} GeV or more, as in "
        "gnn_tracking",
        each("LHC, of the tracks of such particles", lambda counts: short(majority_rates(counts.majority)["lhc"])),
    ]
    if any(counts.unfitted for counts in finders.values()):
        notes.append(each("tracks without a fitted pT, taken to be in range", lambda counts: f"{counts.unfitted:,}"))
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
