"""What ranks are given, hold and learn is compared in each pass: what differs ends all of them by its name."""

import copy
import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import SchNet
from whole_and_split import USUAL, gap

from domainpar import World, parallelize, split_graph
from domainpar.common.agreement import Refused
from domainpar.placed import input_log
from domainpar.testing import run_ranks

torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()


def part_of(world):
    return split_graph(USUAL.edge_index, 13, world, partitioner=np.array(USUAL.assignment) % world.size)


def told(work, num_ranks=4):
    """What each rank is told, one of which owns nothing."""

    def on_rank(world):
        try:
            work(world)
        except (Refused, RuntimeError) as error:
            return str(error)
        return "nothing"

    return run_ranks(on_rank, num_ranks)


def changed(x, odd):
    x = x.clone()
    x.view(-1)[-1] += 1e-12 * odd
    return x


GIVEN = {
    "nodes": (lambda part, odd: part.nodes(changed(USUAL.x, odd)), "part.nodes of (13, 4) float64, checksum "),
    "edges": (lambda part, odd: part.edges(changed(USUAL.e, odd)), "part.edges of (40, 4) float64, checksum "),
    "type": (lambda part, odd: part.nodes(USUAL.v.float() if odd else USUAL.v), "part.nodes of (13,) float32, "),
    "one less": (lambda part, odd: None if odd else part.nodes(USUAL.v), "part.nodes of (13,) float64"),
    "another": (lambda part, odd: part.nodes(USUAL.v) if odd else part.edges(USUAL.w), "part.nodes of (13,) float64"),
    "order": (lambda part, odd: [part.nodes(it) for it in (USUAL.v, USUAL.u)[:: 1 - 2 * odd]], "part.nodes of (13,) "),
    "a constant": (lambda part, odd: part.nodes(USUAL.x) * torch.tensor(1.0 + odd), "() float32, checksum "),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_rank_that_was_given_something_else_is_named_on_all_ranks(name):
    give, text = GIVEN[name]

    def work(world):
        part = part_of(world)
        give(part, world.rank == 2)
        part.nodes(USUAL.x).sum().item()

    for message in told(work):
        assert text in message
        assert "rank 2" in message or "one less" in name
        assert "equal seeds" in message
        if "constant" not in name:
            assert f"test_agreement_of_ranks.py:{inspect.getsourcelines(give)[1]}" in message


def test_a_tensor_changed_in_place_is_looked_at_again_and_an_unchanged_one_is_not(monkeypatch):
    looked_at, whole, in_words = [], USUAL.x.clone(), input_log.in_words
    monkeypatch.setattr(input_log, "in_words", lambda tensor: looked_at.append(tensor) or in_words(tensor))

    def work(world):
        part, mine = part_of(world), whole.clone()
        for _ in range(3):
            part.nodes(mine).sum().item()
        mine[0] += world.rank
        with pytest.raises(Refused, match=r"part.nodes of \(13, 4\)"):
            part.nodes(mine).sum().item()

    run_ranks(work, 2)
    of_x = [one for one in looked_at if one.shape == (13, 4)]
    assert len(of_x) == 4  # of two ranks, before and after


def test_one_rank_looks_at_nothing(monkeypatch):
    monkeypatch.setattr(input_log, "digest", lambda tensors: 1 / 0)
    part = split_graph(USUAL.edge_index, 13, World.alone())
    F.mse_loss(parallelize(copy.deepcopy(NETWORK), World.alone())(part.nodes(USUAL.x)), part.nodes(USUAL.v[:, None]))


class Steps:
    """A loop that a test takes apart."""

    def __init__(self, world):
        self.world, self.net, self.part = world, parallelize(copy.deepcopy(NETWORK), world), part_of(world)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def loss(self):
        return self.net(self.part.nodes(USUAL.x)).square().mean()

    def step(self, share=0.0):
        self.optimizer.zero_grad()
        self.loss().backward()
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.grad += share
        self.optimizer.step()


def moved_after_a_step(steps):
    steps.step()
    with torch.no_grad():
        steps.net[0].bias += 1e-12 * (steps.world.rank == 1)


def scheduled_by_the_rank(steps):
    steps.optimizer.param_groups[0]["lr"] /= 1 + steps.world.rank
    steps.step()


def clipped_by_the_rank(steps):
    steps.optimizer.zero_grad()
    steps.loss().backward()
    nn.utils.clip_grad_norm_(steps.net.parameters(), 1e-3 * (1 + steps.world.rank))
    steps.optimizer.step()


def noise_on_weights(steps):
    draw = torch.Generator().manual_seed(steps.world.rank)
    with torch.no_grad():
        for parameter in steps.net.parameters():
            parameter += torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)


def averaged_by_one(steps):
    steps.step()
    average = torch.optim.swa_utils.AveragedModel(steps.net)
    steps.step()
    if steps.world.rank == 3:
        steps.net.load_state_dict(average.module.state_dict())


def replaced(steps):
    steps.net[0].weight = nn.Parameter(steps.net[0].weight.detach() + steps.world.rank)


def memory_replaced(steps):
    steps.step()
    steps.net[0].weight.data = steps.net[0].weight.data + steps.world.rank


def a_buffer_of_one_rank(steps):
    steps.net.eval()
    if steps.world.rank == 3:
        steps.net[2].running_mean += 1


