"""The graph that the survey of PyG's modules runs on: random, with everything a layer may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 16
HIDDEN = 16
EDGE_FEATURES = 4
NUM_TYPES = 3
NUM_GRAPHS = 3

NODE_FIELDS = ("x", "pos", "normal", "node_type", "event", "batch")
"""Fields of a sample whose first dimension is nodes."""
EDGE_FIELDS = ("edge_index", "edge_weight", "edge_attr", "edge_type", "pseudo")
"""Fields of a sample whose first dimension is edges; of `edge_index` the last one."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One graph with everything a layer may ask for; values are drawn and mean nothing.

    Attributes:
        x: Node features, float [N, 16].
        pos: Positions, float [N, 3].
        normal: Unit vectors, float [N, 3].
        node_type: Types of nodes, int64 [N] in [0, 3).
        event: The batch vector of a graph that is one event, int64 [N], all zero.
        batch: The batch vector of three graphs, int64 [N] in [0, 3), increasing. Edges do not respect it.
        edge_index: `src` and `dst` of each edge, int64 [2, E].
        edge_weight: Positive weights, float [E].
        edge_attr: Edge features, float [E, 4].
        edge_type: Types of edges, int64 [E] in [0, 3).
        pseudo: Pseudo-coordinates, float [E, 3] in [0, 1].
    """

    x: Tensor
    pos: Tensor
    normal: Tensor
    node_type: Tensor
    event: Tensor
    batch: Tensor
    edge_index: Tensor
    edge_weight: Tensor
    edge_attr: Tensor
    edge_type: Tensor
    pseudo: Tensor


def sample(
    seed: int = 0,
    num_nodes: int = 60,
    num_edges: int = 150,
    *,
    directed: bool = True,
    by_dst: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Sample:
    """A random graph; a tenth of the nodes, the last one among them, have no edges.

    Some nodes have an edge to themselves, never two: which of them a layer then keeps depends on their order, also in
    one process. Some other edges appear twice, with other values.

    Args:
        seed: Of the generator. The same on every rank gives the same graph on every rank.
        num_nodes: Nodes, at least 4.
        num_edges: Edges in all.
        directed: Whether an edge may lack its opposite. Otherwise both exist and have the same values.
        by_dst: Whether edges are sorted by `dst`, as aggregations that make dense batches demand; otherwise shuffled.
        dtype: Of what is not an integer.

    Raises:
        ValueError: If a graph of so few nodes does not have so many edges.
    """
    generator = torch.Generator().manual_seed(seed)
    linked = torch.randperm(max(num_nodes - 1, 0), generator=generator)[max(num_nodes // 10 - 1, 0) :]
    ends = len(linked)
    directions = 1 if directed else 2
    pairs_wanted = (num_edges - min(4, ends, num_edges)) // directions
    copies = min(6, pairs_wanted // 2)
    drawn = min(pairs_wanted - copies, ends * (ends - 1) // directions)
    loops = num_edges - (drawn + copies) * directions
    if num_nodes < 4 or loops > ends:
        raise ValueError(f"no simple graph of {num_nodes} nodes has {num_edges} edges; take more nodes or fewer edges.")
    pairs = torch.combinations(torch.arange(ends)).T
    if directed:
        pairs = torch.cat([pairs, pairs.flip(0)], dim=1)
    pairs = pairs[:, torch.randperm(pairs.size(1), generator=generator)[:drawn]]
    pairs = linked[torch.cat([pairs, pairs[:, :copies]], dim=1)]
    opposite = pairs.flip(0) if not directed else pairs[:, :0]
    looped = linked[torch.randperm(ends, generator=generator)[:loops]].expand(2, -1)
    edge_index = torch.cat([pairs, opposite, looped], dim=1)

    drawn = pairs.size(1)
    of_value = torch.cat([torch.arange(drawn), torch.arange(opposite.size(1)), drawn + torch.arange(loops)])
    num_values = drawn + loops
    order = torch.randperm(num_edges, generator=generator)
    if by_dst:
        order = order[torch.sort(edge_index[1, order], stable=True).indices]

    def on_edges(values: Tensor) -> Tensor:
        return values[of_value[order]]

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=dtype)

    def gauss(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return Sample(
        x=gauss(num_nodes, FEATURES),
        pos=gauss(num_nodes, 3),
        normal=nn.functional.normalize(gauss(num_nodes, 3), dim=1),
        node_type=torch.randint(NUM_TYPES, (num_nodes,), generator=generator),
        event=torch.zeros(num_nodes, dtype=torch.int64),
        batch=torch.arange(num_nodes) * NUM_GRAPHS // num_nodes,
        edge_index=edge_index[:, order],
        edge_weight=on_edges(0.5 + uniform(num_values)),
        edge_attr=on_edges(gauss(num_values, EDGE_FEATURES)),
        edge_type=on_edges(torch.randint(NUM_TYPES, (num_values,), generator=generator)),
        pseudo=on_edges(uniform(num_values, 3)),
    )


def undirected(seed: int = 0, num_nodes: int = 60, num_edges: int = 150, **options: Any) -> Sample:
    """As `sample`, with the opposite of each edge: for layers that are defined on symmetric graphs."""
    return sample(seed, num_nodes, num_edges, directed=False, **options)


def sorted_by_dst(seed: int = 0, num_nodes: int = 60, num_edges: int = 150, **options: Any) -> Sample:
    """As `sample`, with edges sorted by `dst`: for aggregations that make dense batches."""
    return sample(seed, num_nodes, num_edges, by_dst=True, **options)


def mesh(seed: int = 0, num_nodes: int = 90, **options: Any) -> Sample:
    """As `sample`, with four edges leaving each node, side by side: for MeshCNNConv, whose nodes are a mesh's edges."""
    whole = sample(seed, num_nodes, 4 * num_nodes, **options)
    src = torch.arange(num_nodes).repeat_interleave(4)
    steps = torch.tensor([1, 7, 11, 23]).repeat(num_nodes)
    values = {name: getattr(whole, name) for name in (*NODE_FIELDS, *EDGE_FIELDS)}
    return Sample(**values | {"edge_index": torch.stack([src, (src + steps) % num_nodes])})
