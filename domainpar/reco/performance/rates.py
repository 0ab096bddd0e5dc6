"""What is divided: the rates of tracks and how sure they are. None where there is nothing to divide by."""

from __future__ import annotations

import math

from domainpar.reco.performance.counts import TrackCounts
from domainpar.reco.performance.majority import MajorityCounts
from domainpar.reco.performance.styles import StyleCounts


def efficiency(counts: StyleCounts) -> float | None:
    """Share of the target particles that at least one matchable track reconstructs."""
    return ratio(counts.reconstructed, counts.targets)


def fake_rate(counts: StyleCounts) -> float | None:
    """Share of the matchable tracks that match no particle, target or not."""
    return ratio(counts.matchable - counts.matched, counts.matchable)


def duplicate_rate(counts: StyleCounts) -> float | None:
    """Further tracks that reconstruct a target, after the first, per reconstructed target, as acorn counts them."""
    return ratio(counts.target_pairs - counts.reconstructed, counts.reconstructed)


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
