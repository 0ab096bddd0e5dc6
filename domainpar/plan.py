"""Who owns what: the lists behind an exchange, in numpy, without a rank running.

A plan is made from an assignment of nodes to parts and the edges one part computes on. What a part
must *send* it cannot know from its own edges: graphs here are directed, so need is not mutual. Each
part declares what it needs and learns from the others what it owes (`Ask`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from partitioners.topology import BoolArray as BoolArray
from partitioners.topology import EdgePolicy as EdgePolicy
from partitioners.topology import IntArray as IntArray

Ask = Callable[[list[IntArray]], list[IntArray]]
"""Hand part `p` the ids wanted from it, `wanted[p]`; returns the ids each part wants from here. *Collective*."""


@dataclass(frozen=True, eq=False)
class PartitionPlan:
    """The nodes and edges of a part, its ghosts, and the rows that it owes to others.

    Local rows follow one order everywhere:

        [0, num_owned)                       owned nodes, by global id
        [num_owned, num_owned + num_ghosts)  ghosts, by (owner, global id)

    Ghosts lie grouped by owner, so a received buffer is already a block of rows.

    Attributes:
        part: This part, in [0, num_parts).
        num_parts: Parts the event is split into.
        policy: Which edges are local: `incoming` or `incident`.
        owned_ids: Global ids of the owned nodes, int64 [num_owned], increasing.
        ghost_ids: Global ids of the ghosts, int64 [num_ghosts].
        edge_ids: Global ids of the local edges, int64 [num_edges], increasing.
        edge_rows: `src` and `dst` rows of each local edge, int64 [2, num_edges].
        edge_owned: Whether this part owns, and so counts, the edge, bool [num_edges]: its `dst` is owned.
        send_rows: Owned rows to send, int64 [num_sent], grouped by receiver.
        send_counts: Rows sent to each part, int64 [num_parts]. Zero is common and legal.
        recv_counts: Ghosts received from each part, int64 [num_parts].
    """

    part: int
    num_parts: int
    policy: EdgePolicy
    owned_ids: IntArray
    ghost_ids: IntArray
    edge_ids: IntArray
    edge_rows: IntArray
    edge_owned: BoolArray
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
        """Rows of a local node table: owned and ghosts."""
        return self.num_owned + self.num_ghosts

    @property
    def num_edges(self) -> int:
        return len(self.edge_ids)

    @cached_property
    def degrees(self) -> IntArray:
        """Local edges that end and that begin at each owned node, int64 [num_owned, 2]; all, of an `incident` plan."""
        ends = (self.edge_rows[1], self.edge_rows[0])
        return np.stack([np.bincount(end, minlength=self.num_local)[: self.num_owned] for end in ends], axis=1)

    @property
    def local_ids(self) -> IntArray:
        """Global id of every local row, int64 [num_local]."""
        return np.concatenate([self.owned_ids, self.ghost_ids])


@dataclass(frozen=True, eq=False)
class LocalEdges:
    """The edges one part computes on, before it knows its ghosts.

    Attributes:
        edge_ids: Global ids, int64 [num_edges], increasing.
        src: Global id of the `src` node of each, int64 [num_edges].
        dst: Global id of the `dst` node of each, int64 [num_edges].
    """

    edge_ids: IntArray
    src: IntArray
    dst: IntArray


def build_plan(
    edges: LocalEdges, owner: IntArray, part: int, num_parts: int, policy: EdgePolicy, ask: Ask
) -> PartitionPlan:
    """Build the plan of one part from its own edges. *Collective* through `ask`.

    Args:
        edges: This part's local edges under `policy`.
        owner: Part of every node of the event, [N], in [0, num_parts); -1 for a node that is not taken at all.
        part: The part to build for. It may own nothing.
        num_parts: Number of parts.
        policy: `incoming`: edges whose `dst` is owned; `incident`: edges with an owned end.
        ask: Tells the other parts what this one needs.

    Raises:
        ValueError: If `owner` names a part that does not exist, an edge names a node that does not, or an edge is not
            local to this part under the policy. Raised before anything is asked.
    """
    return complete_plan(draft_plan(edges, owner, part, num_parts, policy), ask)


def draft_plan(edges: LocalEdges, owner: IntArray, part: int, num_parts: int, policy: EdgePolicy) -> PartitionPlan:
    """The plan of a part that does not know yet what the others need, and sends nothing; see `build_plan`."""
    _check_owner(owner, num_parts)
    _check_local(edges, owner, part, policy)
    return _draft(edges, owner, part, num_parts, policy)


def complete_plan(draft: PartitionPlan, ask: Ask) -> PartitionPlan:
    """A plan that was drafted, with the rows that it sends. *Collective* through `ask`."""
    return _complete(draft, ask(_wanted(draft)))


def plan_slices(wanted: IntArray, bounds: IntArray, part: int, ask: Ask) -> PartitionPlan:
    """Plan how a part gets rows of a tensor that lies in slices over the parts. *Collective* through `ask`.

    Args:
        wanted: Global ids of the rows that the part needs, each any number of times, in any order.
        bounds: First row of each part's slice, and the end of the last, int64 [num_parts + 1].
        part: The part to build for.
        ask: Tells the other parts what this one needs.

    Returns:
        A plan without edges: `owned_ids` is the part's slice, `ghost_ids` what it needs of others' slices.
    """
    first, last, num_parts = bounds[part], bounds[part + 1], len(bounds) - 1
    ghost_ids = np.unique(wanted[(wanted < first) | (wanted >= last)])
    none = np.zeros(0, np.int64)
    draft = PartitionPlan(
        part=part,
        num_parts=num_parts,
        policy="incoming",
        owned_ids=np.arange(first, last),
        ghost_ids=ghost_ids,
        edge_ids=none,
        edge_rows=np.zeros((2, 0), np.int64),
        edge_owned=none.astype(bool),
        send_rows=none,
        send_counts=np.zeros(num_parts, np.int64),
        recv_counts=np.diff(np.searchsorted(ghost_ids, bounds)),
    )
    return complete_plan(draft, ask)


def build_plans(
    edge_index: IntArray, assignment: IntArray, num_parts: int, edge_policy: EdgePolicy
) -> list[PartitionPlan]:
    """Build the plan of every part of one event in one process, for tests and small tools.

    Args:
        edge_index: `src` and `dst` id of each edge, int64 [2, E].
        assignment: Part of each node, [N], in [0, num_parts); -1 for a node that is not taken at all.
        num_parts: Number of parts.
        edge_policy: `incoming` or `incident`: which edges a part computes on.

    Returns:
        One plan per part, in order. A part may own nothing.

    Raises:
        ValueError: If the assignment names a part that does not exist, or an edge a node that does not.
    """
    owner = np.asarray(assignment)
    _check_owner(owner, num_parts)
    _check_ends(edge_index[0], edge_index[1], len(owner))
    local = [select_edges(edge_index, owner, part, edge_policy) for part in range(num_parts)]
    drafts = [_draft(own, owner, part, num_parts, edge_policy) for part, own in enumerate(local)]
    # Each send list is read off the receivers' ghosts. Seen from the sender's own edges
    # it would be wrong: our edges are directed, so need is not mutual.
    wanted = [_wanted(draft) for draft in drafts]
    return [_complete(draft, [ids[draft.part] for ids in wanted]) for draft in drafts]


def select_edges(edge_index: IntArray, owner: IntArray, part: int, policy: EdgePolicy) -> LocalEdges:
    """Pick one part's local edges from all edges of an event, int64 [2, E] in global order."""
    owner_of_src, owner_of_dst = owner[edge_index[0]], owner[edge_index[1]]
    local = owner_of_dst == part
    if policy == "incident":
        local |= owner_of_src == part
    # Neither end may be a node that is not taken at all, as outside of a sector.
    local &= (owner_of_src >= 0) & (owner_of_dst >= 0)
    edge_ids = np.flatnonzero(local)
    return LocalEdges(edge_ids, edge_index[0, edge_ids], edge_index[1, edge_ids])


