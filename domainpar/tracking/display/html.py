"""The report as one HTML file that needs nothing else, no network, no fonts, no other files; and its numbers as CSV."""

from __future__ import annotations

import csv
import io
import json
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from domainpar import __version__
from domainpar.tracking.display.paint import svg_of, svg_of_key
from domainpar.tracking.display.sections import Page

HEADING = (
    "chart", "style", "panel", "title", "curve", "quantity", "quantity_unit", "low", "high", "what", "unit", "value",
    "value_low", "value_high", "part", "whole",
)  # fmt: skip
"""Of the numbers: a line for each bin of each curve and table."""

SCRIPTS = ("page.js", "canvas.js", "painting.js", "event.js")


def render(page: Page) -> str:
    """The HTML of a page. All words of a run are escaped: its names and paths are not trusted."""
    environment = Environment(
        loader=PackageLoader("domainpar.tracking.display", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder = resources.files("domainpar.tracking.display") / "templates"
    # The scripts are not escaped: they are the package's own.
    style, *scripts = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", *SCRIPTS))
    return environment.get_template("report.html.j2").render(
        page=page,
        version=__version__,
        style=Markup(style),
        script=Markup("\n".join(scripts)),
        embedded=embedded,
        typeset=typeset,
        svg_of=svg_of,
        svg_of_key=svg_of_key,
    )


def embedded(value: Any) -> Markup:
    """JSON inside a script element, which no text in it can end.

    Raises:
        ValueError: If it holds a number that JSON does not know.
    """
    plain = json.dumps(value, allow_nan=False, separators=(",", ":"))
    # `<` alone would let `</script` end the element and `<!--` change how it is read; JSON has escapes for both.
    return Markup(plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def typeset(words: str) -> Markup:
    """Words of a chart, escaped."""
    return escape(words).replace("p_T", Markup("p<sub>T</sub>"))


def binned_numbers(page: Page) -> str:
    """The table. `value` is `what` in the bin from `low` to `high` of `quantity`, `value_low` to `value_high` its
    interval, `part` of `whole` the numbers that were divided; of widths `whole` alone. Without a unit it is 1.
    """
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(HEADING)
    for chart in (chart for section in page.sections for chart in section.charts if chart.on_page):
        for panel in chart.panels:
            of_panel = (*_named(panel.x.label), *_named(panel.y.label))
            for series in panel.series:
                for low, high, *numbers in () if series.table is None else series.table.tolist():
                    names = chart.name, chart.variant, panel.name, panel.title, series.name, *of_panel[:2]
                    values = low, high, *of_panel[2:], *numbers
                    # What is not known is an empty cell.
                    writer.writerow([*names, *("" if one != one else one for one in values)])
    for section in page.sections:
        for table in section.tables:
            writer.writerows(table.numbers)
    return lines.getvalue()


def _named(label: str) -> tuple[str, str]:
    """The quantity along an axis, and its unit."""
    quantity, _, unit = label.partition(" [")
    return quantity, unit.rstrip("]") or "1"
