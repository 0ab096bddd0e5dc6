"""Splits by a hash of an event's name: they take their shares, and what was trained on is never tested on."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domainpar.tracking.events.heptrkx import SOURCE as HEPTRKX
from domainpar.tracking.events.splits import splits_of

names = st.lists(st.text("ab01_-.", min_size=1, max_size=6), min_size=1, max_size=25, unique=True)
shares = st.tuples(st.floats(0, 0.49), st.floats(0, 0.49))
seeds = st.integers(0, 2**63 - 1)


def dealt(events, shares, seed=0, recorded=None, **options):
    return splits_of(events, *shares, seed, recorded, **options)


def by_hash(name, shares, seed):
    """The split of an event where no split lacks one: test from 0 upward, val from 1 downward."""
    place = int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:16], 16) / 2**64
    return "test" if place < shares[1] else "val" if place >= 1 - shares[0] else "train"


@given(names, shares, seeds)
def test_no_split_is_left_without_an_event_while_there_are_enough(events, shares, seed):
    counts = Counter(dealt(events, shares, seed).values())
    assert counts["train"] >= 1
    for split, share, fewest in (("val", shares[0], 2), ("test", shares[1], 3)):
        assert counts[split] >= (share > 0 and len(events) >= fewest)
        assert share or not counts[split]


@given(names, shares, seeds, st.data())
def test_no_event_leaves_its_split_and_growth_differs_from_all_at_once_by_three_forced_events_at_most(
    events, shares, seed, data
):
    """One forced event a split at most: a split that has an event never becomes empty again."""
    grown = {}
    ends = data.draw(st.sets(st.integers(1, len(events)))) | {len(events)}
    for end in sorted(ends):
        now = dealt(events[:end], shares, seed, grown)
        assert now.items() >= grown.items()
        grown = now
    for found in (grown, dealt(events, shares, seed), dealt(events[::-1], shares, seed)):
        forced = [split for name, split in found.items() if split != by_hash(name, shares, seed)]
        assert len(forced) == len(set(forced))
    assert dealt(events, shares, seed) == dealt(events[::-1], shares, seed)


def test_shares_are_kept_and_depend_on_the_seed():
    events = [f"{number:09d}" for number in range(4000)]
    counts = Counter(dealt(events, (0.25, 0.1)).values())
    assert counts["val"] == pytest.approx(1000, abs=80)
    assert counts["test"] == pytest.approx(400, abs=60)
    assert len({tuple(dealt(events[:40], (0.25, 0.25), seed).values()) for seed in range(5)}) == 5


def test_a_larger_share_takes_more_events_and_gives_none_back():
    events = [f"{number:09d}" for number in range(400)]
    small, large = dealt(events, (0.1, 0.1)), dealt(events, (0.3, 0.2))
    assert all(large[name] == split for name, split in small.items() if split != "train")


def test_a_single_event_is_trained_on_and_two_are_train_and_val():
    assert dealt("a", (0.1, 0.1)) == {"a": "train"}
    assert sorted(dealt("ab", (0.1, 0.1)).values()) == ["train", "val"]
    assert sorted(dealt("abc", (0.1, 0.1)).values()) == ["test", "train", "val"]


@given(st.integers(2, 12), st.integers(1, 6), shares, seeds)
def test_sectors_are_dealt_as_their_event_is(num_events, num_sectors, shares, seed):
    of_events = dealt([f"{event:09d}" for event in range(num_events)], shares, seed)
    sectors = [f"{event:09d}_g{sector:03d}" for sector in range(num_sectors) for event in range(num_events)]
    found = dealt(sectors, shares, seed, whole=HEPTRKX.whole)
    assert all(found[name] == of_events[HEPTRKX.whole(name)] for name in sectors)


def test_a_sector_joins_those_of_its_event_that_were_trained_on():
    recorded = {"1_g000": "test", "1_g001": "train", "1_g002": "val", "2_g000": "test"}
    splits = dealt(["1_g000", "1_g003", "2_g001"], (0.3, 0.3), recorded=recorded, whole=HEPTRKX.whole)
    assert splits == {"1_g000": "test", "1_g003": "train", "2_g001": "test"}


@pytest.mark.parametrize("shares", [(0.5, 0.6), (1.1, 0), (-0.1, 0.2)])
def test_shares_of_more_than_all_events_are_refused(shares):
    with pytest.raises(ValueError, match="sum is at most 1"):
        dealt("", shares)


@given(names, seeds, st.floats(0, 1))
def test_shares_that_are_all_leave_no_event_to_train_on(events, seed, test_share):
    val_share = 1 - test_share  # their sum is 1, or its neighbour below
    if val_share + test_share == 1:
        counts = Counter(dealt(events, (val_share, test_share), seed).values())
        assert not counts["train"]
        assert test_share > 0 or not counts["test"]
    assert set(dealt(events, (0, 1), seed).values()) == {"test"}
