"""Interaction networks of tracking in their two published orders, defined in plain torch.

Both keep a state per node and per edge and sum new edge states at both ends of each edge, apart from each other.
They follow the acorn framework (`InteractionGNN`: node then edge; `InteractionGNN2`: edge then node), with a norm and
an activation after every layer. States are replaced in each iteration, or updated by residuals.

`nn.interaction` runs them on stages, with these layers. A stage computes an edge from that edge and its ends alone. A
norm over all edges needs a sum over them between two layers, so networks with such norms run on placed tensors, like a
user's own: exact to rounding, with the time and memory of plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from domainpar.nn.heads import EDGE, Head
from domainpar.nn.mlp import MODULES
from domainpar.nn.options import NetworkOptions
from domainpar.nn.published import Iterated, joined, plain_mlp, sum_at
from domainpar.nn.standard import Standard
from domainpar.parallel.local import LocalGraph

MOST_DEVIATIONS = 5.0
"""Standardised features are cut off here, so that one outlier does not dominate."""


class Standardise(nn.Module):
    """Features as (feature - mean) / scale within -5 and 5, of owned nodes, ghosts and edges alike.

    Each number is computed alone, in the type of the parameters, so that no bit depends on where its row is. The
    constants are buffers: a checkpoint holds them.
    """

    node_mean: Tensor
    node_scale: Tensor
    edge_mean: Tensor
    edge_scale: Tensor

    def __init__(self, standard: Standard) -> None:
        super().__init__()
        for name, constants in standard._asdict().items():
            self.register_buffer(name, torch.tensor(constants, dtype=torch.float64))

    def forward(self, graph: LocalGraph) -> LocalGraph:
        """The part with its features standardised."""
        return replace(
            graph,
            features=standardised(graph.features, self.node_mean, self.node_scale),
            edge_features=standardised(graph.edge_features, self.edge_mean, self.edge_scale),
        )


def standardised(features: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Features by these constants, each number alone."""
    return torch.clamp((features - mean) / scale, -MOST_DEVIATIONS, MOST_DEVIATIONS)


