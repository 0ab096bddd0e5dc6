"""What `tracks.py` has each rank do. In a file of its own, so that processes find it by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from domainpar.config import InferConfig
from domainpar.events.detector import field_of_surfaces
from domainpar.events.graph import surface_numbers
from domainpar.events.store import EventStore
from domainpar.infer.run import trained_as
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.team import set_threads
from domainpar.parallel.loading import Part, load_part
from domainpar.parallel.world import World
from domainpar.reco.scores import score_event
from domainpar.reco.stitching import stitch
from domainpar.reco.tracks import TrackOptions, build_tracks, logit
from domainpar.training.trained import load_network

TRUE, FALSE = 3.5, -7.0  # logits to draw around


@dataclass(frozen=True)
class Settings:
    """What each rank measures."""

    store: Path
    run: Path | None
    hidden: int
    graph_iters: int
    spread: float
    repeats: int
    methods: tuple[str, ...]


def measure(world: World, settings: Settings) -> dict[str, Any]:
    """Seconds of the network and of each method on this rank. *Collective*."""
    set_threads(1)
    store = EventStore(settings.store)
    with store.open(store.events()[0]) as event:
        part = load_part(event, world.domain)
        model = network_for(settings, store, world)
        network = [timed(world, lambda: forward(model, part)) for _ in range(settings.repeats + 1)][1:]
        logits = forward(model, part) if settings.run else drawn(part, event.event_id, settings.spread)
        scores = score_event(lambda graph, halo: torch.from_numpy(logits), event, world.domain)
        seconds: dict[str, list[float]] = {}
        stitching: dict[str, list[float]] = {}
        tracks: dict[str, int] = {}
        ids = event.ids_in_users_order()
        position, volume, layer = (event.read_nodes(name, ids) for name in ("position", "volume", "layer"))
        surface, field = surface_numbers(volume, layer), field_of_surfaces(volume, layer)
        for method in settings.methods:
            chosen = TrackOptions(method=method)  # type: ignore[arg-type]

            def build(chosen: TrackOptions = chosen) -> npt.NDArray[Any]:
                if scores is None:  # rank 0 has them
                    return np.full(event.num_nodes, -1)
                return build_tracks(scores.edge_index, scores.edge_logit, surface, position, chosen)

            seconds[method] = [timed(world, build) for _ in range(settings.repeats + 1)][1:]
            names = build()
            tracks[method] = int(names.max(initial=-1)) + 1
            join = partial(stitch, names, position, field=field)
            stitching[method] = [timed(world, join) for _ in range(settings.repeats + 1)][1:]
    owned = part.graph.plan.edge_owned
    passing = int((logits[owned] > logit(0.01)).sum())
    found = {"network": network, "seconds": seconds, "stitching": stitching}
    return {**found, "edges": int(owned.sum()), "passing": passing, "tracks": tracks}


def network_for(settings: Settings, store: EventStore, world: World) -> torch.nn.Module:
    if settings.run is None:
        widths = len(store.feature_names), len(store.edge_feature_names)
        return InteractionNetwork(*widths, hidden=settings.hidden, graph_iters=settings.graph_iters, seed=0)
    return load_network(settings.run, trained_as(settings.run, InferConfig()), "best", store, world)[0]


def forward(model: torch.nn.Module, part: Part) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(part.graph, part.halo).numpy()
    return logits


def drawn(part: Part, event_id: str, spread: float) -> npt.NDArray[np.float32]:
    """Scores of a network that separates well, the same for both copies of a cut edge."""
    assert part.graph.label is not None, f"event {event_id} has no labels to draw scores from; name a --run"
    plan = part.graph.plan
    noise = np.random.default_rng(0).normal(0, spread, int(plan.edge_ids.max(initial=-1)) + 1)[plan.edge_ids]
    return (np.where(part.graph.label.numpy() > 0, TRUE, FALSE) + noise).astype(np.float32)


def timed(world: World, work: Callable[[], Any]) -> float:
    world.transport.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
