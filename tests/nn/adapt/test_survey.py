"""The survey of PyG's modules: what is exact, what is refused and why, that the table says so, and that it can fail."""

import functools
import re
import sys
from pathlib import Path

import pytest
import torch

torch_geometric = pytest.importorskip("torch_geometric")

import survey  # noqa: E402  # imports PyG itself
from marks import slow  # noqa: E402
from survey import Outcome, survey_case  # noqa: E402
from survey_cases import CANNOT_RUN, CONVOLUTIONS, MODELS, MODULES, TOLERANCE, WHOLE_MODELS  # noqa: E402
from survey_table import first_clause, table  # noqa: E402
from whole_and_split import check  # noqa: E402

from domainpar.nn.adapt import across  # noqa: E402
from domainpar.nn.adapt.rows import mark  # noqa: E402
from domainpar.nn.adapt.rules import new_tensors, reductions  # noqa: E402
from domainpar.nn.adapt.watch import Watch  # noqa: E402

TABLE = Path(__file__).parents[3] / "docs" / "reference" / "convolutions.md"

# What the reason of each refused variant must say.
OF_CONVOLUTIONS = {
    "ClusterGCNConv": "rows side by side that are not the same rows",
    "ClusterGCNConv (no lambda)": "rows side by side that are not the same rows",
    "EGConv (mean, min)": "puts rows that are the same on every rank",
    "GPSConv (GINE inside, norm off)": "attention between all rows",
    "GPSConv (GINE inside, layer norm)": "attention between all rows",
    "GPSConv (GINE inside, batch norm)": "attention between all rows",
    "GPSConv (GINE inside, performer)": "mask or index of several dimensions",
    "GPSConv (three graphs)": "Dense batches",
    "HEATConv": "rows side by side that are not the same rows",
    "HEATConv (concat off)": "rows side by side that are not the same rows",
    "HGTConv": "view of shape (-1, 8) merges rows",
    "HypergraphConv (number left open)": "guessed from edge_index",
    "MeshCNNConv": "rows side by side that are not the same rows",
    "MessagePassing (aggr median)": "sorts the rows of each node",
    "MessagePassing (aggr lstm)": "rows side by side that are not the same rows",
    "RGATConv (within-relation)": "guessed from the largest number in edge_index",
    "SAGEConv (aggr median)": "sorts the rows of each node",
    "SAGEConv (aggr lstm)": "rows side by side that are not the same rows",
    "SuperGATConv (MX, training)": "torch.sort runs along the",
    "SuperGATConv (SD, training)": "torch.sort runs along the",
    "WLConv": "torch.sort runs along the",
}
OF_MODULES = {
    "EquilibriumAggregation": "torch.autograd.grad in a forward pass",
    "GRUAggregation": "rows side by side that are not the same rows",
    "GraphMultisetTransformer": "rows side by side that are not the same rows",
    "LCMAggregation": "rows side by side that are not the same rows",
    "LSTMAggregation": "rows side by side that are not the same rows",
    "MLPAggregation": "rows side by side that are not the same rows",
    "MedianAggregation": "sorts the rows of each node",
    "PatchTransformerAggregation": "rows side by side that are not the same rows",
    "QuantileAggregation": "sorts the rows of each node",
    "SetTransformerAggregation": "rows side by side that are not the same rows",
    "SortAggregation": "rows side by side that are not the same rows",
}


@functools.cache
def settled(case):
    """What becomes of a case under `incoming`, and, if that is refused, under `incident`."""
    outcomes = [survey_case(case, "incoming")]
    if outcomes[0].verdict == "refused":
        outcomes.append(survey_case(case, "incident"))
    return outcomes


def is_exact(outcome):
    assert outcome.verdict in ("exact", "global", "refused"), (outcome, str(outcome.case))
    assert outcome.verdict == "refused" or outcome.error <= TOLERANCE * outcome.case.cancels
    return outcome.verdict != "refused"


