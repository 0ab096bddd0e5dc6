"""What this rank is doing now: told to the other ranks, and to whoever has to explain a failure."""

from __future__ import annotations

from dataclasses import dataclass

from domainpar.parallel.world import World
from domainpar.training.parts import LabelledPart


@dataclass
class Now:
    """Where this rank is in its step.

    Attributes:
        world: The ranks.
        phase: `load`, `forward`, `backward`, `reduce`, `optimizer` or `evaluate`.
        event: The sample at hand, if there is one.
        part: This rank's part of it, once it is loaded.
    """

    world: World
    phase: str = ""
    event: str | None = None
    part: LabelledPart | None = None

    def begin(self, phase: str, step: int, event: str | None = None, part: LabelledPart | None = None) -> None:
        """A phase of a step begins."""
        self.phase, self.part = phase, part
        self.event = event if part is None else part.name
        self.world.mark(phase, step, self.event)
