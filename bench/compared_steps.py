"""One step of a compared model, bare or wrapped: its seconds, its outcome, and how far two outcomes are apart."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from compared_models import Graph, Network
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.part import GraphPart
from domainpar.parallel.world import World


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
    def bare(cls, module: nn.Module, network: Network, graph: Graph) -> Runner:
        arguments = tuple(getattr(graph, name) for name in network.takes)
        if network.scores == "nodes":
            return cls(module, arguments, None, graph.num_nodes)
        return cls(module, arguments, graph.label, graph.num_edges)

    @classmethod
    def wrapped(cls, module: nn.Module, network: Network, graph: Graph, part: GraphPart, world: World) -> Runner:
        marked = {"x": part.nodes(graph.x), "edge_index": part.edge_index, "edge_attr": part.edges(graph.edge_attr)}
        arguments, model = tuple(marked[name] for name in network.takes), parallelize(module, world)
        if network.scores == "nodes":
            return cls(model, arguments, None, graph.num_nodes)
        return cls(model, arguments, part.owned_edges(graph.label), graph.num_edges)

    def loss(self) -> Tensor:
        """The forward pass: this rank's share of the mean over all rows."""
        found = self.model(*self.arguments)
        if self.label is None:
            return found.square().sum() / (self.num_rows * found.shape[1])
        return binary_cross_entropy_with_logits(found, self.label, reduction="sum") / self.num_rows

    def step(self) -> dict[str, float]:
        """Seconds of forward and backward, by the clock and of the processor."""
        self.model.zero_grad()
        began_cpu, began = time.process_time(), time.perf_counter()
        loss = self.loss()
        between = time.perf_counter()
        loss.backward()
        ended, ended_cpu = time.perf_counter(), time.process_time()
        return {
            "total": ended - began,
            "forward": between - began,
            "backward": ended - between,
            "cpu": ended_cpu - began_cpu,
        }

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
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    return torch.cat([one.flatten() for one in grads])


def difference(mine: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> float:
    """Of two outcomes: of the losses, or of the gradients against the largest one; the larger."""
    of_loss = abs(mine[0] - theirs[0]) / abs(theirs[0])
    of_gradient = float((mine[1] - theirs[1]).abs().max() / theirs[1].abs().max())
    return largest([of_loss, of_gradient])


def largest(values: Iterable[float]) -> float:
    """NaN if one of them is, or if there are none."""
    found = torch.tensor(list(values), dtype=torch.float64)
    return float(found.max()) if len(found) else float("nan")
