"""Time for a certificate, on which all ranks agree."""

from __future__ import annotations

import time

from domainpar.parallel.world import World


class Budget:
    """How much time is left, by rank 0's clock.

    Args:
        world: The ranks.
        seconds: From now on.
        talks: Whether rank 0 prints a line of progress for each thing begun.

    Attributes:
        left_out: What was not done for want of time.
    """

    def __init__(self, world: World, seconds: float, talks: bool = True) -> None:
        self._world, self._talks = world, talks
        self._began = time.monotonic()
        self._end = self._began + seconds
        self.left_out: list[str] = []

    def allows(self, what: str, seconds: float = 0.0) -> bool:
        """Whether there is time for something, about so many seconds; says so on rank 0. *Collective*."""
        enough = self._world.transport.broadcast(b"yes" if time.monotonic() + seconds < self._end else b"no") == b"yes"
        if not enough:
            self.left_out.append(what)
        if self._world.is_root and self._talks:
            how = "" if enough else " left out: no time"
            print(f"certify {time.monotonic() - self._began:5.1f} s: {what}{how}", flush=True)
        return enough
