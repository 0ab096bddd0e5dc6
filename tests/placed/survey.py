"""Runs every convolution of the installed torch_geometric whole and split, and says which are exact and which refused.

`PYTHONPATH=tests python tests/placed/survey.py` prints `docs/reference/convolutions.md`, with `models` behind it
`docs/reference/models.md`; with names of classes, the outcome of each of their cases.
"""

from __future__ import annotations

import functools
import random
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from proving import check_no_rank_holds_all
from survey_cases import CANNOT_RUN, CONVOLUTIONS, SINGLE, TOLERANCE, WHOLE_MODELS
from survey_cases.case import Case, Outcome, Verdict
from survey_samples import EDGE_FIELDS, NODE_FIELDS, Sample
from survey_table import table
from torch_geometric.nn import conv
from torch_geometric.utils import _negative_sampling as negative_sampling
from whole_and_split import runs_of

NUM_RANKS = 4  # the last one owns nothing


class _OfEachRank:
    """Python's `random` as ranks have it that are processes with one seed: ranks that are threads share one."""

    @staticmethod
    def sample(population: Any, count: int) -> list[Any]:
        return random.Random(0).sample(population, count)


negative_sampling.random = _OfEachRank


def survey_case(case: Case, parts: Sequence[int] | None = None) -> Outcome:
    """Run one case whole and split over four ranks of which one owns nothing, in float64.

    Args:
        case: The case.
        parts: The part of each node; None for random ones.
    """
    sample = case.graph()
    owner = _random_parts(len(sample.x)) if parts is None else parts
    tensors = {field.name: getattr(sample, field.name) for field in fields(sample)}
    leaves = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    check_no_rank_holds_all(sample.edge_index, owner, NUM_RANKS, "incoming")

    def call(part: Any, module: Any, mine: Any) -> Any:
        given = {**tensors, **mine}
        placed = {name: part.nodes(given[name]) for name in NODE_FIELDS}
        placed |= {name: part.edges(given[name]) for name in EDGE_FIELDS if name != "edge_index"}
        return case.call(module, Sample(edge_index=part.edge_index, **placed))

    against = "alone" if case.random else "whole"  # torch alone draws other numbers
    module = case.make().double()
    runs = runs_of(call, sample.edge_index, owner, module=module, leaves=leaves, ranks=(NUM_RANKS,), against=against)
    rank = runs.ranks[NUM_RANKS][0]
    if rank.refused is not None:
        return Outcome(case, "refused", reason=str(rank.refused.args[0]), place=rank.refused.place)
    error, _ = runs.worst()
    exchanges, sums = rank.forward
    verdict: Verdict = "wrong" if not error <= tolerance_of(case) else "global" if sums else "exact"
    return Outcome(case, verdict, error, exchanges=exchanges)


def tolerance_of(case: Case) -> float:
    """How far a case may be off."""
    return SINGLE if case.single else TOLERANCE * case.cancels


@functools.cache
def _random_parts(num_nodes: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, NUM_RANKS - 1, (num_nodes,), generator=generator).tolist())


def survey(cases: Mapping[str, Sequence[Case]], names: Iterable[str] | None = None) -> dict[str, list[Outcome]]:
    """Every case of every class, or of some, by name."""
    return {name: [survey_case(case) for case in cases[name]] for name in names or sorted(cases)}


def main() -> int:
    """Print the table, of `models` if that is asked for, or a line for each case of some convolutions.

    Returns:
        1 if a class is wrong, or a convolution has neither a case nor a reason why not.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
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
    return f"{outcome.case}: {outcome.verdict}, {outcome.reason or numbers}"


if __name__ == "__main__":
    sys.exit(main())
