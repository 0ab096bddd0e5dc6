"""Efficiency, fakes and duplicates of the tracks of each finder, in bins: the numbers, and the charts of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from domainpar.common.words import several
from domainpar.tracking.display.chart import Chart, ChartAxis, Colour, Panel, Series, log_ticks
from domainpar.tracking.display.run_files import RunFiles
from domainpar.tracking.events.graph import FloatArray
from domainpar.tracking.reco.performance.counts import TrackCounts
from domainpar.tracking.reco.performance.rates import (
    CKF,
    FINDERS,
    METRICS,
    NETWORK,
    PERFECT_SCORES,
    BinnedRate,
    in_order,
    wilson,
)

QUALITY = BinnedRate(
    "track-quality",
    "share of the tracks",
    "Length and purity",
    "Tracks whose fitted pT is one that targets may have, by their hits; by purity, the share of their hits that "
    "are of the particle with most of them; and by completeness, the share of that particle's hits on them.",
    lambda of: (of.tracks, (sum(of.tracks),) * len(of.tracks)),
    of_tracks=True,
)
RATES = {metric.binned.chart: metric.binned for metric in METRICS.values() if metric.binned} | {QUALITY.chart: QUALITY}
"""What is shown in bins, by the names of the charts."""

QUANTITIES = {
    "pt": "p_T [GeV]",
    "eta": "η",
    "phi": "φ [rad]",
    "radius": "production radius [mm]",
    "d0": "|d0| [mm]",
    "z0": "z0 [mm]",
    "vz": "production z [mm]",
    "hits": "hits",
    "purity": "purity of the track",
    "completeness": "completeness of the track",
    "density": "local hit density, hits within 0.1 of η and φ",
    "holes": "holes",
    "border": "distance to a sector border, ΔR",
}
"""Quantities that rates are counted against, and the labels of their axes."""

QUALITIES = ("hits", "purity", "completeness")
"""Of a track."""

BORDERS = "borders"
MARKERS = ("circle", "diamond", "square", "triangle", "cross")
LOGARITHMIC = ("pt", "radius", "d0", "density", "border")
"""Quantities on logarithmic axes."""

OWN_COLOURS = {NETWORK: Colour.BLUE, CKF: Colour.ORANGE, PERFECT_SCORES: Colour.GREY}
"""Colours of the finders of `infer`; further ones take others in turn."""

FEWEST = 5
"""Bins with fewer particles or tracks are left out: their intervals span the frame."""

ENOUGH = 10
"""Bins with fewer do not decide how high an axis goes."""

SYMBOLS = {"pt": "p_T", "eta": "η", "nhits": "hits", "charge": "charge", "radius": "vertex radius", "vz": "vertex z"}
UNITS = {"pt": " GeV", "radius": " mm", "vz": " mm"}


@dataclass(frozen=True)
class Finder:
    """A finder of tracks with its counts."""

    name: str  # one of `rates.FINDERS`, or another
    label: str  # its name in a legend; says so where it is approximate
    other: bool  # whether it comes from the run that this one is compared with
    counts: TrackCounts  # the counts
    colour: str  # the same in all charts


@dataclass(frozen=True, eq=False)
class RateCurve:
    """A rate in bins of one quantity, with 68.3 % intervals; NaN where there is nothing to divide by."""

    edges: FloatArray  # borders of the bins, [B + 1]
    # part, whole: the two numbers that are divided, [B]
    part: FloatArray
    whole: FloatArray
    # value, low, high: the rate and its interval, [B]
    value: FloatArray
    low: FloatArray
    high: FloatArray


def finders_of(run: RunFiles, splits: Sequence[str], other: RunFiles | None = None) -> list[Finder]:
    """All finders of tracks in the events of some splits, and the network of another run beside them."""
    ours = in_order(run.pooled(splits))
    names = [*ours]
    # The network comes first, then that of the other run: they are compared.
    how = run.in_legend(run.how_scored, other)
    further = itertools.cycle((Colour.GREEN, Colour.PURPLE, Colour.SKY, Colour.BLACK))
    colours = {name: OWN_COLOURS.get(name) or next(further) for name in names}
    finders = [Finder(name, finder_label(name, how), False, ours[name], colours[name]) for name in names]
    beside = other.pooled(splits) if other else {}
    if other is not None and "network" in beside:
        label = finder_label("network", other.in_legend(other.how_scored, run))
        network = Finder("network", label, True, beside["network"], Colour.VERMILION)
        finders.insert(names.index("network") + 1 if "network" in names else 0, network)
    return finders


def finder_label(name: str, how: str) -> str:
    """A finder's name in a legend; of the network also how its run was scored."""
    return f"network, {how}" if name == "network" and how else FINDERS.get(name, name)


