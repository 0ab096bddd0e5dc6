"""Multi-layer perceptrons on padded blocks of rows: DESIGN section 3, rule 1.

Inside a block every width is a multiple of 16 and the number of rows a multiple of 32, so that no row's value
depends on which other rows are in the block. Parameters keep their true shapes; padding happens on the fly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 32
COLUMNS = 16


def padded(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple."""
    return -(-count // multiple) * multiple


class PaddedLinear(nn.Module):
    """`y = x W^T + b` on blocks whose widths are padded to multiples of 16; padding columns of `y` are 0.

    Args:
        in_features: True number of inputs; the block holds `padded(in_features, 16)` columns, the rest 0.
        out_features: True number of outputs.
        generator: Source of the initial weights, uniform in +-1/sqrt(in_features) (the default of torch's Linear).
    """

    def __init__(self, in_features: int, out_features: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(max(in_features, 1))
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound, generator=generator))
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound, generator=generator))

    def forward(self, block: Tensor) -> Tensor:
        """Block [rows, padded in] -> [rows, padded out]."""
        more_in = padded(self.in_features, COLUMNS) - self.in_features
        more_out = padded(self.out_features, COLUMNS) - self.out_features
        if more_in or more_out:
            return F.linear(block, F.pad(self.weight, (0, more_in, 0, more_out)), F.pad(self.bias, (0, more_out)))
        return F.linear(block, self.weight, self.bias)


class MLP(nn.Module):
    """Linear layers, each but the last followed by LayerNorm and ReLU; the last too unless it is a plain output.

    Args:
        in_features: Inputs; the block that comes in has this many columns, padded with zeros to a multiple of 16.
        widths: Outputs of each layer. All but a plain output must be multiples of 16: a LayerNorm over padding would
            not be the LayerNorm of the model.
        generator: Source of the initial weights.
        plain_output: Leave the last layer linear.

    Raises:
        ValueError: If a normalised width is not a multiple of 16.
    """

    def __init__(
        self, in_features: int, widths: tuple[int, ...], generator: torch.Generator, plain_output: bool = False
    ) -> None:
        super().__init__()
        normed = widths[:-1] if plain_output else widths
        if bad := [width for width in normed if width <= 0 or width % COLUMNS]:
            raise ValueError(
                f"hidden width {bad[0]} is not a multiple of {COLUMNS}; take {padded(max(bad[0], 1), COLUMNS)}."
            )
        self.in_features, self.out_features = in_features, widths[-1]
        self.linears = nn.ModuleList(
            PaddedLinear(wide, out, generator) for wide, out in zip((in_features, *widths[:-1]), widths)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in normed)

    def forward(self, block: Tensor) -> Tensor:
        """Block [rows, padded in_features] -> [rows, padded out_features]."""
        for position, linear in enumerate(self.linears):
            block = linear(block)
            if position < len(self.norms):
                block = F.relu(self.norms[position](block))
        return block
