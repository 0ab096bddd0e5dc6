"""The table of `docs/reference/convolutions.md`: the convolutions that are exact on a split graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
import torch_geometric
from survey_cases import TOLERANCE
from survey_cases.case import Outcome
from torch_geometric.nn import conv

_HEADER = """\
# Convolutions of torch_geometric on a split graph

Made by `make table`, not by hand: `python tests/placed/survey.py` runs each class of `torch_geometric.nn.conv`
whole and split over four ranks, of which one owns nothing, and compares. torch_geometric {pyg}, torch {torch}.

{counts}

- **Exact**: output, gradients of inputs and weights, and running statistics are those of the whole graph, to rounding:
  in float64 they differ by at most {tolerance:.0e} of the largest value of their kind. Variants with dropout are
  compared with one rank of domainpar, since torch draws other numbers.
- **Global statistics**: sums or extremes over all nodes or edges, as in a batch norm, are taken over all ranks, or one
  number of each row is gathered, as for a sort.
- **Refused**: no exact form is known here. The model raises `NotExact` on every rank and returns nothing.
- **Exchanges**: number of halo exchanges in one forward pass, that of the input included.
- **Tested**: the variants that were run, those that were refused included; `default` is the class as it comes.
"""


_OF_MODELS = """\
# Whole models on a split graph

Made by `make table`, not by hand: whole models of torch_geometric, and modules that are made of its layers, run as
[convolutions](convolutions.md) are, which explains the words of the table. Models of other repositories are in
[models_of_others.md](models_of_others.md). torch_geometric {pyg}, torch {torch}.

{counts}
"""


def table(
    found: Mapping[str, Sequence[Outcome]], cannot_run: Mapping[str, str], of: Literal["layers", "models"] = "layers"
) -> str:
    """The whole document, Markdown; the same text for the same outcomes.

    Args:
        found: Outcomes of each class.
        cannot_run: Why a class could not be tried.
        of: What the classes are: convolutions, of which all have to be there, or whole models.
    """
    rows = [_Row(name, found[name]) for name in sorted(found)]
    exact = [row for row in rows if row.passed and not row.of("global")]
    with_statistics = [row for row in rows if row.passed and row.of("global")]
    refused = [row for row in rows if not row.passed and not row.of("wrong")]
    wrong = [row for row in rows if row.of("wrong")]
    forgotten = [name for name in conv.__all__ if name not in {*found, *cannot_run}] if of == "layers" else []
    untried = dict.fromkeys(forgotten, "has no case here") | dict(cannot_run)
    header = (_HEADER if of == "layers" else _OF_MODELS).format(
        pyg=torch_geometric.__version__,
        torch=torch.__version__.split("+")[0],
        counts=_counts(rows, exact, with_statistics, refused, len(untried)),
        tolerance=TOLERANCE,
    )
    blocks = [
        header,
        _section("Exact", _COLUMNS, [row.cells() for row in exact]),
        _section("Exact with global statistics", _COLUMNS, [row.cells() for row in with_statistics]),
    ]
    if refused:
        blocks.append(_section("Refused", ("Class", "Why", "Tested"), [row.cells_refused() for row in refused]))
    if untried:
        cells = [(f"`{name}`", untried[name]) for name in sorted(untried)]
        blocks.append(_section("Cannot run here", ("Class", "Why"), cells))
    if wrong:
        blocks.insert(1, _section("WRONG", _COLUMNS, [row.cells() for row in wrong]))
    return "\n".join(blocks).rstrip("\n")


_COLUMNS = ("Class", "Verdict", "Exchanges", "Tested")


class _Row:
    """One class.

    Attributes:
        name: The class.
        outcomes: One for each variant.
        passed: Whether a variant is exact and none is wrong.
    """

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.name, self.outcomes = name, outcomes
        self.passed = bool(self.of("exact", "global")) and not self.of("wrong")

    def of(self, *verdicts: str) -> list[Outcome]:
        """The outcomes with one of these verdicts."""
        return [outcome for outcome in self.outcomes if outcome.verdict in verdicts]

    def cells(self) -> tuple[str, ...]:
        """A row of a class that is exact, or wrong."""
        return f"`{self.name}`", self._verdict(), self._exchanges(), _variants(self.outcomes)

    def cells_refused(self) -> tuple[str, ...]:
        """A row of a class that is refused in every variant."""
        reasons = _by_reason(self.outcomes)
        if len(reasons) == 1:
            return f"`{self.name}`", next(iter(reasons)), _variants(self.outcomes)
        why = "; ".join(f"{_variants(of_reason)}: {reason}" for reason, of_reason in reasons.items())
        return f"`{self.name}`", why, _variants(self.outcomes)

    def _verdict(self) -> str:
        if self.of("wrong"):
            return f"WRONG with {_variants(self.of('wrong'))}"
        verdict = "exact"
        if statistics := self.of("global"):
            some = len(statistics) < len(self.of("exact", "global"))
            verdict += ", with global statistics" + (f" in {_variants(statistics)}" if some else "")
        refused = [f"{_variants(some)}: {reason}" for reason, some in _by_reason(self.of("refused")).items()]
        return verdict + (f", but refused with {'; with '.join(refused)}" if refused else "")

    def _exchanges(self) -> str:
        counts = [outcome.exchanges for outcome in self.of("exact", "global", "wrong")]
        return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _by_reason(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    reasons: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        reasons.setdefault(first_clause(outcome.reason), []).append(outcome)
    return reasons


def first_clause(reason: str) -> str:
    """What `NotExact` says, up to what to write instead."""
    return re.split(r"[.;] ", reason)[0].rstrip(".")


def _variants(outcomes: Iterable[Outcome]) -> str:
    return ", ".join(f"`{outcome.case.variant or 'default'}`" for outcome in outcomes)


def _counts(
    rows: list[_Row], exact: list[_Row], with_statistics: list[_Row], refused: list[_Row], num_untried: int
) -> str:
    passed = [*exact, *with_statistics]
    partly = [row for row in passed if row.of("refused")]
    wholly = [row for row in with_statistics if not row.of("refused")]
    wrong = len(rows) - len(passed) - len(refused)
    return (
        f"Of {len(rows) + num_untried} classes {len(passed) - len(partly)} are exact in every variant that was tested "
        f"({len(wholly)} of them with global statistics),\n{len(partly)} are exact but refused in some variants, "
        f"{len(refused)} are refused, and {num_untried} cannot be run here." + (f" **{wrong} WRONG.**" if wrong else "")
    )


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (columns, *rows)]
    lines.insert(1, f"|{' --- |' * len(columns)}")
    return f"## {title}\n\n" + "\n".join(lines) + "\n"