PARTED = [moved_after_a_step, scheduled_by_the_rank, clipped_by_the_rank, noise_on_weights, averaged_by_one, replaced,
          memory_replaced, a_buffer_of_one_rank]  # fmt: skip


@pytest.mark.parametrize("without_gradient", [False, True], ids=["training", "no gradient"])
@pytest.mark.parametrize("part_them", PARTED)
def test_what_parted_is_refused_in_the_next_pass_whatever_changed_it(part_them, without_gradient):
    def work(world):
        steps = Steps(world)
        part_them(steps)
        with torch.set_grad_enabled(not without_gradient):
            steps.loss().item()

    for message in told(work):
        assert "the ranks differ in what they were given or called" in message


def test_what_torch_counts_no_change_of_is_found_after_a_hundred_comparisons():
    def work(world, passes):
        steps = Steps(world)
        for _ in range(passes):
            steps.loss()
        if world.rank == 1:
            steps.net[0].bias.data += 1e-12
        for _ in range(input_log.LOOK_EVERY):
            steps.loss()

    for message in told(lambda world: work(world, 3)):
        assert "(3,) float64" in message


def test_what_is_right_is_not_refused():
    def work(world):
        steps = Steps(world)
        for _ in range(3):
            steps.step()
            with torch.no_grad():
                steps.loss()
            steps.net.eval()
            steps.loss()
            steps.net.train()
        steps.net.load_state_dict(NETWORK.state_dict())
        steps.step()
        world.close()

    assert told(work) == ["nothing"] * 4


def test_what_is_given_after_the_last_pass_is_compared_when_the_world_closes_as_far_as_all_go():
    def work(world, odd):
        part = part_of(world)
        part.nodes(USUAL.x).sum().item()
        part.nodes(torch.full((13,), float(world.rank == odd)))
        if world.is_root:
            part.nodes(USUAL.v)  # to show it, say
        if odd is None:
            world.close()
            return
        with pytest.raises(Refused, match=r"rank 1 part.nodes of \(13,\) float32, checksum"):
            world.close()
        world.rank_status.close(compare=False)

    run_ranks(work, 3, 1)
    run_ranks(work, 3, None)


# Modules


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda rank: nn.Linear(5 + rank // 2, 8), r"weight is \(8, 6\) float32 on rank 2, but \(8, 5\) float32"),
        (
            lambda rank: nn.Linear(2, 2).to(torch.float64 if rank else torch.float32),
            r"weight is \(2, 2\) float32 on rank 0",
        ),
        (lambda rank: nn.Linear(2, 2, bias=rank != 1), r"bias is missing on rank 1, but \(2,\) float32 on the others"),
    ],
)
def test_modules_that_differ_are_refused_on_all_ranks_by_name_before_anything_is_copied(make, text):
    def work(world):
        module = make(world.rank)
        before = copy.deepcopy(module.state_dict())
        with pytest.raises(Refused, match=text):
            parallelize(module, world)
        return all(torch.equal(one, before[name]) for name, one in module.state_dict().items())

    assert run_ranks(work, 3) == [True] * 3


def test_parameters_and_buffers_are_those_of_rank_0_whatever_their_shape():
    class Holds(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.weight = nn.Parameter(torch.full((2, 3), float(rank)).t())
            self.register_buffer("mask", torch.tensor(rank > 0))
            self.register_buffer("empty", torch.zeros(0))
            self.register_buffer("count", torch.tensor([rank]))

    def work(world):
        found = parallelize(Holds(world.rank), world)
        return [float(one.double().sum()) for one in (found.weight.detach(), found.mask, found.empty, found.count)]

    assert run_ranks(work, 4) == [[0.0] * 4] * 4


def test_sizes_that_are_not_known_yet_are_refused_on_all_ranks():
    def work(world):
        with pytest.raises(ValueError, match="is not known"):
            parallelize(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), world)

    run_ranks(work, 4)


class Given(nn.Module):
    """A static graph that a module keeps, as users of SchNet write it."""

    def __init__(self, edge_index, lengths):
        super().__init__()
        self.edge_index, self.lengths = edge_index, lengths

    def forward(self, pos, batch):
        return self.edge_index, self.lengths


def test_a_module_may_keep_a_graph_and_rows_of_it():
    torch.manual_seed(0)
    atoms, batch = torch.arange(13) % 5 + 1, torch.zeros(13, dtype=torch.int64)
    sizes = {"hidden_channels": 4, "num_filters": 4, "num_interactions": 2, "num_gaussians": 3}
    schnet = SchNet(**sizes, interaction_graph=Given(USUAL.edge_index, USUAL.w)).double()

    def work(world):
        mine, part = copy.deepcopy(schnet), part_of(world)
        mine.interaction_graph = Given(part.edge_index, part.edges(USUAL.w))
        mine.register_buffer("kept", part.nodes(USUAL.x))
        out = parallelize(mine, world)(part.nodes(atoms), part.nodes(USUAL.x[:, :3]), part.nodes(batch))
        return part.whole(out.detach()), part.whole(mine.kept)

    expected = schnet(atoms, USUAL.x[:, :3], batch).detach()
    for found, kept in run_ranks(work, 3):
        assert gap(found, expected) < 1e-13
        assert torch.equal(kept, USUAL.x)
