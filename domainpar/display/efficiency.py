"""Efficiency, fakes and duplicates of tracks against what they depend on, of everybody who found tracks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from domainpar.display.reading import RunFiles
from domainpar.events.graph import FloatArray
from domainpar.reco.performance.binned import Binned
from domainpar.reco.performance.counts import TrackCounts
from domainpar.reco.performance.rates import wilson

RATES = ("efficiency", "fake_rate", "duplicate_rate")
QUANTITIES = ("pt", "eta", "phi", "border")
FINDERS = ("network", "classical", "ceiling")

MEANINGS = {
    "network": "network",
    "classical": "classical finder (no network)",
    "ceiling": "ceiling of the graph (perfect scores)",
}


@dataclass(frozen=True)
class Found:
    """Tracks of one finder, counted.

    Attributes:
        finder: `network`, `classical` or `ceiling`.
        label: What to call it in a legend; says so where it is approximate.
        other: Whether it comes from the run that this one is compared with.
        counts: The counts.
    """

    finder: str
    label: str
    other: bool
    counts: TrackCounts


@dataclass(frozen=True, eq=False)
class RateCurve:
    """A rate in bins of one quantity, with 68.3 % intervals; NaN where there is nothing to divide by.

    Attributes:
        edges: Borders of the bins, [B + 1].
        part, whole: What was divided, [B].
        value, low, high: The rate and its interval, [B].
    """

    edges: FloatArray
    part: FloatArray
    whole: FloatArray
    value: FloatArray
    low: FloatArray
    high: FloatArray


def found_tracks(run: RunFiles, split: str, other: RunFiles | None = None) -> list[Found]:
    """Everybody who found tracks in the events of one split, and the network of another run beside them."""
    ours = run.performance.get(split, {})
    names = [name for name in FINDERS if name in ours] + [name for name in ours if name not in FINDERS]
    # The network comes first, then that of the other run: they are what one compares.
    found = [Found(name, label_of(name, run), False, ours[name]) for name in names]
    theirs = other.performance.get(split, {}) if other else {}
    if other is not None and "network" in theirs:
        found.insert(names.index("network") + 1 if "network" in names else 0,
                     Found("network", label_of("network", other), True, theirs["network"]))  # fmt: skip
    return found


def label_of(finder: str, run: RunFiles) -> str:
    """What to call the tracks of one finder of one run."""
    if finder != "network":
        return MEANINGS.get(finder, finder)
    return f"network, {how_scored(run)}"


def how_scored(run: RunFiles) -> str:
    """How a run trained and scored: exactly on whole events, or approximately on sectors, and of which kind."""
    if run.scores is not None and run.scores.approximate:
        return f"naive, {run.scores.about.get('sectors')} sectors (approximate)"
    if run.scores is not None and run.approximate:
        return f"trained naive on {run.settings.get('sectors')} sectors (approximate), scored whole"
    return how_trained(run)


def how_trained(run: RunFiles) -> str:
    """How a run trained and validated, which need not be how it scored."""
    return f"naive, {run.settings.get('sectors')} sectors (approximate)" if run.approximate else "halo (exact)"


def rate_curve(counts: TrackCounts, style: str, quantity: str, rate: str) -> RateCurve:
    """One rate in bins.

    Args:
        counts: The counts.
        style: One of `styles.STYLES`.
        quantity: One of `QUANTITIES`. Efficiency and duplicates go by the true particle, fakes by the fitted track.
        rate: One of `RATES`.
    """
    binned = counts.binned[style][quantity]
    part, whole = _divided(binned, rate)
    intervals = [_interval(k, n, rate) for k, n in zip(part, whole, strict=True)]
    value, low, high = np.array(intervals, np.float64).reshape(-1, 3).T
    return RateCurve(np.array(binned.edges), np.array(part, np.float64), np.array(whole, np.float64), value, low, high)


def _divided(binned: Binned, rate: str) -> tuple[Sequence[int], Sequence[int]]:
    return {
        "efficiency": (binned.reconstructed, binned.targets),
        "fake_rate": (binned.fakes, binned.tracks),
        "duplicate_rate": (binned.duplicated, binned.reconstructed),
    }[rate]


def _interval(part: int, whole: int, rate: str) -> tuple[float, float, float]:
    if whole == 0:
        return math.nan, math.nan, math.nan
    value = part / whole
    if rate == "duplicate_rate":  # no share: one particle may have several
        return value, max(0.0, value - math.sqrt(part) / whole), value + math.sqrt(part) / whole
    interval = wilson(part, whole)
    assert interval is not None, "there is something to divide by"
    return value, *interval
