"""Stages on a GPU in own kernels: the same bits on any number of GPUs of one architecture.

What `batchwise` does in plain torch, in one launch for each perceptron, forward and backward: see `kernels`. It is the
engine of networks in float32 whose perceptrons have hidden layers of one width; `batchwise` is that of all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from domainpar.nn.calls import EdgeCall, EdgeGradients, EdgeResults, Link, NodeCall, scale_of_sums
from domainpar.nn.fused import MOST_THAT_DROP, kernels
from domainpar.nn.gradients import TakesGradients
from domainpar.nn.kernels import BACK, BOTH_ENDS, FORTH
from domainpar.nn.mlp import MLP
from domainpar.nn.noise import Noise, threshold_of
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.local import LocalGraph
from domainpar.plan import IntArray

ROWS_AT_MOST, NUMBERS_AT_ONCE = 64, 4096
"""Rows that a program takes at a time, and numbers of a table: what registers hold. No bit of a row depends on either;
those of gradients of parameters do."""

CHUNK = 1024
"""Rows of a tile whose gradients of parameters are summed as floats, before these become integers."""

CHUNKS_AT_ONCE = 1000
"""In one launch: what the limbs of `IntegerSums` can take before they are carried."""

NODES_AT_ONCE = 4
"""Nodes whose sums a program makes."""

PROGRAMS = 264
"""Of a launch, two for each processor of an H100: each goes on with the next block, in memory that stays in caches."""

ENDS = {BOTH_ENDS: kernels.AT_BOTH_ENDS.value, FORTH: kernels.AT_DST.value, BACK: kernels.AT_SRC.value}


class Shape(NamedTuple):
    """A perceptron and the row tables that it takes, as constants of a kernel; one entry for each layer or table.

    Attributes:
        depth: Layers.
        tables: Widths of the row tables, which meet the last columns of the first weight, from `firsts` on.
        ins, widths, padded: Columns that a layer takes, that it makes, and these up to a power of two.
        weights, biases, scales, shifts: Where its parameters begin among all of the perceptron's; -1: it has none.
        norms, eps: Whether its product is normed, and what is added to variances.
        activations: Their numbers.
        kinds: How products are made, `kernels.IEEE` and so on.
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


