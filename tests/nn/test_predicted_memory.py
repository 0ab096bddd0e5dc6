"""The memory of a training step is predicted from the tables that are kept, and the leanest recompute is known."""

from dataclasses import replace

import numpy as np
import pytest

from domainpar.nn.memory import ModelSize


def test_predicted_memory_is_that_of_what_is_kept():
    """Of 8 iterations all; of segments 3 + 3 + 2, in the second: the input of the first, and three. And 2 besides."""

    def tables(**changed):
        return ModelSize(graph_iters=8, **changed).bytes_of(0, 1000) - 72_000

    assert tables() == (8 + 2) * 64 * 4 * 1000
    assert tables(recompute_every=3) == (1 + 3 + 2) * 64 * 4 * 1000
    assert tables(recompute_every=1) == tables()
    assert tables(edge_item_bytes=2) == tables() / 2
    more = ModelSize().bytes_of(100, 1000, 700) - ModelSize().bytes_of(100, 1000)
    assert more == 600 * 64 * 4


@pytest.mark.parametrize(("graph_iters", "best"), [(1, None), (2, None), (4, 2), (8, 3)])
def test_the_recompute_that_takes_least_is_known(graph_iters, best):
    size = ModelSize(graph_iters=graph_iters)
    assert size.leanest_recompute() == best
    assert replace(size, recompute_every=best).leanest_recompute() is None


@pytest.mark.parametrize("larger", [{"hidden": 128}, {"graph_iters": 8}, {"item_bytes": 8}])
def test_predicted_memory_grows_with_the_model(larger):
    nodes, edges = np.array([1000]), np.array([10_000])
    assert ModelSize(**larger).bytes_of(nodes, edges) > 1.5 * ModelSize().bytes_of(nodes, edges)
