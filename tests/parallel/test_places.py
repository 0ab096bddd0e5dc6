"""The user's line, and the call of ours that it made, are told apart from frames of ours, of torch and of Python."""

import sys

import torch

from domainpar import World, split_graph
from domainpar.common.agreement import agree
from domainpar.parallel import places
from domainpar.parallel.places import in_words, line_of_user, where
from domainpar.parallel.transport import Transport
from domainpar.placed import dispatch


def here():
    return f"{places._shown(__file__)}:{sys._getframe(1).f_lineno}"


def test_in_a_call_it_is_the_outermost_call_of_ours_and_the_line_that_made_it(monkeypatch):
    seen = []
    monkeypatch.setattr(Transport, "all_gather", lambda self, payload: [seen.append(where()), payload][1:])
    world = World.alone()
    part, line = split_graph(torch.arange(4).view(2, 2), 4, world), here()
    assert set(seen) == {("split_graph(...)", line)}
    seen.clear()
    rule = lambda *_: seen.append(where())  # noqa: E731
    monkeypatch.setitem(dispatch._FOUND, id(torch.ops.aten.tanh.default), rule)
    x = part.nodes(torch.ones(4, 1))
    _, line = x.tanh(), here()
    assert seen == [("torch.tanh(...)", line)]
    seen.clear()
    _, line = agree(world.transport, None), here()
    assert in_words(*seen[0]) == f"agree(...) at {line}"


def test_where_the_program_computes_it_is_its_own_line():
    found, line = where(), here()
    assert in_words(*found) == line
    assert line_of_user() == here()
    assert line_of_user(sys._getframe(), "ours") == ""


def test_where_no_frame_is_the_users_there_is_nothing_to_tell(monkeypatch):
    monkeypatch.setattr(places, "_whose", lambda name: "ours")
    assert where() == ("", "")
    assert line_of_user() == ""
    assert line_of_user(sys._getframe(), "ours") == here()
