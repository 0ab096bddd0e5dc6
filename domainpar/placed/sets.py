"""Sets of nodes and edges, numbered as one graph: kinds of nodes, and edges that join edges, as triplets do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from domainpar.placed.input_log import array_given, whole_number
from domainpar.plan import IntArray

Kind = Any  # of nodes, any key of a dictionary; of edges a tuple (kind of src, relation, kind of dst)
NODES = "nodes"
EDGES = (NODES, "edges", NODES)  # the two kinds of a graph that names none


@dataclass(frozen=True)
class Sets:
    """The sets of a graph, by their kinds; rows of all of them are numbered one after the other.

    Attributes:
        ends: First and last number of each set that edges join: kinds of nodes, then kinds of edges that others join.
        edges: First and last number of each kind of edges, among all edges.
        is_one: Whether it is a graph that names no kinds.
    """

    ends: dict[Kind, tuple[int, int]]
    edges: dict[Kind, tuple[int, int]]
    is_one: bool = False

    @classmethod
    def single_kind(cls, num_nodes: int, num_edges: int) -> Sets:
        """The sets of a graph with one kind of nodes and one of edges."""
        return cls({NODES: (0, num_nodes)}, {EDGES: (0, num_edges)}, True)

    @property
    def nodes(self) -> list[Kind]:
        """The kinds of nodes."""
        return [kind for kind in self.ends if kind not in self.edges]

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all kinds; their numbers are the first."""
        return sum(self.ends[kind][1] - self.ends[kind][0] for kind in self.nodes)

    def starts(self, kind: Kind) -> list[list[int]]:
        """The first numbers of the sets at both ends of a kind of edges, [2, 1]."""
        return [[self.ends[kind[0]][0]], [self.ends[kind[2]][0]]]


def name_of(kind: Kind) -> str:
    """A kind in messages."""
    if kind == EDGES:
        return "edges"
    return "-".join(map(name_of, kind)) if isinstance(kind, tuple) else str(kind)


def fields_of(data: Any, num_nodes: Any) -> tuple[Any, Any]:
    """The edges and the numbers of nodes of a graph, if it is a data object of torch_geometric; else what was given.

    Raises:
        ValueError: If the object lacks edges, or a number of nodes was given beside it.
    """
    if isinstance(data, Mapping) or not hasattr(data, "stores"):
        return data, num_nodes
    if num_nodes is not None:
        raise ValueError("split_graph takes the numbers of nodes from the data object; give none beside it.")
    of_kinds = hasattr(data, "edge_types")
    stores = {kind: data[kind] for kind in data.edge_types} if of_kinds else {EDGES: data}
    lacking = [name_of(kind) for kind, store in stores.items() if getattr(store, "edge_index", None) is None]
    if lacking or not stores:
        raise ValueError(f"the data object has no edge_index of {', '.join(lacking) or 'any kind'}; make one first.")
    if not of_kinds:
        return data.edge_index, data.num_nodes
    edges = {kind: store.edge_index for kind, store in stores.items()}
    return edges, {kind: data[kind].num_nodes for kind in data.node_types}


def numbered_as_one(edge_index: Any, num_nodes: Any) -> tuple[Sets, IntArray, IntArray]:
    """The sets of a graph of several kinds, all their edges in one numbering, and where each row belongs.

    Args:
        edge_index: Of each kind of edges (kind of src, relation, kind of dst) its ends, integers [2, any number]. An
            end that is itself such a tuple is a kind of edges; their numbers are places in its `edge_index`.
        num_nodes: Number of nodes of each kind.

    Returns:
        The sets; both ends of all edges, int64 [2, E]; and for each row of `ends` the node that it is owned with, int64
        [rows]: for an edge that where it ends, in the end.

    Raises:
        ValueError: If they are not valid.
    """
    if not isinstance(num_nodes, Mapping):
        raise ValueError(f"split_graph's edge_index names kinds, so num_nodes is a dictionary, too, not {num_nodes!r}.")
    if bad := [kind for kind in edge_index if not (isinstance(kind, tuple) and len(kind) == 3)]:
        raise ValueError(f"{bad[0]!r} is no kind of edges; write (kind of nodes at src, relation, kind at dst).")
    if bad := [kind for kind in edge_index if kind in num_nodes]:
        raise ValueError(f"{name_of(bad[0])} is a kind of edges, and num_nodes takes kinds of nodes.")
    counts = {kind: whole_number(num_nodes[kind], f"split_graph's num_nodes of {kind!r}") for kind in num_nodes}
    arrays = {kind: array_given(ends, f"the edge_index of {name_of(kind)}") for kind, ends in edge_index.items()}
    for kind, ends in arrays.items():
        if ends.ndim != 2 or ends.shape[0] != 2 or not np.issubdtype(ends.dtype, np.integer):
            raise ValueError(
                f"the edge_index of {name_of(kind)} has shape {ends.shape} and dtype {ends.dtype}; "
                "pass integers of shape [2, any number]."
            )
    joined = dict.fromkeys(end for kind in arrays for end in kind[::2] if end in arrays)
    lengths = {**counts, **{kind: arrays[kind].shape[1] for kind in joined}}
    sets = Sets(_ranges(lengths), _ranges({kind: ends.shape[1] for kind, ends in arrays.items()}))
    for kind, ends in arrays.items():
        for end, numbers in zip(kind[::2], ends):
            if end not in lengths:
                known, one = ", ".join(map(name_of, lengths)), name_of(end)
                raise ValueError(f"{name_of(kind)} joins {one}, of which num_nodes says nothing; it has {known}.")
            if len(outside := np.flatnonzero((numbers < 0) | (numbers >= lengths[end]))):
                at = outside[0]
                raise ValueError(
                    f"edge {at} of {name_of(kind)} names {name_of(end)} {numbers[at]}, of which there are "
                    f"{lengths[end]}; they are counted from 0."
                )

    def depth(kind: Kind) -> int:
        return 1 + max(map(depth, kind[::2])) if isinstance(kind, tuple) and len(kind) == 3 else 0

    homes = np.arange(sum(lengths.values()))
    for kind in sorted(joined, key=depth):  # outward: a kind is longer than those that it names
        (first, last), end = sets.ends[kind], sets.starts(kind)[1][0]
        homes[first:last] = homes[end + arrays[kind][1]]
    pieces = [ends.astype(np.int64) + sets.starts(kind) for kind, ends in arrays.items()]
    return sets, np.concatenate([np.zeros((2, 0), np.int64), *pieces], axis=1), homes


def _ranges(lengths: Mapping[Kind, int]) -> dict[Kind, tuple[int, int]]:
    lasts = np.cumsum([0, *lengths.values()]).tolist()
    return dict(zip(lengths, pairwise(lasts)))
