"""The memory of a training step is predicted from the tables that are kept, and the leanest recompute is known."""

from dataclasses import replace

import numpy as np
import pytest

from domainpar.nn import memory
from domainpar.nn.memory import ModelSize


def test_predicted_memory_is_that_of_what_is_kept(monkeypatch):
    """Of 8 iterations all; of segments 3 + 3 + 2, in the second: the input of the first, and three.

    Less one, since the first iteration begins with features, and two gradients besides.
    """
    monkeypatch.setattr(memory, "MOST_BYTES_OF_LAYERS", 0)

    def tables(**changed):
        return ModelSize(graph_iters=8, **changed).bytes_of(0, 1000) - 72_000

    assert tables() == (8 - 1 + 2) * 64 * 4 * 1000
    assert tables(recompute_every=3) == (1 + 3 - 1 + 2) * 64 * 4 * 1000
    assert tables(recompute_every=1) == tables()
    assert tables(edge_item_bytes=2) == tables() / 2
    assert tables(readouts=5) == tables() + 2 * (5 - 1) * 4 * 1000
    more = ModelSize().bytes_of(100, 1000, 700) - ModelSize().bytes_of(100, 1000)
    assert more == 600 * 64 * 4


@pytest.mark.parametrize(
    ("graph_iters", "readouts", "of_edges"),
    [(1, 1, [6]), (2, 1, [4, 4]), (4, 1, [4, 2, 2, 4]), (2, 2, [6, 4]), (4, 4, [6, 4, 4, 4])],
)
def test_layers_that_stages_keep_are_counted_as_long_as_they_are_few(monkeypatch, graph_iters, readouts, of_edges):
    """Two of 64 columns of each perceptron: of encoder, iterations and head on edges, some of them in one stage."""
    sizes = {"graph_iters": graph_iters, "readouts": readouts}
    row, num_edges, num_nodes = 64 * 4, np.array([100, 1000]), np.array([50, 100])

    def bytes_of(most, **changed):
        monkeypatch.setattr(memory, "MOST_BYTES_OF_LAYERS", most)
        return ModelSize(**sizes, **changed).bytes_of(num_nodes, num_edges)

    def layers_within(most, **changed):
        return (bytes_of(most, **changed) - bytes_of(0, **changed)).tolist()

    assert layers_within(10**9) == [
        row * (sum(of_edges) * e + 2 * graph_iters * n) for e, n in ((100, 50), (1000, 100))
    ]
    smallest = min(of_edges)
    expected = row * smallest * 1000 * of_edges.count(smallest) + row * 2 * graph_iters * 100
    assert layers_within(row * smallest * 1000)[1] == expected
    assert layers_within(10**9, edge_item_bytes=2) == layers_within(10**9)
    assert layers_within(10**9, recompute_every=1) == [0, 0]


@pytest.mark.parametrize(("graph_iters", "best"), [(1, None), (2, None), (4, 2), (8, 3)])
def test_the_recompute_that_takes_least_is_known(graph_iters, best):
    size = ModelSize(graph_iters=graph_iters)
    assert size.leanest_recompute() == best
    assert replace(size, recompute_every=best).leanest_recompute() is None


@pytest.mark.parametrize("larger", [{"hidden": 128}, {"graph_iters": 8}, {"item_bytes": 8}])
def test_predicted_memory_grows_with_the_model(larger):
    nodes, edges = np.array([1000]), np.array([10_000])
    assert ModelSize(**larger).bytes_of(nodes, edges) > 1.5 * ModelSize().bytes_of(nodes, edges)
