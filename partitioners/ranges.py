"""Consecutive blocks of equal cost, for sectors, tiles and ids; and the partitioners that need no positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioners.topology import FloatArray, IntArray, Topology, check_num_blocks


def split_evenly(costs: IntArray, num_blocks: int) -> IntArray:
    """Cut consecutive items into blocks so that the most expensive block costs as little as possible.

    Among the cuts that reach this minimum, each block in turn comes nearest to an equal share of what is left, so that
    the rest is even as well; no block stays empty before the items run out. Exact, and a function of the costs alone.

    Args:
        costs: Cost of each item, integers >= 0, [n].
        num_blocks: Number of blocks, at least 1; blocks beyond the number of items stay empty.

    Returns:
        Block of each item, never decreasing, int32 [n].
    """
    before = np.concatenate([[0], np.cumsum(costs, dtype=np.int64)])
    limit = _smallest_limit(before, num_blocks)
    # How early each block may begin so that it and the blocks behind it can take all that follows.
    earliest = np.full(num_blocks + 1, len(costs))
    for block in range(num_blocks - 1, -1, -1):
        earliest[block] = np.searchsorted(before, before[earliest[block + 1]] - limit, side="left")
    borders = np.zeros(num_blocks + 1, np.int64)
    borders[num_blocks] = len(costs)
    for block in range(1, num_blocks):
        start = borders[block - 1]
        latest = np.searchsorted(before, before[start] + limit, side="right") - 1
        share = (before[-1] - before[start]) // (num_blocks - block + 1)
        # The border with a cost nearest to the fair one.
        fair = min(int(np.searchsorted(before, before[start] + share)), len(before) - 1)
        if fair > 0 and before[start] + share - before[fair - 1] <= before[fair] - before[start] - share:
            fair -= 1
        borders[block] = min(max(fair, earliest[block], start + 1), latest)
    return np.repeat(np.arange(num_blocks, dtype=np.int32), np.diff(borders))


def _smallest_limit(before: IntArray, num_blocks: int) -> int:
    """Return the smallest cost that no block of some cut exceeds, by bisection."""
    total = int(before[-1])
    low = max(-(-total // num_blocks), int(np.diff(before).max(initial=0)))
    high = max(total, low)
    while low < high:
        middle, start = (low + high) // 2, 0
        for _ in range(num_blocks):  # each block takes as much as it may
            start = int(np.searchsorted(before, before[start] + middle, side="right")) - 1
        if start == len(before) - 1:
            high = middle
        else:
            low = middle + 1
    return low


def split_along(coordinate: FloatArray | IntArray, costs: IntArray, num_blocks: int) -> IntArray:
    """Cut nodes, sorted by a coordinate, into blocks of equal cost. Equal coordinates are in order of their ids."""
    check_num_blocks(num_blocks)
    order = np.argsort(coordinate, kind="stable")
    assignment = np.empty(len(order), np.int32)
    assignment[order] = split_evenly(costs[order], num_blocks)
    return assignment


@dataclass(frozen=True)
class Contiguous:
    """Ranges of node ids of equal cost. For any graph; good when the ids already follow the geometry."""

    def __call__(self, topology: Topology, num_blocks: int) -> IntArray:
        """Return the block of each node, never decreasing, int32 [N]."""
        check_num_blocks(num_blocks)
        return split_evenly(topology.costs(), num_blocks)


@dataclass(frozen=True)
class Random:
    """A random block for every node: the worst cut there is, for tests.

    Attributes:
        seed: The same seed gives the same blocks.
    """

    seed: int = 0

    def __call__(self, topology: Topology, num_blocks: int) -> IntArray:
        """Return the block of each node, int32 [N]; small graphs leave blocks empty."""
        check_num_blocks(num_blocks)
        return np.random.default_rng(self.seed).integers(0, num_blocks, topology.num_nodes, dtype=np.int32)
