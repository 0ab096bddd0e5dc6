"""Gradients that were not summed, or summed twice, and parameters that drift apart are told; what is right is not."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from whole_and_split import USUAL

from domainpar.nn.adapt.gradient_sums import Replicas
from domainpar.nn.adapt.parallelize import Parallel, parallelize
from domainpar.nn.adapt.split import split_graph
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
        return self.part.mean_over_nodes(self.model(self.part.nodes(USUAL.x))[:, 0].square())

    def step(self, sum_gradients=None):
        self.optimizer.zero_grad()
        self.loss().backward()
        (sum_gradients or self.model.sum_gradients)()
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
        assert ": 0.weight and 3 more of 4 tensors differ: parameters changed without sum_gradients()" in message


def twice(steps):
    steps.loss().backward()
    steps.model.sum_gradients()
    steps.model.sum_gradients()


def twice_and_clipped_between(steps):
    steps.loss().backward()
    steps.model.sum_gradients()
    nn.utils.clip_grad_norm_(steps.net.parameters(), 1e-3)
    steps.model.sum_gradients()


def never_zeroed(steps):
    steps.step()
    steps.loss().backward()
    steps.model.sum_gradients()


@pytest.mark.parametrize("work", [twice, twice_and_clipped_between, never_zeroed])
def test_gradients_that_were_summed_are_not_summed_again(work):
    for message in everywhere(work):
        assert message.startswith("model.sum_gradients() at ")
        assert "test_drifting.py:" in message
        assert " finds gradients that were summed over ranks before" in message


def accumulated(steps):
    for _ in range(3):
        steps.optimizer.zero_grad()
        steps.loss().backward()
        steps.loss().backward()
        steps.model.sum_gradients()
        steps.optimizer.step()


def zeroed_in_place(steps):
    for _ in range(3):
        steps.optimizer.zero_grad(set_to_none=False)
        steps.loss().backward()
        steps.model.sum_gradients()
        steps.optimizer.step()
    steps.optimizer.zero_grad(set_to_none=False)
    steps.model.sum_gradients()


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
        steps.model.sum_gradients()
        other.sum_gradients()
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

    assert everywhere(work, lambda net, world: Parallel(net)) == ["nothing"] * 4


def test_parameters_changed_behind_torchs_back_are_found_in_the_second_pass_and_every_100th():
    def work(steps, passes):
        for _ in range(passes):
            steps.step()
        if steps.world.rank == 1:
            steps.net[2].bias.data += 1e-12
        steps.loss()

    for passes in (1, 101):
        for message in everywhere(lambda steps, passes=passes: work(steps, passes)):
            assert message.startswith(
                "rank 1 no longer holds what the others hold: 2.bias of 4 tensors differ: something"
            )
    assert everywhere(lambda steps: work(steps, 2)) == ["nothing"] * 4


def test_ranks_that_sum_by_themselves_are_looked_at_a_few_times_only():
    module = nn.Linear(2, 2)
    replicas, doubts = Replicas(module), []

    def work(world):
        for _ in range(120):
            doubts.append(replicas.doubt())
            if doubts[-1]:
                replicas.compare(world.transport, doubts[-1])
            with torch.no_grad():
                module.weight += 1

    run_ranks(work, 1)
    assert [number for number, doubt in enumerate(doubts, 1) if doubt] == [2, 3, 4, 102]
