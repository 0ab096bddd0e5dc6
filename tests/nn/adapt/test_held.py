"""What a module holds: static graphs and rows that it keeps, parameters with a row for each node, and what differs."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import LINKX, GCNConv, LightGCN, SchNet
from whole_and_split import USUAL

from domainpar import World
from domainpar.common.agreement import Refused
from domainpar.nn.adapt.differences import gap
from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.rows import NotExact
from domainpar.nn.adapt.split import split_graph
from domainpar.testing import run_ranks

RING = torch.stack([torch.arange(12), (torch.arange(12) + 1) % 12])  # four edges a rank, so that all have as many
THREE = np.array([0, 1, 0, 2, 2, 1, 0, 1, 2, 2, 0, 1])
VALUES = torch.arange(24, dtype=torch.float64).view(12, 2).sin()


def ring(world):
    return split_graph(RING, 12, world, partitioner=THREE if world.size > 1 else THREE * 0)


def on_ring(work):
    """What three ranks make of the ring, together and by node."""
    found = run_ranks(lambda world: work(world, ring(world)), 3)
    order = np.argsort(THREE, kind="stable")  # a rank's nodes come by their numbers
    return torch.cat(found)[np.argsort(order)] if all(len(one) == 4 for one in found) else torch.cat(found)


def aggregated(x, edge_index):
    return x.new_zeros(x.size(0), x.size(1)).index_add(0, edge_index[1], x[edge_index[0]] ** 2)


class Static(nn.Module):
    """Keeps its graph, and what it adds to each node."""

    def __init__(self, kept, added):
        super().__init__()
        self.kept = [{"graph": kept}]
        self.register_buffer("added", added)

    def forward(self, x):
        return aggregated(aggregated(x + self.added, self.kept[0]["graph"]), self.kept[0]["graph"])


def test_a_graph_and_rows_of_nodes_that_a_module_keeps_stay_each_ranks_own():
    def work(world, part):
        own = part.edge_index.clone()
        module = Static(part.edge_index, part.nodes(VALUES.cos()))
        for _ in range(2):
            result = parallelize(module, world)(part.nodes(VALUES))
        assert torch.equal(part.edge_index, own)
        return result

    assert gap(on_ring(work), Static(RING, VALUES.cos())(VALUES)) < 1e-14


def test_a_layer_that_keeps_its_graph_may_be_made_parallel_again():
    torch.manual_seed(0)
    layer = GCNConv(2, 3, cached=True).double()

    def work(world, part):
        mine = copy.deepcopy(layer)
        for _ in range(2):
            result = parallelize(mine, world)(part.nodes(VALUES), part.edge_index)
        other, again = ring(world), parallelize(mine, world)
        with pytest.raises(NotExact, match="kept from an earlier call"):
            again(other.nodes(VALUES), other.edge_index)
        return result.detach()

    assert gap(on_ring(work), copy.deepcopy(layer)(VALUES, RING).detach()) < 1e-14


class Given(nn.Module):
    """A hook that gives a static graph, as users of SchNet write it."""

    def __init__(self, edge_index, lengths):
        super().__init__()
        self.edge_index, self.lengths = edge_index, lengths

    def forward(self, pos, batch):
        return self.edge_index, self.lengths


def test_a_hook_of_schnet_may_keep_the_graph():
    torch.manual_seed(0)
    lengths = VALUES[:, 0].abs() + 0.5
    atoms = torch.arange(12) % 5 + 1
    sizes = {"hidden_channels": 4, "num_filters": 4, "num_interactions": 2, "num_gaussians": 3}
    schnet = SchNet(**sizes, interaction_graph=Given(RING, lengths)).double()

    def work(world, part):
        mine = copy.deepcopy(schnet)
        mine.interaction_graph = Given(part.edge_index, part.edges(lengths))
        batch = torch.zeros(12, dtype=torch.int64)
        return parallelize(mine, world)(part.nodes(atoms), part.nodes(VALUES), part.nodes(batch)).detach()

    whole = schnet(atoms, VALUES, torch.zeros(12, dtype=torch.int64)).detach()
    for found in on_ring(work).split(1):
        assert gap(found, whole) < 1e-14


@pytest.mark.parametrize("view", [lambda part: part.edge_index[0], lambda part: part.nodes(VALUES)[:, :1]])
def test_an_unmarked_view_of_a_parts_rows_is_neither_rank_0s_nor_the_same_everywhere(view):
    class Keeps(nn.Module):
        def __init__(self, kept):
            super().__init__()
            self.register_buffer("kept", kept)

        def forward(self, x):
            return x.sum(0) + self.kept.sum(0)

    def work(world, part):
        module = Keeps(view(part))
        before = module.kept.clone()
        model = parallelize(module, world)
        assert torch.equal(module.kept, before)
        with pytest.raises(NotExact, match="nobody knows whether its rows"):
            model(part.nodes(VALUES))
        return torch.zeros(0)

    on_ring(work)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda rank: nn.Linear(5 + rank // 2, 8),
            r"weight is \(8, 6\) float32 on rank 2, but \(8, 5\) float32 on the others",
        ),
        (
            lambda rank: nn.Sequential(nn.Linear(2, 2).to(torch.float64 if rank else torch.float32)),
            r"0.weight is \(2, 2\) float32 on rank 0, but \(2, 2\) float64 on the others",
        ),
        (lambda rank: nn.Linear(2, 2, bias=rank != 1), r"bias is missing on rank 1, but \(2,\) float32 on the others"),
    ],
)
def test_modules_that_differ_are_refused_on_all_ranks_by_name_before_anything_is_copied(make, text):
    def work(world):
        torch.manual_seed(world.rank)
        module = make(world.rank)
        before = module.state_dict()
        with pytest.raises(Refused, match=text):
            parallelize(module, world)
        return all(torch.equal(one, before[name]) for name, one in module.state_dict().items())

    assert run_ranks(work, 3) == [True] * 3


# A row for each node


class Learnt(nn.Module):
    """What the network is trained on of each node is its only input; a buffer tells it something of each, too."""

    def __init__(self, num_nodes):
        super().__init__()
        self.embedding = nn.Embedding(num_nodes, 4)
        self.register_buffer("level", torch.arange(num_nodes).double().cos()[:, None])
        self.last = nn.Linear(4, 1)

    def forward(self, edge_index):
        h = aggregated(self.embedding.weight * self.level, edge_index)
        return self.last(aggregated(h, edge_index) + self.embedding.weight), h.mean()


def tasks(module, give, update, optimiser=torch.optim.Adam):
    """Losses, gradients and parameters of three steps."""
    steps = optimiser(module.parameters(), 0.1)
    found = []
    for _ in range(3):
        steps.zero_grad()
        loss = give()
        loss.backward()
        update()
        found += [one.grad.clone() for one in module.parameters()]
        steps.step()
    return [*found, *(one.detach().clone() for one in module.parameters())]


def whole_and_split(module, names, result, sample=USUAL, optimiser=torch.optim.Adam):
    """The same three steps on the whole graph and on four ranks, compared."""
    torch.manual_seed(1)
    weights = torch.randn(sample.num_nodes, dtype=torch.float64)

    def work(world):
        mine, assignment = copy.deepcopy(module), torch.tensor(sample.assignment).numpy()
        part = split_graph(
            sample.edge_index,
            sample.num_nodes,
            world,
            partitioner=assignment * (world.size > 1),
            edge_policy="incident",
        )
        model = parallelize(mine, world, node_parameters=names)
        own = part.owned_nodes(weights)
        return tasks(
            mine, lambda: result(model, part.edge_index, part.nodes(sample.x), own), model.reduce_gradients, optimiser
        )

    bare = copy.deepcopy(module)
    whole = tasks(bare, lambda: result(bare, sample.edge_index, sample.x, weights), lambda: None, optimiser)
    for found in [*run_ranks(work, 4), *run_ranks(work, 1)]:
        for mine, yours in zip(found, whole, strict=True):
            assert gap(mine, yours) < 1e-9


def test_parameters_and_buffers_with_a_row_for_each_node_are_read_as_nodes_and_learnt():
    torch.manual_seed(0)
    module = Learnt(USUAL.num_nodes).double()
    whole_and_split(
        module, ["embedding.weight", "level"], lambda net, ends, x, weights: _loss(*net(ends), weights, net)
    )


def _loss(nodes, graph, weights, net):
    return (nodes[:, 0] * weights).sum() + graph.square()


def test_lightgcn_and_linkx_learn_a_row_for_each_node():
    torch.manual_seed(0)
    linkx = LINKX(USUAL.num_nodes, 4, 3, 2, num_layers=2, num_edge_layers=1).double()
    whole_and_split(
        linkx, ["edge_lin.weight"], lambda net, ends, x, weights: (net(x, ends).square().sum(1) * weights).sum()
    )
    lightgcn = Scores(LightGCN(USUAL.num_nodes, 3, 2)).double()
    whole_and_split(
        lightgcn,
        ["inner.embedding.weight"],
        lambda net, ends, x, weights: (net(ends).square().sum(1) * weights).sum(),
        optimiser=torch.optim.SGD,
    )


class Scores(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, edge_index):
        return self.inner.get_embedding(edge_index)


def test_what_is_named_must_exist_and_have_a_row_for_each_node():
    world = World.alone()
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    with pytest.raises(ValueError, match=r"no parameter or buffer 'embed.weight'; it has embedding.weight, "):
        parallelize(Learnt(13), world, node_parameters=["embed.weight"])
    model = parallelize(Learnt(12).double(), world, node_parameters=["embedding.weight"])
    with pytest.raises(ValueError, match=r"embedding.weight is to have a row for each node: .*\(12, 4\).* 13 nodes"):
        model(part.edge_index)
    assert "weight" not in vars(model.module.embedding)


def test_a_parameter_with_a_row_for_each_node_that_is_not_named_is_told_how():
    world = World.alone()
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    with pytest.raises(NotExact, match=r"node_parameters=\[its name\]"):
        parallelize(Learnt(13).double(), world)(part.edge_index)


@pytest.mark.parametrize(
    "change", [lambda net: net.level.mul_(2), lambda net: setattr(net, "level", net.level * 2)], ids=["in", "anew"]
)
def test_what_has_a_row_for_each_node_is_not_changed_in_a_forward_pass(change):
    class Changes(Learnt):
        def forward(self, edge_index):
            change(self)
            return super().forward(edge_index)

    world = World.alone()
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    with pytest.raises(NotExact, match="level is changed in the forward pass"):
        parallelize(Changes(13).double(), world, node_parameters=["level", "embedding.weight"])(part.edge_index)
