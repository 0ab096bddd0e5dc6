"""Differences: what is rounding and what is not, in layers, gradients and buffers."""

import math
import threading

import pytest
import torch
from torch import nn
from verified_networks import Net, local_rows, on_rank_1, verified
from whole_and_split import check, trial_of

from domainpar.nn.adapt.verify import verify


class GradientByThread(nn.Module):
    def forward(self, x):
        scale = len(threading.current_thread().name)
        return x * scale + (x - x * scale).detach()


def test_a_wrong_gradient_is_found_where_all_layers_agree():
    found = verified(Net(GradientByThread()))
    assert found.first_difference is None
    assert not found.exact
    assert found.gradients.difference > 1e-3
    assert found.gradients.name.split(".")[0] in ("first", "conv1")
    assert "all layers agree, but the gradient of" in found.conclusion
    assert verified(Net(GradientByThread()), backward=False).exact


class LocalMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.fill_(local_rows(x))
        return x


def test_a_wrong_buffer_is_found_where_all_layers_agree():
    found = verified(Net(LocalMean()))
    assert not found.exact
    assert found.buffers.name == "middle.seen"
    assert "the buffer of middle.seen" in found.conclusion
    assert verified(Net(nn.BatchNorm1d(8))).buffers.difference <= 1e-14


def test_less_than_float64_inside_a_model_is_told():
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Linear(8, 8)

        def forward(self, x):
            self.low.float()
            return self.low(x.float() + 0.01 * len(threading.current_thread().name)).double()

    assert any("less than float64" in text for text in verified(Net(Casts())).remarks)


def test_what_is_not_finite_is_equal_to_itself_only():
    class Masked(nn.Module):
        def forward(self, x):
            lowest = x.masked_fill(x > 0, -torch.inf)
            return lowest.masked_fill(x.abs() < 0.1, torch.nan)

    class WrongNan(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 0.3 * len(threading.current_thread().name) - 3, torch.nan)

    found = verified(Masked_alone(Masked()), backward=False)
    assert found.exact
    assert math.isinf(verified(Masked_alone(WrongNan())).first_difference.difference)


class Masked_alone(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, edge_index):
        return self.layer(x)


class Plain(nn.Module):
    """Makes tensors of its own, cancels, catches an error, and looks at complex numbers."""

    def __init__(self):
        super().__init__()
        self.table, self.raises, self.complex = torch.eye(8) / 3, Raises(), nn.Identity()
        self.lin, self.norm, self.small = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Identity()

    def forward(self, x):
        try:
            self.raises(x)
        except ValueError:
            x = self.norm(self.lin(x @ self.table @ torch.eye(8)))
        self.complex(x + 2j * x)
        return x + self.small(x.mean(0))


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError


def test_what_cancels_is_rounding_and_what_models_make_themselves_is_float64():
    found = verified(Net(Plain()))
    assert found.exact, found
    assert next(row.rows for row in found.rows if row.name == "middle.small") == "graph"


def test_gradients_of_inputs_are_compared():
    def wrong(x):
        return GradientByThread()(x)

    with pytest.raises(AssertionError, match="input x differs"):
        check(wrong)


def test_results_of_all_ranks_have_to_be_the_same_bits():
    with pytest.raises(AssertionError, match="result 0 differs by inf ranks differ"):
        check(lambda x: x.sum(0) * (1 + 4e-16 * on_rank_1()))


def test_all_ranks_have_to_make_as_many_calls():
    run = trial_of(lambda x, src: (x * 2)[src]).split(4)
    assert (run.failure, run.uneven) == (None, None)
    run.ranks[1].calls += 1
    assert "different ends" in run.uneven
    assert run.failed == run.uneven


def test_gradients_of_fields_that_want_them_are_compared_too():
    Data = pytest.importorskip("torch_geometric.data").Data

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = GradientByThread()

        def forward(self, x):
            return self.layer(x)

    graph = Data(x=torch.rand(6, 2, requires_grad=True), edge_index=torch.tensor([[0, 1], [1, 2]]))
    assert verify(Scaled(), graph).gradients.name == "input x"
    assert graph.x.grad is None
