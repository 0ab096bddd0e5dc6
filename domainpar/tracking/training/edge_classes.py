"""Classes of edges, and their weights in the loss.

An edge is a true segment of a target particle, a true segment of another one, or false; or that is not known, and it is
left out of the loss and of all metrics. Metrics count classes. The loss weighs edges by a list of rules: acorn's
`weighting`, with its documented meaning.

Each rule has a weight and conditions, in the grammar of `events.targets`, on `y` (the label of an edge) or on a
quantity of its particle. A rule holds for an edge that meets all its conditions; of the rules that hold the last one
wins. Where none holds a true edge weighs 0 and a false one 1. A false edge has no particle: it meets no condition on
one, nor the opposite. One weight for each class is three rules (`EdgeRules.by_class`).

With a negative weight an edge is trained as false, with the size of the weight. The loss is divided by the sum of the
sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.tracking.events.graph import IntArray, Particles
from domainpar.tracking.events.targets import NO_PARTICLES, check_target, passes, target_particles

FAKE, TARGET, OTHER, UNKNOWN = 0, 1, 2, 3
LABEL = "y"
# Of acorn's names for a particle's quantities, those that are not ours.
_OUR_NAME = {"eta_particle": "eta"}
# Kinds of edges: without any rule, then one for each rule.
_FALSE, _TRUE, NOT_KNOWN, _FIRST_RULE = 0, 1, 2, 3


def edge_classes(
    label: IntArray,
    particle_of_edge: IntArray | None,
    particles: Particles | None,
    conditions: Mapping[str, Any] | None,
) -> IntArray:
    """Class of each edge: `FAKE`, `TARGET`, `OTHER` or `UNKNOWN`, int8 [num_edges].

    Args:
        label: 1 for true segments, -1 where that is not known, [num_edges].
        particle_of_edge: Particle of each edge's `dst` hit; needed with conditions only.
        particles: The event's particle table; needed with conditions only.
        conditions: Conditions of a target particle; None: every particle is one.

    Raises:
        ValueError: If there are conditions but the event does not know its particles.
    """
    classes = np.where(label > 0, TARGET, np.where(label < 0, UNKNOWN, FAKE)).astype(np.int8)
    if conditions:
        if particles is None or particle_of_edge is None:
            raise ValueError(NO_PARTICLES)
        targets = particles.particle_id[target_particles(particles, conditions)]
        classes[(label > 0) & ~np.isin(particle_of_edge, targets)] = OTHER
    return classes


@dataclass(frozen=True)
class WeightRule:
    """One rule."""

    weight: float  # of the edges for which it holds
    conditions: Mapping[str, Any]  # on `y` and the particle's quantities; all must be met
    edge_class: int | None = None  # the class that an edge must have; None: any

    @property
    def on_particle(self) -> dict[str, Any]:
        """The conditions on the particle, by our names."""
        return {_OUR_NAME.get(name, name): of for name, of in self.conditions.items() if name != LABEL}


@dataclass(frozen=True)
class EdgeRules:
    """Weights of edges by rules.

    The kind of an edge is the rule that gives its weight: 0 and 1 are false and true edges without any, 2 those that
    are not known to be either, of which no rule holds. The weight of a step is a sum over counts of kinds, which are
    integers: the same on any number of ranks.
    """

    rules: tuple[WeightRule, ...]  # in order; later ones win

    @classmethod
    def of(cls, rules: Iterable[tuple[float, Mapping[str, Any]]]) -> EdgeRules:
        """Rules from (weight, conditions) each."""
        return cls(tuple(WeightRule(weight, conditions) for weight, conditions in rules))

    @classmethod
    def by_class(cls, target: float = 1.0, fake: float = 1.0, other: float = 0.0) -> EdgeRules:
        """One weight for each class.

        Args:
            target: Of a true segment of a target particle.
            fake: Of an edge that is no true segment.
            other: Of a true segment of any other particle.
        """
        weights = {FAKE: fake, TARGET: target, OTHER: other}
        return cls(tuple(WeightRule(weight, {}, edge_class) for edge_class, weight in weights.items()))

    @property
    def on_particles(self) -> bool:
        """Whether a rule has a condition on an edge's particle."""
        return any(rule.on_particle for rule in self.rules)

    def check(self, particles: Particles | None) -> None:
        """Refuse rules whose conditions an event cannot answer.

        Raises:
            ValueError: If it cannot, or a condition cannot be understood.
        """
        for rule in self.rules:
            if LABEL in rule.conditions:
                passes(np.zeros(0), rule.conditions[LABEL])
            if rule.on_particle:
                check_target(particles, rule.on_particle)

    def kinds(self, classes: IntArray, particle_of_edge: IntArray | None, particles: Particles | None) -> IntArray:
        """The kind of each edge, int16 [num_edges].

        Args:
            classes: Class of each edge, [num_edges].
            particle_of_edge: Particle of each edge's `dst` hit; needed with conditions on particles.
            particles: The event's particle table; needed with conditions on particles.

        Raises:
            ValueError: If a rule has a condition on particles and the event has no particle table.
        """
        known, true = classes != UNKNOWN, (classes == TARGET) | (classes == OTHER)
        kinds = np.where(known, np.where(true, _TRUE, _FALSE), NOT_KNOWN).astype(np.int16)
        for number, rule in enumerate(self.rules, start=_FIRST_RULE):
            holds = known.copy() if rule.edge_class is None else classes == rule.edge_class
            if LABEL in rule.conditions:
                holds &= passes(true.astype(np.int8), rule.conditions[LABEL])
            if conditions := rule.on_particle:
                if particles is None or particle_of_edge is None:
                    what = f"--weighting asks for {', '.join(conditions)} of particles"
                    raise ValueError(f"{what}, and this event has no particle table.")
                targets = particles.particle_id[target_particles(particles, conditions)]
                holds &= true & np.isin(particle_of_edge, targets)
            kinds[holds] = number
        return kinds

    def count(self, kinds: IntArray) -> IntArray:
        """The number of edges of each kind, int64 [3 + number of rules]."""
        return np.bincount(kinds, minlength=_FIRST_RULE + len(self.rules))

    def weights(self, kinds: IntArray) -> npt.NDArray[np.float64]:
        """The weight of each edge, given its kind, [num_edges]."""
        return np.array([1.0, 0.0, 0.0, *(rule.weight for rule in self.rules)])[kinds]

    def total(self, counts: IntArray) -> float:
        """The sum of the sizes of the weights of some edges, given their counts by kind."""
        sizes = np.abs(self.weights(np.arange(len(counts))))
        return float(sum(int(count) * float(size) for count, size in zip(counts, sizes)))
