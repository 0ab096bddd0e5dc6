"""Split a graph into one part for each rank: a graph that every rank holds, or one of which each rank holds a slice.

Or take the parts of a program that owns its domains and ghosts itself, such as codes of molecular dynamics or weather.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from domainpar.common.agreement import Refused, agree, difference, gather, on_all
from domainpar.parallel.halo import HostExchange, HostHalo, ask_owners, exchange_tables
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.placed.input_log import HINT, array_given, in_words, whole_number
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
    topology, ends, named, sets, homes = on_all(
        world.transport, lambda: _graph(edge_index, num_nodes, partitioner, position, seed)
    )
    if transport.size > 1:  # one rank needs no checksums, which take a look at every byte
        at = topology.position
        arguments = {
            "split_graph's number of nodes": str(topology.num_nodes if sets is None else sets.ends),
            "split_graph's edge_index": in_words(torch.from_numpy(ends)),
            "split_graph's partitioner": named if isinstance(named, str) else in_words(torch.from_numpy(named)),
            "split_graph's position": "None" if at is None else in_words(torch.from_numpy(at)),
            "split_graph's seed": str(seed),
        }
        agree(world.transport, difference(transport, arguments, HINT))

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
    else:  # METIS repeats its bits on one machine only: the first rank of the group computes it
        made = on_all(world.transport, lambda: b"" if transport.rank else parts().astype(np.int32).tobytes())
        owner = np.frombuffer(transport.broadcast(made), dtype=np.int32)
    owner = owner if homes is None else owner[homes]
    local = on_all(world.transport, lambda: select_edges(ends, owner, transport.rank, POLICY))
    plan = build_plan(local, owner, transport.rank, transport.size, POLICY, ask_owners(transport))
    return GraphPart(plan, transport, world.device, sets=sets)


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

    def checked() -> tuple[IntArray, IntArray | None]:
        count = whole_number(num_nodes, "split_slices' num_nodes")
        mine = array_given(edge_index, "the edge_index of split_slices")
        check_edge_index(mine, count)
        mine = mine.astype(np.int64, copy=False)
        if assignment is None:
            return mine, None
        parts = array_given(assignment, "the assignment of split_slices")
        check_assignment(parts, len(parts), transport.size)
        return mine, parts.astype(np.int32)

    mine, own_parts = on_all(world.transport, checked)
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


def _local_edges(mine: IntArray, owner: IntArray, transport: Transport) -> LocalEdges:
    """Send each edge of this rank's slice to the part where it ends; return the edges of this one. *Collective*."""
    first, owner_of_dst = sum(gather(transport, mine.shape[1])[: transport.rank]), owner[mine[1]]
    to = [np.flatnonzero(owner_of_dst == part) for part in range(transport.size)]

    def handed(of_ranks: list[IntArray]) -> IntArray:
        return np.concatenate(exchange_tables([values.reshape(-1, 1) for values in of_ranks], transport))[:, 0]

    # From rank to rank ids ascend, as slices do.
    return LocalEdges(handed([first + at for at in to]), *(handed([ends[at] for at in to]) for ends in mine))


