"""Runs on a GPU: what they learn is what a CPU learns, to rounding, whatever the flags."""

import json

import numpy as np
import pytest
import torch
from marks import needs_gpu
from random_events import random_event
from random_store import write_random_store
from tiled import TiledEvent

from domainpar import parallelize, split_graph
from domainpar.measure.forecast import OF_PROCESS
from domainpar.nn.flops import counted
from domainpar.nn.options import NetworkOptions
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.networks.catalogue import build_model
from domainpar.tracking.networks.on_events import on_device
from domainpar.tracking.scoring import scores
from domainpar.train import train

SMALL = {"hidden": 16, "graph_iters": 2, "epochs": 2, "lr": 1e-2, "log_every": 1}

FLAGS = {
    "as it is": {},
    "recomputed": {"recompute_every": 2, "graph_iters": 3},
    "offloaded": {"model": "examples.offload:acorn2"},
    "clipped, deep, in float64": {"clip": 0.1, "readouts": "all", "dtype": "float64"},
    "means, tanh, shared": {"aggregate": "mean", "activation": "tanh", "shared_weights": True},
    "sectors": {"mode": "naive", "sectors": 2},
    "two events a step": {"events_per_step": 2},
    "weights": {"weighting": "[{weight: 3, conditions: {y: true}}]"},
    **{name: {"model": name} for name in ("acorn", "acorn2")},
    "attention": {"model": "examples.networks:AttentionNetwork"},
    "labels beside edges": {"aux": "kind:0.5, energy:0.25, sort:0.1, size:0.2"},
    "a user's own": {"model": "own_models:evolving", "dropout": 0.2},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"))


def records_of(store, out, device, flags):
    """Loss and AUC of each record of a run on one rank."""
    train(TrainConfig(**{**SMALL, **flags}, device=device, out=str(out)), store, World.alone(device))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [(record["loss"], record["edge_auc_pooled"]) for record in map(json.loads, lines)]


@needs_gpu
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_gpu_learns_what_a_cpu_learns(store, tmp_path, flags):
    on_cpu = records_of(store, tmp_path / "cpu", "cpu", flags)
    on_gpu = records_of(store, tmp_path / "gpu", "cuda", flags)
    assert len(on_gpu) == len(on_cpu) > 2
    bound = 1e-9 if flags.get("dtype") == "float64" else 2e-3
    assert np.abs(np.array(on_gpu) / np.array(on_cpu) - 1).max() <= bound


@needs_gpu
def test_in_bf16_it_learns_about_the_same(store, tmp_path):
    on_cpu, on_gpu = (records_of(store, tmp_path / device, device, {"precision": "bf16"}) for device in ("cpu", "cuda"))
    assert np.abs(np.array(on_gpu)[:, 0] / np.array(on_cpu)[:, 0] - 1).max() <= 0.02


@needs_gpu
def test_two_runs_on_a_gpu_are_the_same_to_the_last_bit(store, tmp_path):
    for name, flags in {"stages": {"dropout": 0.1}, "own": {"model": "own_models:evolving"}}.items():
        once, again = (records_of(store, tmp_path / f"{name}{number}", "cuda", flags) for number in "12")
        assert once == again


@needs_gpu
def test_a_resumed_run_goes_on_as_one_that_never_stopped(store, tmp_path):
    whole = records_of(store, tmp_path / "whole", "cuda", {"epochs": 2})
    records_of(store, tmp_path / "parts", "cuda", {"epochs": 2, "max_steps": 3})
    assert records_of(store, tmp_path / "parts", "cuda", {"epochs": 2, "resume": True}) == whole


@needs_gpu
@pytest.mark.parametrize("how", ["nan", "flip"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fault_on_purpose_spoils_a_tensor_of_a_gpu(dtype, how):
    from faults.on_purpose import spoil_tensor

    tensor = torch.ones(3, 2, dtype=dtype, device="cuda", requires_grad=True)
    spoil_tensor(tensor, how)
    first, *others = tensor.flatten().tolist()
    assert np.isnan(first) if how == "nan" else 0 < abs(first - 1) <= 0.01
    assert others == [1.0] * 5
    assert tensor._version == 0, "autograd would notice"


@needs_gpu
@pytest.mark.parametrize(
    "flags", [{}, {"recompute_every": 1}, {"model": "examples.offload:acorn2"}, {"precision": "bf16"}], ids=str
)
def test_memory_is_forecast(tmp_path, flags):
    """From two pieces of an event, the larger of which has a third of its edges."""
    store = write_random_store(tmp_path / "store", 1, 0, 3000, 60_000, 9, compared=False)
    config = TrainConfig(**{**SMALL, "hidden": 32, "max_steps": 1, **flags}, device="cuda", out=str(tmp_path / "run"))
    train(config, store, World.alone("cuda"))
    memory = json.loads((tmp_path / "run" / "run.json").read_text())["memory"]
    assert 0.7 <= memory["peak_bytes"][0] / (memory["expected_bytes"][0] - OF_PROCESS) <= 1.1


@needs_gpu
def test_seconds_are_those_of_the_gpus_stream(store, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda began, ended: 7000.0)
    train(TrainConfig(**SMALL, device="cuda", out=str(tmp_path / "run")), store, World.alone("cuda"))
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert {record["seconds"] for record in records} == {7.0}
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    scores._clock(torch.device("cuda", 0))
    assert waited == [torch.device("cuda", 0)]


@needs_gpu
def test_kernels_of_a_run_repeat_their_bits(store, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, warn_only: asked.append((on, warn_only)))
    records_of(store, tmp_path / "gpu", "cuda", {})
    assert asked == [(True, True)]
    assert torch.backends.cudnn.conv.fp32_precision == torch.backends.cudnn.rnn.fp32_precision == "ieee"
    records_of(store, tmp_path / "cpu", "cpu", {})
    assert len(asked) == 1


@needs_gpu
def test_numbers_are_ranked_among_rows_on_the_gpu():
    """Of a network that asks for the largest and for shares, and draws; on one GPU as on one CPU."""

    class Ranks(torch.nn.Module):
        def forward(self, x, edge_index):
            best = x[x[:, 0].argmax()] + x.min(0).values + x.std(0) + x.logsumexp(0)
            ranked = x.softmax(0).amax(0) + torch.nn.functional.normalize(x, dim=0).amax(0)
            return x * (best + ranked) + x.argmax(0) + torch.bernoulli(torch.rand_like(x)) + x.new_empty(4).uniform_()

    edges, x = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]]), torch.arange(20.0).view(5, 4).sin()
    found = {}
    for device in ("cpu", "cuda"):
        world = World.alone(device)
        torch.manual_seed(7)
        part, leaf = split_graph(edges, 5, world), x.clone().requires_grad_()
        result = parallelize(Ranks(), world)(part.nodes(leaf), part.edge_index)
        result.square().sum().backward()
        found[device] = torch.stack([part.whole(result.detach()).cpu(), leaf.grad])
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=1e-5, atol=1e-5)


