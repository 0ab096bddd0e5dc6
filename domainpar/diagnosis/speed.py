"""Seconds and memory of a training step, on rank 0 alone and on all ranks; and its gradients on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from domainpar.diagnosis.finding import Finding, failed, of_all_ranks, passed, skipped, warned
from domainpar.events.store import EventStore
from domainpar.measure.layouts import SMALL
from domainpar.measure.steps import Training, trained
from domainpar.measure.toy import NUM_LAYERS, REACH, ring_event, toy_store
from domainpar.nn.memory import ModelSize
from domainpar.nn.team import set_threads
from domainpar.parallel.world import World
from domainpar.training.memory import Expectation, MemoryMeter
from domainpar.training.sampler import samples_of

TRAINING = Training(hidden=64, graph_iters=4, rate=1e-2)
NUM_STEPS = 3
GOOD_EFFICIENCY = 0.5
MOST_OVER_EXPECTED = 1.3
GPU_TRACKS = 60
GPU_BOUNDS = {"float32": 1e-4, "float64": 1e-11}
KEPT = ("seconds", "seconds_compute", "seconds_exchange", "seconds_wait", "owned_nodes", "ghost_nodes", "halo_bytes")


@dataclass(frozen=True)
class Steps:
    """Some steps on some ranks.

    Attributes:
        record: Of the fastest step, as `train` writes it: lists hold one value a rank.
        expected: Bytes that each rank was expected to take at its peak.
        taken: Bytes of each rank's peak above its bare process; None where that could not be told.
    """

    record: dict[str, Any]
    expected: list[int]
    taken: list[int | None]

    @property
    def seconds(self) -> float:
        return float(self.record["seconds"])


def measure_steps(world: World, name: str, tracks: int) -> tuple[list[Finding], dict[str, Any], float]:
    """Steps on a toy event, on all ranks and on rank 0 alone. *Collective*.

    Args:
        world: The ranks.
        name: The event's name in findings.
        tracks: Its size.

    Returns:
        Findings about time and memory, the figures, and seconds of both steps; the same on every rank.
    """
    threads = world.cores_for_each()
    with toy_store(ring_event(tracks), num_ranks=world.size) as store:
        together, alone = several_steps(store, world, threads), None
        if world.is_root:
            # Tables that ranks keep are still held, so only time is measured, and memory computed.
            steps = several_steps(store, World.alone(world.device), threads)
            alone = {"seconds": steps.seconds, "expected_bytes": steps.expected[0]}
    alone = of_all_ranks(alone, world)[0]
    figures = {
        "nodes": NUM_LAYERS * tracks,
        "edges": (NUM_LAYERS - 1) * tracks * (2 * REACH + 1) + 2,
        "hidden": TRAINING.hidden,
        "graph_iters": TRAINING.graph_iters,
        "threads_of_a_rank": threads,
        "seconds_alone": alone["seconds"],
        "ranks": {kept: together.record[kept] for kept in KEPT},
        "memory": {
            "taken_bytes": together.taken,
            "expected_bytes": together.expected,
            "expected_bytes_alone": alone["expected_bytes"],
        },
    }
    findings = [judge_time(name, world.size, together, alone), judge_memory(name, together, alone)]
    return findings, figures, together.seconds + alone["seconds"]


def several_steps(store: EventStore, world: World, threads: int) -> Steps:
    """Some steps on the one event of a store, shared by all ranks. *Collective*."""
    one_domain = World.over(world.transport, world.device, domain_size=world.size)
    set_threads(threads)
    memory = MemoryMeter(world.device)
    trainer, samples = TRAINING.trainer(store, one_domain), samples_of(store.events(), None)
    part = trainer.loader.load(samples[0])
    assert part is not None, "nothing is left out here"
    expected: Expectation = memory.expect(ModelSize(TRAINING.hidden, TRAINING.graph_iters), part, 0, one_domain)
    records = [trainer.step(samples, step) for step in range(NUM_STEPS)]
    taken = memory.taken(one_domain)
    set_threads(1)
    fastest = min(records, key=lambda record: float(record["seconds"]))
    return Steps(fastest, [share.expected for share in expected.shares], taken)


def judge_time(name: str, num_ranks: int, together: Steps, alone: dict[str, Any]) -> Finding:
    """Seconds of a step on all ranks against those on one."""
    check = f"scaling, {name}"
    if num_ranks == 1:
        return passed(check, f"a step takes {together.seconds:.3g} s on one rank", seconds=together.seconds)
    speedup = alone["seconds"] / together.seconds
    text = (
        f"a step takes {alone['seconds']:.3g} s on one rank and {together.seconds:.3g} s on {num_ranks}: "
        f"{speedup:.2f} times as fast, {100 * speedup / num_ranks:.0f} % of ideal"
    )
    if speedup / num_ranks >= GOOD_EFFICIENCY:
        return passed(check, text, speedup=speedup)
    advice = "see 'cores' and 'transport': ranks that share cores, or a slow network; small events gain little anyway"
    return warned(check, text, advice, speedup=speedup)


def judge_memory(name: str, together: Steps, alone: dict[str, Any]) -> Finding:
    """Memory that ranks took against what was expected of them."""
    check = f"memory, {name}"
    ratios = [
        (taken / share, taken, share) for taken, share in zip(together.taken, together.expected) if taken is not None
    ]
    if not ratios:
        return skipped(check, "this system does not tell peaks: processes held more before")
    ratio, taken, share = max(ratios)
    text = (
        f"the rank that took most for its share took {_mebibytes(taken)} at its peak, expected {_mebibytes(share)}; "
        f"the whole event on one rank: {_mebibytes(alone['expected_bytes'])} expected"
    )
    if ratio > MOST_OVER_EXPECTED:
        return warned(check, text, "more than computed: tell us, this machine allocates differently", ratio=ratio)
    return passed(check, text, ratio=ratio)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def check_gpu(precision: str, local_rank: int) -> Finding:
    """Compare gradients of this rank's GPU with those of its processor: the same to rounding, not to the bit."""
    check = f"GPU = CPU, {precision}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return skipped(check, "no GPU here")
    device = torch.device("cuda", local_rank % count)
    with toy_store(ring_event(GPU_TRACKS)) as store:
        on_cpu, on_gpu = (gradients(precision, store, torch.device(kind)) for kind in ("cpu", device))
    worst, name = max(
        (float((on_gpu[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)), name)
        for name, value in on_cpu.items()
    )
    text = f"{torch.cuda.get_device_name(device)}: gradients differ by at most {worst:.1e} of the largest ({name})"
    if worst > GPU_BOUNDS[precision]:
        text += f"; {GPU_BOUNDS[precision]:.0e} is rounding"
        return failed(check, text, "put this into an issue", difference=worst)
    return passed(check, text, difference=worst)


def gradients(precision: str, store: EventStore, device: torch.device) -> dict[str, torch.Tensor]:
    """Gradients of one step on a whole event, on the host, by parameter."""
    trainer, _ = trained(replace(SMALL, precision=precision), store, World.alone(device), 1)
    named = trainer.model.named_parameters()
    return {name: value.grad.detach().cpu().double() for name, value in named if value.grad is not None}
