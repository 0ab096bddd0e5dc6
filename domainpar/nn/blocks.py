"""An MLP as operations of a program: forward on a strip of rows, and back.

The first layer is factorised, `W [x_src, x_dst, e] = W_src x_src + W_dst x_dst + W_e e`: the products of node states
are computed once per node, and added to the edge's row when that is normalised. Operands lie in their tables as they
are; results are padded to a multiple of 16 columns, and columns beyond the true width hold zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from domainpar.nn import COLUMN_BLOCK, kernels, operations
from domainpar.nn.gradients import GradSink
from domainpar.nn.kernels import NUM_CONSTANTS
from domainpar.nn.lanes import ROWS_AT_ONCE
from domainpar.nn.mlp import MLP, PerceptronLayer, padded, weights_at_ends
from domainpar.nn.noise import Noise, threshold_of
from domainpar.nn.partials import Partials, Totals, order_of
from domainpar.nn.program import ALIGNMENT, NOTHING, STRIP, Operand, Program, numbers, shared, table
from domainpar.parallel.tables import empty_table
from domainpar.plan import IntArray


class Weight(NamedTuple):
    """A weight as products take it: forward [in, padded out], and back [padded out, padded in]."""

    forward: Tensor
    back: Tensor


@dataclass(frozen=True)
class Folded:
    """The weights of an MLP as operations take them: padded, and those of the first layer apart for each input.

    Attributes:
        mlp: Whose weights.
        node_width: Width of the node states at either end that come in first; 0 without.
        widths: Widths of the tables whose rows come in after them.
        inputs: First layer, for each table.
        at_ends: First layer, for node states at `dst`, then at `src`: forward [node width, 2 padded out].
        later: The layers after the first.
        kinds: In which type the operands of each layer are kept, and the gradients of its product.
        constants: Of each layer, see `kernels.BIAS`.
    """

    mlp: MLP
    node_width: int
    widths: tuple[int, ...]
    inputs: tuple[Weight, ...]
    at_ends: Weight
    later: tuple[Weight, ...]
    kinds: tuple[torch.dtype, ...]
    constants: tuple[Tensor, ...]

    @property
    def width(self) -> int:
        """Padded width of the first layer's results."""
        return self.constants[0].shape[1]

    @property
    def exact(self) -> torch.dtype:
        """Type of the parameters, and of all sums."""
        return self.constants[0].dtype


@torch.no_grad()
def fold(mlp: MLP, tables: Sequence[Tensor], node_width: int = 0, products: torch.dtype | None = None) -> Folded:
    """Fold an MLP over `[x_src, x_dst, table_1, table_2, ...]`.

    Args:
        mlp: The MLP.
        tables: Tables whose rows come in; their products are computed in their type.
        node_width: Width of node states at either end, 0 for none.
        products: Type of later layers' products, if not that of the parameters; a readout keeps the latter.

    Raises:
        ValueError: If node states come into an MLP that is a readout alone.
    """
    if node_width and mlp.readout and len(mlp.linears) == 1:
        raise ValueError("a readout alone cannot take node states; give the MLP a hidden layer.")
    layers = mlp.layers
    weights = [layer.linear.weight for layer in layers]
    exact, widths = weights[0].dtype, tuple(table.shape[1] for table in tables)
    inputs = weights[0][:, 2 * node_width :].split(widths, dim=1) if widths else ()
    later = [products or exact] * len(weights[1:])
    if later and mlp.readout:
        later[-1] = exact
    ends = torch.cat([_pad(weight) for weight in weights_at_ends(weights[0], node_width)])
    return Folded(
        mlp,
        node_width,
        widths,
        inputs=tuple(_weight(_pad(weight), table.dtype) for weight, table in zip(inputs, tables)),
        at_ends=_weight(ends, exact),
        later=tuple(_weight(_pad(weight), kind) for weight, kind in zip(weights[1:], later)),
        kinds=(tables[0].dtype if tables else exact, *later),
        constants=tuple(_constants(layer, mlp.dropout) for layer in layers),
    )


def _weight(weight: Tensor, kind: torch.dtype) -> Weight:
    """A weight [padded out, in], rounded to what a type can hold."""
    forward = weight.to(kind).to(weight.dtype).t()
    return Weight(forward.contiguous(), _pad(forward).t().contiguous())


def _pad(weight: Tensor) -> Tensor:
    """With rows of zeros up to a multiple of 16."""
    if len(weight) % COLUMN_BLOCK == 0:
        return weight
    block = weight.new_zeros(padded(len(weight), COLUMN_BLOCK), weight.shape[1])
    block[: len(weight)] = weight
    return block


def _constants(layer: PerceptronLayer, dropout: float) -> Tensor:
    out = layer.linear.out_features
    table = layer.linear.bias.new_zeros(NUM_CONSTANTS, padded(out, COLUMN_BLOCK))
    table[kernels.BIAS, :out] = layer.linear.bias
    if layer.norm is not None:
        table[kernels.SCALE], table[kernels.SHIFT] = layer.norm_parameters or (1, 0)
        table[kernels.EPS] = layer.norm.eps
    table[kernels.KEPT] = 1.0 / (1.0 - dropout)
    return table


