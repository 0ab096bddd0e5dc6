"""Interaction networks of tracking on stages: the same bits on any number of ranks.

A network in plain torch is the definition, and its layers are those of the stages. `OnStages` runs them: encode,
iterate, read out. `InteractionNetwork` does so for the package's network, `InteractionsOnStages` for acorn's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from domainpar.nn.classifier import EdgeClassifier, Exactness
from domainpar.nn.gradients import GradientSink
from domainpar.nn.heads import Readings, pooled
from domainpar.nn.interaction_module import InteractionModule, Standardise
from domainpar.nn.mlp import MLP
from domainpar.nn.noise import key_of
from domainpar.nn.options import DEFAULTS, NetworkOptions
from domainpar.nn.published import InteractionGNN
from domainpar.nn.recompute import HaloSource, recomputed
from domainpar.nn.selftest import rows_are_independent
from domainpar.nn.stages import EdgeStage, NodeStage, Stage, run_chain
from domainpar.parallel.halo import CompleteHalo, HaloRows
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World

S = TypeVar("S", bound=Stage)


class OnStages(EdgeClassifier):
    """An interaction network with all parameters in stages.

    Args:
        plain: The same network in plain torch: its definition, whose layers the stages have.
        options: Its form, and how it is run.
        head: The layers that score edges; None: no scores.
        other_heads: Names of those that read nodes out, and their layers.

    Attributes:
        options: Its options.
        node_encoder, edge_encoder: Make first states.
        edge_stages, node_stages: One for each iteration, and one more of nodes if other heads read them; the same one
            each time if iterations share weights.
        head, other_heads: Read edges, and owned nodes, out.
        num_readouts: Iterations after which edges are read out in training.
        takes_edge_features: Whether the encoder of edges takes features.

    Raises:
        ValueError: If a width is not a multiple of 16, a norm is over rows, or the types do not go together.
    """

    takes_edge_features = True

    def __init__(
        self,
        plain: InteractionModule | InteractionGNN,
        options: NetworkOptions,
        head: nn.Module | None,
        other_heads: Iterable[tuple[str, nn.Module]] = (),
    ) -> None:
        super().__init__()
        dtype, products, residual, aggregate = options.dtype, options.products, options.residual, options.aggregate
        if products not in (None, dtype) and (products, dtype) != (torch.bfloat16, torch.float32):
            raise ValueError(
                f"products in {products} do not go with parameters in {dtype}; take torch.bfloat16 with torch.float32, "
                "or None for the parameters' own type."
            )
        self.products = products = None if products == dtype else products
        self.options, self.heads, self.node_first = options, options.heads, options.order == "node-first"
        self.num_readouts = 0 if head is None else options.graph_iters if options.readouts == "all" else 1
        # No child of it: checkpoints have the names of stages.
        vars(self)["_plain"] = plain
        self.standardise = None if options.standard is None else Standardise(options.standard)
        self.node_encoder = NodeStage(MLP(plain.node_encoder))
        self.edge_encoder = EdgeStage(MLP(plain.edge_encoder), products, aggregate=aggregate)
        edge_stages = [EdgeStage(MLP(net), products, residual, aggregate) for net in plain.edge_networks]
        node_stages = [NodeStage(MLP(net), residual) for net in plain.node_networks]
        others = {name: NodeStage(MLP(net, readout=True)) for name, net in other_heads}
        num_updates = options.graph_iters - (not self.node_first) + bool(others)
        self.edge_stages = _per_iteration(edge_stages, options.graph_iters)
        self.node_stages = _per_iteration(node_stages, num_updates)
        self.head = None if head is None else EdgeStage(MLP(head, readout=True), products)
        self.other_heads = cast(Mapping[str, NodeStage], nn.ModuleDict(others))
        self.recompute(options.recompute_every)

    @property
    def plain(self) -> nn.Module:
        """The same network in plain torch, with the same parameters."""
        plain: InteractionModule | InteractionGNN = vars(self)["_plain"]
        plain.train(self.training)  # it is no child, so it needs a call
        if self.standardise is not None and isinstance(plain, InteractionModule):  # other tensors, if it was moved
            plain.take_constants(self.standardise)
        return plain

    @property
    def ways_to_recompute(self) -> Sequence[int | None]:
        """Down to segments that are about as long as they are many: then least of all is kept at once."""
        count = self.options.graph_iters
        return (None, *range(count - 1, max(round(count**0.5), 2) - 1, -1))

    def recompute(self, every: int | None) -> None:
        """As for any network; stages that recompute keep no layers."""
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
        """Modules whose backward passes end some time before the last one, each called once in a forward pass.

        All iterations but the first quarter, if each has weights of its own: its backward is longer than any sum.
        """
        late = -(-self.options.graph_iters // 4)
        return () if self.options.shared_weights else (*self.edge_stages[late:], *self.node_stages[late:])

    def exactness(self, transport: Transport) -> Exactness:
        """The same bits, if the self-test of the kernels passes. *Collective*."""
        return Exactness(bitwise=True, problem=rows_are_independent(self.layers, transport))

    def take_from_root(self, world: World) -> None:
        """Nothing to do: its tensors are a function of the seed."""

    def verify(self, edge_index: Tensor, x: Tensor, edge_attr: Tensor) -> str:
        """Nothing to compare: split and whole graph use the same stages, which the self-test checks."""
        return "built on stages: the self-test tries it"

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
        """As for any network on parts."""
        count, num_reads = self.options.graph_iters, min(1, self.num_readouts) if key is None else self.num_readouts
        graph = graph if self.standardise is None else self.standardise(graph)
        states = _Call(self, graph, range(count - num_reads, count), key).states(halo)
        logits = [readout.squeeze(1) for readout in states.readouts]
        # Pooling is no part of an iteration: computed again, it would ask the ranks again.
        others = {
            head.name: pooled(rows, head.usual_nodes, halo.transport) if head.of == "graph" else rows
            for head, rows in zip((head for head in self.heads if head.of != "edge"), states.others)
        }
        edges = torch.stack(logits) if len(logits) > 1 else logits[0] if logits else None
        return Readings(edges, others)


def _per_iteration(stages: Sequence[S], count: int) -> Sequence[S]:
    """A stage for each of `count` iterations; the same one if they share weights."""
    return cast(Sequence[S], nn.ModuleList(stages[iteration % len(stages)] for iteration in range(count)))


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
        options = replace(options, **changes)
        plain = InteractionModule(node_features, edge_features, options)
        super().__init__(plain, options, plain.head, plain.other_heads.items())
        self.to(options.dtype)  # drawn in torch's default type before: networks of a seed begin alike in any type


class InteractionsOnStages(OnStages):
    """`acorn` on stages, see `InteractionGNN`: its layers are MLPs of stages, its iterations passes over the edges.

    Args:
        module: The network. Its parameters are those of the stages; its width must be a multiple of 16.
        recompute_every: See `EdgeClassifier`.
        products: Type of edge states and of their products, if not that of the parameters.

    Attributes:
        module: The network; checkpoints have its names.

    Raises:
        ValueError: If the width is not a multiple of 16, or the types do not go together.
    """

    takes_edge_features = False

    def __init__(
        self, module: InteractionGNN, recompute_every: int | None = None, products: torch.dtype | None = None
    ) -> None:
        options = NetworkOptions(
            graph_iters=module.graph_iters,
            order="node-first",
            shared_weights=True,
            dtype=next(module.parameters()).dtype,
            products=products,
            recompute_every=recompute_every,
            residual=False,
            aggregate="sum",
        )
        super().__init__(module, options, module.output_edge_classifier)
        # Stages are no children, so that each parameter has one name: that in the module.
        vars(self).update(self._modules)
        self._modules.clear()
        self.module = module
        assert set(module.parameters()) == set(self.layers.parameters()), "each parameter is in a stage"

    @property
    def layers(self) -> nn.Module:
        """The stages, by the names of their layers in the module."""
        of_nodes = {"node_encoder": self.node_encoder, "node_networks": self.node_stages[0]}
        of_edges = {"edge_encoder": self.edge_encoder, "edge_networks": self.edge_stages[0]}
        return nn.ModuleDict({**of_nodes, **of_edges, "output_edge_classifier": cast(EdgeStage, self.head)})


class _States(NamedTuple):
    """State between two iterations: of nodes and edges, the sums at nodes if the next one takes them, all readouts.

    `others` are rows of the owned nodes, for each head but that of edges.
    """

    nodes: HaloRows
    edges: Tensor | None
    sums: Tensor | None
    readouts: list[Tensor]
    others: list[Tensor]


class _Call(NamedTuple):
    """One call of a network on stages. *Collective*, forward and backward.

    Attributes:
        network: The network.
        graph: The part, with standardised features.
        reads: Iterations after which edges are read out.
        key: Of random numbers; None: nothing is dropped.
    """

    network: OnStages
    graph: LocalGraph
    reads: Container[int]
    key: int | None

    def key_of(self, *which: int | str) -> int | None:
        """The key of a stage's call."""
        return None if self.key is None else key_of(self.key, *which)

    @property
    def given(self) -> Tensor | None:
        """Edge features, if the network takes any."""
        return self.graph.edge_features if self.network.takes_edge_features else None

    def states(self, halo: CompleteHalo) -> _States:
        """The states after all iterations, of which the passes back keep those that segments begin with."""
        count, every = self.network.options.graph_iters, self.network.recompute_every
        if not torch.is_grad_enabled():
            return self.iterate(range(count), partial(self.first_states, halo), halo)
        states, length = self.first_states(halo), every or count
        for start in range(0, count, length):
            iterations = range(start, min(start + length, count))

            def take(states: _States = states) -> _States:
                return states

            run = partial(self.iterate, iterations, take)
            is_last = iterations.stop == count  # its backward follows at once, so keeping it costs nothing
            states = run(halo) if is_last else recomputed(run, halo)
        return states

    def first_states(self, halo: CompleteHalo) -> _States:
        """The states that the first iteration takes."""
        network, graph = self.network, self.graph
        owned, ghosts = graph.features[: graph.num_owned], graph.features[graph.num_owned :]
        encoder, key = network.node_encoder, self.key_of("node encoder")
        # Raw features of ghosts are read with the part, and rows do not depend on each other: the bits of their owners.
        nodes = halo.join(encoder([owned], graph, key), encoder.run_on_ghosts([ghosts], graph, key))
        if not network.node_first:
            return _States(nodes, self.given, None, [], [])
        keys = [self.key_of("edge encoder")]
        edges, sums, _, same = run_chain([network.edge_encoder], nodes, self.given, graph, sums=True, keys=keys)
        assert same is not None
        return _States(same, edges, sums, [], [])

    def iterate(self, iterations: range, take: Callable[[], _States], halo: HaloSource) -> _States:
        """Some iterations, with a readout after those in `reads`; the last of all leaves readouts alone.

        Args:
            iterations: Which.
            take: Returns the first states; a function, so that no other reference keeps their memory.
            halo: What carries rows to ghosts.
        """
        network, graph = self.network, self.graph
        nodes, edges, sums, readouts, others = take()
        last, reads_nodes = network.options.graph_iters - 1, len(network.other_heads) > 0
        for iteration in iterations:
            if network.node_first:
                nodes, sums = halo.spread(self.updated(nodes, sums, iteration)), None
            # What works on the same states of nodes is one pass over the edges: first states of edges and the first
            # iteration, unless nodes come in between, and an iteration and its readout.
            stages, keys = [network.edge_stages[iteration]], [self.key_of("edges", iteration)]
            if iteration == 0 and not network.node_first:
                stages, keys = [network.edge_encoder, *stages], [self.key_of("edge encoder"), *keys]
            if iteration in self.reads:
                assert network.head is not None
                key = self.key_of("head") if iteration == last else self.key_of("head", iteration)
                stages, keys = [*stages, network.head], [*keys, key]
            goes_on = iteration < last
            own = edges is not self.given
            edges, sums, readout, same = run_chain(
                stages, nodes, edges, graph, sums=goes_on or reads_nodes, keeps=goes_on, overwrites=own, keys=keys
            )
            assert same is not None
            nodes, readouts = same, readouts if readout is None else [*readouts, readout]
            del same  # else what replaces it would be held beside it
            if not network.node_first and goes_on:
                nodes, sums = halo.spread(self.updated(nodes, sums, iteration)), None
            elif reads_nodes and not goes_on:
                owned = self.updated(nodes, sums, len(network.node_stages) - 1)
                heads = network.other_heads.items()
                others = [head([owned], graph, self.key_of("head", name)) for name, head in heads]
                sums = None
        return _States(nodes, edges, sums, readouts, others)

    def updated(self, nodes: HaloRows, sums: Tensor | None, number: int) -> Tensor:
        """New states of owned nodes, by one of the node stages."""
        assert sums is not None
        key = self.key_of("nodes", number)
        states: Tensor = self.network.node_stages[number]([nodes.owned, sums], self.graph, key)
        return states
