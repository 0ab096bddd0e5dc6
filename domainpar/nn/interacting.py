"""How interaction networks use their stages: encode, iterate, read out. For that of this package and acorn's."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from domainpar.nn.noise import key_of
from domainpar.nn.recompute import HaloSource, iterated
from domainpar.nn.stages import EdgeStage, NodeStage, run_chain
from domainpar.parallel.halo import CompleteHalo, HaloRows
from domainpar.parallel.local import LocalGraph


class States(NamedTuple):
    """State between two iterations: of nodes and edges, the sums at nodes if the next one takes them, all readouts.

    `others` are rows of the owned nodes, for each head but that of edges.
    """

    nodes: HaloRows
    edges: Tensor | None
    sums: Tensor | None
    readouts: list[Tensor]
    others: list[Tensor]


class Interactions(NamedTuple):
    """The stages of an interaction network, in the order in which they work.

    Attributes:
        node_first: Whether an iteration updates nodes before edges.
        node_encoder, edge_encoder: Make first states.
        edge_stages, node_stages: One of each iteration, of nodes one more if other heads read them.
        head: Reads edges out; None: nobody does.
        other_heads: Read owned nodes out, by name.
        takes_edge_features: Whether the encoder of edges does.
        key: Of random numbers; None: nothing is dropped.
    """

    node_first: bool
    node_encoder: NodeStage
    edge_encoder: EdgeStage
    edge_stages: Sequence[EdgeStage]
    node_stages: Sequence[NodeStage]
    head: EdgeStage | None
    other_heads: Mapping[str, NodeStage]
    takes_edge_features: bool = True
    key: int | None = None

    def states(
        self, graph: LocalGraph, halo: CompleteHalo, reads: Container[int], recompute_every: int | None
    ) -> States:
        """The states after all iterations, with a readout after each in `reads`. *Collective*, forward and backward."""
        first, iterate = partial(self._first_states, graph, halo), partial(self._iterate, reads, graph)
        states: States = iterated(first, iterate, len(self.edge_stages), recompute_every, halo)
        return states

    def _of(self, *which: int | str) -> int | None:
        """The key of a stage's call."""
        return None if self.key is None else key_of(self.key, *which)

    def _given(self, graph: LocalGraph) -> Tensor | None:
        return graph.edge_features if self.takes_edge_features else None

    def _first_states(self, graph: LocalGraph, halo: CompleteHalo) -> States:
        owned, ghosts = graph.features[: graph.num_owned], graph.features[graph.num_owned :]
        encoder, key = self.node_encoder, self._of("node encoder")
        # Raw features of ghosts are read with the part, and rows do not depend on each other: the bits of their owners.
        nodes = halo.join(encoder([owned], graph, key), encoder.of_ghosts([ghosts], graph, key))
        if not self.node_first:
            return States(nodes, self._given(graph), None, [], [])
        keys = [self._of("edge encoder")]
        edges, sums, _, same = run_chain([self.edge_encoder], nodes, self._given(graph), graph, sums=True, keys=keys)
        assert same is not None
        return States(same, edges, sums, [], [])

    def _iterate(
        self, reads: Container[int], graph: LocalGraph, iterations: range, take: Callable[[], States], halo: HaloSource
    ) -> States:
        """Some iterations, with a readout after those in `reads`; the last of all leaves readouts alone."""
        nodes, edges, sums, readouts, others = take()
        last, reads_nodes = len(self.edge_stages) - 1, len(self.other_heads) > 0
        for iteration in iterations:
            if self.node_first:
                nodes, sums = self._update(nodes, sums, iteration, graph, halo), None
            # What works on the same states of nodes is one pass over the edges: first states of edges and the first
            # iteration, unless nodes come in between, and an iteration and its readout.
            stages, keys = [self.edge_stages[iteration]], [self._of("edges", iteration)]
            if iteration == 0 and not self.node_first:
                stages, keys = [self.edge_encoder, *stages], [self._of("edge encoder"), *keys]
            if iteration in reads:
                assert self.head is not None
                key = self._of("head") if iteration == last else self._of("head", iteration)
                stages, keys = [*stages, self.head], [*keys, key]
            goes_on = iteration < last
            own = edges is not self._given(graph)
            edges, sums, readout, same = run_chain(
                stages, nodes, edges, graph, sums=goes_on or reads_nodes, keeps=goes_on, overwrites=own, keys=keys
            )
            assert same is not None
            nodes, readouts = same, readouts if readout is None else [*readouts, readout]
            del same  # else what replaces it would be held beside it
            if not self.node_first and goes_on:
                nodes, sums = self._update(nodes, sums, iteration, graph, halo), None
            elif reads_nodes and not goes_on:
                owned = self._updated(nodes, sums, len(self.node_stages) - 1, graph)
                others = [head([owned], graph, self._of("head", name)) for name, head in self.other_heads.items()]
                sums = None
        return States(nodes, edges, sums, readouts, others)

    def _update(
        self, nodes: HaloRows, sums: Tensor | None, iteration: int, graph: LocalGraph, halo: HaloSource
    ) -> HaloRows:
        """New states of nodes, on their way to the ghosts."""
        return halo.spread(self._updated(nodes, sums, iteration, graph))

    def _updated(self, nodes: HaloRows, sums: Tensor | None, number: int, graph: LocalGraph) -> Tensor:
        """New states of owned nodes, by one of the node stages."""
        assert sums is not None
        states: Tensor = self.node_stages[number]([nodes.owned, sums], graph, self._of("nodes", number))
        return states
