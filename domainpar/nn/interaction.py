"""Interaction networks of tracking in their two published orders, on stages: the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from domainpar.nn.heads import Readings, pooled
from domainpar.nn.interacting import Interactions
from domainpar.nn.interaction_module import InteractionModule
from domainpar.nn.memory import ModelSize
from domainpar.nn.mlp import MLP
from domainpar.nn.on_stages import OnStages
from domainpar.nn.options import DEFAULTS, NetworkOptions
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.nn.standardise import Standardise
from domainpar.parallel.halo import CompleteHalo
from domainpar.parallel.local import LocalGraph


class InteractionNetwork(OnStages):
    """A network on stages that scores every edge of an event, with the same bits on any number of ranks.

    `InteractionModule` has its formulas, and the layers of its stages.

    Args:
        node_features: Number of features of a node.
        edge_features: Number of features of an edge; may be 0.
        options: Its options (`NetworkOptions`); `hidden` is a multiple of 16, and `norm` is `layer` or `none`.
        changes: Options by name that replace those: `InteractionNetwork(3, hidden=64, seed=1)`.

    Attributes:
        options: Its options.

    Raises:
        ValueError: If a size is out of its range, or the types do not go together.
    """

    def __init__(
        self, node_features: int, edge_features: int = 0, options: NetworkOptions = DEFAULTS, **changes: Any
    ) -> None:
        super().__init__()
        self.options = options = replace(options, **changes)
        dtype, products = options.dtype, options.products
        if products not in (None, dtype) and (products, dtype) != (torch.bfloat16, torch.float32):
            raise ValueError(
                f"products in {products} do not go with parameters in {dtype}; take torch.bfloat16 with torch.float32, "
                "or None for the parameters' own type."
            )
        self.products = None if products == dtype else products
        plain = InteractionModule(node_features, edge_features, options)

        def node_stage(net: nn.Module) -> NodeStage:
            return NodeStage(MLP(net), options.residual)

        def edge_stage(net: nn.Module) -> EdgeStage:
            return EdgeStage(MLP(net), products, options.residual, options.aggregate)

        # No child of it: checkpoints have the names of stages.
        self.__dict__["_plain"] = plain
        self.node_first, self.shared_weights, self.heads = plain.node_first, options.shared_weights, plain.heads
        self.standardise = None if options.standard is None else Standardise(options.standard)
        self.node_encoder = NodeStage(MLP(plain.node_encoder))
        self.edge_encoder = EdgeStage(MLP(plain.edge_encoder), products, aggregate=options.aggregate)
        self.edge_stages = _per_iteration([edge_stage(net) for net in plain.edge_networks], options.graph_iters)
        self.node_stages = _per_iteration([node_stage(net) for net in plain.node_networks], plain.num_updates)
        self.head = None if plain.head is None else EdgeStage(MLP(plain.head, readout=True), products)
        self.other_heads = nn.ModuleDict(
            {name: NodeStage(MLP(net, readout=True)) for name, net in plain.other_heads.items()}
        )
        self.num_readouts = 0 if self.head is None else options.graph_iters if plain.deep_supervision else 1
        edge_item_bytes = None if products is None else products.itemsize
        sizes = (options.hidden, options.graph_iters, dtype.itemsize, edge_item_bytes, None, options.layers)
        self.size: ModelSize = ModelSize(*sizes, self.node_first, max(self.num_readouts, 1))
        self.recompute(options.recompute_every)
        self.to(dtype)  # drawn in torch's default type before: networks of a seed begin alike in any type

    @property
    def plain(self) -> InteractionModule:
        """As of any network on stages."""
        plain: InteractionModule = self.__dict__["_plain"]
        plain.train(self.training)  # it is no child, which would follow by itself
        if self.standardise is not None:  # other tensors, if the network was moved
            plain.take_constants(self.standardise)
        return plain

    @property
    def num_iterations(self) -> int:
        """One for each pass over the edges, but for their encoder's and the head's."""
        return len(self.edge_stages)

    def early_in_backward(self) -> Sequence[nn.Module]:
        """All iterations but the first quarter, if each has weights of its own: its backward is longer than any sum."""
        late = -(-self.num_iterations // 4)
        return () if self.shared_weights else (*self.edge_stages[late:], *self.node_stages[late:])

    def recompute(self, every: int | None) -> None:
        """As of any network on stages; memory is predicted with it."""
        super().recompute(every)
        self.size = replace(self.size, recompute_every=every)

    def forward(self, graph: LocalGraph, halo: CompleteHalo, key: int | None = None) -> Tensor:
        """Logits of all local edges, [num_edges]. *Collective*, forward and backward.

        With a key those of all readouts, [num_readouts, num_edges], if there are several.

        Args:
            graph: The part.
            halo: Joins the parts.
            key: Of the random numbers of this call, the same on every rank, for training; None: nothing is dropped.
        """
        edges = self.read(graph, halo, key).edges
        if edges is None:
            raise ValueError("this network has no head of edges; ask it with read.")
        return edges

    def read(self, graph: LocalGraph, halo: CompleteHalo, key: int | None = None) -> Readings:
        """As of any network on parts."""
        count = self.num_iterations
        reads = range(count - (min(1, self.num_readouts) if key is None else self.num_readouts), count)
        graph = graph if self.standardise is None else self.standardise(graph)
        states = self._stages(key).states(graph, halo, reads, self.recompute_every)
        logits = [readout.squeeze(1) for readout in states.readouts]
        # Pooling is no part of an iteration: computed again, it would ask the ranks again.
        others = {
            head.name: pooled(rows, head.usual_nodes, halo.transport) if head.of == "graph" else rows
            for head, rows in zip((head for head in self.heads if head.of != "edge"), states.others)
        }
        edges = torch.stack(logits) if len(logits) > 1 else logits[0] if logits else None
        return Readings(edges, others)

    def _stages(self, key: int | None) -> Interactions:
        return Interactions(
            self.node_first,
            self.node_encoder,
            self.edge_encoder,
            cast(Sequence[EdgeStage], self.edge_stages),
            cast(Sequence[NodeStage], self.node_stages),
            self.head,
            cast(Mapping[str, NodeStage], self.other_heads),
            key=key,
        )


def _per_iteration(stages: Sequence[nn.Module], count: int) -> nn.ModuleList:
    """A stage for each of `count` iterations; where they share their weights, it is the same one."""
    return nn.ModuleList(stages[iteration % len(stages)] for iteration in range(count))