class EventNorm(nn.Module):
    """Norm of each column by mean and variance over the rows of an event, scaled and shifted; `a` of the mean is taken.

    GraphNorm (arXiv:2009.03294) of one graph.

    Args:
        width: Columns.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias, self.mean_scale = (nn.Parameter(torch.full((width,), it)) for it in (1.0, 0.0, 1.0))
        self.eps = 1e-5

    def forward(self, rows: Tensor) -> Tensor:
        """Normed rows, [n, width]."""
        rows = rows - _mean(rows) * self.mean_scale
        normed: Tensor = rows / (_mean(rows.square()) + self.eps).sqrt()
        return normed * self.weight + self.bias


_NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "graph": EventNorm}


class InteractionModule(Iterated):
    """Scores every edge of an event.

    With x, e the node and edge states, S_dst and S_src the sums of edge states at nodes, and [ , ] concatenation:

        both         x = encode([node features])            e = encode([x_src, x_dst, edge features])
        edge-first   e = edge([x_src, x_dst, e])            x = node([x, S_dst e, S_src e])
        node-first   x = node([x, S_dst e, S_src e])        e = edge([x_src, x_dst, e])
        head         edge-first: logit = mlp(e)             node-first: logit = mlp([x_src, x_dst, e])

    The head reads the states after the last iteration. With `readouts="all"` it does so in training after each, and the
    loss is the mean over all readouts (deep supervision). It is one head with one set of weights, as states mean the
    same after any iteration, so a network of either form takes the other's weights.

    Heads of nodes read `mlp(x)` after one more node update; those of the graph are `pooled` from that. Without any,
    the last node update of the edge-first order would reach no logit and is left out. With `residual`, nets have no
    activation after their last norm, and `e = edge(...)`, `x = node(...)` become `e = e + edge(...)`,
    `x = x + node(...)`: gradients reach the first iterations whole. The defaults learn best (`bench/RESULTS.md`);
    acorn's form is `residual=False, aggregate="sum"`.

    Args:
        node_features: Features of a node.
        edge_features: Features of an edge; may be 0.
        options: All but `products` and `recompute_every`, which are of how it is run.

    Raises:
        ValueError: If a size is below 1, constants are not of so many features, or there is no such activation or norm.
    """

    def __init__(self, node_features: int, edge_features: int, options: NetworkOptions) -> None:
        super().__init__()
        hidden, graph_iters, layers = options.hidden, options.graph_iters, options.layers
        if min(graph_iters, layers, node_features, hidden) < 1:
            raise ValueError(
                f"graph_iters {graph_iters}, layers {layers}, hidden {hidden} and node_features {node_features} must "
                "all be at least 1."
            )
        if options.standard is not None and options.standard.sizes != (node_features, edge_features):
            raise ValueError(
                f"constants of {options.standard.sizes} node and edge features do not standardise "
                f"{(node_features, edge_features)}."
            )
        if options.activation not in MODULES or options.norm not in ("none", *_NORMS):
            raise ValueError(
                f"activation {options.activation!r} with norm {options.norm!r}; take an activation of "
                f"{', '.join(MODULES)}, and a norm of {', '.join(_NORMS)} or none."
            )
        generator, widths = torch.Generator().manual_seed(options.seed), (hidden,) * layers

        def normed(width: int) -> list[nn.Module]:
            return [] if options.norm == "none" else [_NORMS[options.norm](width)]

        def activated(width: int) -> list[nn.Module]:
            return [*normed(width), MODULES[options.activation]()]

        def inner(width: int) -> list[nn.Module]:
            return [*activated(width), *([nn.Dropout(options.dropout)] if options.dropout else [])]

        def encoder(columns: int) -> nn.Sequential:
            return plain_mlp(generator, (columns, *widths), inner, activated)

        def update() -> nn.Sequential:
            return plain_mlp(generator, (3 * hidden, *widths), inner, normed if options.residual else activated)

        def readout(columns: int, out: int) -> nn.Sequential:
            return plain_mlp(generator, (columns, *widths, out), inner)

        self.heads, self.node_first = options.heads, options.order == "node-first"
        self.residual, self.aggregate, self.graph_iters = options.residual, options.aggregate, graph_iters
        others = [head for head in self.heads if head.of != "edge"]
        self.num_updates = (graph_iters if self.node_first else graph_iters - 1) + bool(others)
        most = 1 if options.shared_weights else graph_iters + 1
        self.node_encoder = encoder(node_features)
        self.edge_encoder = encoder(2 * hidden + edge_features)
        self.edge_networks = nn.ModuleList(update() for _ in range(min(most, graph_iters)))
        self.node_networks = nn.ModuleList(update() for _ in range(min(most, self.num_updates)))
        self.head = readout((3 if self.node_first else 1) * hidden, 1) if EDGE in self.heads else None
        # Drawn last: what else there is begins as without them.
        self.other_heads = nn.ModuleDict(
            # torch has names of its own in such a dictionary.
            {f"of_{it.name}": readout(hidden, it.columns * (2 if it.of == "graph" else 1)) for it in others}
        )
        self.deep_supervision = options.readouts == "all"
        self.takes_edge_features, self.standardises = edge_features > 0, options.standard is not None
        if options.standard is not None:
            self.take_constants(Standardise(options.standard))

    def take_constants(self, standardise: Standardise) -> None:
        """Standardise features by these constants."""
        for name, constants in standardise.named_buffers():
            self.register_buffer(name, constants)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Logits of edges [E, 1], of all readouts [E, readouts] with deep supervision; several heads by name.

        Args:
            x: Node features, [N, node features].
            edge_index: `src` and `dst` of each edge, int64 [2, E].
            edge_attr: Edge features, [E, edge features]; None if it takes none.
        """
        src, dst = edge_index
        edge_attr = x.new_zeros(edge_index.size(1), 0) if edge_attr is None else edge_attr
        if self.standardises:
            x, edge_attr = (
                standardised(rows, getattr(self, f"{of}_mean"), getattr(self, f"{of}_scale")).to(rows.dtype)
                for of, rows in (("node", x), ("edge", edge_attr))
            )
        x = self.node_encoder(x)
        scales = [self._scale(x, end) for end in (dst, src)]
        edges = self.edge_encoder(joined(x[src], x[dst], edge_attr))
        reads_all = self.training and self.deep_supervision

        def iterate(iterations: range, x: Tensor, edges: Tensor, *readouts: Tensor) -> tuple[Tensor, ...]:
            for iteration in iterations:
                if self.node_first:
                    x = self._updated(x, edges, (dst, src), scales, iteration)
                network = self.edge_networks[iteration % len(self.edge_networks)]
                edges = network(joined(x[src], x[dst], edges)) + (edges if self.residual else 0)
                is_last = iteration == self.graph_iters - 1
                if self.head is not None and (is_last or reads_all):
                    readouts += (self.head(joined(x[src], x[dst], edges) if self.node_first else edges),)
                if not self.node_first and not is_last:
                    x = self._updated(x, edges, (dst, src), scales, iteration)
            return x, edges, *readouts

        x, edges, *readouts = self.after(iterate, self.graph_iters, x, edges)
        results = {} if self.head is None else {EDGE.name: joined(*readouts) if len(readouts) > 1 else readouts[0]}
        if self.other_heads:
            number = self.graph_iters - (not self.node_first)
            x = self._updated(x, edges, (dst, src), scales, number)
        for head in self.heads:
            if head.of != "edge":
                rows = self.other_heads[f"of_{head.name}"](x)
                results[head.name] = rows if head.of == "node" else _pooled(rows, head)
        return results if len(self.heads) > 1 else next(iter(results.values()))

    def _updated(
        self, x: Tensor, edges: Tensor, ends: tuple[Tensor, Tensor], scales: Sequence[Tensor | None], number: int
    ) -> Tensor:
        """New states of nodes from the sums of their edges."""
        sums = [sum_at(x, end, edges) for end in ends]
        sums = [rows if scale is None else rows * scale for rows, scale in zip(sums, scales)]
        new: Tensor = self.node_networks[number % len(self.node_networks)](joined(x, *sums))
        return new + x if self.residual else new

    def _scale(self, x: Tensor, end: Tensor) -> Tensor | None:
        """What sums at one end of edges are scaled by, [N, 1]."""
        if self.aggregate == "sum":
            return None
        degree = sum_at(x, end, torch.ones_like(end, dtype=x.dtype)[:, None]).clamp(min=1)
        return 1 / degree if self.aggregate == "mean" else 1 / degree.sqrt()


def _pooled(rows: Tensor, head: Head) -> Tensor:
    """As `heads.pooled`."""
    return _mean(rows[:, : head.columns]) + rows[:, head.columns :].sum(dim=0) / head.usual_nodes


def _mean(rows: Tensor) -> Tensor:
    """The mean of rows of the whole event; 0 where there are none, as there are edges of some events."""
    count = torch.ones_like(rows[:, :1]).sum(dim=0).clamp(min=1)
    return rows.sum(dim=0) / count
