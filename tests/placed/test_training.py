"""Training steps in the loop of a user's own: losses, gradients and weights are those of one rank, in the same bits."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch_geometric.nn import LINKX, GATConv, GCNConv, LightGCN, SAGEConv
from whole_and_split import USUAL, flat, gap

from domainpar import NotExact, parallelize, split_graph
from domainpar.parallel.errors import RanksDiffer
from domainpar.placed import parameter_gradients as gradients
from domainpar.placed.moves import whole
from domainpar.testing import run_ranks

SIZES = (1, 4)  # of four ranks one owns nothing, and one a single node


class Net(nn.Module):
    """Sums of neighbours with a batch norm, and a layer that is never used."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)  # whose gradient of a bias is rounding
        self.last, self.idle = nn.Linear(6, 4), nn.Linear(2, 2)

    def forward(self, x, edge_index):
        h = self.norm(self.first(x)).relu()
        return self.last(h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]]))


def made(make, dtype=torch.float64):
    torch.manual_seed(0)
    return make().to(dtype)


def compare_steps(loop, net, sizes=SIZES, tolerance=1e-11, weights=True):
    """A loop leaves what it leaves in torch alone, and on all ranks the same bits.

    Args:
        loop: A function of the module, node features, edges and targets; it returns what is compared besides.
        net: The module, which is copied.
        sizes: Numbers of ranks.
        tolerance: For max |difference| / max |value|.
        weights: Whether to compare weights and gradients with those of torch, too.
    """
    mine, dtype = copy.deepcopy(net), next(net.parameters()).dtype
    x, y = USUAL.x.to(dtype), USUAL.z.to(dtype)
    results = flat(loop(mine, x, USUAL.edge_index, y))
    expected, number = left_by(mine, results), len(results)
    for size in sizes:
        found = run_ranks(steps_of_rank, size, loop, net, x, y)
        for left in found:
            for ours, theirs in zip(left, expected if weights else expected[:number]):
                assert gap(ours, theirs, 1e-3) <= tolerance, f"{size} ranks: {ours} is not {theirs}"
            assert all(gap(ours, first) == 0 for ours, first in zip(left, found[0]))


def steps_of_rank(world, loop, net, x, y):
    owner = np.array(USUAL.assignment) % world.size
    part = split_graph(USUAL.edge_index, 13, world, partitioner=owner)
    net = parallelize(copy.deepcopy(net), world)
    return left_by(net, loop(net, part.nodes(x), part.edge_index, part.nodes(y)))


def left_by(net, results):
    results = [torch.as_tensor(one) for one in flat(results)]
    gradients = [None if one.grad is None else one.grad for one in net.parameters()]
    return [*(whole(one.detach()) for one in results), *net.state_dict().values(), *gradients]


