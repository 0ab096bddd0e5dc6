"""The interaction networks of the acorn framework with its options, in plain torch.

Definitions follow GNN4ITkTeam/CommonFramework (`acorn/stages/edge_classifier/models/interaction_gnn.py`, perceptrons
`make_mlp` in `acorn/utils/ml_utils.py`). `interaction.InteractionNetwork` is our own one in the same two orders: fewer
options, computed tile by tile, bitwise the same on any number of ranks.

An acorn configuration gives these arguments:

    hidden, layernorm, batchnorm, hidden_activation, output_activation, undirected, concat, in_out_diff_agg,
    node_net_recurrent, edge_net_recurrent                the same names
    n_graph_iters                                         graph_iters
    aggregation (InteractionGNN), aggr (InteractionGNN2)  aggregations, a list also of one
    nb_node_layer, n_node_net_layers                      node_layers
    nb_edge_layer, n_edge_net_layers                      edge_layers
    n_edge_decoder_layers                                 decoder_layers
    node_features, edge_features                          their numbers; scaling is left to who makes the features

Not here, as no published configuration has them on: norms after last layers (`output_batch_norm` and such), running
statistics, dropout, an activation of the logits. Nor is `checkpointing`, which alters no number, nor what the forward
pass of `InteractionGNN2` does to the features of strip endcaps: copy the first 4 over the other 8 of hits with
`hit_region` 2 or 6 beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from domainpar.nn.plain import Aggregation, aggregate_at, check_aggregations, check_sizes, perceptron

BATCH_NORM_EPS = 6e-5


class InteractionGNN(nn.Module):
    """Scores every edge; in each iteration nodes first, then edges with the new node states.

    With x, e the node and edge states, A_dst e and A_src e the aggregates of e over the edges that end and start in a
    node, and [ , ] concatenation:

        begin        x = encode(node features)                   e = encode([x_src, x_dst])
        iteration    x = node_net([x, A_dst e, A_src e])         e = edge_net([x_src, x_dst, e])
        end          logit = mlp([x_src, x_dst, e])

    Hidden layers are followed by LayerNorm without affine parameters, BatchNorm and activation, norms if asked for;
    last layers by the output activation alone, the mlp's by nothing. There are no residuals.

    The defaults are those of acorn's Example_3; Examples 1 and 2 have `aggregations=["sum", "mean", "max", "std"]` and
    `undirected=True`.

    Args:
        node_features: Features of a node.
        hidden: Width of both states and of every hidden layer.
        graph_iters: Number of iterations.
        node_layers: Layers of the node nets and encoder.
        edge_layers: Layers of the edge nets and encoder; the mlp has one more.
        aggregations: Aggregates A beside each other, of `sum`, `mean`, `max` and `std` (see `plain.aggregate_at`).
        node_net_recurrent: One node net for all iterations, instead of one each.
        edge_net_recurrent: The same of edge nets.
        undirected: Compute on every edge and its reverse; the logit of an edge is the mean of both.
        layernorm: Norm each row of hidden layers.
        batchnorm: Norm each column of hidden layers, over all nodes or edges of the event, in training or not. torch
            refuses to norm a single row, so neither nodes nor edges may be just one.
        hidden_activation: Name of the activation in `torch.nn`.
        output_activation: That of last layers; None: they are linear.
        seed: Seed of the initial weights: a function of it alone, on every rank.
        dtype: Type of the parameters.

    Raises:
        ValueError: If a size is below 1, or an aggregation or activation unknown.
    """

    def __init__(
        self,
        node_features: int,
        *,
        hidden: int = 128,
        graph_iters: int = 8,
        node_layers: int = 2,
        edge_layers: int = 2,
        aggregations: Sequence[Aggregation] = ("sum",),
        node_net_recurrent: bool = True,
        edge_net_recurrent: bool = True,
        undirected: bool = False,
        layernorm: bool = True,
        batchnorm: bool = False,
        hidden_activation: str = "SiLU",
        output_activation: str | None = "Tanh",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_sizes(
            node_features=node_features,
            hidden=hidden,
            graph_iters=graph_iters,
            node_layers=node_layers,
            edge_layers=edge_layers,
        )
        check_aggregations(aggregations)
        net = _Builder(hidden, layernorm, batchnorm, hidden_activation, output_activation, seed)
        self.graph_iters, self.undirected, self.aggregations = graph_iters, undirected, tuple(aggregations)
        self.node_encoder = net(node_features, node_layers)
        self.edge_encoder = net(2 * hidden, edge_layers)
        columns = (1 + 2 * len(aggregations)) * hidden
        self.edge_networks = nn.ModuleList(
            net(3 * hidden, edge_layers) for _ in range(1 if edge_net_recurrent else graph_iters)
        )
        self.node_networks = nn.ModuleList(
            net(columns, node_layers) for _ in range(1 if node_net_recurrent else graph_iters)
        )
        self.output_edge_classifier = net.to_logit(3 * hidden, edge_layers)
        self.to(dtype)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Logits of all edges, [E].

        Args:
            x: Node features, [N, node_features].
            edge_index: `src` and `dst` of each edge, int64 [2, E].
            edge_attr: Not looked at; this network has no edge features.
        """
        src, dst = edge_index[0], edge_index[1]
        if self.undirected:
            src, dst = torch.cat([src, dst], dim=0), torch.cat([dst, src], dim=0)
        x = self.node_encoder(x)
        e = self.edge_encoder(torch.cat([x[src], x[dst]], dim=-1))
        for iteration in range(self.graph_iters):
            at_dst, at_src = (aggregate_at(x, end, e, self.aggregations) for end in (dst, src))
            x = _of(self.node_networks, iteration)(torch.cat([x, at_dst, at_src], dim=-1))
            e = _of(self.edge_networks, iteration)(torch.cat([x[src], x[dst], e], dim=-1))
        logits: Tensor = self.output_edge_classifier(torch.cat([x[src], x[dst], e], dim=-1)).squeeze(-1)
        if self.undirected:
            given, reverse = logits.chunk(2, dim=0)
            logits = (given + reverse) / 2
        return logits


