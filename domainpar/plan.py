"""Who owns what: the lists behind an exchange of rows, in numpy. No rank has to run.

A plan is made from an assignment of nodes to parts and from the edges that one part computes on. A part cannot see in
its own edges what it has to *send*: edges are directed, so a part may need rows of another part that needs none of its
rows. So each part asks the others for the nodes that it needs, and learns from them what to send (`Ask`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from partitioners.topology import BoolArray as BoolArray
from partitioners.topology import EdgePolicy as EdgePolicy
from partitioners.topology import IntArray as IntArray

Ask = Callable[[list[IntArray]], list[IntArray]]
"""Takes the ids that this part needs from each part, returns the ids that each part needs from it. *Collective*."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PartitionPlan:
    """The nodes and edges of one part, its ghost nodes, and the rows that it sends to other parts.

    A ghost node, or halo node, is a copy of a node that another part owns. Local rows have one order everywhere:

        [0, num_owned)                       owned nodes, by global id
        [num_owned, num_owned + num_ghosts)  ghost nodes, by (owner, global id)

    Ghost nodes lie grouped by owner, so a received buffer is a block of these rows as it stands.

    For rows without edges the fields of edges may be left out.

    Attributes:
        part: Number of this part, in [0, num_parts).
        num_parts: Number of parts that the graph is split into.
        edge_policy: Which edges are local. `incoming`: edges whose `dst` is owned; `incident`: edges with an owned end.
        owned_ids: Global ids of the owned nodes, int64 [num_owned], increasing.
        ghost_ids: Global ids of the ghost nodes, int64 [num_ghosts].
        edge_ids: Global ids of the local edges, int64 [num_edges], increasing.
        edge_rows: Local rows of `src` and `dst` of each local edge, int64 [2, num_edges].
        edge_owned: Whether this part owns, and so counts, each local edge, bool [num_edges]: whether its `dst` is
            owned.
        send_rows: Owned rows to send, int64 [num_sent], grouped by receiver.
        send_counts: Number of rows sent to each part, int64 [num_parts]. Zeros are common.
        recv_counts: Number of ghost rows received from each part, int64 [num_parts].
    """

    part: int
    num_parts: int
    edge_policy: EdgePolicy = "incoming"
    owned_ids: IntArray
    ghost_ids: IntArray
    edge_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    edge_rows: IntArray = field(default_factory=lambda: np.zeros((2, 0), np.int64))
    edge_owned: BoolArray = field(default_factory=lambda: np.zeros(0, bool))
    send_rows: IntArray
    send_counts: IntArray
    recv_counts: IntArray

    @property
    def num_owned(self) -> int:
        return len(self.owned_ids)

    @property
    def num_ghosts(self) -> int:
        return len(self.ghost_ids)

    @property
    def num_local(self) -> int:
        """Rows of a local node table: owned nodes and ghost nodes."""
        return self.num_owned + self.num_ghosts

    @property
    def num_edges(self) -> int:
        return len(self.edge_ids)

    @cached_property
    def degrees(self) -> IntArray:
        """Number of local edges that end, and that begin, at each owned node, int64 [num_owned, 2].

        With `incident` these are all edges of the graph at the node; with `incoming` only the first column is.
        """
        ends = (self.edge_rows[1], self.edge_rows[0])
        return np.stack([np.bincount(end, minlength=self.num_local)[: self.num_owned] for end in ends], axis=1)

    @property
    def local_ids(self) -> IntArray:
        """Global id of every local row, int64 [num_local]."""
        return np.concatenate([self.owned_ids, self.ghost_ids])

    def within(self, first: int, last: int) -> PartitionPlan:
        """The plan of the nodes [first, last) alone, numbered from 0, without edges."""
        begin, end = np.searchsorted(self.owned_ids, [first, last])
        ghosts = (self.ghost_ids >= first) & (self.ghost_ids < last)
        sent, parts = (self.send_rows >= begin) & (self.send_rows < end), np.arange(self.num_parts)
        return PartitionPlan(
            part=self.part,
            num_parts=self.num_parts,
            edge_policy=self.edge_policy,
            owned_ids=self.owned_ids[begin:end] - first,
            ghost_ids=self.ghost_ids[ghosts] - first,
            send_rows=self.send_rows[sent] - begin,
            send_counts=np.bincount(parts.repeat(self.send_counts)[sent], minlength=self.num_parts),
            recv_counts=np.bincount(parts.repeat(self.recv_counts)[ghosts], minlength=self.num_parts),
        )


@dataclass(frozen=True, eq=False)
class LocalEdges:
    """The edges that one part computes on: global ids, increasing, and those of the nodes at both ends, int64 [n]."""

    edge_ids: IntArray
    src: IntArray
    dst: IntArray


