"""Interaction networks whose norms run over all rows of an event, or of a batch: plain modules, exact to rounding.

A stage makes what it makes of an edge from that edge and its ends. A norm over all edges needs a sum over all of them
between two layers, so these networks run like a user's own: with the time and memory of plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from domainpar.nn.calls import Aggregate
from domainpar.nn.heads import EDGE, Head
from domainpar.nn.published import joined, linear, sum_at
from domainpar.nn.standard import Standard
from domainpar.nn.standardise import standardised

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


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


class InteractionOfRows(nn.Module):
    """The formulas of `InteractionNetwork` in plain torch, with any norm before its activations.

    Args:
        node_features: Features of a node.
        edge_features: Features of an edge.
        norm: `batch`: over the rows of an event in training, by running means else. `graph`: over those of the event.
            `layer`: over the columns of a row. `none`.
        hidden, graph_iters, order, shared_weights, layers, seed, dropout, residual, aggregate, activation, readouts,
            heads, standard: As of `InteractionNetwork`.

    Raises:
        ValueError: If a size is below 1.
    """

    def __init__(
        self,
        node_features: int,
        edge_features: int,
        norm: str,
        *,
        hidden: int = 64,
        graph_iters: int = 3,
        order: str = "edge-first",
        shared_weights: bool = False,
        layers: int = 2,
        seed: int = 0,
        dropout: float = 0.0,
        residual: bool = True,
        aggregate: Aggregate = "root",
        activation: str = "relu",
        readouts: str = "last",
        heads: Sequence[Head] = (EDGE,),
        standard: Standard | None = None,
    ) -> None:
        super().__init__()
        if graph_iters < 1 or layers < 1 or node_features < 1 or hidden < 1:
            raise ValueError(
                f"graph_iters {graph_iters}, layers {layers}, hidden {hidden} and node_features {node_features} must "
                "all be at least 1."
            )
        generator = torch.Generator().manual_seed(seed)
        widths = (hidden,) * layers

        def mlp(columns: int, *, updates: bool = False, out: int | None = None) -> nn.Sequential:
            sizes = [columns, *widths, *([] if out is None else [out])]
            modules: list[nn.Module] = []
            for place, (wide, width) in enumerate(pairwise(sizes)):
                is_last = place == len(sizes) - 2
                modules.append(linear(generator, wide, width))
                if is_last and out is not None:
                    continue
                modules += [] if norm == "none" else [_NORMS[norm](width)]
                modules += [] if is_last and updates and residual else [_ACTIVATIONS[activation]()]
                modules += [nn.Dropout(dropout)] if dropout and not is_last else []
            return nn.Sequential(*modules)

        self.heads, self.node_first, self.residual, self.aggregate = (
            tuple(heads),
            order == "node-first",
            residual,
            aggregate,
        )
        others = [head for head in self.heads if head.of != "edge"]
        count = 1 if shared_weights else graph_iters
        num_updates = (graph_iters if self.node_first else graph_iters - 1) + bool(others)
        self.graph_iters, self.num_updates = graph_iters, num_updates
        self.node_encoder = mlp(node_features)
        self.edge_encoder = mlp(2 * hidden + edge_features)
        self.edge_networks = nn.ModuleList(mlp(3 * hidden, updates=True) for _ in range(count))
        self.node_networks = nn.ModuleList(
            mlp(3 * hidden, updates=True) for _ in range(min(1, num_updates) if shared_weights else num_updates)
        )
        self.head = mlp((3 if self.node_first else 1) * hidden, out=1) if EDGE in self.heads else None
        self.other_heads = nn.ModuleDict(
            # torch has names of its own in such a dictionary.
            {f"of_{head.name}": mlp(hidden, out=head.columns * (2 if head.of == "graph" else 1)) for head in others}
        )
        self.deep_supervision = readouts == "all"
        self.standardises = standard is not None
        if standard is not None:
            for name, constants in standard._asdict().items():
                self.register_buffer(name, torch.tensor(constants, dtype=torch.float64))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor | dict[str, Tensor]:
        """Logits of edges [E, 1], of all readouts [E, readouts] with deep supervision; several heads by name."""
        src, dst = edge_index
        if self.standardises:
            x, edge_attr = (
                standardised(rows, getattr(self, f"{of}_mean"), getattr(self, f"{of}_scale")).to(rows.dtype)
                for of, rows in (("node", x), ("edge", edge_attr))
            )
        x = self.node_encoder(x)
        scales = [self._scale(x, end) for end in (dst, src)]
        edges = self.edge_encoder(joined(x[src], x[dst], edge_attr))
        readouts: list[Tensor] = []
        updates = 0
        for iteration in range(self.graph_iters):
            if self.node_first:
                x, updates = self._updated(x, edges, (dst, src), scales, updates), updates + 1
            network = self.edge_networks[iteration % len(self.edge_networks)]
            edges = network(joined(x[src], x[dst], edges)) + (edges if self.residual else 0)
            is_last = iteration == self.graph_iters - 1
            if self.head is not None and (is_last or (self.training and self.deep_supervision)):
                readouts.append(self.head(joined(x[src], x[dst], edges) if self.node_first else edges))
            if not self.node_first and not is_last:
                x, updates = self._updated(x, edges, (dst, src), scales, updates), updates + 1
        results = {} if self.head is None else {EDGE.name: joined(*readouts) if len(readouts) > 1 else readouts[0]}
        if self.other_heads:
            x = self._updated(x, edges, (dst, src), scales, updates)
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
