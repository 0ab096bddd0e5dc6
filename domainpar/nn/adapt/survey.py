"""Runs every convolution of the installed torch_geometric whole and split, and says which are exact and which refused.

`python -m domainpar.nn.adapt.survey` prints the table of `docs/convolutions.md`; with names of classes behind it, what
became of each of their cases.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.nn import conv

from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.part import GraphPart, split_graph
from domainpar.nn.adapt.rows import NotExact
from domainpar.nn.adapt.survey_cases import CANNOT_RUN, CONVOLUTIONS, TOLERANCE, WHOLE_MODELS
from domainpar.nn.adapt.survey_cases.case import Case
from domainpar.nn.adapt.survey_samples import EDGE_FIELDS, NODE_FIELDS, Sample
from domainpar.nn.adapt.survey_table import table
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.plan import EdgePolicy

NUM_RANKS = 4  # the last one owns nothing

Verdict = Literal["exact", "global", "refused", "wrong"]


@dataclass(frozen=True)
class Outcome:
    """What became of one case under one edge policy.

    Attributes:
        case: The case.
        policy: Which edges a part computes on.
        verdict: `exact`; `global`: exact, with sums over all nodes or edges; `refused`; or `wrong`.
        error: Largest difference of outputs, gradients and buffers, relative to the largest value of each kind.
        reason: Why it was refused.
        exchanges: How often ghosts were filled in one forward pass.
    """

    case: Case
    policy: EdgePolicy
    verdict: Verdict
    error: float = 0.0
    reason: str = ""
    exchanges: int = 0


@dataclass(frozen=True)
class Found:
    """Output, gradients and buffers after one run, in global order; running statistics are buffers."""

    output: Tensor
    of_inputs: list[Tensor]
    of_weights: list[Tensor]
    buffers: list[Tensor]
    sums: int = 0
    exchanges: int = 0


class _Called(nn.Module):
    """A case as a module of its own, so that its call is watched as well."""

    def __init__(self, module: nn.Module, case: Case) -> None:
        super().__init__()
        self.module, self.call = module, case.call

    def forward(self, **tensors: Tensor) -> Tensor:
        return self.call(self.module, Sample(**tensors))


def survey_case(case: Case, policy: EdgePolicy, parts: Sequence[int] | None = None) -> Outcome:
    """Run one case whole and split over four ranks of which one owns nothing, in float64.

    Args:
        case: What to run.
        policy: Which edges a part computes on.
        parts: The part of each node; None for random ones.
    """
    try:
        module, sample, whole = _run_alone(case)
        weights = _weights(len(sample.x))
        if parts is None:
            parts = _random_parts(len(sample.x))
        split = run_threads(_run_part, NUM_RANKS, _Called(module, case), sample, parts, policy, weights, case.rows)
    except NotExact as refused:
        return Outcome(case, policy, "refused", reason=str(refused))
    found = _merged(split, case.rows)
    error = _difference(found, whole)
    verdict: Verdict = "wrong" if not error <= TOLERANCE else "global" if found.sums else "exact"
    return Outcome(case, policy, verdict, error, exchanges=found.exchanges)


@functools.lru_cache(maxsize=1)  # both edge policies are compared with one whole run
def _run_alone(case: Case) -> tuple[nn.Module, Sample, Found]:
    """The module, the graph, and what comes out of the module on one rank."""
    sample, module = case.graph(), case.make().double()
    weights = _weights(len(sample.x))
    if not case.random:
        return module, sample, _run_whole(_Called(copy.deepcopy(module), case), sample, weights)
    # torch draws others than domainpar does; of its own, one rank's count.
    parts = [0] * len(sample.x)
    alone = run_threads(_run_part, 1, _Called(module, case), sample, parts, "incoming", weights, case.rows)
    return module, sample, _merged(alone, case.rows)


@functools.cache
def _weights(num_nodes: int) -> Tensor:
    """What each number of an output counts in the loss: enough for 40 rows of 64 features a node."""
    return torch.sin(torch.arange(40.0 * num_nodes * 64, dtype=torch.float64) ** 1.5)


@functools.cache
def _random_parts(num_nodes: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, NUM_RANKS - 1, (num_nodes,), generator=generator).tolist())


def _leaves(sample: Sample) -> list[str]:
    return [one.name for one in fields(sample) if getattr(sample, one.name).is_floating_point()]


def _with_gradients(sample: Sample) -> dict[str, Tensor]:
    tensors = {one.name: getattr(sample, one.name) for one in fields(sample)}
    return {name: one.clone().requires_grad_(one.is_floating_point()) for name, one in tensors.items()}


def _run_whole(module: nn.Module, sample: Sample, weights: Tensor) -> Found:
    tensors = _with_gradients(sample)
    output = module(**tensors)
    if output.requires_grad:
        (output * weights[: output.numel()].view_as(output)).sum().backward()
    of_inputs = _gradients(tensors[name] for name in _leaves(sample))
    return Found(output.detach(), of_inputs, _gradients(module.parameters()), _buffers(module))


def _run_part(
    world: World, module: nn.Module, sample: Sample, parts: Any, policy: EdgePolicy, weights: Tensor, rows: str
) -> tuple[GraphPart, Found]:
    tensors = _with_gradients(sample)
    part = split_graph(sample.edge_index, len(sample.x), world, edges=policy, partitioner=torch.tensor(parts).numpy())
    marked = {name: part.nodes(tensors[name]) for name in NODE_FIELDS}
    marked |= {name: part.edges(tensors[name]) for name in EDGE_FIELDS if name != "edge_index"}
    parallel = parallelize(copy.deepcopy(module), world)
    output = parallel(edge_index=part.edge_index, **marked)
    ours = weights[: _numbers_of_all(output, part, rows)]
    if rows == "graph":
        ours = ours.view_as(output)
    else:
        ours = ours.view(-1, *output.shape[1:])
        ours = part.owned_nodes(ours) if rows == "nodes" else part.owned_edges(ours)
    if output.requires_grad:
        (output * ours).sum().backward()
    parallel.sum_gradients()
    of_inputs = [part.sum(one) for one in _gradients(tensors[name] for name in _leaves(sample))]
    of_weights, buffers = _gradients(parallel.module.parameters()), _buffers(parallel.module)
    return part, Found(output.detach(), of_inputs, of_weights, buffers, part.num_sums, part.num_exchanges)


def _numbers_of_all(output: Tensor, part: GraphPart, rows: str) -> int:
    if rows == "graph":
        return output.numel()
    axis = part.node_axis if rows == "nodes" else part.edge_axis
    return axis.total * output[:0].flatten(1).shape[1] if output.dim() > 1 else axis.total


def _gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(one) if one.grad is None else one.grad for one in tensors]


def _buffers(module: nn.Module) -> list[Tensor]:
    return [buffer.detach().double() for buffer in module.buffers()]


def _merged(split: list[tuple[GraphPart, Found]], rows: str) -> Found:
    first = split[0][1]
    if rows == "graph":
        return first
    outputs = torch.cat([found.output for _, found in split])
    ids = [_owned_ids(part, rows) for part, _ in split]
    order = torch.argsort(torch.cat(ids), stable=True)
    return replace(first, output=outputs[order])


def _owned_ids(part: GraphPart, rows: str) -> Tensor:
    plan = part.plan
    return torch.from_numpy(plan.owned_ids if rows == "nodes" else plan.edge_ids[plan.edge_owned])


def _difference(found: Found, whole: Found) -> float:
    """The largest difference, relative to the largest number of its kind; NaN where shapes differ is `wrong` too."""
    kinds = (
        ([found.output], [whole.output]),
        (found.of_inputs, whole.of_inputs),
        (found.of_weights, whole.of_weights),
        *(([ours], [theirs]) for ours, theirs in zip(found.buffers, whole.buffers, strict=True)),
    )
    worst = 0.0
    for ours, theirs in kinds:
        scale = max([float(one.abs().max()) for one in theirs if one.numel()], default=0.0) or 1.0
        for mine, yours in zip(ours, theirs, strict=True):
            if mine.shape != yours.shape:
                return float("nan")
            if mine.numel():
                difference = float((mine - yours).abs().max()) / scale
                worst = difference if not difference <= worst else worst
    return worst


def survey(cases: Mapping[str, Sequence[Case]], names: Iterable[str] | None = None) -> dict[str, list[Outcome]]:
    """Every case of every class, or of some, under both edge policies, by name."""
    chosen = sorted(cases) if names is None else names
    return {
        name: [survey_case(case, policy) for case in cases[name] for policy in ("incoming", "incident")]
        for name in chosen
    }


def main() -> int:
    """Print the table, of `models` if that is asked for, or a line for each case of some convolutions.

    Returns:
        1 if a class is wrong, or a convolution has neither a case nor a reason why not.
    """
    torch.set_num_threads(1)
    of_models = sys.argv[1:] == ["models"]
    names = [] if of_models else sys.argv[1:]
    found = survey(WHOLE_MODELS) if of_models else survey(CONVOLUTIONS, names or None)
    outcomes = [outcome for of_class in found.values() for outcome in of_class]
    if names:
        print("\n".join(map(_line, outcomes)))
    else:
        print(table(found, {}, "models") if of_models else table(found, CANNOT_RUN))
    wrong = [_line(outcome) for outcome in outcomes if outcome.verdict == "wrong"]
    forgotten = [] if names or of_models else sorted({*conv.__all__} - {*found} - {*CANNOT_RUN})
    wrong += [f"{name} has neither a case nor a reason why it has none" for name in forgotten]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


def _line(outcome: Outcome) -> str:
    numbers = f"off by {outcome.error:.1e}, {outcome.exchanges} exchanges"
    return f"{outcome.case}, {outcome.policy}: {outcome.verdict}, {outcome.reason or numbers}"


if __name__ == "__main__":
    sys.exit(main())
