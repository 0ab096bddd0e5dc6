"""Rules weigh every edge as they say, the last one winning, and the loss of a step is divided by what they weigh."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiled import TiledEvent
from torch.nn import functional as F

from domainpar.parallel.integer_sums import IntegerSums
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.config.texts import Weighting
from domainpar.tracking.events.graph import Particles
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.edge_classes import FAKE, TARGET, EdgeRules, edge_classes
from domainpar.tracking.training.inputs import edge_weights_of
from domainpar.tracking.training.loss import edge_loss
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.sampler import samples_of

INF = float("inf")
NAN = float("nan")

PARTICLES = Particles(
    particle_id=np.array([7, 3, 2**60, 11]),
    pt=np.array([0.4, 1.0, NAN, 5.0], np.float32),
    eta=np.array([0.0, -1.0, 2.0, 3.0], np.float32),
    vertex=np.array([[3, 4, 1], [0, 0, -2], [NAN, 0, 0], [30, 40, 9]], np.float32),
    nhits=np.array([9, 3, 12, 1], np.int32),
    charge=np.array([1, -1, 0, 1], np.int8),
)
QUANTITIES = {
    particle: {"pt": pt, "eta": eta, "nhits": nhits, "radius": radius}
    for particle, pt, eta, nhits, radius in zip(
        PARTICLES.particle_id.tolist(), PARTICLES.pt.tolist(), PARTICLES.eta.tolist(), PARTICLES.nhits.tolist(),
        [5.0, 0.0, NAN, 50.0],
    )
}  # fmt: skip


def meets(value: float, condition: object) -> bool:
    """One condition on one number, spelled out."""
    if value != value:
        return False
    match condition:
        case bool() | int() | float():
            return value == condition
        case ["in", choices]:
            return value in choices
        case ["not_in", choices]:
            return value not in choices
        case ["not_within", [low, high]]:
            return not low <= value <= high
        case [low, high]:
            return low <= value <= high
    raise AssertionError(condition)


def weight_of(label: int, particle: int, rules) -> float:
    """The weight of one edge, by the words of the documentation."""
    weight = 0.0 if label else 1.0
    for candidate, conditions in rules:
        holds = True
        for name, condition in conditions.items():
            if name == "y":
                holds &= meets(label, condition)
            else:
                known = label == 1 and particle in QUANTITIES
                holds &= known and meets(QUANTITIES[particle][{"eta_particle": "eta"}.get(name, name)], condition)
        if holds:
            weight = candidate
    return weight


CONDITIONS = st.fixed_dictionaries(
    {},
    optional={
        "y": st.sampled_from([True, False, 1, 0]),
        "pt": st.sampled_from([[1.0, INF], [0.0, 0.5], ["not_within", [0.3, 2.0]]]),
        "eta_particle": st.sampled_from([[-1.5, 2.5], ["not_in", [0.0]]]),
        "nhits": st.sampled_from([3, [3, 10], ["in", [1, 12]]]),
        "radius": st.sampled_from([[0.0, 10.0], ["not_within", [0.0, 10.0]]]),
    },
)
RULES = st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.1, 2.0]), CONDITIONS), max_size=4)
EDGES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([7, 3, 2**60, 11, 99, 0])), max_size=12)


@given(RULES, EDGES)
@settings(max_examples=150)
def test_an_edge_weighs_what_the_last_rule_says_that_holds_for_it(rules, edges):
    label = np.array([label for label, _ in edges], np.uint8)
    particle = np.array([particle for _, particle in edges], np.int64)
    weighting = EdgeRules.of(rules)
    kinds = weighting.kinds(edge_classes(label, None, None, None), particle, PARTICLES)
    expected = [weight_of(*edge, rules) for edge in edges]
    assert weighting.weights(kinds).tolist() == expected
    assert weighting.total(weighting.count(kinds)) == pytest.approx(sum(map(abs, expected)))


def test_a_false_edge_meets_no_condition_on_a_particle_nor_its_opposite():
    for condition in ([0, INF], ["not_within", [0, 1]]):
        rules = EdgeRules.of([(5.0, {"pt": condition})])
        assert rules.weights(rules.kinds(np.array([FAKE]), np.array([11]), PARTICLES)).tolist() == [1.0]


def test_rules_on_labels_alone_need_no_particles():
    rules = EdgeRules.of(Weighting("[{weight: 3, conditions: {y: true}}, {weight: 0.5, conditions: {y: false}}]").value)
    assert not rules.on_particles
    rules.check(None)
    kinds = rules.kinds(np.array([TARGET, FAKE]), None, None)
    assert rules.weights(kinds).tolist() == [3.0, 0.5]


def test_what_an_event_does_not_tell_is_refused():
    rules = EdgeRules.of([(2.0, {"y": True, "pt": [1, INF]})])
    with pytest.raises(ValueError, match="pt of particles.*no particle table"):
        rules.kinds(np.array([TARGET]), None, PARTICLES)
    with pytest.raises(ValueError, match="particle table"):
        rules.check(None)
    with pytest.raises(ValueError, match="on 'colour', which is unknown"):
        EdgeRules.of([(2.0, {"colour": 1})]).check(PARTICLES)
    with pytest.raises(ValueError, match="not understood"):
        EdgeRules.of([(2.0, {"y": "yes"})]).check(PARTICLES)


# --- in a step -------------------------------------------------------------------------------------------------------

THREE_CLASSES = EdgeRules.by_class(target=3.0, fake=0.5, other=0.25)
FAST = {"pt": [0.5, INF]}
SAME_BY_RULES = EdgeRules.of([(0.5, {"y": False}), (0.25, {"y": True}), (3.0, {"y": True, "pt": [0.5, INF]})])


def _loaded(world, path, edge_weights):
    loader = PartLoader(EventStore(path), world, edge_weights=edge_weights, target=FAST, dtype=torch.float64)
    parts = [loader.load(sample) for sample in samples_of(EventStore(path).events(), None)]
    total = edge_weights.total(loader.total([part.counted for part in parts], len(parts)).kinds)
    return [(part.weights.tolist(), part.classes.tolist()) for part in parts], total


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_classes_written_as_rules_give_the_same_bits_on_any_number_of_ranks(store, num_ranks):
    by_class = run_ranks(_loaded, num_ranks, store, THREE_CLASSES)
    by_rules = run_ranks(_loaded, num_ranks, store, SAME_BY_RULES)
    assert [parts for parts, _ in by_class] == [parts for parts, _ in by_rules]
    assert len({total for _, total in by_rules}) == 1
    assert by_rules[0][1] == pytest.approx(by_class[0][1], rel=1e-14)


def test_an_empty_share_of_a_step_counts_as_many_kinds_as_others(store):
    def kinds(world):
        return PartLoader(EventStore(store), world, edge_weights=SAME_BY_RULES).total([], 0).kinds.tolist()

    assert run_ranks(kinds, 2) == [[0] * (3 + len(SAME_BY_RULES.rules))] * 2


def _loss(world, event, logits, weights):
    loss_sum = IntegerSums(1)
    graph = event.part(world.transport, event.grouping("random", world.size), torch.float64).graph
    ids = torch.from_numpy(graph.plan.edge_ids)
    gradient = edge_loss(logits[ids], graph, weights[ids], float(weights.abs().sum()), loss_sum)
    loss_sum.reduce(world.transport)
    return float(loss_sum.total()), ids, gradient


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_edge_of_negative_weight_is_taught_as_false(num_ranks):
    event = TiledEvent.random(0, 40, 200, num_tiles=5, reach=2)
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(0, 3, 200)).requires_grad_()
    weights = torch.from_numpy(rng.choice([-2.0, -0.5, 0.0, 1.0], 200))
    label = torch.from_numpy(event.graph.label[event.order.original_position]).double()
    taught = torch.where(weights < 0, 0.0, label)
    summed = F.binary_cross_entropy_with_logits(logits, taught, weight=weights.abs(), reduction="sum")
    expected = summed / weights.abs().sum()
    expected.backward()
    for loss, ids, gradient in run_ranks(_loss, num_ranks, event, logits.detach(), weights):
        assert loss == pytest.approx(float(expected.detach()), rel=1e-13)
        torch.testing.assert_close(gradient, logits.grad[ids], rtol=1e-13, atol=1e-16)


# --- from a configuration --------------------------------------------------------------------------------------------


def test_a_configuration_gives_classes_or_rules():
    assert edge_weights_of(TrainConfig(true_weight=2.0)) == EdgeRules.by_class(2.0, 1.0, 0.0)
    text = "[{weight: 2, conditions: {y: true, pt: [1, .inf]}}]"
    assert edge_weights_of(TrainConfig(weighting=text)) == EdgeRules.of([(2.0, {"y": True, "pt": [1, INF]})])


def test_classes_of_metrics_are_those_of_the_target_whatever_the_weights(store):
    parts, _ = run_ranks(_loaded, 1, store, EdgeRules.of([(-1.0, {"y": True})]))[0]
    events = EventStore(store)
    for (_, classes), record in zip(parts, events.events()):
        with events.open(record) as event:
            every = np.arange(event.num_edges)
            particle = event.read_nodes("particle_id", event.read_edges("dst", every))
            expected = edge_classes(event.read_edges("label", every), particle, event.particles(), FAST)
        assert classes == expected.tolist()
