"""verify: what is exact passes, and of what is not the layer is named whose own code is to blame."""

import copy
import math
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from domainpar.nn.adapt import verify as room
from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.rows import NotExact, Rows, mark, rows_of
from domainpar.nn.adapt.verify import verify
from domainpar.nn.adapt.watch import RULES
from domainpar.parallel.world import World

NUM_NODES, NUM_EDGES = 30, 90


def drawn(seed=0, num_nodes=NUM_NODES, num_edges=NUM_EDGES):
    """A graph with self-loops, duplicate edges and isolated nodes, and features of nodes."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, max(num_nodes - 2, 1), (2, num_edges), generator=generator)
    ends[:, :2] = ends[:1, :2]
    ends[:, 3:5] = ends[:, 5:7]
    return ends, torch.randn(num_nodes, 4, generator=generator)


ENDS, X = drawn()


def of_nodes(part):
    return part.nodes(X), part.edge_index


def verified(module, inputs=of_nodes, **arguments):
    return verify(module, (ENDS, NUM_NODES), inputs=inputs, **arguments)


class Sum(nn.Module):
    """Sums where edges end."""

    def __init__(self, width=8):
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x, edge_index):
        x = self.lin(x)
        return x.new_zeros(x.size(0), x.size(1)).index_add(0, edge_index[1], x[edge_index[0]])


class Net(nn.Module):
    """Two sums with a layer between them, then a score of each edge."""

    def __init__(self, middle=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.conv1, self.middle = nn.Linear(4, 8), Sum(), middle or nn.Tanh()
        self.conv2, self.last = Sum(), nn.Linear(16, 1)

    def forward(self, x, edge_index):
        x = self.middle(self.conv1(self.first(x), edge_index))
        x = self.conv2(x, edge_index)
        return self.last(torch.cat([x[edge_index[0]], x[edge_index[1]]], -1)).squeeze(-1)


def local_rows(x):
    """A fact of one rank, found behind the back of the watch."""
    rows = rows_of(x)
    return rows.axis.length if isinstance(rows, Rows) else x.size(0)


class ByLocalRows(nn.Module):
    def forward(self, x):
        return x / (1 + local_rows(x))


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
        return x * (1 + 1e-8 * (threading.current_thread().name == "rank 1"))


class SeveralResults(nn.Module):
    def forward(self, x):
        return x.tanh(), {"right": x, "wrong": [x.mean(0), x / (1 + local_rows(x))]}


class FirstOf(nn.Module):
    """Uses of what a layer returns only what is right."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def nothing_changed_by(module):
    assert module.middle.training
    assert all(parameter.grad is None and parameter.dtype is torch.float32 for parameter in module.parameters())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


