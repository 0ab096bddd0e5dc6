"""Gradients of gradients over ranks: exchanges and sums, models trained on forces, and what is refused by name."""

import copy
from pathlib import Path

import pytest
import torch
from marks import slow
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint
from whole_and_split import ODD, USUAL

from domainpar import parallelize, split_graph
from domainpar.nn.adapt.across import multiplied, summed
from domainpar.parallel.transport import CHECK_CALLS
from domainpar.testing import run_ranks

PAGE = Path(__file__).parents[3] / "docs/recipes/model_forces.md"


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def part_of(world, sample, edges="incoming"):
    """The part of this rank; of three ranks the first has nothing."""
    assignment = [0 if world.size == 1 else world.size - 1 - node % 2 for node in range(sample.num_nodes)]
    return split_graph(sample.edge_index, sample.num_nodes, world, partitioner=assignment, edge_policy=edges)


# Each takes the whole tensor of nodes and a part, and gives what is the same on every rank.
CALLS = {
    "an exchange": lambda x, part: summed((part.halo.extend(x[part.node_axis.keys]) ** 2).sin().sum(0), part),
    "two exchanges": lambda x, part: summed(
        part.halo.extend(part.halo.extend(x[part.node_axis.keys])[: part.plan.num_owned].exp()).sum(0), part
    ),
    "a sum": lambda x, part: summed(x[part.node_axis.keys].sum(0), part) ** 3,
    "a product": lambda x, part: multiplied(x[part.node_axis.keys].prod(0), part),
}


def check_gradients(world, function):
    """Run torch's own checks, which make the same calls on every rank, as each has the whole tensor."""
    part, x = part_of(world, USUAL), USUAL.x[:, :2].clone().requires_grad_()

    def of_all(whole):
        # Of a share of each rank: the whole gradient comes back to every leaf, to be compared with differences.
        return function(summed(whole / part.num_parts, part), part)

    cotangent = torch.linspace(0.5, 1.5, 2).requires_grad_()  # drawn by torch, it would differ between ranks
    return gradcheck(of_all, x) and gradgradcheck(of_all, x, cotangent)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("num_ranks", [1, 2, slow(3)])
def test_gradients_of_exchanges_and_sums_have_gradients(num_ranks, name):
    assert all(run_ranks(check_gradients, num_ranks, CALLS[name]))


class Layer(nn.Module):
    """Messages with attention, and a norm."""

    def __init__(self, width):
        super().__init__()
        self.message, self.score, self.norm = nn.Linear(2 * width, width), nn.Linear(width, 1), nn.LayerNorm(width)

    def forward(self, h, edge_index):
        src, dst = edge_index
        each = self.message(torch.cat([h[src], h[dst]], 1)).tanh()
        weight = self.score(each).exp()
        sums = torch.zeros_like(h).index_add(0, dst, weight * each)
        weights = torch.zeros_like(h[:, :1]).index_add(0, dst, weight)
        return h + self.norm(sums / (weights + 1))


class Energies(nn.Module):
    """Energies of nodes from their positions, by several layers."""

    of_energies = True

    def __init__(self, layers=3, recompute=False, norm=nn.Identity, dropout=0.0):
        super().__init__()
        self.first, self.last, self.recompute = nn.Linear(4, 6), nn.Linear(6, 1), recompute
        self.layers = nn.ModuleList(Layer(6) for _ in range(layers))
        self.norm, self.dropout = norm(6), nn.Dropout(dropout)

    def states(self, pos, edge_index):
        src, dst = edge_index
        apart = (pos[src] - pos[dst]).pow(2).sum(1, keepdim=True)
        near = torch.zeros_like(pos[:, :1]).index_add(0, dst, (-apart).exp())
        h = self.first(pos) * near
        for layer in self.layers:
            h = checkpoint(layer, h, edge_index, use_reentrant=False) if self.recompute else layer(h, edge_index)
        return self.dropout(self.norm(h))

    def forward(self, pos, edge_index):
        return self.last(self.states(pos, edge_index)).squeeze(1)


class Pooled(Energies):
    """The energy of the whole graph, of sums, extremes and spreads of its states."""

    def forward(self, pos, edge_index):
        h = self.states(pos, edge_index)
        pooled = h.mean(0) + h.max(0).values * h.amin(0) + h.std(0) + h.norm(dim=0)
        return self.last(pooled.sin() + h.logsumexp(0) + h.softmax(0).pow(2).sum(0))


class Mean(Energies):
    """A mean that nothing but the gradient of the energy's square comes back to."""

    of_energies = False

    def forward(self, pos, edge_index):
        return self.last(self.states(pos, edge_index).mean(0))


class BothEnds(Energies):
    """Sums where edges begin, too."""

    def forward(self, pos, edge_index):
        h = super().states(pos, edge_index)
        return self.last(self.layers[0](h, edge_index.flip(0))).squeeze(1)


