"""Judgements of events, and the sums over the events of a split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_run import drawn

from domainpar.tracking.config import InferConfig
from domainpar.tracking.events.own_events import InMaps
from domainpar.tracking.events.store import StoredEvent, WholeEvent, event_file_name, write_event
from domainpar.tracking.reco.event_scores import Scores
from domainpar.tracking.reco.performance.lost import REASONS
from domainpar.tracking.reco.tracks import TrackOptions
from domainpar.tracking.scoring.event_metrics import EventMetrics, evaluator
from domainpar.tracking.scoring.event_tracks import with_tracks
from domainpar.tracking.scoring.scorer import Outcome
from domainpar.tracking.training.tasks import EDGES


def evaluated(path, graph, logits, num_tiles=8, **options):
    """The record of an event of so many tiles, and its evaluation with these logits; NaN for an edge without one."""
    file = path / event_file_name(graph.hits.event_id)
    record = replace(write_event(file, graph, np.arange(graph.num_nodes) % num_tiles, num_tiles), split="test")
    chosen = TrackOptions(method="cc", stitch=False, **options)
    evaluate = evaluator(InferConfig(tracks="cc"), None, EDGES, [record], InMaps(frozenset()), chosen)
    logit = np.array(logits, np.float32)
    columns = np.nan_to_num(logit), 1 / (1 + np.exp(-logit)), ~np.isnan(logit)
    scores = Scores(graph.hits.event_id, graph.hits.hit_id, graph.edge_index, *columns)
    with StoredEvent(file) as event:
        return record, evaluate(event, with_tracks(WholeEvent(event), scores, chosen))


@pytest.mark.parametrize("without", [[], [0], [1], [0, 1]])
def test_segments_are_summed_where_all_events_of_the_split_know_them(tmp_path, without):
    both = [
        evaluated(tmp_path, drawn(6, num_edges=5, positions=i not in without, event_id=str(i)), [2, 2, 2, -2, -2])
        for i in range(2)
    ]
    outcomes = {record.event: Outcome(None, 0.0, evaluation) for record, evaluation in both}
    metrics = EventMetrics([record for record, _ in both], outcomes)
    segments = {"segments": 10, "in_graph": 10, "passing": 6}
    assert metrics.metrics()["test"].get("segments") == (None if without else segments)
    assert metrics.performance()["test"]["network"].events == 2  # tracks are counted all the same


def test_borders_are_those_of_as_many_sectors_as_the_event_with_fewest_tiles_has(tmp_path):
    for num_tiles, sectors in ((3, 3), (8, 8), (12, 8)):
        _, evaluation = evaluated(tmp_path, drawn(24, num_edges=23), [1] * 23, num_tiles)
        assert {counts["border_sectors"] for counts in evaluation["tracks"].values()} == {sectors}


@pytest.mark.parametrize(
    ("reason", "perfect", "num_edges", "logits", "options"),
    [
        (None, None, 5, [1, 1, 1, 1, 1], {}),
        ("edges", "edges", 3, [1, 1, 1], {}),
        ("score", None, 5, [1, 1, -1, 1, 1], {}),
        (None, None, 5, [1, 1, -1, 1, 1], {"score_cut": 0.2}),
        ("score", "score", 5, [1, 1, np.nan, 1, 1], {"score_cut": 0.0}),
        ("builder", "builder", 5, [1, 1, 1, 1, 1], {"min_hits": 7}),
        ("quality", "quality", 5, [1, 1, 1, 1, 1], {"min_quality": 100.0}),
    ],
)
def test_the_reason_of_a_loss_is_told_of_the_network_and_of_perfect_scores(
    tmp_path, reason, perfect, num_edges, logits, options
):
    evaluation = evaluated(tmp_path, drawn(6, num_edges=num_edges), logits, **options)[1]
    for finder, expected in (("network", reason), ("perfect_scores", perfect)):
        for counts in evaluation["tracks"][finder]["styles"].values():
            assert counts["lost"] == dict.fromkeys(REASONS, 0) | ({} if expected is None else {expected: 1})
