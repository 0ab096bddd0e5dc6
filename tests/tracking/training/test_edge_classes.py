"""Every edge has the class that its particle gives it, and weighs what its class says."""

from dataclasses import replace

import numpy as np
import pytest
from random_events import random_assignment, random_event
from random_store import write_graph

from domainpar.common.agreement import Refused
from domainpar.testing import run_ranks
from domainpar.tracking.events.graph import Particles
from domainpar.tracking.events.store import EventStore, write_manifest
from domainpar.tracking.training.edge_classes import FAKE, NOT_KNOWN, OTHER, TARGET, UNKNOWN, EdgeRules, edge_classes
from domainpar.tracking.training.inputs import check_edges

PARTICLES = Particles(
    particle_id=np.array([11, 12, 2**60, 14]),
    pt=np.array([0.4, 1.0, float("nan"), 5.0], np.float32),
    eta=np.zeros(4, np.float32),
    vertex=np.zeros((4, 3), np.float32),
    nhits=np.ones(4, np.int32),
    charge=np.ones(4, np.int8),
)


def test_an_event_without_particles_has_no_target_edges():
    with pytest.raises(ValueError, match="needs a particle table"):
        edge_classes(np.array([1]), None, PARTICLES, {"pt": [1, 2]})


def test_edges_are_fake_or_target_or_of_other_particles():
    label = np.array([0, 1, 1, 1, 0, 1], np.uint8)
    particle_of_edge = np.array([12, 12, 11, 2**60, 0, 99])
    classes = edge_classes(label, particle_of_edge, PARTICLES, {"pt": [1, float("inf")]})
    assert classes.tolist() == [FAKE, TARGET, OTHER, OTHER, FAKE, OTHER]
    assert edge_classes(label, None, None, None).tolist() == [FAKE, TARGET, TARGET, TARGET, FAKE, TARGET]
    assert edge_classes(label[:0], particle_of_edge[:0], PARTICLES, {"pt": [1, 2]}).tolist() == []


def test_weights_and_their_total_belong_to_the_classes():
    rules = EdgeRules.by_class(target=3.0, fake=0.5, other=0.25)
    kinds = rules.kinds(np.array([FAKE, OTHER, TARGET, TARGET, FAKE, FAKE], np.int8), None, None)
    assert rules.weights(kinds).tolist() == [0.5, 0.25, 3.0, 3.0, 0.5, 0.5]
    assert rules.count(kinds).tolist() == [0, 0, 0, 3, 2, 1]
    assert rules.count(kinds[:0]).tolist() == [0] * 6
    assert rules.total(rules.count(kinds)) == rules.weights(kinds).sum()


def test_the_weight_of_a_step_is_added_up_in_one_order_whatever_the_weights():
    """Fake, then target, then other: another order could end in another last bit."""
    fake, target, other = 0.1, 0.7, 0.3
    total = EdgeRules.by_class(target, fake, other).total(np.array([0, 0, 0, 1_234_567, 89_123, 77_777]))
    assert total == 1_234_567 * fake + 89_123 * target + 77_777 * other


def _lessons(world, directory, target):
    """The warnings, but that of random edges, which few segments are among; or what was refused."""
    try:
        found = check_edges(EventStore(directory), world, target, None if target is None else "pt: [2, .inf]")
    except Refused as refused:
        return [refused.what]
    return [line for line in found if "no network finds the others" not in line]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_training_events_without_a_true_edge_or_one_of_a_target_are_noticed_by_all_ranks(tmp_path, num_ranks):
    """Of four events one has true edges, and one of them is of a target; a rank may read neither, or nothing at all."""
    target = {"pt": [2.0, float("inf")]}

    def warned(place, fast_event, true_event, conditions):
        records = []
        for seed in range(4):
            graph = random_event(seed, 40, 0 if seed == 2 else 60)
            particles = replace(
                graph.hits.particles, pt=np.full_like(graph.hits.particles.pt, 3 if seed == fast_event else 1)
            )
            hits = replace(graph.hits, particles=particles)
            hits.particle_id[:] = particles.particle_id[0]
            graph = replace(graph, hits=hits, label=np.full(graph.num_edges, seed == true_event, np.uint8))
            records.append(write_graph(tmp_path / place, graph, random_assignment(seed, 40, 3), 3, "train"))
        write_manifest(tmp_path / place, records, {})
        (found,) = {tuple(lines) for lines in run_ranks(_lessons, num_ranks, tmp_path / place, conditions)}
        return [line.partition(f" of {tmp_path / place}: ")[::2] for line in found]

    assert warned("good", 1, 1, target) == []
    ((said, _),) = warned("slow", 0, 1, target)
    assert "no edge of a target (--target 'pt: [2, .inf]') in 4 training events" in said
    assert warned("slow for nobody", 0, 1, None) == []
    ((said, _),) = warned("false", 1, 2, target)
    assert "no true edge in 4 training events" in said


def test_edges_of_which_the_truth_is_not_known_weigh_nothing_whatever_the_rules():
    classes = edge_classes(np.array([1, -1, 0, -1]), None, None, None)
    assert classes.tolist() == [TARGET, UNKNOWN, FAKE, UNKNOWN]
    for rules in (
        EdgeRules.by_class(2.0, 3.0, 4.0),
        EdgeRules.of([(5.0, {}), (7.0, {"y": [0, 1]}), (9.0, {"y": ["is_not", 1]})]),
        EdgeRules.of([]),
    ):
        weights = rules.weights(rules.kinds(classes, None, None))
        assert weights[1] == weights[3] == 0
        assert weights[2] != 0
        assert rules.count(rules.kinds(classes, None, None))[NOT_KNOWN] == 2
