"""What the ranks of `bitwise` and `overlap` do. Processes import it by name, so it is a file of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import on_ranks
import torch

from domainpar.events.store import EventStore
from domainpar.nn.team import set_threads
from domainpar.parallel.halo import CompleteHalo, Spread
from domainpar.parallel.world import World
from domainpar.training.checkpoint import parameters_sha256
from domainpar.training.sampler import samples_of


def trained(world: World, settings: on_ranks.StepSettings, steps: int, events: int, threads: int, overlap: bool) -> str:
    """Hash of all parameters after some steps of some events each. *Collective*."""
    set_threads(threads)
    trainer = on_ranks.make_trainer(settings, world)
    samples = samples_of(EventStore(settings.store).events()[:events], None)
    with patch.object(CompleteHalo, "spread", CompleteHalo.spread if overlap else spread_at_once):
        for step in range(steps):
            trainer.step(samples, step)
    return parameters_sha256(trainer.model)


def overlapping(world: World, settings: on_ranks.StepSettings) -> dict[str, Any]:
    """Seconds of steps with and without overlap, in turns, and of their exchanges alone, on this rank. *Collective*."""
    trainer = on_ranks.make_trainer(settings, world)
    samples = samples_of(EventStore(settings.store).events()[:1], None)
    graph = (part := trainer.loader.load(samples[0]).part).graph
    found: dict[str, list[float]] = {"with": [], "without": [], "alone": []}
    sent: list[int] = []

    def counted(halo: CompleteHalo, owned: torch.Tensor, *, spread: Any = CompleteHalo.spread) -> Spread:
        sent.append(owned.shape[1])
        return spread_at_once(halo, owned, spread=spread)

    for turn in range(settings.repeats + 1):
        sent.clear()
        times = {"with": timed(world, lambda: trainer.step(samples, 0))}
        with patch.object(CompleteHalo, "spread", counted):
            times["without"] = timed(world, lambda: trainer.step(samples, 0))
        tables = [torch.ones(graph.num_owned, width) for width in sent]
        times["alone"] = timed(world, lambda: [part.halo.spread(table).finish() for table in tables])  # noqa: B023
        for name, seconds in times.items() if turn else ():  # the first one warms up
            found[name].append(seconds)
    free = sum(tile.num_edges for tile in graph.tiles.edges if not tile.has_ghosts)
    return {**found, "exchanges": len(sent), "edges_without_ghosts": free / max(graph.num_edges, 1)}


def timed(world: World, work: Callable[[], Any]) -> float:
    """Seconds of something that all ranks begin together."""
    world.transport.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def spread_at_once(halo: CompleteHalo, owned: torch.Tensor, *, spread: Any = CompleteHalo.spread) -> Spread:
    """Without overlap: wait for the ghosts before anything else."""
    rows: Spread = spread(halo, owned)
    rows.finish()
    return rows