def build_plan(
    edges: LocalEdges, assignment: IntArray, part: int, num_parts: int, edge_policy: EdgePolicy, ask: Ask
) -> PartitionPlan:
    """Build the plan of one part from its own edges. *Collective*, because `ask` is.

    Args:
        edges: This part's local edges under `edge_policy`.
        assignment: Part of each node of the graph, [N], in [0, num_parts); -1 for a node that no part takes.
        part: The part to build the plan for. It may own nothing.
        num_parts: Number of parts.
        edge_policy: `incoming`: edges whose `dst` is owned; `incident`: edges with an owned end.
        ask: Exchanges with the other parts which nodes each one needs (`Ask`).

    Raises:
        ValueError: If `assignment` names a part that does not exist, an edge names a node that does not, or an edge is
            not local to this part under the policy. Raised before `ask` is called.
    """
    return complete_plan(draft_plan(edges, assignment, part, num_parts, edge_policy), ask)


def draft_plan(
    edges: LocalEdges, assignment: IntArray, part: int, num_parts: int, edge_policy: EdgePolicy
) -> PartitionPlan:
    """A plan that sends nothing yet: what other parts need is not known. Arguments as for `build_plan`."""
    owner, none = assignment, np.zeros(0, np.int64)
    _check_owner(owner, num_parts)
    _check_local(edges, owner, part, edge_policy)
    if num_parts == 1 and not owner.any():  # the only part: every node is owned, and its row is its id
        owned_ids, ghost_ids = np.arange(len(owner)), none
        edge_rows = np.stack([edges.src, edges.dst]).astype(np.int64, copy=False)
    else:
        owned_ids = np.flatnonzero(owner == part)
        # Ghosts by a mask of all nodes: ids of edges' ends, most of them several times there, need not be sorted.
        touched = np.zeros(len(owner), dtype=bool)
        touched[edges.src] = True
        touched[edges.dst] = True
        touched[owned_ids] = False
        ghost_ids = np.flatnonzero(touched)
        # Stable: those of one owner stay ascending, as the owner will send them.
        ghost_ids = ghost_ids[np.argsort(owner[ghost_ids], kind="stable")]
        local_ids = np.concatenate([owned_ids, ghost_ids])
        row_of = np.full(len(owner), -1, dtype=np.int64)
        row_of[local_ids] = np.arange(len(local_ids))
        edge_rows = np.empty((2, len(edges.src)), np.int64)
        row_of.take(edges.src, out=edge_rows[0], mode="clip")  # checked before; "raise" would take a copy
        row_of.take(edges.dst, out=edge_rows[1], mode="clip")
    return PartitionPlan(
        part=part,
        num_parts=num_parts,
        edge_policy=edge_policy,
        owned_ids=owned_ids,
        ghost_ids=ghost_ids,
        edge_ids=edges.edge_ids,
        edge_rows=edge_rows,
        edge_owned=edge_rows[1] < len(owned_ids),
        send_rows=none,
        send_counts=np.zeros(num_parts, np.int64),
        recv_counts=np.bincount(owner[ghost_ids], minlength=num_parts).astype(np.int64),
    )


def complete_plan(draft: PartitionPlan, ask: Ask) -> PartitionPlan:
    """The plan of `draft_plan` with the rows that the part has to send. *Collective*, because `ask` is."""
    return _complete(draft, ask(_wanted(draft)))


def _complete(draft: PartitionPlan, owed: list[IntArray]) -> PartitionPlan:
    """The plan with the rows to send: `owed[p]` holds the ids that part `p` needs from this one."""
    send_ids = np.concatenate([np.zeros(0, np.int64), *owed])
    if len(strangers := send_ids[~np.isin(send_ids, draft.owned_ids)]):
        raise RuntimeError(
            f"part {draft.part} was asked for node {strangers[0]}, which it does not own; "
            "the parts hold different assignments of one graph."
        )
    send_counts = np.array([len(ids) for ids in owed], dtype=np.int64)
    # Owned ids are ascending, and a row is a place among them.
    return replace(draft, send_rows=np.searchsorted(draft.owned_ids, send_ids), send_counts=send_counts)


def _wanted(draft: PartitionPlan) -> list[IntArray]:
    """Global ids of the ghost nodes that a part needs, one array for each owner."""
    return list(np.split(draft.ghost_ids, np.cumsum(draft.recv_counts)[:-1]))


