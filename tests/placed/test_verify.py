"""verify: what is exact passes; of what is not, the layer is named that is to blame."""

import copy
import itertools
import math
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from domainpar import NotExact, Placed, World, in_blocks, parallelize, verify

GENERATOR = torch.Generator().manual_seed(0)
ENDS, X = torch.randint(28, (2, 90), generator=GENERATOR), torch.randn(30, 4, generator=GENERATOR)  # two nodes alone
ENDS[:, :2], ENDS[:, 3:5] = ENDS[:1, :2], ENDS[:, 5:7]  # self-loops, duplicate edges
GRAPH = ENDS, 30


def verified(module, inputs=lambda part: (part.nodes(X), part.edge_index), **arguments):
    return verify(module, GRAPH, inputs=inputs, **arguments)


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


class Calls(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *args):
        return self.function(*self.layers, *args)


def here(x):
    """A fact of one rank: how many rows it holds."""
    return len(x.local) if isinstance(x, Placed) else len(x)


def rank():
    """A fact of one rank: its number, from 1; 0 on the whole graph."""
    name = threading.current_thread().name
    return 1 + int(name.removeprefix("rank ")) if name.startswith("rank ") else 0


def worst(found, kind):
    """The gradient or buffer that differs most."""
    return next(row for row in found.rows if row.kind == kind)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_an_exact_model_is_exact_in_every_layer(parts):
    found = verified(Net(), parts=parts)
    assert found.check() is found
    *layers, gradient, buffer = found.rows
    assert [(row.name, row.kind, row.rows) for row in layers] == [
        ("first", "Linear", "nodes"), ("conv1.lin", "Linear", "nodes"), ("conv1", "Sum", "nodes"),
        ("middle", "Tanh", "nodes"), ("conv2.lin", "Linear", "nodes"), ("conv2", "Sum", "nodes"),
        ("last", "Linear", "edges"), ("", "Net", "edges"),
    ]  # fmt: skip
    assert (gradient.kind, buffer.kind) == ("gradient", "buffer")
    assert all(row.difference <= 1e-13 for row in found.rows)
    assert (found.exchanges > 0) == (parts > 1)
    assert f"exact on {1 if parts == 1 else 2 if parts == 2 else 6} rank" in str(found)
    assert ("one of which owns nothing" in str(found)) == (parts > 2)


def kinds_of_rows(layers, x, edge_index):
    kept, both, small, numbers, scripted = layers
    mask = edge_index[0] != edge_index[1]
    some = kept(x[edge_index[0]][mask])
    both(torch.cat([some, x]))
    numbers((edge_index, mask.nonzero(), (x + 2j * x).conj(), x.mean().item(), len(x)))
    return x.new_zeros(x.shape).index_add(0, edge_index[1][mask], some) + scripted(small(x.mean(0)))


def test_all_kinds_of_rows_are_compared():
    layers = [*(nn.Identity() for _ in range(4)), torch.jit.script(nn.Linear(4, 4))]  # the last one takes no hooks
    found = verified(Calls(kinds_of_rows, nn.ModuleList(layers)))
    assert found.exact, found
    assert [row.rows for row in found.rows if row.number] == [
        "selected edges", "selected edges and nodes", "edges, selected edges, nodes, graph", "graph", "nodes",
    ]  # fmt: skip
    assert all(row.difference is not None for row in found.rows)


def test_the_model_and_the_process_stay_as_they_were():
    module = Net(nn.BatchNorm1d(8))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    found = verified(module)
    assert found.exact, found
    assert worst(found, "buffer").difference <= 1e-14
    assert all(parameter.grad is None and parameter.dtype is torch.float32 for parameter in module.parameters())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32
    assert verified(parallelize(module, World.alone())).exact


@pytest.mark.parametrize(("num_nodes", "num_edges"), [(1, 0), (1, 3), (12, 0), (2, 1)])
def test_tiny_graphs_are_compared_too(num_nodes, num_edges):
    graph = torch.zeros(2, num_edges, dtype=torch.int64), num_nodes
    assert verify(Net(), graph, inputs=lambda part: (part.nodes(X[:num_nodes]), part.edge_index)).exact


def test_a_model_that_draws_is_compared_with_one_rank_and_in_evaluation_with_the_module_alone():
    found = verified(Net(nn.Dropout(0.5)))
    assert found.exact, found
    assert "draws random numbers" in str(found)
    assert "draws" not in str(verified(Net(nn.Dropout(0.5)).eval()))
    always = verified(Net(Calls(lambda x: nn.functional.dropout(x, 0.5) + torch.rand(8))))
    assert always.exact, always
    assert "in evaluation too" in always.remarks[0]
    always_wrong, in_training = (lambda drop, x: x * (1 + rank())), (lambda drop, x: x * (1 + rank() * drop.training))
    for wrong, mode in (always_wrong, "evaluation"), (in_training, "training"):
        found = verified(Net(nn.Sequential(nn.Dropout(0.5), Calls(wrong, nn.Dropout(0.5)))))
        assert found.first_difference.name == "middle.1"
        assert f"This is the table in {mode}" in str(found)


