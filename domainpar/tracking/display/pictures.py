"""The pictures of a page, written as PNG files for a talk, a README or a terminal: its charts, and its event across and
along the beam, drawn of the same view as the event display."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from domainpar.common.atomic_files import write_whole
from domainpar.common.problems import Problem
from domainpar.common.words import several
from domainpar.tracking.display.chart import Chart, ChartAxis, Colour, Panel, Series
from domainpar.tracking.display.event_view import EventView
from domainpar.tracking.display.finders import finder_label
from domainpar.tracking.display.paint_matplotlib import in_style, is_own, paint, png
from domainpar.tracking.display.sections import Page
from domainpar.tracking.events.graph import FloatArray

MOST_CUT_EDGES = 40_000
"""Of more an even choice is drawn, and the picture says so."""

MOST_LINES = 200
"""Paths of one colour that are drawn: more of them fill the detector, and nothing is seen."""


def draw_pictures(page: Page, directory: Path, tell: Callable[[str], object] = print) -> list[Path]:
    """Write every picture of a page.

        page = build_page(read_run_files(Path("runs/0001")), read_run_files(Path("runs/0002")))
        draw_pictures(page, Path("pictures"))

    Args:
        page: The page, as `sections.build_page` makes it.
        directory: Their place; made if it is not there. Older pictures of the same names are replaced, other files
            never; a picture that can no longer be drawn is left as it was, and `tell` names it.
        tell: Receives a sentence for each picture that is left out.

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
    # All are drawn before the first is written: a problem with one leaves all files as they were.
    for path, picture in content.items():
        write_whole(path, picture)
    return list(content)


def pictures_of(page: Page) -> Iterator[tuple[str, Figure | str]]:
    """The pictures by name, one after the other; for one without content the reason. To be asked for `in_style`."""
    for section in page.sections:
        # Of the variants of a chart the first is the picture.
        first = {chart.name: chart for chart in reversed(section.charts)}
        for name in dict.fromkeys(chart.name for chart in section.charts):
            yield name, paint(first[name]) if first[name].shown else first[name].remarks
        if section.event is not None and "event-parts" not in section.left_out:
            yield "event-parts", paint(chart_of_parts(section.event))
        if section.event is not None and "event-tracks" not in section.left_out:
            yield "event-tracks", paint(chart_of_particles(section.event))
        yield from section.left_out.items()


