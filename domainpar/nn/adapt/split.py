"""Split a graph into one part for each rank: a graph that every rank holds, or one of which each rank holds a slice."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from domainpar.common.agreement import agree, difference, gather, on_all
from domainpar.nn.adapt.input_log import HINT, in_words, tensor_given
from domainpar.nn.adapt.part import GraphPart
from domainpar.parallel.halo import ask_owners, hand_over
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.plan import EdgePolicy, IntArray, LocalEdges, build_plan, select_edges
from partitioners import Topology, get_partitioner
from partitioners.ranges import split_evenly
from partitioners.topology import check_assignment, check_edge_index


def split_graph(
    edge_index: Tensor | npt.ArrayLike,
    num_nodes: int,
    world: World,
    *,
    edge_policy: EdgePolicy = "incoming",
    partitioner: str | IntArray = "metis",
    position: Tensor | npt.ArrayLike | None = None,
    seed: int = 0,
    group: Literal["all", "domain"] = "all",
) -> GraphPart:
    """Split a graph that every rank holds. *Collective*.

    The plan of what to send to which rank is made once. Call it again for another graph.

    Args:
        edge_index: `src` and `dst` of each edge, int64 [2, E], the same on every rank; a tensor or a numpy array.
        num_nodes: Number of nodes of the graph, N.
        world: The ranks.
        edge_policy: Which edges a part computes on. `incoming`: those that end at its nodes, for models that sum where
            edges end. `incident`: also those that begin at its nodes, for models that sum at both ends.
        partitioner: A name (see `partitioners.PARTITIONERS`), or the part of each node, integers [N].
        position: x, y, z of each node, [N, 3], for partitioners that cut by geometry.
        seed: Seed of the partitioner.
        group: Which ranks share the graph: `all`, or those of this rank's `domain` group of the world. Each group then
            has a graph of its own; `GraphPart.all_reduce` sums over the group, and `GraphParallel.reduce_gradients`
            over all ranks.

    Returns:
        This rank's part. It may own nothing.

    Raises:
        Refused: On all ranks alike, if the graph or the assignment is not valid, or the ranks were given different
            ones.
    """
    transport = world.transport if group == "all" else world.domain
    topology = on_all(world.transport, lambda: _topology(edge_index, num_nodes, edge_policy, position))
    if transport.size > 1:  # one rank needs no checksums, which take a look at every byte
        named, at = partitioner if isinstance(partitioner, str) else "", topology.position
        arguments = {
            "number of nodes": str(topology.num_nodes),
            "edge_index": in_words(torch.from_numpy(topology.edge_index)),
            "edge_policy": edge_policy,
            "partitioner": named or in_words(tensor_given(np.asarray(partitioner), "partitioner")),
            "position": "None" if at is None else in_words(torch.from_numpy(at)),
            "seed": str(seed),
        }
        arguments = {f"split_graph's {name}": words for name, words in arguments.items()}
        agree(world.transport, difference(transport, arguments, HINT))
    assignment = _assignment(topology, world, transport, partitioner, seed)
    local = on_all(world.transport, lambda: select_edges(topology.edge_index, assignment, transport.rank, edge_policy))
    plan = build_plan(local, assignment, transport.rank, transport.size, edge_policy, ask_owners(transport))
    return GraphPart(plan, transport, world.device)


def split_slices(
    edge_index: Tensor | npt.ArrayLike,
    num_nodes: int,
    world: World,
    *,
    edge_policy: EdgePolicy = "incoming",
    assignment: Tensor | npt.ArrayLike | None = None,
    group: Literal["all", "domain"] = "all",
) -> GraphPart:
    """Split a graph of which every rank holds a slice of the edges; no rank ever holds all of them. *Collective*.

    The slices, one after the other in the order of ranks, are the `edge_index` that `split_graph` would take, and the
    part is the same. In addition each rank holds a few integers for every node of the whole graph.

    Args:
        edge_index: `src` and `dst` of the edges of this rank's slice, int64 [2, any number]; ids are those of the whole
            graph.
        num_nodes: Number of nodes of the whole graph, N.
        world: The ranks.
        edge_policy: Which edges a part computes on, as for `split_graph`.
        assignment: The part of each node of this rank's slice of the nodes, integers [any number]. None: ranges of node
            ids of equal cost, good where neighbours have nearby ids. METIS would need the whole graph.
        group: Which ranks share the graph, as for `split_graph`.

    Returns:
        This rank's part. Its `nodes`, `edges`, `owned_nodes` and `owned_edges` take slices, too.

    Raises:
        Refused: On all ranks alike, if a slice is not valid, or the slices do not belong to one graph.
    """
    transport = world.transport if group == "all" else world.domain
    mine, own_parts = on_all(
        world.transport, lambda: _slice(edge_index, num_nodes, edge_policy, assignment, transport.size)
    )
    alike = {
        "num_nodes": str(num_nodes),
        "edge_policy": edge_policy,
        "assignment": "None" if own_parts is None else "given",
    }
    alike = {f"split_slices' {name}": words for name, words in alike.items()}
    agree(world.transport, difference(transport, alike, "give every rank a slice of the same graph"))
    if own_parts is None:
        costs = torch.from_numpy(Topology(mine, num_nodes, edge_policy=edge_policy).costs() - 1)
        transport.all_reduce(costs)
        owner = split_evenly(costs.numpy() + 1, transport.size)
    else:
        owner = np.frombuffer(b"".join(transport.all_gather(own_parts.tobytes())), np.int32)
    text = f"split_slices' assignments have {len(owner)} nodes together where the graph has {num_nodes}."
    agree(world.transport, None if len(owner) == num_nodes else text)  # groups may differ in giving assignments
    local = _local_edges(mine, owner, transport, edge_policy)
    plan = build_plan(local, owner, transport.rank, transport.size, edge_policy, ask_owners(transport))
    return GraphPart(plan, transport, world.device, sliced=True)


def _slice(
    edge_index: Any, num_nodes: int, edge_policy: str, assignment: Any, num_parts: int
) -> tuple[IntArray, IntArray | None]:
    """This rank's edges, int64 [2, n], and the parts of its nodes, int32 [m] or None, checked.

    Raises:
        ValueError: If they are not valid.
    """
    _check_policy(edge_policy)
    mine = tensor_given(edge_index, "the edge_index of split_slices").detach().cpu().numpy()
    check_edge_index(mine, num_nodes)
    if assignment is None:
        return mine.astype(np.int64, copy=False), None
    parts = tensor_given(assignment, "the assignment of split_slices").detach().cpu().numpy()
    check_assignment(parts, len(parts), num_parts)
    return mine.astype(np.int64, copy=False), parts.astype(np.int32)


def _local_edges(mine: IntArray, owner: IntArray, transport: Transport, policy: EdgePolicy) -> LocalEdges:
    """Send each edge of this rank's slice to the parts it is local to; return the local edges here. *Collective*."""
    src, dst = mine
    first = sum(gather(transport, len(src))[: transport.rank])
    owner_of_src, owner_of_dst = owner[src], owner[dst]
    to = []
    for part in range(transport.size):
        local = owner_of_dst == part
        to.append(np.flatnonzero(local | (owner_of_src == part) if policy == "incident" else local))
    # One after the other, so that few are there twice. From rank to rank ids ascend, as slices do.
    edge_ids = _handed([first + at for at in to], transport)
    return LocalEdges(edge_ids, *(_handed([ends[at] for at in to], transport) for ends in (src, dst)))


