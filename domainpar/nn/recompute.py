"""Iterations of stages that are computed twice to save memory; nothing is exchanged twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from domainpar.parallel.halo import CompleteHalo, HaloRows

T = TypeVar("T")


class HaloSource(Protocol):
    """Sends owned rows to their ghosts: a halo, or a replay of its rows."""

    def spread(self, owned: Tensor) -> HaloRows: ...


def recomputed(run: Callable[[HaloSource], T], halo: CompleteHalo) -> T:
    """Run some stages and keep nothing of them for backward, where they run again.

    *Collective* like `run`, the first time. The second time ghosts get the rows of the first time, so no rank waits for
    another.

    Args:
        run: Takes what spreads rows, and gives back what the stages made. What it captures is kept.
        halo: What carries the rows.
    """
    remembering = _Remembering(halo)

    def again() -> T:
        remembering.start_over()
        return run(remembering)

    result: T = checkpoint(again, use_reentrant=False, preserve_rng_state=False)
    return result


class _Remembering:
    """Spreads rows over a halo once; afterwards returns the ghost rows that came then."""

    def __init__(self, halo: CompleteHalo) -> None:
        self._halo = halo
        self._ghosts: list[Tensor] = []
        self._last: HaloRows | None = None
        self._again: Iterator[Tensor] | None = None

    def start_over(self) -> None:
        """Begin again with the first spread."""
        if self._ghosts or self._last:  # not before the first time through
            self._keep_ghosts()
            self._again = iter(self._ghosts)

    def spread(self, owned: Tensor) -> HaloRows:
        if self._again is not None:
            return self._halo.join(owned, next(self._again))
        self._keep_ghosts()
        self._last = self._halo.spread(owned)
        return self._last

    def _keep_ghosts(self) -> None:
        """Keep only the ghosts' rows of the last spread; all its users have waited for them."""
        if self._last is not None:
            self._ghosts.append(self._last.finish().clone())  # a copy, so that the table they lie in can go
            self._last = None