def rate_curve(counts: TrackCounts, style: str, quantity: str, rate: BinnedRate) -> RateCurve:
    """One rate in bins.

    Args:
        style: One of `styles.STYLES`.
        quantity: One of `QUANTITIES`.
        rate: One of `RATES`.
    """
    binned = counts.binned[style][quantity]
    part, whole = rate.counted(binned)
    intervals = []
    for k, n in zip(part, whole, strict=True):
        if n and not rate.is_share:  # one particle may have several
            interval: tuple[float, float] | None = max(0.0, k / n - math.sqrt(k) / n), k / n + math.sqrt(k) / n
        else:
            interval = wilson(k, n) if n else None
        intervals.append((math.nan,) * 3 if interval is None else (k / n, *interval))
    value, low, high = np.array(intervals, np.float64).reshape(-1, 3).T
    return RateCurve(np.array(binned.edges), np.array(part, np.float64), np.array(whole, np.float64), value, low, high)


def quantities_of(rate: BinnedRate) -> tuple[str, ...]:
    """The quantities that a rate is shown against: a track alone has no vertex."""
    if rate is QUALITY:
        return QUALITIES
    left_out = ("purity", "completeness", *(("radius", "vz") if rate.of_tracks else ()))
    return tuple(name for name in QUANTITIES if name not in left_out)


def track_charts(run: RunFiles, splits: Sequence[str], finders: Sequence[Finder], styles: Sequence[str]) -> list[Chart]:
    """A chart of each rate in each style of matching; where the network of another run is among the finders, one of
    both networks, and of perfect scores, near the borders of sectors."""
    charts = []
    for rate in RATES.values():
        for style in styles:
            panels = _panels(finders, style, quantities_of(rate), rate)
            if not rate.of_tracks and "pt" in run.tracking.cuts.target:
                panels[0] = replace(panels[0], title="without the condition on p_T")
            charts.append(
                Chart(
                    rate.chart,
                    title_of(run, splits, finders, style),
                    tuple(panels),
                    heading=rate.heading,
                    caption=f"{rate.caption} Bins with fewer than {FEWEST} are left out.",
                    variant=style,
                    zero=rate.zero,
                )
            )
    if any(finder.other for finder in finders):
        compared = [finder for finder in finders if finder.name in (NETWORK, PERFECT_SCORES)]
        # More than half of a particle's hits are on one track only: where that is asked for, there are no duplicates.
        of_borders = tuple(
            replace(_panels(compared, styles[0], ("border",), metric.binned)[0], name=name)
            for name, metric in METRICS.items()
            if metric.binned and (styles[0] == "atlas" or not metric.duplicates)
        )
        title = title_of(run, splits, finders, styles[0])
        charts.append(Chart(BORDERS, title, of_borders, columns=len(of_borders), on_page=False))
    return charts


def title_of(run: RunFiles, splits: Sequence[str], finders: Sequence[Finder], style: str) -> str:
    """A line on what was counted: events, targets and matching."""
    counts, what = finders[0].counts, f"{' and '.join(splits)} event"
    targets = several(counts.styles[style].targets, "target particle")
    return (
        f"{several(counts.events, what)}, {targets} ({target_text(run.tracking.cuts.target)}), "
        f"{style.replace('_', '-')} matching, 68.3 % intervals, bins of {FEWEST} or more"
    )


def _panels(finders: Sequence[Finder], style: str, quantities: Sequence[str], rate: BinnedRate) -> list[Panel]:
    """A rate against some quantities, with one scale for all; against pT from zero, so that the turn-on shows."""
    curves = {name: [rate_curve(finder.counts, style, name, rate) for finder in finders] for name in quantities}
    panels = []
    for quantity, of_finders in curves.items():
        measured = [finder for finder in finders if finder.name != PERFECT_SCORES]
        series = []
        for finder, curve in zip(finders, of_finders, strict=True):
            place = measured.index(finder) if finder in measured else 0
            series.append(series_of(finder, curve, quantity, place, len(measured)))
        # Purities and lengths have little in common.
        low, high = _limits({quantity: of_finders} if rate is QUALITY else curves, rate)
        y = ChartAxis(rate.axis, 0.0 if quantity == "pt" else low, high)
        panels.append(Panel(quantity, tuple(series), axis_of(quantity, of_finders[0].edges, series, rate), y))
    return panels


