"""What the GPU engine's kernels become on a card, without one: registers, memory, instructions of each.

    python bench/gpu/compiled.py [--arch 80 90] [--hidden 64] [--precision full tf32x3 bf16] [--everything]

A small network goes forward and back with a driver that compiles and launches nothing: its kernels have the types and
constants that a real launch would give them. Triton's package brings the compiler and `cuobjdump`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from domainpar.nn import stages
from domainpar.nn.fused import calls, launching
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.on_stages import PUBLISHED_ON_STAGES, OnStages
from domainpar.nn.options import NetworkOptions
from domainpar.parallel.world import World
from domainpar.tracking.diagnosis.toy import ring_event, toy_store
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.catalogue import build_model
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.sampler import samples_of

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CHAIN = ("FFMA", "HMMA", "HGMMA")
SEEN = (*CHAIN, "FADD", "FMUL", "MUFU", "LDG", "STG", "LDS", "STS", "LDL", "STL", "BAR", "SHFL")


class Kernel(NamedTuple):
    """One compiled kernel.

    Attributes:
        name, about: Which, and how it was asked for.
        registers: Of a thread.
        stack: Bytes of a thread that are memory and no registers: what is spilled lies there.
        shared: Bytes of a program's shared memory.
        instructions: How many of each kind.
        atomics: Those that are atomic, with their types.
        forks: Sums of products that go on in two ways at one place: 0 where each is a chain, in the order of columns.
    """

    name: str
    about: str
    registers: int
    stack: int
    shared: int
    instructions: dict[str, int]
    atomics: dict[str, int]
    forks: int


class _Card:
    """A driver of a card that is not there."""

    def __init__(self, arch: int) -> None:
        self._target, self._arch = GPUTarget("cuda", arch, 32), arch

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._arch  # a number of its own, for what is compiled is kept by the device

    def get_current_stream(self, _: Any) -> int:
        return 0


def _about(constants: dict[str, Any]) -> str:
    """A kernel's constants, as far as they tell one use of it from another."""
    shape = constants.get("SHAPE")
    told = [f"tables {list(shape.tables)}, widths {list(shape.widths)}"] if shape is not None else []
    flags = ("GATHERS", "DROPS", "HAS_OUT", "ENDS", "GATED", "OF_NODES", "SCALED", "ADDS")
    return ", ".join(told + [f"{name.lower()} {int(constants[name])}" for name in flags if constants.get(name)])


def _examined(name: str, about: str, made: Any) -> Kernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, listing = (
            subprocess.run([TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    operations = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9.]+)", listing, re.M))
    kinds: Counter[str] = Counter()
    for operation, count in operations.items():
        kinds[operation.split(".")[0]] += count
    atomics = {name: count for name, count in operations.items() if name.startswith(("ATOM", "RED"))}
    seen = {kind: kinds[kind] for kind in SEEN if kinds[kind]}
    forks = 0
    for place in made.asm["ptx"].split("\n$L"):
        steps = re.findall(r"fma\.rn\.f32\s+(%\w+), %\w+, %\w+, (%\w+);", place)
        goes_on = Counter(addend for _, addend in steps)
        forks += sum(goes_on[result] > 1 for result in {result for result, _ in steps})
    return Kernel(name, about, int(found[1]), int(found[2]), made.metadata.shared, seen, atomics, forks)


@contextmanager
def _compiling(arch: int) -> Iterator[dict[str, Kernel]]:
    """Whatever is launched meanwhile is compiled for an architecture and examined."""
    kernels: dict[str, Kernel] = {}

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if all(grid):
            made = kernel.warmup(*arguments, grid=grid, **constants, **launching.OPTIONS)
            if made.hash not in kernels:
                kernels[made.hash] = _examined(kernel.fn.__name__, _about(constants), made)

    plain = launching.launch, stages.TILES
    driver.set_active(_Card(arch))
    launching.launch, stages.TILES = launch, stages.Engine(calls.FusedNodes, calls.FusedEdges)
    try:
        yield kernels
    finally:
        launching.launch, stages.TILES = plain


def compiled(arch: int, hidden: int, precision: str, everything: bool = False) -> list[Kernel]:
    """The kernels of a training step of an interaction network, or of all networks; and of the loss."""
    torch.set_num_threads(1)
    world = World.alone()
    with toy_store(ring_event(8)) as store, _compiling(arch) as kernels:
        part = PartLoader(store, world).load(samples_of(store.events()[:1], None)[0])
        assert part is not None
        for model in _networks(store, hidden, precision, everything):
            if precision == "tf32x3":
                model.use_matrix_units()
            model.gradients()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of numbers that nobody wrote
                logits = model(part.graph, part.halo, 1)
                calls.edge_losses(logits.detach(), part.weights, part.graph, 1.0, _one_sum(), torch.empty_like(logits))
                logits.backward(torch.zeros_like(logits))
    return sorted(kernels.values(), key=lambda kernel: kernel[:2])


def _networks(store: EventStore, hidden: int, precision: str, everything: bool) -> Iterator[OnStages]:
    sizes = len(store.feature_names), len(store.edge_feature_names)
    how: dict[str, Any] = {"hidden": hidden, "graph_iters": 2}
    products = torch.bfloat16 if precision == "bf16" else None
    yield InteractionNetwork(*sizes, **how, products=products)
    if everything:
        yield InteractionNetwork(*sizes, **how, products=products, order="node-first", dropout=0.1, activation="silu")
        for name in PUBLISHED_ON_STAGES:
            model = build_model(name, *sizes, NetworkOptions(**how))
            assert isinstance(model, OnStages)
            yield model


def _one_sum() -> Any:
    from domainpar.parallel.integer_sums import IntegerSums

    return IntegerSums(1)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64])
    parser.add_argument("--precision", nargs="+", default=["full", "tf32x3", "bf16"])
    parser.add_argument("--everything", action="store_true", help="all networks, not the interaction network alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    print(f"triton {triton.__version__}", flush=True) if not options.json else None
    for arch in options.arch:
        for hidden in options.hidden:
            for precision in options.precision:
                made = compiled(arch, hidden, precision, options.everything)
                if options.json:
                    print(json.dumps([arch, hidden, precision, [kernel._asdict() for kernel in made]]), flush=True)
                    continue
                print(
                    f"\nsm_{arch}, hidden {hidden}, {precision}\n\n| kernel | registers | stack | shared | products |"
                )
                print("| --- | --- | --- | --- | --- |")
                for kernel in made:
                    products = ", ".join(f"{n} {kind}" for kind, n in kernel.instructions.items() if kind in CHAIN)
                    name = f"`{kernel.name}` {kernel.about}".strip()
                    print(f"| {name} | {kernel.registers} | {kernel.stack} | {kernel.shared} | {products or '-'} |")


if __name__ == "__main__":
    main()
