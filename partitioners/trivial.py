"""Partitioners that need neither positions nor METIS: ranges of ids, and random blocks for tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioners.splitting import split_evenly
from partitioners.topology import IntArray, Topology, check_num_blocks


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
