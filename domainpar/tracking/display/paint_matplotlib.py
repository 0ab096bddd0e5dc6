"""matplotlib as a canvas, without a screen: the same bytes from the same numbers and the same matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon
from matplotlib.text import Text
from matplotlib.transforms import Affine2D
from PIL import Image, PngImagePlugin  # comes with matplotlib, which needs it

from domainpar.tracking.display.chart import FRAME, GRID, TEXT, Chart, Series
from domainpar.tracking.display.paint import KEY, Anchor, Canvas, draw_key, draw_panel, width_of
from domainpar.tracking.events.graph import FloatArray

WIDTH = 9.0
"""Inches. A page shows a picture some 900 pixels wide, so that a point of type is 1.4 pixels there."""

PIXELS_PER_INCH = 100
POINTS = 72 / PIXELS_PER_INCH
"""Of a pixel."""

ROW = 290.0
"""Pixels of each row of panels."""

LINE = 18.0
"""Pixels of a line of words."""

DOTS_PER_INCH = 160

TITLE_LETTERS = 120
"""A longer title goes on in another line."""

SIDES = {"start": "left", "middle": "center", "end": "right"}
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


class Picture(Canvas):
    """A figure of matplotlib as a canvas."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH), dpi=DOTS_PER_INCH)
        FigureCanvasAgg(self.figure)
        upside_down = Affine2D().scale(1, -1).translate(0, height).scale(1 / PIXELS_PER_INCH)
        self.here = upside_down + self.figure.dpi_scale_trans

    def line(self, x: FloatArray, y: FloatArray, colour: str, width: float, dashed: bool = False) -> None:
        self._add(Line2D(x, y, color=colour, linewidth=POINTS * width, linestyle="--" if dashed else "-"))

    def area(self, x: FloatArray, y: FloatArray, colour: str, opacity: float = 1.0) -> None:
        self._add(Polygon(np.stack([x, y], axis=1), facecolor=colour, alpha=opacity, linewidth=0))

    def text(self, x: float, y: float, words: str, anchor: Anchor, size: float, turned: bool) -> None:
        way: dict[str, Any] = {"ha": SIDES[anchor], "va": "baseline"}
        if turned:  # matplotlib has no base line there: below it letters have a third of their height
            x, way = x + size / 3, {"ha": "right", "va": "center", "rotation": 90}
        self._add(Text(x, y, text(words), color=TEXT, fontsize=POINTS * size, **way))

    def _add(self, artist: Artist) -> None:
        artist.set_transform(self.here)
        artist.set_zorder(len(self.figure.get_children()))  # the later lies above the earlier
        self.figure.add_artist(artist, clip=False)


def paint(chart: Chart) -> Figure:
    """The picture of a chart: its title, the legend of all panels, and the panels, else each below its own legend."""
    title, columns = textwrap.wrap(chart.title, TITLE_LETTERS), min(chart.columns, len(chart.shown))
    width = WIDTH * PIXELS_PER_INCH / columns
    rows = [chart.shown[place : place + columns] for place in range(0, len(chart.shown), columns)]
    shared = _placed(chart.legend, WIDTH * PIXELS_PER_INCH)
    own = [[_placed(() if chart.legend else panel.series, width) for panel in row] for row in rows]
    above = LINE * (len(title) + _lines(shared)) + 10
    depths = [LINE * max(map(_lines, of_row)) for of_row in own]
    canvas = Picture(WIDTH * PIXELS_PER_INCH, above + sum(depths) + ROW * len(rows))
    for number, words in enumerate(title):
        canvas.write(6.0, LINE * (number + 1), words, "start", WIDTH * PIXELS_PER_INCH - 12)
    _draw_legend(canvas, shared, 0.0, LINE * len(title) + 6)
    for row, of_row, depth in zip(rows, own, depths, strict=True):
        for place, (panel, legend) in enumerate(zip(row, of_row, strict=True)):
            _draw_legend(canvas, legend, place * width, above)
            draw_panel(canvas, panel, place * width, above + depth, width - 8, ROW - 8)
        above += depth + ROW
    return canvas.figure


Placed = tuple[float, int, Series, Sequence[str]]


def _placed(legend: Sequence[Series], width: float) -> list[Placed]:
    """The entries of a legend one after the other: pixels from the left, line, series, and its name in lines."""
    placed: list[Placed] = []
    x, line, deepest = 6.0, 0, 1
    for series in legend:
        names = textwrap.wrap(series.name, int((width - KEY[0] - 24) / width_of(" ")))
        takes = KEY[0] + 20 + max(map(width_of, names))
        if x > 6 and x + takes > width:
            x, line, deepest = 6.0, line + deepest, 1
        placed.append((x, line, series, names))
        x, deepest = x + takes, max(deepest, len(names))
    return placed


def _lines(legend: Sequence[Placed]) -> int:
    """The lines that a legend takes."""
    return max((line + len(names) for _, line, _, names in legend), default=0)


def _draw_legend(canvas: Canvas, legend: Sequence[Placed], left: float, top: float) -> None:
    for x, line, series, names in legend:
        draw_key(canvas, series, left + x, top + LINE * line + 3)
        for number, words in enumerate(names):
            base = top + LINE * (line + number) + 13
            canvas.write(left + x + KEY[0] + 6, base, words, "start", width_of(words))


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
