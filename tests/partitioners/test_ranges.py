import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioners.ranges import split_evenly

some_costs = st.lists(st.integers(0, 9), max_size=9)


def smallest_maximum(costs, num_blocks):
    cuts = itertools.combinations_with_replacement(range(len(costs) + 1), num_blocks - 1)
    return min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts)


@settings(max_examples=200)
@given(some_costs, st.integers(1, 5))
def test_no_other_cut_has_a_cheaper_most_expensive_block(costs, num_blocks):
    blocks = split_evenly(np.array(costs, np.int64), num_blocks)
    assert np.bincount(blocks, costs, num_blocks).max() == smallest_maximum(costs, num_blocks)


@settings(max_examples=200)
@given(some_costs, st.integers(1, 12))
def test_blocks_are_consecutive_and_cover_every_item(costs, num_blocks):
    blocks = split_evenly(np.array(costs, np.int64), num_blocks)
    assert blocks.dtype == np.int32
    assert len(blocks) == len(costs)
    assert (np.diff(blocks) >= 0).all()
    assert ((blocks >= 0) & (blocks < num_blocks)).all()


def test_blocks_behind_the_most_expensive_one_are_even_too():
    # Filling every block up to the cost of the first would leave the last ones empty.
    for heavy in (9, 30):
        blocks = split_evenly(np.array([heavy, *[1] * 9]), 4)
        assert np.bincount(blocks, minlength=4).tolist() == [1, 3, 3, 3]


def test_more_blocks_than_items_leaves_blocks_empty_and_puts_no_two_items_together():
    blocks = split_evenly(np.ones(3, np.int64), 8)
    assert blocks.tolist() == [0, 1, 2]
