"""Split a graph into one part for each rank: a graph that every rank holds, or one of which each rank holds a slice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from domainpar.common.agreement import agree, difference, gather, on_all
from domainpar.parallel.halo import ask_owners, hand_over
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.placed.input_log import HINT, in_words, tensor_given, whole_number
from domainpar.placed.part import GraphPart
from domainpar.placed.sets import Kind, Sets, fields_of, numbered_as_one
from domainpar.plan import EdgePolicy, IntArray, LocalEdges, build_plan, select_edges
from partitioners import ANYWHERE, Topology, get_partitioner
from partitioners.ranges import split_evenly
from partitioners.topology import check_assignment, check_edge_index

POLICY: EdgePolicy = "incoming"


def split_graph(
    edge_index: Any,
    num_nodes: int | Mapping[Kind, int] | None = None,
    world: World | None = None,
    *,
    partitioner: str | IntArray | Mapping[Kind, IntArray] = "metis",
    position: Tensor | npt.ArrayLike | Mapping[Kind, Tensor | npt.ArrayLike] | None = None,
    seed: int = 0,
    group: Literal["all", "domain"] = "all",
    **gone: Any,
) -> GraphPart:
    """Split a graph that every rank holds. *Collective*.

    The plan of what to send to which rank is made once. Call it again for another graph.

    A graph may have several kinds of nodes and of edges. An edge is owned where it ends. Edges may join edges, as
    triplets do: an end of a kind of edges is then the kind of those edges, and its numbers are places in their list.

    Args:
        edge_index: `src` and `dst` of each edge, int64 [2, E], the same on every rank; a tensor or a numpy array. Or a
            dictionary of them by kind, (kind of src, relation, kind of dst). Or `Data` or `HeteroData` of
            torch_geometric.
        num_nodes: Number of nodes of the graph, N; of several kinds a dictionary. None for a data object, which knows.
        world: The ranks.
        partitioner: A name (see `partitioners.PARTITIONERS`), or the part of each node, integers [N]; of several kinds
            a dictionary. `metis` cuts the graph of all kinds together; `contiguous` each kind by itself.
        position: x, y, z of each node, [N, 3], for partitioners that cut by geometry; of several kinds a dictionary.
        seed: Seed of the partitioner.
        group: Which ranks share the graph: `all`, or those of this rank's `domain` group of the world. Each group then
            has a graph of its own. Figures of it are those of the group; gradients of parameters are added up over all.

    Returns:
        This rank's part. It may own nothing.

    Raises:
        Refused: On all ranks alike, if the graph or the assignment is not valid, or the ranks were given different
            ones.
    """
    _check_gone(gone)
    if world is None:
        raise TypeError("split_graph needs the ranks: split_graph(edge_index, num_nodes, world).")
    transport = world.transport if group == "all" else world.domain
    graph = on_all(world.transport, lambda: _graph(edge_index, num_nodes, partitioner, position, seed))
    topology, named = graph.topology, graph.partitioner
    if transport.size > 1:  # one rank needs no checksums, which take a look at every byte
        at = topology.position
        arguments = {
            "split_graph's number of nodes": str(topology.num_nodes if graph.sets is None else graph.sets.ends),
            "split_graph's edge_index": in_words(torch.from_numpy(graph.edge_index)),
            "split_graph's partitioner": named if isinstance(named, str) else in_words(torch.from_numpy(named)),
            "split_graph's position": "None" if at is None else in_words(torch.from_numpy(at)),
            "split_graph's seed": str(seed),
        }
        agree(world.transport, difference(transport, arguments, HINT))
    owner = _assignment(graph, world, transport, seed)
    local = on_all(world.transport, lambda: select_edges(graph.edge_index, owner, transport.rank, POLICY))
    plan = build_plan(local, owner, transport.rank, transport.size, POLICY, ask_owners(transport))
    return GraphPart(plan, transport, world.device, sets=graph.sets)


def split_slices(
    edge_index: Tensor | npt.ArrayLike,
    num_nodes: int,
    world: World,
    *,
    assignment: Tensor | npt.ArrayLike | None = None,
    group: Literal["all", "domain"] = "all",
    **gone: Any,
) -> GraphPart:
    """Split a graph of which every rank holds a slice of the edges; no rank ever holds all of them. *Collective*.

    The slices, one after the other in the order of ranks, are the `edge_index` that `split_graph` would take, and the
    part is the same. In addition each rank holds a few integers for every node of the whole graph.

    Args:
        edge_index: `src` and `dst` of the edges of this rank's slice, int64 [2, any number]; ids are those of the whole
            graph.
        num_nodes: Number of nodes of the whole graph, N.
        world: The ranks.
        assignment: The part of each node of this rank's slice of the nodes, integers [any number]. None: ranges of node
            ids of equal cost, good where neighbours have nearby ids. METIS would need the whole graph.
        group: Which ranks share the graph, as for `split_graph`.

    Returns:
        This rank's part. Its `nodes` and `edges` take slices, too.

    Raises:
        Refused: On all ranks alike, if a slice is not valid, or the slices do not belong to one graph.
    """
    _check_gone(gone)
    transport = world.transport if group == "all" else world.domain
    mine, own_parts = on_all(world.transport, lambda: _slice(edge_index, num_nodes, assignment, transport.size))
    given = "None" if own_parts is None else "given"
    alike = {"split_slices' num_nodes": str(num_nodes), "split_slices' assignment": given}
    agree(world.transport, difference(transport, alike, "give every rank a slice of the same graph"))
    if own_parts is None:
        costs = torch.from_numpy(Topology(mine, num_nodes, edge_policy=POLICY).costs() - 1)
        transport.all_reduce(costs)
        owner = split_evenly(costs.numpy() + 1, transport.size)
    else:
        owner = np.frombuffer(b"".join(transport.all_gather(own_parts.tobytes())), np.int32)
    text = f"split_slices' assignments have {len(owner)} nodes together where the graph has {num_nodes}."
    agree(world.transport, None if len(owner) == num_nodes else text)  # groups may differ in giving assignments
    local = _local_edges(mine, owner, transport)
    plan = build_plan(local, owner, transport.rank, transport.size, POLICY, ask_owners(transport))
    return GraphPart(plan, transport, world.device, sliced=True)


def _slice(edge_index: Any, num_nodes: int, assignment: Any, num_parts: int) -> tuple[IntArray, IntArray | None]:
    """This rank's edges, int64 [2, n], and the parts of its nodes, int32 [m] or None, checked.

    Raises:
        ValueError: If they are not valid.
    """
    num_nodes = whole_number(num_nodes, "split_slices' num_nodes")
    mine = tensor_given(edge_index, "the edge_index of split_slices").detach().cpu().numpy()
    check_edge_index(mine, num_nodes)
    if assignment is None:
        return mine.astype(np.int64, copy=False), None
    parts = tensor_given(assignment, "the assignment of split_slices").detach().cpu().numpy()
    check_assignment(parts, len(parts), num_parts)
    return mine.astype(np.int64, copy=False), parts.astype(np.int32)


def _local_edges(mine: IntArray, owner: IntArray, transport: Transport) -> LocalEdges:
    """Send each edge of this rank's slice to the part where it ends; return the edges of this one. *Collective*."""
    src, dst = mine
    first = sum(gather(transport, len(src))[: transport.rank])
    owner_of_dst = owner[dst]
    to = [np.flatnonzero(owner_of_dst == part) for part in range(transport.size)]
    # From rank to rank ids ascend, as slices do.
    edge_ids = _handed([first + at for at in to], transport)
    return LocalEdges(edge_ids, *(_handed([ends[at] for at in to], transport) for ends in (src, dst)))


