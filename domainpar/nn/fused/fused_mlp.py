"""An MLP as the GPU's kernels take it: its shape, its numbers, the rows and chunks of tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from domainpar.nn.fused import MOST_THAT_DROP, arithmetic, between, launching
from domainpar.nn.fused.rows import rows_backward, rows_forward
from domainpar.nn.gradients import GradSink
from domainpar.nn.kernels import BACK, BOTH_ENDS, FORTH
from domainpar.nn.mlp import MLP
from domainpar.nn.noise import Noise, threshold_of
from domainpar.plan import IntArray

ROWS_AT_MOST, NUMBERS_AT_ONCE = 64, 4096
"""Rows that a program takes at a time, and numbers of a table: what registers hold. They are part of the arithmetic, as
is CHUNK: other numbers may give other bits."""

CHUNK = 1024
"""Rows of a tile whose gradients of parameters are summed as floats, before these become integers."""

CHUNKS_AT_ONCE = 1000
"""In one launch: what the limbs of `IntegerSums` can take before they are carried."""

ENDS = {BOTH_ENDS: arithmetic.AT_BOTH_ENDS.value, FORTH: arithmetic.AT_DST.value, BACK: arithmetic.AT_SRC.value}


class MLPShape(NamedTuple):
    """An MLP and the row tables that it takes, as constants of a kernel; one entry for each layer or table.

    Attributes:
        depth: Layers.
        tables: Widths of the row tables, which meet the last columns of the first weight, from `firsts` on.
        ins, widths, padded: Columns that a layer takes, that it makes, and these up to a power of two.
        weights, biases, scales, shifts: Where its parameters begin among all of the MLP's; -1: it has none.
        norms, eps: Whether its product is normed, and what is added to variances.
        activations: Their numbers.
        kinds: How products are made, `arithmetic.IEEE` and so on.
        residual: Number of the table to which results are added; -1: none.
        pad: The largest of `padded`.
        block: Rows that a program takes at a time.
        piece: Columns of a table whose gradients are made at a time.
        size: Numbers of all parameters.
    """

    depth: int
    tables: tuple[int, ...]
    firsts: tuple[int, ...]
    ins: tuple[int, ...]
    widths: tuple[int, ...]
    padded: tuple[int, ...]
    weights: tuple[int, ...]
    biases: tuple[int, ...]
    scales: tuple[int, ...]
    shifts: tuple[int, ...]
    norms: tuple[bool, ...]
    eps: tuple[float, ...]
    activations: tuple[int, ...]
    kinds: tuple[int, ...]
    residual: int
    pad: int
    block: int
    piece: int
    size: int


def shape_of(mlp: MLP, tables: Sequence[Tensor], residual: int | None, products: torch.dtype | None) -> MLPShape:
    """The shape of an MLP on some row tables.

    Args:
        mlp: The MLP.
        tables: The last of what it takes; node states at ends come before.
        residual: Number of the table to which results are added.
        products: Type of the products of hidden layers, but for a readout's; the first product has its table's.
    """
    layers, shapes = mlp.layers, mlp.shapes
    widths = tuple(shape.out for shape in shapes)
    padded = tuple(power_of_two(width) for width in widths)
    places: dict[int, int] = {}
    size = 0
    for parameter in mlp.all_parameters():
        places[id(parameter)] = size
        size += parameter.numel()
    affine = [layer.of_norm for layer in layers]
    table_widths = tuple(table.shape[1] for table in tables)
    ins = tuple(shape.columns for shape in shapes)
    column = ins[0] - sum(table_widths)
    firsts = []
    for width in table_widths:
        firsts.append(column)
        column += width
    exact = _exact_kind(mlp)
    later = [arithmetic.BF16.value if products is torch.bfloat16 else exact] * len(layers)
    if mlp.readout:
        later[-1] = exact  # a readout keeps the parameters' type: losses are made of it
    first = arithmetic.BF16.value if any(table.dtype == torch.bfloat16 for table in tables) else exact
    return MLPShape(
        depth=len(layers),
        tables=table_widths,
        firsts=tuple(firsts),
        ins=ins,
        widths=widths,
        padded=padded,
        weights=tuple(places[id(layer.linear.weight)] for layer in layers),
        biases=tuple(places[id(layer.linear.bias)] for layer in layers),
        scales=tuple(places[id(own[0])] if own else -1 for own in affine),
        shifts=tuple(places[id(own[1])] if own else -1 for own in affine),
        norms=tuple(shape.normed for shape in shapes),
        eps=tuple(shape.eps for shape in shapes),
        activations=tuple(shape.activation for shape in shapes),
        kinds=(first, *later[1:]),
        residual=-1 if residual is None else residual,
        pad=max(padded),
        block=rows_at_once(max(padded)),
        piece=min(max(padded), rows_at_once(max(padded))),
        size=size,
    )


def rows_at_once(columns: int) -> int:
    """Rows of so many columns that a program takes at a time."""
    return min(ROWS_AT_MOST, NUMBERS_AT_ONCE // columns)


def power_of_two(width: int) -> int:
    """The columns of a table in registers, of which `width` count: a power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def _exact_kind(mlp: MLP) -> int:
    """How products of float32 are made."""
    return int(arithmetic.TF32X3.value if mlp.on_matrix_units else arithmetic.IEEE.value)


