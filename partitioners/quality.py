"""Quality of an assignment: the edges and tracks that it cuts, and the nodes, edges and ghosts of each part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioners.topology import IntArray, check_assignment, check_edge_index


@dataclass(frozen=True, eq=False)
class Quality:
    """Counts for one assignment of nodes to P parts, each int64 [P].

    `incoming` and `incident` are the two edge policies: a part computes on the edges into its nodes, or on every edge
    that touches them. `incident` counts a cut edge on both sides.
    """

    owned_nodes: IntArray
    owned_edges: IntArray  # into the nodes of the part: the local edges under `incoming`
    incident_edges: IntArray  # with at least one end in the part: the local edges under `incident`
    inner_edges: IntArray  # with both ends in the part: they touch no ghost, under either policy
    incoming_ghosts: IntArray  # foreign nodes that send an edge into the part
    incident_ghosts: IntArray  # foreign nodes that share an edge with the part
    neighbours: IntArray  # parts that own an incident ghost of the part

    @property
    def num_edges(self) -> int:
        """Edges of the event, each counted once."""
        return int(self.owned_edges.sum())

    @property
    def cut_edges(self) -> int:
        """Edges whose two ends lie in different parts."""
        return self.num_edges - int(self.inner_edges.sum())

    @property
    def cut_share(self) -> float:
        """Cut edges / edges; 0 without edges."""
        return self.cut_edges / max(self.num_edges, 1)

    @property
    def node_imbalance(self) -> float:
        """Largest part / mean part, in owned nodes; 1 without nodes."""
        return imbalance(self.owned_nodes)

    @property
    def edge_imbalance(self) -> float:
        """Largest part / mean part, in owned edges; 1 without edges."""
        return imbalance(self.owned_edges)

    @property
    def incident_imbalance(self) -> float:
        """Largest part / mean part, in incident edges: the work of a model that sums at both ends."""
        return imbalance(self.incident_edges)

    @property
    def incident_ghost_ratio(self) -> float:
        """Ghosts / owned nodes over all parts, `incident`."""
        return int(self.incident_ghosts.sum()) / max(int(self.owned_nodes.sum()), 1)


@dataclass(frozen=True)
class TruthCut:
    """True segments and tracks that an assignment cuts."""

    segments: int  # true edges
    segments_cut: int  # those with ends in different parts
    tracks: int  # particles with at least one true edge
    tracks_cut: int  # those with at least one true edge cut


def measure(edge_index: IntArray, assignment: IntArray, num_parts: int) -> Quality:
    """Count what the parts of nodes, [N], in [0, num_parts), cut of the edges, int64 [2, E], and borrow.

    Raises:
        ValueError: If the assignment names a part that does not exist, or an edge a node that does not.
    """
    check_edge_index(edge_index, len(assignment))
    check_assignment(assignment, len(assignment), num_parts)
    src_part, dst_part = assignment.astype(np.int64)[edge_index]
    cut = np.flatnonzero(src_part != dst_part)
    (src, dst), src_part_cut, dst_part_cut = edge_index[:, cut], src_part[cut], dst_part[cut]
    num_nodes = len(assignment)
    incoming = np.unique(dst_part_cut * num_nodes + src)
    incident = np.union1d(incoming, src_part_cut * num_nodes + dst)
    links = np.unique(incident // max(num_nodes, 1) * num_parts + assignment[incident % max(num_nodes, 1)])
    owned_edges = np.bincount(dst_part, minlength=num_parts)
    return Quality(
        owned_nodes=np.bincount(assignment, minlength=num_parts),
        owned_edges=owned_edges,
        incident_edges=owned_edges + np.bincount(src_part_cut, minlength=num_parts),
        inner_edges=owned_edges - np.bincount(dst_part_cut, minlength=num_parts),
        incoming_ghosts=np.bincount(incoming // max(num_nodes, 1), minlength=num_parts),
        incident_ghosts=np.bincount(incident // max(num_nodes, 1), minlength=num_parts),
        neighbours=np.bincount(links // num_parts, minlength=num_parts),
    )


def measure_truth(
    edge_index: IntArray, assignment: IntArray, label: IntArray, particle_id: IntArray | None
) -> TruthCut:
    """Count the true segments and the tracks that an assignment cuts.

    Args:
        edge_index: `src` and `dst` id of each edge, int64 [2, E].
        assignment: Part of each node, [N].
        label: Above 0 for a true segment, [E]; set others to 0 to count a selection only.
        particle_id: Particle of each node, [N]; a track is a particle with a true segment. None: no tracks are known.
    """
    src, dst = edge_index[:, np.flatnonzero(label > 0)]
    cut = assignment[src] != assignment[dst]
    tracks, tracks_cut = (0 if particle_id is None else len(np.unique(particle_id[ends])) for ends in (dst, dst[cut]))
    return TruthCut(len(src), int(np.count_nonzero(cut)), tracks, tracks_cut)


def imbalance(counts: IntArray) -> float:
    """Return largest / mean; 1 where all are 0."""
    return float(counts.max() / counts.mean()) if counts.any() else 1.0
