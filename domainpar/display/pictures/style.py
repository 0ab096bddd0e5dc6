"""How pictures look, and how they become files: the same bytes from the same numbers and the same matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin  # comes with matplotlib, which needs it

# Okabe and Ito's palette: told apart by colour-blind readers, also in print.
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, YELLOW, BLACK = (
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#E69F00",
    "#D55E00",
    "#CC79A7",
    "#F0E442",
    "#000000",
)
GREY, PALE = "#7a828b", "#c9ced6"

WIDTH = 9.0
"""Inches. A page shows a picture some 900 pixels wide, so that a point of type is 1.4 pixels there."""

DOTS_PER_INCH = 160

TITLE_LETTERS = 120
"""A longer title goes on in another line."""

SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters everywhere
    "font.size": 9.5,
    "axes.labelsize": 9.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#4c545d",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ed",
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
    "lines.linewidth": 1.5,
    "mathtext.default": "regular",
}


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture of a run.

    Attributes:
        name: Its file, without `.png`.
        figure: What is drawn; None where there is nothing to draw.
        absent: Why there is nothing, and what to do; empty where there is.
    """

    name: str
    figure: Figure | None = None
    absent: str = ""


@contextmanager
def in_style() -> Iterator[None]:
    """Draw and write in the style of these pictures, whatever the user's own settings of matplotlib are; those come
    back afterwards."""
    with matplotlib.style.context(["default", SETTINGS]):
        yield


def new_figure(height: float, title: str) -> Figure:
    """An empty figure of so many inches, with a line above it that says what it shows."""
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH)
    figure.set_layout_engine("constrained", w_pad=0.07, h_pad=0.05)
    FigureCanvasAgg(figure)
    words = "\n".join(textwrap.wrap(title, TITLE_LETTERS))
    figure.suptitle(words, x=0.008, ha="left", fontsize=9.5, color="#4c545d")
    return figure


def label(axes: Axes, x: str, y: str, title: str = "") -> Axes:
    """Say what the axes are, with their units, and what the frame shows."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title)
    return axes


def legend_above(axes: Axes, columns: int = 2, **more: Any) -> None:
    """A legend between the frame and what is above it: it can cover no data."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, **more)


def legend_below(figure: Figure, axes: Axes, columns: int, names: Sequence[str] = (), **more: Any) -> None:
    """One legend for all frames of a figure, below them, of what is drawn in one of them.

    Args:
        figure: The figure.
        axes: That frame.
        columns: Columns of the legend.
        names: What comes first, in this order.
        more: Further arguments of matplotlib's legend.
    """
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    ordered = {name: handles[name] for name in (*names, *handles)}
    figure.legend(list(ordered.values()), list(ordered), loc="outside lower center", ncols=columns, **more)


def plain(text: str) -> str:
    """Words of a run for a picture, where a dollar would begin a formula."""
    return text.replace("$", r"\$")


def png(figure: Figure) -> bytes:
    """The figure as a PNG file: 256 colours, a third of the bytes; it says whose it is (`is_own`), and no time."""
    drawn, file = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DOTS_PER_INCH)
    pixels = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    text = PngImagePlugin.PngInfo()
    text.add_text("Software", "domainpar")
    pixels.save(file, "png", optimize=True, dpi=(DOTS_PER_INCH, DOTS_PER_INCH), pnginfo=text)
    return file.getvalue()


def is_own(path: Path) -> bool:
    """Whether a file is a picture that `png` made."""
    with path.open("rb") as file:
        return b"tEXtSoftware\0domainpar" in file.read(4096)
