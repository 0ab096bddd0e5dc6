"""The same training on every layout that these ranks can form: one hash each, and which of them agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from domainpar import timeouts
from domainpar.diagnosis.budget import Budget
from domainpar.diagnosis.toy import ring_event, toy_store
from domainpar.diagnosis.training import DTYPES, Way, same_on_all, trained_sha256
from domainpar.diagnosis.verdicts import Finding, failed, passed, skipped
from domainpar.events.store import EventStore
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.words import several

TRACKS = (60, 43)
THREAD_RANKS = (1, 2, 3, 4, 8)
OTHER_GROUPINGS = ("metis", "random")

Train = Callable[[Way, EventStore, World], list[str]]
"""Train on some layout of the ranks; returns the hashes that came of it. *Collective*."""


@dataclass(frozen=True)
class Layout:
    """A way to train and the ranks to do it on.

    Attributes:
        name: In words.
        way: How to train.
        train: Trains that way.
    """

    name: str
    way: Way
    train: Train


@dataclass(frozen=True)
class Trained:
    """What came of a layout: the distinct hashes of its ranks, one if all agree."""

    name: str
    way: Way
    hashes: tuple[str, ...]


def check_invariance(world: World, budget: Budget) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Train on all layouts that there is time for, and compare. *Collective*.

    Returns:
        One finding a precision, and the cases as plain values; the same on every rank.
    """
    done: list[Trained] = []
    events = [ring_event(max(tracks, world.size), seed) for seed, tracks in enumerate(TRACKS)]
    with toy_store(*events, num_ranks=world.size) as store:
        for layout in layouts(world):
            if budget.allows(f"{layout.way.precision} {layout.name}"):
                hashes = sorted(set(layout.train(layout.way, store, world)))
                done.append(Trained(layout.name, layout.way, tuple(hashes)))
    cases = [{"how": case.name, **asdict(case.way), "sha256": list(case.hashes)} for case in done]
    return [judge(precision, [case for case in done if case.way.precision == precision]) for precision in DTYPES], cases


def judge(precision: str, cases: Sequence[Trained]) -> Finding:
    """Whether all layouts of one precision gave the same bits."""
    check = f"same bits, {precision}"
    if len(cases) < 2:
        return skipped(check, "no time to compare two layouts", "give it more: --minutes")
    by_hash: dict[str, list[str]] = {}
    for case in cases:
        for sha256 in case.hashes:
            by_hash.setdefault(sha256, []).append(case.name)
    figures = {sha256[:12]: names for sha256, names in by_hash.items()}
    if len(by_hash) == 1:
        names = ", ".join(case.name for case in cases)
        return passed(check, f"{several(len(cases), 'layout')} give {next(iter(figures))}: {names}", **figures)
    groups = "; ".join(f"{sha256}: {', '.join(names)}" for sha256, names in figures.items())
    advice = "put this certificate into an issue: results are right to rounding, but not to the bit here"
    return failed(check, f"layouts do not agree: {groups}", advice, **figures)


def layouts(world: World) -> Iterator[Layout]:
    """Every layout, the same list on every rank: what matters most comes first."""
    for precision in DTYPES:
        way = Way(precision)
        yield Layout("each rank alone", way, _alone)
        if world.size > 1:
            yield Layout(f"{world.size} ranks as one domain", way, partial(_on_ranks, world.size))
        yield Layout("4 threads as ranks", way, partial(_as_threads, 4))
    plain = Way()
    for size in divisors(world.size)[:-1]:
        yield Layout(f"{world.size // size} groups of {size}", plain, partial(_on_ranks, size))
    for grouping in OTHER_GROUPINGS:
        way = replace(plain, grouping=grouping)
        if world.size > 1:
            yield Layout(f"{world.size} ranks with {grouping} parts", way, partial(_on_ranks, world.size))
        yield Layout(f"3 threads as ranks with {grouping} parts", way, partial(_as_threads, 3))
    sparing = replace(plain, threads=3, recompute_every=2)
    yield Layout(f"{several(world.size, 'rank')} of 3 threads that recompute", sparing, partial(_on_ranks, world.size))
    for count in THREAD_RANKS:
        if count != 4:
            yield Layout(
                "1 thread as the only rank" if count == 1 else f"{count} threads as ranks",
                plain,
                partial(_as_threads, count),
            )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def _alone(way: Way, store: EventStore, world: World) -> list[str]:
    """On every rank by itself: tells machines that compute differently."""
    return list(same_on_all(trained_sha256(way, store, World.alone()), world))


def _on_ranks(domain_size: int, way: Way, store: EventStore, world: World) -> list[str]:
    grid = World.over(world.transport, domain_size=domain_size)
    found = same_on_all(trained_sha256(way, store, grid), world)
    if grid.domain is not grid.transport:
        grid.domain.close()
    return list(found)


def _as_threads(num_ranks: int, way: Way, store: EventStore, world: World) -> list[str]:
    """On rank 0, whose threads are the ranks; the others wait."""

    def train(of_threads: World) -> str:
        return trained_sha256(way, store, of_threads)

    own = ""
    if world.is_root:
        found = run_threads(train, num_ranks, timeout=timeouts.SMALL_GRAPH, domain_size=num_ranks)
        own = ",".join(sorted(set(found)))
    return world.transport.broadcast(own.encode()).decode().split(",")