def _draft(edges: LocalEdges, owner: IntArray, part: int, num_parts: int, policy: EdgePolicy) -> PartitionPlan:
    """The plan of a part that does not know yet what the others need: it sends nothing."""
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
    edge_rows = np.stack([row_of[edges.src], row_of[edges.dst]])
    return PartitionPlan(
        part=part,
        num_parts=num_parts,
        policy=policy,
        owned_ids=owned_ids,
        ghost_ids=ghost_ids,
        edge_ids=edges.edge_ids,
        edge_rows=edge_rows,
        edge_owned=edge_rows[1] < len(owned_ids),
        send_rows=np.zeros(0, np.int64),
        send_counts=np.zeros(num_parts, np.int64),
        recv_counts=np.bincount(owner[ghost_ids], minlength=num_parts).astype(np.int64),
    )


def _wanted(plan: PartitionPlan) -> list[IntArray]:
    """The ghosts that a part needs from each part."""
    return list(np.split(plan.ghost_ids, np.cumsum(plan.recv_counts)[:-1]))


def _complete(plan: PartitionPlan, owed: Sequence[IntArray]) -> PartitionPlan:
    """The plan with what each part asked for: `owed[p]` holds the ids that part `p` needs from here."""
    send_ids = np.concatenate([np.zeros(0, np.int64), *owed])
    if len(strangers := send_ids[~np.isin(send_ids, plan.owned_ids)]):
        raise RuntimeError(
            f"part {plan.part} was asked for node {strangers[0]}, which it does not own; "
            "the parts hold different assignments of one event."
        )
    send_counts = np.array([len(ids) for ids in owed], dtype=np.int64)
    # Owned ids are ascending, and a row is a place among them.
    return replace(plan, send_rows=np.searchsorted(plan.owned_ids, send_ids), send_counts=send_counts)


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
                f"edge {bad} has {name} {ends[bad]} but the event has {num_nodes} nodes; "
                "edge ids are global node ids, counted from 0."
            )


def _check_local(edges: LocalEdges, owner: IntArray, part: int, policy: EdgePolicy) -> None:
    _check_ends(edges.src, edges.dst, len(owner))
    left_out = (owner[edges.src] < 0) | (owner[edges.dst] < 0)
    if left_out.any():
        raise ValueError(
            f"edge {edges.edge_ids[left_out][0]} of part {part} touches a node that no part owns; leave such edges out."
        )
    local = owner[edges.dst] == part
    if policy == "incident":
        local |= owner[edges.src] == part
    if not local.all():
        raise ValueError(
            f"edge {edges.edge_ids[~local][0]} is not local to part {part} under policy {policy!r}; "
            "pass the edges whose dst is owned (incoming) or with an owned end (incident)."
        )
    if len(edges.edge_ids) > 1 and np.diff(edges.edge_ids).min() <= 0:
        raise ValueError(f"the local edges of part {part} are not in increasing order of their global ids; sort them.")
