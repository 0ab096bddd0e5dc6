"""A perceptron on one block of rows, forward and backward: products by torch, all between them by `kernels`.

The first layer is factorised: what it takes from the ends of an edge is multiplied once per node, and added to the
edge's row when that is normalised. Operands of a product are 64-byte aligned, padded to a multiple of 32 rows and
of 16 columns (DESIGN section 3, rule 1); rows beyond the block's own hold anything and reach nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from domainpar.nn.kernels import Ends, FloatTable, Norm, Sums, Table, norm_backward, norm_forward
from domainpar.nn.mlp import COLUMNS, MLP, ROWS, PaddedLinear, padded
from domainpar.nn.noise import Drop, Noise, no_drop
from domainpar.nn.products import linear, outer
from domainpar.nn.team import Scratch
from domainpar.parallel.tables import ALIGNMENT


def as_table(tensor: Tensor) -> Table:
    """The memory of a CPU tensor as the kernels take it: bfloat16 as uint16."""
    tensor = tensor.detach()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def is_operand(table: Tensor) -> bool:
    """Whether rows of a table, in groups of 32, can be an operand or a result of a product as they lie."""
    width = table.shape[1]
    aligned = width * table.element_size() % ALIGNMENT == 0 and table.data_ptr() % ALIGNMENT == 0
    return width % COLUMNS == 0 and aligned


def rows_of(table: Tensor, rows: slice, scratch: Scratch, name: str) -> Tensor:
    """Some rows of a table as an operand of a product: the table itself where it is aligned and goes on, else a copy.

    Args:
        table: [N, width], contiguous.
        rows: Which.
        scratch: Where a copy goes.
        name: What to call it there.

    Returns:
        [padded number of rows, padded width]; rows beyond the slice hold anything, columns beyond the width 0.
    """
    table = table.detach()  # autograd is on in threads of the team
    count, width = padded(rows.stop - rows.start, ROWS), table.shape[1]
    if is_operand(table) and rows.start + count <= table.shape[0]:
        return table[rows.start : rows.start + count]
    block = scratch.take(name, count, padded(width, COLUMNS), table.dtype)
    block[:, width:] = 0
    block[: rows.stop - rows.start, :width] = table[rows]
    return block


@dataclass(frozen=True)
class Folded:
    """The weights of a perceptron as blocks take them: padded, and those of the first layer apart for each input.

    Attributes:
        mlp: Whose weights.
        linears: Its linear layers.
        node_width: Width of the node states at either end that come in first; 0 without.
        widths: Widths of the tables whose rows come in after them.
        inputs: First layer, for each table: [padded out, padded width].
        at_ends: First layer, for node states at `dst`, then at `src`: [2 padded out, padded node width].
        later: The layers after the first, [padded out, padded in].
        norms: Bias, scale and shift of each layer; ones and zeros for a plain output, which has none.
    """

    mlp: MLP
    linears: tuple[PaddedLinear, ...]
    node_width: int
    widths: tuple[int, ...]
    inputs: tuple[Tensor, ...]
    at_ends: Tensor
    later: tuple[Tensor, ...]
    norms: tuple[Norm, ...]

    @property
    def width(self) -> int:
        """Padded width of the first layer's results."""
        return int(self.norms[0].bias.shape[1])

    def product_type(self, layer: int) -> torch.dtype:
        """In which type the product of a layer is computed."""
        weights = self.inputs or (self.at_ends,) if layer == 0 else (self.later[layer - 1],)
        return weights[0].dtype

    def product(self, layer: int, rows: int, scratch: Scratch) -> Tensor:
        """Memory for the product of a layer, [rows, padded out]."""
        return scratch.take(f"product {layer}", rows, self.norms[layer].bias.shape[1], self.product_type(layer))


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
    widths = tuple(table.shape[1] for table in tables)
    at_src, at_dst, *inputs = weights[0].split([node_width, node_width, *widths], dim=1)
    later = [_pad(weight).to(products or weight.dtype) for weight in weights[1:]]
    if later and mlp.plain:
        later[-1] = _pad(weights[-1])
    return Folded(
        mlp,
        tuple(linear for linear, _ in mlp.layers),
        node_width,
        widths,
        inputs=tuple(_pad(weight).to(table.dtype) for weight, table in zip(inputs, tables)),
        at_ends=torch.cat([_pad(at_dst), _pad(at_src)]),
        later=tuple(later),
        norms=tuple(_norm(linear, norm) for linear, norm in mlp.layers),
    )


