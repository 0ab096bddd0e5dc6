"""Gradients of gradients: models trained on forces, whoever asks for them, and Hessians times vectors."""

import copy
import functools

import numpy as np
import pytest
import torch
from marks import slow
from torch import nn
from torch.utils.checkpoint import checkpoint
from whole_and_split import ODD, USUAL, flat, gap

import domainpar
from domainpar import parallelize, split_graph
from domainpar.parallel.transport import CHECK_CALLS
from domainpar.placed.moves import whole
from domainpar.testing import run_ranks


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

    def __init__(self, layers=3, recompute=None, norm=nn.Identity, dropout=0.0):
        super().__init__()
        self.first, self.last, self.recompute = nn.Linear(4, 6), nn.Linear(6, 1), recompute
        self.layers = nn.ModuleList(Layer(6) for _ in range(layers))
        self.norm, self.dropout = norm(6), nn.Dropout(dropout)

    def states(self, pos, edge_index):
        src, dst = edge_index
        apart = (pos[src] - pos[dst]).pow(2).sum(1, keepdim=True)
        h = self.first(pos) * torch.zeros_like(pos[:, :1]).index_add(0, dst, (-apart).exp())
        for layer in self.layers:
            h = layer(h, edge_index) if self.recompute is None else self.recompute(layer, h, edge_index)
        return self.dropout(self.norm(h))

    def forward(self, pos, edge_index):
        return self.last(self.states(pos, edge_index)).squeeze(1)


class BothEnds(Energies):
    """Sums where edges begin, too."""

    def forward(self, pos, edge_index):
        h = super().states(pos, edge_index)
        return self.last(self.layers[0](h, edge_index.flip(0))).squeeze(1)


class Pooled(Energies):
    """The energy of the whole graph, of sums, extremes and spreads of its states."""

    def forward(self, pos, edge_index):
        h = self.states(pos, edge_index)
        pooled = h.mean(0) + h.max(0).values * h.amin(0) + h.std(0) + h.norm(dim=0)
        return self.last(pooled.sin() + h.logsumexp(0) + h.softmax(0).pow(2).sum(0))


def plain_checkpoint(layer, *args):
    return checkpoint(layer, *args, use_reentrant=False)


def with_kept_ghosts(layer, *args):
    return checkpoint(layer, *args, use_reentrant=False, context_fn=domainpar.kept_ghosts)


MODELS = {
    "six layers": functools.partial(Energies, 6),
    "no layers": functools.partial(Energies, 0),
    "both ends": BothEnds,
    "pooled": Pooled,
    "checkpointed": functools.partial(Energies, 2, plain_checkpoint),
    "checkpointed, ghosts kept": functools.partial(Energies, 2, with_kept_ghosts),
    "batch norm": functools.partial(Energies, 2, None, nn.BatchNorm1d),
    "dropped": functools.partial(Energies, 2, None, nn.Identity, 0.5),
    "dropped and checkpointed": functools.partial(Energies, 2, with_kept_ghosts, nn.Identity, 0.5),
}


def inside(net, pos, edge_index):
    """Forces as a model gives them that takes them in its forward pass."""
    with torch.enable_grad():
        pos = pos.detach().requires_grad_()
        energy = net(pos, edge_index).square().sum()
        (slope,) = torch.autograd.grad(energy, pos, create_graph=True)
    return energy, -slope


def outside(net, pos, edge_index):
    """Forces with respect to what the program holds."""
    energy = net(pos, edge_index).square().sum()
    (slope,) = torch.autograd.grad(energy, pos, create_graph=True)
    return energy, -slope


def by_backward(net, pos, edge_index):
    """Forces as what a backward pass leaves in the positions."""
    pos = pos.detach().requires_grad_()
    energy = net(pos, edge_index).square().sum()
    energy.backward(create_graph=True)
    for parameter in net.parameters():
        parameter.grad = None
    return energy.detach(), -pos.grad