def part_of_domain(
    edge_index: Tensor | npt.ArrayLike,
    owned_ids: Tensor | npt.ArrayLike,
    ghost_ids: Tensor | npt.ArrayLike,
    world: World,
    *,
    exchange: HostExchange | None = None,
) -> GraphPart:
    """This rank's part of a graph that another program, the host, has split into domains. *Collective*.

    The host's local rows are [owned | ghosts], each in any order, which is kept: `part.nodes(x)` takes a row for each
    owned node, `part.edges(e)` one for each edge, and `part.to_local(out)` returns such rows. The rows of the whole
    graph are those of all ranks, one rank after the other. Each rank holds a few integers for every node of it.

    Args:
        edge_index: Local rows in which each edge of this rank begins and ends, int64 [2, any number]. Each edge of the
            graph is on one rank, the one that owns the node where it ends.
        owned_ids: A name for each owned node, any distinct integers, [num_owned].
        ghost_ids: The name of the node that each ghost row is a copy of, [num_ghosts]. A node may have several ghost
            rows on a rank, also on its own: images in a periodic box. Ghosts without edges are allowed.
        world: The ranks, those of the host: `World.from_mpi(comm)`, `World.from_process_group(group)`.
        exchange: Two functions of the host, `(forward, reverse)`; None: rows travel over the world. Each takes a table
            of the host's local rows, float64 or float32 [num_owned + num_ghosts, any width], contiguous on the world's
            device, and changes it. `forward` copies owned rows to their ghost rows on all ranks. `reverse` adds ghost
            rows to the owned rows; what it leaves in ghost rows does not matter. All ranks call them alike, also one
            that owns nothing. Sums over ranks, integers, masks, and rows of nodes that are not ghosts travel over the
            world.

    Returns:
        This rank's part. It may own nothing.

    Raises:
        Refused: On all ranks alike, if a node is owned twice, a ghost has no owner, an edge names no local row or ends
            at a ghost, or a function of `exchange` delivers other rows than the ids say.
    """

    def checked() -> tuple[IntArray, IntArray, IntArray]:
        owned, ghosts = _ids(owned_ids, "owned_ids"), _ids(ghost_ids, "ghost_ids")
        edges = array_given(edge_index, "the edge_index of part_of_domain")
        check_edge_index(edges, len(owned) + len(ghosts))
        if len(at_ghosts := np.flatnonzero(edges[1] >= len(owned))):
            at = at_ghosts[0]
            raise ValueError(
                f"edge {at} ends at local row {edges[1, at]}, a ghost: this rank owns the first {len(owned)}. Give "
                "each rank the edges that end at its own nodes; if yours begin there, edge_index.flip(0), and "
                "part.edge_index.flip(0) for the module."
            )
        if exchange is not None and (len(exchange) != 2 or not all(map(callable, exchange))):
            raise ValueError("the exchange of part_of_domain is to be two functions, (forward, reverse).")
        return edges.astype(np.int64, copy=False), owned, ghosts

    transport = world.transport
    (src, dst), owned, ghosts = on_all(transport, checked)
    alike = {"part_of_domain's exchange": "None" if exchange is None else "given"}
    agree(transport, difference(transport, alike, "every rank gives the functions of the host, or none does"))
    # Nodes of each rank, and of all nodes their ids, ascending, with the number of each.
    of_ranks = [np.frombuffer(ids, np.int64) for ids in transport.all_gather(owned.tobytes())]
    counts, ids = np.array([len(ids) for ids in of_ranks]), np.concatenate(of_ranks)
    order = np.argsort(ids, kind="stable")
    names = ids[order]
    if len(twice := np.flatnonzero(names[1:] == names[:-1])):
        ranks = np.searchsorted(np.cumsum(counts), order[twice[0] : twice[0] + 2], side="right").tolist()
        by = f"{'twice ' if ranks[0] == ranks[1] else ''}by {transport.name_ranks(sorted(set(ranks)))}"
        raise Refused(f"node {names[twice[0]]} is owned {by}", "give each node to one rank; copies are ghosts")
    number_of = np.searchsorted(names, ghosts)
    known = number_of < len(names)
    known[known] = names[number_of[known]] == ghosts[known]
    text = None
    if len(strangers := np.flatnonzero(~known)):
        text = (
            f"local row {len(owned) + strangers[0]} is a ghost of node {ghosts[strangers[0]]}, which no rank owns; so "
            f"are {len(strangers)} of {len(ghosts)} ghosts. Give each ghost the id that its owner gave in owned_ids."
        )
    agree(transport, text)
    first = int(counts[: transport.rank].sum())
    numbers = np.concatenate([np.arange(first, first + len(owned)), order[number_of]])
    owner = np.repeat(np.arange(transport.size, dtype=np.int32), counts)
    first_edge = sum(gather(transport, len(src))[: transport.rank])
    edges = LocalEdges(np.arange(first_edge, first_edge + len(src)), numbers[src], numbers[dst])
    plan = build_plan(edges, owner, transport.rank, transport.size, POLICY, ask_owners(transport))
    halo = None
    if exchange is not None:
        here = np.concatenate([owned, ghosts])
        halo = HostHalo(plan, transport, world.device, numbers[len(owned) :], here, exchange)
    return GraphPart(plan, transport, world.device, sliced="owned", halo=halo)


def _graph(
    edge_index: Any, num_nodes: Any, partitioner: Any, position: Any, seed: Any
) -> tuple[Topology, IntArray, str | IntArray, Sets | None, IntArray | None]:
    """The graph to be split, checked.

    Returns:
        Its nodes, and edges between them; all its edges, int64 [2, E], of which those that join edges are others in the
        topology; a partitioner's name, or the part of each node; its kinds, None if it names none; and then the node
        with which each row is owned, int64 [rows].

    Raises:
        ValueError: If it is not valid.
    """
    if whole_number(seed, "split_graph's seed") >= 2**63:
        raise ValueError(f"split_graph's seed is {seed}; pass one below 2**63.")
    edge_index, num_nodes = fields_of(edge_index, num_nodes)
    sets, homes = None, None
    if isinstance(edge_index, Mapping):
        sets, ends, homes = numbered_as_one(edge_index, num_nodes)
        partitioner, position = _join_kinds(partitioner, sets, "partitioner"), _join_kinds(position, sets, "position")
        between, total = homes[ends], sets.num_nodes
    else:
        total = whole_number(num_nodes, "split_graph's num_nodes")
        ends = between = array_given(edge_index, "the edge_index of split_graph")
    if position is not None:
        position = array_given(position, "the position of split_graph")
    if not isinstance(partitioner, str):
        partitioner = array_given(partitioner, "the partitioner of split_graph")
    return Topology(between, total, position, POLICY), ends, partitioner, sets, homes


def _join_kinds(given: Any, sets: Sets, what: str) -> Any:
    """The values of each kind of nodes, one after the other; a name or None as it is.

    Raises:
        ValueError: If a kind lacks it.
    """
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, Mapping) or set(given) != set(sets.nodes):
        raise ValueError(f"the {what} of a graph of several kinds is a dictionary with {sets.nodes}.")
    rows = []
    for kind in sets.nodes:
        rows.append(array_given(given[kind], f"the {what} of {kind!r}"))
        first, last = sets.ends[kind]
        if len(rows[-1]) != last - first:
            raise ValueError(f"the {what} of {kind!r} has {len(rows[-1])} rows where there are {last - first} nodes.")
    return np.concatenate(rows)


def _check_gone(gone: dict[str, Any]) -> None:
    if "edge_policy" in gone:
        raise TypeError("edge_policy is gone: a rank has the edges that end at its nodes; sums at both ends are exact.")
    if gone:
        raise TypeError(f"unexpected arguments {', '.join(gone)}.")


def _ids(given: Any, what: str) -> IntArray:
    ids = array_given(given, f"the {what} of part_of_domain")
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise ValueError(
            f"the {what} of part_of_domain have shape {ids.shape}, {ids.dtype}; pass integers [any number]."
        )
    return ids.astype(np.int64)