def _pad(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    block = weight.new_zeros(padded(rows, COLUMNS), padded(columns, COLUMNS))
    block[:rows, :columns] = weight
    return block


def _norm(linear: PaddedLinear, norm: nn.LayerNorm | None) -> Norm:
    bias = _pad(linear.bias.detach()[:, None])[:, :1].t().contiguous()
    scale, shift = (
        (torch.ones_like(bias), torch.zeros_like(bias)) if norm is None else (norm.weight[None], norm.bias[None])
    )
    table = as_table(bias)
    return Norm(table, as_table(scale), as_table(shift), table.dtype.type(0.0 if norm is None else norm.eps))


@dataclass(frozen=True)
class Edges:
    """What a block of edges has besides its rows.

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
        """What to drop of a hidden layer's results."""
        return no_drop(norm.bias.dtype) if self.noise is None else self.noise.of_layer(layer, norm.bias.dtype)

    @property
    def alone(self) -> Edges:
        """The same edges with nothing at their ends."""
        return self.with_(self.gathered[:0])


NO_ENDS = Ends(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), 0)


def no_rows(norm: Norm) -> FloatTable:
    """An empty table of a layer's width."""
    return np.empty((0, norm.bias.shape[1]), norm.bias.dtype)


def no_sums(norm: Norm) -> Sums:
    """Sum nowhere."""
    return Sums(no_rows(norm), no_rows(norm))


@dataclass(frozen=True)
class Activations:
    """What a block made on its way forward, in memory that the next block of the same thread takes again.

    Attributes:
        inputs: Operands of the first layer.
        normed: Operands of the later layers.
        kept: What each hidden layer normalised; nothing, if not asked for. A single layer's, if it takes node states.
        product: Result of the last product.
    """

    inputs: list[Tensor]
    normed: list[Tensor]
    kept: list[Tensor]
    product: Tensor


def forward(
    folded: Folded, inputs: list[Tensor], count: int, edges: Edges, scratch: Scratch, keep: bool = False
) -> Activations:
    """All products of a block, and all norms but the last layer's.

    Args:
        folded: The weights.
        inputs: Operands of the first layer.
        count: Rows that are the block's own.
        edges: What the block has besides rows.
        scratch: Memory to work in.
        keep: Keep what `backward` needs.
    """
    rows = padded(count, ROWS)
    product = _first_product(folded, inputs, partial(folded.product, 0, rows, scratch))
    normed: list[Tensor] = []
    kept: list[Tensor] = []
    for layer, weight in enumerate(folded.later):
        operand = scratch.take(f"normed {layer}", rows, weight.shape[1], weight.dtype)
        if keep:
            kept.append(_place_to_keep(product, folded.norms[layer], layer, scratch))
        at_ends = edges if layer == 0 else edges.alone
        drop = edges.drop(layer, folded.norms[layer])
        _normalise(product, count, folded.norms[layer], at_ends, operand, kept[-1] if keep else None, drop)
        normed.append(operand)
        product = linear(operand, weight, partial(folded.product, layer + 1, rows, scratch))
    if keep and not folded.later and len(edges.gathered):
        kept.append(_place_to_keep(product, folded.norms[0], 0, scratch))
        unused = scratch.take("unused", rows, folded.width, kept[0].dtype)
        drop = no_drop(folded.norms[0].bias.dtype)
        _normalise(product, count, folded.norms[0], edges, unused, kept[0], drop)
    return Activations(inputs, normed, kept, product)


def _first_product(folded: Folded, inputs: Sequence[Tensor], place: Callable[[], Tensor]) -> Tensor:
    if not inputs:
        return place().zero_()
    product = linear(inputs[0], folded.inputs[0], place)
    for rows, weight in zip(inputs[1:], folded.inputs[1:]):
        product += linear(rows, weight)
    return product


def _place_to_keep(product: Tensor, norm: Norm, layer: int, scratch: Scratch) -> Tensor:
    """Where to keep what is normalised: in place, unless that would round it."""
    exact = torch.from_numpy(norm.bias).dtype
    return (
        product if product.dtype == exact else scratch.take(f"kept {layer}", product.shape[0], product.shape[1], exact)
    )


def _normalise(
    product: Tensor, count: int, norm: Norm, edges: Edges, out: Tensor, kept: Tensor | None, drop: Drop
) -> None:
    where = no_rows(norm) if kept is None else as_table(kept)
    ends, gathered = edges.ends, edges.gathered
    rows = as_table(product), edges.first, count
    norm_forward(*rows, norm, ends, gathered, where, as_table(out), 0, drop, no_sums(norm))


