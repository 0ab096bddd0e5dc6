"""Random events for tests of every room: directed, with self-loops, duplicate edges, isolated nodes, empty tiles."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from domainpar.tracking.events.graph import Array, EventGraph, Hits, IntArray, Particles


def random_event(
    seed: int,
    num_nodes: int = 40,
    num_edges: int = 120,
    *,
    num_features: int = 3,
    num_edge_features: int = 6,
    positions: bool = True,
    labels: bool = True,
    event_id: str | None = None,
    reach: int | None = None,
) -> EventGraph:
    """A random directed graph. About a third of the nodes stay without edges; a tenth of the edges are self-loops
    and a tenth are repeated. Without nodes there are no edges. With a `reach`, both ends of an edge are at most so many
    nodes with edges apart, by their numbers: a rank of a few tiles does not hold all nodes then."""
    rng = np.random.default_rng(seed)
    edge_index = random_edges(rng, num_nodes, num_edges, reach)
    num_edges = edge_index.shape[1]
    return EventGraph(
        hits=_random_hits(rng, num_nodes, event_id or f"{seed:09d}", positions, labels),
        features=rng.standard_normal((num_nodes, num_features)).astype(np.float32),
        feature_names=tuple(f"node_{i}" for i in range(num_features)),
        edge_index=edge_index,
        edge_features=rng.standard_normal((num_edges, num_edge_features)).astype(np.float32),
        edge_feature_names=tuple(f"edge_{i}" for i in range(num_edge_features)),
        label=rng.integers(0, 2, num_edges).astype(np.uint8) if labels else None,
        node_labels=_random_labels(rng, num_nodes) if labels else {},
        graph_labels={"sort": 2, "size": float(num_nodes)} if labels else {},
    )


def random_edges(rng: np.random.Generator, num_nodes: int, num_edges: int, reach: int | None = None) -> IntArray:
    """`src` and `dst` of random edges, int64 [2, num_edges]."""
    if num_nodes == 0:
        return np.zeros((2, 0), np.int64)
    with_edges = rng.permutation(num_nodes)[: max(1, 2 * num_nodes // 3)]
    edges = rng.choice(with_edges, (2, num_edges)).astype(np.int64)
    if reach is not None:
        src, with_edges = rng.integers(0, len(with_edges), num_edges), np.sort(with_edges)
        dst = np.clip(src + rng.integers(-reach, reach + 1, num_edges), 0, len(with_edges) - 1)
        edges = np.stack([with_edges[src], with_edges[dst]])
    loops = rng.random(num_edges) < 0.1
    edges[1, loops] = edges[0, loops]
    if num_edges:
        repeated = np.flatnonzero(rng.random(num_edges) < 0.1)
        edges[:, repeated] = edges[:, rng.integers(0, num_edges, len(repeated))]
    return edges


def random_assignment(seed: int, num_nodes: int, num_blocks: int) -> IntArray:
    """Block of each node, int32 [num_nodes]. With several blocks, some are left empty half of the time."""
    rng = np.random.default_rng(seed)
    blocks = np.arange(num_blocks)
    if num_blocks > 1 and rng.random() < 0.5:
        blocks = rng.choice(blocks, rng.integers(1, num_blocks), replace=False)
    return rng.choice(blocks, num_nodes).astype(np.int32)


@st.composite
def events(draw: st.DrawFn, max_nodes: int = 40, max_edges: int = 120) -> EventGraph:
    """Hypothesis strategy: a random event, possibly without edges or without nodes."""
    return random_event(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(0, max_nodes)),
        draw(st.integers(0, max_edges)),
        positions=draw(st.booleans()),
        labels=draw(st.booleans()),
        num_edge_features=draw(st.sampled_from([0, 1, 6])),
    )


@st.composite
def tiled_events(draw: st.DrawFn, max_nodes: int = 40, max_edges: int = 120) -> tuple[EventGraph, IntArray, int]:
    """Hypothesis strategy: a random event, a tile for each of its nodes, and the number of tiles."""
    event = draw(events(max_nodes, max_edges))
    num_tiles = draw(st.integers(1, 9))
    return event, random_assignment(draw(st.integers(0, 2**32 - 1)), event.num_nodes, num_tiles), num_tiles


@st.composite
def assigned_graphs(draw: st.DrawFn, max_nodes: int, max_edges: int, max_parts: int) -> tuple[IntArray, IntArray, int]:
    """Hypothesis strategy: random edges, a part for each node, and the number of parts; some parts own nothing."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_nodes, num_parts = draw(st.integers(0, max_nodes)), draw(st.integers(1, max_parts))
    edges = random_edges(rng, num_nodes, draw(st.integers(0, max_edges)))
    return edges, random_assignment(draw(st.integers(0, 2**32 - 1)), num_nodes, num_parts), num_parts


def _random_hits(rng: np.random.Generator, num_nodes: int, event_id: str, positions: bool, truth: bool) -> Hits:
    particle_id = np.array([2**60, 7, 2**40 + 1])
    return Hits(
        event_id=event_id,
        hit_id=rng.permutation(num_nodes).astype(np.int64) + 1,
        position=rng.normal(0, 300, (num_nodes, 3)).astype(np.float32) if positions else None,
        volume=rng.integers(7, 19, num_nodes).astype(np.int32),
        layer=rng.integers(1, 8, num_nodes).astype(np.int32) * 2,
        module=rng.integers(0, 1000, num_nodes).astype(np.int32),
        particle_id=rng.choice(np.append(particle_id, 0), num_nodes) if truth else None,
        weight=rng.random(num_nodes).astype(np.float32) if truth else None,
        particles=_random_particles(rng, particle_id) if truth else None,
        measured=np.random.default_rng(num_nodes).random((num_nodes, 8), np.float32) if positions else None,
    )


def _random_labels(rng: np.random.Generator, num_nodes: int) -> dict[str, Array]:
    """A class and a number of each node; some are not known."""
    number = rng.standard_normal(num_nodes)
    number[rng.random(num_nodes) < 0.2] = np.nan
    return {"kind": rng.integers(-1, 3, num_nodes), "energy": number}


def _random_particles(rng: np.random.Generator, particle_id: IntArray) -> Particles:
    count = len(particle_id)
    return Particles(
        particle_id=particle_id,
        pt=rng.exponential(1.0, count).astype(np.float32),
        eta=rng.normal(0, 2, count).astype(np.float32),
        vertex=rng.normal(0, 5, (count, 3)).astype(np.float32),
        nhits=rng.integers(1, 20, count).astype(np.int32),
        charge=rng.choice([-1, 1], count).astype(np.int8),
    )
