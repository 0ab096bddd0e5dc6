"""What each edge is in the loss: a segment one wants to find, no segment, or one of a particle nobody asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from domainpar.events.graph import IntArray, Particles
from domainpar.events.targets import NO_PARTICLES, target_particles


class EdgeWeights(Protocol):
    """How much each edge weighs in the loss: by its kind, so that a step's weight is a sum over whole counts."""

    @property
    def num_kinds(self) -> int:
        """How many kinds of edges there are."""

    @property
    def needs_particles(self) -> bool:
        """Whether `kinds` needs to know the particle of each edge."""

    def kinds(
        self, classes: IntArray, label: IntArray, particle_of_edge: IntArray | None, particles: Particles | None
    ) -> IntArray:
        """The kind of each edge, [num_edges], given what is known of it."""

    def weights(self, kinds: IntArray) -> npt.NDArray[np.float64]:
        """The weight of each edge, given its kind, [num_edges]; negative: it is taught as false."""

    def total(self, counts: IntArray) -> float:
        """The size of the weights of some edges together, given how many there are of each kind."""


@dataclass(frozen=True)
class EdgeClasses:
    """Weights of the three classes of edges in the loss.

    Attributes:
        target: A true segment of a target particle.
        fake: Not a true segment.
        other: A true segment of any other particle.
    """

    target: float = 1.0
    fake: float = 1.0
    other: float = 0.0

    num_kinds: ClassVar[int] = 3
    needs_particles: ClassVar[bool] = False

    def kinds(
        self, classes: IntArray, label: IntArray, particle_of_edge: IntArray | None, particles: Particles | None
    ) -> IntArray:
        """What the weight of each edge is looked up by: its class."""
        return classes

    def weights(self, classes: IntArray) -> npt.NDArray[np.float64]:
        """The weight of each edge, given its class, [num_edges]."""
        return np.array([self.fake, self.target, self.other])[classes]

    def total(self, counts: IntArray) -> float:
        """The weight of some edges together, given how many there are of each class."""
        return float(counts[FAKE] * self.fake + counts[TARGET] * self.target + counts[OTHER] * self.other)


FAKE, TARGET, OTHER = 0, 1, 2


def class_counts(classes: IntArray, num_classes: int = EdgeClasses.num_kinds) -> IntArray:
    """How many edges there are of each class, or of each kind, int64 [num_classes]."""
    return np.bincount(classes, minlength=num_classes)


def edge_classes(
    label: IntArray,
    particle_of_edge: IntArray | None,
    particles: Particles | None,
    conditions: Mapping[str, Any] | None,
) -> IntArray:
    """Class of each edge: `FAKE`, `TARGET` or `OTHER`, int8 [num_edges].

    Args:
        label: 1 for true segments, [num_edges].
        particle_of_edge: Particle of each edge's `dst` hit; needed with conditions only.
        particles: The event's particle table; needed with conditions only.
        conditions: What makes a particle a target; None: every particle is one.

    Raises:
        ValueError: If there are conditions but the event does not know its particles.
    """
    classes = np.where(label > 0, TARGET, FAKE).astype(np.int8)
    if conditions:
        if particles is None or particle_of_edge is None:
            raise ValueError(NO_PARTICLES)
        targets = particles.particle_id[target_particles(particles, conditions)]
        classes[(label > 0) & ~np.isin(particle_of_edge, targets)] = OTHER
    return classes