class AtEnds(NamedTuple):
    """What operations know of the ends of edges, as operands.

    Attributes:
        src, dst: Local rows of the two ends of each edge.
        pair: Its (tile, `src`) pair or -1.
        num_owned: Owned nodes.
    """

    src: Operand = NOTHING
    dst: Operand = NOTHING
    pair: Operand = NOTHING
    num_owned: int = 0

    @classmethod
    def of(cls, src: IntArray, dst: IntArray, pair: IntArray, num_owned: int) -> AtEnds:
        """From arrays of all local edges, int64 [num_edges]."""
        return cls(numbers(src), numbers(dst), numbers(pair), num_owned)


class SumsAt(NamedTuple):
    """Where rows are summed, as operands: [num_owned, 2 width] and [num_pairs, width]; nowhere without."""

    ends: Operand = NOTHING
    pairs: Operand = NOTHING


NO_ENDS, NOWHERE = AtEnds(), SumsAt()


class KeptLayer(NamedTuple):
    """Normed rows [rows + 8, padded width] and 1 / standard deviations [rows, 1] of a layer, kept for backward."""

    rows: Tensor
    inverse: Tensor


def keep_of(folded: Folded, count: int) -> list[KeptLayer]:
    """Tables to keep the layers of an MLP in, for `count` rows."""
    # Kernels look at eight rows at a time, also where they end beyond the table.
    return [
        KeptLayer(empty_table(count + ROWS_AT_ONCE, constants.shape[1], constants), empty_table(count, 1, constants))
        for constants in folded.constants
    ]