def plan_slices(wanted: IntArray, bounds: IntArray, part: int, ask: Ask) -> PartitionPlan:
    """Plan how a part gets rows of a tensor of which each part holds a slice. *Collective*, because `ask` is.

    Args:
        wanted: Global ids of the rows that the part needs, in any order; an id may occur several times.
        bounds: First row of each part's slice, then the end of the last slice, int64 [num_parts + 1].
        part: The part to build the plan for.
        ask: Exchanges with the other parts which rows each one needs (`Ask`).

    Returns:
        A plan without edges: `owned_ids` is the part's slice, `ghost_ids` what it needs of others' slices.
    """
    first, last, num_parts = bounds[part], bounds[part + 1], len(bounds) - 1
    ghost_ids = np.unique(wanted[(wanted < first) | (wanted >= last)])
    draft = PartitionPlan(
        part=part,
        num_parts=num_parts,
        owned_ids=np.arange(first, last),
        ghost_ids=ghost_ids,
        send_rows=np.zeros(0, np.int64),
        send_counts=np.zeros(num_parts, np.int64),
        recv_counts=np.diff(np.searchsorted(ghost_ids, bounds)),
    )
    return complete_plan(draft, ask)


def build_plans(
    edge_index: IntArray, assignment: IntArray, num_parts: int, edge_policy: EdgePolicy
) -> list[PartitionPlan]:
    """Build the plans of all parts of one graph in one process, for tests and small tools.

    Args:
        edge_index: `src` and `dst` id of each edge, int64 [2, E].
        assignment, num_parts, edge_policy: As for `build_plan`.

    Raises:
        ValueError: If the assignment names a part that does not exist, or an edge a node that does not.
    """
    owner = np.asarray(assignment)
    _check_owner(owner, num_parts)
    _check_ends(edge_index[0], edge_index[1], len(owner))
    local = [select_edges(edge_index, owner, part, edge_policy) for part in range(num_parts)]
    drafts = [draft_plan(own, owner, part, num_parts, edge_policy) for part, own in enumerate(local)]
    wanted = [_wanted(draft) for draft in drafts]
    return [_complete(draft, [ids[draft.part] for ids in wanted]) for draft in drafts]


def select_edges(edge_index: IntArray, owner: IntArray, part: int, edge_policy: EdgePolicy) -> LocalEdges:
    """Pick one part's local edges from all edges of a graph, int64 [2, E] in global order."""
    if not owner.any():
        none = 0 if part == 0 else edge_index.shape[1]
        return LocalEdges(np.arange(none, edge_index.shape[1]), edge_index[0, none:], edge_index[1, none:])
    local = owner.take(edge_index[1]) == part
    left_out = bool((owner < 0).any())
    if edge_policy == "incident" or left_out:
        owner_of_src = owner.take(edge_index[0])
        if edge_policy == "incident":
            local |= owner_of_src == part
        # Neither end may be a node without a part, as outside of a sector.
        local &= (owner_of_src >= 0) & (owner.take(edge_index[1]) >= 0)
    edge_ids = np.flatnonzero(local)
    return LocalEdges(edge_ids, edge_index[0].take(edge_ids), edge_index[1].take(edge_ids))


def _check_owner(owner: IntArray, num_parts: int) -> None:
    if len(owner) and not (owner.min() >= -1 and owner.max() < num_parts):
        raise ValueError(
            f"assignment uses parts {owner.min()} to {owner.max()} but num_parts is {num_parts}; "
            "group the tiles again for the new number of ranks."
        )


def _check_ends(src: IntArray, dst: IntArray, num_nodes: int) -> None:
    for name, ends in (("src", src), ("dst", dst)):
        if len(ends) and not (ends.min() >= 0 and ends.max() < num_nodes):
            bad = int(np.flatnonzero((ends < 0) | (ends >= num_nodes))[0])
            raise ValueError(
                f"edge {bad} has {name} {ends[bad]} but the graph has {num_nodes} nodes; "
                "edge ids are global node ids, counted from 0."
            )


def _check_local(edges: LocalEdges, owner: IntArray, part: int, edge_policy: EdgePolicy) -> None:
    _check_ends(edges.src, edges.dst, len(owner))
    if len(owner) and owner.min() < 0:
        left_out = (owner.take(edges.src) < 0) | (owner.take(edges.dst) < 0)
        if left_out.any():
            first = edges.edge_ids[left_out][0]
            raise ValueError(f"edge {first} of part {part} touches a node that no part owns; leave such edges out.")
    if part == 0 and not owner.any():
        local = np.ones(1, bool)
    else:
        local = owner.take(edges.dst) == part
        if edge_policy == "incident":
            local |= owner.take(edges.src) == part
    if not local.all():
        raise ValueError(
            f"edge {edges.edge_ids[~local][0]} is not local to part {part} under edge_policy={edge_policy!r}; "
            "pass the edges whose dst is owned (incoming) or with an owned end (incident)."
        )
    if (edges.edge_ids[1:] <= edges.edge_ids[:-1]).any():
        raise ValueError(f"the local edges of part {part} are not in increasing order of their global ids; sort them.")
