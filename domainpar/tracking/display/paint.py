"""Draws the panels of charts: on the page as SVG, and in pictures on a canvas of matplotlib (`paint_matplotlib`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from markupsafe import Markup, escape

from domainpar.tracking.display.chart import ChartAxis, Colour, Panel, Series, thinned
from domainpar.tracking.events.graph import FloatArray

TYPE = 12.0
"""Pixels of the letters."""

LETTER = 0.6
"""Width of a letter over its height in DejaVu Sans, one of the widest types that readers have."""

PANEL = (380.0, 280.0)
"""Width and height of a panel of the page, in pixels; it grows and shrinks with its column."""

KEY = (26.0, 12.0)
"""Of the sample of a series in a legend."""

DOT = 6.4
"""Pixels of a marker."""

OUTLINES = {
    "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "triangle": ((0, -1.2), (1.2, 1), (-1.2, 1)),
    "cross": ((-1, -0.4), (-0.4, -1), (0, -0.5), (0.4, -1), (1, -0.4), (0.5, 0), (1, 0.4), (0.4, 1), (0, 0.5),
              (-0.4, 1), (-1, 0.4), (-0.5, 0)),
}  # fmt: skip
"""Shapes of markers by name; any other is a circle."""

Anchor = Literal["start", "middle", "end"]
"""The point of a line of words that stands at a place."""


class Canvas:
    """A surface to draw on, in pixels from its upper left corner: an element of a page, whose text is `str` of it."""

    def __init__(self, width: float, height: float, name: str = "") -> None:
        about = Markup(' role="img" aria-label="{}"').format(name) if name else ' aria-hidden="true"'
        self.parts = [f'<svg viewBox="0 0 {width:g} {height:g}"{about}>']

    def __str__(self) -> str:
        return "".join([*self.parts, "</svg>"])

    def line(
        self, x: FloatArray, y: FloatArray, colour: str, width: float, dashed: bool = False, opacity: float = 1.0
    ) -> None:
        """A line through some points; NaN begins it anew."""
        look = ' stroke-dasharray="5 3"' * dashed + f' opacity="{opacity:g}"' * (opacity < 1)
        if drawn := _path(x, y):
            self.parts.append(f'<path d="{drawn}" fill="none" stroke="{colour}" stroke-width="{width:g}"{look}/>')

    def area(self, x: FloatArray, y: FloatArray, colour: str, opacity: float = 1.0) -> None:
        """A filled polygon."""
        look = f' opacity="{opacity:g}"' * (opacity < 1)
        self.parts.append(f'<path d="{_path(x, y)}Z" fill="{colour}"{look}/>')

    def marks(self, x: FloatArray, y: FloatArray, shape: str, colour: str, size: float = DOT) -> None:
        """Markers, each so many pixels wide."""
        for across, down in zip(x.tolist(), y.tolist()):
            if shape in OUTLINES:
                outline = np.array(OUTLINES[shape]) * size / 2
                self.area(outline[:, 0] + across, outline[:, 1] + down, colour)
            else:
                self.parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="{size / 2:g}" fill="{colour}"/>')

    def text(self, x: float, y: float, words: str, anchor: Anchor, size: float, turned: bool) -> None:
        """A line of words on a base line; turned, it runs upwards, with its middle there."""
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' * turned
        at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"' + f' font-size="{size:.1f}"' * (size < TYPE)
        below = Markup('p<tspan dy="3" font-size="9">T</tspan><tspan dy="-3">&#8203;</tspan>')
        self.parts.append(f"<text {at}{turn}>{escape(words).replace('p_T', below)}</text>")

    @contextmanager
    def noted(self, words: str) -> Iterator[None]:
        """What is drawn within has words that are shown under a pointer, where there is one."""
        self.parts.append(f"<g><title>{escape(words)}</title>")
        yield
        self.parts.append("</g>")

    def write(self, x: float, y: float, words: str, anchor: Anchor, room: float, turned: bool = False) -> None:
        """Words as `text` writes them, smaller where there is no room for them."""
        self.text(x, y, words, anchor, TYPE * min(1.0, room / width_of(words)), turned)


def _path(x: FloatArray, y: FloatArray) -> str:
    """The commands that draw a line."""
    parts, draws = [], False
    for across, down in zip(x.round(1).tolist(), y.round(1).tolist(), strict=True):
        there = across == across and down == down
        parts += [f"{'L' if draws else 'M'}{across:g} {down:g}"] if there else []
        draws = there
    return "".join(parts)


def width_of(words: str, size: float = TYPE) -> float:
    """Pixels that a line of words takes, at most."""
    return LETTER * size * max(len(words), 1)


@dataclass(frozen=True)
class PanelFrame:
    """The part of a canvas that shows data: pixels of its edges, and its axes with their ends."""

    left: float
    top: float
    right: float
    bottom: float
    x: ChartAxis
    y: ChartAxis

    def across(self, x: FloatArray) -> FloatArray:
        """Pixels of values; NaN beyond the ends of the axis."""
        return self.left + (self.right - self.left) * self.x.share(x)

    def down(self, y: FloatArray) -> FloatArray:
        """As `across`, of the other axis."""
        return self.bottom - (self.bottom - self.top) * self.y.share(y)

    def within(self, y: FloatArray) -> FloatArray:
        """Values, those beyond the ends of the axis moved to them: ends of intervals and of bars."""
        return np.clip(y, self.y.low, self.y.high)


def svg_of(panel: Panel) -> Markup:
    """A panel as an element of the page."""
    canvas = Canvas(*PANEL, f"{panel.y.label} against {panel.x.label}")
    draw_panel(canvas, panel, 0.0, 0.0, *PANEL)
    return Markup(str(canvas))


def svg_of_key(series: Series) -> Markup:
    """The sample of a series in the legend of a page."""
    canvas = Canvas(*KEY)
    draw_key(canvas, series, 0.0, 0.0)
    return Markup(str(canvas))


def draw_panel(canvas: Canvas, panel: Panel, left: float, top: float, width: float, height: float) -> None:
    """Draw a panel with its axes and titles into a rectangle."""
    bars = [one.y for one in panel.series if one.kind == "bars"]
    y = panel.y.over(np.concatenate([panel.values, *np.cumsum(bars, axis=0)]), height - 60, 0.0)
    left_of = left + 32 + max((width_of(words, TYPE) for _, words in y.ticks), default=0.0)
    halves = [(one.x, 0.5 if one.kind == "bars" else 0.0) for one in panel.series]
    places = np.concatenate([np.concatenate([at - half, at + half]) for at, half in halves])
    x = panel.x.over(places, left + width - left_of, LETTER * TYPE)
    right = left + width - 4 - max(6.0, width_of(x.ticks[-1][1]) / 2 if x.ticks else 0.0)
    up, bottom = top + (22 if panel.title else 8), top + height - 42
    side = min(right - left_of, bottom - up)
    ends = (left_of + side, up + side) if panel.square else (right, bottom)
    frame = PanelFrame(left_of, up, *ends, x, y)
    canvas.area(*_box(frame.left, frame.right, frame.bottom, frame.top), "#ffffff")
    for at, words in y.ticks:
        canvas.line(np.array([frame.left, frame.right]), np.repeat(frame.down(np.array([at])), 2), Colour.GRID, 1.0)
        canvas.write(frame.left - 6, float(frame.down(np.array([at]))[0]) + 4, words, "end", width)
    for at, words in x.ticks:
        middle = float(frame.across(np.array([at]))[0])
        if not bars:
            canvas.line(np.full(2, middle), np.array([frame.bottom, frame.top]), Colour.GRID, 1.0)
        canvas.write(middle, frame.bottom + 18, words, "middle", width)
    stacked: FloatArray = np.zeros(0)
    for series in panel.series:
        stacked = _draw_series(canvas, frame, series, stacked)
    edges = np.array([frame.left, frame.right, frame.right, frame.left, frame.left])
    canvas.line(edges, np.array([frame.bottom, frame.bottom, frame.top, frame.top, frame.bottom]), Colour.FRAME, 1.0)
    half = min(width_of(panel.x.label), width - 4) / 2
    middle = min((frame.left + frame.right) / 2, left + width - 2 - half)
    canvas.write(middle, frame.bottom + 36, panel.x.label, "middle", width - 4)
    half = min(width_of(panel.y.label), height - 4) / 2
    middle = min(max((frame.top + frame.bottom) / 2, top + 2 + half), top + height - 2 - half)
    canvas.write(left + 12, middle, panel.y.label, "middle", height - 4, turned=True)
    if panel.title:
        canvas.write(frame.left, frame.top - 7, panel.title, "start", left + width - frame.left)


def draw_key(canvas: Canvas, series: Series, left: float, top: float) -> None:
    """Draw the sample of a series in a legend."""
    width, height = KEY
    middle = np.full(2, top + height / 2)
    if series.kind == "bars" or (series.kind == "steps" and series.interval is not None):
        opacity = 1.0 if series.kind == "bars" else 0.25
        canvas.area(*_box(left + 2, left + width - 2, top + height - 1, top + 1), series.colour, opacity)
    if series.kind not in ("bars", "dots"):
        thick = 1.0 if series.kind == "points" else max(series.width, 1.2)
        canvas.line(np.array([left + 1, left + width - 1]), middle, series.colour, thick, series.dashed)
    if series.marker or series.kind == "dots":
        canvas.marks(np.array([left + width / 2]), middle[:1], series.marker, series.colour)


def _box(left: float, right: float, low: float, high: float) -> tuple[FloatArray, FloatArray]:
    return np.array([left, right, right, left]), np.array([low, low, high, high])


def _draw_series(canvas: Canvas, frame: PanelFrame, series: Series, stacked: FloatArray) -> FloatArray:
    """Draw a series; returns the upper ends of its bars, on which those of the next one stand."""
    notes = series.notes or [""] * len(series.y)
    if series.kind == "bars":
        low = stacked if len(stacked) else np.zeros(len(series.y))
        for x, bottom, value in zip(series.x, low, series.y):
            across, ends = np.array([x - 0.3, x + 0.3]), np.array([bottom, bottom + value])
            with canvas.noted(f"{series.name}, {frame.x.label} {x:g}: {value:.4g}"):
                canvas.area(*_box(*frame.across(across), *frame.down(frame.within(ends))), series.colour)
        return low + series.y
    if series.kind == "steps":
        across = frame.across(series.x)
        if series.interval is not None:
            for side, end, note in zip(pairwise(across), frame.within(series.interval).T, notes):
                if np.isfinite(end).all():
                    with canvas.noted(f"{series.name}, {note}"):
                        canvas.area(*_box(*side, *frame.down(end)), series.colour, 0.25)
        down = np.repeat(frame.down(series.y), 2)
        canvas.line(np.repeat(across, 2)[1:-1], down, series.colour, series.width, series.dashed)
    elif series.kind in ("line", "paths"):
        x, y = thinned(series.x, series.y) if series.kind == "line" else (series.x, series.y)
        across, down = frame.across(x), frame.down(y)
        canvas.line(across, down, series.colour, series.width, series.dashed, series.opacity)
        for at, of, value, place in zip(across.tolist(), down.tolist(), y, x) if series.marker else ():
            if math.isfinite(at + of):
                with canvas.noted(f"{series.name}, {frame.x.label} {place:g}: {value:.4g}"):
                    canvas.marks(np.array([at]), np.array([of]), series.marker, series.colour)
    elif series.kind == "dots":
        canvas.marks(frame.across(series.x), frame.down(series.y), "circle", series.colour, series.width)
    else:
        across, down = frame.across(series.x), frame.down(series.y)
        sides: FloatArray = np.full((1, len(across)), np.nan)
        ends = sides
        if series.bins is not None:
            sides = np.concatenate([frame.across(series.bins), sides])
        if series.interval is not None:
            ends = frame.down(frame.within(series.interval))
        for at, of, note, side, end in zip(across.tolist(), down.tolist(), notes, sides.T, ends.T):
            if math.isfinite(at + of):
                bars = np.append(side, np.full(len(end), at)), np.append(np.full(len(side), of), end)
                with canvas.noted(f"{series.name}, {note}"):
                    canvas.line(*bars, series.colour, 1.1)
                    canvas.marks(np.array([at]), np.array([of]), series.marker, series.colour)
    return stacked