class MLPProgram:
    """An MLP's operations in a program.

    Args:
        program: Gets them.
        folded: The weights.
        ends: Ends of the rows' edges; none for rows of nodes.
        noise: Dropout of hidden layers.
        kept: Tables of its layers, which forward fills; or which are filled, `again`: then nothing is multiplied.
        again: Forward was done before, and its normed rows are in `kept`.
    """

    def __init__(
        self,
        program: Program,
        folded: Folded,
        ends: AtEnds = NO_ENDS,
        noise: Noise | None = None,
        kept: Sequence[KeptLayer] = (),
        again: bool = False,
    ) -> None:
        self._program, self._folded, self._ends, self._noise = program, folded, ends, noise
        self._layers = folded.mlp.layers
        self._kept, self._again = kept, again
        exact = folded.exact
        self._totals = program.room(2, ROWS_AT_ONCE, exact)
        self._inverse = [program.room(1, STRIP, exact) for _ in folded.constants]
        self._rows = [program.room(STRIP, constants.shape[1], exact) for constants in folded.constants]
        if again:
            self._rows = [table(layer.rows) for layer in kept]
            self._inverse = [table(layer.inverse) for layer in kept]
        self._operands: list[Operand] = []  # of the later layers
        self._inputs: Sequence[Operand] = ()

    # --- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        inputs: Sequence[Operand],
        gathered: Operand = NOTHING,
        residual: Operand = NOTHING,
        out: Operand = NOTHING,
        sums: SumsAt = NOWHERE,
    ) -> None:
        """All layers.

        Args:
            inputs: Operands of the first layer.
            gathered: Added to the first products from both ends of an edge, [num_local, 2 padded width].
            residual: Added to the results, of their type.
            out: Takes the results; without it no more is done than `backward` needs.
            sums: Where they are summed.
        """
        folded, self._inputs = self._folded, inputs
        if not self._again:
            if not inputs:  # all of the first layer is gathered from the ends
                operations.clear_rows(self._program, self._rows[0])
            for position, (operand, weight) in enumerate(zip(inputs, folded.inputs)):
                operations.multiply(self._program, operand, weight.forward, self._rows[0], add=position > 0)
        for layer, weight in enumerate(folded.later):
            operand = self._program.room(STRIP, folded.constants[layer].shape[1], folded.kinds[layer + 1])
            self._operands.append(operand)
            self._layer(layer, gathered if layer == 0 else NOTHING, operand)
            if not self._again:
                operations.multiply(self._program, operand, weight.forward, self._rows[layer + 1])
        for rows in inputs if not self._again else ():
            self._program.reads(rows)
        last = len(folded.later)
        gathered = NOTHING if folded.later else gathered
        if out.width % COLUMN_BLOCK == 0:
            if out.width or not self._again:
                self._layer(last, gathered, out, residual, sums)
            return
        results = self._program.room(STRIP, folded.constants[last].shape[1], out.dtype)
        self._layer(last, gathered, results)
        operations.copy(self._program, results, out)

    def _layer(
        self,
        layer: int,
        gathered: Operand,
        out: Operand,
        residual: Operand = NOTHING,
        sums: SumsAt = NOWHERE,
    ) -> None:
        exact = self._folded.exact
        width, kind = self._rows[layer].width, out.dtype if out.width else exact
        keeps = bool(self._kept) and not self._again
        self._program.add(
            operations.layer_forward(width, exact, kind),
            *self._common(layer, NOTHING, sums),
            gathered,
            residual,
            out,
            *((table(kept) for kept in self._kept[layer]) if keeps else (NOTHING, NOTHING)),
            self._again,
            # Rows of an aligned table of 16 columns or a multiple are aligned as well.
            out.row_bytes > 0 and out.address % ALIGNMENT == 0,
        )

    def _common(self, layer: int, gradient: Operand, sums: SumsAt) -> Iterator[Operand | int]:
        """The operands that forward and backward of a layer both have."""
        folded, of_layer, noise = self._folded, self._layers[layer], self._noise
        yield from (shared(folded.constants[layer]), int(of_layer.norm is not None), of_layer.activation)
        if noise is None or layer == len(folded.later):
            yield from (NOTHING, 0, 0)
        else:
            yield from (numbers(noise.ids), noise.key_of_layer(layer), threshold_of(noise.rate))
        yield from (self._rows[layer], self._inverse[layer], self._totals, gradient, *self._ends, *sums)

    # --- back --------------------------------------------------------------------------------------------------------

    def take_partials(self, partials: Partials) -> None:
        """Take room for the gradients of all parameters, in the order of `give`."""
        folded = self._folded
        self._first_partial = partials.size
        first, *later = (layer.linear.weight for layer in self._layers)
        self._of_weights = [[partials.take(width, folded.width, first) for width in folded.widths]]
        for weight, parameter in zip(folded.later, later):
            self._of_weights.append([partials.take(*weight.forward.shape, parameter)])
        self._of_constants = []
        for layer, constants in zip(self._layers, folded.constants):
            bias = layer.linear.bias
            of_norm = layer.norm_parameters or (bias, bias)
            self._of_constants.append(partials.take(3, constants.shape[1], bias, *of_norm))
        self._partials = partials

    def backward(
        self,
        gradient: Operand,
        gathered: Operand = NOTHING,
        carried: Operand = NOTHING,
        sums: SumsAt = NOWHERE,
    ) -> Operand:
        """All layers back, after `forward` of the same strip.

        Args:
            gradient: Of the results.
            gathered: More gradient of the results, from both ends of an edge, [num_local, 2 out].
            carried: Takes the whole gradient of the results.
            sums: Where the gradient of the first product is summed.

        Returns:
            The gradient of the first product.
        """
        folded, program, grad_results = self._folded, self._program, gradient
        work = program.room(STRIP, max(rows.width for rows in self._rows), folded.exact)
        last = len(folded.later)
        if gradient.width % COLUMN_BLOCK:
            given, gradient = gradient, program.room(STRIP, self._rows[last].width, gradient.dtype)
            operations.copy(self._program, given, gradient)
        for layer in range(last, -1, -1):
            rows, kind = self._rows[layer], folded.kinds[layer]
            # A kernel reads a row of the product before it writes that row's gradient. What is kept stays as it is.
            in_place = kind == folded.exact and not self._again
            out = rows if in_place else program.room(STRIP, rows.width, kind)
            program.add(
                operations.layer_backward(
                    rows.width, folded.exact, gradient.dtype, kind, carried.dtype if carried.width else gradient.dtype
                ),
                *self._common(layer, work._replace(width=rows.width), sums if layer == 0 else NOWHERE),
                gathered if layer == last else NOTHING,
                gradient,
                carried if layer == last else NOTHING,
                out,
                self._partials.at(self._of_constants[layer]),
            )
            operands = [self._operands[layer - 1]] if layer else self._inputs
            for operand, first in zip(operands, self._of_weights[layer]):
                operations.add_outer(program, operand, out, self._partials.at(first))
            if layer:
                back = folded.later[layer - 1].back
                gradient = program.room(STRIP, back.shape[1], folded.exact)
                operations.multiply(self._program, out, back, gradient)
        for rows in (*self._rows, grad_results, *self._inputs) if self._again else (grad_results,):
            program.reads(rows)
        return out

    def input_grad(self, grad_product: Operand, position: int, grad_input: Operand, add: bool = False) -> None:
        """The gradient of an input of the first layer, given that of its product."""
        back = self._folded.inputs[position].back
        if grad_input.width == back.shape[1]:
            operations.multiply(self._program, grad_product, back, grad_input, add)
            return
        # A table of a width of its own, such as raw features, has no room for the padding of the products.
        room = self._program.room(STRIP, back.shape[1], grad_input.dtype)
        operations.multiply(self._program, grad_product, back, room)
        operations.copy(self._program, room, grad_input)

    def add_partials(self, totals: Totals, grad_sink: GradSink) -> None:
        """Add the sums of all tiles to a sink."""
        mlp = self._folded.mlp
        parameters = mlp.trained()
        limbs = totals.take(order_of(mlp.shapes, self._folded.widths), self._first_partial)
        grad_sink.add_limbs(parameters, limbs, totals.rejected, totals.largest)
