"""Networks that are built on stages: the same bits on any number of ranks; and the published ones among them.

The plain-torch definitions in `published` stay what they are. Here their layers become MLPs of stages, with the
same parameters, and their iterations passes over nodes and edges.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from domainpar.common.agreement import gather
from domainpar.nn.classifier import EdgeClassifier, Exactness
from domainpar.nn.gradients import GradientSink
from domainpar.nn.interacting import Interactions, first_nodes
from domainpar.nn.mlp import MLP
from domainpar.nn.published import AttentionNetwork, InteractionGNN, MessagePassingNetwork, PublishedNetwork
from domainpar.nn.recompute import HaloSource, iterated
from domainpar.nn.selftest import rows_are_independent
from domainpar.nn.stages import EdgeStage, NodeStage, Stage, run_chain
from domainpar.parallel.halo import CompleteHalo, HaloRows
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

    def use_matrix_units(self) -> None:
        """Have matrix units of GPUs make products of float32, each of three of TF32; CPUs go on as before."""
        for module in self.layers.modules():
            if isinstance(module, MLP):
                module.on_matrix_units = True

    def exactness(self, transport: Transport) -> Exactness:
        """The same bits, if the self-test of the kernels passes; on GPUs, if these kernels take it. *Collective*."""
        if next(self.parameters()).is_cuda:
            # One rank may have no compiler, or another setting, than the rest.
            problems = gather(transport, self._why_in_torch())
            if without := [rank for rank, problem in enumerate(problems) if problem]:
                whom = "" if len(without) == transport.size else f" ({transport.name_ranks(without)} alone)"
                return Exactness(bitwise=False, problem=f"{problems[without[0]]}{whom}")
        return Exactness(bitwise=True, problem=rows_are_independent(self.layers, transport))

    def _why_in_torch(self) -> str | None:
        """Why the GPU engine does not compute all of its stages; None if it does."""
        stages = [stage for stage in self.layers.modules() if isinstance(stage, Stage)]
        return next(filter(None, (stage.why_in_torch() for stage in stages)), None)

    def take_from_root(self, world: World) -> None:
        """Nothing to take: its tensors are a function of the seed."""

    def verify(self, edge_index: Tensor, x: Tensor, edge_attr: Tensor) -> str:
        """Nothing to compare: split and whole are the same stages, and the self-test tries those."""
        return "built on stages: the self-test tries it"


class PublishedOnStages(OnStages):
    """A published network on stages.

    Args:
        module: The network. Its parameters are those of the stages; widths of its hidden layers must be multiples
            of 16.
        recompute_every: See `EdgeClassifier`.

    Attributes:
        module: The network; checkpoints have its names.
        of_nodes, of_edges: Its stages, by the names of their layers in it.

    Raises:
        ValueError: If a width is not a multiple of 16.
    """

    def __init__(self, module: PublishedNetwork, recompute_every: int | None = None) -> None:
        super().__init__()
        self.module = module
        # In dictionaries, so that each parameter has one name: that in the module.
        self.of_nodes: dict[str, NodeStage] = {}
        self.of_edges: dict[str, EdgeStage] = {}
        self.build(module)
        assert set(module.parameters()) == set(self.layers.parameters()), "each parameter is in a stage"
        self.recompute(recompute_every)

    @abstractmethod
    def build(self, module: PublishedNetwork) -> None:
        """Make the stages, in the order of their layers in the module."""

    @property
    def plain(self) -> PublishedNetwork:
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


class MessagesOnStages(PublishedOnStages):
    """`mpnn`, see `MessagePassingNetwork`: a message along an edge is summed at `dst`, one against it at `src`."""

    def build(self, module: PublishedNetwork) -> None:
        assert isinstance(module, MessagePassingNetwork)
        self.of_nodes["node_encoder"] = NodeStage(MLP(module.node_encoder))
        self.of_edges["edge_network"] = EdgeStage(MLP(module.edge_network), both_ways=True)
        self.of_nodes["node_network"] = NodeStage(MLP(module.node_network), residual=True)
        self.of_edges["edge_classifier"] = EdgeStage(MLP(module.edge_classifier, readout=True))

    def forward(self, graph: LocalGraph, halo: CompleteHalo, key: int | None = None) -> Tensor:
        """Logits of all local edges, [num_edges]. *Collective*, forward and backward."""

        def iterate(iterations: range, take: Callable[[], HaloRows], halo: HaloSource) -> HaloRows:
            x = take()
            messages = [self.of_edges["edge_network"]]
            for _ in iterations:
                sums = run_chain(messages, x, None, graph, sums=True, keeps=False, keys=[None]).sums
                at_dst, at_src = sums.chunk(2, dim=1)
                x = halo.spread(self.of_nodes["node_network"]([x.owned, at_dst + at_src], graph))
            return x

        first = partial(first_nodes, self.of_nodes["node_encoder"], graph, halo)
        x = iterated(first, iterate, self.num_iterations, self.recompute_every, halo)
        logits: Tensor = self.of_edges["edge_classifier"](x, None, graph, sums=False)[0]
        return logits.squeeze(1)


class AttentionOnStages(PublishedOnStages):
    """`agnn`, see `AttentionNetwork`: the edge net is a gate of the node states at the other ends."""

    def build(self, module: PublishedNetwork) -> None:
        assert isinstance(module, AttentionNetwork)
        self.of_nodes["input_network"] = NodeStage(MLP(module.input_network))
        self.of_edges["edge_network"] = EdgeStage(MLP(module.edge_network, readout=True), gates="nodes")
        self.of_nodes["node_network"] = NodeStage(MLP(module.node_network), residual=True, states=1)

    def forward(self, graph: LocalGraph, halo: CompleteHalo, key: int | None = None) -> Tensor:
        """Logits of all local edges, [num_edges]. *Collective*, forward and backward."""

        def iterate(iterations: range, take: Callable[[], HaloRows], halo: HaloSource) -> HaloRows:
            x = take()
            for _ in iterations:
                _, collected = self.of_edges["edge_network"](x, None, graph)
                x = halo.spread(self.of_nodes["node_network"]([collected, x.owned], graph))
            return x

        first = partial(first_nodes, self.of_nodes["input_network"], graph, halo)
        x = iterated(first, iterate, self.num_iterations, self.recompute_every, halo)
        logits, _ = self.of_edges["edge_network"](x, None, graph, sums=False)
        scores: Tensor = logits.squeeze(1)
        return scores


class InteractionsOnStages(PublishedOnStages):
    """`acorn`, see `InteractionGNN`."""

    def build(self, module: PublishedNetwork) -> None:
        assert isinstance(module, InteractionGNN)
        self.of_nodes["node_encoder"] = NodeStage(MLP(module.node_encoder))
        self.of_edges["edge_encoder"] = EdgeStage(MLP(module.edge_encoder))
        self.of_edges["edge_networks"] = EdgeStage(MLP(module.edge_networks[0]))
        self.of_nodes["node_networks"] = NodeStage(MLP(module.node_networks[0]))
        self.of_edges["output_edge_classifier"] = EdgeStage(MLP(module.output_edge_classifier, readout=True))

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


PUBLISHED_ON_STAGES: dict[str, type[PublishedOnStages]] = {
    "agnn": AttentionOnStages,
    "mpnn": MessagesOnStages,
    "acorn": InteractionsOnStages,
}
"""By the names on the command line; the other published networks are run by `adapt`."""
