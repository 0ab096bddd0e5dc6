"""Connected components on one rank, compiled."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from domainpar.plan import IntArray


def smallest_connected(num_nodes: int, first: IntArray, second: IntArray) -> IntArray:
    """The smallest node that each node is connected to, int64 [num_nodes]; itself where nothing is.

    Args:
        num_nodes: Nodes are 0 to num_nodes - 1.
        first, second: The two ends of each connection, int64.
    """
    roots: IntArray = _roots(num_nodes, first.astype(np.int64), second.astype(np.int64))
    return roots


@numba.njit(cache=True)
def _roots(num_nodes: int, first: Any, second: Any) -> Any:
    """Union-find. A root is never larger than what hangs below it, so it is the smallest of its component."""
    parent = np.arange(num_nodes)
    for i in range(len(first)):
        a, b = first[i], second[i]
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        while parent[b] != b:
            parent[b] = parent[parent[b]]
            b = parent[b]
        if a < b:
            parent[b] = a
        else:
            parent[a] = b
    for node in range(num_nodes):
        parent[node] = parent[parent[node]]  # what is smaller already points at its root
    return parent
