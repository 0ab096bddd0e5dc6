"""`parallelized.py`: what it compares is alike, and it runs from the flags to the last line."""

from types import SimpleNamespace

import pytest
import short_runs
import torch

pytest.importorskip("torch_geometric")

import parallelized
import wrapped
from compared import NETWORKS, Runner, difference, make
from torch_geometric.data import Data
from wrapped import Counting, InTurns, kept_bytes, runners_of

from domainpar.parallel.world import World
from domainpar.testing import run_ranks

SIZES = SimpleNamespace(hidden=16, layers=2, graph_iters=2, dtype="float64", seed=0)


def graph(num_nodes=20, num_edges=70):
    generator = torch.Generator().manual_seed(0)
    of = {"generator": generator, "dtype": torch.float64}
    ends = torch.randint(num_nodes, (2, num_edges), generator=generator)
    label = torch.randint(2, (num_edges,), generator=generator).double()
    features = {"x": torch.randn(num_nodes, 3, **of), "edge_attr": torch.randn(num_edges, 6, **of)}
    return Data(edge_index=ends, y=label, **features)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_wrapped_model_has_the_outcome_of_the_bare_one(name):
    runners = runners_of(name, graph(), SIZES, World.alone())
    theirs, ours = (runners[form].outcome("dropout" in name) for form in ("bare", "wrapped"))
    assert difference(ours, theirs) < 1e-12
    assert theirs[1].abs().max() > 0


def test_a_difference_is_seen_in_losses_and_in_gradients():
    theirs = 2.0, torch.tensor([1.0, -4.0])
    assert difference((2.0, theirs[1]), theirs) == 0
    assert difference((2.5, theirs[1]), theirs) == 0.25
    assert difference((2.0, torch.tensor([1.0, -2.0])), theirs) == 0.5
    nan = float("nan")
    for one in ((nan, theirs[1]), (2.0, torch.tensor([1.0, nan]))):
        assert not difference(one, theirs) <= 1


def test_cost_is_against_the_mean_of_the_bare_steps_around():
    turns = [
        {"bare": {"total": 1.0}, "wrapped": {"total": total}, "again": {"total": 3.0}} for total in (2.0, 2.2, 4.0)
    ]
    found = InTurns(0.0, True, turns)
    assert found.cost("total").median == pytest.approx(0.1)
    assert found.cost("total").high == pytest.approx(1.0)
    assert found.added("total") == pytest.approx(0.2)
    assert found.resolved() == 2.0


def test_every_torch_call_is_counted_and_left_as_it_is():
    with Counting() as counting:
        made = torch.ones(2).add(1) * 2
    assert counting.calls == 3
    assert made.tolist() == [4.0, 4.0]


def test_what_a_step_keeps_is_counted_once():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))

        def forward(self, x):
            y = x * self.weight  # keeps x; the weight it would keep for x's gradient
            return y * y  # keeps y, twice

    x = torch.ones(7, 5, dtype=torch.float64)
    runner = Runner(Twice(), (x,), None, 7)
    assert kept_bytes(runner) == 3 * x.nbytes  # the square of the result in the loss keeps the third


def whole_flags(tmp_path_factory, tmp_path, *networks):
    short = (
        "--sizes small --repeats 1 --tiny-repeats 2 --rounds 1 --hidden 16 --layers 2 --graph-iters 2 --count-iters 3"
    )
    flags = [*short.split(), "--transport", "threads", "--networks", *networks]
    return [*flags, *short_runs.flags(tmp_path_factory, tmp_path)]


def test_prices_steps_and_exchanges_are_kept(tmp_path_factory, tmp_path, capsys):
    names = ["GCN", "interaction"]
    assert parallelized.main(whole_flags(tmp_path_factory, tmp_path, *names)) == 0
    assert capsys.readouterr().out.count("losses and gradients agree") == 3
    rows, tables = short_runs.lines(tmp_path)
    assert len(tables) == 4
    of = {
        kind: [row for row in rows if row["measured"] == kind] for kind in ("one rank", "fixed", "ranks", "exchanges")
    }
    assert [row["network"] for row in of["one rank"]] == [row["network"] for row in of["fixed"]] == names
    assert all(row["calls"] > 20 for row in of["fixed"])
    assert [(row["network"], row["ranks"]) for row in of["ranks"]] == [(name, n) for name in names for n in (1, 2)]
    counts = {(row["network"], row["form"]): row for row in of["exchanges"]}
    assert counts["GCN", "wrapped"]["exchanges"] == 2  # of degrees, and between two layers
    row, stages = counts["interaction", "wrapped"], counts["interaction", "stages"]
    assert row["exchanges"] == row["sent_backward"] == stages["exchanges"] == stages["sent_backward"] == 2


def test_results_that_differ_are_told_and_end_in_failure(tmp_path_factory, tmp_path, capsys, monkeypatch):
    other = lambda mine, theirs: float("nan")  # noqa: E731
    monkeypatch.setattr(wrapped, "difference", other)
    assert parallelized.main([*whole_flags(tmp_path_factory, tmp_path, "GIN"), "--ranks"]) == 1
    assert capsys.readouterr().out.count("losses and gradients DIFFER: nan") == 2


def test_ranks_that_are_threads_make_the_same_weights():
    def both(world):
        made = [make("GAT", graph(), SIZES).state_dict() for _ in range(5)]
        return [torch.cat([one.flatten() for one in state.values()]) for state in made]

    first, second = run_ranks(both, 2)
    assert all(torch.equal(mine, first[0]) for mine in first + second)
