import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import topologies

from partitioners import Random
from partitioners.quality import imbalance, measure, measure_truth

#   part 0: 0 1 2       part 1: 3 4       part 2: (nothing)       part 3: 5
#   0 -> 1   1 -> 3   1 -> 4   2 -> 3   2 -> 3   4 -> 4   5 -> 0
EDGES = np.array([[0, 1, 1, 2, 2, 4, 5], [1, 3, 4, 3, 3, 4, 0]])
PARTS = np.array([0, 0, 0, 1, 1, 3], np.int32)


def test_a_drawn_event_is_counted_right():
    quality = measure(EDGES, PARTS, 4)
    assert quality.cut_edges == 5
    assert quality.owned_nodes.tolist() == [3, 2, 0, 1]
    assert quality.owned_edges.tolist() == [2, 5, 0, 0]
    assert quality.incident_edges.tolist() == [6, 5, 0, 1]
    assert quality.inner_edges.tolist() == [1, 1, 0, 0]
    assert quality.incoming_ghosts.tolist() == [1, 2, 0, 0]
    assert quality.incident_ghosts.tolist() == [3, 2, 0, 1]
    assert quality.neighbours.tolist() == [2, 1, 0, 1]
    assert quality.cut_share == 5 / 7
    assert quality.edge_imbalance == 5 / (7 / 4)
    assert quality.node_imbalance == 3 / (6 / 4)
    assert quality.incident_imbalance == 6 / (12 / 4)
    assert quality.incident_ghost_ratio == 6 / 6


@settings(max_examples=150)
@given(topologies(), st.integers(1, 6), st.integers(0, 99))
def test_counts_agree_with_those_of_plain_loops(topology, num_parts, seed):
    part = Random(seed)(topology, num_parts)
    edges = [(src, dst) for src, dst in topology.edge_index.T.tolist()]
    quality = measure(topology.edge_index, part, num_parts)
    assert quality.num_edges == len(edges)
    for p in range(num_parts):
        into = [(src, dst) for src, dst in edges if part[dst] == p]
        local = [(src, dst) for src, dst in edges if p in (part[src], part[dst])]
        ghosts = {node for edge in local for node in edge if part[node] != p}
        assert quality.owned_nodes[p] == np.count_nonzero(part == p)
        assert quality.owned_edges[p] == len(into)
        assert quality.incident_edges[p] == len(local)
        assert quality.inner_edges[p] == sum(part[src] == part[dst] == p for src, dst in edges)
        assert quality.incoming_ghosts[p] == len({src for src, _ in into if part[src] != p})
        assert quality.incident_ghosts[p] == len(ghosts)
        assert quality.neighbours[p] == len({part[node] for node in ghosts})


def test_an_event_without_edges_or_nodes_has_plain_ratios():
    quality = measure(np.zeros((2, 0), np.int64), np.zeros(0, np.int32), 3)
    assert quality.cut_share == 0
    assert quality.incident_ghost_ratio == 0
    assert quality.node_imbalance == quality.edge_imbalance == 1


def test_true_segments_and_tracks_are_cut_where_their_edges_are():
    particle = np.array([9, 9, 7, 7, 5, 9])
    label = np.array([1, 0, 0, 1, 1, 0, 1])  # track 9 has edges 0 (whole) and 6 (cut); track 7 has 3 and 4 (cut)
    truth = measure_truth(EDGES, PARTS, label, particle)
    assert (truth.segments, truth.segments_cut, truth.tracks, truth.tracks_cut) == (4, 3, 2, 2)
    whole = measure_truth(EDGES, PARTS, np.array([1, 0, 0, 0, 0, 0, 0]), particle)
    assert (whole.segments, whole.segments_cut, whole.tracks, whole.tracks_cut) == (1, 0, 1, 0)


def test_imbalance_is_largest_over_mean():
    assert imbalance(np.array([1, 2, 3])) == 1.5
    assert imbalance(np.array([0, 0])) == 1.0


def test_an_assignment_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="blocks 0 to 3 .*2"):
        measure(EDGES, PARTS, 2)
    with pytest.raises(ValueError, match="edge 6 .*5 and 0 .*5 nodes"):
        measure(EDGES, PARTS[:5], 4)
