"""Networks that are built on stages: the same bits on any number of ranks; and the published one among them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from domainpar.nn.classifier import EdgeClassifier, Exactness
from domainpar.nn.gradients import GradientSink
from domainpar.nn.interacting import Interactions
from domainpar.nn.mlp import MLP
from domainpar.nn.published import InteractionGNN
from domainpar.nn.selftest import rows_are_independent
from domainpar.nn.stages import EdgeStage, NodeStage, Stage
from domainpar.parallel.halo import CompleteHalo
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World


class OnStages(EdgeClassifier):
    """A network all of whose parameters are in stages.

    Attributes:
        plain: The same network in plain torch: its definition, whose layers the stages have.
    """

    @property
    @abstractmethod
    def plain(self) -> nn.Module: ...

    @property
    @abstractmethod
    def num_iterations(self) -> int:
        """How often states are updated."""

    @property
    def ways_to_recompute(self) -> Sequence[int | None]:
        """Of one iteration no more than what it begins with is kept in any case."""
        return (None, *range(self.num_iterations - 1, 1, -1))

    def recompute(self, every: int | None) -> None:
        """As of any network; stages that recompute keep no layers."""
        super().recompute(every)
        for module in self.layers.modules():
            if isinstance(module, Stage):
                module.keeps_layers = every is None

    @property
    def layers(self) -> nn.Module:
        """The stages: this network itself."""
        return self

    def gradients(self, over_ranks: bool = False) -> GradientSink:
        """The sink to which its stages give their partial gradients."""
        return GradientSink(self.layers, self.early_in_backward() if over_ranks else ())

    def early_in_backward(self) -> Sequence[nn.Module]:
        """Modules whose passes back are over some time before the last one ends, each called once in a forward pass."""
        return ()

    def exactness(self, transport: Transport) -> Exactness:
        """The same bits, if the self-test of the kernels passes. *Collective*."""
        return Exactness(bitwise=True, problem=rows_are_independent(self.layers, transport))

    def take_from_root(self, world: World) -> None:
        """Nothing to take: its tensors are a function of the seed."""

    def verify(self, edge_index: Tensor, x: Tensor, edge_attr: Tensor) -> str:
        """Nothing to compare: split and whole are the same stages, and the self-test tries those."""
        return "built on stages: the self-test tries it"


class InteractionsOnStages(OnStages):
    """`acorn` on stages, see `InteractionGNN`: its layers are MLPs of stages, its iterations passes over the edges.

    Args:
        module: The network. Its parameters are those of the stages; its width must be a multiple of 16.
        recompute_every: See `EdgeClassifier`.
        products: Type of edge states and of their products, if not that of the parameters.

    Attributes:
        module: The network; checkpoints have its names.
        of_nodes, of_edges: Its stages, by the names of their layers in it.

    Raises:
        ValueError: If the width is not a multiple of 16.
    """

    def __init__(
        self, module: InteractionGNN, recompute_every: int | None = None, products: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.module, self.products = module, products
        # In dictionaries, so that each parameter has one name: that in the module.
        self.of_nodes = {
            "node_encoder": NodeStage(MLP(module.node_encoder)),
            "node_networks": NodeStage(MLP(module.node_networks[0])),
        }
        self.of_edges = {
            "edge_encoder": EdgeStage(MLP(module.edge_encoder), products),
            "edge_networks": EdgeStage(MLP(module.edge_networks[0]), products),
            "output_edge_classifier": EdgeStage(MLP(module.output_edge_classifier, readout=True), products),
        }
        assert set(module.parameters()) == set(self.layers.parameters()), "each parameter is in a stage"
        self.recompute(recompute_every)

    @property
    def plain(self) -> InteractionGNN:
        """The network."""
        return self.module

    @property
    def num_iterations(self) -> int:
        """Those of the module."""
        return self.module.graph_iters

    @property
    def layers(self) -> nn.Module:
        """The stages, by the names of their layers in the module."""
        return nn.ModuleDict({**self.of_nodes, **self.of_edges})

    def forward(self, graph: LocalGraph, halo: CompleteHalo, key: int | None = None) -> Tensor:
        """Logits of all local edges, [num_edges]. *Collective*, forward and backward."""
        nodes, edges, count = self.of_nodes, self.of_edges, self.num_iterations
        stages = Interactions(
            node_first=True,
            node_encoder=nodes["node_encoder"],
            edge_encoder=edges["edge_encoder"],
            edge_stages=[edges["edge_networks"]] * count,
            node_stages=[nodes["node_networks"]] * count,
            head=edges["output_edge_classifier"],
            other_heads={},
            takes_edge_features=False,
        )
        (logits,) = stages.states(graph, halo, (count - 1,), self.recompute_every).readouts
        return logits.squeeze(1)
