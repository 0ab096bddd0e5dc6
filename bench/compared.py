"""The models that `parallelized.py` compares, bare or wrapped, with the graphs that they are called with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch_geometric.nn as pyg
from plain_pyg import PlainInteraction
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.data import Data

from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.published import AttentionNetwork
from domainpar.parallel.world import World
from domainpar.tracking.planner.steps import PRECISIONS

SIZES: dict[str, dict[str, Any]] = {
    "small": {"hits": 2_000, "phi_slope": 6e-3, "z0": 1000.0, "data": None},
    "middle": {"hits": 20_000, "phi_slope": 6e-4, "z0": 1000.0, "data": None},
    "large": {},
}
"""Flags of each size in place of given ones: 2e3 nodes and 2e4 edges, 2e4 and 2e5, and the event that was asked for."""

TINY_NODES, TINY_EDGES = 12, 36
DROPOUT = 0.5


@dataclass(frozen=True)
class Network:
    """One model of the comparison.

    Attributes:
        make: Builds it with torch's generator, for a graph and with the sizes of some flags.
        scores: What it returns a row for.
        edges: The edges its parts compute on.
        takes: Fields of a graph it is called with.
    """

    make: Callable[[Data, Any], nn.Module]
    scores: Literal["nodes", "edges"] = "nodes"
    edges: Literal["incoming", "incident"] = "incoming"
    takes: tuple[str, ...] = ("x", "edge_index")


def of_pyg(name: str, **options: Any) -> Network:
    """A model of `torch_geometric.nn.models`: convolutions with ReLU, and perhaps norms and dropout, between them."""

    def make(graph: Data, sizes: Any) -> nn.Module:
        further: dict[str, Any] = {}
        if name == "PNA":  # wants to know how many nodes have 0, 1, 2 ... incoming edges
            further["deg"] = torch.bincount(torch.bincount(graph.edge_index[1], minlength=graph.num_nodes))
        widths = graph.num_node_features, sizes.hidden, sizes.layers, sizes.hidden
        model: nn.Module = getattr(pyg, name)(*widths, **options, **further)
        return model

    return Network(make)


def interaction(graph: Data, sizes: Any) -> nn.Module:
    """The edge classifier whose edges have states."""
    return PlainInteraction(graph.num_node_features, graph.num_edge_features, sizes.hidden, sizes.graph_iters)


def agnn(graph: Data, sizes: Any) -> nn.Module:
    """The attention network."""
    return AttentionNetwork(graph.num_node_features, hidden=sizes.hidden, graph_iters=sizes.graph_iters)


PNA = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]}
NETWORKS = {
    "GCN": of_pyg("GCN"),
    f"GCN, dropout {DROPOUT}": of_pyg("GCN", dropout=DROPOUT),
    "GAT": of_pyg("GAT", heads=4),
    f"GAT, dropout {DROPOUT}": of_pyg("GAT", heads=4, dropout=DROPOUT),
    "GATv2": of_pyg("GAT", heads=4, v2=True),
    "GraphSAGE, BatchNorm": of_pyg("GraphSAGE", norm="batch_norm"),
    "GIN": of_pyg("GIN"),
    "PNA": of_pyg("PNA", **PNA),
    "EdgeCNN": of_pyg("EdgeCNN"),
    "interaction": Network(interaction, "edges", "incident", ("x", "edge_index", "edge_attr")),
    "agnn": Network(agnn, "edges", "incident"),
}
_ONE_AT_A_TIME = threading.Lock()  # ranks may be threads, and torch has one generator


def make(name: str, graph: Data, sizes: Any) -> nn.Module:
    """A model for a graph, of the sizes in some flags, with weights by their seed alone."""
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(sizes.seed)
        return NETWORKS[name].make(graph, sizes).to(PRECISIONS[sizes.dtype])


def tiny_graph(like: Data) -> Data:
    """A graph on which torch has next to nothing to do."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(TINY_NODES, (2, TINY_EDGES), generator=generator)
    edge_index[1, :TINY_NODES] = torch.arange(TINY_NODES)
    edges = {name: like[name][:TINY_EDGES] for name in ("edge_attr", "y")}
    return Data(x=like.x[:TINY_NODES], edge_index=edge_index, **edges)


@dataclass(frozen=True, eq=False)
class Runner:
    """A model, bare or wrapped, with all it is called with.

    Attributes:
        model: The model.
        arguments: Its arguments.
        label: Of the rows that come back; None for scores of nodes, whose squares are the loss.
        num_rows: Rows of the whole graph.
    """

    model: nn.Module
    arguments: tuple[Tensor, ...]
    label: Tensor | None
    num_rows: int

    @classmethod
    def bare(cls, module: nn.Module, network: Network, graph: Data) -> Runner:
        nodes, arguments = network.scores == "nodes", tuple(graph[name] for name in network.takes)
        return cls(module, arguments, None if nodes else graph.y, graph.num_nodes if nodes else graph.num_edges)

    @classmethod
    def wrapped(cls, module: nn.Module, network: Network, graph: Data, part: GraphPart, world: World) -> Runner:
        marked = {"x": part.nodes(graph.x), "edge_index": part.edge_index, "edge_attr": part.edges(graph.edge_attr)}
        whole = cls.bare(parallelize(module, world), network, graph)
        label = None if whole.label is None else part.owned_edges(whole.label)
        return replace(whole, arguments=tuple(marked[name] for name in network.takes), label=label)

    def loss(self) -> Tensor:
        """The forward pass: this rank's share of the mean over all rows."""
        rows = self.model(*self.arguments)
        if self.label is None:
            return rows.square().sum() / (self.num_rows * rows.shape[1])
        return binary_cross_entropy_with_logits(rows, self.label, reduction="sum") / self.num_rows

    def step(self) -> dict[str, float]:
        """Seconds of forward and backward, by the clock and of the processor."""
        self.model.zero_grad()
        began, times = time.process_time(), [time.perf_counter()]
        loss = self.loss()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        cpu, (forward, backward) = time.process_time() - began, np.diff(times).tolist()
        return {"total": times[-1] - times[0], "forward": forward, "backward": backward, "cpu": cpu}

    def outcome(self, drops: bool) -> tuple[float, Tensor]:
        """Loss and gradient of a step without dropout, of all parameters in one row."""
        self.model.train(not drops)
        self.model.zero_grad()
        loss = self.loss()
        loss.backward()
        self.model.train()
        return float(loss.detach()), gradient_of(self.model)


def gradient_of(model: nn.Module) -> Tensor:
    """Of all parameters in one row; zero where none came."""
    gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients])


def difference(mine: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> float:
    """Of two outcomes: of the losses, or of the gradients against the largest one; the larger."""
    of_loss = abs(mine[0] - theirs[0]) / abs(theirs[0])
    of_gradient = float((mine[1] - theirs[1]).abs().max() / theirs[1].abs().max())
    return largest([of_loss, of_gradient])


def largest(values: Iterable[float]) -> float:
    """NaN if one of them is, or if there are none."""
    return float(np.max([*values] or [np.nan]))