def _limits(curves: Mapping[str, Sequence[RateCurve]], rate: BinnedRate) -> tuple[float, float]:
    """From zero to a little above all values, and the intervals of bins with enough in them; an efficiency from the
    tenth below these to 1."""
    drawn = [curve for quantity, each in curves.items() if quantity != "pt" or not rate.near_one for curve in each]
    ends = [(curve.value[curve.whole >= FEWEST], curve.value[curve.whole >= FEWEST]) for curve in drawn]
    ends += [(curve.low[curve.whole >= ENOUGH], curve.high[curve.whole >= ENOUGH]) for curve in drawn]
    if not rate.near_one:
        highest = 1.15 * max(float(np.max(high, initial=0.0)) for _, high in ends)
        return 0.0, max(min(highest, 1.05) if rate.is_share else highest, 0.02)
    lowest = min(float(np.min(low, initial=1.0)) for low, _ in ends)
    return float(np.floor(10 * lowest - 0.2) / 10) if lowest > 0.15 else 0.0, 1.05


def axis_of(quantity: str, edges: FloatArray, series: Sequence[Series], rate: BinnedRate | None = None) -> ChartAxis:
    """The axis over the bins in which something is drawn, and one more at both ends. It says whose the quantity is:
    fakes have no true particle."""
    label = QUANTITIES[quantity]
    if quantity not in ("density", "holes", "border", *QUALITIES):
        label = f"{'fitted' if rate and rate.of_tracks else 'true'} {label}"
    y = np.stack([one.y for one in series])
    drawn = np.flatnonzero((np.isfinite(y) & ((y != 0) | (rate is not QUALITY))).any(axis=0))
    begin, end = (max(drawn[0] - 1, 0), drawn[-1] + 3) if len(drawn) else (0, len(edges))
    borders, edges = _borders(edges, quantity)[begin:end], edges[begin:end]
    ticks = log_ticks(float(borders[0]), float(borders[-1])) if quantity in LOGARITHMIC else ()
    if ticks and edges[0] == 0:
        ticks = ((float(borders[0]), "0"), *((tick, words) for tick, words in ticks if tick >= edges[1]))
    if quantity == "holes":
        ticks = tuple((float(number), str(number)) for number in range(math.ceil(edges[0]), math.ceil(edges[-1])))
    return ChartAxis(label, float(borders[0]), float(borders[-1]), log=quantity in LOGARITHMIC, ticks=ticks)


def _borders(edges: FloatArray, quantity: str) -> FloatArray:
    """Borders of the bins as they are drawn: on a logarithmic axis a bin from 0 begins at half of its end."""
    borders = edges.copy()
    if quantity in LOGARITHMIC and borders[0] == 0:
        borders[0] = borders[1] / 2
    return borders


def series_of(finder: Finder, curve: RateCurve, quantity: str, place: int, of: int) -> Series:
    """Perfect scores as a line with a band, apart from what was measured; others as points in their bins."""
    few = curve.whole < FEWEST
    value, low, high = (np.where(few, np.nan, values) for values in (curve.value, curve.low, curve.high))
    borders, interval = _borders(curve.edges, quantity), np.stack([low, high])
    notes = tuple(
        f"{start:.3g} to {end:.3g}: {rate:.4f} ({'' if np.isnan(part) else f'{part:,.0f} of '}{whole:,.0f})"
        for start, end, rate, part, whole in zip(curve.edges[:-1], curve.edges[1:], value, curve.part, curve.whole)
    )
    counted = curve.edges[:-1], curve.edges[1:], curve.value, curve.low, curve.high, curve.part, curve.whole
    look: dict[str, Any] = {"interval": interval, "notes": notes, "table": np.stack(counted, axis=1)}
    if finder.name == PERFECT_SCORES:
        return Series(finder.label, "steps", finder.colour, borders, value, width=1.2, **look)
    bins, share = np.stack([borders[:-1], borders[1:]]), (place + 1) / (of + 1)
    # This share of the width of its bin, as it is seen on the axis.
    x = bins[0] * (bins[1] / bins[0]) ** share if quantity in LOGARITHMIC else bins[0] + share * (bins[1] - bins[0])
    look |= {"marker": MARKERS[place % len(MARKERS)], "bins": bins}
    return Series(finder.label, "points", finder.colour, x, value, **look)


def target_text(conditions: Mapping[str, Any]) -> str:
    """Target particles as a physicist writes them: `p_T ≥ 1 GeV, hits ≥ 5`; `all` without a condition.

    Args:
        conditions: Those of `events.targets`.
    """
    texts = []
    for name, condition in sorted(conditions.items(), reverse=True):
        symbol, unit = SYMBOLS.get(name, name), UNITS.get(name, "")
        match condition:
            case [int() | float() as low, int() | float() as high]:
                ends = f"{low:g} ≤ {symbol} ≤ {high:g}{unit}"
                ends = f"{symbol} ≤ {high:g}{unit}" if math.isinf(low) else ends
                texts.append(f"{symbol} ≥ {low:g}{unit}" if math.isinf(high) else ends)
            case list() | tuple():
                texts.append(f"{symbol} {' '.join(map(str, condition))}{unit}")
            case _:
                texts.append(f"{symbol} = {condition}{unit}")
    return ", ".join(texts) or "all"
