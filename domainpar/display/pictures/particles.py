"""The picture of the particles one wants of an event: those that were found, and those that were missed."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from domainpar.display.efficiency import MEANINGS
from domainpar.display.event_data import EventData
from domainpar.display.matching import Matches, match_tracks
from domainpar.display.paths import Paths, particle_paths
from domainpar.display.pictures.style import (
    BLUE,
    PALE,
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
from domainpar.display.pictures.wording import kind_of, target_text
from domainpar.display.reading import RunFiles
from domainpar.display.sections import why_missing
from domainpar.events.graph import BoolArray, FloatArray, IntArray
from domainpar.words import several

NAME = "event-tracks"

MOST_LINES = 200
"""Paths of one colour that are drawn: more of them fill the detector, and nothing is seen."""


def draw_particles(run: RunFiles, event: EventData | None) -> Picture:
    """True paths of the target particles from hit to hit: those that were found and those that were missed.

    The tracks are those of the network; those of the classical finder only where there are no others.
    """
    if event is None:
        return Picture(NAME, absent=why_missing(run, "events", otherwise="there is no event to draw"))
    if event.position is None or event.num_hits == 0:
        return Picture(NAME, absent=f"event {event.event_id} has no positions of hits to draw")
    who, track_id = _finder(run, event)
    if track_id is None:
        otherwise = f"event {event.event_id} has no tracks"
        return Picture(NAME, absent=why_missing(run, "scores", "tracks", otherwise=otherwise))
    matches = match_tracks(event, track_id, run.tracking.cuts, run.tracking.style)
    if matches is None:
        return Picture(NAME, absent=f"the particles of event {event.event_id} are unknown")
    title = (
        f"Event {event.event_id}: {several(int(matches.wanted.sum()), 'target particle')} "
        f"({target_text(run.tracking.cuts.target)}), tracks of the {who}"
    )
    figure = new_figure(4.7, title)
    frames = figure.subplots(1, 2)
    paths = particle_paths(event)
    for axes, place in zip(frames, (across_beam(event.position), along_beam(event.position)), strict=True):
        _draw(axes, place, paths, matches)
    label(frames[0], *ACROSS)
    label(frames[1], *ALONG)
    frame_across(frames[0], across_beam(event.position))
    frame_along(frames[1], along_beam(event.position))
    frames[1].set_box_aspect(1)  # as high as the square beside it
    legend_below(figure, frames[0], 3, markerscale=6)
    return Picture(NAME, figure)


def _finder(run: RunFiles, event: EventData) -> tuple[str, IntArray | None]:
    """Whose tracks are drawn, and they; None without tracks."""
    if event.track_id is None and event.classical_track_id is not None:
        return MEANINGS["classical"], event.classical_track_id
    return f"network, {kind_of(run)}", event.track_id


def _draw(axes: Axes, place: FloatArray, paths: Paths, matches: Matches) -> None:
    """What was missed lies above what was found: it is what one looks for."""
    width = min(1.0, math.sqrt(500 / max(int(matches.wanted.sum()), 1)))
    draw_hits(axes, place, 0.5, color=PALE, label="hits")
    found, missed = matches.wanted & matches.found, matches.wanted & ~matches.found
    _draw_paths(axes, place, paths, found, "targets found", BLUE, 0.6 * width)
    _draw_paths(axes, place, paths, missed, "targets missed", VERMILION, 1.1 * width)


def _draw_paths(
    axes: Axes, place: FloatArray, paths: Paths, which: BoolArray, name: str, colour: str, width: float
) -> None:
    rows = np.flatnonzero(which)
    every = max(1, -(-len(rows) // MOST_LINES))
    name = f"{name}: {len(rows):,}" + (f", one in {every} drawn" if every > 1 else "")
    lines = [place[paths.rows[paths.ptr[one] : paths.ptr[one + 1]]] for one in rows[::every]]
    axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, alpha=0.85), autolim=False)
    axes.plot([], [], color=colour, linewidth=1.5, label=name)  # the legend's, as wide as the eye needs
