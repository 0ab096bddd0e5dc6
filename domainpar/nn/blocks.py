"""A perceptron on one block of rows, forward and backward: `products`, and `kernels` between them.

The first layer is factorised, `W [x_src, x_dst, e] = W_src x_src + W_dst x_dst + W_e e`: the products of node states
are computed once per node, and added to the edge's row when that is normalised. Operands lie in their tables as they
are; results are padded to a multiple of 16 columns, and columns beyond the true width hold zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from domainpar.nn import COLUMN_BLOCK
from domainpar.nn.kernels import Ends, FloatTable, Norm, Sums, Table, norm_backward, norm_forward
from domainpar.nn.lanes import wide
from domainpar.nn.mlp import MLP, PaddedLinear, padded, weights_at_ends
from domainpar.nn.noise import Drop, Noise, no_drop
from domainpar.nn.products import multiply, outer
from domainpar.nn.team import Scratch


def as_table(tensor: Tensor) -> Table:
    """The memory of a CPU tensor as the kernels take it: bfloat16 as uint16."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


class Rows(NamedTuple):
    """Rows of a table, from `first` on: an operand of a product."""

    table: Table
    first: int


class Weight(NamedTuple):
    """A weight as products take it: forward [in, padded out], and back [padded out, padded in]."""

    forward: FloatTable
    back: FloatTable


@dataclass(frozen=True)
class Folded:
    """The weights of a perceptron as blocks take them: padded, and those of the first layer apart for each input.

    Attributes:
        mlp: Whose weights.
        linears: Its linear layers.
        node_width: Width of the node states at either end that come in first; 0 without.
        widths: Widths of the tables whose rows come in after them.
        inputs: First layer, for each table.
        at_ends: First layer, for node states at `dst`, then at `src`: forward [node width, 2 padded out].
        later: The layers after the first.
        kinds: In which type the operands of each later layer are kept, and the gradients of each layer's products.
        norms: Bias, scale and shift of each layer; ones and zeros for a plain output, which has none.
    """

    mlp: MLP
    linears: tuple[PaddedLinear, ...]
    node_width: int
    widths: tuple[int, ...]
    inputs: tuple[Weight, ...]
    at_ends: Weight
    later: tuple[Weight, ...]
    kinds: tuple[torch.dtype, ...]
    norms: tuple[Norm, ...]

    @property
    def width(self) -> int:
        """Padded width of the first layer's results."""
        return int(self.norms[0].bias.shape[1])

    @property
    def exact(self) -> torch.dtype:
        """Type of the parameters, and of all sums."""
        return torch.from_numpy(self.norms[0].bias).dtype

    def product(self, layer: int, rows: int, scratch: Scratch) -> Tensor:
        """Memory for the product of a layer, [rows, padded out]."""
        return scratch.take(f"product {layer}", rows, self.norms[layer].bias.shape[1], self.exact)


def fold(mlp: MLP, tables: Sequence[Tensor], node_width: int = 0, products: torch.dtype | None = None) -> Folded:
    """Fold a perceptron over `[x_src, x_dst, table_1, table_2, ...]`.

    Args:
        mlp: The perceptron.
        tables: Tables whose rows come in; their products are computed in their type.
        node_width: Width of node states at either end, 0 for none.
        products: Type of later layers' products, if not that of the parameters; a plain output keeps the latter.

    Raises:
        ValueError: If node states come into a perceptron that is a plain output alone.
    """
    if node_width and mlp.plain and len(mlp.layers) == 1:
        raise ValueError("a plain output alone cannot take node states; give the perceptron a hidden layer.")
    weights = [linear.weight.detach() for linear, _ in mlp.layers]
    exact, widths = weights[0].dtype, tuple(table.shape[1] for table in tables)
    inputs = weights[0][:, 2 * node_width :].split(widths, dim=1) if widths else ()
    later = [products or exact] * len(weights[1:])
    if later and mlp.plain:
        later[-1] = exact
    return Folded(
        mlp,
        tuple(linear for linear, _ in mlp.layers),
        node_width,
        widths,
        inputs=tuple(_weight(_pad(weight), table.dtype) for weight, table in zip(inputs, tables)),
        at_ends=_weight(torch.cat([_pad(weight) for weight in weights_at_ends(weights[0], node_width)]), exact),
        later=tuple(_weight(_pad(weight), kind) for weight, kind in zip(weights[1:], later)),
        kinds=(tables[0].dtype if tables else exact, *later),
        norms=tuple(_norm(linear, norm) for linear, norm in mlp.layers),
    )