class InteractionGNN2(nn.Module):
    """Scores every edge; in each iteration edges first, then nodes with the new edge states.

    With x, e the node and edge states, x_0, e_0 the encoded ones, A_dst e and A_src e the aggregates of e over the
    edges that end and start in a node, and [ , ] concatenation:

        begin        x = encode(node features)                   e = encode(edge features), or encode([x_src, x_dst])
        concat       x = [x, x_0]                                e = [e, e_0]
        iteration    e = edge_net([e, x_src, x_dst])             x = node_net([A_dst e, A_src e, x])
        end          logit = mlp(decode(e))

    Norms and activations are those of `InteractionGNN`, and so is every option of the same name. The last node update
    would reach no logit and is not computed; with separate weights its net is kept, so that weights match acorn's, and
    gets no gradient.

    The defaults are those of acorn's CTD_2023, with 12 node and 6 edge features there.

    Args:
        node_features: Features of a node.
        edge_features: Features of an edge; 0: encode an edge from its ends.
        hidden: Width of both states and of every hidden layer.
        graph_iters: Number of iterations.
        node_layers: Layers of the node nets and encoder.
        edge_layers: Layers of the edge nets and encoder.
        decoder_layers: Layers of the decoder; the mlp after it has 2.
        aggregations: Aggregates A beside each other, of `sum`, `mean`, `max` and `std`; one in acorn.
        concat: Begin each iteration with the encoded states beside the present ones.
        in_out_diff_agg: Keep aggregates over edges that end and start in a node apart, instead of adding the two.
        node_net_recurrent: One node net for all iterations, instead of one each.
        edge_net_recurrent: The same of edge nets.
        layernorm: Norm each row of hidden layers.
        batchnorm: Norm each column of hidden layers, over all nodes or edges of the event, in training or not. torch
            refuses to norm a single row, so neither nodes nor edges may be just one.
        hidden_activation: Name of the activation in `torch.nn`.
        output_activation: That of last layers; None: they are linear.
        seed: Seed of the initial weights: a function of it alone, on every rank.
        dtype: Type of the parameters.

    Raises:
        ValueError: If a size is out of its range, or an aggregation or activation unknown.
    """

    def __init__(
        self,
        node_features: int,
        edge_features: int = 0,
        *,
        hidden: int = 128,
        graph_iters: int = 8,
        node_layers: int = 3,
        edge_layers: int = 3,
        decoder_layers: int = 3,
        aggregations: Sequence[Aggregation] = ("sum",),
        concat: bool = True,
        in_out_diff_agg: bool = True,
        node_net_recurrent: bool = False,
        edge_net_recurrent: bool = False,
        layernorm: bool = False,
        batchnorm: bool = True,
        hidden_activation: str = "ReLU",
        output_activation: str | None = "ReLU",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_sizes(
            node_features=node_features,
            hidden=hidden,
            graph_iters=graph_iters,
            node_layers=node_layers,
            edge_layers=edge_layers,
            decoder_layers=decoder_layers,
        )
        if edge_features < 0:
            raise ValueError(f"edge_features is {edge_features}; it must be at least 0.")
        check_aggregations(aggregations)
        net = _Builder(hidden, layernorm, batchnorm, hidden_activation, output_activation, seed)
        self.edge_features, self.graph_iters, self.concat = edge_features, graph_iters, concat
        self.in_out_diff_agg, self.aggregations = in_out_diff_agg, tuple(aggregations)
        state = 2 * hidden if concat else hidden
        columns = (2 if in_out_diff_agg else 1) * len(aggregations) * hidden + state
        self.node_encoder = net(node_features, node_layers)
        self.edge_encoder = net(edge_features or 2 * hidden, edge_layers)
        self.edge_networks = nn.ModuleList(
            net(3 * state, edge_layers) for _ in range(1 if edge_net_recurrent else graph_iters)
        )
        self.node_networks = nn.ModuleList(
            net(columns, node_layers) for _ in range(1 if node_net_recurrent else graph_iters)
        )
        self.edge_decoder = net(hidden, decoder_layers)
        self.edge_output_transform = net.to_logit(hidden, 1)
        self.to(dtype)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Logits of all edges, [E].

        Args:
            x: Node features, [N, node_features].
            edge_index: `src` and `dst` of each edge, int64 [2, E].
            edge_attr: Edge features, [E, edge_features]; not looked at without any.

        Raises:
            ValueError: If there should be edge features and are none.
        """
        src, dst = edge_index[0], edge_index[1]
        x = self.node_encoder(x)
        if self.edge_features == 0:
            e = self.edge_encoder(torch.cat([x[src], x[dst]], dim=-1))
        elif edge_attr is not None:
            e = self.edge_encoder(edge_attr)
        else:
            raise ValueError(f"this network needs {self.edge_features} edge features and got None; pass edge_attr.")
        encoded_x, encoded_e = x, e
        for iteration in range(self.graph_iters):
            if self.concat:
                x, e = torch.cat([x, encoded_x], dim=-1), torch.cat([e, encoded_e], dim=-1)
            e = _of(self.edge_networks, iteration)(torch.cat([e, x[src], x[dst]], dim=-1))
            if iteration < self.graph_iters - 1:
                at_dst, at_src = (aggregate_at(x, end, e, self.aggregations) for end in (dst, src))
                at_ends = [at_dst, at_src] if self.in_out_diff_agg else [at_dst + at_src]
                x = _of(self.node_networks, iteration)(torch.cat([*at_ends, x], dim=-1))
        logits: Tensor = self.edge_output_transform(self.edge_decoder(e))
        return logits.squeeze(-1)


class _Builder:
    """Makes the perceptrons of one network, all with the same norms and activations."""

    def __init__(
        self, hidden: int, layernorm: bool, batchnorm: bool, activation: str, output_activation: str | None, seed: int
    ) -> None:
        self._hidden, self._layernorm, self._batchnorm = hidden, layernorm, batchnorm
        self._activation, self._output_activation = activation, output_activation
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, in_features: int, layers: int) -> nn.Sequential:
        """Layers up to a state."""
        return self._make(in_features, [self._hidden] * layers, self._output_activation)

    def to_logit(self, in_features: int, hidden_layers: int) -> nn.Sequential:
        """Hidden layers, then one of width 1 without activation."""
        return self._make(in_features, [self._hidden] * hidden_layers + [1], None)

    def _make(self, in_features: int, widths: list[int], output_activation: str | None) -> nn.Sequential:
        return perceptron(
            in_features,
            widths,
            self._generator,
            hidden_activation=self._activation,
            output_activation=output_activation,
            norms=self._norms,
        )

    def _norms(self, width: int) -> list[nn.Module]:
        norms: list[nn.Module] = []
        if self._layernorm:
            norms.append(nn.LayerNorm(width, elementwise_affine=False))
        if self._batchnorm:
            norms.append(nn.BatchNorm1d(width, eps=BATCH_NORM_EPS, track_running_stats=False))
        return norms


def _of(nets: nn.ModuleList, iteration: int) -> nn.Module:
    """The net of an iteration, one for all if there is just one."""
    return nets[iteration % len(nets)]