def stress(net, pos, edge_index):
    """The derivative by a strain of all positions."""
    strain = torch.zeros(4, 4, dtype=pos.dtype, requires_grad=True)
    energy = net(pos + pos @ (strain + strain.t()), edge_index).square().sum()
    (slope,) = torch.autograd.grad(energy, strain, create_graph=True)
    return energy, slope


def hessian_times_vector(net, pos, edge_index):
    _, force = inside(net, pos, edge_index)
    learned = [one for one in net.parameters() if one.requires_grad]
    slopes = torch.autograd.grad(force.square().sum(), learned, create_graph=True, allow_unused=True)
    return force, sum((one * one.detach().cos()).sum() for one in slopes if one is not None)


def learnt(net, pos, edge_index, targets, ask):
    """A step on what is asked for: it, the loss and the gradients of positions and parameters."""
    energy, force = ask(net, pos, edge_index)
    target = targets if force.shape == targets.shape else 1.0
    loss = (force - target).square().mean() + energy.sum() * 1e-3
    loss.backward()
    left = [energy, force, loss, pos.grad, *(one.grad for one in net.parameters())]
    return [one if one is None else whole(one.detach()) for one in left]


def on_rank(world, net, sample, ask):
    owner = [0 if world.size == 1 else world.size - 1 - node % 2 for node in range(sample.num_nodes)]  # 0 has none of 3
    part = split_graph(sample.edge_index, sample.num_nodes, world, partitioner=np.array(owner))
    mine = parallelize(copy.deepcopy(net), world)
    pos = part.nodes(sample.x).requires_grad_()
    torch.manual_seed(0)
    return learnt(mine, pos, part.edge_index, part.nodes(sample.x.sin()), ask)


def each_on_rank(world, nets, sample, ask):
    return [on_rank(world, net, sample, ask) for net in nets]


def check_forces(names, ask, num_ranks, sample=USUAL, **more):
    """What some models, by their names, learn on ranks is what they learn on the whole graph."""
    nets = []
    for name in names:
        torch.manual_seed(0)
        nets.append(MODELS[name]().double())
    of_ranks = run_ranks(each_on_rank, num_ranks, nets, sample, ask, **more)
    for place, (name, net) in enumerate(zip(names, nets)):
        if "dropped" in name:
            (expected,) = run_ranks(on_rank, 1, net, sample, ask)
        else:
            pos = sample.x.clone().requires_grad_()
            expected = learnt(copy.deepcopy(net), pos, sample.edge_index, sample.x.sin(), ask)
        largest = max(float(one.abs().max()) for one in expected[3:] if one is not None)
        for found in of_ranks:
            for ours, theirs in zip(flat(found[place]), flat(expected), strict=True):
                assert gap(ours, theirs, largest) < (1e-10 if ask is hessian_times_vector else 1e-12), name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_ranks", [slow(1), 2, 3])
def test_a_model_trained_on_forces_has_the_gradients_of_one_rank_by_calls_in_one_order(num_ranks, name, monkeypatch):
    if num_ranks == 3:
        monkeypatch.setenv(CHECK_CALLS, "1")
    check_forces([name], inside, num_ranks)


@pytest.mark.parametrize("ask", [outside, by_backward, stress, hessian_times_vector])
@pytest.mark.parametrize("name", ["six layers", "pooled"])
def test_derivatives_are_exact_whoever_asks_for_them(ask, name):
    for num_ranks in (1, 3):
        check_forces([name], ask, num_ranks)


@pytest.mark.parametrize("name", ["no edges", "one node", "all on one rank", "no ghosts"])
def test_forces_are_exact_on_odd_graphs(name):
    check_forces(["six layers"], inside, 3, ODD[name])


def test_forces_are_exact_between_processes():
    check_forces(["checkpointed, ghosts kept", "pooled"], inside, 2, transport="gloo")