COUNTER = itertools.count()
WRONG = {
    "its rows": lambda x: x / (1 + here(x)),
    "its rank": lambda x: x * (1 + rank()),
    "its rank a little": lambda x: x * (1 + 1e-8 * (rank() == 2)),
    "a counter": lambda x: x + next(COUNTER),
    "rows by hand": lambda x: Placed(x.local.cumsum(0), x.place) if isinstance(x, Placed) else x.cumsum(0),
    "fewer rows": lambda x: Placed(x.local[:1], x.place) if isinstance(x, Placed) else x,
    "numbers of its own": lambda x: x + torch.rand(8, generator=torch.Generator().manual_seed(rank())),
    "a write that nobody sees": lambda x: (made := x.tanh(), made.detach().data.mul_(1 + rank()))[0],
}


@pytest.mark.parametrize("name", WRONG)
def test_the_wrong_layer_is_named_and_not_those_behind_it(name):
    found = verified(Net(Calls(WRONG[name])))
    assert found.first_difference.name == "middle", found
    assert all(row.difference <= 1e-14 for row in found.rows if row.name in ("first", "conv1"))
    assert str(found).count("<- first difference") == 1
    assert next(line for line in str(found).splitlines() if "<- first difference" in line).startswith("middle")
    with pytest.raises(RuntimeError, match=r"the first difference, .* is in middle"):
        found.check()
    assert any("it is not a function" in text for text in found.remarks) == (name == "a counter")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.tanh(), {"right": x, "wrong": [x.mean(0), x / (1 + here(x))]}),
        lambda x: (x, x[:, : 3 if rank() == 2 else 4]),
        lambda x: (x, x) if rank() == 2 else (x,),
        lambda x: (x, rank() == 2),
    ],
)
def test_a_wrong_part_of_a_result_counts_even_if_nobody_uses_it(function):
    found = verified(Net(Calls(lambda layer, x: layer(x)[0], Calls(function))))
    assert found.first_difference.name == "middle.layers.0", found
    assert {row.name for row in found.rows if (row.difference or 0) > 1e-10} == {"middle.layers.0"}


def draws_on_rank_1(x):
    if rank() == 2:
        torch.rand(1)
    return x


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda layer, x: (x, layer(x.mean(0) * (1 + 4e-16 * (rank() == 2))))[0], "given .8,. float64"),
        (lambda layer, x: draws_on_rank_1(layer(x)), "random generator"),
        (lambda layer, x: x if rank() == 2 else layer(x), "middle.layers.0 .Identity., given rows"),
    ],
)
def test_ranks_that_part_are_refused_by_the_call_in_which_they_did(function, words):
    """They might branch differently, however little they differ."""
    found = verified(Net(Calls(function, nn.Identity())))
    with pytest.raises(RuntimeError, match=f"the ranks differ in .*{words}"):
        found.check()


SAME = nn.Identity()
CHANGES = Calls(lambda x: ((x.local if isinstance(x, Placed) else x).data.mul_(1 + rank()), None)[1])


@pytest.mark.parametrize(
    ("function", "layer"),
    [
        (lambda layer, x: layer(x * (1 + rank())), SAME),
        (lambda layer, x: layer(x) + rank(), SAME),
        (lambda layer, x: layer(layer(x) * (1 + rank())), SAME),
        (lambda layer, x: (layer(x), x)[1], CHANGES),
    ],
)
def test_a_layer_is_not_blamed_for_what_it_was_given(function, layer):
    found = verified(Net(Calls(function, layer)), backward=False)
    assert found.first_difference.name == "middle", found


def test_a_call_that_only_ranks_make_is_named():
    found = verified(Net(Calls(lambda layer, x: layer(x) if rank() else x, SAME)))
    assert found.first_difference.note == "called where the graph is split only"


def wrong_gradient(x):
    scale = 1 + rank()
    return x * scale + (x - x * scale).detach()


def test_a_wrong_gradient_or_buffer_is_found_where_all_layers_agree():
    found = verified(Net(Calls(wrong_gradient)))
    assert found.first_difference.name.split(".")[0] in ("first", "conv1")
    assert found.first_difference.kind == "gradient"
    assert "on the way back to a gradient" in found.advice
    assert verified(Net(Calls(wrong_gradient)), backward=False).exact
    found = verified(Net(Calls(lambda norm, x: (norm.running_mean.fill_(rank()), x)[1], nn.BatchNorm1d(8))))
    assert "is in middle.layers.0.running_mean (buffer)" in found.conclusion


def test_less_than_float64_inside_a_model_is_told_and_what_cancels_is_rounding():
    found = verified(Net(Calls(lambda lin, x: lin.float()(x.float() + 0.01 * rank()).double(), nn.Linear(8, 8))))
    assert any("less than float64" in text for text in found.remarks)
    assert verified(Net(Calls(lambda lin, norm, x: x + norm(lin(x)).mean(0), nn.Linear(8, 8), nn.BatchNorm1d(8)))).exact


