"""A module on a split graph, from outside: arguments, results, weights, gradients."""

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, SAGEConv
from whole_and_split import ODD, USUAL, check, trial_of

from domainpar import World
from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.rows import NotExact
from domainpar.nn.adapt.split import split_graph
from domainpar.testing import run_ranks

Pair = namedtuple("Pair", "nodes graph")


@dataclass
class Result:
    nodes: torch.Tensor


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def part_of(world, sample=USUAL, edges="incoming"):
    assignment = np.array(sample.assignment) % world.size
    return split_graph(sample.edge_index, sample.num_nodes, world, edge_policy=edges, partitioner=assignment)


def called(function, give=None, num_ranks=4, **modules):
    """What a function gives on each rank, called with what `give` makes of the part."""

    def work(world):
        part = part_of(world)
        model = parallelize(Calls(function, **copy.deepcopy(modules)), world)
        args = (part.nodes(USUAL.x), part.edge_index) if give is None else give(part)
        return model(*args)

    return run_ranks(work, num_ranks)


def refusals_of(function, give=None):
    """The messages on each rank."""

    def work(world):
        part = part_of(world)
        model = parallelize(Calls(function), world)
        try:
            model(*((part.nodes(USUAL.x), part.edge_index) if give is None else give(part)))
        except NotExact as refused:
            return str(refused)
        return "nothing was refused"

    return run_ranks(work, 4)


def test_results_of_any_nesting_come_back_with_owned_rows():
    def nest(net, x, edge_index):
        return [x, (x * 2, None, 3)], {"a": Pair(x, x.sum(0))}, OrderedDict(b=x[:, 0])

    ranks = called(nest)
    rows = [len(one[0][0]) for one in ranks]
    assert sum(rows) == 13
    assert rows[2] == 0
    for (first, (second, nothing, three)), named, ordered in ranks:
        assert nothing is None
        assert three == 3
        assert isinstance(named["a"], Pair)
        assert torch.equal(named["a"].graph, ranks[0][1]["a"].graph)
        assert len(first) == len(second) == len(named["a"].nodes) == len(ordered["b"])


@pytest.mark.parametrize(
    "make",
    [lambda x: Result(x), lambda x: {"a": Result(x)}, lambda x: [type("Thing", (), {"x": x})()]],
    ids=["dataclass", "in a dict", "object"],
)
def test_results_inside_objects_have_no_ghosts_or_are_refused(make):
    try:
        ranks = called(lambda net, x, edge_index: make(x * 2))
    except NotExact:
        return
    found = [
        next(iter(one.values())) if isinstance(one, dict) else one[0] if isinstance(one, list) else one for one in ranks
    ]
    assert sum(len(vars(one)[next(iter(vars(one)))]) for one in found) == 13


def test_row_numbers_come_back_as_global_ones_or_not_at_all():
    try:
        ranks = called(lambda net, x, edge_index: edge_index)
    except NotExact:
        return
    ends = torch.cat(ranks, 1)
    assert sorted(map(tuple, ends.t().tolist())) == sorted(map(tuple, USUAL.edge_index.t().tolist()))


def test_a_number_of_rows_as_a_result_is_the_whole_graphs():
    assert [int(one) for one in called(lambda net, x, edge_index: x.size(0))] == [13] * 4


@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda part: (USUAL.x, part.edge_index), "not marked"),
        (lambda part: (part.nodes(USUAL.x), USUAL.edge_index), "not marked"),
        (lambda part: (part.nodes(USUAL.x), [part.edge_index, {"w": torch.ones(2)}]), "not marked"),
        (lambda part: (part.nodes(USUAL.x) * 2, part.edge_index), "not marked"),
        (lambda part: (part.replicate(torch.ones(3)), 1.0), "0 parts"),
        (lambda part: (1.0, 2.0), "0 parts"),
    ],
)
def test_arguments_have_to_be_marked(give, text):
    for message in refusals_of(lambda net, x, edge_index: x, give):
        assert text in message


def test_arguments_of_two_graphs_are_refused():
    def work(world):
        one, other = part_of(world), part_of(world)
        model = parallelize(Calls(lambda net, x, y: x + y), world)
        with pytest.raises(NotExact, match="2 parts"):
            model(one.nodes(USUAL.x), other.nodes(USUAL.x))

    run_ranks(work, 4)


