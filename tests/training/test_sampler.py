"""Which samples a step takes is a function of seed and epoch; who computes them is balanced by cost."""

from itertools import chain

import pytest

from domainpar.events.store import EventRecord
from domainpar.parallel.part_loading import Sector
from domainpar.training.sampler import Sample, deal, samples_of, steps_of_epoch


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
    assert steps_of_epoch([], 3, seed=1, epoch=0) == []


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