@pytest.mark.parametrize("edges", ["incoming", "incident"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_an_exact_model_is_exact_in_every_layer(edges, parts):
    found = verified(Net(), edges=edges, parts=parts)
    assert found.exact, found
    assert found.check() is found
    assert [(row.name, row.kind) for row in found.rows] == [
        ("first", "Linear"),
        ("conv1.lin", "Linear"),
        ("conv1", "Sum"),
        ("middle", "Tanh"),
        ("conv2.lin", "Linear"),
        ("conv2", "Sum"),
        ("last", "Linear"),
        ("", "Net"),
    ]
    assert [row.rows for row in found.rows] == ["nodes"] * 6 + ["edges"] * 2
    assert all(row.difference <= 1e-14 for row in found.rows)
    assert found.gradients.difference <= 1e-13
    assert (found.exchanges > 0) == (parts > 1)
    assert "conclusion" not in str(found)
    assert f"exact on {1 if parts == 1 else 2 if parts == 2 else 6} rank" in str(found)
    assert ("one of which owns nothing" in str(found)) == (parts > 2)


@pytest.mark.parametrize(
    "layer",
    [ByLocalRows, ByThread, ByGlobalCounter, ALittleOnOneRank, lambda: FirstOf(ByPair())],
)
@pytest.mark.parametrize("edges", ["incoming", "incident"])
def test_the_wrong_layer_is_named_and_not_those_behind_it(layer, edges):
    found = verified(Net(layer()), edges=edges)
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


class GradientByThread(nn.Module):
    def forward(self, x):
        scale = len(threading.current_thread().name)
        return x * scale + (x - x * scale).detach()


def test_a_wrong_gradient_is_found_where_all_layers_agree():
    found = verified(Net(GradientByThread()))
    assert found.first_difference is None
    assert not found.exact
    assert found.gradients.difference > 1e-3
    assert found.gradients.name.split(".")[0] in ("first", "conv1")
    assert "all layers agree, but the gradient of" in found.conclusion
    assert verified(Net(GradientByThread()), backward=False).exact


class LocalMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.fill_(local_rows(x))
        return x


def test_a_wrong_buffer_is_found_where_all_layers_agree():
    found = verified(Net(LocalMean()))
    assert not found.exact
    assert found.buffers.name == "middle.seen"
    assert "the buffer of middle.seen" in found.conclusion
    assert verified(Net(nn.BatchNorm1d(8))).buffers.difference <= 1e-14


def test_dropout_is_compared_with_one_rank_and_in_evaluation_with_the_module_alone():
    found = verified(Net(nn.Dropout(0.5)))
    assert found.exact, found
    assert [row.mode for row in found.rows] == ["eval"] * 8 + [""] * 8
    assert "draws random numbers" in str(found)
    assert not any(row.mode for row in verified(Net(nn.Dropout(0.5)).eval()).rows)
    wrong = nn.Sequential(nn.Dropout(0.5), ByLocalRows())
    assert str(verified(Net(wrong))).count("<- first difference") == 1
    assert (verified(Net(wrong)).first_difference.name, verified(Net(wrong)).first_difference.mode) == (
        "middle.1",
        "eval",
    )


class WrongInTraining(nn.Module):
    def forward(self, x):
        return x / (1 + local_rows(x)) if self.training else x


class AlwaysDrops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5)


def test_what_is_wrong_in_training_alone_is_found_beside_dropout():
    found = verified(Net(nn.Sequential(nn.Dropout(0.5), WrongInTraining())))
    assert (found.first_difference.name, found.first_difference.mode) == ("middle.1", "")


def test_dropout_in_evaluation_is_compared_with_one_rank_only():
    found = verified(Net(AlwaysDrops()))
    assert found.exact
    assert "in evaluation too" in found.remarks[0]


class Masks(nn.Module):
    """Some of the edges, loops behind them; sums over both."""

    def __init__(self):
        super().__init__()
        self.kept, self.joined = nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x, edge_index):
        mask = edge_index[0] != edge_index[1]
        loops = torch.arange(x.size(0))
        some = self.kept(x[edge_index[0]][mask])
        ends = torch.cat([edge_index[:, mask], torch.stack([loops, loops])], 1)
        both = self.joined(torch.cat([some, x]))
        return x.new_zeros(x.size(0), 4).index_add(0, ends[1], both)


@pytest.mark.parametrize("edges", ["incoming", "incident"])
def test_rows_made_inside_a_layer_are_told_apart_by_their_keys(edges):
    found = verified(Masks(), edges=edges)
    assert found.exact
    rows = {row.name: (row.rows, row.difference) for row in found.rows}
    assert rows["kept"][0] == "some of the edges"
    assert rows["joined"][0] == "some of the edges + nodes"
    assert all(difference is not None for _, difference in rows.values())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Doubled.apply(x * self.scale)


class Unwatched(nn.Module):
    """Layers beside the result, of whose rows nobody knows anything or which number rows that it made."""

    def __init__(self):
        super().__init__()
        self.unknown, self.numbers, self.ends, self.last = Unknown(), nn.Identity(), nn.Identity(), nn.Linear(4, 2)

    def forward(self, x, edge_index):
        self.unknown(x)
        some = (x[:, 0] > 0)[x[:, 1] > 0]
        self.numbers(some.nonzero())
        self.ends((edge_index, (x[:, 0] > 0).nonzero()))
        return self.last(x)


@pytest.mark.parametrize("edges", ["incoming", "incident"])
def test_what_cannot_be_compared_says_why_and_row_numbers_are_compared_by_what_they_name(edges):
    found = verified(Unwatched(), edges=edges)
    assert found.exact
    unknown, numbers, ends = found.rows[:3]
    assert (unknown.difference, numbers.difference, ends.difference) == (None, None, 0.0)
    assert unknown.note == "not compared: nobody knows what its rows are"
    assert numbers.note == "not compared: numbers of rows that were made inside the model"
    assert ends.rows == "edges, some of the nodes"


class JoinedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.Tanh()

    def forward(self, x, edge_index):
        return self.all(torch.cat([torch.cat([x, 2 * x]), 3 * x]))


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_what_backward_computes_again_is_no_other_call():
    found = verified(Net(Recomputed()))
    assert found.exact, found
    assert [row.number for row in found.rows if row.name == "middle.inner.0"] == [1]