def find(cases, name):
    """The case of this name."""
    return next(case for case in cases if str(case) == name)


def gcn():
    # One exchange, no sum over ranks. Without weights of edges what it exchanges, degrees, has no gradient.
    return find(CONVOLUTIONS["GCNConv"], "GCNConv (edge weights)")


def sage():
    return CONVOLUTIONS["SAGEConv"][0]  # under incoming neither


def with_batch_norm():
    return find(CONVOLUTIONS["GINConv"], "GINConv (batch norm)")  # sums over ranks, no exchange


# What is found: of every class the first variant and those that are refused, of models those that bring something new


def apart(cases, chosen):
    """Lists of cases by class: those chosen, and for `make test-slow` the others."""
    for name in sorted({case.name for case in cases}):
        of_class = [case for case in cases if case.name == name]
        first = [case for case in of_class if case is of_class[0] or str(case) in chosen]
        yield pytest.param(first, id=name)
        if others := [case for case in of_class if case not in first]:
            yield slow(others, id=f"{name}, other variants")


def with_news(models):
    """Models by which each class, norm, jump and option comes up, and for `make test-slow` the other pairs of them."""
    seen = set()
    for case in models:
        words = {case.name, *case.variant.split(", ")}
        yield (slow if words <= seen else pytest.param)(case, id=str(case))
        seen |= words


ALL_CONVOLUTIONS = [case for cases in CONVOLUTIONS.values() for case in cases]


@pytest.mark.parametrize("cases", list(apart(ALL_CONVOLUTIONS, OF_CONVOLUTIONS)))
def test_every_convolution_is_exact_or_refused_for_a_reason_that_names_the_cause(cases):
    for case in cases:
        last = settled(case)[-1]
        if is_exact(last):
            assert str(case) not in OF_CONVOLUTIONS, f"{case} is exact now: run make table, and leave it out here."
        else:
            assert re.match(r"module\S* \(\w+\): ", last.reason), last.reason
            assert OF_CONVOLUTIONS[str(case)] in last.reason


@pytest.mark.parametrize("variants", [1, slow(None)])
def test_what_needs_incident_says_so_under_incoming(variants):
    asked = [case for cases in CONVOLUTIONS.values() for case in cases[:variants] if str(case) not in OF_CONVOLUTIONS]
    needing = [case for case in asked if len(settled(case)) == 2]
    assert needing
    for case in needing:
        assert "split the graph with edge_policy='incident'" in settled(case)[0].reason


@pytest.mark.slow
def test_at_least_43_convolutions_are_exact_in_every_variant_and_seven_more_in_most():
    exact = {name: [is_exact(settled(case)[-1]) for case in cases] for name, cases in CONVOLUTIONS.items()}
    wholly = {name for name, variants in exact.items() if all(variants)}
    partly = {name for name, variants in exact.items() if any(variants)} - wholly
    assert len(wholly) >= 45
    assert len(wholly | partly) >= 52
    assert {"GCNConv", "GATConv", "GATv2Conv", "GINConv", "GINEConv", "NNConv", "PNAConv", "TransformerConv"} <= wholly
    assert {"EdgeConv", "ChebConv"} <= wholly
    assert [
        str(case) for case, passed in zip(CONVOLUTIONS["SAGEConv"], exact["SAGEConv"], strict=True) if not passed
    ] == [
        "SAGEConv (aggr median)",
        "SAGEConv (aggr lstm)",
    ]


@pytest.mark.parametrize("case", list(with_news(MODELS)))
def test_every_model_is_exact(case):
    assert is_exact(survey_case(case, ("incoming", "incident")[MODELS.index(case) % 2]))


