"""Labels of nodes and of whole events: what a network may learn besides edges, stored or known from particles.

A label is a class, 0, 1, 2, ..., or a number. A class that is not known is -1, a number that is not known NaN: it is
left out of losses and metrics, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from domainpar.common.problems import EventPlace
from domainpar.tracking.events.graph import Array, IntArray, Particles, check_array

MOST_CLASSES = 1000
PROMPT_RADIUS = 2.0
"""Vertices this near to the beam line, in mm, are of collisions, where the source does not say which particles are."""

NUMBERS_OF_PARTICLES = ("pt", "eta", "radius", "vz", "nhits")
ORIGINS = ("noise", "collision", "secondary")


class Label(NamedTuple):
    """A label that the events of a source have.

    Attributes:
        name: Its name.
        of: Whether nodes have it, or the graph as a whole.
        classes: Number of classes; 0: it is a number.
    """

    name: str
    of: Literal["node", "graph"]
    classes: int

    @property
    def task(self) -> str:
        """The `--task` that learns it."""
        return f"{self.of}-{'class' if self.classes else 'regression'}"

    @property
    def what(self) -> str:
        """For the user."""
        return f"{self.name} ({self.of}, {f'{self.classes} classes' if self.classes else 'a number'})"


# Known of every event with particles. The classes of `origin` are `ORIGINS`.
OF_PARTICLES = (*(Label(name, "node", 0) for name in NUMBERS_OF_PARTICLES), Label("origin", "node", len(ORIGINS)))


def labels_in(node_labels: Mapping[str, Array], graph_labels: Mapping[str, int | float]) -> tuple[Label, ...]:
    """What these labels are: classes are whole numbers."""
    of_nodes = [Label(name, "node", _classes(values)) for name, values in node_labels.items()]
    return (*of_nodes, *(Label(name, "graph", _classes(np.array([value]))) for name, value in graph_labels.items()))


def _classes(values: Array) -> int:
    return 0 if values.dtype.kind == "f" else int(values.max(initial=0)) + 1


def check_labels(
    node_labels: Mapping[str, Array], graph_labels: Mapping[str, int | float], num_nodes: int, place: EventPlace
) -> None:
    """Refuse labels that nothing could learn.

    Raises:
        Problem: If there is not one for each node, a class is below -1 or too large, a number infinite, or two have the
            same name.
    """
    if "edge" in (*node_labels, *graph_labels):
        raise place.problem("a label is called edge, which is what scores of edges are called", "name it otherwise")
    if twice := set(node_labels) & set(graph_labels):
        raise place.problem(f"label {min(twice)} is there twice: of nodes and of the graph", "name one otherwise")
    for name, values in (*node_labels.items(), *((name, np.array([value])) for name, value in graph_labels.items())):
        check_array(place, f"label {name}", values, (num_nodes if name in node_labels else 1,))
        if values.dtype.kind == "f":
            bad = np.flatnonzero(np.isinf(values))
            expected = "a number, or NaN where it is not known"
        else:
            bad = np.flatnonzero((values < -1) | (values >= MOST_CLASSES))
            expected = f"a class, 0 to {MOST_CLASSES - 1}, or -1 where it is not known"
        if len(bad):
            what = f"label {name} of row {bad[0]} is {values[bad[0]]}, expected {expected} ({len(bad)} such rows)"
            raise place.problem(what, "numbers to be regressed are floats; what is no label needs a name without y")


def particle_label(name: str, particle_id: IntArray, particles: Particles) -> npt.NDArray[np.float64]:
    """A label of hits that follows from their particles, float64 [n]; that of noise is not known, but for `origin`.

    Args:
        name: Of one of `OF_PARTICLES`.
        particle_id: Particle of each hit, [n], 0 for noise.
        particles: The particles.
    """
    values: Any
    if name == "origin":
        primary = particles.radius <= PROMPT_RADIUS
        unknown = np.isnan(particles.vertex[:, 0])
        if particles.primary is not None:
            primary, unknown = particles.primary > 0, np.zeros(len(primary), np.bool_)
        values, unlabelled = np.where(unknown, -1.0, np.where(primary, 1.0, 2.0)), -1.0
    else:
        values, unlabelled = getattr(particles, name), np.nan
    rows = particles.rows(particle_id)
    known = (rows >= 0) & (particle_id != 0)
    of_hits = np.full(len(particle_id), unlabelled)
    of_hits[known] = values[rows[known]].astype(np.float64)
    if name == "origin":
        of_hits[particle_id == 0] = 0.0
    return of_hits


def is_known(label: Label, values: Array) -> npt.NDArray[np.bool_]:
    """Which of these values are known."""
    return values >= 0 if label.classes else np.isfinite(values)