def chart_of_parts(view: EventView) -> Chart:
    """Hits by their part, and the ghosts and cut edges of one part, across and along the beam."""
    split, borrowed, num_edges = view.split, view.borrowed, view.facts["edges"]
    share = f" ({view.facts['cutEdges'] / num_edges:.1%})" if num_edges else ""
    title = (
        f"Event {view.facts['event']}: {view.facts['hits']:,} hits in {several(split.num_parts, split.word)}"
        f"{' (approximate: naive mode)' if split.naive else ''}; "
        f"{view.facts['cutEdges']:,} of {num_edges:,} edges{share} join two of them"
    )
    part, colour = view.arrays["part"], Colour.PARTS[borrowed.part % len(Colour.PARTS)]
    num_cut = borrowed.cut.shape[1]
    drawn = borrowed.cut[:, :: -(-num_cut // MOST_CUT_EDGES) or 1]
    edges = f"{'edges that are dropped' if split.naive else 'cut edges'}: {num_cut:,}"
    edges += f", {drawn.shape[1]:,} of them drawn" if drawn.shape[1] < num_cut else ""
    # In naive mode a sector sees nothing of its neighbours: it has no ghosts.
    ghosts = "hits of other sectors at their ends, unseen here" if split.naive else "halo nodes"
    ghosts = f"{ghosts}: {len(borrowed.ghosts):,}"
    # Ghosts stand out from the part's own.
    of_ghosts = Colour.BLUE if colour in (Colour.VERMILION, Colour.ORANGE, Colour.PURPLE) else Colour.VERMILION
    more = ", ..." if split.num_parts > len(Colour.PARTS) else ""
    panels = []
    for name, place in _places(view).items():
        every = [
            _dots(f"{split.word} {number}{more}", one, place[part % len(Colour.PARTS) == number], 1.4)
            for number, one in enumerate(Colour.PARTS[: split.num_parts])
        ]
        one_part = (
            _dots(f"hits of other {split.words}", Colour.PALE, place, 1.4),
            _paths(edges, Colour.BLACK, [place[edge] for edge in drawn.T], 0.3, 0.25),
            _dots(f"owned hits: {len(borrowed.owned):,}", colour, place[borrowed.owned], 1.8),
            _dots(ghosts, of_ghosts, place[borrowed.ghosts], 2.6),
        )
        panels.append(_panel(name, place, tuple(every), f"every hit, by its {split.word}"))
        panels.append(_panel(name, place, one_part, f"{split.word} {borrowed.part} among the others"))
    return Chart("event-parts", title, tuple(panels), row=440.0)


def chart_of_particles(view: EventView) -> Chart:
    """True paths of the target particles from hit to hit: those that the first finder found, and those it missed."""
    is_target, is_found = view.arrays["particleTarget"] > 0, view.arrays[f"{view.finder}Found"] > 0
    count = several(int(is_target.sum()), "target particle")
    finder = finder_label(view.finder, view.how_scored)
    rows, ptr = view.arrays["particleRows"], view.arrays["particlePtr"]
    # The more paths, the thinner, so that the ink on the paper stays about the same.
    width = min(1.0, math.sqrt(500 / max(int(is_target.sum()), 1)))
    panels = []
    for along, place in _places(view).items():
        series = [_dots("hits", Colour.PALE, place, 0.9)]
        # What was missed above what was found: a reader looks for it.
        for name, found, colour, wide in (("found", True, Colour.BLUE, 0.8), ("missed", False, Colour.VERMILION, 1.5)):
            particles = np.flatnonzero(is_target & (is_found == found))
            every = max(1, -(-len(particles) // MOST_LINES))
            label = f"targets {name}: {len(particles):,}" + (f", one in {every} drawn" if every > 1 else "")
            paths = [place[rows[ptr[particle] : ptr[particle + 1]]] for particle in particles[::every]]
            series.append(_paths(label, colour, paths, wide * width, 0.85))
        panels.append(_panel(along, place, tuple(series)))
    title = f"Event {view.facts['event']}: {count} ({view.targets}), tracks of the {finder}"
    return Chart("event-tracks", title, tuple(panels), row=440.0)


def _places(view: EventView) -> dict[str, FloatArray]:
    """Hits across the beam, x and y, and along it, z and the distance from it, [N, 2] each."""
    x, y, z = (view.arrays[name] for name in "xyz")
    return {"across": np.stack([x, y], axis=1), "along": np.stack([z, np.hypot(x, y)], axis=1)}


def _dots(name: str, colour: str, place: FloatArray, width: float) -> Series:
    return Series(name, "dots", colour, place[:, 0], place[:, 1], width=width)


def _paths(name: str, colour: str, paths: Sequence[FloatArray], width: float, opacity: float) -> Series:
    """Lines from hit to hit, with a gap behind each."""
    gap = np.full((1, 2), np.nan)
    place = np.concatenate([gap, *(one for path in paths for one in (path, gap))])
    return Series(name, "paths", colour, place[:, 0], place[:, 1], width=width, opacity=opacity)


def _panel(name: str, place: FloatArray, series: tuple[Series, ...], title: str = "") -> Panel:
    """A square around the beam, or the whole length of the detector with scales of its own for z and r."""
    far = 1.04 * np.maximum(np.abs(place).max(axis=0, initial=0.0), 1.0)
    if name == "across":
        x, y = (ChartAxis(f"{axis} [mm]", -float(far.max()), float(far.max())) for axis in "xy")
    else:
        x, y = ChartAxis("z [mm]", -float(far[0]), float(far[0])), ChartAxis("r [mm]", 0.0, float(far[1]))
    return Panel(f"{name}-{title}", series, x, y, title, square=True)