class Dropout(NamedTuple):
    """Dropout as kernels take it: ids, keys of layers, threshold and scale."""

    ids: Any
    keys: tuple[int, ...]
    threshold: int
    scale: float

    @classmethod
    def of(cls, noise: Noise | None, like: Tensor) -> Dropout:
        """That of a call; without one, any tensor stands for ids."""
        if noise is None:
            return cls(like, (0,) * MOST_THAT_DROP, 0, 1.0)  # a kernel must be given something
        keys = tuple(noise.key_of_layer(layer) for layer in range(MOST_THAT_DROP))
        return cls(torch.as_tensor(noise.ids), keys, threshold_of(noise.rate), 1.0 / (1.0 - noise.rate))


@dataclass(frozen=True)
class FusedMLP:
    """An MLP on some row tables and, of edges, on products of node states: as the kernels take it.

    Attributes:
        mlp, shape: The MLP, and its shape on these tables.
        tables: States that come in, [rows, width] each.
        parameters: All of its numbers, in the order of `MLP.all_parameters`.
        noise: Dropout of hidden layers.
        products: Of node states, [num_local, 2 width]; None: it takes none.
        ends: `dst` and `src` of each row, for what is gathered and where results are summed.
        programs: Of a launch, at most: each has memory of its own.
    """

    mlp: MLP
    shape: MLPShape
    tables: tuple[Tensor, ...]
    parameters: Tensor
    noise: Dropout
    products: Tensor | None = None
    ends: tuple[Tensor, Tensor] | None = None
    programs: int = field(default_factory=lambda: launching.PROGRAMS)

    def _inputs(self) -> tuple[Any, ...]:
        dst, src = (self.parameters, self.parameters) if self.ends is None else self.ends
        at_nodes = self.parameters if self.products is None else self.products
        noise = self.noise
        return (
            tuple(table.detach() for table in self.tables),
            *(self.parameters, at_nodes, dst, src, noise.ids, *noise.keys, noise.threshold, noise.scale),
        )

    def _how(self) -> dict[str, Any]:
        drops = self.noise.threshold > 0
        return {"SHAPE": self.shape, "GATHERS": self.products is not None, "DROPS": drops, "BLOCK": self.shape.block}

    def forward(self, blocks: Tensor, out: Tensor) -> None:
        """Results of the rows of some blocks, int32 [blocks, 2]."""
        programs = min(len(blocks), self.programs)
        memory = self.parameters.new_empty(programs, self.shape.block * self.shape.pad)
        launching.launch(rows_forward, (programs,), blocks, len(blocks), *self._inputs(), memory, out, **self._how())

    def backward(
        self,
        chunks: Tensor,
        grad_sink: GradSink,
        grad_out: Tensor | None,
        grad_sums: Tensor | None,
        way: int,
        needed: Sequence[bool],
    ) -> tuple[list[Tensor], Tensor]:
        """Gradients of the tables that are needed, and of the first product, if node states are in it.

        Args:
            chunks: Rows and whether they are owned, `chunks_of`.
            grad_sink: Gets the gradients of the parameters.
            grad_out: Gradient of the results, [rows, width], if there is one.
            grad_sums: That of their sums at nodes, [num_local, 2 width], if there is one.
            way: At which ends they are summed.
            needed: Of which tables a gradient is asked for.
        """
        grad_tables = [table.new_empty(table.shape if need else (0,)) for table, need in zip(self.tables, needed)]
        parameters = self.parameters
        rows = 0 if self.products is None or self.ends is None else len(self.ends[0])
        grad_product = parameters.new_empty(rows, self.shape.widths[0])
        memory = parameters.new_empty(
            min(len(chunks), self.programs),
            2 * self.shape.depth * self.shape.block * self.shape.pad + self.shape.size,
        )
        carries = self.shape.residual if self.shape.residual >= 0 and needed[self.shape.residual] else -1
        ends = arithmetic.AT_NO_END.value if grad_sums is None else ENDS[way]
        for piece, sums in with_sums(chunks, grad_sink, self.mlp):
            given = (parameters if grad_out is None else grad_out, parameters if grad_sums is None else grad_sums)
            launching.launch(
                rows_backward,
                (min(len(piece), len(memory)),),
                *(piece, len(piece), *self._inputs(), memory, *given, grad_product, tuple(grad_tables), *sums),
                **self._how(),
                **{"HAS_OUT": grad_out is not None, "ENDS": ends, "NEEDED": tuple(needed), "CARRIES": carries},
            )
        return grad_tables, grad_product


