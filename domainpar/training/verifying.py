"""A user's own network tried on a piece of an event before it is trained: whole, and split over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from domainpar.events.graph import IntArray
from domainpar.events.store import EventRecord, EventStore, StoredEvent
from domainpar.nn.adapt.on_events import OnEvents, check_logits
from domainpar.nn.adapt.parallelize import Parallel
from domainpar.nn.adapt.part import GraphPart, split_graph
from domainpar.nn.adapt.verify import verify
from domainpar.nn.catalogue import said_by
from domainpar.parallel.world import World

Inputs = Callable[[GraphPart], dict[str, Any]]

MOST_EDGES = 10_000


def verified(model: OnEvents, store: EventStore, record: EventRecord) -> str:
    """Run a network whole and split on the first tiles of an event; returns what was found, for the user.

    Raises:
        ValueError: If the network does not compute the same, or does what has no exact form.
    """
    with store.open(record) as event:
        nodes = _first_nodes(event)
        ids = np.arange(event.edge_ptr[np.searchsorted(event.node_ptr, nodes)])
        src, dst = event.read_edges("src", ids), event.read_edges("dst", ids)
        inside = (src < nodes) & (dst < nodes)
        edge_index = torch.from_numpy(np.stack([src[inside], dst[inside]]).astype(np.int64))
        x = torch.from_numpy(event.read_nodes("features", np.arange(nodes))).double()
        edge_attr = torch.from_numpy(event.read_edges("features", ids[inside])).double()

    def inputs(part: GraphPart) -> dict[str, object]:
        return model.arguments(part, part.nodes(x), part.edges(edge_attr))

    try:
        _check_alone(model, split_graph(edge_index, nodes, World.alone(), edges="incident"), inputs)
        found = verify(model.module, (edge_index, nodes), parts=3, inputs=inputs, edges="incident")
    except Exception as error:  # a user's own code: what it raises is told like any other reason
        raise ValueError(f"the network cannot be run on a piece of event {record.event}: {said_by(error)}") from error
    if not found.exact:
        raise ValueError(f"the network is not the same whole and split:\n{found}")
    return found.conclusion


def _check_alone(model: OnEvents, part: GraphPart, inputs: Inputs) -> None:
    """Run the network on one rank, as in training and as in evaluation, and look at what it returns."""
    module = copy.deepcopy(model.module).double()
    for key in (1, None):
        module.train(key is not None)
        with torch.no_grad():
            Parallel(module).run(part, (), inputs(part), key, lambda result: check_logits(result, part))


def _first_nodes(event: StoredEvent) -> int:
    """How many nodes, in whole tiles, have some thousand edges; all of a small event."""
    tiles: IntArray = np.searchsorted(event.edge_ptr, min(MOST_EDGES, event.edge_ptr[-1]), side="left")
    return int(event.node_ptr[min(int(tiles), event.num_tiles)])
