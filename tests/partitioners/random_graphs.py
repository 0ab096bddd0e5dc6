"""Random graphs for the tests of this room: self-loops, duplicate edges, isolated nodes, equal positions."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from partitioners import Topology


def random_topology(seed: int, num_nodes: int = 60, num_edges: int = 200, positions: bool = True) -> Topology:
    rng = np.random.default_rng(seed)
    ends = rng.permutation(num_nodes)[: max(1, 2 * num_nodes // 3)]
    edge_index = rng.choice(ends, (2, num_edges if num_nodes else 0)) if num_nodes else np.zeros((2, 0), np.int64)
    edge_index[1, ::7] = edge_index[0, ::7]
    edge_index[:, 1::5] = edge_index[:, :1]
    position = rng.integers(-3, 4, (num_nodes, 3)).astype(np.float32) if positions else None
    return Topology(edge_index, num_nodes, position)


def ring(num_nodes: int) -> Topology:
    """Nodes around the beam axis, numbered from phi = -pi, each joined to the next one and the last to the first."""
    phi = (np.arange(num_nodes) + 0.5) / num_nodes * 2 * np.pi - np.pi
    position = np.stack([np.cos(phi), np.sin(phi), np.zeros(num_nodes)], axis=1)
    ids = np.arange(num_nodes)
    return Topology(np.stack([ids, np.roll(ids, -1)]), num_nodes, position)


@st.composite
def topologies(draw: st.DrawFn, positions: bool | None = None) -> Topology:
    """Hypothesis strategy: a random graph, possibly without edges, nodes or positions."""
    return random_topology(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(0, 50)),
        draw(st.integers(0, 120)),
        draw(st.booleans()) if positions is None else positions,
    )
