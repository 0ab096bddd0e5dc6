"""The report as one HTML file that needs nothing else: no network, no fonts, no other files."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from domainpar import __version__
from domainpar.tracking.display.paint import svg_of, svg_of_key
from domainpar.tracking.display.sections import Page

SCRIPTS = ("page.js", "canvas.js", "painting.js", "event.js")


def render(page: Page) -> str:
    """The HTML of a page. All words of a run are escaped: its names and paths may be anybody's."""
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
