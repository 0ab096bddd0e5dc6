"""Backward passes and optimisers that do without torch's compiler are torch's own, to the bit."""

import pytest
import torch

from domainpar.nn.uncompiled import pass_back, uncompiled


def passed_back(how):
    torch.manual_seed(3)
    x, unused = torch.randn(40, 3, requires_grad=True), torch.randn(2, requires_grad=True)
    hidden = (x * 1.7).sin()
    tensors = [hidden @ torch.randn(3, 5), hidden.exp().sum(1)]
    how(tensors, [torch.randn_like(tensor) for tensor in tensors])
    return x.grad, unused.grad


def test_gradients_that_are_passed_back_are_those_of_torch():
    (of_ours, nothing), (of_torch, _) = passed_back(pass_back), passed_back(torch.autograd.backward)
    assert torch.equal(of_ours, of_torch)
    assert nothing is None


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_optimisers_make_the_steps_of_torchs_and_go_on_where_they_were(kind):
    def stepped(kind):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        optimizer = kind([weight], lr=0.1, weight_decay=0.2)
        for step in range(4):
            optimizer.zero_grad()
            (weight.cos() * (step + 1)).sum().backward()
            optimizer.step()
            if step == 1:
                state, optimizer = optimizer.state_dict(), kind([weight], lr=7.0)
                optimizer.load_state_dict(state)
        optimizer.zero_grad()
        return weight, optimizer.state_dict()

    (weight, state), (expected, of_torch) = stepped(uncompiled(type("Changed", (kind,), {}))), stepped(kind)
    assert torch.equal(weight, expected)
    assert weight.grad is None
    assert str(state) == str(of_torch)
