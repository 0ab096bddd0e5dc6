"""Of what is not exact the layer is named whose own code is to blame, and not those behind it."""

import math
import threading

import pytest
import torch
from torch import nn
from verified_networks import ByLocalRows, FirstOf, Net, local_rows, on_rank_1, verified

from domainpar.nn.adapt.rows import mark, rows_of
from domainpar.nn.adapt.watch import RULES


class ByThread(nn.Module):
    def forward(self, x):
        return x * (1 + 1e-6 * len(threading.current_thread().name))


class ByData(nn.Module):
    def forward(self, x):
        made = x.tanh()
        made.detach().data.mul_(len(threading.current_thread().name))
        return made


CALLS = [0]


class ByGlobalCounter(nn.Module):
    def forward(self, x):
        CALLS[0] += 1
        return x + CALLS[0]


class ALittleOnOneRank(nn.Module):
    def forward(self, x):
        return x * (1 + 1e-8 * on_rank_1())


class SeveralResults(nn.Module):
    def forward(self, x):
        return x.tanh(), {"right": x, "wrong": [x.mean(0), x / (1 + local_rows(x))]}


@pytest.mark.parametrize(
    "layer",
    [ByLocalRows, ByThread, ByGlobalCounter, ALittleOnOneRank, lambda: FirstOf(ByPair())],
)
@pytest.mark.parametrize("edges", ["incoming", "incident"])
def test_the_wrong_layer_is_named_and_not_those_behind_it(layer, edges):
    found = verified(Net(layer()), edge_policy=edges)
    assert not found.exact
    assert found.first_difference.name.startswith("middle")
    behind = [row for row in found.rows if row.name in ("conv2", "last", "")]
    assert all(row.difference > 1e-12 for row in behind)
    assert all(row.difference <= 1e-14 for row in found.rows if row.name in ("first", "conv1"))
    assert str(found).count("<- first difference") == 1
    line = next(line for line in str(found).splitlines() if "<- first difference" in line)
    assert line.startswith("middle")
    with pytest.raises(RuntimeError, match=r"the first difference, .* is in middle"):
        found.check()


class ByPair(nn.Module):
    def forward(self, x):
        return x / (1 + local_rows(x)), x


def test_of_a_tuple_the_wrong_part_counts_even_if_nobody_uses_it():
    found = verified(Net(FirstOf(SeveralResults())))
    assert found.first_difference.name == "middle.layer"
    wrong = {row.name for row in found.rows if row.difference > 1e-10}
    assert wrong == {"middle.layer"}
    assert next(row.rows for row in found.rows if row.name == "middle.layer") == "nodes, graph"


class WrongOnSecondCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x / (1 + local_rows(x)) if self.calls == 2 else x.tanh()


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.again = layer, layer

    def forward(self, x):
        return self.again(self.layer(x))


def test_of_a_shared_layer_the_wrong_call_is_named():
    found = verified(Net(Twice(WrongOnSecondCall())))
    assert (found.first_difference.name, found.first_difference.number) == ("middle.layer", 2)
    assert [row.number for row in found.rows if row.name == "middle.layer"] == [1, 2]
    assert "middle.layer (WrongOnSecondCall, call 2)" in found.conclusion
    assert verified(Net(Twice(nn.Tanh()))).exact


class WrongBetween(Net):
    def forward(self, x, edge_index):
        x = self.first(x)
        x = x / (1 + local_rows(x))
        return super().forward(x[:, :4], edge_index)


class WrongAtItsEnd(Net):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) + len(threading.current_thread().name)


def test_code_between_two_layers_is_blamed_on_the_module_whose_it_is():
    found = verified(nn.ModuleDict({"net": WrongBetween()})["net"])
    assert found.first_difference.name == ""
    assert found.first_difference.note == "in its own code, before it calls first (Linear, call 2)"
    found = verified(WrongAtItsEnd())
    assert found.first_difference.name == ""
    assert found.first_difference.note == "in its own code, after it called last (Linear)"
    assert all(row.difference <= 1e-14 for row in found.rows[:-1])


