"""One network on one GPU and one whole event: a line of JSON with milliseconds, launches, busy share and memory.

    python bench/gpu/one_card.py STORE SYSTEM HIDDEN ITERATIONS full|tf32|bf16 [--repeats 20]
    python bench/gpu/one_card.py --ceilings

SYSTEM is `domainpar`, or plain torch_geometric: `eager`, `checkpointed`, `compiled`; these have `tf32`, products in
three digits, and in place of `bf16` autocast. A step of ours makes its metrics and waits for the host once; theirs does
neither.

Milliseconds are medians of CUDA events on the stream, from one step's start to the next one's. The ceilings are what
the card reaches in a copy of memory and in products of matrices.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from domainpar.nn.options import NetworkOptions
from domainpar.parallel.gpus import repeat_bits
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import EventStore, WholeEvent
from domainpar.tracking.networks.catalogue import build_model
from domainpar.tracking.networks.on_events import on_device
from domainpar.tracking.training.loop import Schedule, Trainer
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.sampler import samples_of

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
    of_card = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    # Ranges that torch names itself lie over the kernels in them.
    kernels = [event for event in of_card if not getattr(event, "is_user_annotation", False)]
    by_name: Counter[str] = Counter()
    for event in kernels:
        by_name[event.name.split("(")[0][:60]] += event.device_time / 1e3
    return {"launches": len(kernels), "busy ms": sum(by_name.values()), "ms of kernels": dict(by_name.most_common(12))}


def upper_bounds() -> dict[str, Any]:
    """GB/s of a copy, TFLOP/s of products, and microseconds between launches of nearly nothing."""
    from_, into = (torch.zeros(2**28, device="cuda") for _ in range(2))
    found = {"copy GB/s": 2 * from_.nbytes / 1e6 / milliseconds(lambda: into.copy_(from_), 20)}
    size, small = 8192, torch.zeros(1, device="cuda")
    for name, kind, precision in (("float32", torch.float32, "highest"), ("tf32", torch.float32, "high"),
                                  ("bf16", torch.bfloat16, "highest")):  # fmt: skip
        torch.set_float32_matmul_precision(precision)
        one = torch.randn(size, size, device="cuda", dtype=kind)
        found[f"{name} TFLOP/s"] = 2 * size**3 / 1e9 / milliseconds(lambda one=one: one @ one, 10)
    found["launch us"] = 10 * milliseconds(lambda: [small.add_(1) for _ in range(100)], 10)
    return found


def of_domainpar(options: argparse.Namespace, store: EventStore) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """A training step, an inference, and the edges."""
    world = World.alone("cuda")
    repeat_bits(world.device)
    products = torch.bfloat16 if options.precision == "bf16" else None
    sizes = len(store.feature_names), len(store.edge_feature_names)
    own = NetworkOptions(hidden=options.hidden, graph_iters=options.iterations, products=products)
    model = on_device(build_model("interaction", *sizes, own), torch.device("cuda"))
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
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    in_bf16 = torch.autocast("cuda", dtype=torch.bfloat16, enabled=options.precision == "bf16")

    def step() -> None:
        optimizer.zero_grad()
        with in_bf16:
            logits = forward(x, edge_index, edge_attr).flatten()
        torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), label).backward()
        optimizer.step()

    def infer() -> torch.Tensor:
        with torch.no_grad(), in_bf16:
            logits: torch.Tensor = forward(x, edge_index, edge_attr)
        return logits

    return step, infer, len(label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("system", choices=("domainpar", "eager", "checkpointed", "compiled"))
    parser.add_argument("hidden", type=int)
    parser.add_argument("iterations", type=int)
    parser.add_argument("precision", choices=("full", "tf32", "bf16"))
    parser.add_argument("--repeats", type=int, default=20)
    if sys.argv[1:] == ["--ceilings"]:
        print(json.dumps(upper_bounds()))
        return
    options = parser.parse_args()
    make = of_domainpar if options.system == "domainpar" else of_plain
    step, infer, num_edges = make(options, EventStore(options.store))
    step()
    torch.cuda.reset_peak_memory_stats()
    figures: dict[str, Any] = {"edges": num_edges, "step ms": milliseconds(step, options.repeats)}
    figures["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
    figures["inference ms"] = milliseconds(infer, options.repeats)
    seen = launches(step)
    if seen:
        seen["busy share"] = seen["busy ms"] / figures["step ms"]
    print(json.dumps({**figures, **seen, "card": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main()
