"""Charts as PNG files, made without a screen: the same bytes from the same numbers and the same matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin  # comes with matplotlib, which needs it

from domainpar.tracking.display.chart import FRAME, GRID, Chart, Panel, Series

WIDTH = 9.0
"""Inches. A page shows a picture some 900 pixels wide, so that a point of type is 1.4 pixels there."""

ROW, ONLY_ROW = 2.9, 3.6
"""Inches of each row of panels, and of a single row."""

DOTS_PER_INCH = 160

TITLE_LETTERS = 120
"""A longer title goes on in another line."""

LEGEND_LETTERS = 132
"""Of a legend as wide as the picture; each entry takes five more than its name has."""

MARKERS = {"circle": "o", "diamond": "D", "square": "s", "triangle": "^", "cross": "X", "": ""}
SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters everywhere
    "font.size": 9.5,
    "axes.labelsize": 9.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": FRAME,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.direction": "in",
    "ytick.direction": "in",
    "xtick.top": True,
    "ytick.right": True,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.4,
    "legend.borderaxespad": 0.2,
    "mathtext.default": "regular",
}


@contextmanager
def in_style() -> Iterator[None]:
    """Draw and write in the style of these pictures, whatever the user's own settings of matplotlib are; those come
    back afterwards."""
    with matplotlib.style.context(["default", SETTINGS]):
        yield


def paint(chart: Chart) -> Figure:
    """The picture of a chart; its legend below it where all panels share one, else above each of them."""
    rows = -(-len(chart.panels) // chart.columns)
    figure = new_figure(rows * ROW if rows > 1 else ONLY_ROW, chart.title)
    frames = [figure.add_subplot(rows, chart.columns, place + 1) for place in range(len(chart.panels))]
    for axes, panel in zip(frames, chart.panels, strict=True):
        _paint_panel(axes, panel)
        if chart.legend_panel is None:
            columns = _columns(panel, LEGEND_LETTERS // chart.columns)
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns)
    if chart.legend_panel is not None:
        named = frames[chart.panels.index(chart.legend_panel)]
        names = [text(series.name) for series in chart.legend_panel.series]
        legend_below(figure, named, _columns(chart.legend_panel, LEGEND_LETTERS), names)
    return figure


def new_figure(height: float, title: str) -> Figure:
    """An empty figure of a height in inches, with a title above it."""
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH)
    figure.set_layout_engine("constrained", w_pad=0.07, h_pad=0.05)
    FigureCanvasAgg(figure)
    words = text("\n".join(textwrap.wrap(title, TITLE_LETTERS)))
    figure.suptitle(words, x=0.008, ha="left", fontsize=9.5, color=FRAME)
    return figure


def legend_below(figure: Figure, axes: Axes, columns: int, names: Sequence[str] = (), **more: Any) -> None:
    """A legend for all frames of a figure, below them, of the names in one of its frames.

    Args:
        figure: The figure.
        axes: That frame.
        columns: Columns of the legend.
        names: Those that come first, in this order.
        more: Further arguments of matplotlib's legend.
    """
    # By name, each once; matplotlib gives handles first.
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    ordered = {name: handles[name] for name in (*names, *handles)}
    figure.legend(list(ordered.values()), list(ordered), loc="outside lower center", ncols=columns, **more)


def text(words: str) -> str:
    """Words for matplotlib, to which a dollar would begin a formula."""
    return words.replace("$", r"\$").replace("p_T", "$p_T$")


def png(figure: Figure) -> bytes:
    """The figure as a PNG file: 256 colours, a third of the bytes; it says whose it is (`is_own`), and no time."""
    drawn, file = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DOTS_PER_INCH)
    pixels = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    info = PngImagePlugin.PngInfo()
    info.add_text("Software", "domainpar")
    pixels.save(file, "png", optimize=True, dpi=(DOTS_PER_INCH, DOTS_PER_INCH), pnginfo=info)
    return file.getvalue()


def is_own(path: Path) -> bool:
    """Whether a file is a picture that `png` made."""
    with path.open("rb") as file:
        return b"tEXtSoftware\0domainpar" in file.read(4096)


def _columns(panel: Panel, letters: int) -> int:
    """Columns of a legend that has room for some letters."""
    widths = [len(series.name) + 5 for series in panel.series]
    return len(widths) if sum(widths) <= letters else max(1, letters // max(widths))


def _paint_panel(axes: Axes, panel: Panel) -> None:
    stacked: Any = 0.0  # bars stand upon those of the series before
    for series in panel.series:
        if series.kind == "bars":
            axes.bar(series.x, series.y, 0.6, bottom=stacked, color=series.colour, label=text(series.name))
            stacked = stacked + series.y
            axes.grid(False, axis="x")
            axes.tick_params(axis="x", length=0)
        else:
            _paint_series(axes, series)
    axes.set(xlabel=text(panel.x.label), ylabel=text(panel.y.label), title=text(panel.title))
    for axis, set_scale, set_limits, described in (
        (axes.xaxis, axes.set_xscale, axes.set_xlim, panel.x),
        (axes.yaxis, axes.set_yscale, axes.set_ylim, panel.y),
    ):
        if described.log:
            set_scale("log")
        set_limits(described.low, described.high)
        if described.ticks:
            axis.set_ticks([at for at, _ in described.ticks], [words for _, words in described.ticks])
            axis.set_ticks([], minor=True)


def _paint_series(axes: Axes, series: Series) -> None:
    look: dict[str, Any] = {"color": series.colour, "linewidth": series.width, "label": text(series.name)}
    if series.kind == "line":
        dash, marker = "--" if series.dashed else "-", MARKERS[series.marker]
        axes.plot(series.x, series.y, linestyle=dash, marker=marker, markersize=3.0, **look)
    elif series.kind == "steps":
        if series.interval is not None:
            low, high = series.interval
            axes.stairs(high, series.x, baseline=low, fill=True, color=series.colour, alpha=0.25, linewidth=0)
        dash = "--" if series.dashed else "-"
        axes.stairs(series.y, series.x, baseline=None, linestyle=dash, **look)
    else:
        if series.bins is not None:
            axes.hlines(series.y, *series.bins, color=series.colour, linewidth=0.9, alpha=0.55)
        ends = None
        if series.interval is not None:  # no less than nothing: rounding may put an end beyond the value
            ends = np.maximum([series.y - series.interval[0], series.interval[1] - series.y], 0)
        look |= {"linewidth": 0, "elinewidth": 1.1, "markersize": 4.0}
        axes.errorbar(series.x, series.y, yerr=ends, fmt=MARKERS[series.marker], **look)
