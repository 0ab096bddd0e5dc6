"""Segments of a part: each pair of hits once, outward, the best edge standing for all of them."""

import numpy as np
import plainly
import pytest
from test_tracks_on_ranks import random_logits, sparse_event, stored

from domainpar.parallel.part_loading import load_part
from domainpar.reco.tracks.segments import LocalHits, passing_segments
from domainpar.testing import run_ranks


def segments_on(world, event, logits, score):
    """Segments of a part by the user's rows of their hits: logit, position, whether this part owns them."""
    plan = load_part(event, world.domain, grouping="random").graph.plan
    hits = LocalHits.read(event, plan)
    local = logits[event.read_edges("original_position", plan.edge_ids)]
    found = passing_segments(local, plan, event, hits, score)
    ends = zip(hits.row[found.inner].tolist(), hits.row[found.outer].tolist())
    return dict(zip(ends, zip(found.logit.tolist(), found.position.tolist(), found.owned.tolist()), strict=True))


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_each_pair_of_hits_has_its_best_edge_on_every_part_that_holds_it(tmp_path, seed, num_ranks, positions):
    graph = sparse_event(seed, 60, 400, positions=positions)
    logits = np.round(random_logits(graph, seed, 1.0))  # several edges of a pair often say the same
    with stored(tmp_path, graph) as event:
        parts = run_ranks(segments_on, num_ranks, event, logits, 0.3)
    distance = (graph.hits.position.astype(np.float64) ** 2).sum(axis=1).tolist() if positions else None
    expected = plainly.segments_of(graph.edge_index, logits, distance, 0.3)
    times_owned = dict.fromkeys(expected, 0)
    for part in parts:
        for ends, (logit, position, owned) in part.items():
            assert (logit, position) == expected[ends]
            times_owned[ends] += owned
    assert set(times_owned.values()) == {1}


def test_hits_equally_far_out_are_ordered_as_the_user_had_them(tmp_path):
    graph = sparse_event(1, 50, 200)
    graph.hits.position[:] = 7.0
    with stored(tmp_path, graph) as event:
        (found,) = run_ranks(segments_on, 1, event, np.full(200, 3, np.float32), 0.5)
    assert len(found) > 100
    assert all(inner < outer for inner, outer in found)
