"""What backward computes again from a recomputation: the same bits with less memory, and nothing happens twice."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from marks import slow
from tiled import part_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from whole_and_split import USUAL, check

from domainpar import World, parallelize, split_graph
from domainpar.nn.adapt.recomputation import Recomputation
from domainpar.nn.adapt.rows import unwatched
from domainpar.nn.options import NetworkOptions
from domainpar.nn.published import OF_THE_FIELD
from domainpar.testing import run_ranks
from domainpar.tracking.networks.catalogue import build_model


class Messages(nn.Module):
    """Edge states, a norm with running means, dropout and a sum over all ranks, in each of three iterations."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.edge = nn.ModuleList(nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3))
        self.node = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Dropout(rate))
        self.calls = 0

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        self.calls += 1
        src, dst = edge_index
        x = self.encoder(x)
        for edge in self.edge:
            message = edge(torch.cat([x[src], x[dst], e], 1))
            total = torch.zeros_like(x).index_add(0, dst, message)
            x = x + self.node(torch.cat([x - x.mean(0), total], 1))
        return x


def _trained(world: World, module, recompute_every, calls=2):
    """Result, gradients and buffers after some passes, and what they took."""
    module = copy.deepcopy(module)
    parallel = parallelize(module, world, seed=3, recompute_every=recompute_every)
    parts = torch.tensor(USUAL.assignment).clamp(max=world.size - 1).numpy()
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world, partitioner=parts)
    x = USUAL.x.clone().requires_grad_()
    for _ in range(calls):
        result = parallel(part.nodes(x), part.edge_index, part.edges(USUAL.e))
        loss = part.node_mean_share(result.sin())
        loss.backward()
    parallel.reduce_gradients()
    tensors = [result.detach(), x.grad, *(one.grad for one in module.parameters()), *module.buffers()]
    return tensors, (part.num_exchanges, part.num_sums, module.calls)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_bits_exchanges_and_calls_are_those_of_a_pass_that_keeps_everything(num_ranks):
    module = Messages().double()
    expected = run_ranks(_trained, num_ranks, module, None)
    for every in (1, 2, 5):
        found = run_ranks(_trained, num_ranks, module, every)
        for (tensors, counts), (ours, our_counts) in zip(expected, found):
            assert counts == our_counts
            assert counts[0] == 4 * (num_ranks > 1), "ghosts of x, which are made here, and of two iterations' nodes"
            assert all(map(torch.equal, tensors, ours)), f"every {every}"


class Held:
    """Counts the results of layers whose memory somebody holds."""

    def __init__(self, module: nn.Module, kind: type[nn.Module]) -> None:
        self._memory: list[StorageWeakRef] = []
        for child in module.modules():
            if isinstance(child, kind):
                child.register_forward_hook(self._note)

    def _note(self, _, given, made):
        with unwatched():
            self._memory.append(StorageWeakRef(made.untyped_storage()))

    def __call__(self) -> int:
        return sum(not memory.expired() for memory in self._memory)


def _held(world: World, every: int | None) -> int:
    module = Messages().double()
    held = Held(module, nn.ReLU)
    parallel = parallelize(module, world, recompute_every=every)
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    result = parallel(part.nodes(USUAL.x), part.edge_index, part.edges(USUAL.e))
    return held() if result.requires_grad else -1


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_nothing_of_the_edges_is_kept(num_ranks):
    assert run_ranks(_held, num_ranks, None) == [3] * num_ranks
    assert run_ranks(_held, num_ranks, 1) == [0] * num_ranks


def test_what_a_model_checkpoints_itself_is_not_kept_either():
    class Checkpointed(Messages):
        def forward(self, x, edge_index, e):
            return checkpoint(super().forward, x, edge_index, e, use_reentrant=False)

    for make, expected in ((Messages, 3), (Checkpointed, 0)):
        module = make().double()
        held = Held(module, nn.ReLU)
        part = split_graph(USUAL.edge_index, USUAL.num_nodes, World.alone())
        result = parallelize(module, World.alone())(part.nodes(USUAL.x), part.edge_index, part.edges(USUAL.e))
        assert held() == expected
        result.sum().backward()
        assert module.calls == 1, "torch calls it once more in backward; the recomputation does not"


def read(x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """An iteration: edges read nodes and are summed at nodes."""
    return torch.zeros_like(x).index_add(0, dst, x[src].tanh()) + 0.5


def _changed_between(x, src, dst):
    x = read(x * 1, src, dst)
    y = x * 2  # a plain factor: nothing of x is kept
    x.mul_(3)
    return read(x, src, dst) + y


def _changed_in_another_segment(x, src, dst):
    x = x * 1
    y = read(x, src, dst).exp()
    x.add_(y.detach())  # kept as it was: the first segment reads what x was before
    return read(x, src, dst) * y


def _gradient_inside(x, src, dst):
    x = read(x, src, dst)
    energy = (read(x, src, dst) ** 3).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return force * x


def _views(x, src, dst):
    x = read(x, src, dst)
    left, right = x.chunk(2, 1)
    both = torch.stack([left.exp(), right.t().contiguous().t().sigmoid()])
    return read(torch.cat([*both.unbind(0)], 1), src, dst)


def _written_by_columns(x, src, dst):
    table = x.new_empty(x.size(0), 4)
    table[:, :2] = x[:, :2].sin()
    table[:, 2:] = read(x, src, dst)[:, 2:]
    return read(table, src, dst).cos()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.norm = nn.LSTMCell(4, 4), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)


