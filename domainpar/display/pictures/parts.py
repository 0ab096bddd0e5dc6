"""The picture of an event that several ranks share: whose hits are whose, what one of them borrows, what is cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from domainpar.display.event_data import EventData
from domainpar.display.pictures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    Picture,
    label,
    legend_below,
    new_figure,
)
from domainpar.display.pictures.views import (
    ACROSS,
    ALONG,
    across_beam,
    along_beam,
    draw_hits,
    frame_across,
    frame_along,
)
from domainpar.display.reading import RunFiles
from domainpar.display.sections import why_missing
from domainpar.events.graph import FloatArray, IntArray
from domainpar.words import several

COLOURS = (BLUE, ORANGE, GREEN, BLACK, SKY, VERMILION, GREY, PURPLE)
"""Of the parts, one after the other, and again from the start."""

DEFAULT_PARTS = 8
MOST_NUMBERS = 24
"""More parts are too narrow to be numbered."""

MOST_CUT_EDGES = 40_000
"""Of more an even choice is drawn, and the picture says so."""

NAME = "event-parts"


@dataclass(frozen=True)
class Split:
    """How an event is split to be drawn.

    Attributes:
        num_parts: Into how many parts.
        naive: Whether these are the sectors of naive mode, whose edges to each other are dropped.
        grouping: How its tiles are gathered.
        seed: Seed of the grouping.
    """

    num_parts: int
    naive: bool
    grouping: str
    seed: int

    @property
    def word(self) -> str:
        """What one of them is."""
        return "sector" if self.naive else "part"

    def part_of_hits(self, event: EventData) -> IntArray:
        """Part of each hit, int32 [N]."""
        return event.part_of_hits(self.num_parts, self.grouping, self.seed)


def split_to_draw(run: RunFiles, named: int | None) -> Split:
    """The split that was asked for, or else the run's own: its sectors or its ranks; 8 parts where one rank did all."""
    grouping = "contiguous" if run.approximate else str(run.settings.get("grouping") or "contiguous")
    seed = int(run.settings.get("seed") or 0)
    if named is not None:
        return Split(named, False, grouping, seed)
    sectors = run.scores.about.get("sectors") if run.scores and run.scores.approximate else None
    if sectors := sectors or (run.settings.get("sectors") if run.approximate else None):
        return Split(int(sectors), True, "contiguous", seed)
    return Split(run.ranks_of_an_event if run.ranks_of_an_event > 1 else DEFAULT_PARTS, False, grouping, seed)


@dataclass(frozen=True, eq=False)
class Borrowed:
    """What one part of an event has to do with the others when every edge with an end in it is computed there.

    Attributes:
        part: The part.
        owned: Its hits, as rows, int64 [n].
        ghosts: Hits of others that an edge joins to one of its own, as rows, int64 [m].
        cut: `src` and `dst` of the edges between the two, int64 [2, k].
    """

    part: int
    owned: IntArray
    ghosts: IntArray
    cut: IntArray


def first_that_borrows(part_of_hit: IntArray, edge_index: IntArray) -> Borrowed:
    """The first part with ghosts; where no edge is cut, the first with hits.

    Args:
        part_of_hit: Part of each hit, [N], of at least one.
        edge_index: `src` and `dst` of each edge, [2, E].
    """
    parts = part_of_hit[edge_index]
    is_cut = parts[0] != parts[1]
    part = int(parts[:, is_cut].min() if is_cut.any() else part_of_hit.min())
    cut = edge_index[:, is_cut & (parts == part).any(axis=0)]
    ends = np.unique(cut)
    return Borrowed(part, np.flatnonzero(part_of_hit == part), ends[part_of_hit[ends] != part], cut)


