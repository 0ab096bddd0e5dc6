"""The report as one HTML file that needs nothing else: no network, no fonts, no other files.

Its charts are given to plotly.js as plain JSON values.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from domainpar import __version__
from domainpar.tracking.display.chart import FRAME, GRID, TEXT, Chart, ChartAxis, Panel, Series
from domainpar.tracking.display.sections import Page
from domainpar.tracking.events.graph import FloatArray

SCRIPTS = ("figures.js", "canvas.js", "painting.js", "event.js")

HEIGHT, ROW = 340, 310
"""Pixels of a figure with a single panel, and of each row of several."""

LEGEND_LETTERS = 60
"""Of a line in the legend of the narrowest figure."""

GAP_X, GAP_Y = 0.1, 0.16
"""Between panels, as a share of the figure."""

SYMBOLS = {"circle": "circle", "diamond": "diamond", "square": "square", "triangle": "triangle-up", "cross": "x"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
AXIS: Mapping[str, Any] = {
    "gridcolor": GRID,
    "linecolor": FRAME,
    "showline": True,
    "mirror": True,
    "ticks": "outside",
    "tickcolor": FRAME,
    "zeroline": False,
    "automargin": True,
}
LAYOUT: Mapping[str, Any] = {
    "font": {"family": FONT, "size": 13, "color": TEXT},
    "margin": {"l": 64, "r": 28, "t": 30, "b": 52},
    "paper_bgcolor": "#ffffff",
    "plot_bgcolor": "#ffffff",
    "hovermode": "closest",
    "hoverlabel": {"font": {"family": FONT, "size": 12}},
    "showlegend": True,
    "modebar": {"orientation": "v", "bgcolor": "rgba(255,255,255,0.7)"},
    "barmode": "stack",
}


def render(page: Page) -> str:
    """The HTML of a page. All words of a run are escaped: its names and paths may be anybody's."""
    environment = Environment(
        loader=PackageLoader("domainpar.tracking.display", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder, plotly = resources.files("domainpar.tracking.display") / "templates", get_plotlyjs()
    # The scripts are not escaped: they are the package's own, and plotly's.
    assert not re.search(r"</script", plotly, re.IGNORECASE), "plotly.js cannot be put into a page as it is"
    style, *scripts = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", *SCRIPTS))
    return environment.get_template("report.html.j2").render(
        page=page,
        version=__version__,
        style=Markup(style),
        script=Markup("\n".join(scripts)),
        plotly=Markup(plotly),
        embedded=embedded,
        figures_of=figures_of,
    )


def embedded(value: Any) -> Markup:
    """JSON inside a script element, which no text in it can end.

    Raises:
        ValueError: If it holds a number that JSON does not know.
    """
    plain = json.dumps(value, allow_nan=False, separators=(",", ":"))
    # `<` alone would let `</script` end the element and `<!--` change how it is read; JSON has escapes for both.
    return Markup(plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


# --- charts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A figure of the page.

    Attributes:
        name: Its id.
        caption: The text below it.
        variants: Data and layout of the plots to choose from, by name; the first is shown first.
        height: In pixels.
        wide: Whether it takes the whole width.
    """

    name: str
    caption: str
    variants: Mapping[str, Mapping[str, Any]]
    height: int
    wide: bool


def figures_of(charts: Sequence[Chart]) -> list[Figure]:
    """The figures of some charts: one for all charts of a name that has a caption, else one for each panel."""
    figures = []
    for name in dict.fromkeys(chart.name for chart in charts if chart.on_page):
        variants = [chart for chart in charts if chart.name == name]
        first = variants[0]
        if first.caption:
            height = ROW * -(-len(first.panels) // first.columns)
            plots = {chart.variant: _plot(chart.panels, chart.columns, height) for chart in variants}
            figures.append(Figure(name, first.caption, plots, height, wide=True))
        else:
            figures += [
                Figure(f"{name}-{panel.name}", panel.caption, {"": _plot([panel], 1, HEIGHT)}, HEIGHT, wide=False)
                for panel in first.panels
            ]
    return figures


def text(words: str) -> str:
    """Words for plotly: brackets and `%{` would mean something to it."""
    plain = words.replace("<", "‹").replace(">", "›").replace("%{", "% {")
    return plain.replace("p_T", "p<sub>T</sub>")


def legend(name: str) -> str:
    """An entry of the legend; a long one in lines, since plotly clips it at the edge of a figure."""
    return "<br>".join(textwrap.wrap(text(name), LEGEND_LETTERS, break_long_words=False))


def _plot(panels: Sequence[Panel], columns: int, height: int) -> dict[str, Any]:
    """Data and layout of panels side by side; a name is in the legend once."""
    rows = -(-len(panels) // columns)
    width, depth = (1 - GAP_X * (columns - 1)) / columns, (1 - GAP_Y * (rows - 1)) / rows
    titled = any(panel.title for panel in panels)
    legend = {"orientation": "h", "x": 0, "y": 1.06 if titled else 1.02, "yanchor": "bottom", "font": {"size": 12}}
    layout: dict[str, Any] = {**LAYOUT, "height": height, "legend": legend, "annotations": []}
    traces: list[dict[str, Any]] = []
    named: set[str] = set()
    for place, panel in enumerate(panels):
        number = str(place + 1) if place else ""  # plotly's axes are x, x2, x3
        left, top = place % columns * (width + GAP_X), 1 - place // columns * (depth + GAP_Y)
        layout[f"xaxis{number}"] = {**_axis(panel.x), "domain": [left, left + width], "anchor": f"y{number}"}
        layout[f"yaxis{number}"] = {**_axis(panel.y), "domain": [max(top - depth, 0.0), top], "anchor": f"x{number}"}
        if panel.title:
            layout["annotations"].append(
                {"text": text(panel.title), "x": left, "y": top, "xref": "paper", "yref": "paper"}
                | {"xanchor": "left", "yanchor": "bottom", "showarrow": False}
            )
        for series in panel.series:
            shown = {"xaxis": f"x{number}", "yaxis": f"y{number}", "showlegend": series.name not in named}
            # A trace's own word wins: a band is never in the legend.
            traces += [shown | trace for trace in _traces(series)]
            named.add(series.name)
    return {"data": traces, "layout": layout}


def _axis(axis: ChartAxis) -> dict[str, Any]:
    described: dict[str, Any] = {**AXIS, "title": {"text": text(axis.label), "standoff": 8, "font": {"size": 13}}}
    described["type"] = "log" if axis.log else "linear"
    ends = [None if end is None else math.log10(end) if axis.log else end for end in (axis.low, axis.high)]
    if any(end is not None for end in ends):
        described["range"] = ends
    if axis.ticks:
        described |= {"tickvals": [at for at, _ in axis.ticks], "ticktext": [words for _, words in axis.ticks]}
    return described


def _traces(series: Series) -> list[dict[str, Any]]:
    """A series as plotly's traces; the last of them is its entry in the legend."""
    name = legend(series.name)
    trace: dict[str, Any] = {"type": "scatter", "name": name, "legendgroup": name, "y": _values(series.y)}
    line = {"color": series.colour, "width": series.width, "dash": "dash" if series.dashed else "solid"}
    marker = {"color": series.colour, "symbol": SYMBOLS.get(series.marker, "circle"), "size": 7}
    if series.notes:
        notes = [text(note) for note in series.notes]
        trace |= {"text": notes, "hovertemplate": f"%{{text}}<extra>{name}</extra>"}
    if series.kind == "line":
        mode = "lines+markers" if series.marker else "lines"
        return [trace | {"mode": mode, "x": _values(series.x), "line": line, "marker": {**marker, "size": 5}}]
    if series.kind == "bars":
        colour = {"color": series.colour}
        return [trace | {"type": "bar", "x": _values(series.x), "width": 0.6, "marker": colour}]
    if series.kind == "steps":
        ends = {"x": _values(np.repeat(series.x, 2)[1:-1]), "y": _values(np.repeat(series.y, 2))}
        steps = trace | {"mode": "lines", "line": line} | ends
        if series.notes:
            steps["text"] = [note for note in steps["text"] for _ in range(2)]
        return [*([_band(series, name)] if series.interval is not None else []), steps]
    trace |= {"mode": "markers", "x": _values(series.x), "marker": marker}
    if series.interval is not None:
        trace["error_y"] = _bars(series.y, series.interval, thickness=1.2)
    if series.bins is not None:
        trace["error_x"] = _bars(series.x, series.bins, thickness=0.8)
    return [trace]


def _bars(middle: FloatArray, ends: FloatArray, thickness: float) -> dict[str, Any]:
    away = {"array": _values(ends[1] - middle), "arrayminus": _values(middle - ends[0])}
    return {"type": "data", "thickness": thickness, "width": 0, **away}


def _band(series: Series, name: str) -> dict[str, Any]:
    """The intervals of steps as boxes with a gap behind each: plotly fills them one by one."""
    assert series.interval is not None, "asked for series with intervals only"
    low, high = series.interval
    left, right, gap = series.x[:-1], series.x[1:], np.full(len(low), np.nan)
    boxes = {
        "x": _values(np.stack([left, left, right, right, gap], axis=1).ravel()),
        "y": _values(np.stack([low, high, high, low, gap], axis=1).ravel()),
    }
    look = {"fill": "toself", "fillcolor": f"{series.colour}40", "mode": "lines", "line": {"width": 0}}
    return {
        "type": "scatter",
        "name": name,
        "legendgroup": name,
        "hoverinfo": "skip",
        **look,
        **boxes,
        "showlegend": False,
    }


def _values(values: FloatArray) -> list[float | None]:
    """Numbers that JSON knows: nothing for what is none."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
