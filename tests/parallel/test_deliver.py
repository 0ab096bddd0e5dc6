"""Rows arrive once, where they were addressed to, by sender and in the order in which they were sent."""

import numpy as np
import pytest

from domainpar.parallel.deliver import deliver
from domainpar.testing import run_ranks


def rows_of(rank, size, seed, width):
    """Some rows of this rank, each with its own number, and where they go; some ranks have none."""
    rng = np.random.default_rng([seed, rank])
    count = 0 if (rank + seed) % 4 == 3 else rng.integers(0, 30)
    rows = rng.integers(-(2**62), 2**62, (count, width))
    rows[:, 0] = rank * 1000 + np.arange(count)
    return rows, rng.integers(0, size, count)


def send(world, seed, width):
    return deliver(*rows_of(world.rank, world.size, seed, width), world.transport)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_rows_arrive_by_sender_in_the_order_they_were_sent(num_ranks, seed):
    width = 1 + seed % 3
    found = run_ranks(send, num_ranks, seed, width)
    for receiver, delivery in enumerate(found):
        expected, senders = [], []
        for sender in range(num_ranks):
            rows, to = rows_of(sender, num_ranks, seed, width)
            expected += rows[to == receiver].tolist()
            senders += [sender] * int((to == receiver).sum())
        assert delivery.rows.tolist() == expected
        assert delivery.sender.tolist() == senders
        assert delivery.rows.shape[1] == width