def shape_of(mlp: MLP, tables: Sequence[Tensor], residual: int | None, products: torch.dtype | None) -> Shape:
    """The shape of a perceptron on some row tables.

    Args:
        mlp: The perceptron.
        tables: The last of what it takes; node states at ends come before.
        residual: Number of the table to which results are added.
        products: Type of the products of hidden layers, but for a readout's; the first product has its table's.
    """
    layers = mlp.layers
    widths = tuple(layer.linear.out_features for layer in layers)
    padded = tuple(_power_of_two(width) for width in widths)
    places: dict[int, int] = {}
    size = 0
    for parameter in mlp.all_parameters():
        places[id(parameter)] = size
        size += parameter.numel()
    affine = [layer.of_norm for layer in layers]
    of_tables = tuple(table.shape[1] for table in tables)
    ins = tuple(layer.linear.in_features for layer in layers)
    column = ins[0] - sum(of_tables)
    firsts = []
    for width in of_tables:
        firsts.append(column)
        column += width
    exact = _exact_kind(mlp)
    later = [kernels.BF16.value if products is torch.bfloat16 else exact] * len(layers)
    if mlp.readout:
        later[-1] = exact  # a readout keeps the parameters' type: losses are made of it
    first = kernels.BF16.value if any(table.dtype == torch.bfloat16 for table in tables) else exact
    return Shape(
        depth=len(layers),
        tables=of_tables,
        firsts=tuple(firsts),
        ins=ins,
        widths=widths,
        padded=padded,
        weights=tuple(places[id(layer.linear.weight)] for layer in layers),
        biases=tuple(places[id(layer.linear.bias)] for layer in layers),
        scales=tuple(places[id(own[0])] if own else -1 for own in affine),
        shifts=tuple(places[id(own[1])] if own else -1 for own in affine),
        norms=tuple(layer.norm is not None for layer in layers),
        eps=tuple(0.0 if layer.norm is None else float(layer.norm.eps) for layer in layers),
        activations=tuple(layer.activation for layer in layers),
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


def _power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _exact_kind(mlp: MLP) -> int:
    """How products of float32 are made."""
    return int(kernels.TF32X3.value if mlp.on_matrix_units else kernels.IEEE.value)


OPTIONS = {"enable_fp_fusion": False, "num_warps": 8, "num_stages": 1, "maxnreg": 255}
"""With which kernels are compiled. Fewer registers than a thread can have would be made up for by memory."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel, if there is anything to do. All launches go through here."""
    if all(grid):
        kernel[grid](*arguments, **constants, **OPTIONS)


class Dropout(NamedTuple):
    """Dropout as kernels take it: ids, keys of layers, threshold and scale."""

    ids: Any
    keys: tuple[int, ...]
    threshold: int
    scale: float

    @classmethod
    def of(cls, noise: Noise | None, like: Tensor) -> Dropout:
        if noise is None:
            return cls(like, (0,) * MOST_THAT_DROP, 0, 1.0)  # a kernel must be given something
        keys = tuple(noise.key_of_layer(layer) for layer in range(MOST_THAT_DROP))
        return cls(torch.as_tensor(noise.ids), keys, threshold_of(noise.rate), 1.0 / (1.0 - noise.rate))


@dataclass(frozen=True)
class Perceptron:
    """A perceptron on some row tables and, of edges, on products of node states: as the kernels take it.

    Attributes:
        shape: Of it.
        parameters: All of its numbers, in the order of `MLP.all_parameters`.
        noise: Dropout of hidden layers.
        rows: Number of rows.
        products: Of node states, [num_local, 2 width]; None: it takes none.
        ends: `dst` and `src` of each row, for what is gathered and where results are summed.
    """

    mlp: MLP
    shape: Shape
    tables: tuple[Tensor, ...]
    parameters: Tensor
    noise: Dropout
    products: Tensor | None = None
    ends: tuple[Tensor, Tensor] | None = None

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
        programs = min(len(blocks), PROGRAMS)
        memory = self.parameters.new_empty(programs, self.shape.block * self.shape.pad)
        launch(kernels.rows_forward, (programs,), blocks, len(blocks), *self._inputs(), memory, out, **self._how())

    def backward(
        self,
        chunks: Tensor,
        taker: TakesGradients,
        of_out: Tensor | None,
        of_sums: Tensor | None,
        way: int,
        needed: Sequence[bool],
    ) -> tuple[list[Tensor], Tensor]:
        """Gradients of the tables that are needed, and of the first product, if node states are in it."""
        of_tables = [table.new_empty(table.shape if need else (0,)) for table, need in zip(self.tables, needed)]
        parameters = self.parameters
        rows = 0 if self.products is None or self.ends is None else len(self.ends[0])
        of_product = parameters.new_empty(rows, self.shape.widths[0])
        memory = parameters.new_empty(
            min(len(chunks), PROGRAMS), 2 * self.shape.depth * self.shape.block * self.shape.pad + self.shape.size
        )
        carries = self.shape.residual if self.shape.residual >= 0 and needed[self.shape.residual] else -1
        ends = kernels.AT_NO_END.value if of_sums is None else ENDS[way]
        for piece, sums in _with_sums(chunks, taker, self.mlp):
            given = (parameters if of_out is None else of_out, parameters if of_sums is None else of_sums)
            launch(
                kernels.rows_backward,
                (min(len(piece), PROGRAMS),),
                *(piece, len(piece), *self._inputs(), memory, *given, of_product, tuple(of_tables), *sums),
                **self._how(),
                **{"HAS_OUT": of_out is not None, "ENDS": ends, "NEEDED": tuple(needed), "CARRIES": carries},
            )
        return of_tables, of_product


def _weight_at_ends(mlp: MLP, nodes: int, columns: tuple[int, int]) -> dict[str, int]:
    """A first layer's weight and its columns for node states, as constants of a kernel."""
    linear = mlp.layers[0].linear
    padded = _power_of_two(linear.out_features)
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
        parameters: Of the perceptron, packed; those of the weight come first.
        mlp: The perceptron.
        columns: Where its weight's columns for node states at `dst`, and at `src`, begin.
        out: Takes the products, [num_local, 2 out].
    """
    constants, count = _weight_at_ends(mlp, nodes.shape[1], columns), rows.stop - rows.start
    grid = (-(-count // constants["BLOCK"]), 2)
    launch(kernels.node_products, grid, nodes, rows.start, count, parameters, out, **constants)


def _with_sums(chunks: Tensor, taker: TakesGradients, mlp: MLP) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
    """Some chunks at a time, and where their partials are added."""
    for piece in chunks.split(CHUNKS_AT_ONCE):
        with taker.integer_sums(mlp.all_parameters(), len(piece)) as sums:
            yield piece, sums


def packed(mlp: MLP) -> Tensor:
    """All numbers of a perceptron's parameters, as the kernels take them: one behind the other.

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
    together = torch.cat([parameter.flatten() for parameter in parameters])
    pieces = together.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(mlp.all_parameters(), pieces):
        parameter.data = piece.view_as(parameter)
    return together


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


@dataclass(frozen=True)
class FusedNodes(NodeCall):
    """A perceptron on the rows of some nodes."""

    def forward(self, keep: bool = False) -> tuple[Tensor, list[Tensor]]:
        device = self.tables[0].device
        out = self.tables[0].new_empty(self.nodes.count, self.mlp.out_features)
        self.made[:] = [packed(self.mlp)]
        perceptron, whole = self._perceptron(), np.array([[0, self.nodes.count]])
        rows = perceptron.shape.block
        perceptron.forward(self.nodes.once(f"blocks of {rows}", lambda: blocks_of(whole, rows, device)), out)
        return out, []

    def backward(
        self, kept: Sequence[Tensor], gradient: Tensor, taker: TakesGradients, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        ranges, device = self.nodes.pieces, gradient.device
        chunks = self.nodes.once("chunks", lambda: chunks_of(ranges, np.ones(len(ranges), np.int64), device))
        perceptron = self._perceptron()
        of_tables, _ = perceptron.backward(chunks, taker, gradient.contiguous(), None, BOTH_ENDS, needed)
        return [table if need else None for table, need in zip(of_tables, needed)]

    def _perceptron(self) -> Perceptron:
        shape = shape_of(self.mlp, self.tables, self.residual, None)
        (parameters,) = self.made
        noise = Dropout.of(self.noise, parameters)
        return Perceptron(self.mlp, shape, tuple(self.tables), parameters, noise)


@dataclass(frozen=True)
class FusedEdges(EdgeCall):
    """Perceptrons on the local edges."""

    def forward(self, keep: bool = False) -> tuple[EdgeResults, list[Tensor]]:
        self.made[:] = [packed(link.mlp) for link in self.chain]
        tables = self._compute()
        states, readout = self._results(tables)
        sums = self.edges.new_empty(self.graph.num_owned, 0, dtype=self.chain[0].exact)
        if self.aggregate is not None:
            sums = self._sums(states, readout)
        # What a perceptron makes for the next is computed again in backward: that costs less than its memory is worth.
        return EdgeResults(states[0] if self.keeps and states else None, sums, readout), []

    def backward(
        self, kept: Sequence[Tensor], given: EdgeGradients, needed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        tables = self._compute(but_last=self.gates is None)
        of_sums = None
        if given.sums is not None:
            given.sums.finish()
            of_sums = given.sums.local
        of_nodes = given.nodes
        upstream: list[Tensor | None] = [None] * len(self.chain)
        readout = self._results(tables)[1]
        if self.readout is not None:
            upstream[-1] = given.readout
            if self.gates is not None and of_sums is not None:
                upstream[-1] = self._of_gates(readout, of_sums, given.readout)
                of_nodes = _added(of_nodes, self._gated_back(readout, of_sums))
        summed = self._summed if of_sums is not None and self.gates is None else ()
        for position in self._summed:
            upstream[position] = given.edges
        of_edges: Tensor | None = None
        chunks = chunks_of_edges(self.graph)
        for position in reversed(range(len(self.chain))):
            link, of_out = self.chain[position], upstream[position]
            at_ends = of_sums if position in summed else None
            if of_out is None and at_ends is None:
                continue
            perceptron = self._perceptron(position, self._input(position, tables))
            before = 0 if link.turned else position
            needs = [before > 0 or needed] * len(perceptron.tables)
            of_out = None if of_out is None else of_out.contiguous()
            of_tables, of_product = perceptron.backward(chunks, link.taker, of_out, at_ends, link.way, needs)
            if perceptron.products is not None:
                of_nodes = self._products_back(link, perceptron, of_product, of_nodes)
            # No longer needed, and as large as the edges are many: what it took and made, and gradients.
            del tables[max(position - 1, 0) :], perceptron, of_product
            upstream[position] = of_out = None
            if of_tables and before > 0:
                upstream[position - 1] = _added(upstream[position - 1], of_tables[0])
            elif of_tables and needed:
                of_edges = of_tables[0]
        return of_nodes, torch.zeros_like(self.edges) if of_edges is None and needed else of_edges

    def _compute(self, but_last: bool = False) -> list[Tensor]:
        """What each perceptron makes of all edges; those without a ghost while ghosts are on their way."""
        count = len(self.chain) - but_last
        tables = [
            self.edges.new_empty(self.graph.num_edges, link.mlp.out_features, dtype=link.kind)
            for link in self.chain[:count]
        ]
        at_nodes = [self._products_of(position, slice(0, self.graph.num_owned)) for position in range(count)]

        def compute(with_ghosts: bool) -> None:
            for position in range(count):
                perceptron = self._perceptron(position, self._input(position, tables), at_nodes[position])
                perceptron.forward(self._blocks(with_ghosts, perceptron.shape.block), tables[position])

        compute(with_ghosts=False)
        if self.nodes is not None:
            self.nodes.finish()
            for position, table in enumerate(at_nodes):
                if table is not None:
                    ghosts = slice(self.graph.num_owned, self.graph.plan.num_local)
                    self._multiply(self.chain[position], position, ghosts, table)
        compute(with_ghosts=True)
        return tables

    def _input(self, position: int, tables: Sequence[Tensor]) -> Tensor:
        """The states that a perceptron takes: those of the one before it."""
        return self.edges if position == 0 or self.chain[position].turned else tables[position - 1]

    @property
    def _summed(self) -> tuple[int, ...]:
        """Which perceptrons make what is summed and handed on: the last update, or both ways."""
        last = len(self.updates) - 1
        if last < 0:
            return ()
        return (last - 1, last) if self.chain[-1].turned else (last,)

    def _results(self, tables: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        states = [tables[position] for position in self._summed if position < len(tables)]
        return states, tables[-1] if self.readout is not None and len(tables) == len(self.chain) else None

    def _blocks(self, with_ghosts: bool, rows: int) -> Tensor:
        def make() -> Tensor:
            tiles = [tile.edges for tile in self.graph.tiles.edges if tile.has_ghosts == with_ghosts]
            return blocks_of(_joined([(edges.start, edges.stop) for edges in tiles]), rows, self.edges.device)

        return self.graph.once(("blocks of edges", with_ghosts, rows), make)

    def _perceptron(self, position: int, states: Tensor, products: Tensor | None = None) -> Perceptron:
        link = self.chain[position]
        tables = (states,) if states.shape[1] else ()
        shape = shape_of(link.mlp, tables, 0 if link.residual else None, link.products)
        if products is None:
            products = self._products_of(position, slice(0, self.graph.plan.num_local))
        parameters = self.made[position]
        noise = Dropout.of(link.noise, parameters)
        return Perceptron(link.mlp, shape, tables, parameters, noise, products, (self.graph.dst, self.graph.src))

    def _products_of(self, position: int, rows: slice) -> Tensor | None:
        """Products of node states with the first weight, of which some rows are made, [num_local, 2 width]."""
        link = self.chain[position]
        if self.nodes is None or not link.takes_nodes:
            return None
        width = link.mlp.layers[0].linear.out_features
        table = self.nodes.owned.new_empty(self.graph.plan.num_local, 2 * width)
        self._multiply(link, position, rows, table)
        return table

    def _multiply(self, link: Link, position: int, rows: slice, table: Tensor) -> None:
        assert self.nodes is not None
        multiply_nodes(self.nodes.local.detach(), rows, self.made[position], link.mlp, self._columns(link), table)

    def _columns(self, link: Link) -> tuple[int, int]:
        """Where a first weight's columns for node states at `dst`, and at `src`, begin."""
        assert self.nodes is not None
        width = self.nodes.owned.shape[1]
        return (0, width) if link.turned else (width, 0)

    def _products_back(self, link: Link, perceptron: Perceptron, of_product: Tensor, of_nodes: Tensor | None) -> Tensor:
        """Gradient of the owned nodes' states from that of each edge's product; with what there is of it already."""
        assert self.nodes is not None
        of_products = self._at_ends(of_product, of_product)
        tiles, device = self.graph.tiles.ranges_of_nodes, of_product.device
        chunks = self.graph.once("chunks of nodes", lambda: chunks_of(tiles, np.ones(len(tiles), np.int64), device))
        constants = _weight_at_ends(link.mlp, self.nodes.owned.shape[1], self._columns(link))
        out = self.nodes.owned.new_empty(self.graph.num_owned, constants["NODES"])
        memory = out.new_empty(min(len(chunks), PROGRAMS), constants["WIDTH"] * constants["IN"])
        added = out if of_nodes is None else of_nodes.contiguous()
        for piece, sums in _with_sums(chunks, link.taker, link.mlp):
            launch(
                kernels.node_products_back,
                (min(len(piece), PROGRAMS),),
                *(piece, len(piece), self.nodes.local.detach(), of_products, perceptron.parameters, memory),
                *(added, out, *sums),
                **constants,
                **{"PIECE": min(_power_of_two(constants["NODES"]), constants["BLOCK"]), "ADDS": of_nodes is not None},
            )
        return out

    def _sums(self, states: Sequence[Tensor], readout: Tensor | None) -> Tensor:
        assert self.aggregate is not None
        if self.gates == "nodes":
            assert self.nodes is not None
            local = self.nodes.local.detach()
            return self._at_ends(local, local, readout, of_nodes=True, scaled=True)
        own = [*states] or [self.edges]
        return self._at_ends(own[0], own[-1], readout if self.gates else None, scaled=True)

    def _at_ends(
        self,
        to_dst: Tensor,
        to_src: Tensor,
        gates: Tensor | None = None,
        of_nodes: bool = False,
        scaled: bool = False,
    ) -> Tensor:
        """Sums at owned nodes, [num_owned, 2 width]: of rows of edges, or of those of nodes at other ends."""
        graph, width = self.graph, to_dst.shape[1]
        out = to_dst.new_empty(graph.num_owned, 2 * width, dtype=torch.float32)
        at_dst, at_src = graph.edges_at_dst, graph.edges_at_src
        scale = None
        if scaled and self.aggregate is not None:
            scale = scale_of_sums(graph, self.aggregate, out)
        launch(
            kernels.sums_at_ends,
            (-(-graph.num_owned // NODES_AT_ONCE), 2),
            *(to_dst, to_src, at_dst.edges, at_dst.first, len(at_dst.edges)),
            *(at_src.edges, at_src.first, len(at_src.edges), graph.dst, graph.src),
            *(out if gates is None else gates, out if scale is None else scale, out, graph.num_owned),
            **{"WIDTH": width, "STRIDE": to_dst.stride(0), "PADDED": _power_of_two(width), "NODES": NODES_AT_ONCE},
            **{"OF_NODES": of_nodes, "GATED": gates is not None, "SCALED": scale is not None},
        )
        return out

    def _of_gates(self, readout: Tensor | None, of_sums: Tensor, given: Tensor | None) -> Tensor:
        """Gradient of the scores that are gates of node states."""
        assert self.nodes is not None
        assert readout is not None
        graph, width = self.graph, self.nodes.owned.shape[1]
        out = readout.new_empty(graph.num_edges, 1)
        launch(
            kernels.gates_back,
            (-(-graph.num_edges // rows_at_once(_power_of_two(width))),),
            *(self.nodes.local.detach(), of_sums, readout, out if given is None else given.contiguous()),
            *(graph.dst, graph.src, graph.num_edges, out),
            **{"WIDTH": width, "PADDED": _power_of_two(width), "HAS_GIVEN": given is not None},
            BLOCK=rows_at_once(_power_of_two(width)),
        )
        return out

    def _gated_back(self, readout: Tensor | None, of_sums: Tensor) -> Tensor:
        """Gradient of the node states that gates weigh: what `src` sent came to `dst`, and the other way round."""
        at_dst, at_src = of_sums.chunk(2, dim=1)
        back = self._at_ends(at_src, at_dst, readout, of_nodes=True)
        of_dst, of_src = back.chunk(2, dim=1)
        return of_dst + of_src


def edge_losses(
    logits: Tensor, weights: Tensor, graph: LocalGraph, divisor: float, sums: IntegerSums, of_logits: Tensor
) -> None:
    """Cross-entropy of the logits of all local edges, whose sums over chunks of owned tiles are added to `sums`.

    Args:
        logits, weights: Of the local edges, [num_edges]; see `training.loss.edge_loss`.
        graph: The part, with labels.
        divisor: Of the loss.
        sums: Of length 1.
        of_logits: Takes the gradient of the logits.
    """
    assert graph.label is not None
    bits = int(np.float64(divisor).view(np.int64))
    for piece in chunks_of_edges(graph).split(CHUNKS_AT_ONCE):
        with sums.room_for(len(piece)) as limbs:
            arguments = (logits.contiguous(), weights.contiguous(), graph.label.contiguous(), bits, of_logits, limbs)
            launch(kernels.edge_losses, (len(piece),), piece, len(piece), *arguments, CHUNK=CHUNK)


def chunks_of_edges(graph: LocalGraph) -> Tensor:
    """The chunks of all local edges."""

    def make() -> Tensor:
        tiles = graph.tiles.edges
        ranges = np.array([(tile.edges.start, tile.edges.stop) for tile in tiles], np.int64).reshape(-1, 2)
        owned = np.array([tile.owned for tile in tiles], np.int64)
        return chunks_of(ranges, owned, graph.features.device)

    return graph.once("chunks of edges", make)


def _added(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other


def _joined(ranges: Sequence[tuple[int, int]]) -> IntArray:
    """Ascending ranges, those that follow each other as one."""
    joined: list[list[int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return np.array(joined, np.int64).reshape(-1, 2)
