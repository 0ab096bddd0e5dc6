"""This machine in a few numbers."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import psutil

from domainpar.common import limits


@dataclass(frozen=True)
class Machine:
    """A machine whose ranks compute on its cores.

    Attributes:
        name: In words.
        ranks: Ranks of it: its cores.
        memory: Bytes of it.
        latency: Seconds of a message.
        rate: Bytes a second of messages.
        busy: How much longer a step takes while all ranks compute.
    """

    name: str
    ranks: int
    memory: float
    latency: float = 1e-6
    rate: float = 5e9
    busy: float = 1.0

    def numbers_of_ranks(self, most: int) -> list[int]:
        """Ranks to look at, up to its cores."""
        looked_at = range(1, min(self.ranks, most) + 1)
        return [ranks for ranks in looked_at if ranks <= 4 or self.ranks % ranks == 0 or ranks % 4 == 0]


def this_machine() -> Machine:
    """This machine; what takes several ranks to measure is as one rank alone feels it."""
    memory = float(min(psutil.virtual_memory().total, limits.memory().limit))
    return Machine(platform.node(), len(limits.cores_here()), memory)
