"""The failure of a step: one rank says what happened, all end alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from domainpar.parallel.transport import RanksFailed
from domainpar.parallel.world import World
from domainpar.problems import Problem
from domainpar.training.parts import LabelledPart


class StepFailed(Problem, RuntimeError):
    """A step of training went wrong; names the event and says what to do. No checkpoint holds its results."""


def fail_alike(world: World, failed: Problem, spokesman: int) -> NoReturn:
    """End all ranks with one error; called by all of them with the same arguments.

    Args:
        world: The ranks.
        failed: The error.
        spokesman: The rank that it happened on, which says so.

    Raises:
        Problem: `failed`, on the spokesman.
        RanksFailed: On all others.
    """
    raise failed if world.rank == spokesman else RanksFailed(f"{world.transport.name_ranks([spokesman])}: {failed}")


@dataclass
class Now:
    """Where this rank is in its step: for the other ranks, and for the explanation of a failure.

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