def test_what_is_not_finite_is_equal_to_itself_only():
    alone = {"inputs": lambda part: part.nodes(X), "backward": False}
    assert verified(Calls(lambda x: x.masked_fill(x > 0, -torch.inf).masked_fill(x < -1, torch.nan)), **alone).exact
    found = verified(Calls(lambda x: x.masked_fill(x > 0.3 * rank(), torch.nan)), **alone)
    assert math.isinf(found.first_difference.difference)


SORTS = Calls(lambda x: x.cumsum(0))


def test_a_refused_model_says_why_and_shows_what_came_before():
    found = verified(Net(SORTS))
    assert found.first_difference is None
    assert found.refused.startswith("middle (Calls)")
    assert [row.name for row in found.rows if row.difference is not None] == ["first", "conv1.lin", "conv1"]
    assert "not reached" in str(found)
    with pytest.raises(NotExact, match="middle"):
        found.check()
    both = verified(Net(nn.Sequential(Calls(WRONG["its rows"]), SORTS)))
    assert both.first_difference.name == "middle.0"
    assert "is in middle.0 (Calls). Behind it the model is refused: middle.1 (Calls)" in both.conclusion
    assert verified(Net(nn.Sequential(nn.Dropout(0.5), SORTS))).refused.startswith("middle.1 (Calls)")


def test_a_model_that_fails_only_where_it_is_split_says_where():
    found = verified(Net(Calls(lambda x: {30: x}[here(x)])))
    assert found.failed.startswith("middle (Calls): KeyError: ")
    with pytest.raises(RuntimeError, match="fails where the graph is split: middle"):
        found.check()


def test_ranks_that_call_other_collectives_end_with_the_layer(monkeypatch):
    monkeypatch.setattr("domainpar.common.timeouts.SMALL_GRAPH", 0.5)
    found = verified(Net(Calls(lambda x: x - x.mean(0) if rank() == 2 else x)), parts=2)
    assert "middle" in f"{found.failed} {found.first_difference}"


def test_a_model_that_fails_on_the_whole_graph_raises_what_it_raises():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        verified(Net(nn.Linear(5, 8)))
    assert "whole graph" in raised.value.__notes__[0]


def test_what_backward_or_a_block_computes_again_is_no_other_call():
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    found = verified(Net(Calls(lambda layer, x: checkpoint(layer, x, use_reentrant=False), inner)))
    assert found.exact, found
    assert [row.number for row in found.rows if row.name == "middle.layers.0.0"] == [1]
    blocks = Calls(lambda layer, x, ends: in_blocks(layer, 7)(x[ends[0]]), nn.Linear(4, 2))
    found = verified(blocks, parts=2)
    assert found.exact, found
    assert [row.name for row in found.rows if row.number] == [""]


def test_arguments_may_be_named_or_a_single_one_and_wrong_ones_are_said_to_be():
    assert verified(Net(), inputs=lambda part: {"x": part.nodes(X), "edge_index": part.edge_index}).exact
    scripted = torch.jit.script(nn.Linear(4, 2))
    assert verified(scripted, inputs=lambda part: part.nodes(torch.randn(30, 4))).exact  # the same on each rank
    found = verified(Net(), inputs=lambda part: (part.nodes_from_local(X[: len(part.local_ids)]), part.edge_index))
    assert found.first_difference.note == "in the arguments themselves"
    assert "part.nodes" in found.advice
    assert "returns nothing" in verified(Calls(lambda x: None), inputs=lambda part: part.nodes(X)).conclusion


def test_gradients_of_arguments_are_compared_and_a_data_may_be_one():
    Data = pytest.importorskip("torch_geometric.data").Data
    asks = X.clone().requires_grad_()

    def inputs(part):
        return Data(x=part.nodes(asks), edge_index=part.edge_index, num_nodes=30)

    function = Calls(lambda data: data.x[data.edge_index[0]])
    found = verified(function, inputs=inputs)
    assert found.exact, found
    assert (worst(found, "gradient").name, worst(found, "gradient").rows) == ("argument 0", "nodes")
    found = verified(Calls(lambda data: wrong_gradient(data.x)), inputs=inputs)
    assert found.first_difference.name == "argument 0"
    assert asks.grad is None


def test_what_cannot_be_run_is_refused():
    arguments = {"inputs": lambda part: (part.nodes(X), part.edge_index)}
    with pytest.raises(ValueError, match=r"a tuple .edge_index, num_nodes., not Tensor; of a PyG Data give .data.edge"):
        verify(Net(), ENDS, **arguments)
    with pytest.raises(ValueError, match="size of middle.weight is not known"):
        verify(Net(nn.LazyLinear(8)), GRAPH, **arguments)
    with pytest.raises(ValueError, match="into 0 parts"):
        verify(Net(), GRAPH, 0, **arguments)
