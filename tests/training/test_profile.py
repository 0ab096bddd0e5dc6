"""A profile of some steps: a trace a rank, a summary of all, memory over time; and no bit is another."""

import json

import invariance
import pytest
from random_store import write_random_store

from domainpar.display.profile import operations, profile_chart
from domainpar.testing import run_ranks

PHASES = ["load", "forward", "backward", "reduce", "optimizer"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"))


def _trained(world, store, out, flags):
    return invariance.results(world, store, out, **{"max_steps": 6, **flags})["parameters"]


@pytest.mark.parametrize("model", ["interaction", "gcn"])
def test_steps_are_profiled_on_every_rank_and_change_nothing(store, tmp_path, model):
    plain = run_ranks(_trained, 2, store, tmp_path / "plain", {"model": model})
    # Torch has one profiler a process, so ranks are processes.
    found = run_ranks(_trained, 2, store, tmp_path / "run", {"model": model, "profile": 3}, transport="gloo")
    assert plain == found
    folder = tmp_path / "run" / "profile"
    summary = json.loads((folder / "profile.json").read_text())
    assert (summary["steps"], len(summary["ranks"])) == (3, 2)
    for number, rank in enumerate(summary["ranks"]):
        assert [phase for _, phase in rank["phases"]] == 3 * PHASES
        times = [seconds for seconds, _ in rank["phases"]]
        assert times == sorted(times)
        assert rank["flops"] > 0
        assert rank["seconds"] > 0
        assert all(held > 0 for _, held in rank["memory"])
        names = {it["name"] for it in rank["operations"]}
        assert ("edge stages, backward" if model == "interaction" else "aten::addmm") in names
        assert not any(name.startswith("phase: ") for name in names)
        trace = json.loads((folder / f"rank_{number}.json").read_text())
        assert {"phase: forward", "phase: backward"} <= {of.get("name") for of in trace["traceEvents"]}
    (table,) = operations(summary)
    assert table.head == ("operation", "calls", "rank 0", "rank 1")
    assert table.rows[-1][0] == "all"
    assert [panel.name for panel in profile_chart(summary).panels] == ["memory", "flops", "rate"]


def test_a_run_with_fewer_steps_has_no_profile(store, tmp_path):
    run_ranks(_trained, 1, store, tmp_path / "run", {"profile": 3, "max_steps": 4})
    assert not (tmp_path / "run" / "profile").exists()


def test_operations_of_many_ranks_are_shown_of_the_first_and_the_longest_come_first():
    def rank(number):
        own = [{"name": "common", "calls": 2.0, "seconds": 0.5}, {"name": f"own {number}", "calls": 1, "seconds": 1e-4}]
        return {"seconds": 1.0, "flops": 2 * 10**9, "operations": own, "other_seconds": 0.25, "memory": [[0.0, 2**20]]}

    (table,) = operations({"steps": 2, "device": "cpu", "ranks": [rank(number) for number in range(10)]})
    assert len(table.head) == 2 + 8
    assert table.rows[0][:3] == ("common", "2", "500.00 ms")
    assert table.rows[1][2:4] == ("0.10 ms", "–")
    assert table.rows[-1] == ("all", "", *["750.10 ms"] * 8)
    assert "The first 8 of 10 ranks" in table.note
