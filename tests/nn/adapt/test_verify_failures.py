"""Models that are refused or fail where the graph is split: with the layer, and what came before it."""

import time

import pytest
from torch import nn
from verified_networks import NUM_NODES, ByLocalRows, Net, local_rows, on_rank_1, verified

from domainpar.nn.adapt.rows import NotExact
from domainpar.nn.adapt.trial import failures_of


class Sorts(nn.Module):
    def forward(self, x):
        return x.sort(0).values


def test_a_refused_model_says_why_and_shows_what_came_before():
    found = verified(Net(Sorts()))
    assert found.first_difference is None
    both = verified(Net(nn.Sequential(ByLocalRows(), Sorts())))
    assert both.first_difference.name == "middle.0"
    assert "is in middle.0 (ByLocalRows). Behind it the model is refused: middle.1 (Sorts)" in both.conclusion
    assert found.refused.startswith("middle (Sorts): torch.sort runs along the nodes")
    assert [row.name for row in found.rows if row.difference is not None] == ["first", "conv1.lin", "conv1"]
    assert "not reached" in str(found)
    with pytest.raises(NotExact, match="middle"):
        found.check()
    assert verified(Net(nn.Sequential(nn.Dropout(0.5), Sorts()))).refused.startswith("middle.1 (Sorts)")


class FailsWhereFew(nn.Module):
    def forward(self, x):
        if local_rows(x) < NUM_NODES:
            raise KeyError("too few")
        return x


class SumsOnOneRank(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if on_rank_1() else x


def test_a_model_that_fails_only_where_it_is_split_says_where():
    found = verified(Net(FailsWhereFew()))
    assert found.failed == "middle (FailsWhereFew): KeyError: 'too few'"
    assert found.first_difference is None
    with pytest.raises(RuntimeError, match="fails where the graph is split: middle"):
        found.check()


def test_ranks_that_call_other_collectives_end_with_the_layer(monkeypatch):
    monkeypatch.setattr("domainpar.common.timeouts.SMALL_GRAPH", 0.3)
    found = verified(Net(SumsOnOneRank()), parts=2)
    assert not found.exact
    assert "middle" in f"{found.failed} {found.first_difference}"


def test_a_refusal_is_told_before_what_others_met_meanwhile():
    def work(world):
        time.sleep(0.05 * world.rank)
        raise (NotExact if world.rank else KeyError)("no")

    failure = failures_of(work, 2, patience=5.0)[0]
    assert (failure.refuses, failure.rank) == (True, 1)


def test_an_error_is_known_to_be_of_a_talk_of_ranks_or_of_their_own_code():
    waits = failures_of(lambda world: world.is_root and world.transport.barrier(), 2, patience=0.1)[0]
    assert waits.talking
    assert str(waits).startswith("RankMissing: rank 0 waited 0.1 s")
    assert "\n" not in str(waits)
    own = failures_of(lambda world: {}["no"], 2, patience=0.1)[0]
    assert (own.talking, str(own)) == (False, "KeyError: 'no'")
    assert failures_of(lambda world: world.transport.barrier(), 2, patience=5.0) == []
