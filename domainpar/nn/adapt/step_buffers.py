"""Buffers that a module changes as it trains, such as running means, over the samples of a step and their ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from domainpar.nn.adapt.gradient_sums import sum_exactly
from domainpar.parallel.transport import Transport


class StepBuffers:
    """Makes a step change the buffers of a module in one way, whichever ranks compute which of its samples.

    Each sample begins with the buffers of the step's beginning. In the end a buffer of floats has changed by the mean
    of what the samples changed, one of integers by their sum. With one sample that is what torch does.

    Args:
        module: The module; as it is now, its step begins.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = list(module.buffers())
        self._before = [buffer.clone() for buffer in self._buffers]
        self._changes = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in self._buffers]

    @contextmanager
    def sample(self, counts: bool) -> Iterator[None]:
        """Around one sample. `counts`: whether this rank is the one of those that share it to speak for it."""
        yield
        with torch.no_grad():
            for buffer, before, change in zip(self._buffers, self._before, self._changes):
                if counts:
                    # Not a plain difference: of two infinities it is no number.
                    same = (buffer == before) | (buffer.isnan() & before.isnan())
                    change += torch.where(same, 0.0, buffer.double() - before.double())
                buffer.copy_(before)

    def end(self, transport: Transport, num_samples: int) -> None:
        """Leave in the buffers what the whole step made of them. *Collective*.

        Args:
            transport: Joins all ranks.
            num_samples: Samples of the step, on all ranks together.

        Raises:
            RuntimeError: On all ranks alike, if a buffer became infinite or NaN.
        """
        if not self._buffers:
            return
        totals = sum_exactly(self._changes, transport, self._buffers[0].device)
        if totals is None:
            raise RuntimeError(
                "a buffer of the model (running means, say) became infinite or NaN in this step; look at its inputs."
            )
        with torch.no_grad():
            for buffer, before, total in zip(self._buffers, self._before, totals):
                change = total / num_samples if buffer.is_floating_point() else total.round()
                buffer.copy_(torch.where(change == 0, before.double(), before.double() + change))