@pytest.mark.parametrize("cases", list(apart(MODULES, OF_MODULES)))
def test_norms_pooling_and_modules_made_of_layers_are_exact_or_refused_for_a_reason_that_names_the_cause(cases):
    name = cases[0].name
    exact = [is_exact(settled(case)[-1]) for case in cases]
    if name not in OF_MODULES:
        assert all(exact)
    else:
        assert not any(exact), f"{name} is exact now: leave it out of OF_MODULES."
    for case in cases:
        if not is_exact(settled(case)[-1]):
            assert OF_MODULES[name] in settled(case)[-1].reason


# The table


@pytest.mark.slow
def test_the_table_in_docs_is_what_the_survey_finds():
    text = TABLE.read_text()
    versions = f"torch_geometric {torch_geometric.__version__}, torch {torch.__version__.split('+')[0]}."
    if versions not in text:
        pytest.skip(f"the table was made with others than {versions}")
    found = {name: [outcome for case in cases for outcome in settled(case)] for name, cases in CONVOLUTIONS.items()}
    assert text == table(found, CANNOT_RUN) + "\n", "run make table"


@pytest.mark.slow  # each model is run by another test
def test_the_table_of_models_is_what_the_survey_finds():
    text = TABLE.with_name("models.md").read_text()
    if f"torch_geometric {torch_geometric.__version__}, torch {torch.__version__.split('+')[0]}." not in text:
        pytest.skip("the table was made with other versions")
    found = {name: [outcome for case in cases for outcome in settled(case)] for name, cases in WHOLE_MODELS.items()}
    assert text == table(found, {}, "models") + "\n", "run make table"


def test_the_table_has_a_row_for_every_convolution():
    for name in torch_geometric.nn.conv.__all__:
        assert TABLE.read_text().count(f"\n| `{name}` |") == 1, name


def refused(name, variant, reason="module (Some): it sums; use another."):
    return Outcome(find(CONVOLUTIONS[name], f"{name} ({variant})"), "incident", "refused", reason=reason)


def test_a_class_is_called_exact_without_more_only_if_every_variant_is():
    exact = Outcome(find(CONVOLUTIONS["SAGEConv"], "SAGEConv (aggr mean)"), "incoming", "exact", exchanges=2)
    of_all, of_some = table({"SAGEConv": [exact]}, {}), table({"SAGEConv": [exact, refused("SAGEConv", "project")]}, {})
    assert "| `SAGEConv` | exact | `incoming` | 2 | `aggr mean` |" in of_all
    row = "| `SAGEConv` | exact, but refused with `project`: it sums | `incoming` | 2 | `aggr mean`, `project` |"
    assert row in of_some
    assert "1 are exact but refused in some variants" in of_some


def test_an_outcome_under_incoming_goes_before_one_under_incident_and_a_wrong_one_before_both():
    case = CONVOLUTIONS["GINConv"][0]
    incoming, incident = Outcome(case, "incoming", "exact"), Outcome(case, "incident", "global", exchanges=3)
    assert "| `GINConv` | exact | `incoming` | 0 |" in table({"GINConv": [incident, incoming]}, {})
    no = Outcome(case, "incoming", "refused", reason="a (B): c")
    assert "| `GINConv` | exact, with global statistics | `incident` | 3 |" in table({"GINConv": [no, incident]}, {})
    wrong = table({"GINConv": [incoming, Outcome(case, "incident", "wrong", error=0.1)]}, {})
    assert "**1 WRONG.**" in wrong
    assert "| `GINConv` | WRONG with `default` |" in wrong


@pytest.mark.parametrize(
    ("reason", "clause"),
    [
        ("module.attn (Attention): attention between rows (a, b): all; use less.", "attention between rows (a, b)"),
        (
            "the model (Net): rows are picked by their place (slice(0, 4)), which differs.",
            "rows are picked by their place (slice(0, 4))",
        ),
        ("module (Net): no form is known.", "no form is known"),
        ("an argument is not marked; say what it is.", "an argument is not marked"),
    ],
)
def test_a_reason_is_shortened_to_its_first_clause(reason, clause):
    assert first_clause(reason) == clause


# That the survey can fail