def draw_parts(run: RunFiles, event: EventData | None, num_parts: int | None = None) -> Picture:
    """Hits by their part, and the ghosts and cut edges of one part, across and along the beam."""
    if event is None:
        return Picture(NAME, absent=why_missing(run, "events", otherwise="there is no event to draw"))
    if event.position is None or event.num_hits == 0:
        return Picture(NAME, absent=f"event {event.event_id} has no positions of hits to draw")
    split = split_to_draw(run, num_parts)
    part = split.part_of_hits(event)
    borrowed = first_that_borrows(part, event.edge_index)
    figure = new_figure(7.9, _title(event, part, split))
    grid = figure.add_gridspec(2, 2, height_ratios=(4.6, 2.6))
    everything, one, one_along = (figure.add_subplot(place) for place in (grid[0, 0], grid[0, 1], grid[1, :]))
    across, along = across_beam(event.position), along_beam(event.position)
    _draw_all(everything, across, part, split.num_parts)
    _draw_one(one, across, borrowed, split.naive)
    _draw_one(one_along, along, borrowed, split.naive)
    frame_across(label(everything, *ACROSS, f"every hit, by its {split.word}"), across, spare=1.2)
    frame_across(label(one, *ACROSS, f"{split.word} {borrowed.part} among the others"), across, spare=1.2)
    frame_along(label(one_along, *ALONG, "the same along the beam"), along)
    legend_below(figure, one, 3, markerscale=4)
    return Picture(NAME, figure)


def _title(event: EventData, part: IntArray, split: Split) -> str:
    cut = int(np.count_nonzero(part[event.edge_index[0]] != part[event.edge_index[1]]))
    share = f" ({cut / event.num_edges:.1%})" if event.num_edges else ""
    kind = " (approximate: naive mode)" if split.naive else ""
    return (
        f"Event {event.event_id}: {event.num_hits:,} hits in {several(split.num_parts, split.word)}{kind}; "
        f"{cut:,} of {event.num_edges:,} edges{share} join two of them"
    )


def _draw_all(axes: Axes, place: FloatArray, part: IntArray, num_parts: int) -> None:
    """All hits in the colours of their parts, and the number of each part beyond its outermost hits."""
    draw_hits(axes, place, 1.0, c=np.array(COLOURS)[part % len(COLOURS)])
    radius = 1.1 * float(np.hypot(*place.T).max())
    for one in range(num_parts if num_parts <= MOST_NUMBERS else 0):
        if (towards := _direction(place[part == one])) is not None:
            x, y = radius * towards
            axes.text(x, y, str(one), ha="center", va="center", fontsize=9, fontweight="bold")


def _direction(place: FloatArray) -> FloatArray | None:
    """Where the hits of a part lie around the beam; None if they lie all around it."""
    if len(place) == 0:
        return None
    phi = np.arctan2(place[:, 1], place[:, 0])
    mean = np.array([np.cos(phi).mean(), np.sin(phi).mean()])
    length = float(np.hypot(*mean))
    return mean / length if length > 0.5 else None


def _draw_one(axes: Axes, place: FloatArray, borrowed: Borrowed, naive: bool) -> None:
    """One part among the hits of the others: its own hits, its ghosts, and the edges that join the two."""
    colour, num_cut = COLOURS[borrowed.part % len(COLOURS)], borrowed.cut.shape[1]
    drawn = borrowed.cut[:, :: -(-num_cut // MOST_CUT_EDGES) or 1]
    name = f"{'edges that are dropped' if naive else 'cut edges'}: {num_cut:,}"
    name += f", {drawn.shape[1]:,} of them drawn" if drawn.shape[1] < num_cut else ""
    draw_hits(axes, place, 1.0, color=PALE)
    lines = LineCollection(list(place[drawn.T]), colors=BLACK, linewidths=0.2, alpha=0.25)
    axes.add_collection(lines, autolim=False)
    axes.plot([], [], color=BLACK, linewidth=0.8, label=name)  # the legend's; those lines are too faint for it
    draw_hits(axes, place[borrowed.owned], 1.5, color=colour, label=f"owned hits: {len(borrowed.owned):,}")
    name = f"{'hits they lead to, unseen here' if naive else 'ghosts'}: {len(borrowed.ghosts):,}"
    draw_hits(axes, place[borrowed.ghosts], 3.0, color=_ghost_colour(colour), label=name)


def _ghost_colour(colour: str) -> str:
    """One that stands out from the part's own."""
    return BLUE if colour in (VERMILION, ORANGE, PURPLE) else VERMILION
