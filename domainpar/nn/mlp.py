"""The parameters of multi-layer perceptrons; `blocks` computes with them, on blocks of rows.

Inside a block every result is a multiple of 16 columns wide. Parameters keep their true shapes; padding happens on the
fly.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from domainpar.nn import COLUMN_BLOCK
from domainpar.plan import IntArray


def padded(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple."""
    return -(-count // multiple) * multiple


class PaddedLinear(nn.Module):
    """Weight and bias of `y = x W^T + b`.

    Args:
        in_features: Number of inputs.
        out_features: True number of outputs; a block holds `padded(out_features, 16)` columns, the rest 0.
        generator: Source of the initial weights, uniform in +-1/sqrt(in_features) (the default of torch's Linear).
    """

    def __init__(self, in_features: int, out_features: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(max(in_features, 1))
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound, generator=generator))
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound, generator=generator))


ACTIVATIONS = ("none", "relu", "silu", "tanh")
"""By the numbers that kernels know them by."""


class PerceptronLayer(NamedTuple):
    """One layer: a linear map, then a norm if there is one, then an activation, by its number in `ACTIVATIONS`."""

    linear: PaddedLinear
    norm: nn.LayerNorm | None
    activation: int


class MLP(nn.Module):
    """Linear layers, each but the last followed by LayerNorm and activation; the last too unless it is a plain output.

    Args:
        in_features: Inputs.
        widths: Outputs of each layer. All that are normalised must be multiples of 16: a LayerNorm over padding would
            not be the LayerNorm of the model.
        generator: Source of the initial weights.
        plain_output: Leave the last layer linear.
        dropout: Probability with which each result of a layer, but for the last one, is dropped in training.
        activation: Of all layers but the last, of `ACTIVATIONS`.
        last_activation: Of the last layer, if it is no plain output; None: as the others.

    Raises:
        ValueError: If a normalised width is not a multiple of 16, the probability not in [0, 1), or there is no such
            activation.
    """

    def __init__(
        self,
        in_features: int,
        widths: tuple[int, ...],
        generator: torch.Generator,
        plain_output: bool = False,
        dropout: float = 0.0,
        activation: str = "relu",
        last_activation: str | None = None,
    ) -> None:
        super().__init__()
        normed = widths[:-1] if plain_output else widths
        if bad := [width for width in normed if width <= 0 or width % COLUMN_BLOCK]:
            better = padded(max(bad[0], 1), COLUMN_BLOCK)
            raise ValueError(f"hidden width {bad[0]} is not a multiple of {COLUMN_BLOCK}; take {better}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout {dropout:g} is no probability below 1.")
        last = "none" if plain_output else last_activation or activation
        if unknown := {activation, last} - set(ACTIVATIONS):
            raise ValueError(f"there is no activation {unknown.pop()!r}; take {', '.join(ACTIVATIONS)}.")
        self.in_features, self.out_features, self.dropout = in_features, widths[-1], dropout
        self.activations = (activation,) * (len(widths) - 1) + (last,)
        self.linears = nn.ModuleList(
            PaddedLinear(wide, out, generator) for wide, out in zip((in_features, *widths[:-1]), widths)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in normed)

    @property
    def layers(self) -> list[PerceptronLayer]:
        """All layers, in order."""
        norms = [norm for norm in self.norms if isinstance(norm, nn.LayerNorm)]
        linears = [linear for linear in self.linears if isinstance(linear, PaddedLinear)]
        numbers = map(ACTIVATIONS.index, self.activations)
        return [PerceptronLayer(*layer) for layer in zip_longest(linears, norms, numbers)]

    @property
    def plain(self) -> bool:
        """Whether the output is linear."""
        return len(self.norms) < len(self.linears)


# An MLP takes `[x_src, x_dst, ...]`, but node nets take sums at `dst` before those at `src`: trained weights hold both
# orders. Tables at both ends of edges have that of the sums; only the next two functions know the other.


def weights_at_ends(weight: Tensor, node_width: int) -> tuple[Tensor, Tensor]:
    """Columns of a first layer's weight for node states at `dst`, and for those at `src`, [out, node_width] each."""
    return weight[:, node_width : 2 * node_width], weight[:, :node_width]


def gradient_at_ends(weight: Tensor, at_dst: Tensor, at_src: Tensor) -> Tensor:
    """Gradient of a first layer's weight from that of these columns; 0 in all others."""
    gradient, width = torch.zeros_like(weight, requires_grad=False), at_dst.shape[1]
    gradient[:, :width], gradient[:, width : 2 * width] = at_src, at_dst
    return gradient


def limbs_at_ends(weight: Tensor, at_dst: IntArray, at_src: IntArray) -> IntArray:
    """The same for sums of integers, int64 [2, out, node width] each."""
    limbs, width = np.zeros((2, *weight.shape), np.int64), at_dst.shape[2]
    limbs[:, :, :width], limbs[:, :, width : 2 * width] = at_src, at_dst
    return limbs
