"""The pictures of a page, written as PNG files for a talk, a README or a terminal: its charts, and its event across and
along the beam, drawn of the same view as the event display."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from domainpar.common.atomic_files import write_whole
from domainpar.common.problems import Problem
from domainpar.common.words import several
from domainpar.tracking.display.chart import BLACK, BLUE, GREEN, GREY, ORANGE, PALE, PURPLE, SKY, VERMILION
from domainpar.tracking.display.event_view import EventView
from domainpar.tracking.display.paint_matplotlib import in_style, is_own, legend_below, new_figure, paint, png
from domainpar.tracking.display.sections import Page
from domainpar.tracking.display.tracks import finder_label
from domainpar.tracking.events.graph import FloatArray, IntArray

COLOURS = (BLUE, ORANGE, GREEN, BLACK, SKY, VERMILION, GREY, PURPLE)
"""Of the parts, one after the other, and again from the start."""

MOST_NUMBERS = 24
"""More parts are too narrow to be numbered."""

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
            yield "event-parts", draw_parts(section.event)
        if section.event is not None and "event-tracks" not in section.left_out:
            yield "event-tracks", draw_particles(section.event)
        yield from section.left_out.items()


def draw_parts(view: EventView) -> Figure:
    """Hits by their part, and the ghosts and cut edges of one part, across and along the beam."""
    split, borrowed, num_edges = view.split, view.borrowed, view.facts["edges"]
    share = f" ({view.facts['cutEdges'] / num_edges:.1%})" if num_edges else ""
    title = (
        f"Event {view.facts['event']}: {view.facts['hits']:,} hits in {several(split.num_parts, split.word)}"
        f"{' (approximate: naive mode)' if split.naive else ''}; "
        f"{view.facts['cutEdges']:,} of {num_edges:,} edges{share} join two of them"
    )
    figure = new_figure(7.9, title)
    grid = figure.add_gridspec(2, 2, height_ratios=(4.6, 2.6))
    everything, one_part, along_beam = (figure.add_subplot(place) for place in (grid[0, 0], grid[0, 1], grid[1, :]))
    across, along = _places(view)
    part = view.arrays["part"]
    _draw_hits(everything, across, 1.0, c=np.array(COLOURS)[part % len(COLOURS)])
    radius = 1.1 * float(np.hypot(*across.T).max())
    for direction, numbers in _directions(across, part, split.num_parts if split.num_parts <= MOST_NUMBERS else 0):
        x, y = radius * direction  # beyond the outermost hits
        text = ", ".join(map(str, numbers))
        everything.text(x, y, text, ha="center", va="center", fontsize=9, fontweight="bold")
    _draw_one(one_part, across, view)
    _draw_one(along_beam, along, view)
    _frame_across(everything, across, 1.2, f"every hit, by its {split.word}")
    _frame_across(one_part, across, 1.2, f"{split.word} {borrowed.part} among the others")
    _frame_along(along_beam, along, "the same along the beam")
    legend_below(figure, one_part, 3, markerscale=4)
    return figure


def _directions(across: FloatArray, part: IntArray, num_parts: int) -> list[tuple[FloatArray, list[int]]]:
    """Where parts lie around the beam, and their numbers: those that lie behind each other together."""
    found: list[tuple[FloatArray, list[int]]] = []
    for number in range(num_parts):
        phi = np.arctan2(*across[part == number].T[::-1])
        mean = np.array([np.cos(phi).mean(), np.sin(phi).mean()]) if len(phi) else np.zeros(2)
        length = float(np.hypot(*mean))
        if length < 0.5:  # it lies all around the beam
            continue
        near = [numbers for direction, numbers in found if direction @ mean > np.cos(0.12) * length]
        if near:
            near[0].append(number)
        else:
            found.append((mean / length, [number]))
    return found


def draw_particles(view: EventView) -> Figure:
    """True paths of the target particles from hit to hit: those that the first finder found, and those it missed."""
    is_target, is_found = view.arrays["particleTarget"] > 0, view.arrays[f"{view.finder}Found"] > 0
    count = several(int(is_target.sum()), "target particle")
    finder = finder_label(view.finder, view.how_scored)
    figure = new_figure(4.7, f"Event {view.facts['event']}: {count} ({view.targets}), tracks of the {finder}")
    frames, places = figure.subplots(1, 2), _places(view)
    rows, ptr = view.arrays["particleRows"], view.arrays["particlePtr"]
    # The more paths, the thinner, so that the ink on the paper stays about the same.
    width = min(1.0, math.sqrt(500 / max(int(is_target.sum()), 1)))
    for axes, place in zip(frames, places, strict=True):
        _draw_hits(axes, place, 0.5, color=PALE, label="hits")
        # What was missed above what was found: a reader looks for it.
        for name, found, colour, wide in (("found", True, BLUE, 0.6), ("missed", False, VERMILION, 1.1)):
            particles = np.flatnonzero(is_target & (is_found == found))
            every = max(1, -(-len(particles) // MOST_LINES))
            label = f"targets {name}: {len(particles):,}" + (f", one in {every} drawn" if every > 1 else "")
            lines = [place[rows[ptr[particle] : ptr[particle + 1]]] for particle in particles[::every]]
            axes.add_collection(
                LineCollection(lines, colors=colour, linewidths=wide * width, alpha=0.85), autolim=False
            )
            axes.plot([], [], color=colour, linewidth=1.5, label=label)  # the legend's, as wide as the eye needs
    _frame_across(frames[0], places[0], 1.04)
    _frame_along(frames[1], places[1])
    frames[1].set_box_aspect(1)  # as high as the square beside it
    legend_below(figure, frames[0], 3, markerscale=6)
    return figure


def _places(view: EventView) -> tuple[FloatArray, FloatArray]:
    """Hits across the beam, x and y, and along it, z and the distance from it, [N, 2] each."""
    x, y, z = (view.arrays[name] for name in "xyz")
    return np.stack([x, y], axis=1), np.stack([z, np.hypot(x, y)], axis=1)


def _draw_one(axes: Axes, place: FloatArray, view: EventView) -> None:
    """One part among the hits of the others: its own hits, its ghosts, and the edges that join the two."""
    borrowed, naive = view.borrowed, view.split.naive
    colour, num_cut = COLOURS[borrowed.part % len(COLOURS)], borrowed.cut.shape[1]
    drawn = borrowed.cut[:, :: -(-num_cut // MOST_CUT_EDGES) or 1]
    name = f"{'edges that are dropped' if naive else 'cut edges'}: {num_cut:,}"
    name += f", {drawn.shape[1]:,} of them drawn" if drawn.shape[1] < num_cut else ""
    _draw_hits(axes, place, 1.0, color=PALE)
    lines = LineCollection(list(place[drawn.T]), colors=BLACK, linewidths=0.2, alpha=0.25)
    axes.add_collection(lines, autolim=False)
    axes.plot([], [], color=BLACK, linewidth=0.8, label=name)  # the legend's; those lines are too faint for it
    _draw_hits(axes, place[borrowed.owned], 1.5, color=colour, label=f"owned hits: {len(borrowed.owned):,}")
    # In naive mode a sector sees nothing of its neighbours: it has no ghosts.
    name = f"{'hits of other sectors at their ends, unseen here' if naive else 'halo nodes'}: {len(borrowed.ghosts):,}"
    ghost_colour = BLUE if colour in (VERMILION, ORANGE, PURPLE) else VERMILION  # stands out from the part's own
    _draw_hits(axes, place[borrowed.ghosts], 3.0, color=ghost_colour, label=name)


def _draw_hits(axes: Axes, place: FloatArray, size: float, **style: Any) -> None:
    """Hits as dots, of an area in square points."""
    axes.scatter(place[:, 0], place[:, 1], s=size, linewidths=0, **style)


def _frame_across(axes: Axes, place: FloatArray, spare: float, title: str = "") -> None:
    """A square around the beam with some room around the outermost of the hits."""
    radius = spare * max(float(np.hypot(*place.T).max(initial=0.0)), 1.0)
    axes.set(xlim=(-radius, radius), ylim=(-radius, radius), aspect="equal")
    axes.set(xlabel="x [mm]", ylabel="y [mm]", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))


def _frame_along(axes: Axes, place: FloatArray, title: str = "") -> None:
    """The whole length of the detector; z and r have scales of their own."""
    length, radius = (max(float(value), 1.0) for value in np.abs(place).max(axis=0, initial=0.0))
    axes.set(xlim=(-1.02 * length, 1.02 * length), ylim=(0, 1.04 * radius))
    axes.set(xlabel="z [mm]", ylabel="r [mm]", title=title)
