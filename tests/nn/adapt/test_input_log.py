"""What ranks are given is compared before the next forward pass; what differs is named with its place."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn
from whole_and_split import USUAL

from domainpar import World
from domainpar.common.agreement import Refused
from domainpar.nn.adapt import input_log
from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.split import split_graph
from domainpar.testing import run_ranks


class Sums(nn.Module):
    def forward(self, x, *others):
        return x.sum(0)


def refusals(give, num_ranks=3, then=lambda model, part: model(part.nodes(USUAL.x))):
    """The message on each rank."""

    def work(world):
        part = split_graph(USUAL.edge_index, 13, world, partitioner=np.arange(13) % world.size)
        model = parallelize(Sums(), world)
        give(part, world.rank == 2)
        before = part.num_exchanges, part.num_sums
        with pytest.raises(Refused) as raised:
            then(model, part)
        assert (part.num_exchanges, part.num_sums) == before
        return str(raised.value)

    return run_ranks(work, num_ranks)


def changed(x, odd):
    x = x.clone()
    x.view(-1)[-1] += 1e-12 * odd
    return x


@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda part, odd: part.nodes(changed(USUAL.x, odd)), "part.nodes of (13, 4) float64, checksum "),
        (lambda part, odd: part.edges(changed(USUAL.e, odd)), "part.edges of (40, 4) float64, checksum "),
        (lambda part, odd: part.nodes(USUAL.v.float() if odd else USUAL.v), "part.nodes of (13,) float32, checksum "),
        (lambda part, odd: part.owned_nodes(changed(USUAL.x, odd)), "part.owned_nodes of (13, 4) "),
        (lambda part, odd: part.owned_edges(changed(USUAL.e, odd)), "part.owned_edges of (40, 4) "),
        (lambda part, odd: part.replicate(torch.tensor(float(odd))), "part.replicate of () float32"),
        (lambda part, odd: None if odd else part.nodes(USUAL.v), "part.nodes of (13, 4) float64"),
        (lambda part, odd: part.nodes(USUAL.v) if odd else part.edges(USUAL.w), "part.nodes of (13,) float64"),
        (lambda part, odd: [part.nodes(one) for one in (USUAL.v, USUAL.u)[:: 1 - 2 * odd]], "part.nodes of (13,) "),
    ],
)
def test_a_rank_that_was_given_something_else_is_named_on_all_ranks_before_any_exchange(give, text):
    line = inspect.getsourcelines(give)[1]
    for message in refusals(give):
        assert f"rank 2 {text}" in message
        assert f"test_input_log.py:{line}" in message, message
        assert "equal seeds" in message


def test_one_call_too_few_is_told_as_nothing_more():
    def then(model, part):
        part.inputs.compare()

    for message in refusals(lambda part, odd: None if odd else part.nodes(USUAL.x), then=then):
        assert "rank 2 nothing more at the next forward pass" in message


def test_a_tensor_changed_in_place_is_looked_at_again_and_an_unchanged_one_is_not(monkeypatch):
    looked_at = []
    whole = USUAL.x.clone()
    in_words = input_log.in_words

    def counted(tensor):
        looked_at.append(tensor)
        return in_words(tensor)

    monkeypatch.setattr(input_log, "in_words", counted)

    def work(world):
        part = split_graph(USUAL.edge_index, 13, world)
        mine = whole.clone()
        model = parallelize(Sums(), world)
        for _ in range(3):
            model(part.nodes(mine))
        mine[0] += world.rank
        with pytest.raises(Refused, match="different tensors"):
            model(part.nodes(mine))

    run_ranks(work, 2)
    assert len(looked_at) == 4


def test_one_rank_looks_at_nothing(monkeypatch):
    monkeypatch.setattr(input_log, "digest", lambda tensors: 1 / 0)
    part = split_graph(USUAL.edge_index, 13, World.alone())
    parallelize(Sums(), World.alone())(part.nodes(USUAL.x))
