"""Do these ranks, with their launcher, train to the same bits in any layout, and what do a step and its memory take?

    mpiexec -n 4 python bench/certificate.py                   also after torchrun or srun, and alone
    srun -n 64 python bench/certificate.py --out found.json --layouts 3

Prints a table as `doctor` does, and writes it as JSON with the layouts, the steps and the machines: one file that says
what a machine does. Layouts of one precision must end with one sha256 of parameters, losses and metrics; gradients of a
GPU are those of its processor up to rounding. The exit code is 1 where they are not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from domainpar.common import timeouts
from domainpar.common.agreement import gather
from domainpar.diagnosis import machine_checks as machine
from domainpar.diagnosis.finding import (
    Finding,
    as_record,
    exit_code,
    failed,
    gathered,
    show,
    skipped,
    works,
    write_json,
)
from domainpar.measure.forecast import MemoryMeter, forecast_of
from domainpar.parallel.gpus import dealt, seen_by
from domainpar.parallel.launcher import detect
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.diagnosis.layouts import SMALL, distinct_hashes, trained, trained_sha256
from domainpar.tracking.diagnosis.toy import ring_event, toy_store
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.sampler import samples_of
from domainpar.tracking.training.step_memory import weight_of

PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "float64": {"dtype": "float64"}, "bf16": {"precision": "bf16"}}
TRACKS_OF_LAYOUTS = (60, 43)
GPU_BOUNDS = {"float32": 1e-4, "float64": 1e-11}
Layout = tuple[str, str, TrainConfig, str, int]
"""Precision, name, training, ranks (`alone`, `processes` or `threads` of rank 0), ranks that share an event."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(1)  # as commands do: more could change bits
    world = World.launch("auto", options.device, timeout=timeouts.DOCTOR + 600.0, join_seconds=timeouts.DOCTOR)
    content, findings = certify(world, options.tracks, options.layouts)
    if world.is_root:
        show(findings)
        write_json(options.out, content)
        print(f"certificate: {options.out}", flush=True)
    world.close()
    return exit_code(findings)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="cpu")
    parser.add_argument("--tracks", type=int, nargs="+", default=[500, 8000], help="of the events that are timed")
    parser.add_argument("--layouts", type=int, help="of the layouts the first ones only")
    parser.add_argument("--out", type=Path, default=Path("certificate.json"))
    return parser.parse_args(argv)


def certify(world: World, tracks: Sequence[int], most: int | None) -> tuple[dict[str, Any], list[Finding]]:
    """Everything in plain values, and the findings; the same on every rank. *Collective*."""
    # Memory first: later work leaves memory behind in a process, which would be counted.
    steps = [measured_steps(world, number) for number in tracks]
    cases = layout_cases(world, most) if world.device.type == "cpu" else []
    gpu = dealt(seen_by(world.transport))[world.rank] or 0
    own = [*map(step_finding, steps), *map(partial(bits_finding, cases), PRECISIONS)]
    findings = gathered([*own, *(gpu_finding(precision, gpu) for precision in GPU_BOUNDS)], world)
    content = {
        "launcher": asdict(detect()),
        "machines": {values["host"]: values for values in reversed(gather(world.transport, machine.describe()))},
        "layout": [asdict(place) for place in machine.places_of(world)],
        "cases": cases,
        "steps": steps,
        **as_record(findings),
    }
    return content, findings


# --- the same training on every layout of the ranks: all must agree ---------------------------------------------------


def layouts(size: int) -> Iterator[Layout]:
    """Every layout of so many ranks, the most important first."""
    for name, flags in PRECISIONS.items():
        training = replace(SMALL, **flags)
        yield name, "each rank alone", training, "alone", 1
        yield name, f"{size} ranks as one domain", training, "processes", size
        yield name, "4 threads as ranks", training, "threads", 4
    for domain_size in (number for number in range(1, size) if size % number == 0):
        yield "float32", f"{size // domain_size} groups of {domain_size}", SMALL, "processes", domain_size
    for grouping in ("metis", "random"):
        other = replace(SMALL, grouping=grouping)
        yield "float32", f"{size} ranks with {grouping} parts", other, "processes", size
        yield "float32", f"3 threads as ranks with {grouping} parts", other, "threads", 3
    sparing = replace(SMALL, threads=3, recompute_every=2)
    yield "float32", f"{size} ranks of 3 threads that recompute", sparing, "processes", size


def layout_cases(world: World, most: int | None) -> list[dict[str, Any]]:
    """The distinct hashes of each layout. *Collective*."""
    events = [ring_event(max(tracks, world.size), seed) for seed, tracks in enumerate(TRACKS_OF_LAYOUTS)]
    with toy_store(*events, num_ranks=world.size) as store:
        return [
            {"precision": precision, "how": how, "sha256": hashes_of(training, store, world, ranks, size)}
            for precision, how, training, ranks, size in islice(layouts(world.size), most)
        ]