def test_rows_joined_twice_are_compared():
    found = verified(JoinedTwice())
    assert found.exact
    assert found.rows[0].difference == 0.0
    assert found.gradients is None


class Nothing(nn.Module):
    def forward(self, x, edge_index):
        return None


def test_a_model_that_returns_nothing_is_not_called_exact():
    found = verified(Nothing())
    assert not found.exact
    assert "nothing that could be compared" in str(found)


class Sorts(nn.Module):
    def forward(self, x):
        return x.sort(0).values


def test_a_refused_model_says_why_and_shows_what_came_before():
    found = verified(Net(Sorts()))
    assert found.first_difference is None
    both = verified(Net(nn.Sequential(ByLocalRows(), Sorts())))
    assert both.first_difference.name == "middle.0"
    assert "is in middle.0 (ByLocalRows). Behind it the model is refused: middle.1 (Sorts)" in both.conclusion
    assert found.refused.startswith("middle (Sorts): torch.sort runs along the nodes")
    assert [row.name for row in found.rows if row.difference is not None] == ["first", "conv1.lin", "conv1"]
    assert "not reached" in str(found)
    with pytest.raises(NotExact, match="middle"):
        found.check()
    assert verified(Net(nn.Sequential(nn.Dropout(0.5), Sorts()))).refused.startswith("middle.1 (Sorts)")


class FailsWhereFew(nn.Module):
    def forward(self, x):
        if local_rows(x) < NUM_NODES:
            raise KeyError("too few")
        return x


