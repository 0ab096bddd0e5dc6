"""An event in stored order, in memory: what a rank reads from a store, without the store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from proving import check_no_rank_holds_all
from random_events import random_assignment, random_event

from domainpar.parallel.halo import CompleteHalo, Halo, ask_owners
from domainpar.parallel.local import LocalGraph, TileRanges, localise
from domainpar.plan import build_plan, select_edges
from domainpar.tracking.events.graph import EventGraph, IntArray
from domainpar.tracking.events.stored_order import StoredOrder, stored_order
from domainpar.tracking.part_loading import Part


@dataclass(frozen=True, eq=False)
class TiledEvent:
    """An event cut into tiles.

    Attributes:
        graph: The event in the user's order.
        order: Its nodes and edges in the order of tiles.
        tiny: On purpose, or drawn at random: a rank may hold all nodes, although others own some.
    """

    graph: EventGraph
    order: StoredOrder
    tiny: bool = False

    @classmethod
    def of(cls, graph: EventGraph, assignment: IntArray, num_tiles: int, *, tiny: bool = False) -> TiledEvent:
        return cls(graph, stored_order(graph.edge_index, assignment, num_tiles), tiny)

    @classmethod
    def random(
        cls, seed: int, num_nodes: int, num_edges: int, num_tiles: int, *, tiny: bool = False, **kinds
    ) -> TiledEvent:
        graph = random_event(seed, num_nodes, num_edges, **kinds)
        tiles = random_assignment(seed, num_nodes, num_tiles)
        return cls.of(graph, tiles if kinds.get("reach") is None else np.sort(tiles), num_tiles, tiny=tiny)

    @property
    def num_tiles(self) -> int:
        return len(self.order.node_ptr) - 1

    @property
    def edge_index(self) -> IntArray:
        return np.stack([self.order.src, self.order.dst])

    def grouping(self, kind: str, num_parts: int, seed: int = 0) -> IntArray:
        """Tiles -> parts: ranges, dealt at random, or everything on the last part."""
        if kind == "ranges":
            return (np.arange(self.num_tiles) * num_parts // self.num_tiles).astype(np.int32)
        if kind == "random":
            return np.random.default_rng(seed).integers(0, num_parts, self.num_tiles).astype(np.int32)
        assert kind == "one part"
        return np.full(self.num_tiles, num_parts - 1, dtype=np.int32)

    def plan(self, transport, part_of_tile, policy="incident"):
        owner = TileRanges(self.order.node_ptr, self.order.edge_ptr, part_of_tile).node_owner()
        if not self.tiny and len(np.unique(owner)) > 1:
            check_no_rank_holds_all(self.edge_index, owner, transport.size, policy)
        edges = select_edges(self.edge_index, owner, transport.rank, policy)
        return build_plan(edges, owner, transport.rank, transport.size, policy, ask_owners(transport))

    def local(self, plan, part_of_tile, dtype=torch.float32, device="cpu") -> LocalGraph:
        nodes, edges = self.order.original_row, self.order.original_position
        return localise(
            plan,
            TileRanges(self.order.node_ptr, self.order.edge_ptr, part_of_tile),
            self.graph.features[nodes][plan.local_ids],
            self.graph.edge_features[edges][plan.edge_ids],
            None if self.graph.label is None else self.graph.label[edges][plan.edge_ids],
            event_id=self.graph.hits.event_id,
            device=device,
            dtype=dtype,
        )

    def part(self, transport, part_of_tile, dtype=torch.float32, halo: type[Halo] = CompleteHalo, device="cpu") -> Part:
        plan = self.plan(transport, part_of_tile)
        return Part(self.local(plan, part_of_tile, dtype, device), halo(plan, transport, device))


def sha(*tensors: torch.Tensor) -> str:
    """One short hash of the bits of some tensors."""
    bits = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(bits).hexdigest()[:16]


SMALL = TiledEvent.random(1, 40, 150, 6, reach=2)


def part_of(world, event=SMALL):
    """Parts of the event; of four, the third owns nothing."""
    owners = torch.tensor([0, 0, 1, 3, 3, 3]).clamp(max=world.size - 1).numpy().astype("int32")
    return event.part(world.transport, owners, torch.float64)
