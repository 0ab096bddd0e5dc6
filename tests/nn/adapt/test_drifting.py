"""Gradients that were not summed, or summed twice, and parameters that drift apart are told; what is right is not."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from whole_and_split import USUAL

from domainpar.nn.adapt import gradient_sums
from domainpar.nn.adapt.parallelize import GraphParallel, parallelize
from domainpar.nn.adapt.split import split_graph
from domainpar.parallel.errors import RanksDiffer
from domainpar.testing import run_ranks

torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


class Steps:
    """A loop that a test takes apart."""

    def __init__(self, world, make=parallelize):
        self.world, self.net = world, copy.deepcopy(NETWORK)
        self.part = split_graph(USUAL.edge_index, 13, world, partitioner=np.array(USUAL.assignment) % world.size)
        self.model = make(self.net, world)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def loss(self):
        return self.part.node_mean_share(self.model(self.part.nodes(USUAL.x))[:, 0].square())

    def step(self, reduce_gradients=None):
        self.optimizer.zero_grad()
        self.loss().backward()
        (reduce_gradients or self.model.reduce_gradients)()
        self.optimizer.step()


def everywhere(work, make=parallelize):
    """What each of four ranks is told, one of which owns nothing."""

    def told(world):
        try:
            work(Steps(world, make))
        except RuntimeError as error:
            return str(error)
        return "nothing"

    return run_ranks(told, 4)


def of_two_steps(skips):
    def work(steps):
        steps.step((lambda: None) if skips(0) else None)
        steps.step((lambda: None) if skips(1) else None)
        steps.loss()

    return work


@pytest.mark.parametrize("skips", [lambda step: True, lambda step: step == 1], ids=["always", "once"])
def test_gradients_that_were_not_summed_are_told_on_all_ranks_in_the_next_pass(skips):
    for message in everywhere(of_two_steps(skips)):
        assert "no longer hold what " in message
        assert ": 0.weight and 3 more of 4 tensors differ: parameters changed without reduce_gradients()" in message


def twice(steps):
    steps.loss().backward()
    steps.model.reduce_gradients()
    steps.model.reduce_gradients()


def twice_and_clipped_between(steps):
    steps.loss().backward()
    steps.model.reduce_gradients()
    nn.utils.clip_grad_norm_(steps.net.parameters(), 1e-3)
    steps.model.reduce_gradients()


def never_zeroed(steps):
    steps.step()
    steps.loss().backward()
    steps.model.reduce_gradients()


@pytest.mark.parametrize("work", [twice, twice_and_clipped_between, never_zeroed])
def test_gradients_that_were_summed_are_not_summed_again(work):
    for message in everywhere(work):
        assert message.startswith("model.reduce_gradients() at ")
        assert "test_drifting.py:" in message
        assert " finds gradients that were summed over ranks before" in message


def accumulated(steps):
    for _ in range(3):
        steps.optimizer.zero_grad()
        steps.loss().backward()
        steps.loss().backward()
        steps.model.reduce_gradients()
        steps.optimizer.step()


def zeroed_in_place(steps):
    for _ in range(3):
        steps.optimizer.zero_grad(set_to_none=False)
        steps.loss().backward()
        steps.model.reduce_gradients()
        steps.optimizer.step()
    steps.optimizer.zero_grad(set_to_none=False)
    steps.model.reduce_gradients()


def evaluated_between(steps):
    for _ in range(3):
        steps.step()
        with torch.no_grad():
            steps.loss()
        steps.model.eval()
        steps.loss()
        steps.model.train()


def summed_by_hand(steps):
    def by_hand():
        for one in steps.net.parameters():
            one.grad = steps.part.sum_over_ranks(one.grad)

    for _ in range(5):
        steps.step(by_hand)


def two_models_share_an_optimizer(steps):
    other = parallelize(copy.deepcopy(steps.net), steps.world)
    steps.optimizer.add_param_group({"params": other.parameters()})
    for _ in range(3):
        steps.optimizer.zero_grad()
        (steps.loss() + other(steps.part.nodes(USUAL.x)).sum() / 13).backward()
        steps.model.reduce_gradients()
        other.reduce_gradients()
        steps.optimizer.step()


def loaded_on_all(steps):
    steps.step()
    steps.net.load_state_dict(NETWORK.state_dict())
    steps.step()


@pytest.mark.parametrize(
    "work",
    [accumulated, zeroed_in_place, evaluated_between, summed_by_hand, two_models_share_an_optimizer, loaded_on_all],
)
def test_what_is_right_is_not_refused(work):
    assert everywhere(work) == ["nothing"] * 4


def test_where_others_sum_gradients_nobody_looks():
    def work(steps):
        for _ in range(3):
            steps.step(lambda: None)

    assert everywhere(work, lambda net, world: GraphParallel(net)) == ["nothing"] * 4


def moved_after_a_step(steps):
    steps.step()
    if steps.world.rank == 1:
        steps.net[2].bias.data += 1e-12


def scheduled_by_a_share(steps):
    for _ in range(2):
        share = steps.loss().item()
        steps.step()
        if share == 0:  # on the rank that owns nothing
            steps.optimizer.param_groups[0]["lr"] /= 2


def clipped_before_the_sum(steps):
    steps.optimizer.zero_grad()
    steps.loss().backward()
    steps.model.reduce_gradients()
    nn.utils.clip_grad_norm_(steps.net.parameters(), 0.1 + 0.1 * steps.world.rank)
    steps.optimizer.step()


def noise_on_weights(steps):
    with torch.no_grad():
        for parameter in steps.net.parameters():
            parameter += torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(steps.world.rank), dtype=parameter.dtype
            )


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
    steps.loss()
    steps.net[0].weight.data = steps.net[0].weight.data + steps.world.rank


PARTED = [
    moved_after_a_step,
    scheduled_by_a_share,
    clipped_before_the_sum,
    noise_on_weights,
    averaged_by_one,
    replaced,
    memory_replaced,
]


@pytest.mark.parametrize("without_gradient", [False, True], ids=["training", "no gradient"])
@pytest.mark.parametrize("work", PARTED)
def test_parameters_that_parted_are_refused_in_the_next_pass_whatever_changed_them(work, without_gradient):
    def then_a_pass(steps):
        work(steps)
        with torch.set_grad_enabled(not without_gradient):
            steps.loss()

    for message in everywhere(then_a_pass):
        assert "no longer hold" in message
        assert "part.all_reduce(loss)" in message or "without reduce_gradients()" in message


@pytest.mark.parametrize("work", PARTED)
def test_parameters_that_parted_are_refused_when_the_world_closes(work):
    def then_the_end(steps):
        work(steps)
        steps.world.close()

    for message in everywhere(then_the_end):
        assert "no longer hold" in message


def test_what_torch_counts_no_change_of_is_found_every_100th_pass():
    def work(steps, passes):
        for _ in range(passes):
            steps.loss()
        if steps.world.rank == 1:
            steps.net[2].bias.data += 1e-12
        steps.loss()

    told = ["nothing"] * 4
    assert everywhere(lambda steps: work(steps, 5)) == told
    for message in everywhere(lambda steps: work(steps, 100)):
        assert message.startswith("rank 1 no longer holds what the others hold: 2.bias of 4 tensors differ: parameters")


def test_a_pass_looks_at_those_parameters_only_that_changed(monkeypatch):
    looked_at = []
    of_all = gradient_sums.checksums
    monkeypatch.setattr(gradient_sums, "checksums", lambda some: looked_at.append(len(some)) or of_all(some))
    module = copy.deepcopy(NETWORK)
    replicas = gradient_sums.Replicas(module)
    states = [replicas.state(), replicas.state()]
    with torch.no_grad():
        module[2].bias += 1
    states.append(replicas.state())
    assert looked_at == [4, 4, 0, 1]  # when it is made, and in the first pass
    assert states[0] == states[1] != states[2]


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, lambda width: nn.BatchNorm1d(width, momentum=None)])
def test_groups_with_graphs_of_their_own_end_a_step_with_one_set_of_buffers(kind):
    def work(world):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), kind(3)).double()
        part = split_graph(USUAL.edge_index, 13, world, partitioner=np.arange(13) % 2, group="domain")
        model = parallelize(net, world)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        means = []
        for step in range(3):
            optimizer.zero_grad()
            before = net[1].running_mean.clone()
            part.node_mean_share(model(part.nodes(USUAL.x + step + 5 * world.data_group)).square()).backward()
            of_group = net[1].running_mean - before
            model.reduce_gradients()
            optimizer.step()
            means.append((net[1].running_mean - before, of_group, world.data_group))
        return means, {name: buffer.tolist() for name, buffer in net.named_buffers()}

    results = run_ranks(work, 4, domain_size=2)
    assert all(buffers == results[0][1] for _, buffers in results)
    assert results[0][1]["1.num_batches_tracked"] == 3
    for step in range(3):
        change, one, _ = results[0][0][step]
        other = next(of_group for means, _ in results for _, of_group, group in [means[step]] if group == 1)
        assert not torch.allclose(one, other)
        torch.testing.assert_close(change, (one + other) / 2, rtol=1e-12, atol=1e-14)


def test_parameters_that_parted_between_groups_are_refused_in_the_next_sum():
    def work(world):
        net = copy.deepcopy(NETWORK)
        part = split_graph(USUAL.edge_index, 13, world, partitioner=np.arange(13) % 2, group="domain")
        model = parallelize(net, world)
        with torch.no_grad():
            net[0].weight += world.data_group
        part.node_mean_share(model(part.nodes(USUAL.x)).square()[:, 0]).backward()
        with pytest.raises(RanksDiffer, match=r"ranks 2, 3 no longer hold what rank 0 holds: 0.weight"):
            model.reduce_gradients()

    run_ranks(work, 4, domain_size=2)
