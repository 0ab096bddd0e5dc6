"""How a step fails: one rank says what happened, all end alike."""

from __future__ import annotations

from typing import NoReturn

from domainpar.parallel.transport import RanksFailed
from domainpar.parallel.world import World
from domainpar.problems import Problem


class StepFailed(Problem, RuntimeError):
    """A step of training went wrong; says what, of which event, and what to do. No checkpoint holds its results."""


def fail_alike(world: World, failed: Problem, spokesman: int) -> NoReturn:
    """End all ranks with what they found together; called by all of them with the same arguments.

    Args:
        world: The ranks.
        failed: What happened.
        spokesman: The rank that it happened on, which says so.

    Raises:
        Problem: What `failed` is, on the spokesman.
        RanksFailed: On all others.
    """
    raise failed if world.rank == spokesman else RanksFailed(f"{world.transport.name_ranks([spokesman])}: {failed}")
