"""The loss of a step: weighted cross-entropy over all owned edges of all events and ranks, divided once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn import functional as F

from domainpar.common.compiling import compiled
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.local import LocalGraph

LOG2_E = 1.4426950408889634
LN2 = 0.6931471803691238, 1.9082149292705877e-10  # in two pieces: products of the first with small integers are exact
ROUND = 1.5 * 2.0**52  # added to a number of less than 2^51: its last bits are the number, rounded to an integer
EXP_TERMS = tuple(1 / math.factorial(n) for n in range(13, -1, -1))
LOG_TERMS = tuple(2 / n for n in range(29, 0, -2))


def edge_loss(logits: Tensor, graph: LocalGraph, weights: Tensor, step_weight: float, loss_sum: IntegerSums) -> Tensor:
    """Add this part's share of the step's loss, one partial per owned tile, and return its gradient.

    Divided by the weight of the whole step, never by this rank's own: a mean of per-rank means depends on the
    partition. So gradients are summed over ranks, not averaged. The gradient is given for every local edge: both
    copies of a cut edge carry it whole. The loss counts each edge once, at its owner. That of several readouts is the
    mean of theirs.

    Args:
        logits: [num_edges], or of several readouts, [readouts, num_edges].
        weights: Weight of each local edge, [num_edges]; one below 0 teaches the edge as false, with its size.
        step_weight: Sum of the sizes of the weights of all edges of the step, over all events and ranks.
        loss_sum: Where the loss is summed, of length 1.

    Returns:
        d loss / d logits, of their shape.
    """
    assert graph.label is not None
    of_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    readouts, of_readouts = torch.atleast_2d(logits.detach()), torch.atleast_2d(of_logits)
    divisor = step_weight * len(readouts)
    form = _over_arrays if logits.device.type == "cpu" else _over_tensors
    # In float64 whatever the network computes in: what is rounded, is rounded once, at the end.
    w = weights.to(torch.float64).contiguous()
    for readout, of_readout in zip(readouts, of_readouts):
        z = readout.to(torch.float64).contiguous()
        gradient, partials = form(z, w, graph.label, graph.tiles.edge_ptr, graph.tiles.owned)
        loss_sum.add_rows(partials[:, None] / divisor)
        of_readout.copy_(gradient / divisor)
    return of_logits


def _over_tensors(
    logits: Tensor, weights: Tensor, label: Tensor, edge_ptr: Tensor, owned: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of each edge and sum of each tile (0 for a foreign one), not divided yet; on any device, to rounding."""
    positive, sizes = label * (weights >= 0), weights.abs()
    terms = F.binary_cross_entropy_with_logits(logits, positive.to(logits.dtype), weight=sizes, reduction="none")
    sums = torch.segment_reduce(terms, "sum", offsets=edge_ptr)
    return (torch.sigmoid(logits) - positive) * sizes, torch.where(owned, sums, 0.0)


def _over_arrays(
    logits: Tensor, weights: Tensor, label: Tensor, edge_ptr: Tensor, owned: Tensor
) -> tuple[Tensor, Tensor]:
    """The same on CPU, where an edge's numbers are functions of that edge alone, to the last bit."""
    gradient, partials = torch.empty_like(logits), torch.zeros(len(owned), dtype=logits.dtype)
    tables = (logits, weights, label, edge_ptr, owned, gradient, partials)
    _over_edges(*(table.numpy() for table in tables))
    return gradient, partials


@njit(inline="always", error_model="numpy")
def _horner(terms: Any, x: Any) -> Any:
    value = 0.0
    for term in terms:
        value = value * x + term
    return value


# Written out in sums, products and quotients, which round alike on every machine, one at a time or in vectors. Those of
# a library need not: numba may take them from SVML where that is installed, and a loop's last edges from elsewhere;
# libm's `exp` has other bits where there is no fused multiply-add.


@njit(inline="always", error_model="numpy")
def exp_of(x: Any) -> Any:
    """exp(x) of x <= 0, to some units in the last place; 0 below the smallest normal number."""
    shifted = x * LOG2_E + ROUND
    twos = shifted - ROUND
    rest = (x - twos * LN2[0]) - twos * LN2[1]
    # 2^twos by its bits, as only integers that are in range may be converted to: NaN goes through all this unharmed.
    power = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)
    value = _horner(EXP_TERMS, rest) * power
    return 0.0 if x < -708.0 else value


@njit(inline="always", error_model="numpy")
def log1p_of(x: Any) -> Any:
    """log(1 + x) of x in [0, 1], to some units in the last place: 2 atanh(x / (2 + x)) by its series."""
    ratio = x / (2.0 + x)
    return _horner(LOG_TERMS, ratio * ratio) * ratio


@compiled
def _over_edges(logits: Any, weights: Any, label: Any, edge_ptr: Any, owned: Any, gradient: Any, partials: Any) -> None:
    """Cross-entropy of logits and its gradient in one pass.

    Args:
        logits, weights: float64 [num_edges].
        label: [num_edges].
        edge_ptr: First edge of each tile, [num_tiles + 1].
        owned: Whether this part counts the tile, [num_tiles].
        gradient: Takes the gradient of each edge, float64 [num_edges].
        partials: Takes the sum over each owned tile, in stored order, float64 [num_tiles].
    """
    terms = np.empty_like(gradient)
    for i in range(len(logits)):
        size, positive = abs(weights[i]), (label[i] > 0) & (weights[i] >= 0)
        # The loss is log(1 + exp(u)), its slope 1 / (1 + exp(-u)): exp of what is not positive never overflows.
        u = -logits[i] if positive else logits[i]
        small = exp_of(-abs(u))
        slope = (1.0 if u >= 0 else small) / (1.0 + small)
        gradient[i] = (-slope if positive else slope) * size
        # 0 * u: an infinite logit, also on the right side, is an error and not a loss of 0.
        terms[i] = ((u if u > 0 else 0.0) + log1p_of(small) + 0.0 * u) * size
    for tile in range(len(owned)):
        if owned[tile]:
            for i in range(edge_ptr[tile], edge_ptr[tile + 1]):
                partials[tile] += terms[i]
