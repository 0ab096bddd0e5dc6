"""A model run whole, or split over ranks that are threads, with everything that its layers saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.part import GraphPart, split_graph
from domainpar.nn.adapt.verifying.arguments import Inputs
from domainpar.nn.adapt.verifying.failing import Failure, first_failure
from domainpar.nn.adapt.verifying.float64 import doubled, doubled_module
from domainpar.nn.adapt.verifying.loss import weighted_sum
from domainpar.nn.adapt.verifying.recording import Layer, Recorder
from domainpar.nn.adapt.verifying.report import LayerCheck
from domainpar.parallel.world import World
from domainpar.plan import EdgePolicy, IntArray


class OneRank:
    """What one rank runs and made.

    Attributes:
        module: Its copy of the model.
        recorder: What the layers of it saw.
        result: What it returned.
        exchanges: How often ghosts were filled in the forward pass.
        sums: How often something was summed over ranks in it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.recorder = Recorder(module)
        self.result: Any = None
        self.exchanges = self.sums = 0

    @property
    def running(self) -> LayerCheck:
        """The layer that it is in, or was in when it failed."""
        running = self.recorder.running
        return self.call_of(running[-1] if running else Layer("", 1))

    def call_of(self, layer: Layer) -> LayerCheck:
        """A call of a layer with its class, nothing compared yet."""
        return LayerCheck(layer.name, self.recorder.kinds[layer.name], layer.number, None)


@dataclass
class Run:
    """One run of a model, whole or on several ranks.

    Attributes:
        ranks: What each of them did; one if it was whole.
        backward_done: Whether the parameters have their gradients.
        failure: What first went wrong.
    """

    ranks: Sequence[OneRank]
    backward_done: bool = False
    failure: Failure | None = None

    @property
    def refused(self) -> str | None:
        """Why the model has no exact form, None if it was not refused."""
        return str(self.failure.error) if self.failure is not None and self.failure.refuses else None

    @property
    def failed(self) -> str | None:
        """Where it failed; if in a talk of ranks, also where that rank was which is behind the others."""
        failure = self.failure
        if failure is None or failure.refuses:
            return None
        here = str(self.ranks[failure.rank].running)
        behind = min(range(len(self.ranks)), key=lambda rank: len(self.ranks[rank].recorder.moments))
        there = str(self.ranks[behind].running)
        if failure.talking and there != here:
            return f"{here}: {failure}; rank {behind} was in {there} then, where it called for what others did not"
        return f"{here}: {failure}"


@dataclass(frozen=True)
class Trial:
    """What is run, and on what.

    Attributes:
        module: The user's model, which is copied.
        edge_index: `src` and `dst` of each edge, int64 [2, E].
        num_nodes: Nodes of the graph.
        inputs: Makes the arguments from a part.
        edges: Which edges a part computes on.
        backward: Whether gradients are computed, too.
        seed: Of random numbers.
        assignment: The part of each node, [N].
        num_parts: Parts with nodes.
        patience: Seconds that a rank waits for the others.
        mode: `eval` to set the copies to evaluation, else empty.
    """

    module: nn.Module
    edge_index: Tensor
    num_nodes: int
    inputs: Inputs
    edges: EdgePolicy
    backward: bool
    seed: int
    assignment: IntArray
    num_parts: int
    patience: float
    mode: str = ""

    @property
    def num_ranks(self) -> int:
        """One more than parts if there are several others: it owns nothing."""
        return self.num_parts + (self.num_parts > 2)

    @property
    def ranks_in_words(self) -> str:
        """The ranks of a split run."""
        if self.num_parts == 1:
            return "1 rank"
        empty = ", one of which owns nothing" if self.num_parts > 2 else ""
        return f"{self.num_ranks} ranks ({self.edges} edges, nodes dealt at random{empty})"

    def bare(self) -> tuple[Run, bool]:
        """The module itself on the whole graph, and whether torch drew random numbers for it."""
        rank = self._one_rank()
        args, kwargs = self._arguments(self._part(World.alone()))
        torch.manual_seed(self.seed)
        before = torch.get_rng_state()
        try:
            rank.result = rank.module(*args, **kwargs)
        except Exception as error:
            error.add_note("This was the whole graph, not split, with a copy of the model in float64 on the CPU.")
            raise
        rank.recorder.stop()
        return Run([rank]), not torch.equal(before, torch.get_rng_state())

    def split(self, num_ranks: int) -> Run:
        """The module on a split graph, forward and backward, up to where it fails."""
        ranks = [self._one_rank() for _ in range(num_ranks)]
        return Run(ranks, self.backward, first_failure(partial(self._on_rank, ranks), num_ranks, self.patience))

    def _on_rank(self, ranks: Sequence[OneRank], world: World) -> None:
        rank = ranks[world.rank]
        parallel = parallelize(rank.module, world, seed=self.seed)
        part = self._part(world)
        args, kwargs = self._arguments(part)
        rank.result = parallel(*args, **kwargs)
        rank.recorder.stop()
        rank.exchanges, rank.sums = part.num_exchanges, part.num_sums
        world.transport.all_gather(b"")  # every rank to the end of its forward pass, before one fails in backward
        loss = weighted_sum(rank.result, rank.recorder.result()) if self.backward else None
        if loss is not None:
            loss.backward()

    def _one_rank(self) -> OneRank:
        module = doubled_module(self.module)
        return OneRank(module.eval() if self.mode == "eval" else module)

    def _part(self, world: World) -> GraphPart:
        assignment = self.assignment if world.size > 1 else self.assignment * 0
        return split_graph(self.edge_index, self.num_nodes, world, edges=self.edges, partitioner=assignment)

    def _arguments(self, part: GraphPart) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = doubled(self.inputs(part))
        if isinstance(made, dict):
            return (), made
        return (made if isinstance(made, tuple) else (made,)), {}
