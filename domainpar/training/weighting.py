"""Weights of edges by a list of rules: acorn's `weighting`, with its documented meaning.

Each rule has a weight and conditions, in the grammar of `events.targets`, on `y` (the label of an edge) or on what is
known of its particle. A rule holds for an edge that meets all its conditions; of the rules that hold the last one wins.
Where none holds a true edge weighs 0 and a false one 1. A false edge has no particle: it meets no condition on one, nor
the opposite.

With a negative weight an edge is taught as false, with the size of the weight. The loss is divided by the sum of the
sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.events.graph import BoolArray, IntArray, Particles
from domainpar.events.targets import check_target, passes, target_particles

LABEL = "y"
# Of acorn's names for a particle's quantities, those that are not ours.
_OUR_NAME = {"eta_particle": "eta"}
_FALSE, _TRUE, _FIRST_RULE = 0, 1, 2


@dataclass(frozen=True)
class WeightRule:
    """One rule.

    Attributes:
        weight: Of the edges for which it holds.
        conditions: On `y` and the particle's quantities; all must be met.
    """

    weight: float
    conditions: Mapping[str, Any]

    @property
    def on_particle(self) -> dict[str, Any]:
        """The conditions on the particle, by our names."""
        return {_OUR_NAME.get(name, name): of for name, of in self.conditions.items() if name != LABEL}


@dataclass(frozen=True)
class EdgeRules:
    """Weights by rules. The kind of an edge is the rule that gives its weight: 0 and 1 are those without any.

    Attributes:
        rules: In order; later ones win.
    """

    rules: tuple[WeightRule, ...]

    @classmethod
    def of(cls, rules: Iterable[tuple[float, Mapping[str, Any]]]) -> EdgeRules:
        """Rules from (weight, conditions) each."""
        return cls(tuple(WeightRule(weight, conditions) for weight, conditions in rules))

    @property
    def num_kinds(self) -> int:
        return _FIRST_RULE + len(self.rules)

    @property
    def needs_particles(self) -> bool:
        """Whether any rule asks for an edge's particle."""
        return any(rule.on_particle for rule in self.rules)

    def check(self, particles: Particles | None) -> None:
        """Look whether an event can tell what the rules ask.

        Raises:
            ValueError: If it cannot, or a condition cannot be understood.
        """
        for rule in self.rules:
            if LABEL in rule.conditions:
                passes(np.zeros(0), rule.conditions[LABEL])
            if rule.on_particle:
                check_target(particles, rule.on_particle)

    def kinds(
        self, classes: IntArray, label: IntArray, particle_of_edge: IntArray | None, particles: Particles | None
    ) -> IntArray:
        """The kind of each edge, int16 [num_edges].

        Args:
            classes: Not looked at: rules see labels and particles themselves.
            label: 1 for true segments, [num_edges].
            particle_of_edge: Particle of each edge's `dst` hit; needed with conditions on particles.
            particles: The event's particle table; needed with conditions on particles.

        Raises:
            ValueError: If the event does not tell what a rule asks.
        """
        true = np.asarray(label) > 0
        kinds = np.where(true, _TRUE, _FALSE).astype(np.int16)
        for number, rule in enumerate(self.rules, start=_FIRST_RULE):
            holds = np.ones(len(true), np.bool_)
            if LABEL in rule.conditions:
                holds &= passes(true.astype(np.int8), rule.conditions[LABEL])
            if rule.on_particle:
                holds &= true & self._particle_passes(rule.on_particle, particle_of_edge, particles)
            kinds[holds] = number
        return kinds

    def weights(self, kinds: IntArray) -> npt.NDArray[np.float64]:
        """The weight of each edge, given its kind, [num_edges]."""
        return np.array([1.0, 0.0, *(rule.weight for rule in self.rules)])[kinds]

    def total(self, counts: IntArray) -> float:
        """The size of the weights of some edges together, given how many there are of each kind."""
        sizes = np.abs(self.weights(np.arange(self.num_kinds)))
        return float(sum(int(count) * float(size) for count, size in zip(counts, sizes)))

    @staticmethod
    def _particle_passes(
        conditions: Mapping[str, Any], particle_of_edge: IntArray | None, particles: Particles | None
    ) -> BoolArray:
        if particles is None or particle_of_edge is None:
            raise ValueError(
                f"--weighting asks for {', '.join(conditions)} of particles, and this event has no particle table."
            )
        return np.isin(particle_of_edge, particles.particle_id[target_particles(particles, conditions)])
