"""verify: what is exact passes, in every mode and on every graph, and the model stays as it was."""

import copy

import pytest
import torch
from torch import nn
from verified_networks import ByLocalRows, Masks, Net, local_rows, verified

from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.verify import verify
from domainpar.parallel.world import World


def nothing_changed_by(module):
    assert module.middle.training
    assert all(parameter.grad is None and parameter.dtype is torch.float32 for parameter in module.parameters())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


@pytest.mark.parametrize("edges", ["incoming", "incident"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_an_exact_model_is_exact_in_every_layer(edges, parts):
    found = verified(Net(), edge_policy=edges, parts=parts)
    assert found.exact, found
    assert found.check() is found
    assert [(row.name, row.kind) for row in found.rows] == [
        ("first", "Linear"),
        ("conv1.lin", "Linear"),
        ("conv1", "Sum"),
        ("middle", "Tanh"),
        ("conv2.lin", "Linear"),
        ("conv2", "Sum"),
        ("last", "Linear"),
        ("", "Net"),
    ]
    assert [row.rows for row in found.rows] == ["nodes"] * 6 + ["edges"] * 2
    assert all(row.difference <= 1e-14 for row in found.rows)
    assert found.gradients.difference <= 1e-13
    assert (found.exchanges > 0) == (parts > 1)
    assert "conclusion" not in str(found)
    assert f"exact on {1 if parts == 1 else 2 if parts == 2 else 6} rank" in str(found)
    assert ("one of which owns nothing" in str(found)) == (parts > 2)


def test_dropout_is_compared_with_one_rank_and_in_evaluation_with_the_module_alone():
    found = verified(Net(nn.Dropout(0.5)))
    assert found.exact, found
    assert [row.mode for row in found.rows] == ["eval"] * 8 + [""] * 8
    assert "draws random numbers" in str(found)
    assert not any(row.mode for row in verified(Net(nn.Dropout(0.5)).eval()).rows)
    wrong = nn.Sequential(nn.Dropout(0.5), ByLocalRows())
    assert str(verified(Net(wrong))).count("<- first difference") == 1
    assert (verified(Net(wrong)).first_difference.name, verified(Net(wrong)).first_difference.mode) == (
        "middle.1",
        "eval",
    )


class WrongInTraining(nn.Module):
    def forward(self, x):
        return x / (1 + local_rows(x)) if self.training else x


class AlwaysDrops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5)


def test_what_is_wrong_in_training_alone_is_found_beside_dropout():
    found = verified(Net(nn.Sequential(nn.Dropout(0.5), WrongInTraining())))
    assert (found.first_difference.name, found.first_difference.mode) == ("middle.1", "")


def test_dropout_in_evaluation_is_compared_with_one_rank_only():
    found = verified(Net(AlwaysDrops()))
    assert found.exact
    assert "in evaluation too" in found.remarks[0]


class Nothing(nn.Module):
    def forward(self, x, edge_index):
        return None


def test_a_model_that_returns_nothing_is_not_called_exact():
    found = verified(Nothing())
    assert not found.exact
    assert "nothing that could be compared" in str(found)


def test_the_model_and_the_process_stay_as_they_were():
    module = Net(nn.BatchNorm1d(8))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    verified(module)
    nothing_changed_by(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == 1


def test_a_model_that_fails_on_the_whole_graph_raises_what_it_raises():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        verified(Net(nn.Linear(5, 8)))
    assert "whole graph" in raised.value.__notes__[0]
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(("num_nodes", "num_edges"), [(1, 0), (1, 3), (12, 0), (2, 1)])
def test_tiny_graphs_are_compared_too(num_nodes, num_edges):
    ends, x = torch.zeros(2, num_edges, dtype=torch.int64), torch.ones(num_nodes, 4)
    found = verify(Net(), (ends, num_nodes), inputs=lambda part: (part.nodes(x), part.edge_index))
    assert found.exact, found
    assert verify(Masks(), (ends, num_nodes), inputs=lambda part: (part.nodes(x), part.edge_index)).exact


def test_a_module_that_runs_on_a_split_graph_already_may_be_given():
    assert verified(parallelize(Net(), World.alone())).exact


def test_no_parts_and_unknown_sizes_are_refused():
    with pytest.raises(ValueError, match="0 parts"):
        verified(Net(), parts=0)
    with pytest.raises(ValueError, match="size of middle.weight is not known"):
        verified(Net(nn.LazyLinear(8)))
