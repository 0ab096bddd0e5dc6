"""Trial runs of a module for `verify`: bare on the whole graph, and on ranks that are threads."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from domainpar.common import timeouts
from domainpar.nn.adapt.gradient_sums import GradientSums, dense_gradient
from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.adapt.recorder import Recorder, SeenTensor, as_numbers
from domainpar.nn.adapt.rows import NotExact
from domainpar.nn.adapt.split import split_graph
from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.plan import EdgePolicy, IntArray

Inputs = Callable[[GraphPart, Mapping[str, Tensor]], Any]


class Failure(NamedTuple):
    """An error of a rank.

    Attributes:
        error: The error.
        rank: On which rank.
        talking: Whether it was raised by a talk of ranks.
    """

    error: BaseException
    rank: int
    talking: bool

    @property
    def refuses(self) -> bool:
        """Whether it says that the model has no exact form."""
        return isinstance(self.error, NotExact)

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def failures_of(work: Callable[[World], None], num_ranks: int, patience: float) -> list[Failure]:
    """Run something on ranks that are threads; the errors of ranks: refusals first, those caused by others last.

    Args:
        work: The work of each rank.
        num_ranks: Ranks to run.
        patience: Seconds that a rank waits for the others; how long it computes itself is nobody's business.
    """
    failures: list[Failure] = []
    everyone = threading.Barrier(num_ranks)

    def attempt(world: World) -> None:
        world.transport.board = None  # nobody makes marks here: where a rank was is told by its layer
        try:
            work(world)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            talking = any("parallel" in Path(frame.filename).parts for frame in frames)
            failures.append(Failure(error, world.rank, talking))
            if not isinstance(error, NotExact):
                everyone.abort()
                raise
            # A rank that fails stops the others. They are to come to a refusal of the whole model by themselves.
            try:
                everyone.wait(min(patience, timeouts.REFUSAL))
            except threading.BrokenBarrierError:
                raise error from None
            return
        # A rank that refuses waits until all have failed or are done.
        with contextlib.suppress(threading.BrokenBarrierError):
            everyone.wait(patience)

    try:
        run_threads(attempt, num_ranks, timeout=math.inf, deadline=patience, domain_size=num_ranks)
    except BaseException as error:
        if all(error is not failure.error for failure in failures):
            raise
    return sorted(failures, key=lambda failure: (not failure.refuses, isinstance(failure.error, RanksFailed)))


@dataclass
class OneRank:
    """The run of one rank.

    Attributes:
        module: Its copy of the model.
        leaves: Its copies of the inputs whose gradients are compared.
        recorder: The record of its layers.
        result: The result of the module, as its caller gets it.
        gradients: Gradients of inputs and parameters, by name, after the backward pass of this rank.
        summed: Gradients of parameters summed over ranks; None if some are not finite or were not computed.
        exchanges: How often ghost rows were fetched in the forward pass.
        sums: How often something was summed over ranks in the forward pass.
        calls: Number of collective calls.
    """

    module: nn.Module
    leaves: Mapping[str, Tensor]
    recorder: Recorder
    result: Any = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    summed: dict[str, Tensor] | None = None
    exchanges: int = 0
    sums: int = 0
    calls: int = 0

    def results(self) -> list[SeenTensor]:
        """The tensors of the result."""
        pairs = zip(tensors_in(self.result), self.recorder.result(), strict=True)
        return [seen.returned_as(tensor) for tensor, seen in pairs]

    def state(self) -> dict[str, Tensor]:
        """Buffers and parameters as the run left them."""
        state = {**dict(self.module.named_buffers()), **dict(self.module.named_parameters())}
        return {name: as_numbers(tensor) for name, tensor in state.items()}

    def learn(self, whole: Sequence[SeenTensor]) -> None:
        """The backward pass of a sum of all results, with weights that depend on the key of each row.

        So the loss is the same, whole and split.

        Args:
            whole: The results with their keys: of this rank, or merged from all ranks for a run on the whole graph.
        """
        pairs = zip(tensors_in(self.result), whole, strict=True)
        terms = [_weighted_sum(tensor, seen) for tensor, seen in pairs if tensor.requires_grad]
        if terms:
            sum(terms[1:], terms[0]).backward()
        inputs = {f"input {name}": as_numbers(dense_gradient(leaf)) for name, leaf in self.leaves.items()}
        self.gradients = inputs | self.of_parameters()

    def of_parameters(self) -> dict[str, Tensor]:
        """The gradients that are in the parameters now."""
        parameters = self.module.named_parameters()
        return {name: as_numbers(dense_gradient(tensor)) for name, tensor in parameters if tensor.requires_grad}


def _weighted_sum(tensor: Tensor, seen: SeenTensor) -> Tensor:
    """A sum in which every number has a weight of its own, so that no two gradients can be taken for each other."""
    first = tensor.flatten() if seen.dim is None else tensor.movedim(seen.dim, 0)
    table = first.flatten(1) if first.dim() > 1 else first.unsqueeze(1)
    keys = torch.arange(len(table), device=table.device) if seen.dim is None else seen.keys
    # Steps that share no period with each other or with the sine: no two rows or columns weigh the same.
    weights = torch.sin(1.7 * keys.double()[:, None] + 0.9 * torch.arange(table.size(1), device=table.device) + 0.3)
    return (table * weights).abs().sum() if tensor.is_complex() else (table * weights).sum()


@dataclass
class TrialRun:
    """One run of a module, bare or on several ranks.

    Attributes:
        ranks: The run of each of them; one if it was bare.
        failures: Errors of ranks: refusals first, those caused by others last.
    """

    ranks: Sequence[OneRank]
    failures: Sequence[Failure] = ()

    @property
    def failure(self) -> Failure | None:
        """The first of the errors."""
        return self.failures[0] if self.failures else None

    @property
    def refused(self) -> str | None:
        """Why the model has no exact form, None if it was not refused."""
        return str(self.failure.error) if self.failure is not None and self.failure.refuses else None

    @property
    def failed(self) -> str | None:
        """Where it failed; if in a talk of ranks, also where that rank was which is behind the others."""
        if (failure := self.failure) is None:
            return self.uneven
        if failure.refuses:
            return None
        here = self.ranks[failure.rank].recorder.place
        behind = min(range(len(self.ranks)), key=lambda rank: len(self.ranks[rank].recorder.moments))
        there = self.ranks[behind].recorder.place
        if failure.talking and there != here:
            return f"{here}: {failure}; rank {behind} was in {there} then, where it called for what others did not"
        return f"{here}: {failure}"

    @property
    def uneven(self) -> str | None:
        """How the ranks came to different ends; None if they did not."""
        kinds = {failure.rank: type(failure.error).__name__ for failure in self.failures}
        ends = [
            f"{kinds.get(number, 'a result')} after {rank.exchanges} exchanges, {rank.sums} sums, {rank.calls} calls"
            for number, rank in enumerate(self.ranks)
        ]
        return None if len(set(ends)) == 1 else f"ranks came to different ends: {ends}"


@dataclass(frozen=True)
class Trial:
    """A module to be run, and a graph to run it on.

    Attributes:
        module: The module, which is copied.
        edge_index: `src` and `dst` of each edge, int64 [2, E].
        num_nodes: Nodes of the graph.
        inputs: Makes the arguments from a part and its copies of the leaves: a tuple, a dictionary, or the only one.
        assignment: The part of each node, [N].
        edges: Which edges a part computes on.
        leaves: Whole tensors, by name, whose gradients are compared.
        backward: Whether gradients are computed, too.
        seed: Of random numbers.
        recompute_every: Of runs on ranks, as for `parallelize`.
        patience: Seconds that a rank waits for the others.
        calls: How often the module is called; the last one counts.
    """

    module: nn.Module
    edge_index: Tensor
    num_nodes: int
    inputs: Inputs
    assignment: IntArray
    edge_policy: EdgePolicy = "incoming"
    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    backward: bool = True
    seed: int = 0
    recompute_every: int | None = None
    patience: float = 60.0
    calls: int = 1

    def bare(self) -> tuple[TrialRun, bool]:
        """The module itself on the whole graph, and whether torch drew random numbers for it."""
        rank, part = self._one_rank(), self._part(World.alone())
        torch.manual_seed(self.seed)  # so that a second run on the whole graph drops the same
        before = torch.get_rng_state()
        for _ in range(self.calls):
            args, kwargs = self._arguments(part, rank)
            try:
                rank.result = rank.module(*args, **kwargs)
            except Exception as error:
                error.add_note("This was the whole graph, not split; verify takes a copy in float64 on the CPU.")
                raise
        rank.recorder.stop()
        return TrialRun([rank]), not torch.equal(before, torch.get_rng_state())

    def split(self, num_ranks: int) -> TrialRun:
        """The module on a split graph, forward and backward, up to where it fails."""
        ranks = [self._one_rank() for _ in range(num_ranks)]
        return TrialRun(ranks, failures_of(partial(self._on_rank, ranks), num_ranks, self.patience))

    def _on_rank(self, ranks: Sequence[OneRank], world: World) -> None:
        rank, part = ranks[world.rank], self._part(world)
        try:
            parallel = parallelize(rank.module, world, seed=self.seed, recompute_every=self.recompute_every)
            args, kwargs = self._arguments(part, rank)
            for _ in range(self.calls):
                rank.result = parallel(*args, **kwargs)
            rank.recorder.stop()
            world.transport.all_gather(b"")  # every rank to the end of its forward pass, before one fails in backward
            if self.backward:
                rank.learn(rank.results())
                if not GradientSums(rank.module).reduce(world.transport):
                    rank.summed = rank.of_parameters()
        finally:  # also of a rank that failed: ranks are to fail after the same calls
            rank.exchanges, rank.sums, rank.calls = part.num_exchanges, part.num_sums, world.transport.num_calls

    def _one_rank(self) -> OneRank:
        module = copy.deepcopy(self.module)
        leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in self.leaves.items()}
        return OneRank(module, leaves, Recorder(module))

    def _part(self, world: World) -> GraphPart:
        assignment = self.assignment if world.size > 1 else self.assignment * 0
        return split_graph(self.edge_index, self.num_nodes, world, edge_policy=self.edge_policy, partitioner=assignment)

    def _arguments(self, part: GraphPart, rank: OneRank) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = self.inputs(part, rank.leaves)
        if isinstance(arguments, dict):
            return (), arguments
        return (arguments if isinstance(arguments, tuple) else (arguments,)), {}
