"""One network on one GPU and one whole event: a line of JSON with milliseconds, launches, busy share and memory.

    python bench/gpu/one_card.py STORE SYSTEM HIDDEN ITERATIONS full|tf32x3|bf16 [--repeats 20]

SYSTEM is `domainpar`, the same stages in plain torch, `torch`, or plain torch_geometric: `eager`, `checkpointed`,
`compiled`.

Milliseconds are medians of CUDA events on the stream, from one step's start to the next one's.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from domainpar.config import TrainConfig
from domainpar.events.store import EventStore, WholeEvent
from domainpar.nn.catalogue import build_model
from domainpar.parallel.gpus import repeat_bits
from domainpar.parallel.world import World
from domainpar.training.loop import Schedule, Trainer
from domainpar.training.parts import PartLoader
from domainpar.training.sampler import samples_of

GIB = 2**30
WARM_UP = 3


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Median time from the start of a call to that of the next, on the stream."""
    for _ in range(WARM_UP):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    torch.cuda.synchronize()
    apart = sorted(before.elapsed_time(after) for before, after in pairwise(events))
    return float(apart[len(apart) // 2])


def launches(call: Callable[[], Any]) -> dict[str, Any]:
    """Kernels and copies of one call, and how long the card was busy with them; nothing where torch cannot tell."""
    from torch.profiler import ProfilerActivity, profile

    if torch.version.cuda is None:
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    by_name: Counter[str] = Counter()
    for event in kernels:
        by_name[event.name.split("(")[0][:60]] += event.device_time / 1e3
    return {"launches": len(kernels), "busy ms": sum(by_name.values()), "ms of kernels": dict(by_name.most_common(12))}


def of_domainpar(options: argparse.Namespace, store: EventStore) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """A training step, an inference, and the edges."""
    world = World.alone("cuda")
    repeat_bits(world.device)
    products = torch.bfloat16 if options.precision == "bf16" else None
    sizes = len(store.feature_names), len(store.edge_feature_names)
    model = build_model("interaction", *sizes, hidden=options.hidden, graph_iters=options.iterations, products=products)
    model = model.to("cuda")
    if options.precision == "tf32x3":
        model.use_matrix_units()
    optimizer = torch.optim.AdamW(model.parameters(), lr=TrainConfig.lr, foreach=True)
    schedule = Schedule(TrainConfig.lr, "constant", 0, 1000, 1)
    trainer = Trainer(model, optimizer, PartLoader(store, world), world, schedule)
    samples = samples_of(store.events(), None)[:1]
    part = trainer.loader.load(samples[0])
    assert part is not None

    def infer() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(part.graph, part.halo)
        return logits

    return lambda: trainer.step(samples, 0), infer, part.graph.num_edges


def of_plain(options: argparse.Namespace, store: EventStore) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """The same of the network as users of torch_geometric write it (`plain_pyg.py`)."""
    from plain_pyg import PlainInteraction

    with store.open(store.events()[0]) as event:
        whole = WholeEvent(event)
        x = torch.from_numpy(event.read_nodes("features", whole.node_ids)).to("cuda")
        edge_index = torch.from_numpy(whole.edge_index).to("cuda", torch.int64)
        edge_attr = torch.from_numpy(event.read_edges("features", whole.edge_ids)).to("cuda")
        label = torch.from_numpy(event.read_edges("label", whole.edge_ids)).to("cuda", torch.float32)
    checkpointed = options.system == "checkpointed"
    sizes = x.shape[1], edge_attr.shape[1], options.hidden, options.iterations
    model: Any = PlainInteraction(*sizes, checkpointed=checkpointed).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=TrainConfig.lr)
    forward = torch.compile(model, dynamic=False) if options.system == "compiled" else model

    def step() -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(forward(x, edge_index, edge_attr).flatten(), label)
        loss.backward()
        optimizer.step()

    def infer() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = forward(x, edge_index, edge_attr)
        return logits

    return step, infer, len(label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("system", choices=("domainpar", "torch", "eager", "checkpointed", "compiled"))
    parser.add_argument("hidden", type=int)
    parser.add_argument("iterations", type=int)
    parser.add_argument("precision", choices=("full", "tf32x3", "bf16"))
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if options.system == "torch":
        os.environ["DOMAINPAR_GPU_ENGINE"] = "torch"
    make = of_domainpar if options.system in ("domainpar", "torch") else of_plain
    step, infer, num_edges = make(options, EventStore(options.store))
    step()
    torch.cuda.reset_peak_memory_stats()
    figures = {"edges": num_edges, "step ms": milliseconds(step, options.repeats)}
    figures["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
    figures["inference ms"] = milliseconds(infer, options.repeats)
    seen = launches(step)
    if seen:
        seen["busy share"] = seen["busy ms"] / figures["step ms"]
    print(json.dumps({**figures, **seen, "card": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main()
