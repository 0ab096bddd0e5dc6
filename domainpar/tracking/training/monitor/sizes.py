"""The sizes of layers: norms of their parameters, of their gradients, and of what a step changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def layer_norms(layers: Iterable[str], norms: Iterable[float]) -> dict[str, float]:
    """The norm of each layer, of the norms of tensors and the layers they belong to."""
    squares: dict[str, float] = {}
    for layer, norm in zip(layers, norms, strict=True):
        squares[layer] = squares.get(layer, 0.0) + norm * norm
    return {layer: math.sqrt(square) for layer, square in squares.items()}


class Changes:
    """Around a step of the optimiser: what it makes of the parameters.

    Args:
        layer_of: The layer of each parameter.
    """

    def __init__(self, layer_of: Mapping[nn.Parameter, str]) -> None:
        self._layer_of = layer_of

    def __enter__(self) -> Changes:
        self._before = [parameter.detach().clone() for parameter in self._layer_of]
        return self

    def __exit__(self, *_: Any) -> None:
        after = [parameter.detach() for parameter in self._layer_of]
        norms = [*torch._foreach_norm(after), *torch._foreach_norm(torch._foreach_sub(after, self._before))]
        read: list[float] = torch.stack(
            [norm.double() for norm in norms]
        ).tolist()  # together: a GPU is waited for once
        self._norms = read[: len(after)], read[len(after) :]
        del self._before

    def sizes(self, gradients: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
        """Norms of each layer: of its `parameters` after the step, of the `update`, and of the `gradient` before.

        Args:
            gradients: Norms of the gradients of layers that have one.

        Returns:
            By layer, for `metrics.jsonl`: None where a norm is too large for the parameters' type.
        """
        parameters, updates = (layer_norms(self._layer_of.values(), norms) for norms in self._norms)
        return {
            layer: {
                "parameters": _json(size),
                "gradient": _json(gradients.get(layer, 0.0)),
                "update": _json(updates[layer]),
            }
            for layer, size in parameters.items()
        }


def _json(norm: float) -> float | None:
    return norm if math.isfinite(norm) else None
