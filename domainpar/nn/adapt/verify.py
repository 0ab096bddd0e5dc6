"""Does a model give on a split graph what it gives on the whole one? If not: in which layer does it first differ?

The watch over a forward pass sees torch calls. It does not see Python: a counter in a global, what was
kept from an earlier call, the number of a rank. This is the look at the results themselves, on a small graph, before a
long run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from domainpar import timeouts
from domainpar.nn.adapt.arguments import doubled, doubled_module, edges_and_size, inputs_from, leaves_of
from domainpar.nn.adapt.differences import compare_layers, compare_runs
from domainpar.nn.adapt.parallelize import Parallel
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.adapt.trial import Run, Trial
from domainpar.nn.adapt.verification import LayerCheck, Verification, Worst, agrees
from domainpar.plan import EdgePolicy

__all__ = ["LayerCheck", "Verification", "Worst", "verify"]

DRAWS = "It draws random numbers: compared with itself on one rank"


def verify(
    module: nn.Module,
    graph: Any,
    parts: int = 3,
    *,
    inputs: Callable[[GraphPart], Any] | None = None,
    edges: EdgePolicy = "incoming",
    backward: bool = True,
    tolerance: float = 1e-10,
    seed: int = 0,
) -> Verification:
    """Run a model whole and split over threads of this process, and compare every call of every layer.

    Copies of it run in float64 on the CPU; the model itself is left as it is. Nodes are dealt to parts at random, which
    no real split does, so that as many edges as can be are cut; with more than two parts there is one rank more, which
    owns nothing. A model that drops numbers at random, which torch draws in another way, is compared with itself on one
    rank, and in evaluation with the module alone.

    Args:
        module: The model, in the mode in which it is to be compared.
        graph: A PyG `Data`, or `(edge_index, num_nodes)`. Of a `Data`, x, pos, batch, y, z, node_* and *_mask have a
            row for each node, edge_* one for each edge.
        parts: Parts with nodes.
        inputs: Makes the model's arguments from a part, with part.nodes(x) and so on: a tuple, a dictionary of them by
            name, or the only one. Called for the whole graph as one part, then on each rank. None: the fields of
            `graph` that `forward` names, or `graph` itself if the only argument is called data or batch.
        edges: As for `split_graph`.
        backward: Whether to compare gradients too, of a sum of the results with weights of all sizes: those of
            parameters, and of fields of a `Data` that want one.
        tolerance: The largest relative difference that is rounding.
        seed: Of the parts of nodes and of dropout.

    Returns:
        The comparison; `.check()` raises if the model is not exact.

    Raises:
        ValueError: If arguments cannot be made from the graph.
        Exception: What the module raises on the whole graph.
    """
    module = module.module if isinstance(module, Parallel) else module
    edge_index, num_nodes = edges_and_size(graph)
    if parts < 1:
        raise ValueError(f"a graph cannot be split into {parts} parts; pass 1 or more.")
    state = [*module.parameters(), *module.buffers()]
    if any(isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) for tensor in state):
        raise ValueError("the module has parameters whose size is not known yet; run it once, so that they get it.")
    arguments = inputs_from(module, graph) if inputs is None else (lambda part, _: inputs(part))
    at_random = torch.Generator().manual_seed(seed)
    trial = Trial(
        module=doubled_module(module),
        edge_index=edge_index,
        num_nodes=num_nodes,
        inputs=lambda part, leaves: doubled(arguments(part, leaves)),
        assignment=torch.randint(0, parts, (num_nodes,), generator=at_random).numpy(),
        edges=edges,
        leaves=leaves_of(graph),
        backward=backward,
        seed=seed,
        patience=timeouts.SMALL_GRAPH,
    )
    with _on_our_terms():
        return _Verifier(trial, parts, tolerance).judged()


@contextmanager
def _on_our_terms() -> Iterator[None]:
    """Float64 for what models make themselves, one thread, random numbers that nobody misses; all put back."""
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)


class _Verifier:
    """Runs a trial whole and split, and judges.

    Args:
        trial: The model and its graph.
        parts: Parts with nodes.
        tolerance: The largest relative difference that is rounding.
    """

    def __init__(self, trial: Trial, parts: int, tolerance: float) -> None:
        self._trial, self._tolerance = trial, tolerance
        self._num_ranks = parts + (parts > 2)
        empty = ", one of which owns nothing" if parts > 2 else ""
        several = f"{self._num_ranks} ranks ({trial.edges} edges, nodes dealt at random{empty})"
        self._ranks = "1 rank" if parts == 1 else several

    def judged(self) -> Verification:
        """Split against whole; a model that draws random numbers against itself on one rank, and in evaluation."""
        trial = self._trial
        bare, draws = trial.bare()
        if not draws:
            return self._compared(trial, bare, lambda: trial.bare()[0])
        alone = trial.split(1)
        if alone.refused is not None:
            return Verification(False, (), refused=alone.refused, tolerance=self._tolerance, ranks=self._ranks)
        if alone.failure is not None:
            raise alone.failure.error
        training = self._compared(trial, alone, lambda: trial.split(1))
        calm = replace(trial, module=copy.deepcopy(trial.module).eval())
        bare, draws = calm.bare()
        if draws:
            remark = f"{DRAWS} only, as it draws them in evaluation too."
            return replace(training, remarks=(*training.remarks, remark))
        return _both(self._compared(calm, bare, lambda: calm.bare()[0], mode="eval"), training)

    def _compared(self, trial: Trial, whole: Run, again: Callable[[], Run], mode: str = "") -> Verification:
        split = trial.split(self._num_ranks)
        rows, first = compare_layers(whole, split, self._tolerance)
        verification = Verification(
            exact=False,
            rows=tuple(replace(row, mode=mode) for row in rows),
            first_difference=None if first is None else replace(first, mode=mode),
            refused=split.refused,
            failed=split.failed,
            exchanges=split.ranks[0].exchanges,
            sums=split.ranks[0].sums,
            tolerance=self._tolerance,
            ranks=self._ranks,
            remarks=() if first is None else tuple(self._remarks(whole, again(), rows)),
        )
        if split.failure is not None:
            return verification
        differences = compare_runs(whole, split)
        kinds = (differences.results, differences.gradients if first is None else (), differences.state)
        results, gradients, buffers = (max(kind, default=None) for kind in kinds)
        exact = first is None and split.uneven is None and results is not None
        exact = exact and all(agrees(worst, self._tolerance) for worst in (results, gradients, buffers))
        return replace(verification, exact=exact, results=results, gradients=gradients, buffers=buffers)

    def _remarks(self, whole: Run, again: Run, rows: tuple[LayerCheck, ...]) -> Iterator[str]:
        """Other possible reasons of a difference."""
        _, unsteady = compare_layers(whole, again, self._tolerance)
        if unsteady is not None:
            yield f"Two runs on the whole graph differ as well, first in {unsteady}: it is not a function."
        if any("in less than float64" in row.note for row in rows):
            yield "Some layers compute in less than float64 whatever they are given: that may be rounding."


def _both(calm: Verification, training: Verification) -> Verification:
    """The comparison in evaluation, then the one in training."""
    remark = f"{DRAWS}; in evaluation (eval) with the module alone."
    return replace(
        training,
        exact=calm.exact and training.exact,
        rows=calm.rows + training.rows,
        first_difference=calm.first_difference or training.first_difference,
        refused=calm.refused or training.refused,
        failed=calm.failed or training.failed,
        gradients=_worse(calm.gradients, training.gradients),
        buffers=_worse(calm.buffers, training.buffers),
        results=_worse(calm.results, training.results),
        remarks=tuple(dict.fromkeys([*calm.remarks, *training.remarks, remark])),
    )


def _worse(*pair: Worst | None) -> Worst | None:
    return max((worst for worst in pair if worst is not None), default=None)
