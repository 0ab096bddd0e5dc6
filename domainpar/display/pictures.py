"""The pictures of a page, for a talk, a README or a terminal: drawn by matplotlib and written as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from matplotlib.figure import Figure

from domainpar.display.event_pictures import draw_particles, draw_parts
from domainpar.display.paint_matplotlib import in_style, is_own, paint, png
from domainpar.display.sections import Page
from domainpar.events.store import write_whole
from domainpar.problems import Problem


def draw_pictures(page: Page, directory: Path, tell: Callable[[str], object] = print) -> list[Path]:
    """Write every picture of a page.

        page = build_page(read_run_files(Path("runs/0001")), read_run_files(Path("runs/0002")))
        draw_pictures(page, Path("pictures"))

    Args:
        page: The page, as `sections.build_page` makes it.
        directory: Where they go; made if it is not there. Older pictures of the same names are replaced, other files
            never; a picture that can no longer be drawn is left as it was, and `tell` names it.
        tell: Is given a sentence for each picture that is left out.

    Returns:
        The files, in the order of the page.

    Raises:
        OSError: If one cannot be written.
        Problem: If a file of the name of a picture is not one of ours; nothing is written then.
    """
    content: dict[Path, bytes] = {}
    with in_style():
        for name, figure in pictures_of(page):
            path = directory / f"{name}.png"
            if isinstance(figure, str):
                tell(f"{path.name} left out: {figure}")
                continue
            if path.exists() and not is_own(path):
                raise Problem(f"{path} is there and is no picture of ours", "move it away, or choose another --png")
            content[path] = png(figure)
    for path, picture in content.items():
        write_whole(path, picture)
    return list(content)


def pictures_of(page: Page) -> Iterator[tuple[str, Figure | str]]:
    """The pictures by name, one after the other; for one without content the reason. To be asked for `in_style`."""
    for section in page.sections:
        first = {chart.name: chart for chart in reversed(section.charts)}
        for name in dict.fromkeys(chart.name for chart in section.charts):
            yield name, paint(first[name])
        if section.event is not None and "event-parts" not in section.left_out:
            yield "event-parts", draw_parts(section.event)
        if section.event is not None and "event-tracks" not in section.left_out:
            yield "event-tracks", draw_particles(section.event)
        yield from section.left_out.items()