def test_what_was_kept_from_another_graph_is_not_mixed_in():
    def keep(net, x, edge_index):
        last = getattr(net, "last", None)
        net.last = x * 1
        return x * 0 + (0 if last is None else last.mean(0))

    def work(world):
        model = parallelize(Calls(keep), world)
        try:
            for sample in (USUAL, ODD["as many edges as nodes"]):
                part = part_of(world, sample)
                found = model(part.nodes(sample.x), part.edge_index)
        except NotExact:
            return None
        return found

    ranks = run_ranks(work, 4)
    if any(one is None for one in ranks):
        assert all(one is None for one in ranks)
        return
    for row in torch.cat(ranks):
        assert torch.allclose(row, USUAL.x.mean(0))


def test_every_tensor_that_a_module_holds_is_rank_0s():
    class Holds(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.weight = nn.Parameter(torch.full((2, 3), float(rank)).t())
            self.register_buffer("buffer", torch.tensor(rank > 0))
            self.attribute = torch.full((4,), float(rank))
            self.listed = [torch.full((2,), rank)]
            self.register_buffer("empty", torch.zeros(0))

    def work(world):
        found = parallelize(Holds(world.rank), world).module
        return [
            float(one.double().sum())
            for one in (found.weight.detach(), found.buffer, found.attribute, found.listed[0], found.empty)
        ]

    assert run_ranks(work, 4) == [[0.0] * 5] * 4


def test_sizes_that_are_not_known_yet_are_refused_on_all_ranks():
    def work(world):
        with pytest.raises(ValueError, match="is not known"):
            parallelize(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), world)

    run_ranks(work, 4)


@pytest.mark.parametrize("nest", [lambda model: model, nn.Sequential])
def test_what_is_parallel_already_is_not_made_so_again(nest):
    with pytest.raises(ValueError, match="is parallel already"):
        parallelize(nest(parallelize(nn.Linear(2, 2), World.alone())), World.alone())


def tasks(world, use, steps=3, sample=USUAL):
    """Weights after some steps of a small network, with a loss of each kind."""
    net = copy.deepcopy(NETWORK)
    part = part_of(world, sample)
    model = parallelize(net, world)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        nodes, graph = model(part.nodes(sample.x), part.edge_index)
        loss = use(part, nodes, graph)
        loss.backward()
        model.reduce_gradients()
        optimiser.step()
        losses.append(loss.detach())
    return (
        [one.detach().clone() for one in model.parameters()],
        losses,
        [one.grad is not None for one in model.parameters()],
    )


def message(net, x, ends):
    h = net.first(x).relu()
    h = h + h.new_zeros(x.size(0), 4).index_add(0, ends[1], h[ends[0]])
    return net.second(h), net.second(h.mean(0))


def network():
    layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 1), "idle": nn.Linear(2, 2)}
    return Calls(message, **layers).double()


