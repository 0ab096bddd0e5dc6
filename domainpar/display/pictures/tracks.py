"""Pictures of tracks: efficiency, fakes and duplicates against pT, eta, phi and the distance to a sector border."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from domainpar.display.efficiency import QUANTITIES, RATES, Found, RateCurve, found_tracks, rate_curve
from domainpar.display.pictures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILION,
    Picture,
    label,
    legend_below,
    new_figure,
    plain,
)
from domainpar.display.pictures.wording import target_text
from domainpar.display.reading import SPLITS, RunFiles
from domainpar.display.sections import why_missing
from domainpar.events.graph import FloatArray
from domainpar.words import several

AXES = {"pt": "$p_T$ [GeV]", "eta": "η", "phi": "φ [rad]", "border": "distance to a sector border, ΔR"}
TITLES = {"efficiency": "track efficiency", "fake_rate": "fake rate", "duplicate_rate": "duplicates per found target"}
NAMES = {"efficiency": "track-efficiency", "fake_rate": "track-fakes", "duplicate_rate": "track-duplicates"}
BORDERS = "borders"
MARKERS = ("o", "D", "s", "^", "v")
PT_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
BORDER_TICKS = (0, 0.01, 0.03, 0.1, 0.3, 1)
FEWEST = 5
"""Bins with fewer particles or tracks are left out, and the picture says so: their intervals span the frame."""

ENOUGH = 10
"""Bins with fewer do not decide how high an axis goes."""


def draw_tracks(run: RunFiles, other: RunFiles | None = None) -> list[Picture]:
    """A picture of each rate with 68.3 % intervals, for everybody who found tracks, and, where another run is given,
    one of both networks near the borders of sectors."""
    names = [*NAMES.values(), *([BORDERS] if other is not None else [])]
    split = next((split for split in SPLITS if run.performance.get(split)), None)
    if split is None:
        why = why_missing(run, "scores", "tracks", otherwise="no event with tracks has truth to count against")
        return [Picture(name, absent=why) for name in names]
    found, style = found_tracks(run, split, other), run.tracking.style
    pictures = [Picture(NAMES[rate], _four(run, split, found, style, rate)) for rate in RATES]
    return pictures + ([_near_borders(run, split, found, style)] if other is not None else [])


def _four(run: RunFiles, split: str, found: Sequence[Found], style: str, rate: str) -> Figure:
    figure = new_figure(5.8, _title(run, split, found, style))
    frames = [axes for row in figure.subplots(2, 2) for axes in row]
    for axes, quantity in zip(frames, QUANTITIES, strict=True):
        _draw(axes, found, style, quantity, rate)
    curves = {name: [rate_curve(one.counts, style, name, rate) for one in found] for name in QUANTITIES}
    top = _top([curve for each in curves.values() for curve in each], rate)
    bottom = _bottom([curve for name, each in curves.items() if name != "pt" for curve in each], rate)
    for axes, quantity in zip(frames, QUANTITIES, strict=True):
        axes.set_ylim(0 if quantity == "pt" else bottom, top)  # against pT one wants to see the turn-on
    if rate != "fake_rate" and "pt" in run.tracking.cuts.target:
        frames[0].set_title("without the condition on $p_T$")
    legend_below(figure, frames[0], 2 if len(found) > 3 else 3, [plain(one.label) for one in found])
    return figure


def _title(run: RunFiles, split: str, found: Sequence[Found], style: str) -> str:
    """What was counted. The formulas in it are ours, so that no dollar needs an escape."""
    counts = found[0].counts
    targets = counts.styles[style].targets
    return (
        f"{several(counts.events, f'{split} event')}, {several(targets, 'target particle')} "
        f"({target_text(run.tracking.cuts.target)}), {style.replace('_', '-')} matching, 68.3 % intervals, "
        f"bins of {FEWEST} or more"
    )


def _near_borders(run: RunFiles, split: str, found: Sequence[Found], style: str) -> Picture:
    """Both networks, and what the graph allows, where sectors of naive mode end."""
    if not any(one.other for one in found):
        return Picture(BORDERS, absent=f"the run beside it has no tracks in the {split} split")
    shown = [one for one in found if one.finder == "network" or (one.finder == "ceiling" and not one.other)]
    figure = new_figure(3.9, _title(run, split, found, style))
    # More than half of a particle's hits are on one track only: where that is asked for, there are no duplicates.
    rates = [rate for rate in RATES if style == "atlas" or rate != "duplicate_rate"]
    for axes, rate in zip(figure.subplots(1, len(rates)), rates, strict=True):
        _draw(axes, shown, style, "border", rate)
        curves = [rate_curve(one.counts, style, "border", rate) for one in shown]
        axes.set_ylim(_bottom(curves, rate), _top(curves, rate))
    legend_below(figure, figure.axes[0], 3, [plain(one.label) for one in shown])
    return Picture(BORDERS, figure)


def _draw(axes: Axes, found: Sequence[Found], style: str, quantity: str, rate: str) -> None:
    points = [one for one in found if one.finder != "ceiling"]
    for one in found:
        curve = _without_few(rate_curve(one.counts, style, quantity, rate))
        if one.finder == "ceiling":
            _draw_ceiling(axes, one, curve)
        else:
            _draw_points(axes, one, curve, points.index(one), len(points), quantity)
    label(axes, _axis(quantity, rate), TITLES[rate])
    _scale(axes, np.array(found[0].counts.binned[style][quantity].edges), quantity)


def _axis(quantity: str, rate: str) -> str:
    """What is along the axis, and whose it is: fakes have no true particle."""
    if quantity == "border":
        return AXES[quantity]
    return f"{'fitted' if rate == 'fake_rate' else 'true'} {AXES[quantity]}"


def _without_few(curve: RateCurve) -> RateCurve:
    few = curve.whole < FEWEST
    left = {name: np.where(few, np.nan, getattr(curve, name)) for name in ("value", "low", "high")}
    return replace(curve, **left)


def _draw_ceiling(axes: Axes, one: Found, curve: RateCurve) -> None:
    """A line with its interval as a band, so that it stays apart from what was measured."""
    axes.stairs(curve.high, curve.edges, baseline=curve.low, fill=True, color=GREY, alpha=0.25, linewidth=0)
    axes.stairs(curve.value, curve.edges, baseline=None, color=GREY, linewidth=1.2, label=plain(one.label))


def _draw_points(axes: Axes, one: Found, curve: RateCurve, number: int, of: int, quantity: str) -> None:
    """Points side by side within their bin, with the bin as a thin line."""
    at = _places(curve.edges, quantity, (number + 1) / (of + 1))
    low, high = curve.edges[:-1], curve.edges[1:]
    colour = _colour(one)
    axes.hlines(curve.value, low, high, color=colour, linewidth=0.9, alpha=0.55)
    axes.errorbar(
        at,
        curve.value,
        yerr=[np.maximum(curve.value - curve.low, 0), np.maximum(curve.high - curve.value, 0)],
        fmt=MARKERS[number % len(MARKERS)],
        color=colour,
        markersize=4.0,
        elinewidth=1.1,
        label=plain(one.label),
    )


def _places(edges: FloatArray, quantity: str, share: float) -> FloatArray:
    """Where a point stands in each bin: this share of its width, as it is seen on the axis."""
    low, high = edges[:-1], edges[1:]
    even: FloatArray = low + share * (high - low)
    logarithmic = (low > 0) & (quantity in ("pt", "border"))
    even[logarithmic] = low[logarithmic] * (high[logarithmic] / low[logarithmic]) ** share
    return even


def _colour(one: Found) -> str:
    """The same in all pictures."""
    if one.finder == "network":
        return VERMILION if one.other else BLUE
    return {"classical": ORANGE}.get(one.finder, GREEN)


def _scale(axes: Axes, edges: FloatArray, quantity: str) -> None:
    ticks: Sequence[float] = ()
    if quantity == "pt":
        axes.set_xscale("log")
        ticks = PT_TICKS
    elif quantity == "border":  # its first bin begins at the border itself, where a log axis cannot
        axes.set_xscale("symlog", linthresh=edges[1], linscale=0.4)
        ticks = BORDER_TICKS
    axes.set_xlim(edges[0], edges[-1])
    if ticks:
        shown = [tick for tick in ticks if edges[0] <= tick <= edges[-1]]
        axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
        axes.minorticks_off()


def _top(curves: Sequence[RateCurve], rate: str) -> float:
    if rate == "efficiency":
        return 1.05
    largest = max(float(np.max(curve.high[curve.whole >= ENOUGH], initial=0.0)) for curve in curves)
    return max(1.15 * largest, 0.02)


def _bottom(curves: Sequence[RateCurve], rate: str) -> float:
    """Zero; of an efficiency the tenth below all points with enough in them."""
    if rate != "efficiency":
        return 0.0
    lowest = min(float(np.min(curve.low[curve.whole >= ENOUGH], initial=1.0)) for curve in curves)
    return float(np.floor(10 * lowest - 0.2) / 10) if lowest > 0.15 else 0.0
