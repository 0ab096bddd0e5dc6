"""The survey of PyG's modules: what is exact, what is refused and why, that the table says so, and that it can fail."""

import functools
import sys
from pathlib import Path

import pytest
import torch

torch_geometric = pytest.importorskip("torch_geometric")

import survey  # noqa: E402  # imports PyG itself
from marks import slow  # noqa: E402
from survey import survey_case, tolerance_of  # noqa: E402
from survey_cases import CANNOT_RUN, CONVOLUTIONS, MODELS, MODULES, WHOLE_MODELS  # noqa: E402
from survey_cases.case import Outcome  # noqa: E402
from survey_table import first_clause, table  # noqa: E402

from domainpar.placed import moves, tensor  # noqa: E402
from domainpar.placed.ranks import GraphRanks  # noqa: E402
from domainpar.placed.rules import matrix_products as products  # noqa: E402
from domainpar.placed.rules import random  # noqa: E402
from domainpar.placed.tensor import Placed  # noqa: E402

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "convolutions.md"

ORDER, PAIRS = "an order of all rows, with several numbers each", "attention of all rows to all rows"
REFUSED = {  # what the reason of each refused case must say
    "GPSConv (GINE inside, norm off)": PAIRS,
    "GPSConv (GINE inside, layer norm)": PAIRS,
    "GPSConv (GINE inside, batch norm)": PAIRS,
    "GPSConv (three graphs)": "splits rows of 60 nodes",
    "MessagePassing (aggr median)": ORDER,
    "SAGEConv (aggr median)": ORDER,
    "WLConv": "part.whole(tensor) is the whole one",
    "MedianAggregation (one event)": ORDER,
    "MedianAggregation (three graphs)": ORDER,
    "QuantileAggregation (one event)": ORDER,
    "QuantileAggregation (three graphs)": ORDER,
}
outcome_of = functools.cache(survey_case)


def check_case(case):
    """A case is exact, or refused for the reason that is written down here."""
    outcome = outcome_of(case)
    if str(case) in REFUSED:
        assert outcome.verdict == "refused", f"{case} is exact now: run make table, and leave it out here."
        assert REFUSED[str(case)] in outcome.reason
    else:
        assert outcome.verdict in ("exact", "global"), f"{case}: {outcome.verdict}, {outcome.error} {outcome.reason}"
        assert outcome.error <= tolerance_of(case)


def apart(cases):
    """Lists of cases by class: the first and those that are refused, and for `make test-slow` the others."""
    for name in sorted({case.name for case in cases}):
        of_class = [case for case in cases if case.name == name]
        first = [case for case in of_class if case is of_class[0] or str(case) in REFUSED]
        yield pytest.param(first, id=name)
        if others := [case for case in of_class if case not in first]:
            yield slow(others, id=f"{name}, other variants")


def with_news(models):
    """Models by which each class, norm, jump and option comes up, and for `make test-slow` the other pairs of them."""
    seen = set()
    for case in models:
        words = {case.name, *case.variant.split(", ")}
        yield (slow if words <= seen else pytest.param)([case], id=str(case))
        seen |= words


@pytest.mark.parametrize("cases", apart([case for cases in CONVOLUTIONS.values() for case in cases]))
def test_every_convolution_is_exact_or_refused_for_a_reason_that_names_the_cause(cases):
    for case in cases:
        check_case(case)


@pytest.mark.parametrize("cases", with_news(MODELS))
def test_every_model_is_exact(cases):
    for case in cases:
        check_case(case)


@pytest.mark.parametrize("cases", apart(MODULES))
def test_norms_pooling_and_modules_made_of_layers_are_exact_or_refused_for_a_reason_that_names_the_cause(cases):
    for case in cases:
        check_case(case)


def test_what_is_refused_is_a_case():
    known = [*MODULES, *(case for cases in CONVOLUTIONS.values() for case in cases)]
    assert {*REFUSED} <= {str(case) for case in known}


# The table


@pytest.mark.slow  # each case is run by another test
@pytest.mark.parametrize(
    ("page", "cases", "more"),
    [("convolutions.md", CONVOLUTIONS, (CANNOT_RUN,)), ("models.md", WHOLE_MODELS, ({}, "models"))],
)
def test_the_tables_in_docs_are_what_the_survey_finds(page, cases, more):
    text = TABLE.with_name(page).read_text()
    versions = f"torch_geometric {torch_geometric.__version__}, torch {torch.__version__.split('+')[0]}."
    if versions not in text:
        pytest.skip(f"the table was made with others than {versions}")
    found = {name: [outcome_of(case) for case in of_class] for name, of_class in cases.items()}
    assert text == table(found, *more) + "\n", "run make table"


