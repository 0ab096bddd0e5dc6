"""Which samples a step takes is a function of seed and epoch; who computes them is balanced by cost."""

import re
from dataclasses import replace
from itertools import chain

import invariance
import pytest
from marks import slow
from random_store import write_random_store

from domainpar.testing import run_ranks
from domainpar.tracking.config import ConfigError, TrainConfig
from domainpar.tracking.events.store import EventRecord
from domainpar.tracking.part_loading import Sector
from domainpar.tracking.training.sampler import Sample, deal, samples_of, steps_of_epoch


def record(name, num_edges):
    return EventRecord(name, f"event{name}", 0, "", 10, num_edges, 4, True, ("r",), ())


RECORDS = [record(name, edges) for name, edges in zip("abcdefg", (700, 100, 900, 100, 100, 400, 0), strict=True)]


def test_an_event_is_one_sample_or_its_sectors_are_samples_of_their_own():
    assert samples_of(RECORDS, None) == [Sample(one) for one in RECORDS]
    sectors = samples_of(RECORDS[:2], 3)
    assert [(sample.record.event, sample.sector) for sample in sectors] == [
        (event, Sector(number, 3)) for event in "ab" for number in range(3)
    ]
    assert [sample.name for sample in sectors[:2]] == ["a sector 0 of 3", "a sector 1 of 3"]
    assert (Sample(RECORDS[0]).cost, sectors[0].cost) == (700, 233)
    assert samples_of([], 3) == []


@pytest.mark.parametrize("per_step", [1, 2, 3, 7, 20])
def test_an_epoch_takes_every_sample_once_and_only_its_last_step_is_smaller(per_step):
    samples = samples_of(RECORDS, None)
    steps = steps_of_epoch(samples, per_step, seed=1, epoch=4)
    assert sorted(sample.name for sample in chain(*steps)) == list("abcdefg")
    assert [len(step) for step in steps[:-1]] == [per_step] * (len(steps) - 1)
    assert 1 <= len(steps[-1]) <= per_step
    assert steps == steps_of_epoch(samples, per_step, seed=1, epoch=4)


def test_without_samples_there_are_no_steps():
    for how in ("shuffle", "buckets", "budget"):
        assert steps_of_epoch([], 3, 1, 0, how, node_budget=10) == []


MANY = samples_of([record(f"{number}", 37 * number % 101) for number in range(101)], None)


def _spread(steps):
    """How far apart the costs of a step are, on average."""
    return sum(max(one.cost for one in step) - min(one.cost for one in step) for step in steps) / len(steps)


@pytest.mark.parametrize("per_step", [1, 4, 7, 200])
def test_buckets_take_every_sample_once_and_samples_of_a_step_are_alike(per_step):
    orders = [steps_of_epoch(MANY, per_step, 1, epoch, "buckets") for epoch in range(3)]
    for steps in orders:
        assert sorted(chain(*steps), key=lambda sample: sample.name) == sorted(MANY, key=lambda sample: sample.name)
        assert [len(step) for step in steps[:-1]] == [per_step] * (len(steps) - 1)
    assert orders[0] == steps_of_epoch(MANY, per_step, 1, 0, "buckets")
    assert orders[0] != orders[1]
    if per_step == 4:
        # A bucket of 32 neighbours spans 32 of the 101 costs.
        assert max(_spread(steps[:-1]) for steps in orders) < 32 < _spread(steps_of_epoch(MANY, 4, 1, 0))


def test_steps_of_buckets_come_in_any_order_of_size():
    for epoch in range(3):
        first = [sample.cost for step in steps_of_epoch(MANY, 4, 1, epoch, "buckets")[:8] for sample in step]
        assert min(first) < 34 < 67 < max(first), "of all thirds"


@pytest.mark.parametrize("how", ["shuffle", "buckets", "budget"])
def test_no_seed_has_an_order_of_another_one(how):
    orders = [
        [sample.name for step in steps_of_epoch(MANY, 4, seed, epoch, how, 40) for sample in step]
        for seed in range(4)
        for epoch in range(4)
    ]
    assert len(set(map(tuple, orders))) == 16


