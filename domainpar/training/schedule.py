"""The learning rate as a function of the step alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Learning rate of each step.

    Attributes:
        lr: Peak learning rate.
        shape: After the warm-up: `constant`; `cosine`, down to 0 after the last step; `step`, times 0.9 each 10 epochs.
        warmup: Steps in which the rate rises linearly from 0 to `lr`.
        total_steps: Steps of the whole run, as its epochs plan them.
        steps_per_epoch: Steps of one epoch.
    """

    lr: float
    shape: Literal["constant", "cosine", "step"]
    warmup: int
    total_steps: int
    steps_per_epoch: int

    def at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.shape == "cosine":
            progress = (step - self.warmup) / max(1, self.total_steps - self.warmup)
            return self.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        if self.shape == "step":
            return self.lr * 0.9 ** (step // max(1, self.steps_per_epoch) // 10)
        return self.lr
