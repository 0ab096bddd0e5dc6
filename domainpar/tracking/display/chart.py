"""A chart as plain values, described once beside its numbers: series, axes, panels. `paint` draws it, for the page and
as a picture.

Texts are plain; the writer of one typesets `p_T`, and escapes whatever would be markup there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from domainpar.tracking.events.graph import FloatArray


class Colour:
    """Okabe and Ito's palette, which colour-blind readers tell apart, also in print; and the greys around it."""

    BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
    ORANGE, VERMILION, PURPLE, BLACK = "#E69F00", "#D55E00", "#CC79A7", "#000000"
    GREY, PALE, GRID, FRAME, TEXT = "#7a828b", "#c9ced6", "#e6e9ed", "#4c545d", "#2b333d"
    LINES = BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, PALE
    PARTS = BLUE, ORANGE, GREEN, BLACK, SKY, VERMILION, GREY, PURPLE


MOST_POINTS = 800
"""Of a line: a panel is some 400 pixels wide."""

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, eq=False)
class Series:
    """Numbers under one name.

    Attributes:
        name: Its entry in the legend.
        kind: `line` joins its points, `steps` has a level for each bin, `points` a marker for each bin, `bars` stand
            upon those of the series before; `dots` and `paths` are points and lines of any number, drawn as they are.
        colour: `#rrggbb`.
        x: Places of the values, [n]; of steps the borders of the bins, [n + 1].
        y: The values, [n]; NaN where nothing is drawn.
        interval: Lower and upper ends of the values' intervals, [2, n]; None without.
        bins: Lower and upper border of the bin of each point, [2, n]; None where points have no width.
        marker: Shape of its points: `circle`, `diamond`, `square`, `triangle` or `cross`; empty for none.
        dashed: Whether its line is dashed: what belongs to the run beside.
        width: Of its line or its dots, in pixels.
        opacity: Of its line.
        notes: Words of the page on each point under the pointer.
        table: What was counted in each bin, also where nothing is drawn: its borders, the value, the ends of its
            interval, and what was divided by what, [n, 7]; None where values are not of bins.
    """

    name: str
    kind: Literal["line", "steps", "points", "bars", "dots", "paths"]
    colour: str
    x: FloatArray
    y: FloatArray
    interval: FloatArray | None = None
    bins: FloatArray | None = None
    marker: str = ""
    dashed: bool = False
    width: float = 1.5
    opacity: float = 1.0
    notes: tuple[str, ...] = ()
    table: FloatArray | None = None


@dataclass(frozen=True)
class ChartAxis:
    """One axis of a panel."""

    label: str  # the quantity along it, with its unit
    # low, high: its ends; None: a little beyond the numbers
    low: float | None = None
    high: float | None = None
    log: bool = False  # whether it is logarithmic; its ends and ticks are then known
    ticks: tuple[tuple[float, str], ...] = ()  # their places and texts; none: even steps

    def over(self, values: FloatArray, room: float, letter: float) -> ChartAxis:
        """The axis with ends and ticks.

        Args:
            values: What is drawn along it; may hold NaN.
            room: Its length in pixels.
            letter: Pixels along it that a letter of a tick takes.
        """
        known = values[np.isfinite(values)]
        least, most = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
        spare = 0.05 * (most - least) or 0.05 * abs(most) or 0.5
        low = least - spare if self.low is None else self.low
        high = max(most, low) + spare if self.high is None else self.high
        low = low if low < high else high - spare
        ticks = self.ticks or _even_ticks(low, high, room / (40 + 4 * letter))
        laid, end = replace(self, low=low, high=high), -math.inf
        kept: list[tuple[float, str]] = []
        for tick, words in ticks:  # those that would touch the one before are left out
            middle = room * float(laid.share(np.array([tick]))[0])
            half = (letter * len(words) or 10) / 2 + 3
            if middle - half >= end:
                kept, end = [*kept, (tick, words)], middle + half
        return replace(laid, ticks=tuple(kept))

    def share(self, values: FloatArray) -> FloatArray:
        """Where values lie on an axis with ends, from 0 to 1; NaN beyond them."""
        assert self.low is not None, "it was laid over values"
        assert self.high is not None, "it was laid over values"
        at: FloatArray = np.where((values >= self.low) & (values <= self.high), values, np.nan)
        if self.log:
            at = np.log(at / self.low) / math.log(self.high / self.low)
        else:
            at = (at - self.low) / (self.high - self.low)
        return at


@dataclass(frozen=True, eq=False)
class Panel:
    """One frame with its series."""

    name: str  # unique in its chart
    series: tuple[Series, ...]  # from the lowest layer to the highest
    # x, y: its axes
    x: ChartAxis
    y: ChartAxis
    title: str = ""  # a remark above it; may be empty
    caption: str = ""  # its content, in a sentence or two; empty where the chart has a caption for all panels
    square: bool = False  # whether its frame is as wide as high

    @property
    def values(self) -> FloatArray:
        """All that is drawn of its series, one after the other; empty where nothing is."""
        values: FloatArray = np.concatenate([np.zeros(0), *(series.y for series in self.series)])
        return values[np.isfinite(values)]