def _handed(of_ranks: list[IntArray], transport: Transport) -> IntArray:
    """The values that all ranks have for this one. *Collective*."""
    return np.concatenate(hand_over([values.reshape(-1, 1) for values in of_ranks], transport))[:, 0]


class _Graph(NamedTuple):
    """What is to be split, checked.

    Attributes:
        topology: Its nodes, and edges between them.
        edge_index: All its edges, int64 [2, E]; those that join edges are others in the topology.
        partitioner: A name, or the part of each node.
        sets: Its kinds; None if it names none.
        homes: The node with which each row is owned, int64 [rows].
    """

    topology: Topology
    edge_index: IntArray
    partitioner: str | IntArray
    sets: Sets | None = None
    homes: IntArray | None = None


def _graph(edge_index: Any, num_nodes: Any, partitioner: Any, position: Any, seed: Any) -> _Graph:
    """The graph to be split.

    Raises:
        ValueError: If it is not valid.
    """
    if whole_number(seed, "split_graph's seed") >= 2**63:
        raise ValueError(f"split_graph's seed is {seed}; pass one below 2**63.")
    edge_index, num_nodes = fields_of(edge_index, num_nodes)
    sets, homes = None, None
    if isinstance(edge_index, Mapping):
        sets, ends, homes = numbered_as_one(edge_index, num_nodes)
        partitioner, position = _of_all(partitioner, sets, "partitioner"), _of_all(position, sets, "position")
        between, total = homes[ends], sets.num_nodes
    else:
        total = whole_number(num_nodes, "split_graph's num_nodes")
        ends = between = tensor_given(edge_index, "the edge_index of split_graph").detach().cpu().numpy()
    if position is not None:
        position = tensor_given(position, "the position of split_graph").detach().cpu().numpy()
    if not isinstance(partitioner, str):
        partitioner = tensor_given(partitioner, "the partitioner of split_graph").cpu().numpy()
    return _Graph(Topology(between, total, position, POLICY), ends, partitioner, sets, homes)


