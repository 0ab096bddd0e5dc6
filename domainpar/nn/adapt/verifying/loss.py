"""The loss whose gradients are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from domainpar.nn.adapt.verifying.recording import tensors
from domainpar.nn.adapt.verifying.seeing import Seen


def weighted_sum(result: Any, seen: Sequence[Seen]) -> Tensor | None:
    """A sum of all results with weights that depend on the key of the row, so that they are the same split or not.

    None if no result has a gradient.
    """
    terms = [
        _weighted(tensor, one)
        for tensor, one in zip(tensors(result), seen, strict=True)
        if tensor.requires_grad and tensor.is_floating_point()
    ]
    return sum(terms[1:], terms[0]) if terms else None


def _weighted(tensor: Tensor, seen: Seen) -> Tensor:
    first = tensor.flatten() if seen.dim is None else tensor.movedim(seen.dim, 0)
    table = first.flatten(1) if first.dim() > 1 else first.unsqueeze(1)
    keys = torch.arange(len(table)) if seen.dim is None else seen.keys
    weights = torch.sin(1.7 * keys.double()[:, None] + 0.9 * torch.arange(table.size(1)) + 0.3)
    return (table * weights).sum()