FORCES = {
    "six layers": (Energies, {"layers": 6}, {}),
    "no layers": (Energies, {"layers": 0}, {}),
    "both ends": (BothEnds, {}, {"edges": "incident"}),
    "pooled": (Pooled, {}, {}),
    "mean": (Mean, {}, {}),
    "checkpointed": (Energies, {"recompute": True}, {}),
    "recomputed": (Energies, {}, {"recompute_every": 1}),
    "dropped": (Energies, {"dropout": 0.5}, {}),
}


def forces_and_gradients(world, net, sample, edges="incoming", recompute_every=None, by_name=False):
    """Train one step on forces; these, the loss and the gradients of the parameters, or of those that are asked for."""
    part = part_of(world, sample, edges)
    model = parallelize(copy.deepcopy(net), world, recompute_every=recompute_every)
    pos = sample.x.clone().requires_grad_()
    energy = model(part.nodes(pos), part.edge_index).square().sum()
    (slope,) = torch.autograd.grad(energy, pos, create_graph=True)
    force = part.all_reduce(-slope, differentiable=True)
    loss = part.node_mean_share((part.owned_nodes(force) - part.owned_nodes(sample.x.sin())) ** 2)
    if by_name:
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    (loss + energy if net.of_energies else loss).backward()
    model.reduce_gradients()
    return [force.detach(), part.all_reduce(loss), *(it.grad for it in model.parameters() if it.grad is not None)]


def by_torch(net, sample):
    """The same in torch alone."""
    net, pos = copy.deepcopy(net), sample.x.clone().requires_grad_()
    energy = net(pos, sample.edge_index).square().sum()
    (slope,) = torch.autograd.grad(energy, pos, create_graph=True)
    loss = ((-slope - sample.x.sin()) ** 2).mean()
    (loss + energy if net.of_energies else loss).backward()
    return [-slope.detach(), loss.detach(), *(it.grad for it in net.parameters() if it.grad is not None)]


def check_forces(name, num_ranks, sample=USUAL, **more):
    kind, given, how = FORCES[name]
    torch.manual_seed(0)
    net = kind(**given)
    given = (net, sample, how.get("edges", "incoming"), how.get("recompute_every"))
    of_ranks = run_ranks(forces_and_gradients, num_ranks, *given, **more)
    expected = run_ranks(forces_and_gradients, 1, *given)[0] if name == "dropped" else by_torch(net, sample)
    for found in of_ranks:
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", FORCES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_model_trained_on_forces_has_the_gradients_of_one_rank(num_ranks, name):
    check_forces(name, num_ranks)


@pytest.mark.parametrize("name", ["no edges", "one node", "all on one rank", "no ghosts"])
def test_forces_are_exact_on_odd_graphs(name):
    check_forces("six layers", 3, ODD[name])


def test_ranks_make_all_calls_of_a_gradient_of_a_gradient_in_one_order(monkeypatch):
    monkeypatch.setenv(CHECK_CALLS, "1")
    for name in FORCES:
        check_forces(name, 3)


def test_forces_are_exact_between_processes():
    for name in ("six layers", "pooled"):
        check_forces(name, 2, transport="gloo")


def forces_of_the_page(world, text, net):
    """Run the lines of the page."""
    part, model = part_of(world, USUAL), parallelize(copy.deepcopy(net), world)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    here = {"part": part, "model": model, "optimizer": optimizer, "pos": USUAL.x.clone(), "forces": USUAL.x.cos()}
    exec(text, here | {"torch": torch})
    return [it.grad for it in model.parameters() if it.grad is not None]


def test_the_lines_of_the_page_about_forces_train_on_them():
    text = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    torch.manual_seed(0)
    net = Energies()
    (one,) = run_ranks(forces_of_the_page, 1, text, net)
    for found in run_ranks(forces_of_the_page, 3, text, net):
        torch.testing.assert_close(found, one, rtol=1e-11, atol=1e-13)


def refusal_of_a_norm(world, net, by_name):
    try:
        forces_and_gradients(world, net, USUAL, by_name=by_name)
    except RuntimeError as refused:
        return str(refused)
    return "not refused"


@pytest.mark.parametrize("by_name", [False, True], ids=["of all", "of those asked for"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_gradient_of_a_gradient_through_batch_norm_is_refused_by_name_on_all_ranks(num_ranks, by_name):
    torch.manual_seed(0)
    net = Energies(norm=nn.BatchNorm1d)
    for told in run_ranks(refusal_of_a_norm, num_ranks, net, by_name):
        assert "a gradient of a gradient through batch norm in training" in told
        assert "eval()" in told
    for found in run_ranks(forces_and_gradients, num_ranks, net.eval(), USUAL):
        torch.testing.assert_close(found, by_torch(net, USUAL), rtol=1e-11, atol=1e-13)