LOSSES = {
    "of nodes": lambda out, y, x: F.mse_loss(out, y),
    "of some nodes": lambda out, y, x: F.l1_loss(out[y[:, 0] > 0], y[y[:, 0] > 0]),
    "of one node": lambda out, y, x: out[4].sum(),
    "of the whole graph": lambda out, y, x: (out.mean(0) - 1).square().sum(),
    "of nodes and of the graph": lambda out, y, x: F.huber_loss(out, y) + out.amax(0).exp().sum() / 100,
    "of the largest": lambda out, y, x: out[out[:, 0].argmax()].sum() + out.std(0).sum(),
    "of no rows": lambda out, y, x: out[:0].sum() + out.mean() * 0,
    "of classes": lambda out, y, x: F.cross_entropy(out, y[:, 0].long(), label_smoothing=0.1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_the_whole_losss_and_count_once(name):
    def loop(net, x, edge_index, y):
        optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(LOSSES[name](net(x, edge_index), y, x))
            losses[-1].backward()
            optimizer.step()
        return [loss.item() for loss in losses]

    compare_steps(loop, made(Net))


def accumulated(net, optimizer, loss):
    optimizer.zero_grad()
    loss().backward()
    (loss() * 2).backward()
    optimizer.step()


def never_zeroed(net, optimizer, loss):
    loss().backward()
    optimizer.step()


def zeroed_in_place(net, optimizer, loss):
    optimizer.zero_grad(set_to_none=False)
    loss().backward()
    optimizer.step()


def clipped(net, optimizer, loss):
    optimizer.zero_grad()
    loss().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    nn.utils.clip_grad_value_(net.parameters(), 0.005)
    optimizer.step()


def evaluated_between(net, optimizer, loss):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    net.eval()
    with torch.no_grad():
        net.seen = loss().item()
    net.train()


def by_autograd_grad(net, optimizer, loss):
    learned = [one for name, one in net.named_parameters() if "idle" not in name]
    for one, gradient in zip(learned, torch.autograd.grad(loss(), learned)):
        one.grad = whole(gradient)
    optimizer.step()


def sharpness_aware(net, optimizer, loss):
    """Up the slope, learn there, and back."""
    optimizer.zero_grad()
    loss().backward()
    steps = [(one, 0.01 * one.grad / (one.grad.norm() + 1e-12)) for one in net.parameters() if one.grad is not None]
    with torch.no_grad():
        for one, step in steps:
            one.add_(step)
    optimizer.zero_grad()
    loss().backward()
    with torch.no_grad():
        for one, step in steps:
            one.sub_(step)
    optimizer.step()


def scheduled_by_the_loss(net, optimizer, loss):
    optimizer.zero_grad()
    value = loss()
    value.backward()
    optimizer.step()
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0).step(value.item())


def with_closure(net, optimizer, loss):
    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


def frozen_for_a_step(net, optimizer, loss):
    net.first.requires_grad_(False)
    never_zeroed(net, optimizer, loss)
    net.first.requires_grad_(True)
    never_zeroed(net, optimizer, loss)


LOOPS = [accumulated, never_zeroed, zeroed_in_place, clipped, evaluated_between, by_autograd_grad, sharpness_aware,
         scheduled_by_the_loss, with_closure, frozen_for_a_step]  # fmt: skip


def hooked(net, optimizer, loss):
    """Gradients that hooks change and forget as they come."""

    def tripled(parameter):
        parameter.grad.mul_(3.0)

    def forgotten(parameter):
        parameter.grad = None

    hooks = [net.last.weight.register_post_accumulate_grad_hook(tripled),
             net.norm.weight.register_post_accumulate_grad_hook(forgotten)]  # fmt: skip
    never_zeroed(net, optimizer, loss)
    for hook in hooks:
        hook.remove()


LOOPS.append(hooked)


@pytest.fixture(params=[gradients.BUCKET, 8], ids=["one sum", "a sum for each parameter"])
def bucket(request, monkeypatch):
    """How many numbers are summed while backward goes on, or at its end."""
    monkeypatch.setattr(gradients, "BUCKET", request.param)


def test_large_sums_are_started_while_backward_goes_on(monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET", 8)
    order, usual = [], gradients.start_sum_exactly

    def noting(shares, transport):
        order.append([tuple(share.shape) for share in shares])
        return usual(shares, transport)

    monkeypatch.setattr(gradients, "start_sum_exactly", noting)

    def work(world):
        part, net = split_graph(USUAL.edge_index, 13, world, partitioner="contiguous"), parallelize(Net(), world)
        x = part.nodes(torch.randn(13, 4, generator=torch.Generator().manual_seed(1)))
        net.first.weight.register_post_accumulate_grad_hook(lambda _: order.append("the first layer's"))
        net(x, part.edge_index).sum().backward()

    run_ranks(work, 2)
    first = order.index("the first layer's")
    assert [shapes for shapes in order[:first] if (4, 6) in shapes]


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("step", LOOPS)
def test_loops_that_are_right_on_one_rank_are_right_on_many(step):
    def loop(net, x, edge_index, y):
        kind = torch.optim.LBFGS if step is with_closure else torch.optim.Adam
        optimizer = kind(net.parameters(), 0.01)
        for _ in range(3):
            step(net, optimizer, lambda: F.mse_loss(net(x, edge_index), y))
        return net.seen if step is evaluated_between else 0.0

    compare_steps(loop, made(Net), tolerance=1e-8 if step is with_closure else 1e-10)


def test_weights_averaged_over_steps_are_those_of_one_rank():
    def loop(net, x, edge_index, y):
        ema = AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            never_zeroed(net, optimizer, lambda: F.mse_loss(net(x, edge_index), y))
            ema.update_parameters(net)
        again = copy.deepcopy(ema.module).eval()
        return [*(one.detach() for one in ema.parameters()), again(x, edge_index)]

    compare_steps(loop, made(Net))


def test_two_models_share_an_optimizer_and_a_loss():
    def loop(net, x, edge_index, y):
        optimizer = torch.optim.SGD([*net[0].parameters(), *net[1].parameters()], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            h = net[0](x, edge_index)
            (F.mse_loss(net[1](h.detach(), edge_index), y) + F.mse_loss(h, y)).backward()
            optimizer.step()
        return h

    compare_steps(loop, made(lambda: nn.ModuleList([Net(), Net()])))


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_on_every_rank_as_on_one(bad):
    def loop(net, x, edge_index, y):
        out = net.last(net.first(x))
        factor = torch.where(torch.arange(13) == 4, bad, 1.0).to(x.dtype)  # of the one node of one rank
        (out[:, 0] * factor).mean().backward()
        return [float(one.grad.isfinite().all()) for one in (net.first.weight, net.last.weight)]

    compare_steps(loop, made(Net))


def test_sparse_gradients_are_refused_by_name():
    def work(world):
        part = split_graph(USUAL.edge_index, 13, world)
        table = parallelize(nn.Embedding(3, 4, sparse=True), world)
        with pytest.raises(NotExact, match="leave out sparse=True"):
            table(part.nodes(USUAL.batch)).sum().backward()

    run_ranks(work, 3)


class Gathering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(4, 16), nn.BatchNorm1d(16), GATConv(16, 8), nn.Linear(8, 4)])

    def forward(self, x, edge_index):
        first, norm, second, last = self.layers
        return last(second(norm(first(x, edge_index)).relu(), edge_index).relu())


def test_under_autocast_ranks_learn_what_one_learns_to_the_rounding_of_bfloat16():
    def loop(net, x, edge_index, y):
        optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = net(x, edge_index)
            assert out.dtype is torch.bfloat16
            losses.append(F.mse_loss(out.float(), y))
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0]
        return [loss.item() for loss in losses]

    compare_steps(loop, made(Gathering, torch.float32), tolerance=0.01, weights=False)


