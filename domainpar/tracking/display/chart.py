"""A chart as plain values: described once beside its numbers, painted by `html` for the page and by
`paint_matplotlib` for a picture. Whatever a reader could compare between the two stands here: numbers, names, colours,
limits, ticks of logarithmic axes. A painter decides on fonts, sizes and margins only.

Texts are plain; a painter typesets `p_T`, and escapes whatever would be markup to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from domainpar.tracking.events.graph import FloatArray

# Okabe and Ito's palette: colour-blind readers tell its colours apart, also in print.
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
ORANGE, VERMILION, PURPLE, BLACK = "#E69F00", "#D55E00", "#CC79A7", "#000000"
GREY, PALE, GRID, FRAME, TEXT = "#7a828b", "#c9ced6", "#e6e9ed", "#4c545d", "#2b333d"

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, eq=False)
class Series:
    """Numbers under one name.

    Attributes:
        name: Its entry in the legend.
        kind: `line` joins its points, `steps` has a level for each bin, `points` a marker for each bin, `bars` stand
            upon those of the series before.
        colour: `#rrggbb`.
        x: Places of the values, [n]; of steps the borders of the bins, [n + 1].
        y: The values, [n]; NaN where nothing is drawn.
        interval: Lower and upper ends of the values' intervals, [2, n]; None without.
        bins: Lower and upper border of the bin of each point, [2, n]; None where points have no width.
        marker: Shape of its points: `circle`, `diamond`, `square`, `triangle` or `cross`; empty for none.
        dashed: Whether its line is dashed: what belongs to the run beside.
        width: Of its line, in points.
        notes: Words of the page on each point under the pointer; none: its coordinates.
        table: What was counted in each bin, also where nothing is drawn: its borders, the value, the ends of its
            interval, and what was divided by what, [n, 7]; None where values are not of bins.
    """

    name: str
    kind: Literal["line", "steps", "points", "bars"]
    colour: str
    x: FloatArray
    y: FloatArray
    interval: FloatArray | None = None
    bins: FloatArray | None = None
    marker: str = ""
    dashed: bool = False
    width: float = 1.5
    notes: tuple[str, ...] = ()
    table: FloatArray | None = None


@dataclass(frozen=True)
class ChartAxis:
    """One axis of a panel.

    Attributes:
        label: The quantity along it, with its unit.
        low, high: Its ends; None: those of the numbers.
        log: Whether it is logarithmic.
        ticks: Their places and texts; none: as a painter likes, which a reader may zoom into.
    """

    label: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Panel:
    """One frame with its series.

    Attributes:
        name: Unique in its chart.
        series: From the lowest layer to the highest.
        x, y: Its axes.
        title: A remark above it; may be empty.
        caption: Its content, in a sentence or two; empty where the chart has a caption for all panels.
    """

    name: str
    series: tuple[Series, ...]
    x: ChartAxis
    y: ChartAxis
    title: str = ""
    caption: str = ""


@dataclass(frozen=True, eq=False)
class Chart:
    """A picture of the report; on the page a figure, or a figure for each panel.

    Attributes:
        name: Its file, without `.png`, and its id in the page.
        title: A line above the picture on the events and cuts. The page has them in the text of the section.
        panels: Its frames, row by row.
        columns: Frames side by side.
        caption: The content of all panels, of which the page makes one figure. Empty: each panel has its own.
        variant: Tells it from other charts of this name; the first of these is the picture.
        on_page: False where all of its panels are on the page already.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    columns: int = 2
    caption: str = ""
    variant: str = ""
    on_page: bool = True

    @property
    def legend_panel(self) -> Panel | None:
        """The panel whose legend holds for all of several; None where each needs its own."""
        fullest = max(self.panels, key=lambda panel: len(panel.series))
        names = {series.name for series in fullest.series}
        same = all(series.name in names for panel in self.panels for series in panel.series)
        return fullest if same and len(self.panels) > 1 else None


def log_axis(label: str, values: FloatArray, low: float | None = None, high: float | None = None) -> ChartAxis:
    """A logarithmic axis with its limits and ticks; a linear one where a value is not positive, or none is there.

    Args:
        label: The quantity along it.
        values: All that is drawn; may hold NaN.
        low, high: Its ends, if not a little beyond the values.
    """
    finite = values[np.isfinite(values)]
    if len(finite) == 0 or finite.min() <= 0:
        return ChartAxis(label)
    # A twentieth of the span as the eye sees it, which on such an axis is a factor.
    spare = (finite.max() / finite.min()) ** 0.05 if finite.max() > finite.min() else 1.5
    low = finite.min() / spare if low is None else low
    high = finite.max() * spare if high is None else high
    return ChartAxis(label, float(low), float(high), log=True, ticks=_log_ticks(float(low), float(high)))


def _log_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    """Powers of ten over three decades or more, 1-2-5 over fewer, even steps where not three of these are in it."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if high / low >= 1000:
        return tuple((10.0**n, f"10{str(n).translate(_SUPERSCRIPTS)}") for n in powers if low <= 10.0**n <= high)
    ticks = [factor * 10.0**n for n in powers for factor in (1, 2, 5) if low <= factor * 10.0**n <= high]
    if len(ticks) < 3:
        rough = (high - low) / 4  # four steps at most, of 1, 2 or 5 of some power of ten
        step = 10.0 ** math.floor(math.log10(rough))
        # The tolerance: a rough step of 0.2 may come out as 0.20000000000000001.
        step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= rough * (1 - 1e-9))
        ticks = [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return tuple((tick, f"{tick:g}") for tick in ticks)
