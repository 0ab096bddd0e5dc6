"""Hits that are kept of an event: those of some volumes, of some true particles, and not lost."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from domainpar.common.problems import EventPlace
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.targets import target_particles


@dataclass(frozen=True)
class Selection:
    """Which hits are kept; all by default.

    Attributes:
        volumes: Detector volumes; None: all.
        hard_cuts: Conditions on the particles whose hits are kept (`events.targets` has the grammar); None: all hits,
            also those of noise.
        hit_inefficiency: Share of the hits that are lost at random, as in inefficient sensors; below 1.
        seed: Decides which, with the name of the event.
    """

    volumes: tuple[int, ...] | None = None
    hard_cuts: Mapping[str, Any] | None = None
    hit_inefficiency: float = 0.0
    seed: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The selection as plain JSON values; empty where all hits are kept."""
        volumes = None if self.volumes is None else list(self.volumes)
        settings = {
            "volumes": volumes,
            "hard_cuts": self.hard_cuts and dict(self.hard_cuts),
            "hit_inefficiency": [self.hit_inefficiency, self.seed] if self.hit_inefficiency else None,
        }
        return {name: value for name, value in settings.items() if value}

    def select(self, hits: Hits) -> Hits:
        """The hits that are kept, in their order; `nhits` of particles counts them, their weights sum to 1.

        Raises:
            Problem: If no hit is left, or hard cuts are applied to an event without true particles.
        """
        if not self.settings:
            return hits
        chance = np.random.default_rng([self.seed, zlib.crc32(hits.event_id.encode())])
        kept = chance.random(len(hits)) >= self.hit_inefficiency
        if self.volumes is not None:
            kept &= np.isin(hits.volume, self.volumes)
        place, particles = EventPlace(hits.event_id), hits.particles
        if self.hard_cuts:
            if hits.particle_id is None or particles is None:
                raise place.problem("--hard-cuts need true particles, and this event has none", "leave them out")
            passing = particles.particle_id[target_particles(particles, self.hard_cuts)]
            kept &= np.isin(hits.particle_id, passing) & (hits.particle_id != 0)
        if len(hits) and not kept.any():
            present = ", ".join(map(str, np.unique(hits.volume)))
            raise place.problem(f"no hit of {len(hits):,} is kept; its volumes are {present}", "widen the selection")
        hits = hits.take(kept)
        if hits.weight is not None and hits.weight.sum() > 0:
            hits = replace(hits, weight=hits.weight / hits.weight.sum())
        if particles is not None and hits.particle_id is not None:
            particles = particles.counted_in(hits.particle_id)
        return replace(hits, particles=particles)