@dataclass(frozen=True, eq=False)
class Chart:
    """A picture of the report, and panels of the page."""

    name: str  # its file, without `.png`, and its id in the page
    title: str  # a line above the picture on the events and cuts. The page has them in the text of the section.
    panels: tuple[Panel, ...]  # its frames, row by row
    columns: int = 2  # frames side by side in the picture
    heading: str = ""  # of its panels on the page; may be empty
    caption: str = ""  # the content of all panels. Empty: each panel has its own.
    variant: str = ""  # the difference from other charts of this name; the first of these is the picture
    on_page: bool = True  # False where all of its panels are on the page already
    row: float = 290.0  # pixels of a row of panels in the picture
    zero: str = ""  # why panels that are zero everywhere are not drawn; empty where they are

    @property
    def shown(self) -> tuple[Panel, ...]:
        """The panels that have something to draw."""
        values = ((panel, panel.values) for panel in self.panels)
        return tuple(panel for panel, known in values if (known != 0).any() or (len(known) and not self.zero))

    @property
    def remarks(self) -> str:
        """Sentences on panels that are left out, and on lines that are thinned; empty without either."""
        empty = [panel for panel in self.panels if not len(panel.values)]
        zero = [panel for panel in self.panels if panel not in empty and panel not in self.shown]
        longest = max((len(one.x) for panel in self.shown for one in panel.series if one.kind == "line"), default=0)
        remarks = [
            f"Not drawn: {self._named(panels)} ({why})." if self.shown else f"Not drawn: {why}."
            for why, panels in (("no bin holds enough", empty), (self.zero, zero))
            if panels
        ]
        if longest > MOST_POINTS:
            every = -(-longest // (MOST_POINTS // 2))
            remarks.append(
                f"Of {longest:,} values along a line the lowest and the highest of every {every:,} are drawn, so that "
                "no spike is lost."
            )
        return " ".join(remarks)

    def _named(self, panels: list[Panel]) -> str:
        """Panels by their variants."""
        labels = [[label.partition(" [")[0] for label in (panel.y.label, panel.x.label)] for panel in panels]
        alike = len({panel.y.label for panel in self.panels}) == 1
        return ", ".join(x if alike else f"{y} against {x}" for y, x in labels)

    @property
    def legend(self) -> tuple[Series, ...]:
        """The series whose names hold for all of its panels; none where each panel needs its own."""
        fullest = max(self.panels, key=lambda panel: len(panel.series)).series
        names = {series.name for series in fullest}
        same = all(series.name in names for panel in self.panels for series in panel.series)
        return fullest if same and len(self.panels) > 1 else ()


def thinned(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """A line of at most about `MOST_POINTS`: of stretches of equal length the lowest and the highest value, and both
    ends.

    Args:
        x: Places, [n], in order.
        y: Values, [n]; may hold NaN.
    """
    if len(x) <= MOST_POINTS:
        return x, y
    kept = {0, len(x) - 1}
    for stretch in np.array_split(np.arange(len(x)), MOST_POINTS // 2):
        known = stretch[np.isfinite(y[stretch])]
        kept |= {int(known[y[known].argmin()]), int(known[y[known].argmax()])} if len(known) else {int(stretch[0])}
    rows = sorted(kept)
    return x[rows], y[rows]


def log_axis(label: str, values: FloatArray, low: float | None = None, high: float | None = None) -> ChartAxis:
    """A logarithmic axis with its limits and ticks; a linear one where a value is not positive, or none is there.

    Args:
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
    return ChartAxis(label, float(low), float(high), log=True, ticks=log_ticks(float(low), float(high)))


def _even_ticks(low: float, high: float, most: float) -> tuple[tuple[float, str], ...]:
    """Steps of 1, 2 or 5 times a power of ten, as many as there is room for."""
    rough = (high - low) / max(most, 2)
    power = 10.0 ** math.floor(math.log10(rough))
    # The tolerance: a rough step of 0.2 may come out as 0.20000000000000001.
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    tiny = max(abs(low), abs(high)) < 1e-4
    texts = [_short(tick) if tiny else f"{tick + 0.0:,.{digits}f}" for tick in ticks]
    return tuple((tick, words.replace("-", "−")) for tick, words in zip(ticks, texts))


def _short(number: float) -> str:
    """A number in few letters: 0.002, 5×10⁻⁵."""
    digits, _, power = f"{number:.3g}".partition("e")
    return digits + (f"×10{str(int(power)).translate(_SUPERSCRIPTS)}" if power else "")


def log_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    """Powers of ten over three decades or more, 1-2-5 over fewer, even steps where not three of these are in it."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if high / low >= 1000:
        return tuple((10.0**n, f"10{str(n).translate(_SUPERSCRIPTS)}") for n in powers if low <= 10.0**n <= high)
    ticks = [factor * 10.0**n for n in powers for factor in (1, 2, 5) if low <= factor * 10.0**n <= high]
    return tuple((tick, _short(tick)) for tick in ticks) if len(ticks) > 2 else _even_ticks(low, high, 4)
