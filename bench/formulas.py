"""Cost of a training step of an interaction network by formula: matrix products, and memory of the plain form.

Products are counted as 2 rows x inputs x outputs floating point operations each, and nothing else is. Memory of
domainpar's form is `domainpar.nn.memory.ModelSize`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Product:
    """One matrix product of the forward pass.

    Attributes:
        rows, wide, out: Its sizes.
        on_data: What goes in is data: its gradient is not wanted.
        iterated: Belongs to one of the iterations, not to an encoder or the head.
    """

    rows: int
    wide: int
    out: int
    on_data: bool = False
    iterated: bool = False

    @property
    def forward(self) -> int:
        return 2 * self.rows * self.wide * self.out

    @property
    def backward(self) -> int:
        return self.forward * (1 if self.on_data else 2)


@dataclass(frozen=True)
class Network:
    """An interaction network of two-layer MLPs on an event: all that the work of a step depends on."""

    num_nodes: int
    num_edges: int
    node_features: int
    edge_features: int
    hidden: int
    graph_iters: int
    node_first: bool = False
    item_bytes: int = 4

    @property
    def node_updates(self) -> int:
        return self.graph_iters if self.node_first else self.graph_iters - 1

    def plain_operations(self, checkpointed: bool = False) -> int:
        """Of one step of gather, join, MLP, scatter; with checkpoints, iterations are computed once more."""
        products = list(self._products(factorised=False))
        again = sum(product.forward for product in products if product.iterated) if checkpointed else 0
        return sum(product.forward + product.backward for product in products) + again

    def streamed_operations(self, recomputed: int = 1) -> int:
        """Of one step of domainpar: the first layer of edges factorised into products per node and one per edge,
        and the whole forward pass recomputed `recomputed` times."""
        return sum((1 + recomputed) * product.forward + product.backward for product in self._products(factorised=True))

    def plain_bytes(self, checkpointed: bool = False) -> int:
        """Predicted peak of a plain step above the bare process, for tables that the allocator gives back when freed.

        Autograd keeps what linear layers and LayerNorms took in and what ReLUs gave out: in an iteration the joined
        table of 3 widths and 4 tables behind it, and gradients of 2 tables at the far end. With checkpoints it keeps
        one state an iteration; one iteration is there as a whole while the step goes back through it, with the
        gradients of its tables.
        Within 3 % of what steps on 400,000 edges took (width 64, 3 and 6 iterations, one thread, CPU).
        """
        inside, encoders, heads, state = 7, 6, 7 if self.node_first else 4, self.hidden * self.item_bytes
        once_more = inside + 6
        of_edges = encoders + (self.graph_iters + once_more if checkpointed else inside * self.graph_iters + heads + 2)
        of_nodes = 4 + (inside + self.node_updates if checkpointed else (inside + 1) * self.node_updates)
        raw = self.num_edges * 40
        return (self.num_edges * of_edges + self.num_nodes * of_nodes) * state + raw

    def plain_scoring_bytes(self) -> int:
        """Predicted peak of a plain pass without gradients, above the bare process.

        It comes in an edge update, which holds the edge states it began with, the states gathered at both ends (2
        widths), these three joined (3), and three tables in the MLP: a norm's input, its result, the activation's.
        Libraries held about one table more. Within 10 % of what passes over 400,000 edges took (width 64, one thread).
        """
        of_edges, of_nodes, state = 10, 6, self.hidden * self.item_bytes
        return (self.num_edges * of_edges + self.num_nodes * of_nodes) * state + self.num_edges * 40

    def _products(self, factorised: bool) -> Iterator[Product]:
        nodes, edges, hidden = self.num_nodes, self.num_edges, self.hidden
        join = partial(self._join, factorised)
        yield Product(nodes, self.node_features, hidden, on_data=True)
        yield Product(nodes, hidden, hidden)
        yield from join(self.edge_features, of_data=True)
        yield Product(edges, hidden, hidden)
        for _ in range(self.graph_iters):
            yield from join(hidden, iterated=True)
            yield Product(edges, hidden, hidden, iterated=True)
        for _ in range(self.node_updates):
            yield Product(nodes, 3 * hidden, hidden, iterated=True)
            yield Product(nodes, hidden, hidden, iterated=True)
        yield from join(hidden) if self.node_first else [Product(edges, hidden, hidden)]
        yield Product(edges, hidden, hidden)
        yield Product(edges, hidden, 1)

    def _join(self, factorised: bool, width: int, of_data: bool = False, iterated: bool = False) -> Iterator[Product]:
        """The first layer of an edge update on [x_src, x_dst, e]: two products per node and one per edge, or one on the
        joined table, which takes a gradient as a whole."""
        if not factorised:
            yield Product(self.num_edges, 2 * self.hidden + width, self.hidden, iterated=iterated)
            return
        for _ in range(2):
            yield Product(self.num_nodes, self.hidden, self.hidden, iterated=iterated)
        yield Product(self.num_edges, width, self.hidden, on_data=of_data, iterated=iterated)
