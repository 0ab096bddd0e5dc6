"""METIS: blocks of equal cost that cut few edges, from the graph alone. The only module that imports pymetis."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from partitioners.ranges import split_evenly
from partitioners.sectors import circular_mean, phi_of
from partitioners.topology import FloatArray, IntArray, Topology, check_num_blocks


@dataclass(frozen=True)
class Metis:
    """Blocks of equal cost with few edges between them; nodes without edges are dealt out afterwards.

    With positions those nodes go, in order of phi and in equal cost, to the blocks in order of phi; without, each goes
    to the lightest block. Blocks may stay empty. With as many blocks as nodes, every node gets its own.

    Attributes:
        seed: The same seed gives the same blocks on one machine.
    """

    seed: int = 0

    def __call__(self, topology: Topology, num_blocks: int) -> IntArray:
        """Return the block of each node, int32 [N].

        Raises:
            ValueError: If the graph is too large for this build of METIS.
            RuntimeError: If METIS fails; no other method takes its place.
        """
        check_num_blocks(num_blocks)
        src, dst = topology.edge_index[:, topology.edge_index[0] != topology.edge_index[1]]
        return cut_graph(src, dst, None, topology.costs(), num_blocks, self.seed, topology.position)


def cut_graph(
    src: IntArray,
    dst: IntArray,
    weights: IntArray | None,
    costs: IntArray,
    num_blocks: int,
    seed: int,
    position: FloatArray | None = None,
) -> IntArray:
    """Cut a graph with METIS, and deal out nodes without edges. Directions are dropped, parallel edges merged.

    Args:
        src, dst, weights: Ends of each edge, unequal, [E]; price of cutting it, integers >= 1; None for 1 each.
        costs: Cost of each node, [n].
        num_blocks: Number of blocks. With one for each node that has edges METIS is not asked: each gets its own.
        seed: Seed of METIS.
        position: x, y, z of each node, [n, 3]: nodes without edges go to blocks along phi. None: by weight only.

    Returns:
        Block of each node, int32 [n]. Blocks may stay empty. Errors are those of `Metis`.
    """
    joined = np.zeros(len(costs), bool)
    joined[src] = joined[dst] = True
    num_joined, row = int(joined.sum()), np.cumsum(joined) - 1
    assignment = np.full(len(costs), -1, np.int32)
    if num_blocks == 1 or num_blocks >= num_joined:
        assignment[joined] = 0 if num_blocks == 1 else np.arange(num_joined)
    else:
        starts, adjacent, merged = _adjacency(row[src], row[dst], weights, num_joined)
        assignment[joined] = _ask_metis(starts, adjacent, merged, costs[joined], num_blocks, seed)
    _deal_out(assignment, costs, num_blocks, position)
    return assignment


def _deal_out(assignment: IntArray, costs: IntArray, num_blocks: int, position: FloatArray | None) -> None:
    """Give a block to every node that has none yet (-1), in place: nodes without edges, which no block wants."""
    rest, settled = np.flatnonzero(assignment < 0), np.flatnonzero(assignment >= 0)
    if position is None:
        loads = np.bincount(assignment[settled], costs[settled], num_blocks).astype(np.int64)
        heap = [(load, block) for block, load in enumerate(loads.tolist())]
        heapq.heapify(heap)
        for node, cost in zip(rest.tolist(), costs[rest].tolist()):
            load, block = heap[0]  # the lightest
            assignment[node] = block
            heapq.heapreplace(heap, (load + cost, block))
        return
    phi = phi_of(position)
    along_phi = np.argsort(circular_mean(phi[settled], assignment[settled], num_blocks), kind="stable")
    rest = rest[np.argsort(phi[rest], kind="stable")]
    assignment[rest] = along_phi[split_evenly(costs[rest], num_blocks)]


def _adjacency(
    src: IntArray, dst: IntArray, weights: IntArray | None, num_nodes: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the undirected graph in compressed rows: starts [n + 1], neighbours ascending, weight of each."""
    keys = np.concatenate([src * np.int64(num_nodes) + dst, dst * np.int64(num_nodes) + src])
    if weights is None:
        unique, merged = np.unique(keys, return_counts=True)
    else:
        unique, inverse = np.unique(keys, return_inverse=True)
        merged = np.zeros(len(unique), np.int64)
        np.add.at(merged, inverse, np.concatenate([weights, weights]))
    starts = np.searchsorted(unique, np.arange(num_nodes + 1) * num_nodes)
    return starts, unique % num_nodes, merged


def _ask_metis(
    starts: IntArray, adjacent: IntArray, weights: IntArray, costs: IntArray, num_blocks: int, seed: int
) -> IntArray:
    import pymetis  # here, so that other partitioners work and import without it

    index = pymetis.zero_copy_dtype()
    largest = max(len(adjacent), int(weights.sum()), int(costs.sum()))
    if largest > np.iinfo(index).max:
        raise ValueError(
            f"this build of METIS counts in {index} but the graph needs counts up to {largest}; choose another method."
        )
    try:
        _, blocks = pymetis.part_graph(
            num_blocks,
            pymetis.CSRAdjacency(starts.astype(index), adjacent.astype(index)),
            vweights=costs.astype(index),
            eweights=weights.astype(index),
            options=pymetis.Options(seed=seed + 1),  # srand takes 0 for 1: seeds 0 and 1 would be the same
        )
    except (RuntimeError, MemoryError) as error:
        raise RuntimeError(
            f"METIS failed to cut {len(costs)} nodes and {len(adjacent) // 2} edges into {num_blocks} blocks: {error}; "
            "choose another seed or another method."
        ) from error
    assignment = np.asarray(blocks, np.int32)
    outside = np.count_nonzero((assignment < 0) | (assignment >= num_blocks))
    if len(assignment) != len(costs) or outside:
        raise RuntimeError(
            f"METIS gave {len(assignment)} blocks for {len(costs)} nodes, {outside} of them outside [0, {num_blocks}); "
            "choose another seed or another method."
        )
    return assignment
