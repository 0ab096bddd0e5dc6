"""The self-test passes on this machine and finds a perceptron whose rows depend on each other."""

import threading

import pytest
import torch

from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.mlp import MLP
from domainpar.nn.selftest import rows_are_independent
from domainpar.testing import run_ranks

PLAIN_FORWARD = MLP.forward


def _self_test(world, dtype=torch.float32):
    model = InteractionNetwork(3, 6, hidden=16, graph_iters=2, dtype=dtype)
    return rows_are_independent(model, world.transport)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_this_machine_keeps_rows_apart(dtype):
    assert run_ranks(_self_test, 2, dtype) == [None, None]


def _leaking(self, block):
    """A last bit that depends on the number of rows, as with a library that takes another kernel for a ragged tail."""
    out = PLAIN_FORWARD(self, block)
    return out * (1 + 2.0**-22 * (len(block) > 900))


class _LeakInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + 2.0**-22 * (len(grad) > 900))


def _leaking_backward(self, block):
    return PLAIN_FORWARD(self, _LeakInBackward.apply(block))


@pytest.mark.parametrize(("forward", "direction"), [(_leaking, "forward"), (_leaking_backward, "backward")])
def test_rows_that_depend_on_their_company_are_found(monkeypatch, forward, direction):
    monkeypatch.setattr(MLP, "forward", forward)
    problems = run_ranks(_self_test, 3)
    assert len(set(problems)) == 1
    assert f"-column block change with the other rows of the block ({direction}, 1 of 1000 rows" in problems[0]


def _other_machine(self, block):
    return PLAIN_FORWARD(self, block) * (1 + 2.0**-22 * (threading.current_thread().name == "rank 1"))


def test_ranks_that_compute_other_bits_are_found_and_all_are_told(monkeypatch):
    monkeypatch.setattr(MLP, "forward", _other_machine)
    problems = run_ranks(_self_test, 3)
    assert (
        problems
        == ["ranks compute different bits from the same numbers: their machines or matrix libraries differ"] * 3
    )


def test_one_rank_with_a_broken_library_is_reason_enough(monkeypatch):
    def broken_on_rank_1(self, block):
        return (_leaking if threading.current_thread().name == "rank 1" else PLAIN_FORWARD)(self, block)

    monkeypatch.setattr(MLP, "forward", broken_on_rank_1)
    problems = run_ranks(_self_test, 3)
    assert len(set(problems)) == 1
    assert "does not keep rows apart" in problems[0]