def finish(folded: Folded, made: Activations, count: int, edges: Edges, out: Tensor, first: int, sums: Sums) -> None:
    """The last layer's bias and norm, into rows `first` and on of a table, and the sums at ends."""
    norm = folded.norms[-1]
    if folded.mlp.plain:
        width = out.shape[1]
        bias = torch.from_numpy(norm.bias[0, :width])
        torch.add(made.product[:count, :width], bias, out=out[first : first + count])
        return
    at_ends = edges.alone if folded.later else edges
    rows = as_table(made.product), edges.first, count
    drop = no_drop(norm.bias.dtype)
    norm_forward(*rows, norm, edges.ends, at_ends.gathered, no_rows(norm), as_table(out), first, drop, sums)


class TileGradients:
    """One tile's share of the gradients of a perceptron's parameters.

    Args:
        folded: The perceptron.
        scratch: Where sums over rows are kept.
    """

    def __init__(self, folded: Folded, scratch: Scratch) -> None:
        self._folded = folded
        self._of_weights: list[list[Tensor]] = [[] for _ in folded.norms]
        tables = [torch.from_numpy(norm.bias) for norm in folded.norms]
        self.of_norms = [
            scratch.zeros(f"of norm {layer}", 3, table.shape[1], table.dtype) for layer, table in enumerate(tables)
        ]

    def add_product(self, layer: int, gradient: Tensor, operand: Tensor) -> None:
        """Take the gradient of a product and its operand, [rows, padded out] and [rows, padded in]."""
        self._of_weights[layer].append(outer(gradient, operand))

    def partials(self) -> list[Tensor]:
        """In the order of the perceptron's parameters; 0 for weights of node states, which are summed per node."""
        folded = self._folded
        of_linears: list[Tensor] = []
        of_norms: list[Tensor] = []
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
        whole[:, start : start + width] = part[: weight.shape[0], :width]
        start += width
    return whole


@dataclass(frozen=True)
class WayBack:
    """Back through a block, to its first product.

    Attributes:
        folded: The weights.
        made: What `forward` kept.
        count: Rows that are the block's own.
        edges: What the block has besides rows; `gathered` is gradient of its results.
        sums: Where the gradient of the first product is summed.
        given: Takes the gradients of parameters.
        scratch: Memory to work in.
        owned: Compute gradients of weights: not for tiles whose owner does.
    """

    folded: Folded
    made: Activations
    count: int
    edges: Edges
    sums: Sums
    given: TileGradients
    scratch: Scratch
    owned: bool = True

    def run(self, gradient: Tensor) -> Tensor:
        """Gradient of the first product, [padded rows, padded width].

        Args:
            gradient: Gradient of the results: a table in which rows `edges.first` and on are the block's.
        """
        last = len(self.folded.norms) - 1
        into = self._through_last(last, gradient)
        for layer in range(last, 0, -1):
            self._give(layer, into, self.made.normed[layer - 1])
            weight = self.folded.later[layer - 1]
            place = partial(self.scratch.take, "back", into.shape[0], weight.shape[1], weight.dtype)
            back = linear(into, weight.t(), place)
            into = self._through_norm(layer - 1, back, 0, self.edges.alone)
        for operand in self.made.inputs:
            self._give(0, into, operand)
        return into

    def _give(self, layer: int, gradient: Tensor, operand: Tensor) -> None:
        if self.owned:
            self.given.add_product(layer, gradient[: self.count], operand[: self.count])

    def _through_last(self, layer: int, gradient: Tensor) -> Tensor:
        if not self.folded.mlp.plain:
            return self._through_norm(layer, gradient, self.edges.first, self.edges)
        into = self._product(layer).zero_()
        into[: self.count, : gradient.shape[1]] = gradient[self.edges.first : self.edges.first + self.count]
        torch.sum(into[: self.count], dim=0, out=self.given.of_norms[layer][0])
        return into

    def _through_norm(self, layer: int, gradient: Tensor, first: int, edges: Edges) -> Tensor:
        norm, made = self.folded.norms[layer], self.made.product
        if layer < len(self.made.kept):  # its bias is in it
            norm, made = norm._replace(bias=np.zeros_like(norm.bias)), self.made.kept[layer]
        into = self._product(layer)
        norm_backward(
            as_table(made),
            edges.first,
            self.count,
            norm,
            edges.ends,
            as_table(gradient),
            first,
            edges.gathered,
            no_drop(norm.bias.dtype) if layer == len(self.folded.later) else edges.drop(layer, norm),
            as_table(into),
            as_table(self.given.of_norms[layer]),
            self.sums if layer == 0 else no_sums(norm),
        )
        return into

    def _product(self, layer: int) -> Tensor:
        return self.folded.product(layer, padded(self.count, ROWS), self.scratch)