def _weight(weight: Tensor, kind: torch.dtype) -> Weight:
    """A weight [padded out, in], rounded to what a type can hold."""
    rounded = weight.to(kind).to(weight.dtype)
    back = rounded.new_zeros(len(rounded), padded(rounded.shape[1], COLUMN_BLOCK))
    back[:, : rounded.shape[1]] = rounded
    return Weight(as_table(rounded.t().contiguous()), as_table(back))


def _pad(weight: Tensor) -> Tensor:
    """With rows of zeros up to a multiple of 16."""
    block = weight.new_zeros(padded(len(weight), COLUMN_BLOCK), weight.shape[1])
    block[: len(weight)] = weight
    return block


def _norm(linear: PaddedLinear, norm: nn.LayerNorm | None) -> Norm:
    bias = _pad(linear.bias.detach()[:, None]).t().contiguous()
    scale, shift = (
        (torch.ones_like(bias), torch.zeros_like(bias)) if norm is None else (norm.weight[None], norm.bias[None])
    )
    table = as_table(bias)
    eps = table.dtype.type(0.0 if norm is None else norm.eps)
    return Norm(table, as_table(scale), as_table(shift), eps, wide(table.shape[1]))


@dataclass(frozen=True)
class Edges:
    """The part of a block that is not in its rows. A block of nodes has `NO_ENDS`.

    Attributes:
        first: Number of the block's first edge.
        ends: Ends of all edges.
        gathered: What to add to each edge's row from its ends, [num_local, 2 padded width]; empty: nothing.
        noise: Dropout of hidden layers.
    """

    first: int
    ends: Ends
    gathered: FloatTable
    noise: Noise | None = None

    def with_(self, gathered: FloatTable) -> Edges:
        """The same edges with something else at their ends."""
        return replace(self, gathered=gathered)

    def drop(self, layer: int, norm: Norm) -> Drop:
        """Dropout of a hidden layer's results."""
        return no_drop(norm.bias.dtype) if self.noise is None else self.noise.of_layer(layer, norm.bias.dtype)

    @property
    def alone(self) -> Edges:
        """The same edges with nothing at their ends."""
        return self.with_(self.gathered[:0])


NO_ENDS = Ends(src=np.empty(0, np.int64), dst=np.empty(0, np.int64), pair=np.empty(0, np.int64), num_owned=0)


def no_rows(norm: Norm) -> FloatTable:
    """An empty table of a layer's width."""
    return np.empty((0, norm.bias.shape[1]), norm.bias.dtype)


def no_sums(norm: Norm) -> Sums:
    """Sum nowhere."""
    return Sums(no_rows(norm), no_rows(norm))


@dataclass(frozen=True)
class Activations:
    """Results of a block's way forward, in memory that the next block of the same thread takes again.

    Attributes:
        inputs: Operands of the first layer.
        normed: Operands of the later layers.
        kept: Input of the norm of each hidden layer; nothing, if not asked for. A single layer's, if it takes node
            states.
        product: Result of the last product.
    """

    inputs: Sequence[Rows]
    normed: list[Tensor]
    kept: list[Tensor]
    product: Tensor


