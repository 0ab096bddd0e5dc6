"""The memory of a training step, or of scoring, on one rank, predicted from the sizes of network and part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from domainpar.nn import COLUMN_BLOCK
from domainpar.nn.program import PASSAGES
from domainpar.plan import IntArray

DATA_BYTES = 72
"""Of a local edge: features, ends, pair, ids, label, class and weight; and of a node: features, id, degrees, scales,
and its pairs."""

LOADING_BYTES = 200
"""Of a local edge while a part is read and planned, and of a node where the event is scored; seen, not derived."""

MOST_BYTES_OF_LAYERS = 2**27
"""Of the layers that one stage may keep for backward on a rank."""


def data_bytes(nodes: Any, edges: Any) -> Any:
    """Bytes of a part that stays in memory from step to step."""
    return DATA_BYTES * (nodes + edges)


def bytes_of_layers(rows: Any, widths: Sequence[int], item_bytes: int) -> Any:
    """Memory of a stage's layers, before activations, given their widths; of each part, if rows are an array."""
    # Padded, and with each row the inverse of its standard deviation.
    return rows * sum(-(-width // COLUMN_BLOCK) * COLUMN_BLOCK + 1 for width in widths) * item_bytes


@dataclass(frozen=True)
class ModelSize:
    """The memory of a rank that trains an interaction network, or scores with one, as a function of its part.

    Attributes:
        hidden: Width of node and edge states.
        graph_iters: Message-passing iterations.
        item_bytes: Bytes of one number, 4 or 8.
        edge_item_bytes: Bytes of one number of an edge state, if not the same: 2 for bfloat16.
        recompute_every: Iterations of which only the first one's input is kept; None: every iteration's is.
        layers: Layers of each MLP, without the head's last.
        node_first: Whether an iteration updates nodes before edges.
        readouts: Iterations whose states are read out.
        in_files: Whether tables lie in files; then `bytes_of` is of what is in memory at once.
        trains: Whether there is a backward pass.
    """

    hidden: int = 64
    graph_iters: int = 4
    item_bytes: int = 4
    edge_item_bytes: int | None = None
    recompute_every: int | None = None
    layers: int = 2
    node_first: bool = False
    readouts: int = 1
    in_files: bool = False
    trains: bool = True

    def __str__(self) -> str:
        return f"hidden {self.hidden}, {self.graph_iters} iterations, {8 * self.item_bytes} bit"

    def bytes_of(self, num_nodes: IntArray, num_edges: IntArray, num_pairs: IntArray | None = None) -> IntArray:
        """Predicted peak of one training step, or of the scores of an event, above the bare process.

        It comes early in backward. All that autograd keeps is still there: the edge states that iterations begin with,
        but for the first one of the edge-first order, which begins with features; of each iteration, per node, its
        state, the same with ghosts, and two sums; and the layers of stages that keep them. Besides, a gradient of edge
        states; and the working memory of one stage: per node two products of its state, two gradients of sums and one
        of the state, and a partial sum per (tile, node) pair. In the node-first order the head takes node states, too:
        one more state of nodes and edges is kept, and products, gradients and pairs are there twice. The strips that a
        thread works in are small against it, and so is one readout; of further ones there are the logits and their
        gradients.

        Without backward there is one table of edge states, which each iteration overwrites; and per node, while a stage
        works, its state, two sums and two products. In the edge-first order the encoder of edges and the first
        iteration are one stage: products are there twice. The C library keeps what a part was made from, and so tables
        come on top of it.

        Args:
            num_nodes: Owned nodes and ghosts of each part.
            num_edges: Local edges of each part.
            num_pairs: (tile, owned `src`) pairs of each part. Default: as many as nodes.
        """
        node_state, edge_state = self.hidden * self.item_bytes, self.hidden * (self.edge_item_bytes or self.item_bytes)
        nodes, edges = np.asarray(num_nodes, np.int64), np.asarray(num_edges, np.int64)
        pairs = nodes if num_pairs is None else np.asarray(num_pairs, np.int64)
        if self.in_files:  # at most the rows of some tables that were not let go yet, or what a part is made from
            rows = nodes * 5 * node_state + edges * 4 * edge_state // PASSAGES
            return edges * LOADING_BYTES + rows
        if not self.trains:
            goes_on = self.node_first or self.graph_iters > 1  # the last iteration makes neither states nor sums
            rows = nodes * (3 + 2 * (not self.node_first)) + (2 * nodes + pairs) * goes_on
            of_edge = LOADING_BYTES + edge_state * goes_on + self.item_bytes  # of the logit
            return nodes * LOADING_BYTES + edges * of_edge + rows * node_state
        kept = self._kept(self.recompute_every)
        of_readouts = 2 * (self.readouts - 1) * self.item_bytes
        of_edges = edges * ((kept + self.node_first) * edge_state + of_readouts)
        rows = nodes * (4 * kept + 5 + 5 * self.node_first) + pairs * (1 + self.node_first)
        there: IntArray = of_edges + rows * node_state + self._of_layers(nodes, edges) + data_bytes(nodes, edges)
        return there

    def _of_layers(self, nodes: IntArray, edges: IntArray) -> IntArray:
        """Layers that stages keep, where they are few, in the type of the parameters."""
        kept = np.zeros(np.broadcast_shapes(nodes.shape, edges.shape), np.int64)
        if self.recompute_every is not None:
            return kept
        hidden_widths = [self.hidden] * self.layers
        # The encoder of edges and the first iteration are one stage, unless nodes come in between; so are an iteration
        # and its readout.
        of_edges = [hidden_widths] * (self.graph_iters + self.node_first)
        of_edges[0] = hidden_widths * (1 if self.node_first else 2)
        of_edges[-self.readouts :] = [[*widths, *hidden_widths, 1] for widths in of_edges[-self.readouts :]]
        of_nodes = [hidden_widths] * (self.graph_iters + self.node_first)
        for rows, widths in [*((edges, widths) for widths in of_edges), *((nodes, widths) for widths in of_nodes)]:
            of_stage = bytes_of_layers(rows, widths, self.item_bytes)
            kept += np.where(of_stage <= MOST_BYTES_OF_LAYERS, of_stage, 0)
        return kept

    def leanest_recompute(self) -> int | None:
        """The `recompute_every` that takes least memory; None if it is no less than now."""
        best = min(range(1, self.graph_iters + 1), key=self._kept)
        return best if self._kept(best) < self._kept(self.recompute_every) else None

    def _kept(self, recompute_every: int | None) -> int:
        """Most iterations whose input is there at once: of the segments before, one each, of this segment, all."""
        length = recompute_every or self.graph_iters
        starts = range(0, self.graph_iters, length)
        return max(segment + min(length, self.graph_iters - start) for segment, start in enumerate(starts))
