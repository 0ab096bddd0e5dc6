"""Parts of programs that own their domains and ghosts themselves, such as codes of molecular dynamics or weather."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from domainpar.common.agreement import Refused, agree, difference, gather, on_all
from domainpar.parallel.halo import HostExchange, HostHalo, ask_owners
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.placed.input_log import tensor_given
from domainpar.placed.part import GraphPart
from domainpar.placed.split import POLICY
from domainpar.plan import IntArray, LocalEdges, build_plan
from partitioners.topology import check_edge_index


def part_of_domain(
    edge_index: Tensor | npt.ArrayLike,
    owned_ids: Tensor | npt.ArrayLike,
    ghost_ids: Tensor | npt.ArrayLike,
    world: World,
    *,
    exchange: HostExchange | None = None,
) -> GraphPart:
    """This rank's part of a graph that another program, the host, has split into domains. *Collective*.

    The host's local rows are [owned | ghosts], each in any order. That order stays: `part.nodes(x)` takes a row for
    each owned node, `part.edges(e)` one for each edge, and `part.to_local(out)` gives such rows back. The rows of the
    whole graph are those of all ranks, one rank after the other. Each rank holds a few integers for every node of it.

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
        Refused: On all ranks alike, if a node is owned twice, nobody owns a ghost, an edge names no local row or ends
            at a ghost, or a function of `exchange` brings other rows than the ids say.
    """
    transport = world.transport
    (src, dst), owned, ghosts = on_all(transport, lambda: _checked(edge_index, owned_ids, ghost_ids, exchange))
    alike = {"part_of_domain's exchange": "None" if exchange is None else "given"}
    agree(transport, difference(transport, alike, "every rank gives the functions of the host, or none does"))
    counts, order, names = _everyone(owned, transport)
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
        ids = np.concatenate([owned, ghosts])
        halo = HostHalo(plan, transport, world.device, numbers[len(owned) :], ids, exchange)
    return GraphPart(plan, transport, world.device, sliced="owned", halo=halo)


def _checked(edge_index: Any, owned_ids: Any, ghost_ids: Any, exchange: Any) -> tuple[IntArray, IntArray, IntArray]:
    """What the host gave on this rank: edges int64 [2, n], ids of owned nodes and of ghosts.

    Raises:
        ValueError: If it is not valid.
    """
    owned, ghosts = _ids(owned_ids, "owned_ids"), _ids(ghost_ids, "ghost_ids")
    edges = tensor_given(edge_index, "the edge_index of part_of_domain").detach().cpu().numpy()
    check_edge_index(edges, len(owned) + len(ghosts))
    at_ghosts = np.flatnonzero(edges[1] >= len(owned))
    if len(at_ghosts):
        at = at_ghosts[0]
        raise ValueError(
            f"edge {at} ends at local row {edges[1, at]}, a ghost: this rank owns the first {len(owned)}. Give each "
            "rank the edges that end at its own nodes; if yours begin there, edge_index.flip(0), and part.edge_index"
            ".flip(0) for the module."
        )
    if exchange is not None and (len(exchange) != 2 or not all(map(callable, exchange))):
        raise ValueError("the exchange of part_of_domain is to be two functions, (forward, reverse).")
    return edges.astype(np.int64, copy=False), owned, ghosts


def _ids(given: Any, what: str) -> IntArray:
    ids = tensor_given(given, f"the {what} of part_of_domain").detach().cpu().numpy()
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise ValueError(
            f"the {what} of part_of_domain have shape {ids.shape}, {ids.dtype}; pass integers [any number]."
        )
    return ids.astype(np.int64)


def _everyone(owned: IntArray, transport: Transport) -> tuple[IntArray, IntArray, IntArray]:
    """Nodes of each rank [size], and of all nodes their ids, ascending, with the number of each. *Collective*.

    Raises:
        Refused: On all ranks alike, if a node is owned twice.
    """
    of_ranks = [np.frombuffer(ids, np.int64) for ids in transport.all_gather(owned.tobytes())]
    counts = np.array([len(ids) for ids in of_ranks])
    ids = np.concatenate(of_ranks)
    order = np.argsort(ids, kind="stable")
    names = ids[order]
    if len(twice := np.flatnonzero(names[1:] == names[:-1])):
        ranks = np.searchsorted(np.cumsum(counts), order[twice[0] : twice[0] + 2], side="right").tolist()
        by = f"{'twice ' if ranks[0] == ranks[1] else ''}by {transport.name_ranks(sorted(set(ranks)))}"
        raise Refused(f"node {names[twice[0]]} is owned {by}", "give each node to one rank; copies are ghosts")
    return counts, order, names
