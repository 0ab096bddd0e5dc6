"""The same training on every layout that some ranks can form, and one hash of each: they must agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from domainpar import timeouts
from domainpar.events.store import EventStore
from domainpar.measure.steps import PRECISIONS, Training, trained_sha256
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.words import several

THREAD_RANKS = (1, 2, 3, 8)
OTHER_GROUPINGS = ("metis", "random")
SMALL = Training(hidden=16, graph_iters=3, rate=1e-2)


@dataclass(frozen=True)
class Layout:
    """A training, and the ranks that do it.

    Attributes:
        name: In words.
        training: How to train.
        ranks: `alone`: each rank by itself, which tells machines that compute differently. `processes`: the ranks in
            domain groups. `threads`: of rank 0; the other ranks wait.
        size: Ranks that share an event.
    """

    name: str
    training: Training
    ranks: Literal["alone", "processes", "threads"]
    size: int = 1

    def hashes(self, store: EventStore, world: World) -> list[str]:
        """The distinct hashes of the layout's ranks, one if they agree; the same on every rank. *Collective*."""
        if self.ranks == "threads":
            return self._of_threads(store, world)
        grid = World.alone() if self.ranks == "alone" else World.over(world.transport, domain_size=self.size)
        hashes = of_all_ranks(trained_sha256(self.training, store, grid), world)
        if self.ranks == "processes" and grid.domain is not grid.transport:
            grid.domain.close()
        return sorted(set(hashes))

    def _of_threads(self, store: EventStore, world: World) -> list[str]:
        def train(of_threads: World) -> str:
            return trained_sha256(self.training, store, of_threads)

        own = ""
        if world.is_root:
            hashes = run_threads(train, self.size, timeout=timeouts.SMALL_GRAPH, domain_size=self.size)
            own = ",".join(sorted(set(hashes)))
        return world.transport.broadcast(own.encode()).decode().split(",")


def of_all_ranks(sha256: str, world: World) -> list[str]:
    """The hash of every rank. *Collective*."""
    return [text.decode() for text in world.transport.all_gather(sha256.encode())]


def layouts(world: World) -> Iterator[Layout]:
    """Every layout, the same on every rank; the most important first."""
    size, together = world.size, world.size > 1
    for precision in PRECISIONS:
        training = replace(SMALL, precision=precision)
        yield Layout("each rank alone", training, "alone")
        if together:
            yield Layout(f"{size} ranks as one domain", training, "processes", size)
        yield Layout("4 threads as ranks", training, "threads", 4)
    for domain_size in divisors(size)[:-1]:
        yield Layout(f"{size // domain_size} groups of {domain_size}", SMALL, "processes", domain_size)
    for grouping in OTHER_GROUPINGS:
        training = replace(SMALL, grouping=grouping)
        if together:
            yield Layout(f"{size} ranks with {grouping} parts", training, "processes", size)
        yield Layout(f"3 threads as ranks with {grouping} parts", training, "threads", 3)
    sparing = replace(SMALL, threads=3, recompute_every=2)
    yield Layout(f"{several(size, 'rank')} of 3 threads that recompute", sparing, "processes", size)
    for count in THREAD_RANKS:
        name = "1 thread as the only rank" if count == 1 else f"{count} threads as ranks"
        yield Layout(name, SMALL, "threads", count)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def names_by_hash(hashes: Sequence[tuple[str, Sequence[str]]]) -> dict[str, list[str]]:
    """The names of the layouts that ended with each hash, of (name, its hashes); one hash if all agree."""
    names: dict[str, list[str]] = {}
    for name, of_layout in hashes:
        for sha256 in of_layout:
            names.setdefault(sha256, []).append(name)
    return names
