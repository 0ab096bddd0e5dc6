"""Figures of tracks: efficiency, fakes and duplicates against pT, eta, phi and the distance to a sector border."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from domainpar.display.efficiency import QUANTITIES, RATES, Found, RateCurve, rate_curve
from domainpar.display.figures import BLUE, GREEN, GREY, ORANGE, VERMILION, Figure, blank, plain
from domainpar.events.graph import FloatArray
from domainpar.reco.performance.matching import STYLES

LABELS = {"pt": "p<sub>T</sub> [GeV]", "eta": "η", "phi": "φ [rad]", "border": "distance to a sector border, ΔR"}
TITLES = {"efficiency": "efficiency", "fake_rate": "fake rate", "duplicate_rate": "duplicates per found target"}
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x")
TICKS = {"pt": (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100), "border": (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)}
HOVER = "%{text}<br>%{y:.4f} (%{customdata[0]:,} of %{customdata[1]:,})"
CAPTIONS = {
    "efficiency": (
        "Share of the target particles that a track reconstructs, against the true quantity of the particle. Against "
        "pT the condition on pT is left out, so that the turn-on shows."
    ),
    "fake_rate": (
        "Share of the tracks that match no particle, against the quantity of the helix fitted to the track; distance "
        "to a border: the smallest of its hits."
    ),
    "duplicate_rate": "Further tracks of targets that have one already, per target that was found.",
}


def track_figures(found: Sequence[Found], styles: Sequence[str] = STYLES) -> list[Figure]:
    """A figure for each rate, with a variant for each style of matching, the first of which is shown."""
    return [
        Figure(
            f"tracks-{rate.replace('_', '-')}",
            CAPTIONS[rate],
            {style: _four(found, style, rate) for style in styles},
            height=620,
            wide=True,
        )
        for rate in RATES
    ]


def colour_of(one: Found) -> str:
    """Colour of a finder, the same in all figures."""
    if one.finder == "network":
        return VERMILION if one.other else BLUE
    return {"classical": ORANGE, "ceiling": GREY}.get(one.finder, GREEN)


def _four(found: Sequence[Found], style: str, rate: str) -> go.Figure:
    plot = make_subplots(rows=2, cols=2, figure=blank(620), horizontal_spacing=0.1, vertical_spacing=0.16)
    top, traces = 0.0, []
    for number, one in enumerate(found):
        for place, quantity in enumerate(QUANTITIES):
            curve = rate_curve(one.counts, style, quantity, rate)
            top = max(top, _top(curve))
            traces.append(_points(one, curve, number, place))
    plot.add_traces(traces)
    height = 1.05 if rate == "efficiency" else min(max(1.4 * top, 0.02), 1.05)
    layout: dict[str, Any] = {"margin": {"t": 56}}
    for place, quantity in enumerate(QUANTITIES):
        edges = found[0].counts.binned[style][quantity].edges
        layout[f"xaxis{_number(place)}"] = {"title": {"text": LABELS[quantity]}, **_scale(quantity, edges)}
        layout[f"yaxis{_number(place)}"] = {"title": {"text": TITLES[rate]}, "range": [0, height]}
    return plot.update_layout(layout)


def _number(place: int) -> str:
    """How plotly numbers axes: x, x2, x3, x4."""
    return str(place + 1) if place else ""


def _top(curve: RateCurve) -> float:
    """The largest value of a bin with enough in it to mean something."""
    return float(np.max(curve.value[curve.whole >= 10], initial=0.0))


def _scale(quantity: str, edges: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis where the bins are such; a bin that begins at 0 is drawn from half of its end."""
    if quantity not in TICKS:
        return {}
    low = edges[0] or edges[1] / 2
    ticks = TICKS[quantity]
    limits = [math.log10(low), math.log10(edges[-1])]
    return {"type": "log", "range": limits, "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _points(one: Found, curve: RateCurve, number: int, place: int) -> go.Scatter:
    low, middle, high = _bins(curve, QUANTITIES[place])
    axis = _number(place)
    label, bar = plain(one.label), {"type": "data", "thickness": 1.2, "width": 0}
    return go.Scatter(
        x=middle,
        y=curve.value,
        xaxis=f"x{axis}",
        yaxis=f"y{axis}",
        name=label,
        legendgroup=label,
        showlegend=place == 0,
        mode="markers+lines" if one.finder == "ceiling" else "markers",
        marker={"color": colour_of(one), "symbol": SYMBOLS[number % len(SYMBOLS)], "size": 7},
        line={"color": colour_of(one), "width": 1, "dash": "dot"},
        error_y={**bar, "array": curve.high - curve.value, "arrayminus": curve.value - curve.low},
        error_x={**bar, "array": high - middle, "arrayminus": middle - low},
        customdata=np.stack([curve.part, curve.whole], axis=1).astype(int).tolist(),
        text=[f"{left:.3g} to {right:.3g}" for left, right in zip(curve.edges[:-1], curve.edges[1:])],
        hovertemplate=f"{HOVER}<extra>{label}</extra>",
    )


def _bins(curve: RateCurve, quantity: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Lower border, middle and upper border of the bins, as they are drawn."""
    low, high = curve.edges[:-1].copy(), curve.edges[1:]
    if quantity == "border":
        low[0] = max(low[0], high[0] / 2)  # a log axis has no zero
    middle = np.sqrt(low * high) if quantity in ("pt", "border") else (low + high) / 2
    return low, middle, high