def forward(
    folded: Folded, inputs: Sequence[Rows], count: int, edges: Edges, scratch: Scratch, keep: bool = False
) -> Activations:
    """All products of a block, and all norms but the last layer's.

    Args:
        folded: The weights.
        inputs: Operands of the first layer.
        count: Number of rows.
        edges: The block's edges.
        scratch: Memory to work in.
        keep: Keep what `WayBack` needs.
    """
    product = _first_product(folded, inputs, count, scratch)
    normed: list[Tensor] = []
    kept: list[Tensor] = []
    for layer, weight in enumerate(folded.later):
        operand = scratch.take(f"normed {layer}", count, len(weight.forward), folded.kinds[layer + 1])
        # The input of the norm is kept in the place of the product, whose memory nobody else needs: gathered and bias
        # are then in it, and the way back need not gather again.
        kept += [product] if keep else []
        # Only the first layer takes anything from the ends of an edge.
        at_ends = edges if layer == 0 else edges.alone
        drop = edges.drop(layer, folded.norms[layer])
        _normalise(product, count, folded.norms[layer], at_ends, operand, product if keep else None, drop)
        normed.append(operand)
        product = folded.product(layer + 1, count, scratch)
        multiply(as_table(operand), 0, count, weight.forward, as_table(product), 0, False)
    if keep and not folded.later and len(edges.gathered):
        # A single layer's norm is left to `finish`, forward; the way back wants its input, whose `gathered` is by then
        # replaced by a gradient.
        kept.append(product)
        unused = scratch.take("unused", count, folded.width, folded.exact)
        _normalise(product, count, folded.norms[0], edges, unused, product, no_drop(folded.norms[0].bias.dtype))
    return Activations(inputs, normed, kept, product)


def _first_product(folded: Folded, inputs: Sequence[Rows], count: int, scratch: Scratch) -> Tensor:
    product = folded.product(0, count, scratch)
    if not inputs:
        return product.zero_()  # all of the first layer is gathered from the ends
    for position, (rows, weight) in enumerate(zip(inputs, folded.inputs)):
        multiply(*rows, count, weight.forward, as_table(product), 0, position > 0)
    return product


def _normalise(
    product: Tensor, count: int, norm: Norm, edges: Edges, out: Tensor, kept: Tensor | None, drop: Drop
) -> None:
    where = no_rows(norm) if kept is None else as_table(kept)
    ends, gathered = edges.ends, edges.gathered
    rows = as_table(product), edges.first, count
    norm_forward(*rows, norm, ends, gathered, where, as_table(out), 0, drop, no_sums(norm))


def finish(
    folded: Folded, activations: Activations, count: int, edges: Edges, out: Tensor, first: int, sums: Sums
) -> None:
    """The last layer's bias and norm, into rows `first` and on of a table, and the sums at ends."""
    norm = folded.norms[-1]
    if folded.mlp.plain:
        width = out.shape[1]
        bias = torch.from_numpy(norm.bias[0, :width])
        torch.add(activations.product[:count, :width], bias, out=out[first : first + count])
        return
    at_ends = edges.alone if folded.later else edges
    rows = as_table(activations.product), edges.first, count
    drop = no_drop(norm.bias.dtype)
    norm_forward(*rows, norm, edges.ends, at_ends.gathered, no_rows(norm), as_table(out), first, drop, sums)


class TileGradients:
    """One tile's share of the gradients of a perceptron's parameters.

    Args:
        folded: The perceptron.
        scratch: Where sums over rows are kept, until the next tile's: hand on what `partials` gives at once.
    """

    def __init__(self, folded: Folded, scratch: Scratch) -> None:
        self._folded = folded
        self._scratch = scratch
        self._of_weights: list[list[Tensor]] = [[] for _ in folded.norms]
        tables = [torch.from_numpy(norm.bias) for norm in folded.norms]
        self.of_norms = [
            scratch.zeros(f"of norm {layer}", 3, table.shape[1], table.dtype) for layer, table in enumerate(tables)
        ]

    def add_product(self, layer: int, operand: Rows, gradient: Tensor, count: int) -> None:
        """Take some rows of an operand and the gradient of their products, [>= count, padded out]."""
        others, table = self._of_weights[layer], as_table(gradient)
        name = f"of weight {layer}, {len(others)}"
        others.append(self._scratch.zeros(name, operand.table.shape[1], table.shape[1], self._folded.exact))
        outer(*operand, table, 0, count, as_table(others[-1]))

    def partials(self) -> list[Tensor]:
        """In the order of the perceptron's parameters; 0 for weights of node states, which are summed per node."""
        folded = self._folded
        of_linears: list[Tensor] = []
        of_norms: list[Tensor] = []  # a perceptron's parameters are those of all linear layers, then of all norms
        for layer, module in enumerate(folded.linears):
            widths = folded.widths if layer == 0 else (module.in_features,)
            of_linears.append(_unpad(self._of_weights[layer], widths, module.weight))
            bias, scale, shift = self.of_norms[layer][:, : module.out_features]
            of_linears.append(bias)
            of_norms += [scale, shift]
        return of_linears + of_norms[: 2 * len(folded.mlp.norms)]


