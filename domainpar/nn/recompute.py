"""Iterations of stages that are computed twice to save memory; nothing is exchanged twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from domainpar.parallel.halo import CompleteHalo, HaloRows

T = TypeVar("T")


class HaloSource(Protocol):
    """Sends owned rows to their ghosts: a halo, or a memory of its rows."""

    def spread(self, owned: Tensor) -> HaloRows: ...


def checked(every: int | None) -> int | None:
    """Iterations of a segment, if there can be segments of so many.

    Raises:
        ValueError: If they are below 1.
    """
    if every is not None and every < 1:
        raise ValueError(f"recompute_every {every} must be at least 1, or None to keep all iterations.")
    return every


def iterated(
    first: Callable[[], T],
    iterate: Callable[[range, Callable[[], T], HaloSource], T],
    count: int,
    every: int | None,
    halo: CompleteHalo,
) -> T:
    """The states after all iterations, of which the passes back keep those that segments begin with. *Collective*.

    Args:
        first: Makes the states that the first iteration takes.
        iterate: Takes states through some iterations. It asks for them, so that nobody else holds them if they are not
            wanted later.
        count: Iterations.
        every: Iterations of a segment, which are computed again in backward; None: all are kept.
        halo: What carries the rows.
    """
    if not torch.is_grad_enabled():
        return iterate(range(count), first, halo)
    states, length = first(), every or count
    for start in range(0, count, length):
        iterations = range(start, min(start + length, count))
        run = partial(iterate, iterations, partial(_same, states))
        is_last = iterations.stop == count  # its backward follows at once: keeping it is free
        states = run(halo) if is_last else recomputed(run, halo)
    return states


def _same(states: T) -> T:
    return states


def recomputed(run: Callable[[HaloSource], T], halo: CompleteHalo) -> T:
    """Run some stages and keep nothing of them for backward, where they run again.

    *Collective* as `run` is, the first time. The second time through, ghosts get the rows that came the first time: no
    rank waits for another, whenever autograd comes back.

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
    """Spreads rows over a halo once; afterwards answers with what came to the ghosts then."""

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
        """Of the last spread keep the ghosts' rows only; whoever needed them has waited for them."""
        if self._last is not None:
            self._ghosts.append(self._last.finish().clone())  # a copy, so that the table they lie in can go
            self._last = None
