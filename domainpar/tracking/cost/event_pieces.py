"""Pieces of an event that a network is weighed on: sectors, of some thousand edges and of four times as many."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from domainpar.measure.forecast import (
    EDGE,
    EDGES_OF_PIECES,
    GHOST,
    OWNED,
    PAIR,
    Kinds,
    PartMemory,
    Piece,
    weigh,
    weighed_pass,
)
from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.interaction import OnStages
from domainpar.nn.stages import Stage
from domainpar.nn.uncompiled import pass_back
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.world import World
from domainpar.tracking.events.store import EventRecord, EventStore
from domainpar.tracking.networks.catalogue import message_of
from domainpar.tracking.part_loading import Sector, load_part

EDGES_OF_ONE = 8_000
"""Of the piece that stages are weighed on: all that grows in them has rows."""


def sectors_of(record: EventRecord, ranks: int = 1, sizes: Sequence[int] = EDGES_OF_PIECES) -> list[Sector]:
    """The pieces of an event for each of so many ranks, of `sizes` edges: of a small event, a quarter and all of it."""
    numbers = [min(max(record.num_edges // (ranks * of), 1), record.num_tiles) for of in sizes]
    if len(numbers) > 1 and numbers[0] == numbers[-1]:
        numbers[0] = min(4 * numbers[-1], max(record.num_tiles, 1))
    return [Sector(number // 2, number) for number in numbers]


def weighed(
    model: EdgeClassifier,
    store: EventStore,
    record: EventRecord,
    *,
    every: int | None = None,
    ranks: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    trains: bool = True,
) -> PartMemory:
    """Take a network through both passes over the pieces of an event, on ranks that are threads.

    Args:
        model: The network. Copies of it compute: its running means stay as they are. Weigh it before its first step,
            after which it may know its ranks.
        store, record: The event.
        every: Iterations of a segment that is computed again in backward.
        ranks: Ranks that share a piece, which is so many times as large.
        device, dtype: Of the part.
        trains: Whether there is a backward pass.

    Raises:
        ValueError: If the network cannot be run.
    """

    def on_rank(world: World, sector: Sector, copies: Sequence[EdgeClassifier]) -> Piece:
        with store.open(record) as event:
            part = load_part(event, world.domain, sector=sector, device=device, dtype=dtype)
        own, graph = copies[world.rank], part.graph
        own.recompute(every)
        for module in own.layers.modules():
            if isinstance(module, Stage):
                module.keeps_layers = False  # they are counted by themselves: larger parts keep none
        gradients, has_layers = own.gradients(), trains and every is None

        def both_passes() -> object:
            with torch.set_grad_enabled(trains):
                tensors = own.read(graph, part.halo, 1 if trains else None).tensors
                if trains:
                    pass_back(tensors, [torch.ones_like(tensor) for tensor in tensors])
            return tensors, gradients

        try:
            return weighed_pass(both_passes, torch.device(device), graph.num_edges, _kinds(graph), has_layers)
        except Exception as error:  # a user's own code may raise anything
            raise ValueError(f"the network cannot be run on a piece of an event: {message_of(error)}") from error

    sizes = (EDGES_OF_ONE,) if isinstance(model, OnStages) else EDGES_OF_PIECES
    # Copied before there are threads: they share torch's generator.
    pieces = [
        (sector, [copy.deepcopy(model).to(device) for _ in range(ranks)]) for sector in sectors_of(record, ranks, sizes)
    ]
    return weigh(on_rank, pieces, ranks)


def _kinds(graph: LocalGraph) -> Kinds:
    """By the length of a tensor, what it has a row for."""
    plan = graph.plan
    # Rows are sent for about as many ghosts as there are. Some tensors hold those edges alone that a rank counts.
    kinds: dict[int, tuple[int, ...]] = {}
    kinds |= {len(plan.send_rows): (GHOST,), plan.num_ghosts: (GHOST,), len(graph.tiles.pair_rows): (PAIR,)}
    # Without a ghost these two are one, since a ghost takes as much as a node.
    kinds |= {plan.num_owned: (OWNED,), plan.num_local: (OWNED, GHOST)}
    kinds |= {int(plan.edge_owned.sum()): (EDGE,), plan.num_edges: (EDGE,)}
    return {length: dict.fromkeys(kind, 1.0) for length, kind in kinds.items() if length > 1}
