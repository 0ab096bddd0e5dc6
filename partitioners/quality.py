"""Quality of an assignment: the edges and tracks that it cuts, and the nodes, edges and ghosts of each part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioners.topology import IntArray, check_assignment, check_edge_index


@dataclass(frozen=True, eq=False)
class Quality:
    """Counts for one assignment of nodes to P parts.

    `incoming` and `incident` are the two edge policies: a part computes on the edges into its nodes, or on every edge
    that touches them. `incident` counts a cut edge on both sides.

    Attributes:
        owned_nodes: Nodes of each part, int64 [P].
        owned_edges: Edges into the nodes of each part, int64 [P]. These are the local edges under `incoming`.
        incident_edges: Edges with at least one end in the part: the local edges under `incident`, int64 [P].
        inner_edges: Edges with both ends in the part, int64 [P]. They touch no ghost, under either policy.
        incoming_ghosts: Foreign nodes that send an edge into the part, int64 [P].
        incident_ghosts: Foreign nodes that share an edge with the part, int64 [P].
        neighbours: Parts that own an incident ghost of the part, int64 [P].
    """

    owned_nodes: IntArray
    owned_edges: IntArray
    incident_edges: IntArray
    inner_edges: IntArray
    incoming_ghosts: IntArray
    incident_ghosts: IntArray
    neighbours: IntArray

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
        return _ratio(self.cut_edges, self.num_edges)

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
        return _ratio(int(self.incident_ghosts.sum()), int(self.owned_nodes.sum()))


@dataclass(frozen=True)
class TruthCut:
    """True segments and tracks that an assignment cuts.

    Attributes:
        segments: True edges.
        segments_cut: Those with ends in different parts.
        tracks: Particles with at least one true edge.
        tracks_cut: Those with at least one true edge cut.
    """

    segments: int
    segments_cut: int
    tracks: int
    tracks_cut: int


def measure(edge_index: IntArray, assignment: IntArray, num_parts: int) -> Quality:
    """Count what an assignment of nodes to parts cuts and borrows.

    Args:
        edge_index: `src` and `dst` id of each edge, int64 [2, E].
        assignment: Part of each node, [N], in [0, num_parts).
        num_parts: Number of parts P.

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


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
