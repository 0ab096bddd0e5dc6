"""That a split can prove something: no rank holds all nodes, as a halo that holds everything is right by chance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from domainpar.plan import EdgePolicy, PartitionPlan, build_plans


def check_no_rank_holds_all(
    edge_index: npt.ArrayLike, assignment: npt.ArrayLike, num_ranks: int, policy: EdgePolicy
) -> None:
    """Every rank lacks a node that has an edge to another one: what takes local rows for all of them is seen there.

    Args:
        edge_index: `src` and `dst` of each edge, [2, E].
        assignment: The rank of each node, [N].
        num_ranks: Ranks, some of which may own nothing.
        policy: Which edges a rank computes on.
    """
    plans = build_plans(np.asarray(edge_index), np.asarray(assignment), num_ranks, policy)
    assert no_rank_holds_all(map(_held, plans)), (
        f"one of {num_ranks} ranks ({policy}) holds all nodes that have edges: they hold "
        f"{[plan.num_local for plan in plans]} of {len(np.asarray(assignment))}. Such a split proves nothing: take "
        "more nodes or fewer cut edges"
    )


def check_halves(edge_indices: Sequence[npt.ArrayLike], tiles: Sequence[npt.ArrayLike]) -> None:
    """Of one event at least, each of two ranks that share its tiles, in their order, lacks a node.

    Args:
        edge_indices: Of each event `src` and `dst` of its edges, [2, E].
        tiles: Of each event the tile of each node, [N].
    """
    halves = [np.asarray(each) > np.median(np.asarray(each)) for each in tiles]
    plans = [
        build_plans(np.asarray(edges), half, 2, "incident") for edges, half in zip(edge_indices, halves, strict=True)
    ]
    assert any(no_rank_holds_all(map(_held, both)) for both in plans), (
        "of each event one of two ranks holds all nodes that have edges. What ranks make of this store proves nothing: "
        "take more nodes or fewer edges; where nothing is compared say so (compared=False)"
    )


def no_rank_holds_all(of_ranks: Iterable[tuple[npt.ArrayLike, npt.ArrayLike]]) -> bool:
    """Whether each rank lacks a node that has an edge to another one.

    Args:
        of_ranks: Global ids of the nodes that each rank holds, and of both ends of its edges, [2, num_edges].
    """
    of_ranks = list(of_ranks)
    ends = np.concatenate([np.asarray(theirs, np.int64).reshape(2, -1) for _, theirs in of_ranks], axis=1)
    linked = np.unique(ends[:, ends[0] != ends[1]])
    return all(len(np.setdiff1d(linked, np.asarray(held))) for held, _ in of_ranks)


def _held(plan: PartitionPlan) -> tuple[npt.ArrayLike, npt.ArrayLike]:
    return plan.local_ids, plan.local_ids[plan.edge_rows]