class ChangesItsArgument(nn.Module):
    def forward(self, x):
        made = x.tanh()
        x.data.mul_(len(threading.current_thread().name))
        return made


class KeepsAnArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.changes = ChangesItsArgument()

    def forward(self, x):
        return self.changes(x) + x


def test_a_layer_that_changes_what_it_was_given_is_blamed_itself():
    found = verified(Net(KeepsAnArgument()), parts=2)
    assert found.first_difference.name == "middle.changes"
    assert found.first_difference.note == "which changes what it was given"


def test_a_layer_that_writes_into_its_result_unseen_is_named():
    found = verified(Net(ByData()))
    assert found.first_difference.name == "middle"
    assert all(row.difference is not None for row in found.rows)
    assert "Behind it the model fails: the model (Net): RuntimeError: one of the variables" in found.conclusion


def forgets_to_exchange(watch, call):
    made = RIGHT_SUM(watch, call)
    if not watch.alone and made.size(0) == watch.part.plan.num_owned:
        filled = torch.cat([made, made.new_zeros(watch.part.plan.num_ghosts, made.size(1))])
        return mark(filled, rows_of(made).but(fresh=True))
    return made


def of_owned_only(watch, call):
    return mark(call().cos(), rows_of(call.args[0]).but())


RIGHT_SUM = RULES["index_add"]


def test_a_wrong_rule_shows_in_the_first_layer_that_uses_it(monkeypatch):
    monkeypatch.setitem(RULES, "tanh", of_owned_only)
    found = verified(Net())
    assert found.first_difference.name == "middle"
    assert "send us this table" in found.advice


def test_ghosts_that_are_called_up_to_date_and_are_not_show_where_they_are_made(monkeypatch):
    monkeypatch.setitem(RULES, "index_add", forgets_to_exchange)
    found = verified(Net())
    assert found.first_difference.name == "conv1"
    assert found.first_difference.note.startswith("in its own code, after it called conv1.lin")
    assert next(row.note for row in found.rows if row.name == "conv1") == "copies of other ranks' rows differ"
    assert "conv1.lin (Linear), copies of other ranks' rows differ" in str(found)


class SkipsALayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.maybe = nn.Identity()

    def forward(self, x):
        return x if on_rank_1() else self.maybe(x)


class OneLayerMore(SkipsALayer):
    def forward(self, x):
        return self.maybe(x) if on_rank_1() else x


def test_layers_that_are_not_called_on_every_rank_are_seen():
    found = verified(Net(SkipsALayer()))
    assert found.first_difference.name == "middle"
    assert found.first_difference.note == "in its own code, before it calls middle.maybe (Identity)"
    skipped = next(row for row in found.rows if row.name == "middle.maybe")
    assert math.isinf(skipped.difference)
    assert skipped.note == "called on 3 of 4 ranks"
    found = verified(Net(OneLayerMore()))
    assert found.first_difference.name == "middle.maybe"
    assert found.first_difference.note == "called where the graph is split only"


def test_what_is_no_function_even_on_the_whole_graph_is_said_to_be_none():
    assert any("Two runs on the whole graph differ" in text for text in verified(Net(ByGlobalCounter())).remarks)
    assert not verified(Net(ByLocalRows())).remarks


class OtherColumns(nn.Module):
    def forward(self, x):
        return x, x[:, : 3 if on_rank_1() else 4]


class OtherNumber(nn.Module):
    def forward(self, x):
        return (x, x) if on_rank_1() else (x,)


class OtherMean(nn.Module):
    def forward(self, x):
        return x, x.mean(0) * (2 if on_rank_1() else 1)


@pytest.mark.parametrize("layer", [OtherColumns, OtherNumber, OtherMean])
def test_one_rank_that_returns_something_else_is_enough(layer):
    assert verified(Net(FirstOf(layer()))).first_difference.name == "middle.layer"
