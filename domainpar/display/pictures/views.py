"""An event seen across and along the beam: where hits are drawn, and in which frame."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from domainpar.events.graph import FloatArray

ACROSS = ("x [mm]", "y [mm]")
ALONG = ("z [mm]", "r [mm]")


def across_beam(position: FloatArray) -> FloatArray:
    """x and y, [N, 2]."""
    return position[:, :2]


def along_beam(position: FloatArray) -> FloatArray:
    """z, and the distance from the beam line, [N, 2]."""
    return np.stack([position[:, 2], np.hypot(position[:, 0], position[:, 1])], axis=1)


def draw_hits(axes: Axes, place: FloatArray, size: float, **style: Any) -> None:
    """Hits as dots, of an area in square points."""
    axes.scatter(place[:, 0], place[:, 1], s=size, linewidths=0, **style)


def frame_across(axes: Axes, place: FloatArray, spare: float = 1.04) -> None:
    """A square around the beam with so much room around the outermost of the hits."""
    radius = spare * max(float(np.hypot(*place.T).max(initial=0.0)), 1.0)
    axes.set(xlim=(-radius, radius), ylim=(-radius, radius), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))


def frame_along(axes: Axes, place: FloatArray) -> None:
    """The whole length of the detector; z and r have scales of their own."""
    length, radius = (max(float(value), 1.0) for value in np.abs(place).max(axis=0, initial=0.0))
    axes.set(xlim=(-1.02 * length, 1.02 * length), ylim=(0, 1.04 * radius))
