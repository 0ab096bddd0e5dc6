"""A tile's partial sums of parameter gradients in a program, and their sums over tiles as integers.

Partials lie as products make them, [in, padded out] for a weight, whereas a parameter is [out, in] and some of its
columns may be summed elsewhere. An *order* gives the partial of each number of a parameter.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from domainpar.common.compiling import compiled
from domainpar.nn import operations
from domainpar.nn.mlp import LayerShape
from domainpar.nn.program import Operand, Program, When
from domainpar.plan import IntArray

NOT_HERE = -1
"""In an order: a number of a parameter that is summed elsewhere."""


class Partials:
    """One tile's sums of parameter gradients, and the sums of integers over tiles that they are added to.

    Args:
        program: Gets operations that clear and split them, for owned tiles.
        exact: Type of the partials.

    Attributes:
        size: Partials taken so far.
    """

    def __init__(self, program: Program, exact: torch.dtype) -> None:
        self._program, self._exact, self.size = program, exact, 0
        self._frozen: list[tuple[int, int]] = []  # where the partials of a parameter begin, and how many they are

    def take(self, rows: int, width: int, *of: nn.Parameter) -> int:
        """Room for [rows, width] partials, contiguous with those taken before; says where it begins.

        They are gradients of one parameter, or of several with as many rows each. Those of frozen ones are not summed.
        """
        first, count = self.size, rows * width // len(of)
        self.size += rows * width
        self._frozen += [(first + i * count, count) for i in range(len(of)) if not of[i].requires_grad]
        return first

    def close(self) -> None:
        """Lay out the memory; only then can operations be added that use it."""
        self._memory = self._program.room(1, max(self.size, 1), self._exact)
        self._limbs = self._program.room(1, 2 * self.size + 2, torch.int64)
        size, bytes_of_all = self.size, self.size * self._exact.itemsize
        self._program.add(operations.clear_bytes(), self._memory, bytes_of_all, 0, 1, when=When.OWNED_TILE_STARTS)
        for first, count in self._frozen:  # so that none of them is counted as not finite
            bytes_of_frozen = count * self._exact.itemsize
            self._program.add(
                operations.clear_bytes(), self.at(first), bytes_of_frozen, 0, 1, when=When.OWNED_TILE_ENDS
            )
        self._program.add(operations.split(self._exact), self._memory, size, self._limbs, when=When.OWNED_TILE_ENDS)

    def at(self, first: int) -> Operand:
        """The partials from one on, as an operand."""
        return self._memory._replace(address=self._memory.address + first * self._exact.itemsize)

    def clear(self) -> None:
        """Set the sums of all threads to 0."""
        for limbs in self._program.thread_arrays(self._limbs, 2 * self.size + 2, np.int64):
            limbs[:] = 0

    def total(self) -> Totals:
        """Sums over all tiles, to be read before the next program runs."""
        one, *others = self._program.thread_arrays(self._limbs, 2 * self.size + 2, np.int64)
        limbs, rejected, largest = one[:-2], int(one[-2]), one[-1]
        for other in others:
            limbs, rejected, largest = limbs + other[:-2], rejected + int(other[-2]), max(largest, other[-1])
        return Totals(limbs.reshape(2, self.size), rejected, float(largest.view(np.float64)))


class Totals(NamedTuple):
    """Sums over all tiles.

    Attributes:
        limbs: High and low limbs, int64 [2, size].
        rejected: Partials that were left out, for they were not finite or too large.
        largest: The largest of them.
    """

    limbs: IntArray
    rejected: int
    largest: float

    def take(self, order: IntArray, first: int) -> IntArray:
        """Limbs in an order, int64 [2, numbers]; 0 for what is not here.

        Args:
            order: Number of a partial for each number of the parameters, counted from `first`.
            first: The first of these partials.
        """
        taken = np.empty((2, len(order)), np.int64)
        _take(self.limbs, order, first, taken)
        return taken


@compiled
def _take(limbs: Any, order: Any, first: int, taken: Any) -> None:
    for limb in range(2):
        for i in range(len(order)):
            taken[limb, i] = limbs[limb, first + order[i]] if order[i] >= 0 else 0


@cache
def order_of(layers: tuple[LayerShape, ...], widths: tuple[int, ...]) -> IntArray:
    """Of an MLP's trained parameters: those of all linear layers, then of all norms.

    Its partials are those of all weights, for each table [width, padded out], then bias, scale and shift of each layer.

    Args:
        layers: Its layers.
        widths: Of the tables that multiply the last columns of the first weight; those before are summed elsewhere.
    """
    of_linears, of_norms = [], []
    of_weights = [sum(widths) * layers[0].padded, *(layer.columns * layer.padded for layer in layers[1:])]
    first, first_constant = 0, sum(of_weights)
    for layer, num_partials in zip(layers, of_weights):
        weight = np.full((layer.out, layer.columns), NOT_HERE)
        rows = first + np.arange(num_partials).reshape(-1, layer.padded)
        weight[:, layer.columns - len(rows) :] = rows[:, : layer.out].T
        constants = first_constant + np.arange(3 * layer.padded).reshape(3, layer.padded)[:, : layer.out]
        bias, *of_norm = constants
        of_layer = zip(layer.trained, (weight.ravel(), bias, *of_norm))
        parts = [part if is_trained else part[:0] for is_trained, part in of_layer]
        of_linears += parts[:2]
        of_norms += parts[2:]
        first, first_constant = first + num_partials, first_constant + 3 * layer.padded
    return np.concatenate([*of_linears, *of_norms])


@cache
def order_at_ends(out: int, columns: int, node_width: int, padded: int) -> IntArray:
    """Of a first layer's weight, whose partials are [node width, 2 padded out]: for nodes at `dst`, then at `src`."""
    weight = np.full((out, columns), NOT_HERE)
    partials = np.arange(node_width * 2 * padded).reshape(node_width, 2, padded)[:, :, :out]
    weight[:, node_width : 2 * node_width], weight[:, :node_width] = partials[:, 0].T, partials[:, 1].T
    return weight.ravel()