def packed(mlp: MLP) -> Tensor:
    """All numbers of an MLP's parameters, as the kernels take them: one behind the other.

    The first time they are put there: each parameter becomes a view of its piece, which an optimiser changes in place.
    """
    parameters = [parameter.detach() for parameter in mlp.all_parameters()]
    first, size = parameters[0], 0
    for parameter in parameters:
        in_line = parameter.is_contiguous() and parameter.storage_offset() == first.storage_offset() + size
        if not in_line or parameter.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            break
        size += parameter.numel()
    else:
        return first.as_strided((size,), (1,))
    with torch.inference_mode(False):  # else they could never be trained again
        together = torch.cat([parameter.flatten() for parameter in parameters])
        pieces = together.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(mlp.all_parameters(), pieces):
            parameter.data = piece.view_as(parameter)
    return together


def with_sums(chunks: Tensor, grad_sink: GradSink, mlp: MLP) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
    """Some chunks at a time, and where their partials are added."""
    for piece in chunks.split(CHUNKS_AT_ONCE):
        with grad_sink.integer_sums(mlp.all_parameters(), len(piece)) as sums:
            yield piece, sums


def weight_at_ends(mlp: MLP, nodes: int, columns: tuple[int, int]) -> dict[str, int]:
    """A first layer's weight and its columns for node states, as constants of a kernel."""
    linear = mlp.layers[0].linear
    padded = power_of_two(linear.out_features)
    return {
        "AT_DST_COLUMN": columns[0],
        "AT_SRC_COLUMN": columns[1],
        "NODES": nodes,
        "IN": linear.in_features,
        "WIDTH": linear.out_features,
        "PADDED": padded,
        "KIND": _exact_kind(mlp),
        "BLOCK": rows_at_once(padded),
    }


def multiply_nodes(
    nodes: Tensor, rows: slice, parameters: Tensor, mlp: MLP, columns: tuple[int, int], out: Tensor
) -> None:
    """Products of some nodes' states, [num_local, width], with a first layer's weight for `dst`, then for `src`.

    Args:
        nodes: The states.
        rows: Which of them.
        parameters: Of the MLP, packed; those of the weight come first.
        mlp: The MLP.
        columns: Where its weight's columns for node states at `dst`, and at `src`, begin.
        out: Takes the products, [num_local, 2 out].
    """
    constants, count = weight_at_ends(mlp, nodes.shape[1], columns), rows.stop - rows.start
    grid = (-(-count // constants["BLOCK"]), 2)
    launching.launch(between.node_products, grid, nodes, rows.start, count, parameters, out, **constants)


def blocks_of(ranges: IntArray, rows: int, device: torch.device) -> Tensor:
    """Rows from and to, cut into blocks, int32 [blocks, 2]."""
    return torch.from_numpy(_cut(ranges, rows)[:, :2].astype(np.int32)).to(device)


def chunks_of(ranges: IntArray, owned: IntArray, device: torch.device) -> Tensor:
    """Rows of tiles, from and to, cut into chunks from the start of each, and whether they are owned, int32 [n, 3]."""
    cut = _cut(ranges, CHUNK)
    return torch.from_numpy(np.column_stack([cut[:, :2], owned[cut[:, 2]]]).astype(np.int32)).to(device)


def _cut(ranges: IntArray, length: int) -> IntArray:
    """Ranges [n, 2] in pieces of at most some length: from, to, and number of the range, [pieces, 3]."""
    counts = -(-(ranges[:, 1] - ranges[:, 0]) // length)
    which = np.repeat(np.arange(len(ranges)), counts)
    position = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = ranges[which, 0] + position * length
    return np.column_stack([first, np.minimum(first + length, ranges[which, 1]), which])
