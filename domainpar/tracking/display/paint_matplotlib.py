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
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon
from matplotlib.text import Text
from matplotlib.transforms import Affine2D
from PIL import Image, PngImagePlugin  # comes with matplotlib, which needs it

from domainpar.tracking.display.chart import Chart, Colour, Series
from domainpar.tracking.display.paint import DOT, KEY, OUTLINES, Anchor, Canvas, draw_key, draw_panel, width_of
from domainpar.tracking.events.graph import FloatArray

WIDTH = 900.0
"""Pixels of a picture; a page shows it as wide."""

PIXELS_PER_INCH, DOTS_PER_INCH = 100, 160
POINTS = 72 / PIXELS_PER_INCH
"""Of a pixel."""

LINE = 18.0
"""Pixels of a line of words."""

TITLE_LETTERS = 120
"""A longer title goes on in another line."""

SIDES = {"start": "left", "middle": "center", "end": "right"}
SETTINGS = {"font.family": "DejaVu Sans", "mathtext.default": "regular"}
"""The letters come with matplotlib: the same everywhere."""


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

    def line(
        self, x: FloatArray, y: FloatArray, colour: str, width: float, dashed: bool = False, opacity: float = 1.0
    ) -> None:
        style: Any = "--" if dashed else "-"
        self._add(Line2D(x, y, color=colour, linewidth=POINTS * width, linestyle=style, alpha=opacity))

    def area(self, x: FloatArray, y: FloatArray, colour: str, opacity: float = 1.0) -> None:
        self._add(Polygon(np.stack([x, y], axis=1), facecolor=colour, alpha=opacity, linewidth=0))

    def marks(self, x: FloatArray, y: FloatArray, shape: str, colour: str, size: float = DOT) -> None:
        marker: Any = [(across, -down) for across, down in OUTLINES[shape]] if shape in OUTLINES else "o"
        look: dict[str, Any] = {"color": colour, "markersize": POINTS * size, "markeredgewidth": 0}
        self._add(Line2D(x, y, linestyle="", marker=marker, **look))

    def text(self, x: float, y: float, words: str, anchor: Anchor, size: float, turned: bool) -> None:
        way: dict[str, Any] = {"ha": SIDES[anchor], "va": "baseline"}
        if turned:  # matplotlib has no base line there: below it letters have a third of their height
            x, way = x + size / 3, {"ha": "right", "va": "center", "rotation": 90}
        self._add(Text(x, y, text(words), color=Colour.TEXT, fontsize=POINTS * size, **way))

    @contextmanager
    def noted(self, words: str) -> Iterator[None]:
        yield

    def _add(self, artist: Artist) -> None:
        artist.set_transform(self.here)
        artist.set_zorder(len(self.figure.artists) + len(self.figure.lines))  # the later lies above the earlier
        self.figure.add_artist(artist, clip=False)


def paint(chart: Chart) -> Figure:
    """The picture of a chart: its title, the legend of all panels, and the panels, else each below its own legend."""
    title, columns = textwrap.wrap(chart.title, TITLE_LETTERS), min(chart.columns, len(chart.shown))
    width = WIDTH / columns
    rows = [chart.shown[place : place + columns] for place in range(0, len(chart.shown), columns)]
    shared = _lines(chart.legend, WIDTH)
    own = [[_lines(() if chart.legend else panel.series, width) for panel in row] for row in rows]
    depths = [LINE * max(map(len, of_row)) for of_row in own]
    top = LINE * (len(title) + len(shared)) + 10
    canvas = Picture(WIDTH, top + sum(depths) + chart.row * len(rows))
    for number, words in enumerate(title):
        canvas.write(6.0, LINE * (number + 1), words, "start", WIDTH - 12)
    _draw_legend(canvas, shared, 0.0, LINE * len(title) + 6, WIDTH)
    for row, of_row, depth in zip(rows, own, depths, strict=True):
        for place, (panel, legend) in enumerate(zip(row, of_row, strict=True)):
            _draw_legend(canvas, legend, place * width, top, width)
            draw_panel(canvas, panel, place * width, top + depth, width - 8, chart.row - 8)
        top += depth + chart.row
    return canvas.figure


def _lines(legend: Sequence[Series], width: float) -> list[list[tuple[float, Series]]]:
    """The entries of a legend, line by line, each with its place: pixels from the left."""
    lines: list[list[tuple[float, Series]]] = []
    end = width
    for series in legend:
        if end > 6 and end + KEY[0] + 22 + width_of(series.name) > width:
            lines.append([])
            end = 6.0
        lines[-1].append((end, series))
        end += KEY[0] + 22 + width_of(series.name)
    return lines


def _draw_legend(
    canvas: Canvas, lines: Sequence[Sequence[tuple[float, Series]]], left: float, top: float, width: float
) -> None:
    for number, line in enumerate(lines):
        for x, series in line:
            draw_key(canvas, series, left + x, top + LINE * number + 3)
            at = x + KEY[0] + 6
            canvas.write(left + at, top + LINE * number + 13, series.name, "start", width - at - 8)


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