def test_statistics_of_half_precision_are_taken_in_float32():
    e = (USUAL.e + 100).bfloat16()
    exact = nn.BatchNorm1d(4).double()(e.double()).detach()

    def work(world):
        part = split_graph(USUAL.edge_index, 13, world)
        return part.whole(nn.BatchNorm1d(4).bfloat16()(part.edges(e))).double().detach()

    for found in run_ranks(work, 2):
        assert gap(found, exact) < 0.01


def test_a_parameter_or_buffer_with_a_row_for_each_node_is_learnt():
    class Learnt(nn.Module):
        """What the network is trained on of each node is its only input; a buffer tells it something of each, too."""

        def __init__(self):
            super().__init__()
            self.embedding, self.last = nn.Embedding(13, 4), nn.Linear(4, 1)
            self.register_buffer("level", torch.arange(13.0).cos()[:, None])

        def forward(self, x, edge_index):
            h = self.embedding.weight * self.level
            return self.last(
                torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]] + self.embedding.weight[edge_index[1]])
            )

    def loop(net, x, edge_index, y):
        return [
            never_zeroed(net, torch.optim.Adam(net.parameters(), 0.1), lambda: F.mse_loss(net(x, edge_index), y[:, :1]))
            or 0.0
        ]

    compare_steps(loop, made(Learnt), tolerance=1e-8)


@pytest.mark.parametrize(
    ("make", "result"),
    [
        (lambda: LINKX(13, 4, 3, 2, num_layers=2, num_edge_layers=1), lambda net, x, ends: net(x, ends)),
        (lambda: LightGCN(13, 3, 2), lambda net, x, ends: net.get_embedding(ends)),
        (lambda: GCNConv(4, 3, cached=True), lambda net, x, ends: net(net(x, ends) @ x.new_ones(3, 4), ends)),
    ],
    ids=["LINKX", "LightGCN", "a layer that keeps its graph"],
)
def test_layers_that_hold_something_of_each_node_learn_it(make, result):
    def loop(net, x, edge_index, y):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            result(net, x, edge_index).square().mean().backward()
            optimizer.step()
        return 0.0

    compare_steps(loop, made(make))


