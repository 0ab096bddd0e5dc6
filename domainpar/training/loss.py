"""The loss of a step: weighted cross-entropy over all owned edges of all events and ranks, divided once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from domainpar.nn.mlp import padded
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.local import LocalGraph

ROWS = 32  # a multiple of the rows that torch computes at once


def edge_loss(logits: Tensor, graph: LocalGraph, weights: Tensor, step_weight: float, loss_sum: IntegerSums) -> Tensor:
    """Add this part's share of the step's loss, one partial per owned tile, and return its gradient.

    Divided by the weight of the whole step, never by this rank's own: a mean of per-rank means depends on the
    partition. So gradients are summed over ranks, not averaged. The gradient is given for every local edge: both
    copies of a cut edge carry it whole. The loss counts each edge once, at its owner.

    Args:
        logits: [num_edges].
        graph: The part, with labels.
        weights: Weight of each local edge, [num_edges]; one below 0 teaches the edge as false, with its size.
        step_weight: Sum of the sizes of the weights of all edges of the step, over all events and ranks.
        loss_sum: Where the loss is summed, of length 1.

    Returns:
        d loss / d logits, [num_edges].
    """
    assert graph.label is not None
    labels, weights = graph.label.to(logits.dtype) * (weights >= 0), weights.abs()
    gradient = torch.empty_like(logits)
    for tile in graph.tiles.edges:
        z, y, w = (_block(values[tile.edges]) for values in (logits.detach(), labels, weights))
        gradient[tile.edges] = ((torch.sigmoid(z) - y) * w / step_weight)[: tile.num_edges]
        if tile.owned:
            terms = F.binary_cross_entropy_with_logits(z, y, reduction="none") * w
            loss_sum.add(terms.to(torch.float64).sum().reshape(1) / step_weight)
    return gradient


def _block(values: Tensor) -> Tensor:
    """One tile's values in a fresh block, padded so that none is handled in a ragged tail."""
    block = values.new_zeros(padded(len(values), ROWS))
    block[: len(values)] = values
    return block