def test_what_makes_no_whole_step_is_left_over_by_chance():
    (*_, last), (*_, other) = (steps_of_epoch(MANY, 100, 1, epoch, "buckets") for epoch in (0, 1))
    assert len(last) == len(other) == 1
    assert last != other


def test_a_budget_is_filled_and_a_sample_beyond_it_is_a_step_of_its_own():
    nodes = (3, 9, 4, 4, 30, 1, 2, 8)
    sized = [replace(record(f"{number}", 5), num_nodes=count) for number, count in enumerate(nodes)]
    samples = samples_of(sized, None)
    for epoch in range(4):
        steps = steps_of_epoch(samples, 1, 1, epoch, "budget", node_budget=12)
        assert sorted(sample.name for sample in chain(*steps)) == sorted(sample.name for sample in samples)
        sizes = [sum(sample.num_nodes for sample in step) for step in steps]
        assert all(size <= 12 or len(step) == 1 for size, step in zip(sizes, steps))
        following = [step[0].num_nodes for step in steps[1:]]
        assert all(size + first > 12 for size, first in zip(sizes, following)), "none could have taken one more"
    assert samples_of(sized[:2], 3)[3].num_nodes == 3


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), num_train=6)


RUNS = {
    "buckets": {"sampling": "buckets", "events_per_step": 2},
    "budget": {"sampling": "budget", "node_budget": 150, "lr_schedule": "cosine"},
}


ONE, TWO_APART, FOUR_IN_PAIRS = (1, 1), (2, 1), (4, 2)


@pytest.mark.parametrize(
    ("run", "grids"),
    [
        ("buckets", (ONE, FOUR_IN_PAIRS)),
        ("budget", (ONE, TWO_APART)),
        slow("buckets", (ONE, TWO_APART)),
        slow("budget", (ONE, FOUR_IN_PAIRS)),
    ],
)
def test_a_run_has_one_hash_whoever_takes_which_events(store, tmp_path, run, grids):
    found = [
        result
        for ranks, domain in grids
        for result in run_ranks(invariance.results, ranks, store, tmp_path / "run", RUNS[run], domain_size=domain)
    ]
    for what in ("steps", "parameters", "scores"):
        assert len({result[what] for result in found}) == 1, what


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"sampling": "budget"}, "--sampling budget .*without --node-budget"),
        ({"node_budget": 5}, "--node-budget 5 .*with --sampling shuffle"),
        ({"sampling": "budget", "node_budget": 0}, "--node-budget is 0"),
        (
            {"sampling": "budget", "node_budget": 5, "events_per_step": 2},
            "--events-per-step 2 .*with --sampling budget",
        ),
    ],
)
def test_contradictions_are_refused_by_name(flags, words):
    with pytest.raises(ConfigError) as refused:
        TrainConfig(**flags)
    assert re.search(words, str(refused.value))


@pytest.mark.parametrize("num_groups", [1, 2, 3, 10])
def test_every_sample_is_dealt_to_one_data_group(num_groups):
    hands = deal(samples_of(RECORDS, None), num_groups)
    assert len(hands) == num_groups
    assert sorted(sample.name for sample in chain(*hands)) == list("abcdefg")


def test_samples_are_dealt_so_that_costs_balance():
    loads = [sum(sample.cost for sample in hand) for hand in deal(samples_of(RECORDS, None), 2)]
    assert sorted(loads) == [1100, 1200]  # 2300 in all, in units of 100
    loads = [
        sum(sample.cost for sample in hand) for hand in deal(samples_of([record(c, 50) for c in "abcdef"], None), 3)
    ]
    assert loads == [100, 100, 100]


def test_events_without_edges_are_dealt_too():
    """Their cost is 0: all of them go to one group, which is as balanced as any other way."""
    hands = deal([Sample(record(name, 0)) for name in "abc"], 2)
    assert sum(map(len, hands)) == 3


def test_few_samples_are_not_one_bucket():
    """Eight steps of them would be all there are, and alike in nothing."""
    few = MANY[:32]
    assert _spread(steps_of_epoch(few, 4, 1, 0, "buckets")) < 0.7 * _spread(steps_of_epoch(few, 4, 1, 0))