def _unpad(parts: Sequence[Tensor], widths: Sequence[int], weight: Tensor) -> Tensor:
    """The gradient of a weight, whose last columns belong to `parts`; those before are 0."""
    whole = torch.zeros_like(weight, requires_grad=False)
    start = weight.shape[1] - sum(widths)
    for part, width in zip(parts, widths):
        whole[:, start : start + width] = part[:, : len(weight)].t()
        start += width
    return whole


@dataclass(frozen=True)
class WayBack:
    """Back through a block, to its first product.

    Attributes:
        folded: The weights.
        activations: Results of `forward`, kept.
        count: Rows that are the block's own.
        edges: The block's edges; `gathered` is gradient of its results.
        sums: Where the gradient of the first product is summed.
        gradients: Takes the gradients of parameters.
        scratch: Memory to work in.
        owned: Compute gradients of weights: not for tiles whose owner does.
    """

    folded: Folded
    activations: Activations
    count: int
    edges: Edges
    sums: Sums
    gradients: TileGradients
    scratch: Scratch
    owned: bool = True

    def run(self, gradient: Tensor) -> Tensor:
        """Gradient of the first product, [count, padded width].

        Args:
            gradient: Gradient of the results: a table in which rows `edges.first` and on are the block's.
        """
        last = len(self.folded.norms) - 1
        of_product = self._through_last(last, gradient)
        for layer in range(last, 0, -1):
            self._give(layer, Rows(as_table(self.activations.normed[layer - 1]), 0), of_product)
            weight = self.folded.later[layer - 1].back
            # One block of memory serves all layers: `_through_norm` has read it when the next product is written.
            of_operand = self.scratch.take("back", self.count, weight.shape[1], self.folded.exact)
            multiply(as_table(of_product), 0, self.count, weight, as_table(of_operand), 0, False)
            # Gradient from the ends of edges enters at the results only, which `_through_last` went through.
            of_product = self._through_norm(layer - 1, of_operand, 0, self.edges.alone)
        for operand in self.activations.inputs:
            self._give(0, operand, of_product)
        return of_product

    def _give(self, layer: int, operand: Rows, gradient: Tensor) -> None:
        if self.owned:
            self.gradients.add_product(layer, operand, gradient, self.count)

    def _through_last(self, layer: int, gradient: Tensor) -> Tensor:
        if not self.folded.mlp.plain:
            return self._through_norm(layer, gradient, self.edges.first, self.edges)
        of_product = self._gradient(layer).zero_()
        of_product[:, : gradient.shape[1]] = gradient[self.edges.first : self.edges.first + self.count]
        torch.sum(of_product, dim=0, out=self.gradients.of_norms[layer][0])
        return of_product

    def _through_norm(self, layer: int, gradient: Tensor, first: int, edges: Edges) -> Tensor:
        norm, rows = self.folded.norms[layer], self.activations.product
        if layer < len(self.activations.kept):  # its bias is in it
            norm, rows = norm._replace(bias=np.zeros_like(norm.bias)), self.activations.kept[layer]
        of_product = self._gradient(layer)
        norm_backward(
            as_table(rows),
            edges.first,
            self.count,
            norm,
            edges.ends,
            as_table(gradient),
            first,
            edges.gathered,
            no_drop(norm.bias.dtype) if layer == len(self.folded.later) else edges.drop(layer, norm),
            as_table(of_product),
            as_table(self.gradients.of_norms[layer]),
            self.sums if layer == 0 else no_sums(norm),
        )
        return of_product

    def _gradient(self, layer: int) -> Tensor:
        """Memory for the gradient of a layer's product: the product's own, where that is of its type.

        A kernel reads a row of the product before it writes that row's gradient.
        """
        kind = self.folded.kinds[layer]
        if kind == self.folded.exact:
            return self.folded.product(layer, self.count, self.scratch)
        return self.scratch.take(f"gradient {layer}", self.count, self.folded.norms[layer].bias.shape[1], kind)