@needs_gpu
def test_targets_and_conditions_of_the_host_come_to_the_gpu_as_inputs_do():
    class Conditioned(torch.nn.Module):
        def forward(self, x, edge_index, condition):
            return x + condition + x.new_zeros(len(x), 1).index_add(0, edge_index[1], x[edge_index[0]])

    world, edges = World.alone("cuda"), np.array([[0, 1, 2], [1, 2, 0]])
    part = split_graph(edges, 3, world)
    condition = torch.ones(1, device="cuda")
    result = parallelize(Conditioned(), world)(part.nodes(np.ones((3, 1), np.float32)), part.edge_index, condition)
    loss = (result - part.nodes(np.full((3, 1), 2.5, np.float32))).square().mean()
    assert float(loss) == 0.25
    assert part.edges(np.arange(3)).device.type == "cuda"


@needs_gpu
def test_operations_of_backward_are_counted_in_the_threads_of_a_gpu():
    def counted_on(device):
        event = TiledEvent.of(random_event(2, 50, 200, num_edge_features=6), np.arange(50) * 4 // 50, 4)
        world = World.alone(device)
        part = event.part(world.transport, event.grouping("one part", 1), device=device)
        model = build_model("interaction", 3, 6, NetworkOptions(hidden=16, graph_iters=2, recompute_every=1))
        model = on_device(model, torch.device(device), as_on_gpus=True)
        with counted() as flops:
            model(part.graph, part.halo).sum().backward()
        return flops.total

    assert counted_on("cuda") == counted_on("cpu") > 0
