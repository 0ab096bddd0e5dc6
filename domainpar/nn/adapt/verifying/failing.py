"""Ranks as threads that may fail: what first went wrong, on which of them, and whether it was in a talk of ranks."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from domainpar.nn.adapt.rows import NotExact
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.transport import RanksFailed
from domainpar.parallel.world import World


class Failure(NamedTuple):
    """What a rank raised.

    Attributes:
        error: The error.
        rank: On which rank.
        talking: Whether it was raised by a talk of ranks.
    """

    error: BaseException
    rank: int
    talking: bool

    @property
    def refuses(self) -> bool:
        """Whether it says that the model has no exact form."""
        return isinstance(self.error, NotExact)

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def first_failure(work: Callable[[World], None], num_ranks: int, patience: float) -> Failure | None:
    """Run something on ranks that are threads; returns what first went wrong, a refusal before anything else.

    Args:
        work: What each rank does.
        num_ranks: Ranks to run.
        patience: Seconds that a rank waits for the others; how long it computes itself is nobody's business.
    """
    failures: list[Failure] = []

    def tried(world: World) -> None:
        world.transport.board = None  # nobody makes marks here: where a rank was is told by its layer
        try:
            work(world)
        except BaseException as error:
            failures.append(Failure(error, world.rank, _came_from_transport(error)))
            raise

    try:
        run_threads(tried, num_ranks, timeout=math.inf, deadline=patience, domain_size=num_ranks)
    except BaseException as error:
        if all(error is not failure.error for failure in failures):
            raise
    own = [one for one in failures if not isinstance(one.error, RanksFailed)]  # not what others met because of them
    refused = [one for one in own if one.refuses]
    return next(iter(refused or own or failures), None)


def _came_from_transport(error: BaseException) -> bool:
    return any("parallel" in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__))