class SumsOnOneRank(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if threading.current_thread().name == "rank 1" else x


class SkipsALayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.maybe = nn.Identity()

    def forward(self, x):
        return x if threading.current_thread().name == "rank 1" else self.maybe(x)


class OneLayerMore(SkipsALayer):
    def forward(self, x):
        return self.maybe(x) if threading.current_thread().name == "rank 1" else x


def test_a_model_that_fails_only_where_it_is_split_says_where():
    found = verified(Net(FailsWhereFew()))
    assert found.failed == "middle (FailsWhereFew): KeyError: 'too few'"
    assert found.first_difference is None
    with pytest.raises(RuntimeError, match="fails where the graph is split: middle"):
        found.check()


def test_ranks_that_call_other_collectives_end_with_the_layer(monkeypatch):
    monkeypatch.setattr(room, "SECONDS_TO_WAIT", 0.3)
    found = verified(Net(SumsOnOneRank()), parts=2)
    assert not found.exact
    assert "middle" in f"{found.failed} {found.first_difference}"


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


def test_less_than_float64_inside_a_model_is_told():
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Linear(8, 8)

        def forward(self, x):
            self.low.float()
            return self.low(x.float() + 0.01 * len(threading.current_thread().name)).double()

    assert any("less than float64" in text for text in verified(Net(Casts())).remarks)


def test_what_is_not_finite_is_equal_to_itself_only():
    class Masked(nn.Module):
        def forward(self, x):
            lowest = x.masked_fill(x > 0, -torch.inf)
            return lowest.masked_fill(x.abs() < 0.1, torch.nan)

    class WrongNan(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 0.3 * len(threading.current_thread().name) - 3, torch.nan)

    found = verified(Masked_alone(Masked()), backward=False)
    assert found.exact
    assert math.isinf(verified(Masked_alone(WrongNan())).first_difference.difference)


class Masked_alone(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, edge_index):
        return self.layer(x)


def on_rank_1():
    return threading.current_thread().name == "rank 1"


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


class Plain(nn.Module):
    """Makes tensors of its own, cancels, catches an error, and looks at complex numbers."""

    def __init__(self):
        super().__init__()
        self.table, self.raises, self.complex = torch.eye(8) / 3, Raises(), nn.Identity()
        self.lin, self.norm, self.small = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Identity()

    def forward(self, x):
        try:
            self.raises(x)
        except ValueError:
            x = self.norm(self.lin(x @ self.table @ torch.eye(8)))
        self.complex(x + 2j * x)
        return x + self.small(x.mean(0))


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError


def test_what_cancels_is_rounding_and_what_models_make_themselves_is_float64():
    found = verified(Net(Plain()))
    assert found.exact, found
    assert next(row.rows for row in found.rows if row.name == "middle.small") == "graph"


def test_the_model_and_the_process_stay_as_they_were():
    module = Net(nn.BatchNorm1d(8))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    verified(module)
    nothing_changed_by(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == 1


def test_a_model_that_fails_on_the_whole_graph_raises_what_it_raises():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        verified(Net(nn.Linear(5, 8)))
    assert "whole graph" in raised.value.__notes__[0]
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(("num_nodes", "num_edges"), [(1, 0), (1, 3), (12, 0), (2, 1)])
def test_tiny_graphs_are_compared_too(num_nodes, num_edges):
    ends, x = torch.zeros(2, num_edges, dtype=torch.int64), torch.ones(num_nodes, 4)
    found = verify(Net(), (ends, num_nodes), inputs=lambda part: (part.nodes(x), part.edge_index))
    assert found.exact, found
    assert verify(Masks(), (ends, num_nodes), inputs=lambda part: (part.nodes(x), part.edge_index)).exact


def test_arguments_that_are_not_marked_are_refused_and_wrong_ones_named():
    found = verified(Net(), inputs=lambda part: (X[part.local_ids], part.edge_index))
    assert "is not marked" in found.refused
    found = verified(Net(), inputs=lambda part: (part.local_nodes(X[: len(part.local_ids)]), part.edge_index))
    assert found.first_difference.note == "in the arguments themselves"
    assert "part.nodes" in found.advice


def test_a_module_that_runs_on_a_split_graph_already_may_be_given():
    assert verified(parallelize(Net(), World.alone())).exact


def test_arguments_may_be_named_or_a_single_one():
    assert verified(Net(), inputs=lambda part: {"x": part.nodes(X), "edge_index": part.edge_index}).exact
    assert verified(nn.Linear(4, 2), inputs=lambda part: part.nodes(X)).exact


@pytest.mark.parametrize(
    ("graph", "words"),
    [((ENDS, NUM_NODES), "pass inputs"), (ENDS, r"a PyG Data or a tuple"), ((ENDS, NUM_NODES, 3), "a PyG Data")],
)
def test_what_is_no_graph_or_says_too_little_is_refused(graph, words):
    with pytest.raises(ValueError, match=words):
        verify(Net(), graph)


def test_no_parts_and_unknown_sizes_are_refused():
    with pytest.raises(ValueError, match="0 parts"):
        verified(Net(), parts=0)
    with pytest.raises(ValueError, match="size is not known"):
        verified(Net(nn.LazyLinear(8)))


class TakesData(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, data):
        x = self.lin(data.x)
        at_ends = x.new_zeros(data.num_nodes, 3).index_add(0, data.edge_index[1], x[data.edge_index[0]])
        return at_ends * data.node_weight[:, None], x[data.edge_index[0]] * data.edge_attr


class TakesFields(nn.Module):
    def forward(self, x, edge_index, edge_attr, pos=None, other=None):
        return x[edge_index[0]].sum(-1, keepdim=True) * edge_attr + pos[edge_index[1]].sum(-1, keepdim=True)


def data(**fields):
    Data = pytest.importorskip("torch_geometric.data").Data
    return Data(x=X, edge_index=ENDS, edge_attr=torch.arange(float(NUM_EDGES))[:, None], pos=X[:, :3] ** 2, **fields)


def test_fields_of_a_data_are_taken_by_their_names():
    assert verify(TakesFields(), data(faces=torch.zeros(3))).exact
    assert verify(TakesFields(), data(num_nodes=NUM_NODES)).exact
    graph = data(node_weight=torch.arange(float(NUM_NODES)), train_mask=X[:, 0] > 0, num_nodes=NUM_NODES)
    found = verify(TakesData(), graph)
    assert found.exact
    assert found.rows[-1].rows == "nodes, edges"
    assert graph.x is X
    assert graph.num_nodes == NUM_NODES


def test_fields_of_a_data_whose_rows_nobody_knows_are_refused():
    with pytest.raises(ValueError, match="field faces.*not known; pass inputs"):
        verify(TakesData(), data(faces=torch.zeros(3)))
    with pytest.raises(ValueError, match=f"field y, of shape .{NUM_EDGES},., are taken for nodes.*pass inputs"):
        verify(TakesData(), data(y=torch.zeros(NUM_EDGES)))
    with pytest.raises(ValueError, match="forward asks for edge_attr"):
        verify(TakesFields(), type(data())(x=X, edge_index=ENDS))


def test_a_layer_of_pyg_shows_its_parts():
    GCNConv = pytest.importorskip("torch_geometric.nn").GCNConv
    found = verify(GCNConv(4, 3), data(), parts=2)
    assert found.exact
    assert [row.name for row in found.rows] == ["lin", "aggr_module", ""]