def _handed(of_ranks: list[IntArray], transport: Transport) -> IntArray:
    """The values that all ranks have for this one. *Collective*."""
    return np.concatenate(hand_over([values.reshape(-1, 1) for values in of_ranks], transport))[:, 0]


def _topology(edge_index: Any, num_nodes: int, edge_policy: EdgePolicy, position: Any) -> Topology:
    """The graph to be split, checked.

    Raises:
        ValueError: If it is not valid.
    """
    _check_policy(edge_policy)
    ends = tensor_given(edge_index, "the edge_index of split_graph").detach().cpu().numpy()
    if position is not None:
        position = tensor_given(position, "the position of split_graph").detach().cpu().numpy()
    return Topology(ends, num_nodes, position, edge_policy)


def _check_policy(edge_policy: str) -> None:
    if edge_policy not in get_args(EdgePolicy):
        raise ValueError(f"edge_policy={edge_policy!r} is no choice; write 'incoming' or, for both ends, 'incident'.")


def _assignment(
    topology: Topology, world: World, transport: Transport, partitioner: str | IntArray, seed: int
) -> IntArray:
    """The part of each node, computed by the first rank of the group: METIS repeats its bits on one machine only."""

    def make() -> bytes:
        if transport.rank:
            return b""
        if isinstance(partitioner, str):
            return get_partitioner(partitioner, seed)(topology, transport.size).astype(np.int32).tobytes()
        assignment = np.asarray(partitioner)
        check_assignment(assignment, topology.num_nodes, transport.size)
        return assignment.astype(np.int32).tobytes()

    return np.frombuffer(transport.broadcast(on_all(world.transport, make)), dtype=np.int32)
