"""The attention network in forms that give the same logits: by index, by sparse and by dense incidence matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from heptrkx_sectors import Graph
from torch import Tensor

from domainpar.nn.published import AttentionNetwork


class ByIndex:
    """Rows at the ends of edges by indexing, and sums over the edges of a node by `index_add`."""

    def __init__(self, edge_index: Tensor, num_nodes: int, dtype: torch.dtype) -> None:
        self._src, self._dst = edge_index

    def at_src(self, x: Tensor) -> Tensor:
        """[N, width] -> [E, width]."""
        return x[self._src]

    def at_dst(self, x: Tensor) -> Tensor:
        return x[self._dst]

    def sums_at_dst(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        """Sum of a x rows over the edges that end in each node of x, a [E, 1]: [E, width] -> [N, width]."""
        return x.new_zeros(len(x), rows.shape[1]).index_add(0, self._dst, a * rows)

    def sums_at_src(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), rows.shape[1]).index_add(0, self._src, a * rows)


class ByMatrix:
    """The same by products with incidence matrices [N, E]: column e of Ri has its 1 at the `dst` of e, of Ro at `src`.

    Sparse transposes are kept beside them, so that no product has to sort.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, dtype: torch.dtype, layout: torch.layout) -> None:
        src, dst = edge_index
        self._ro, self._ri = (_incidence(ends, num_nodes, dtype, layout) for ends in (src, dst))
        if layout == torch.strided:
            self._ro_t, self._ri_t = self._ro.T, self._ri.T
        else:
            self._ro_t, self._ri_t = (_incidence(ends, num_nodes, dtype, layout, turned=True) for ends in (src, dst))

    def at_src(self, x: Tensor) -> Tensor:
        return self._ro_t @ x

    def at_dst(self, x: Tensor) -> Tensor:
        return self._ri_t @ x

    def sums_at_dst(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        return self._ri @ (a * rows)

    def sums_at_src(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        return self._ro @ (a * rows)


class ByWeightedMatrix(ByMatrix):
    """Dense, with a multiplied into the matrices: [N, E] twice an iteration, all kept for backward."""

    def sums_at_dst(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        return (self._ri * a.T) @ rows

    def sums_at_src(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        return (self._ro * a.T) @ rows


def _incidence(ends: Tensor, num_nodes: int, dtype: torch.dtype, layout: torch.layout, turned: bool = False) -> Tensor:
    places, shape = [ends, torch.arange(len(ends))], [num_nodes, len(ends)]
    if turned:
        places, shape = places[::-1], shape[::-1]
    ones = torch.ones(len(ends), dtype=dtype)
    matrix = torch.sparse_coo_tensor(torch.stack(places), ones, shape, check_invariants=True).coalesce()
    return matrix.to_dense() if layout == torch.strided else matrix.to_sparse(layout=layout)


Ends = ByIndex | ByMatrix


class Form(NamedTuple):
    """One way to compute the network.

    Attributes:
        make: (edge_index, num_nodes, dtype) -> the form of one graph.
        matrices: Number of dense [N, E] tables that a step holds, by its iterations.
    """

    make: Callable[[Tensor, int, torch.dtype], Ends]
    matrices: Callable[[int], int]

    def dense_bytes(self, graph: Graph, graph_iters: int, item_bytes: int = 4) -> int:
        return self.matrices(graph_iters) * graph.num_nodes * graph.num_edges * item_bytes


FORMS = {
    "index": Form(ByIndex, lambda iters: 0),
    "csr": Form(partial(ByMatrix, layout=torch.sparse_csr), lambda iters: 0),
    "coo": Form(partial(ByMatrix, layout=torch.sparse_coo), lambda iters: 0),
    "dense": Form(partial(ByMatrix, layout=torch.strided), lambda iters: 2),
    "weighted": Form(partial(ByWeightedMatrix, layout=torch.strided), lambda iters: 2 + 2 * iters),
}


def logits_of(network: AttentionNetwork, x: Tensor, ends: Ends) -> Tensor:
    """Logits of all edges, [E], of node features [N, F]: `AttentionNetwork.forward` in another form."""
    edge_network, node_network = network.edge_network, network.node_network
    x = network.input_network(x)
    for _ in range(network.graph_iters):
        x_src, x_dst = ends.at_src(x), ends.at_dst(x)
        a = torch.sigmoid(edge_network(torch.cat([x_src, x_dst], dim=1)))
        sums = [ends.sums_at_dst(a, x_src, x), ends.sums_at_src(a, x_dst, x)]
        x = node_network(torch.cat([*sums, x], dim=1)) + x
    logits: Tensor = edge_network(torch.cat([ends.at_src(x), ends.at_dst(x)], dim=1))
    return logits.squeeze(1)