NETWORK = network()
LOSSES = {
    "of nodes": lambda part, nodes, graph: (nodes - part.owned_nodes(USUAL.v)[:, None]).square().sum() / 13,
    "of graphs": lambda part, nodes, graph: (graph - 1).square().sum(),
    "of both": lambda part, nodes, graph: nodes.square().sum() / 13 + graph.exp().sum(),
    "of one rank's rows": lambda part, nodes, graph: (nodes * (part.owned_nodes(torch.arange(13)) == 4)[:, None]).sum(),
    "of nothing of the rows": lambda part, nodes, graph: graph.sum() + nodes[:0].sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_the_whole_losss_and_count_once(name):
    ranks = run_ranks(tasks, 4, LOSSES[name])
    (alone,) = run_ranks(tasks, 1, LOSSES[name])
    for weights, _, has in ranks:
        assert has == alone[2]
        assert all(torch.equal(one, other) for one, other in zip(weights, ranks[0][0]))
        for one, other in zip(weights, alone[0]):
            assert float((one - other).abs().max()) <= 1e-10 * (1 + float(other.abs().max()))


def test_losses_of_the_ranks_add_up():
    ranks = run_ranks(tasks, 4, LOSSES["of nodes"])
    (alone,) = run_ranks(tasks, 1, LOSSES["of nodes"])
    for step in range(3):
        torch.testing.assert_close(sum(one[1][step] for one in ranks), alone[1][step], rtol=1e-12, atol=0)


def test_a_gradient_that_is_not_finite_stops_every_rank():
    def work(world):
        model = parallelize(nn.Linear(2, 2), world)
        if world.rank == 1:
            model.module.weight.grad = torch.full((2, 2), torch.nan)
        with pytest.raises(RuntimeError, match="not finite"):
            model.reduce_gradients()

    run_ranks(work, 4)


def test_frozen_weights_get_no_gradient_and_a_module_without_weights_has_none():
    def work(world):
        model = parallelize(nn.Linear(2, 2), world)
        model.module.bias.requires_grad_(False)
        model.module.weight.grad = torch.full((2, 2), float(world.rank))
        model.reduce_gradients()
        parallelize(nn.ReLU(), world).reduce_gradients()
        return model.module.weight.grad[0, 0].item(), model.module.bias.grad

    assert run_ranks(work, 4) == [(6.0, None)] * 4


def test_refusals_name_the_innermost_module_that_is_to_blame():
    inner = Calls(lambda net, x: x.sort(0))
    for message_ in refusals_of_nested(inner):
        assert message_.startswith("outer.0 (Calls): torch.sort runs along the nodes")


def refusals_of_nested(inner):
    def work(world):
        part = part_of(world)
        model = parallelize(Calls(lambda net, x, ends: net.outer(x), outer=nn.Sequential(copy.deepcopy(inner))), world)
        try:
            model(part.nodes(USUAL.x), part.edge_index)
        except NotExact as refused:
            return str(refused)

    return run_ranks(work, 4)


def test_other_errors_of_a_model_stay_what_they_are():
    def work(world):
        part = part_of(world)
        model = parallelize(Calls(lambda net, x, ends: {}["missing"]), world)
        with pytest.raises(KeyError):
            model(part.nodes(USUAL.x), part.edge_index)

    run_ranks(work, 4)


def test_after_an_error_the_next_call_is_right_and_torch_is_unwatched():
    def work(world):
        part = part_of(world)
        model = parallelize(Calls(lambda net, x, ends, bad: x.sort(0) if bad else x.sum(0)), world)
        with pytest.raises(NotExact):
            model(part.nodes(USUAL.x), part.edge_index, True)
        assert len(torch.ones(3).sort().values) == 3
        return model(part.nodes(USUAL.x), part.edge_index, False)

    for found in run_ranks(work, 4):
        assert torch.allclose(found, USUAL.x.sum(0))


def test_modules_share_and_are_called_twice():
    net = lambda: nn.Linear(4, 4)  # noqa: E731
    check(lambda x, src, dst, e, net: net(net(x).new_zeros(x.size(0), 4).index_add(0, dst, net(x)[src])), net=net)


def test_evaluation_and_learning_are_the_modules_own():
    def work(world):
        model = parallelize(nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4)), world)
        model.eval()
        assert not model.module[0].training
        model.train()
        assert model.module[1].training
        return list(model.module.state_dict())

    assert run_ranks(work, 2)[0] == ["1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_exchanges_and_sums_are_counted():
    def twice(x, src, dst, e):
        h = x.new_zeros(x.size(0), 4).index_add(0, dst, x[src])
        return h[src] + h.mean(0), h[src] * 2

    assert {(rank.exchanges, rank.sums) for rank in trial_of(twice).split(4).ranks} == {(1, 1)}


def test_graphs_with_several_sets_of_nodes_are_refused_by_name():
    class HeteroData:
        node_types, edge_types = ["hit", "cell"], [("hit", "in", "cell")]

    world = World.alone()
    with pytest.raises(NotExact, match="a HeteroData has several sets of nodes"):
        parallelize(nn.Linear(2, 2), world)(HeteroData())


def test_an_adjacency_matrix_is_refused_by_name():
    world = World.alone()
    with pytest.raises(NotExact, match="part.edge_index instead"):
        parallelize(nn.Linear(2, 2), world)(torch.eye(3).to_sparse())


class Gathering(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.last = (
            SAGEConv(4, 16),
            nn.BatchNorm1d(16),
            GATConv(16, 8),
            nn.Linear(8, 1),
        )

    def forward(self, x, edge_index):
        return self.last(self.second(self.norm(self.first(x, edge_index)).relu(), edge_index).relu())


def test_under_autocast_ranks_learn_what_one_learns_to_the_rounding_of_bfloat16():
    torch.manual_seed(0)
    network = Gathering()

    def work(world):
        part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
        model, losses = parallelize(copy.deepcopy(network), world), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(part.nodes(USUAL.x.float()), part.edge_index)
            loss = part.node_mean_share((out.float() - part.owned_nodes(USUAL.x[:, :1].float())).square())
            loss.backward()
            model.reduce_gradients()
            optimizer.step()
            losses.append(float(part.all_reduce(loss)))
        return [str(out.dtype), *losses]

    ((kind, *of_one),), of_four = run_ranks(work, 1), run_ranks(work, 4)
    assert kind == "torch.bfloat16"
    assert of_one[-1] < of_one[0]
    for _, *losses in of_four:
        np.testing.assert_allclose(losses, of_one, rtol=1e-2)
