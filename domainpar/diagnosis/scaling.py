"""Seconds and memory of a training step: on rank 0 alone, and on all ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from domainpar.diagnosis.budget import Budget
from domainpar.diagnosis.toy import NUM_LAYERS, REACH, ring_event, toy_store
from domainpar.diagnosis.training import Way, make_trainer
from domainpar.diagnosis.verdicts import Finding, passed, skipped, warned
from domainpar.events.forecast import ModelSize
from domainpar.events.store import EventStore
from domainpar.nn.team import set_threads
from domainpar.parallel.world import World
from domainpar.training.memory import Expectation, MemoryWatch
from domainpar.training.sampler import samples_of

WAY = Way(hidden=64, graph_iters=4)
TRACKS = {"small": 500, "large": 8000}
NUM_STEPS = 3
GOOD_EFFICIENCY = 0.5
MOST_OVER_EXPECTED = 1.3
FIRST_GUESS = 5.0  # seconds for the small event
KEPT = ("seconds", "seconds_compute", "seconds_exchange", "seconds_wait", "owned_nodes", "ghost_nodes", "halo_bytes")


@dataclass(frozen=True)
class Steps:
    """Some steps on one layout.

    Attributes:
        record: Of the fastest step, as `train` writes it: lists hold one value a rank.
        expected: Memory that ranks were expected to take.
        taken: Bytes of each rank's peak above its bare process; None where that could not be told.
    """

    record: dict[str, Any]
    expected: Expectation
    taken: list[int | None]

    @property
    def seconds(self) -> float:
        return float(self.record["seconds"])


def check_scaling(world: World, budget: Budget) -> tuple[list[Finding], dict[str, Any]]:
    """Measure on events of two sizes, the larger one if there is time. *Collective*.

    Returns:
        Findings about time and memory, and the figures; the same on every rank.
    """
    findings: list[Finding] = []
    figures: dict[str, Any] = {}
    guess, before = FIRST_GUESS, TRACKS["small"]
    threads = world.cores_for_each()
    for name, tracks in TRACKS.items():
        # Twice: what comes after, on layouts, matters more.
        if not budget.allows(f"scaling and memory, {name} event", 2 * guess * tracks / before):
            findings.append(skipped(f"scaling, {name}", "no time left", "give it more: --minutes"))
            continue
        with toy_store(ring_event(tracks), num_ranks=world.size) as store:
            together = several_steps(store, world, threads)
            alone = _by_root(store, world, threads)
        figures[name] = _figures(tracks, threads, together, alone)
        findings += [_judge_time(name, world, together, alone["seconds"]), _judge_memory(name, together, alone)]
        guess, before = NUM_STEPS * (together.seconds + alone["seconds"]) * 1.5, tracks
    return findings, figures


def several_steps(store: EventStore, world: World, threads: int) -> Steps:
    """Some steps on the one event of a store, shared by all ranks. *Collective*."""
    one_domain = World.over(world.transport, world.device, domain_size=world.size)
    set_threads(threads)
    memory = MemoryWatch(world.device)
    trainer = make_trainer(WAY, store, one_domain)
    samples = samples_of(store.events(), None)
    size = ModelSize(WAY.hidden, WAY.graph_iters)
    part = trainer.loader.load(samples[0])
    assert part is not None, "nothing is left out here"
    expected = memory.expect(size, part, 0, one_domain)
    records = [trainer.step(samples, step) for step in range(NUM_STEPS)]
    taken = memory.taken(one_domain)
    set_threads(1)
    return Steps(min(records, key=lambda record: float(record["seconds"])), expected, taken)


def _by_root(store: EventStore, world: World, threads: int) -> dict[str, Any]:
    """The same on rank 0 alone, while the others wait. *Collective*."""
    told = b""
    if world.is_root:
        # What ranks kept of their tables is still held, so only time is measured, and memory computed.
        steps = several_steps(store, World.alone(world.device), threads)
        found = {"seconds": steps.seconds, "expected_bytes": steps.expected.shares[0].expected}
        told = json.dumps(found).encode()
    content: dict[str, Any] = json.loads(world.transport.broadcast(told))
    return content


def _figures(tracks: int, threads: int, together: Steps, alone: dict[str, Any]) -> dict[str, Any]:
    return {
        "nodes": NUM_LAYERS * tracks,
        "edges": (NUM_LAYERS - 1) * tracks * (2 * REACH + 1) + 2,
        "hidden": WAY.hidden,
        "graph_iters": WAY.graph_iters,
        "threads_of_a_rank": threads,
        "seconds_alone": alone["seconds"],
        "ranks": {name: together.record[name] for name in KEPT},
        "memory": {
            "taken_bytes": together.taken,
            "expected_bytes": [share.expected for share in together.expected.shares],
            "expected_bytes_alone": alone["expected_bytes"],
        },
    }


def _judge_time(name: str, world: World, together: Steps, alone: float) -> Finding:
    check = f"scaling, {name}"
    if world.size == 1:
        return passed(check, f"a step takes {together.seconds:.3g} s on one rank", seconds=together.seconds)
    speedup = alone / together.seconds
    told = (
        f"a step takes {alone:.3g} s on one rank and {together.seconds:.3g} s on {world.size}: "
        f"{speedup:.2f} times as fast, {100 * speedup / world.size:.0f} % of ideal"
    )
    if speedup / world.size < GOOD_EFFICIENCY:
        return warned(
            check,
            told,
            "see 'cores' and 'transport': ranks that share cores, or a slow network; small events gain little anyway",
            speedup=speedup,
        )
    return passed(check, told, speedup=speedup)


def _judge_memory(name: str, together: Steps, alone: dict[str, Any]) -> Finding:
    check = f"memory, {name}"
    expected = [share.expected for share in together.expected.shares]
    known = [(taken / wanted, taken, wanted) for taken, wanted in zip(together.taken, expected) if taken is not None]
    of_one = alone["expected_bytes"]
    if not known:
        return skipped(check, "this system does not tell peaks: processes held more before")
    ratio, taken, wanted = max(known)
    told = (
        f"the rank that took most for its share took {_mebibytes(taken)} at its peak, expected {_mebibytes(wanted)}; "
        f"the whole event on one rank: {_mebibytes(of_one)} expected"
    )
    if ratio > MOST_OVER_EXPECTED:
        return warned(check, told, "more than computed: tell us, this machine allocates differently", ratio=ratio)
    return passed(check, told, ratio=ratio)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