@pytest.mark.parametrize("zeroed", [True, False])
def test_groups_with_graphs_of_their_own_learn_the_sum_of_their_losses(zeroed):
    net = made(Net)
    net.norm = nn.Identity()

    def loss(net, group, x, edge_index, y):
        out = net(x, edge_index) if group == 0 else net.first(x).square()[:, :4]  # one group has not all gradients
        return F.mse_loss(out, y)

    def work(world):
        mine, part = parallelize(copy.deepcopy(net), world), of_group(world)
        optimizer = torch.optim.SGD(mine.parameters(), 0.1)
        for _ in range(3):
            x = part.nodes(USUAL.x + world.data_group)
            if zeroed:
                optimizer.zero_grad()
            loss(mine, world.data_group, x, part.edge_index, part.nodes(USUAL.z)).backward()
            optimizer.step()
        return [one.detach() for one in mine.parameters()]

    alone = copy.deepcopy(net)
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(3):
        if zeroed:
            optimizer.zero_grad()
        for group in range(2):
            loss(alone, group, USUAL.x + group, USUAL.edge_index, USUAL.z).backward()
        optimizer.step()
    for found in run_ranks(work, 4, domain_size=2):
        for ours, theirs in zip(found, alone.parameters()):
            assert gap(ours, theirs.detach()) < 1e-12


def of_group(world):
    return split_graph(USUAL.edge_index, 13, world, partitioner=np.arange(13) % 2, group="domain")


def test_groups_with_graphs_of_their_own_end_a_step_with_one_set_of_running_means():
    net = made(lambda: nn.BatchNorm1d(4))

    def work(world):
        mine, part = parallelize(copy.deepcopy(net), world), of_group(world)
        for _ in range(2):
            mine(part.nodes(USUAL.x + 5 * world.data_group)).square().mean().backward()
        return mine.running_mean, int(mine.num_batches_tracked)

    both = [copy.deepcopy(net) for _ in range(2)]
    for group, mine in enumerate(both):
        for _ in range(2):
            mine(USUAL.x + 5 * group)
    for running_mean, batches in run_ranks(work, 4, domain_size=2):
        assert gap(running_mean, (both[0].running_mean + both[1].running_mean) / 2) < 1e-12
        assert batches == 2 * 2  # integers add up


def test_weights_that_parted_between_groups_are_refused_in_the_next_step():
    def work(world):
        mine, part = parallelize(made(lambda: nn.Linear(4, 1)), world), of_group(world)
        with torch.no_grad():
            mine.weight += world.data_group
        with pytest.raises(RanksDiffer, match="ranks 2, 3 no longer"):
            mine(part.nodes(USUAL.x)).square().mean().backward()

    run_ranks(work, 4, domain_size=2)


def test_a_module_without_weights_and_one_with_frozen_ones_have_no_gradient():
    def work(world):
        x = split_graph(USUAL.edge_index, 13, world).nodes(USUAL.x.clone().requires_grad_())
        layer = parallelize(nn.Linear(4, 4).double(), world)
        layer.bias.requires_grad_(False)
        parallelize(nn.ReLU(), world)(layer(x)).sum().backward()
        return layer.bias.grad is None, layer.weight.grad.shape

    assert run_ranks(work, 3) == [(True, (4, 4))] * 3


@pytest.mark.parametrize("holds", [[1], [0, 2]], ids=str)
def test_ranks_of_which_some_hold_the_gradients_make_the_same_exchanges(holds):
    """Autograd copies a gradient that anything else holds, in place of taking it over: here on some ranks alone."""

    def steps(world, holds):
        part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
        net = made(Net)
        of_nodes = nn.Parameter(part.nodes(torch.ones(USUAL.num_nodes, 4, dtype=torch.float64)))
        model, kept = parallelize(net, world), []
        if world.rank in holds:
            for parameter in [*net.parameters(), of_nodes]:
                parameter.register_hook(kept.append)
        for _ in range(2):
            loss = (model(part.nodes(USUAL.x.double()) * of_nodes, part.edge_index) ** 2).mean()
            loss.backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        return [*gradients, part.whole(of_nodes.grad)]

    for found, expected in zip(run_ranks(steps, 3, holds), run_ranks(steps, 3, ()), strict=True):
        assert all(map(torch.equal, found, expected))
