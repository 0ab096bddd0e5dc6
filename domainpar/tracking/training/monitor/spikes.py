"""Spikes of the loss: the step, the events of the step, and the layer whose gradient grew most."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

from domainpar.common.words import some_of

STEPS = 50
"""Steps that say what is usual."""

LEAST_STEPS = 10
"""Before that many, nothing is usual."""

TIMES = 1.5
"""A spike is more than so many times the median of the losses before it."""

SPREADS = 4.0
"""And its distance from the median is more than so many times that of the ninth tenth of these losses."""


class Spikes:
    """Looks at the loss of each step, and at the norms of the gradients of all layers. The same on every rank."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=STEPS)
        self._norms: dict[str, deque[float]] = {}

    def look(self, loss: float, norms: Mapping[str, float], events: Sequence[str]) -> dict[str, Any] | None:
        """Look at one step; returns what is to be recorded of a spike.

        Args:
            loss: Of the step, before its parameters changed.
            norms: Norm of the gradient of each layer.
            events: Names of the samples of the step.

        Returns:
            The loss, the usual one, the events, the layer whose gradient grew most, and how many times its usual norm
            that is; None if there is no spike.
        """
        spike = None
        if len(self._losses) >= LEAST_STEPS:
            usual, spread = median(self._losses), _spread(self._losses)
            if usual > 0 and loss > TIMES * usual and loss > usual + SPREADS * spread:
                sizes = {layer: median(before) for layer, before in self._norms.items()}
                known = {layer: norm for layer, norm in norms.items() if norm < math.inf and layer in sizes}
                grown = {layer: norm / sizes[layer] for layer, norm in known.items() if 0 < sizes[layer] < math.inf}
                layer = max(grown, key=lambda name: grown[name], default=None)
                spike = {"loss": loss, "usual": usual, "events": list(events), "layer": layer}
                spike["times"] = None if layer is None else grown[layer]
        self._losses.append(loss)
        for layer, norm in norms.items():
            self._norms.setdefault(layer, deque(maxlen=STEPS)).append(norm)
        return spike


def _spread(losses: Collection[float]) -> float:
    """How far nine tenths of some losses reach above their median."""
    return sorted(losses)[(9 * len(losses)) // 10 - 1] - median(losses)


def lines(record: Mapping[str, Any]) -> list[str]:
    """A printed note of a spike in a training record; nothing if there is none."""
    spike = record.get("spike")
    if spike is None:
        return []
    where = ""
    if spike["layer"] is not None:
        where = f"; the gradient of {spike['layer']} is {spike['times']:.1f} times its usual size"
    events = some_of(spike["events"], 3)
    of_loss = f"{spike['loss']:.4g}, {spike['loss'] / spike['usual']:.1f} times the usual {spike['usual']:.4g}"
    return [f"spike    : step {record['step']}, loss {of_loss}, event {events}{where}"]
