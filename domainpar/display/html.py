"""The report as one HTML file that needs nothing else: no network, no fonts, no other files."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from domainpar import __version__
from domainpar.display.paint_plotly import figures_of
from domainpar.display.sections import Page

SCRIPTS = ("figures.js", "canvas.js", "painting.js", "event.js")


def render(page: Page) -> str:
    """The HTML of a page. All words of a run are escaped: its names and paths may be anybody's."""
    environment = Environment(
        loader=PackageLoader("domainpar.display", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder, plotly = resources.files("domainpar.display") / "templates", get_plotlyjs()
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
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
