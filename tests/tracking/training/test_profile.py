"""A profile of some steps: a trace a rank, a summary of all, memory over time; and no bit is another."""

import json
from pathlib import Path
from types import SimpleNamespace

import invariance
import pytest
import torch
from torch.autograd import DeviceType

from domainpar.common.agreement import Refused
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.display.training import operations, profile_chart
from domainpar.tracking.training.monitor.profile import Profile, _operations
from domainpar.train import train

PHASES = ["load", "forward", "backward", "reduce", "optimizer"]


MODELS = ("interaction", "acorn2")


def trained(world, store, out, profile, max_steps=5):
    """The parameters of a run of each network; small, for a profile notes each call of torch."""
    flags = {**invariance.SMALL, "graph_iters": 1, "max_steps": max_steps, "profile": profile, "store": str(store)}
    return [
        invariance.parameters_of(train(TrainConfig(**flags, model=model, out=f"{out}-{model}"), Path(store), world))
        for model in MODELS
    ]


def test_steps_are_profiled_on_every_rank_and_change_nothing(store, tmp_path):
    plain = run_ranks(trained, 2, store, tmp_path / "plain", None)
    # Torch has one profiler a process, so ranks are processes.
    assert run_ranks(trained, 2, store, tmp_path / "run", 3, transport="gloo") == plain
    for model in MODELS:
        check_profile(tmp_path / f"run-{model}" / "profile", model)


def check_profile(folder, model):
    """Two ranks have noted three steps of a network."""
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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_with_fewer_steps_is_refused_before_it_begins(store, tmp_path, num_ranks):
    with pytest.raises(Refused, match="--profile 3 .* 4"):
        run_ranks(trained, num_ranks, store, tmp_path / "run", 3, 4)
    assert not list(tmp_path.iterdir())


def test_operations_are_those_of_the_timed_steps_and_not_of_the_one_that_was_counted(tmp_path):
    meter = Profile(World.alone(), tmp_path, 2)
    for edges in (10, 100, 30, 50):  # the second is counted, the third and the fourth are timed
        with meter.step():
            if edges == 100:
                torch.mm(torch.ones(5, 10), torch.ones(10, 10))
        meter.add({"local_edges": [edges]})
    (rank,) = json.loads((tmp_path / "profile" / "profile.json").read_text())["ranks"]
    assert rank["flops"] == pytest.approx(1000 * (30 + 50) / 2 / 100)


def test_of_a_gpu_the_time_of_kernels_is_shown_once_and_no_time_of_the_host():
    def row(key, device, seconds, host=0.0, annotation=False):
        return SimpleNamespace(
            key=key, device_type=device, is_user_annotation=annotation, count=4,
            self_device_time_total=1e6 * seconds, self_cpu_time_total=1e6 * host,
        )  # fmt: skip

    of_host = [row("aten::mm", DeviceType.CPU, 3.0, 0.5), row("cudaStreamSynchronize", DeviceType.CPU, 0.0, 7.0)]
    of_gpu = [row("gemm", DeviceType.CUDA, 3.0), row("phase: forward", DeviceType.CUDA, 3.0, annotation=True)]
    shown = [
        _operations(SimpleNamespace(key_averages=lambda rows=rows: rows), 2) for rows in (of_host + of_gpu, of_host)
    ]
    assert [[(it["name"], it["calls"], it["seconds"]) for it in rows] for rows in shown] == [
        [("gemm", 2.0, 1.5)],
        [("aten::mm", 2.0, 0.25), ("cudaStreamSynchronize", 2.0, 3.5)],
    ]


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
