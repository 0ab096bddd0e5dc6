"""Runs every convolution of the installed torch_geometric whole and split, and says which are exact and which refused.

`PYTHONPATH=tests python tests/nn/adapt/survey.py` prints `docs/reference/convolutions.md`; with names of classes behind
it, the outcome of each of their cases.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from proving import check_no_rank_holds_all
from survey_cases import CANNOT_RUN, CONVOLUTIONS, TOLERANCE, WHOLE_MODELS
from survey_cases.case import Case, Outcome, Verdict
from survey_samples import EDGE_FIELDS, NODE_FIELDS, Sample
from survey_table import table
from torch import Tensor, nn
from torch_geometric.nn import conv

from domainpar.nn.adapt.differences import compare_runs
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.adapt.rows import NotExact
from domainpar.nn.adapt.trial import Trial, TrialRun
from domainpar.plan import EdgePolicy

NUM_RANKS = 4  # the last one owns nothing


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
        case: The case.
        policy: Which edges a part computes on.
        parts: The part of each node; None for random ones.
    """
    trial = _trial(case, policy, parts)
    try:
        whole = _whole(case)
    except NotExact as refused:
        return Outcome(case, policy, "refused", reason=str(refused))
    check_no_rank_holds_all(trial.edge_index, trial.assignment, NUM_RANKS, policy)
    split = trial.split(NUM_RANKS)
    if split.refused is not None:
        return Outcome(case, policy, "refused", reason=split.refused)
    if split.failure is not None:
        raise split.failure.error
    differences = compare_runs(whole, split)
    kinds = (differences.results, differences.gradients, differences.state)
    error = max(worst.difference for kind in kinds for worst in kind)
    error = error if split.uneven is None else float("inf")
    rank = split.ranks[0]
    verdict: Verdict = "wrong" if not error <= TOLERANCE * case.cancels else "global" if rank.sums else "exact"
    return Outcome(case, policy, verdict, error, exchanges=rank.exchanges)


@functools.lru_cache(maxsize=1)  # both edge policies are compared with one whole run
def _whole(case: Case) -> TrialRun:
    """The module alone; of what torch draws others of than domainpar does, one rank of domainpar."""
    trial = _trial(case, "incoming", None)
    if not case.random:
        return trial.bare()[0]
    alone = trial.split(1)
    if alone.failure is not None:
        raise alone.failure.error
    return alone


def _trial(case: Case, policy: EdgePolicy, parts: Sequence[int] | None) -> Trial:
    sample = case.graph()
    tensors = {field.name: getattr(sample, field.name) for field in fields(sample)}

    def inputs(part: GraphPart, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
        arguments = {name: part.nodes(leaves.get(name, tensors[name])) for name in NODE_FIELDS}
        of_edges = [name for name in EDGE_FIELDS if name != "edge_index"]
        arguments |= {name: part.edges(leaves.get(name, tensors[name])) for name in of_edges}
        return {"edge_index": part.edge_index, **arguments}

    return Trial(
        _Called(case.make().double(), case),
        sample.edge_index,
        len(sample.x),
        inputs,
        np.asarray(_random_parts(len(sample.x)) if parts is None else parts),
        policy,
        leaves={name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()},
    )


@functools.cache
def _random_parts(num_nodes: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, NUM_RANKS - 1, (num_nodes,), generator=generator).tolist())


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