@pytest.fixture
def sabotage(monkeypatch):
    survey._whole.cache_clear()
    yield monkeypatch
    survey._whole.cache_clear()


def verdicts(*cases, policy="incoming"):
    return [survey_case(case, policy).verdict for case in cases]


def test_without_sabotage_these_are_exact():
    assert verdicts(gcn(), with_batch_norm(), sage()) == ["exact", "global", "exact"]


def with_ghosts_changed(change):
    """`Watch.with_ghosts` with something done to the ghosts that were out of date."""
    original = Watch.with_ghosts

    def changed(self, tensor):
        rows = self.rows(tensor)
        filled = original(self, tensor)
        if filled is tensor:
            return tensor
        owned, ghosts = filled.split([self.part.plan.num_owned, self.part.plan.num_ghosts], rows.dim)
        return mark(torch.cat([owned, change(ghosts)], rows.dim), rows.but(fresh=True))

    return changed


@pytest.mark.parametrize("change", [torch.zeros_like, torch.detach], ids=["zero", "no gradient"])
def test_ghosts_without_values_or_without_gradients_are_found_wrong(sabotage, change):
    sabotage.setattr(Watch, "with_ghosts", with_ghosts_changed(change))
    assert verdicts(gcn(), with_batch_norm(), sage()) == ["wrong", "global", "exact"]


def test_a_sum_of_one_rank_instead_of_all_is_found_wrong(sabotage):
    class Local:
        apply = staticmethod(lambda local, part: local)

    sabotage.setattr(across, "_SumOverRanks", Local)
    assert verdicts(gcn(), with_batch_norm(), sage()) == ["exact", "wrong", "exact"]


def test_a_gradient_of_one_rank_instead_of_all_is_found_wrong(sabotage):
    check(lambda x: (x - x.mean(0)) ** 2)
    sabotage.setattr(across._SumOverRanks, "backward", staticmethod(lambda ctx, *grads: (grads[0], None)))
    with pytest.raises(AssertionError):
        check(lambda x: (x - x.mean(0)) ** 2)


def test_a_norm_whose_gradient_is_that_of_one_rank_is_found_wrong(sabotage):
    class Alone:
        sum_over_ranks = staticmethod(lambda local: local)

    def of_one_rank(ctx, *grads):
        ctx.part = Alone
        return usual(ctx, *grads)

    usual = reductions._Normed.backward
    sabotage.setattr(reductions._Normed, "backward", staticmethod(of_one_rank))
    assert verdicts(gcn(), with_batch_norm(), sage()) == ["exact", "wrong", "exact"]


def test_dropout_drawn_by_local_rows_is_found_wrong(sabotage):
    case = find(CONVOLUTIONS["GATConv"], "GATConv (dropout)")
    assert verdicts(case) == ["exact"]
    sabotage.setattr(new_tensors, "_ids", lambda watch, axis, length: torch.arange(length))
    assert verdicts(case) == ["wrong"]


def test_the_command_fails_and_names_what_is_wrong(sabotage, capsys):
    sabotage.setattr(sys, "argv", ["survey", "GCNConv"])
    sabotage.setitem(survey.CONVOLUTIONS, "GCNConv", [gcn()])
    assert survey.main() == 0
    assert capsys.readouterr().out.startswith("GCNConv (edge weights), incoming: exact, off by ")
    sabotage.setattr(Watch, "with_ghosts", with_ghosts_changed(torch.zeros_like))
    assert survey.main() == 1
    assert "GCNConv (edge weights), incoming: wrong" in capsys.readouterr().err


def test_the_command_fails_if_a_convolution_was_forgotten(sabotage, capsys):
    sabotage.setattr(sys, "argv", ["survey"])
    sabotage.setattr(survey, "survey", lambda cases, names: {})
    assert survey.main() == 1
    out, err = capsys.readouterr()
    assert "| `GCNConv` | has no case here |" in out
    assert "GCNConv has neither a case nor a reason" in err
