"""Target particles: conditions on the particle table of an event.

The condition grammar is the one of the acorn framework's `weighting` and `target_tracks`, with its documented meaning:

    key: value                  equal
    key: [lo, hi]               closed interval, `.inf` allowed
    key: [in, [a, b]]           one of (also `not_in`)
    key: [is, value]            equal (also `is_not`)
    key: [within, [lo, hi]]     closed interval (also `not_within`)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from domainpar.tracking.events.graph import Array, Particles
from partitioners.topology import BoolArray

QUANTITIES = ("pt", "eta", "nhits", "charge", "radius", "vz", "primary", "pdgId", "particle_id")
"""Quantities of conditions: pt in GeV, eta, hits in the detector, charge, vertex radius and z in mm, whether it is
primary (true or false), its kind by the numbers of the Particle Data Group, the id."""

MEV_ABOVE = 50.0
"""A median pT above this can only be one in MeV."""

NO_PARTICLES = "--target needs a particle table, and this event has none; leave --target out."


def particle_quantity(particles: Particles, name: str) -> Array:
    """One quantity of every particle, [M].

    Raises:
        ValueError: If the quantity is unknown, or not known for any of the particles.
    """
    if name not in QUANTITIES:
        raise ValueError(f"target condition on {name!r}, which is unknown; known: {', '.join(QUANTITIES)}.")
    values = getattr(particles, "pdg_id" if name == "pdgId" else name)
    if name in ("primary", "nhits") and values is not None:
        return np.asarray(values)  # that none is primary, or left a hit, is a fact too
    if values is not None:
        unknown = np.isnan(values) if np.issubdtype(values.dtype, np.floating) else values == 0
    if values is None or (len(values) and unknown.all()):
        raise ValueError(f"target condition on {name!r}, but the source of these events does not have it.")
    return np.asarray(values)


def passes(values: Array, condition: Any) -> BoolArray:
    """True for each value that meets a condition of the grammar; a NaN meets none, nor its opposite.

    Raises:
        ValueError: If the condition is not of the grammar, or no value could ever meet it.
    """
    match condition:
        case ["in" | "not_in" as word, list(choices)]:
            # Not np.isin: in float32, 0.1 is one of [0.1] only if it is compared as `is` does.
            intervals = [(choice, choice) for choice in choices]
        case ["is" | "is_not" as word, value]:
            intervals = [(value, value)]
        case ["within" | "not_within" as word, [lo, hi]]:
            intervals = [(lo, hi)]
        case [lo, hi] if not isinstance(lo, str):
            word, intervals = "within", [(lo, hi)]
        case _:  # a list that is none of these is no number, and refused as that
            word, intervals = "is", [(condition, condition)]
    met = np.zeros(len(values), dtype=bool)
    for low, high in intervals:
        if not (isinstance(low, int | float) and isinstance(high, int | float)):
            raise ValueError(
                f"target condition {condition!r} is not understood; write a number, [lo, hi], [in, [..]], "
                "[not_in, [..]], [is, v], [is_not, v], [within, [lo, hi]] or [not_within, [lo, hi]]. "
                "In YAML 1e3 is a word: write 1.0e+3."
            )
        if "within" in word and not low <= high:
            raise ValueError(f"target condition {condition!r} is an empty interval; write [lo, hi] with lo <= hi.")
        met |= (values >= low) & (values <= high)
    not_nan = values == values
    return np.asarray((~met if "not" in word else met) & not_nan)


def target_particles(particles: Particles, conditions: Mapping[str, Any]) -> BoolArray:
    """True for each particle that meets all conditions, bool [M].

    Raises:
        ValueError: If a condition is about an unknown quantity or not of the grammar.
    """
    chosen = np.ones(len(particles.particle_id), dtype=bool)
    for name, condition in conditions.items():
        chosen &= passes(particle_quantity(particles, name), condition)
    return chosen


def check_conditions(conditions: Mapping[str, Any]) -> None:
    """Look whether conditions can be understood, whatever the events.

    Raises:
        ValueError: If one is about an unknown quantity or not of the grammar.
    """
    numbers, integers = np.zeros(0), np.zeros(0, np.int64)
    none = Particles(integers, numbers, numbers, np.zeros((0, 3)), integers, integers, integers, integers)
    target_particles(none, conditions)


def check_target(particles: Particles | None, conditions: Mapping[str, Any]) -> None:
    """Look whether the targets of an event are known.

    Raises:
        ValueError: If it has no particle table or does not know what the conditions ask, or they cannot be understood.
    """
    if particles is None:
        raise ValueError(NO_PARTICLES)
    target_particles(particles, conditions)
