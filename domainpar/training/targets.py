"""Which particles one wants to find, and what each edge weighs in the loss.

The condition grammar is the one of the acorn framework's `weighting` and `target_tracks`, with its documented meaning:

    key: value                  equal
    key: [lo, hi]               closed interval, `.inf` allowed
    key: [in, [a, b]]           one of (also `not_in`)
    key: [is, value]            equal (also `is_not`)
    key: [within, [lo, hi]]     closed interval (also `not_within`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.events.graph import IntArray, Particles

BoolArray = npt.NDArray[np.bool_]

QUANTITIES = ("pt", "eta", "nhits", "charge", "radius", "vz", "particle_id")
"""What a condition can be about: pt in GeV, eta, hits in the detector, charge, vertex radius and z in mm, the id."""

NO_PARTICLES = "--target needs a particle table, and this event has none; leave --target out."


def particle_quantity(particles: Particles, name: str) -> npt.NDArray[Any]:
    """One quantity of every particle, [M].

    Raises:
        ValueError: If the quantity is unknown, or not known for any of the particles.
    """
    if name not in QUANTITIES:
        raise ValueError(f"target condition on {name!r}, which is unknown; known: {', '.join(QUANTITIES)}.")
    if name == "radius":
        values = np.hypot(particles.vertex[:, 0], particles.vertex[:, 1])
    elif name == "vz":
        values = particles.vertex[:, 2]
    else:
        values = getattr(particles, name)
    unknown = np.isnan(values) if np.issubdtype(values.dtype, np.floating) else values == 0
    if len(values) and unknown.all():
        raise ValueError(f"target condition on {name!r}, but the source of these events does not tell it.")
    return values


def passes(values: npt.NDArray[Any], condition: Any) -> BoolArray:
    """Whether each value meets one condition of the grammar; a NaN meets none, nor its opposite.

    Raises:
        ValueError: If the condition is not of the grammar, or no value could ever meet it.
    """
    match condition:
        case ["in" | "not_in" as word, list(choices)]:
            met = np.zeros(len(values), dtype=bool)
            for choice in choices:  # not np.isin: in float32, 0.1 is one of [0.1] only if it is compared as `is` does
                met |= values == _number(choice, condition)
        case ["is" | "is_not" as word, value]:
            met = values == _number(value, condition)
        case ["within" | "not_within" as word, [lo, hi]]:
            met = _within(values, lo, hi, condition)
        case [lo, hi] if not isinstance(lo, str):
            word, met = "within", _within(values, lo, hi, condition)
        case list():
            raise _not_understood(condition)
        case _:
            word, met = "is", values == _number(condition, condition)
    known = values == values  # false for NaN
    return np.asarray((~met if "not" in word else met) & known)


def _within(values: npt.NDArray[Any], lo: Any, hi: Any, condition: Any) -> BoolArray:
    low, high = _number(lo, condition), _number(hi, condition)
    if not low <= high:
        raise ValueError(f"target condition {condition!r} is an empty interval; write [lo, hi] with lo <= hi.")
    return np.asarray((values >= low) & (values <= high))


def _number(value: Any, condition: Any) -> float:
    if isinstance(value, int | float):
        return value
    raise _not_understood(condition)


def _not_understood(condition: Any) -> ValueError:
    return ValueError(
        f"target condition {condition!r} is not understood; write a number, [lo, hi], [in, [..]], [not_in, [..]], "
        "[is, v], [is_not, v], [within, [lo, hi]] or [not_within, [lo, hi]]. In YAML 1e3 is a word: write 1.0e+3."
    )


def target_particles(particles: Particles, conditions: Mapping[str, Any]) -> BoolArray:
    """Whether each particle meets all conditions, bool [M].

    Raises:
        ValueError: If a condition is about an unknown quantity or not of the grammar.
    """
    chosen = np.ones(len(particles.particle_id), dtype=bool)
    for name, condition in conditions.items():
        chosen &= passes(particle_quantity(particles, name), condition)
    return chosen


def check_target(particles: Particles | None, conditions: Mapping[str, Any]) -> None:
    """Look whether an event can tell its targets.

    Raises:
        ValueError: If it has no particle table or does not know what the conditions ask, or they cannot be understood.
    """
    if particles is None:
        raise ValueError(NO_PARTICLES)
    target_particles(particles, conditions)


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

    def weights(self, classes: IntArray) -> npt.NDArray[np.float64]:
        """The weight of each edge, given its class, [num_edges]."""
        return np.array([self.fake, self.target, self.other])[classes]

    def total(self, counts: IntArray) -> float:
        """The weight of some edges together, given how many there are of each class."""
        return float(counts[FAKE] * self.fake + counts[TARGET] * self.target + counts[OTHER] * self.other)


FAKE, TARGET, OTHER = 0, 1, 2


def class_counts(classes: IntArray) -> IntArray:
    """How many edges there are of each class, int64 [3]."""
    return np.bincount(classes, minlength=1 + max(FAKE, TARGET, OTHER))


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
