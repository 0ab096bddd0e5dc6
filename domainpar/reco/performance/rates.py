"""Rates of tracks with their intervals, and the table of them that is printed.

A rate is None where there is nothing to divide by.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping

from domainpar.reco.performance.counts import TRUE_WEIGHTS, TrackCounts
from domainpar.reco.performance.matching import STYLES, MajorityCounts, StyleCounts
from domainpar.words import several


def efficiency(counts: StyleCounts) -> float | None:
    """Share of the target particles that at least one matchable track reconstructs."""
    return ratio(counts.reconstructed, counts.targets)


def fake_rate(counts: StyleCounts) -> float | None:
    """Share of the matchable tracks that match no particle, target or not."""
    return ratio(counts.matchable - counts.matched, counts.matchable)


def duplicate_rate(counts: StyleCounts) -> float | None:
    """Further tracks that reconstruct a target, after the first, per reconstructed target, as acorn counts them."""
    return ratio(counts.target_pairs - counts.reconstructed, counts.reconstructed)


def fakes_per_target(counts: StyleCounts) -> float | None:
    """Matchable tracks that match no particle, per target particle; above 1 where there are more of them."""
    return ratio(counts.matchable - counts.matched, counts.targets)


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

FINDERS = ("network", "classical", "ceiling")
"""Rows in their order; other names follow."""

HEADINGS = ("tracks", "efficiency", "68 % interval", "fakes", "duplicates", "perfect", "double maj.", "LHC", "TrackML")


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
    rows: list[tuple[str, ...]] = [("", *HEADINGS)]
    for name in names:
        counts = performance_by_finder[name]
        of_style, of_majority = counts.styles[style], majority_rates(counts.majority)
        interval = wilson(of_style.reconstructed, of_style.targets)
        limits = "-" if interval is None else f"{interval[0]:.4f}..{interval[1]:.4f}"
        rates = [fake_rate(of_style), duplicate_rate(of_style)]
        rates += [of_majority[rate] for rate in ("perfect", "double_majority", "lhc")]
        rates.append(mean_trackml_score(counts))
        rows.append((name, f"{counts.tracks:,}", short(efficiency(of_style)), limits, *map(short, rates)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:]))])
        for name, *cells in rows
    ]
    first = performance_by_finder[names[0]]
    targets = several(first.styles[style].targets, "target particle") + (f" ({first.target})" if first.target else "")
    share = "more than half" if first.fraction == 0.5 else f"at least {first.fraction:g}"
    about = (
        f"{several(first.events, 'event')}, {targets}, tracks of at least {several(first.min_hits, 'hit')}, {style} "
        f"matching of {share} of the hits:"
    )
    notes = (
        f"Perfect and double majority per particle of at least {first.majority_pt:g} GeV, LHC per track of one: as "
        "gnn_tracking."
    )
    per = {"Fakes per target particle": fakes_per_target, "duplicates per track": duplicates_per_track}
    of_finders = [
        f"{words}: {', '.join(f'{name} {short(rate(performance_by_finder[name].styles[style]))}' for name in names)}"
        for words, rate in per.items()
    ]
    notes += f" {'; '.join(of_finders)}."
    if any(counts.weights != TRUE_WEIGHTS for counts in performance_by_finder.values()):
        notes += " TrackML score: weight 1 for every labelled hit where the source gives no weights."
    if "ceiling" in performance_by_finder:
        notes += " Ceiling: perfect scores of the candidate edges, through the same track builder."
    return [*textwrap.wrap(about, WIDTH), *lines, *textwrap.wrap(notes, WIDTH)]


def short(value: float | None) -> str:
    """A rate as it is printed; `-` where there is none."""
    return "-" if value is None else f"{value:.4f}"
