"""The memory of scoring before the first event: by the forecast of training, without a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from domainpar.measure.forecast import Forecast, MemoryMeter, forecast_of
from domainpar.nn.classifier import EdgeClassifier
from domainpar.parallel.world import World
from domainpar.runs.records import RunRecord
from domainpar.tracking.config import TrainedFlags
from domainpar.tracking.config.rank_flags import RankFlags
from domainpar.tracking.events.store import EventRecord, EventStore, JoinedEvents
from domainpar.tracking.networks.catalogue import DTYPES
from domainpar.tracking.part_loading import BadEvent, all_sectors, load_part, open_together
from domainpar.tracking.training.step_memory import DATA_BYTES, weight_of

OF_TRACKS = 300
"""Bytes of a hit while tracks are found, fitted and compared with the truth; seen, not derived. Kernels that are
compiled, the first time on a machine, take some 80 MiB more."""


class ScoringNetwork(NamedTuple):
    """A network that scores events: how it was trained, what its run says of that, and itself."""

    trained: TrainedFlags
    record: RunRecord
    model: EdgeClassifier


def expected_memory(
    config: RankFlags,
    networks: Sequence[ScoringNetwork],
    store: EventStore,
    call: Sequence[EventRecord],
    world: World,
    memory: MemoryMeter,
    finds_tracks: bool,
) -> Forecast | None:
    """The memory that the largest call will take; None if it cannot be read, and on a GPU. *Collective*.

    Args:
        config: How events are split.
        networks: A filter, if there is one, and the network.
        store, call: The largest events that go through the network at once.
        world: The ranks.
        memory: Of this rank.
        finds_tracks: Whether tracks are found in them.
    """
    if world.device.type != "cpu":  # its kernels were counted with backward alone
        return None
    first, last = networks[0], networks[-1]
    try:
        with ExitStack() as opened:
            events = [opened.enter_context(open_together(store, record, world.domain)) for record in call]
            part = load_part(
                events[0] if len(events) == 1 else JoinedEvents(events),
                world.domain,
                grouping=config.grouping,
                sector=all_sectors(config.sectors)[0],
                dtype=DTYPES[first.trained.dtype],
                seed=first.trained.seed,
            )
    except BadEvent:
        part = None
    missing = world.step_boundary(torch.tensor([int(part is None)], dtype=torch.int64))
    if part is None or missing[0]:  # scoring says why
        return None
    how: dict[str, Any] = {"keeps_freed": config.keeps_freed, "trains": False}
    weights = [weight_of(it.model, store, call[0], world, DTYPES[it.trained.dtype], **how) for it in networks]
    memory.forget_peak()
    hits, edges = sum(record.num_nodes for record in call), sum(record.num_edges for record in call)
    # Nobody knows yet what the filter leaves: as much as the network was trained on, if that is known.
    most = (last.record.store.surveyed or {}).get("edges_per_hit")
    share = min(1.0, most[1] * hits / max(edges, 1)) if most else 1.0
    of_tracks = OF_TRACKS * max(record.num_nodes for record in call) if finds_tracks else 0
    graph, name = part.graph, ", ".join(record.event for record in call)
    sizes, pairs = (graph.num_owned, graph.plan.num_ghosts, graph.num_edges), len(graph.tiles.pair_rows)
    kept = DATA_BYTES * (max(hits - sum(sizes[:2]), 0) + max(edges - sizes[2], 0))
    # A second network has what the filter leaves of the edges, and the memory of the first one again.
    of_networks = [
        int(weight.of(*sizes[:2], int(sizes[2] * left), int(pairs * left)))
        for weight, left in zip(weights, (1.0, share))
    ]
    return forecast_of(
        world.transport, world.device, sizes, max(of_networks) + kept + of_tracks, memory.bare, sample=name
    )