def hashes_of(training: TrainConfig, store: EventStore, world: World, ranks: str, size: int) -> list[str]:
    if ranks == "threads":
        hashes = [""]
        if world.is_root:
            of_threads = partial(trained_sha256, training, store)
            hashes = run_threads(of_threads, size, timeout=timeouts.SMALL_GRAPH, domain_size=size)
        return sorted(set(gather(world.transport, hashes)[0]))
    grid = World.alone() if ranks == "alone" else World.over(world.transport, domain_size=size)
    hashes = distinct_hashes(training, store, world, grid)
    if ranks == "processes" and grid.domain is not grid.transport:
        grid.domain.close()
    return hashes


def bits_finding(cases: Sequence[Mapping[str, Any]], precision: str) -> Finding:
    """Whether all layouts of one precision gave the same bits."""
    check, mine = f"same bits, {precision}", [case for case in cases if case["precision"] == precision]
    if len(mine) < 2:
        return skipped(check, "fewer than two layouts were tried")
    groups: dict[str, list[str]] = {}
    for sha256, how in [(sha256, case["how"]) for case in mine for sha256 in case["sha256"]]:
        groups.setdefault(sha256[:12], []).append(how)
    text = "; ".join(f"{sha256}: {', '.join(names)}" for sha256, names in groups.items())
    if len(groups) == 1:
        return works(check, text, **groups)
    return failed(check, f"layouts do not agree: {text}", "put the file into an issue", **groups)


# --- steps on rank 0 alone and on all ranks, and on a GPU -------------------------------------------------------------


def measured_steps(world: World, tracks: int) -> dict[str, Any]:
    """The fastest of three steps on a toy event, on all ranks and on rank 0 alone; bytes of each rank. *Collective*."""
    config = replace(SMALL, hidden=64, graph_iters=4, threads=world.cores_for_each())
    with toy_store(ring_event(tracks), num_ranks=world.size) as store:
        domain = World.over(world.transport, world.device, domain_size=world.size)
        memory = MemoryMeter(world.device)
        trainer, records = trained(config, store, domain, 3)
        taken, sample = memory.taken(domain), samples_of(store.events(), None)[0]
        part = trainer.loader.load(sample)
        assert part is not None, "nothing is left out here"
        weight = weight_of(trainer.model, store, sample.record, domain, trainer.loader.dtype)
        sizes = part.graph.num_owned, part.graph.plan.num_ghosts, part.graph.num_edges
        needed = int(weight.of(*sizes, len(part.graph.tiles.pair_rows)))
        found = forecast_of(domain.transport, world.device, sizes, needed, memory.bare)
        expected = [share.expected for share in found.shares]
        alone = trained(config, store, World.alone(world.device), 3)[1] if world.is_root else []
    seconds, alone_seconds = (min((record["seconds"] for record in of), default=0.0) for of in (records, alone))
    alone_seconds = gather(world.transport, alone_seconds)[0]
    return {
        "tracks": tracks, "ranks": world.size, "threads": config.threads, "seconds": seconds,
        "seconds_alone": alone_seconds, "taken_bytes": list(taken), "expected_bytes": expected,
    }  # fmt: skip


def step_finding(step: Mapping[str, Any]) -> Finding:
    """Seconds of a step on all ranks against those on one, and the most bytes of a rank for what was expected of it."""
    times = step["seconds_alone"] / step["seconds"]
    text = f"{step['seconds_alone']:.3g} s on one rank, {step['seconds']:.3g} s on {step['ranks']}: {times:.2f} times"
    shares = [of for of in zip(step["taken_bytes"], step["expected_bytes"]) if of[0] is not None]
    if shares:
        taken, share = max(shares, key=lambda of: of[0] / of[1])
        text += f"; {taken / 2**20:,.0f} MiB at the peak of a rank, {share / 2**20:,.0f} MiB expected"
    return works(f"a step, {step['tracks']} tracks", text, speedup=times)


def gpu_finding(precision: str, index: int) -> Finding:
    """Gradients of this rank's GPU against those of its processor."""
    check = f"GPU = CPU, {precision}"
    if not torch.cuda.is_available():
        return skipped(check, "no GPU here")
    with toy_store(ring_event(60)) as store:
        on_cpu, on_gpu = (gradients(precision, store, torch.device(*kind)) for kind in (("cpu",), ("cuda", index)))
    worst = max(float((on_gpu[name] - of).abs().max() / of.abs().max().clamp_min(1e-30)) for name, of in on_cpu.items())
    text = f"gradients differ by at most {worst:.1e} of the largest; {GPU_BOUNDS[precision]:.0e} is rounding"
    if worst > GPU_BOUNDS[precision]:
        return failed(check, text, "put the file into an issue", difference=worst)
    return works(check, text, difference=worst)


def gradients(precision: str, store: EventStore, device: torch.device) -> dict[str, torch.Tensor]:
    """Gradients of one step on a whole event, on the host, by parameter."""
    trainer, _ = trained(replace(SMALL, **PRECISIONS[precision]), store, World.alone(device), 1)
    named = trainer.model.named_parameters()
    return {name: value.grad.detach().cpu().double() for name, value in named if value.grad is not None}


if __name__ == "__main__":
    sys.exit(main())
