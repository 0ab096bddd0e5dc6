"""Edge metrics against brute force, the same integers however the edges are spread over parts and ranks."""

from dataclasses import asdict

import numpy as np
import pytest

from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.training.edge_classes import FAKE, OTHER, TARGET
from domainpar.tracking.training.edge_counting import EdgeMetrics
from domainpar.tracking.training.metrics import EDGE_METRICS, EdgeCounts, metrics_of


def scored_edges(seed, count=300, ties=True):
    """Logits with many ties, among them some at the cut of exactly 0, and classes."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, count)
    return (np.round(logits) if ties else logits), rng.choice([FAKE, TARGET, OTHER], count, p=[0.6, 0.25, 0.15])


def brute_force(logits, classes):
    """Every metric as its definition reads, pair by pair."""
    scores = 1 / (1 + np.exp(-logits))
    passing, target = scores > 0.5, classes == TARGET
    efficiency = np.sum(passing & target) / np.sum(target)
    purity = np.sum(passing & target) / (np.sum(passing) - np.sum(passing & (classes == OTHER)))
    wins = [(a > b) + 0.5 * (a == b) for a in logits[target] for b in logits[~target]]
    return {"edge_efficiency": efficiency, "edge_purity": purity, "edge_auc_pooled": float(np.mean(wins))}


def counted(logits, classes, transport=None):
    metrics = EdgeMetrics()
    metrics.add(logits, classes)
    return metrics.count(transport or World.alone().transport)


def auc(counts):
    return metrics_of(counts)["edge_auc_pooled"]


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_efficiency_purity_and_auc_are_those_of_their_definitions(seed, ties):
    logits, classes = scored_edges(seed, ties=ties)
    counts = counted(logits, classes)
    found = {metric.name: metric.value(counts) for metric in EDGE_METRICS}
    assert found == pytest.approx(brute_force(logits, classes), rel=1e-12)
    assert (counts.edges, counts.targets, counts.not_scored) == (300, np.sum(classes == TARGET), 0)


def test_a_score_of_exactly_one_half_does_not_pass():
    counts = counted(np.array([0.0, 0.0]), np.array([TARGET, FAKE]))
    assert (counts.passing, auc(counts)) == (0, 0.5)


def test_the_area_is_one_for_a_perfect_order_and_zero_for_its_opposite():
    classes = np.array([TARGET, TARGET, FAKE, OTHER, FAKE])
    assert auc(counted(np.array([5.0, 4.0, 3.0, 2.0, 1.0]), classes)) == 1.0
    assert auc(counted(-np.array([5.0, 4.0, 3.0, 2.0, 1.0]), classes)) == 0.0


def _count_on_ranks(world, logits, classes):
    metrics = EdgeMetrics()
    mine = np.arange(len(logits)) % (world.size + 1)  # two pieces on rank 0, to be added one after the other
    for piece in (world.rank, world.size) if world.is_root else (world.rank,):
        if world.rank != 2:  # which holds nothing
            metrics.add(logits[mine == piece], classes[mine == piece], not_scored=piece + 1)
    return asdict(metrics.count(world.transport))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_counts_are_the_same_on_every_rank_and_over_any_number_of_them(num_ranks):
    logits, classes = scored_edges(5)
    taken = np.arange(len(logits)) % (num_ranks + 1) != 2 if num_ranks > 2 else np.ones(len(logits), bool)
    found = run_ranks(_count_on_ranks, num_ranks, logits, classes)
    expected = asdict(counted(logits[taken], classes[taken]))
    pieces = [piece for piece in range(num_ranks + 1) if num_ranks <= 2 or piece != 2]
    assert found == [{**expected, "not_scored": sum(piece + 1 for piece in pieces)}] * num_ranks


def test_the_precision_of_the_logits_does_not_matter():
    logits, classes = scored_edges(2, ties=False)
    assert counted(logits.astype(np.float32), classes) == counted(logits.astype(np.float32).astype(np.float64), classes)


@pytest.mark.parametrize("classes", [[], [FAKE, FAKE], [TARGET, TARGET]])
def test_where_there_is_nothing_to_divide_by_the_record_says_none(classes):
    found = metrics_of(counted(-np.ones(len(classes)), np.array(classes, int)))
    assert found["edge_auc_pooled"] is None
    assert found["edge_purity"] is None


def test_a_record_says_what_edges_are_counted_against():
    counts = EdgeCounts(edges=10, targets=4, found=3, passing=5, passing_other=1, ordered=40, not_scored=7)
    assert metrics_of(counts) == {
        "edge_efficiency": 0.75,
        "edge_purity": 0.75,
        "edge_auc_pooled": 40 / 48,
        "counted_against": "candidate edges",
        "edges": 10,
        "edges_not_scored": 7,
        "target_edges": 4,
    }
    assert metrics_of(counts, in_sectors=True)["counted_against"] == (
        "candidate edges inside sectors (approximate: naive mode)"
    )
