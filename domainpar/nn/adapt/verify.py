"""Does a model give on a split graph what it gives on the whole one? If not, which layer differs first?

The watch over a forward pass sees calls of torch. It does not see Python: a counter in a global, a value kept from an
earlier call, the number of a rank. `verify` compares the results themselves, on a small graph, before a long run.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from domainpar.common import timeouts
from domainpar.nn.adapt.differences import compare_layers, compare_runs
from domainpar.nn.adapt.modules import check_sizes
from domainpar.nn.adapt.nested import is_data, rebuilt, with_fields
from domainpar.nn.adapt.parallelize import GraphParallel
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.adapt.rows import UNKNOWN, mark, rows_of
from domainpar.nn.adapt.trial import Inputs, Trial, TrialRun
from domainpar.nn.adapt.verification import LayerCheck, Verification, Worst, agrees
from domainpar.plan import EdgePolicy

__all__ = ["LayerCheck", "Verification", "Worst", "verify"]

DRAWS = "It draws random numbers: compared with itself on one rank"
PASS_INPUTS = (
    "pass inputs, which makes the arguments from a part: inputs=lambda part: (part.nodes(x), part.edge_index)."
)


def verify(
    module: nn.Module,
    graph: Any,
    parts: int = 3,
    *,
    inputs: Callable[[GraphPart], Any] | None = None,
    edge_policy: EdgePolicy = "incoming",
    backward: bool = True,
    tolerance: float = 1e-10,
    seed: int = 0,
    recompute_every: int | None = None,
) -> Verification:
    """Run a model whole and split, with threads of this process as ranks, and compare every call of every layer.

    Copies of the model run in float64 on the CPU; the model itself does not change. Each node gets a random part. No
    real split does so: it cuts as many edges as possible. With more than two parts one more rank runs, which owns
    nothing. Torch draws other dropout masks than a split graph. So a model with dropout is compared in training with
    itself on one rank, and in evaluation with the bare module.

    Args:
        module: The model, in the mode (`train` or `eval`) in which it is to be compared.
        graph: A PyG `Data`, or `(edge_index, num_nodes)` with `edge_index` int64 [2, E]. In a `Data` the fields x, pos,
            batch, y, z, node_* and *_mask have a row for each node, edge_* one for each edge.
        parts: Number of parts with nodes.
        inputs: A function that makes the model's arguments from a part, by part.nodes(x) and so on: a tuple, a
            dictionary by name, or the only argument. It is called for the whole graph as one part, then on each rank.
            None: the fields of `graph` that `forward` names, or `graph` itself if the only argument is called data or
            batch.
        edge_policy: As for `split_graph`.
        backward: Whether to compare gradients as well: those of parameters, and of fields of a `Data` that require one.
            The loss is a sum over the results with weights of many sizes.
        tolerance: The largest difference, relative to the largest value, that counts as rounding.
        seed: Seed of the parts of nodes and of dropout.
        recompute_every: As for `parallelize`: the comparison then shows that it changes nothing.

    Returns:
        The comparison. Print it; its `check()` raises if the model is not exact.

    Raises:
        ValueError: If the arguments cannot be made from the graph.
        Exception: Whatever the module raises on the whole graph.
    """
    module = module.module if isinstance(module, GraphParallel) else module
    if is_data(graph):
        edge_index, num_nodes = graph.edge_index, int(graph.num_nodes)
    elif isinstance(graph, tuple) and len(graph) == 2 and isinstance(graph[0], Tensor):
        edge_index, num_nodes = graph[0], int(graph[1])
    else:
        raise ValueError(f"a graph is a PyG Data or a tuple (edge_index, num_nodes), not {type(graph).__name__}.")
    if parts < 1:
        raise ValueError(f"a graph cannot be split into {parts} parts; pass 1 or more.")
    check_sizes(module)
    arguments = _inputs_from(module, graph) if inputs is None else (lambda part, _: inputs(part))
    fields = graph.to_dict() if is_data(graph) else {}
    leaves = {name: field.double() for name, field in fields.items() if getattr(field, "requires_grad", False)}
    # At random most edges are cut. Of more than two parts there is a rank more, for which no number is drawn.
    at_random = torch.Generator().manual_seed(seed)
    empty = ", one of which owns nothing" if parts > 2 else ""
    several = f"{parts + (parts > 2)} ranks{empty} ({edge_policy} edges, parts of nodes drawn at random)"
    trial = Trial(
        module=_doubled_module(module),
        edge_index=edge_index,
        num_nodes=num_nodes,
        inputs=lambda part, leaves: rebuilt(arguments(part, leaves), _doubled),
        assignment=torch.randint(0, parts, (num_nodes,), generator=at_random, device="cpu").numpy(),
        edge_policy=edge_policy,
        leaves=leaves,
        backward=backward,
        seed=seed,
        recompute_every=recompute_every,
        patience=timeouts.SMALL_GRAPH,
    )
    with _on_our_terms():
        blank = Verification(False, (), tolerance=tolerance, ranks="1 rank" if parts == 1 else several)
        return _judged(blank, trial, parts + (parts > 2))


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


def _judged(blank: Verification, trial: Trial, num_ranks: int) -> Verification:
    """Split against whole; a model that draws random numbers against itself on one rank, and in evaluation."""
    bare, draws = trial.bare()
    if not draws:
        return _compared(blank, trial, num_ranks, bare, lambda: trial.bare()[0])
    alone = trial.split(1)
    if alone.refused is not None:
        return replace(blank, refused=alone.refused)
    if alone.failure is not None:
        raise alone.failure.error
    training = _compared(blank, trial, num_ranks, alone, lambda: trial.split(1))
    calm_trial = replace(trial, module=copy.deepcopy(trial.module).eval())
    bare, draws = calm_trial.bare()
    if draws:
        remark = f"{DRAWS} only, as it draws them in evaluation too."
        return replace(training, remarks=(*training.remarks, remark))
    calm = _compared(blank, calm_trial, num_ranks, bare, lambda: calm_trial.bare()[0], mode="eval")
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


def _compared(
    blank: Verification, trial: Trial, num_ranks: int, whole: TrialRun, again: Callable[[], TrialRun], mode: str = ""
) -> Verification:
    """A run on ranks against a run on the whole graph, which `again` repeats to see whether it is always the same."""
    split, tolerance = trial.split(num_ranks), blank.tolerance
    rows, first = compare_layers(whole, split, tolerance)
    remarks = []
    if first is not None:  # other reasons that the difference may have
        _, unsteady = compare_layers(whole, again(), tolerance)
        if unsteady is not None:
            remarks.append(f"Two runs on the whole graph differ as well, first in {unsteady}: it is not a function.")
        if any("in less than float64" in row.note for row in rows):
            remarks.append("Some layers compute in less than float64 whatever they are given: that may be rounding.")
    verification = replace(
        blank,
        rows=tuple(replace(row, mode=mode) for row in rows),
        first_difference=None if first is None else replace(first, mode=mode),
        refused=split.refused,
        failed=split.failed,
        exchanges=split.ranks[0].exchanges,
        sums=split.ranks[0].sums,
        remarks=tuple(remarks),
    )
    if split.failure is not None:
        return verification
    differences = compare_runs(whole, split)
    # Behind a layer that differs, gradients differ as well, and say nothing more.
    kinds = (differences.results, differences.gradients if first is None else (), differences.state)
    results, gradients, buffers = (max(kind, default=None) for kind in kinds)
    exact = first is None and split.uneven is None and results is not None
    exact = exact and all(agrees(worst, tolerance) for worst in (results, gradients, buffers))
    return replace(verification, exact=exact, results=results, gradients=gradients, buffers=buffers)


# Arguments of the model: from the fields of a PyG `Data`, by their names; all of them in float64.


def _inputs_from(module: nn.Module, graph: Any) -> Inputs:
    """Make the arguments of a module from the fields of a `Data` that its forward names.

    Raises:
        ValueError: If `graph` is no `Data`, lacks one of them, or has a field of unknown rows.
    """
    if not is_data(graph):
        raise ValueError("of (edge_index, num_nodes) no arguments can be made; pass inputs=lambda part: (...).")
    wanted = list(inspect.signature(module.forward).parameters.values())
    fields = {name: value for name, value in graph.to_dict().items() if name != "num_nodes" and value is not None}
    as_data = len(wanted) == 1 and wanted[0].name in ("data", "batch")
    if not as_data:
        wanted = [
            argument for argument in wanted if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        ]
        required = [argument.name for argument in wanted if argument.default is argument.empty]
        if missing := [name for name in required if name not in fields]:
            raise ValueError(f"forward asks for {', '.join(missing)}, the graph has {', '.join(fields)}; {PASS_INPUTS}")
        wanted = [argument for argument in wanted if argument.name in fields]
        fields = {argument.name: fields[argument.name] for argument in wanted}
    positional = any(argument.kind is argument.POSITIONAL_ONLY for argument in wanted)
    _check_rows(fields, graph)

    def inputs(part: GraphPart, leaves: Mapping[str, Tensor]) -> Any:
        def rows_of_field(name: str, value: Any) -> Any:
            if name == "edge_index" or not isinstance(value, Tensor):
                return part.edge_index if name == "edge_index" else value
            take = part.nodes if _rows_of_field(name) == "nodes" else part.edges
            return take(leaves.get(name, value))

        rows = {name: rows_of_field(name, value) for name, value in fields.items()}
        if as_data:
            return with_fields(graph, rows)
        return tuple(rows.values()) if positional else rows

    return inputs


def _check_rows(fields: Mapping[str, Any], graph: Any) -> None:
    numbers = {"nodes": int(graph.num_nodes), "edges": graph.edge_index.size(1)}
    for name, value in fields.items():
        of = _rows_of_field(name)
        expected = numbers.get(of)
        if name != "edge_index" and isinstance(value, Tensor) and (not value.dim() or len(value) != expected):
            reason = f"are taken for {of}, of which there are {expected}" if of else "are not known"
            raise ValueError(
                f"the rows of the graph's field {name}, of shape {tuple(value.shape)}, {reason}; {PASS_INPUTS}"
            )


def _rows_of_field(name: str) -> str:
    if name in ("x", "pos", "batch", "y", "z") or name.startswith("node_") or name.endswith("_mask"):
        return "nodes"
    return "edges" if name.startswith("edge_") else ""


def _doubled_module(module: nn.Module) -> nn.Module:
    """A copy on the CPU in float64, tensors that are no parameters or buffers included."""
    module = copy.deepcopy(module).cpu().double()
    for child in module.modules():
        for name, value in list(vars(child).items()):
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(child, name, value.cpu().double())
    return module


def _doubled(value: Any) -> Any:
    """A tensor in float64, marked as it was; anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype is torch.float64:
        return value
    rows = rows_of(value)
    double = value.detach().double().requires_grad_(value.requires_grad)
    return double if rows is UNKNOWN else mark(double, None if rows is None else rows.but())
