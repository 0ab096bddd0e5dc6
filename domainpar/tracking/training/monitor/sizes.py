"""The sizes of layers: norms of their parameters, of their gradients, and of what a step changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn


def layer_norms(layers: Iterable[str], norms: Iterable[float]) -> dict[str, float]:
    """The norm of each layer, of the norms of tensors and the layers they belong to."""
    squares: dict[str, float] = {}
    for layer, norm in zip(layers, norms, strict=True):
        squares[layer] = squares.get(layer, 0.0) + norm * norm
    return {layer: math.sqrt(square) for layer, square in squares.items()}


def layer_sizes(
    layer_of: Mapping[nn.Parameter, str], before: Sequence[Tensor], gradients: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    """Norms of each layer: of its `parameters` after a step of the optimiser, of the `update`, and of the `gradient`.

    Args:
        layer_of: The layer of each parameter.
        before: Copies of the parameters before the step.
        gradients: Norms of the gradients of layers that have one.

    Returns:
        By layer, for `metrics.jsonl`: None where a norm is too large for the parameters' type.
    """
    after = [parameter.detach() for parameter in layer_of]
    norms = [*torch._foreach_norm(after), *torch._foreach_norm(torch._foreach_sub(after, list(before)))]
    read: list[float] = torch.stack([norm.double() for norm in norms]).tolist()  # together: a GPU is waited for once
    parameters, updates = (layer_norms(layer_of.values(), of) for of in (read[: len(after)], read[len(after) :]))
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