def _of_all(given: Any, sets: Sets, what: str) -> Any:
    """What is given of each kind of nodes, one after the other; a name, or nothing, as it is.

    Raises:
        ValueError: If a kind lacks it.
    """
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, Mapping) or set(given) != set(sets.nodes):
        raise ValueError(f"the {what} of a graph of several kinds is a dictionary with {sets.nodes}.")
    rows = []
    for kind in sets.nodes:
        rows.append(tensor_given(given[kind], f"the {what} of {kind!r}").detach().cpu().numpy())
        first, last = sets.ends[kind]
        if len(rows[-1]) != last - first:
            raise ValueError(f"the {what} of {kind!r} has {len(rows[-1])} rows where there are {last - first} nodes.")
    return np.concatenate(rows)


def _check_gone(gone: dict[str, Any]) -> None:
    if "edge_policy" in gone:
        raise TypeError("edge_policy is gone: a rank has the edges that end at its nodes; sums at both ends are exact.")
    if gone:
        raise TypeError(f"unexpected arguments {', '.join(gone)}.")


def _assignment(graph: _Graph, world: World, transport: Transport, seed: int) -> IntArray:
    """The part of each row. METIS repeats its bits on one machine only: the first rank of the group computes it."""
    topology, named, sets = graph.topology, graph.partitioner, graph.sets

    def parts() -> IntArray:
        if not isinstance(named, str):
            check_assignment(named, topology.num_nodes, transport.size)
            return named
        if named == "contiguous" and sets is not None:  # in one numbering each rank would have one kind
            costs = topology.costs()
            ranges = [slice(*sets.ends[kind]) for kind in sets.nodes]
            return np.concatenate([split_evenly(costs[rows], transport.size) for rows in ranges])
        return get_partitioner(named, seed)(topology, transport.size)

    if isinstance(named, str) and named in ANYWHERE:
        owner = on_all(world.transport, parts)
    else:
        made = on_all(world.transport, lambda: b"" if transport.rank else parts().astype(np.int32).tobytes())
        owner = np.frombuffer(transport.broadcast(made), dtype=np.int32)
    return owner if graph.homes is None else owner[graph.homes]
