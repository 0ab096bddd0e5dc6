"""Every edge has the class that its particle gives it, and weighs what its class says."""

import numpy as np
import pytest

from domainpar.events.graph import Particles
from domainpar.training.targets import FAKE, OTHER, TARGET, EdgeClasses, class_counts, edge_classes

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
    weights = EdgeClasses(target=3.0, fake=0.5, other=0.25)
    classes = np.array([FAKE, OTHER, TARGET, TARGET, FAKE, FAKE], np.int8)
    assert weights.weights(classes).tolist() == [0.5, 0.25, 3.0, 3.0, 0.5, 0.5]
    assert class_counts(classes).tolist() == [3, 2, 1]
    assert class_counts(classes[:0]).tolist() == [0, 0, 0]
    assert weights.total(class_counts(classes)) == weights.weights(classes).sum()