def test_the_table_has_a_row_for_every_convolution():
    for name in torch_geometric.nn.conv.__all__:
        assert TABLE.read_text().count(f"\n| `{name}` |") == 1, name


def test_a_class_is_called_exact_without_more_only_if_every_variant_is():
    mean, project = (find("SAGEConv", f"SAGEConv ({variant})") for variant in ("aggr mean", "project"))
    exact = Outcome(mean, "exact", exchanges=2)
    refused = Outcome(project, "refused", reason="it sums; use another.")
    assert "| `SAGEConv` | exact | 2 | `aggr mean` |" in table({"SAGEConv": [exact]}, {})
    of_some = table({"SAGEConv": [exact, refused]}, {})
    assert "| `SAGEConv` | exact, but refused with `project`: it sums | 2 | `aggr mean`, `project` |" in of_some
    assert "1 are exact but refused in some variants" in of_some
    assert "| `SAGEConv` | it sums | `project` |" in table({"SAGEConv": [refused]}, {})
    wrong = table({"SAGEConv": [exact, Outcome(project, "wrong", error=0.1)]}, {})
    assert "**1 WRONG.**" in wrong
    assert "| `SAGEConv` | WRONG with `project` |" in wrong


@pytest.mark.parametrize(
    ("reason", "clause"),
    [
        ("torch.bmm of rows (a, b): all rows, as there; write less.", "torch.bmm of rows (a, b): all rows, as there"),
        ("torch.sort of rows: an order. Take x[:, 0].", "torch.sort of rows: an order"),
        ("no form is known.", "no form is known"),
    ],
)
def test_a_reason_is_shortened_to_what_it_says_before_what_to_write_instead(reason, clause):
    assert first_clause(reason) == clause


# That the survey can fail


def find(name, case):
    return next(each for each in CONVOLUTIONS[name] if str(each) == case)


def verdicts():
    """Of a layer that exchanges rows, and of one that sums over ranks, too."""
    cases = find("GCNConv", "GCNConv (edge weights)"), find("GINConv", "GINConv (batch norm)")
    return [survey_case(case).verdict for case in cases]


def test_without_sabotage_these_are_exact():
    assert verdicts() == ["exact", "global"]


def test_ghosts_without_values_are_found_wrong(monkeypatch):
    usual = moves._ghosts_of
    monkeypatch.setattr(moves, "_ghosts_of", lambda x, halo: torch.zeros_like(usual(x, halo)))
    assert verdicts() == ["wrong", "wrong"]


def without_shares(local, axis, dim, halo, how="sum"):
    return local.narrow(dim, 0, axis.length)


def test_shares_of_ghosts_that_do_not_come_home_are_found_wrong(monkeypatch):
    monkeypatch.setattr(tensor, "brought_home", without_shares)
    assert verdicts() == ["wrong", "wrong"]


def test_a_sum_of_one_rank_instead_of_all_is_found_wrong(monkeypatch):
    monkeypatch.setattr(GraphRanks, "added", lambda self, local: local)
    assert verdicts() == ["exact", "wrong"]


def test_a_gradient_of_one_rank_that_is_taken_for_the_whole_is_found_wrong(monkeypatch):
    monkeypatch.setattr(products, "share", lambda local, ranks: Placed(local, ranks.same))
    assert verdicts() == ["wrong", "wrong"]


def test_dropout_drawn_by_local_rows_is_found_wrong(monkeypatch):
    usual = random.dropout_mask
    local = lambda ids, *more: usual(torch.arange(len(ids)), *more)  # noqa: E731
    assert survey_case(find("GATConv", "GATConv (dropout)")).verdict != "wrong"
    monkeypatch.setattr(random, "dropout_mask", local)
    assert survey_case(find("GATConv", "GATConv (dropout)")).verdict == "wrong"


def test_the_command_fails_and_names_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["survey", "GCNConv"])
    monkeypatch.setitem(survey.CONVOLUTIONS, "GCNConv", [find("GCNConv", "GCNConv (edge weights)")])
    assert survey.main() == 0
    assert capsys.readouterr().out.startswith("GCNConv (edge weights): exact, off by ")
    monkeypatch.setattr(tensor, "brought_home", without_shares)
    assert survey.main() == 1
    assert "GCNConv (edge weights): wrong" in capsys.readouterr().err


def test_the_command_fails_if_a_convolution_was_forgotten(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["survey"])
    monkeypatch.setattr(survey, "survey", lambda cases, names: {})
    assert survey.main() == 1
    out, err = capsys.readouterr()
    assert "| `GCNConv` | has no case here |" in out
    assert "GCNConv has neither a case nor a reason" in err