def _recurrent(x, src, dst, net):
    h, c = net.cell(read(x, src, dst))
    h, c = net.cell(read(h, src, dst), (h, c))
    return h * c


PROGRAMS = {
    "a value changed after it was used": (_changed_between, {}),
    "a value of one iteration changed in the next": (_changed_in_another_segment, {}),
    "a gradient in the pass": (_gradient_inside, {"policies": ("incoming",), "or_refused": True}),
    "views": (_views, {}),
    "a table filled column by column": (_written_by_columns, {}),
    "cells that change columns of one table": (_recurrent, {"net": Recurrent}),
    "running means": (
        lambda x, src, dst, net: net(read(net(read(x, src, dst)), src, dst)),
        {"net": lambda: nn.BatchNorm1d(4), "calls": 2},
    ),
    "complex numbers": (lambda x, src, dst: torch.view_as_complex(x[:, :2]).exp().abs() * read(x, src, dst)[:, 0], {}),
}


@pytest.mark.parametrize("every", [1, slow(2)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_are_hard_to_repeat_are_exact(program, every):
    function, more = PROGRAMS[program]
    check(function, recompute_every=every, **more)


def test_dropout_is_what_it_was():
    check(
        lambda x, src, dst: F.dropout(read(F.dropout(read(x, src, dst)), src, dst)),
        against="alone",
        recompute_every=1,
    )


def _backward_twice(world: World, every: int | None) -> list[Tensor]:
    module = nn.Linear(4, 4).double()
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = module

        def forward(self, x, edge_index):
            x = read(self.linear(x), *edge_index)
            return read(self.linear(x), *edge_index)

    torch.manual_seed(1)
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    result = parallelize(Net(), world, recompute_every=every)(part.nodes(USUAL.x), part.edge_index)
    result.sum().backward(retain_graph=True)
    result.sum().backward()
    return [one.grad for one in module.parameters()]


def test_a_graph_that_is_retained_may_be_gone_back_through_twice():
    assert all(map(torch.equal, _backward_twice(World.alone(), None), _backward_twice(World.alone(), 1)))


def test_a_parameter_that_is_changed_between_the_passes_is_refused_in_backward():
    module, world = Messages().double(), World.alone()
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    result = parallelize(module, world, recompute_every=1)(part.nodes(USUAL.x), part.edge_index, part.edges(USUAL.e))
    with torch.no_grad():
        module.edge[1][0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place after it was used"):
        result.sum().backward()


def test_memory_that_others_write_into_and_what_is_drawn_are_kept():
    """Of these torch tells nothing, or they would be other numbers: what stands in the recomputation would be wrong."""
    x = torch.ones(5, requires_grad=True)
    with Recomputation(1).segment():
        blank = torch.empty(5)
        blank.numpy()[:] = [1, 2, 3, 4, 5]
        drawn = torch.rand(5)
        y = (x * blank * drawn).exp()
    expected = (blank * drawn).exp() * drawn * blank
    del blank, drawn
    y.sum().backward()
    assert torch.equal(x.grad, expected)


def test_a_segment_inside_another_keeps_nothing_that_the_other_makes():
    recomputation, x = Recomputation(1), torch.linspace(0, 1, 5, requires_grad=True)
    with recomputation.segment():
        inner = x.exp()
        with recomputation.segment():
            y = inner.sin().cos()
    held = weakref.ref(inner)
    del inner
    assert held() is None
    y.sum().backward()
    again = x.detach().clone().requires_grad_()
    again.exp().sin().cos().sum().backward()
    assert torch.equal(x.grad, again.grad)


def test_without_gradients_nothing_is_written_down():
    recomputation = Recomputation(1)
    with torch.no_grad(), recomputation.segment():
        assert recomputation._open == []


@pytest.mark.parametrize("model", sorted({*OF_THE_FIELD} - {"gcn"}))
@pytest.mark.parametrize("num_ranks", [slow(1), 3])
def test_networks_of_the_field_give_the_bits_of_one_that_keeps_everything(model, num_ranks):
    expected = run_ranks(_of_the_field, num_ranks, model, None)
    for tensors, ours in zip(expected, run_ranks(_of_the_field, num_ranks, model, 1)):
        assert all(map(torch.equal, tensors, ours))


def _of_the_field(world: World, name: str, every: int | None) -> list[Tensor]:
    part = part_of(world)
    options = NetworkOptions(hidden=16, graph_iters=3, dtype=torch.float64, recompute_every=every)
    model = build_model(name, part.graph.features.shape[1], part.graph.edge_features.shape[1], options)
    gradients = model.gradients()
    logits = model(part.graph, part.halo, 1)
    logits.sin().sum().backward()
    assert gradients.reduce(world.transport) == 0
    found = [one.grad for one in model.parameters() if one.grad is not None]
    return [logits.detach(), torch.tensor(float(part.halo.transport.num_exchanges)), *found]


@pytest.mark.parametrize("every", [0, -3])
def test_segments_of_no_iteration_are_refused(every):
    with pytest.raises(ValueError, match=f"recompute_every {every} must be at least 1"):
        parallelize(nn.Linear(1, 1), World.alone(), recompute_every=every)


def _left(world: World, every: int | None) -> int:
    module = Messages().double()
    held = Held(module, nn.Linear)
    parallel = parallelize(module, world, recompute_every=every)
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    loss = parallel(part.nodes(USUAL.x), part.edge_index, part.edges(USUAL.e)).sum()
    loss.backward()
    del loss
    gc.collect()
    return held()


def test_a_step_leaves_no_table_behind():
    for every in (None, 1):
        assert run_ranks(_left, 2, every) == [0, 0]
