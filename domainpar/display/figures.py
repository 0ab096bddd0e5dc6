"""How figures look, and what each consists of: plotly, of plain numbers. The only files that know plotly are
`figures*.py` and `html.py`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

# Okabe and Ito's palette: told apart by colour-blind readers, also in print.
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, BLACK = (
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#E69F00",
    "#D55E00",
    "#CC79A7",
    "#222222",
)
GREY = "#9aa3ad"
GRID = "#e6e9ed"
TEXT = "#2b333d"

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Figure:
    """A figure of the report.

    Attributes:
        name: Its id in the page.
        caption: What it shows, in a sentence or two.
        variants: The plots to choose from, by name; the first is shown first.
        height: In pixels.
        wide: Whether it takes the whole width.
    """

    name: str
    caption: str
    variants: Mapping[str, go.Figure] = field(default_factory=dict)
    height: int = 340
    wide: bool = False

    def as_json(self) -> dict[str, Any]:
        """Data and layout of each variant, plain JSON values."""
        return {name: json.loads(plot.to_json()) for name, plot in self.variants.items()}


@functools.cache
def _style() -> go.layout.Template:
    """What all plots share: kept in a template, so that it is checked once and not for every axis."""
    axis = {
        "gridcolor": GRID,
        "linecolor": "#8a94a0",
        "showline": True,
        "mirror": True,
        "ticks": "outside",
        "tickcolor": "#8a94a0",
        "zeroline": False,
        "automargin": True,
        "title": {"standoff": 8, "font": {"size": 13}},
    }
    layout = {
        "font": {"family": FONT, "size": 13, "color": TEXT},
        "margin": {"l": 64, "r": 28, "t": 30, "b": 52},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "hovermode": "closest",
        "hoverlabel": {"font": {"family": FONT, "size": 12}},
        "showlegend": True,
        "modebar": {"orientation": "v", "bgcolor": "rgba(255,255,255,0.7)"},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}},
        "xaxis": axis,
        "yaxis": axis,
    }
    return go.layout.Template(layout=layout)


def blank(height: int = 340, **layout: Any) -> go.Figure:
    """An empty plot in the style of the report."""
    return go.Figure(layout={"template": _style(), "height": height, **layout})


def axes(
    plot: go.Figure, x: str, y: str, xaxis: dict[str, Any] | None = None, yaxis: dict[str, Any] | None = None
) -> go.Figure:
    """Label the two axes of a plot, in the words of plotly where more is to be said of them."""
    plot.update_layout(xaxis={"title": {"text": x}, **(xaxis or {})}, yaxis={"title": {"text": y}, **(yaxis or {})})
    return plot


def line(x: Any, y: Any, name: str, colour: str, **more: Any) -> go.Scatter:
    """A line of a plot."""
    style = {"color": colour, "width": more.pop("width", 1.8), "dash": more.pop("dash", "solid")}
    return go.Scatter(x=x, y=y, name=plain(name), mode=more.pop("mode", "lines"), line=style, **more)


def plain(text: str) -> str:
    """Text of a run for a plot, where brackets and `%{` would mean something."""
    return text.replace("<", "‹").replace(">", "›").replace("%{", "% {")
