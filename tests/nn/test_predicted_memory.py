"""The memory of a training step is predicted from the tables that are kept, and the leanest recompute is known."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from marks import slow
from random_events import random_event
from tiled import TiledEvent

from domainpar.nn import memory, stages
from domainpar.nn.gradients import GradientSink
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.memory import ModelSize
from domainpar.parallel.tables import BlockPool
from domainpar.testing import run_ranks


class LiveBytes:
    """Bytes of the tables that are alive now, and the most there ever were."""

    def __init__(self, monkeypatch):
        self.now = self.most = 0
        lend = BlockPool.lend

        def counted(kept, size):
            array = lend(kept, size)
            self._add(size)
            weakref.finalize(array, self._add, -size)
            return array

        monkeypatch.setattr(BlockPool, "lend", counted)

    def _add(self, size):
        self.now += size
        self.most = max(self.most, self.now)


@pytest.fixture(scope="module")
def event():
    """Of few nodes, so that edges decide."""
    return TiledEvent.of(random_event(3, 400, 16_000), np.arange(400) * 8 // 400, 8)


FLAGS = [
    *({}, {"layers": 1}, {"layers": 3}, {"graph_iters": 2, "residual": False}, {"aggregate": "sum"}),
    *({"recompute_every": 2}, {"products": torch.bfloat16}),
]


@pytest.mark.parametrize(
    ("order", "keeps_layers"),
    [("edge-first", True), ("node-first", False), slow("edge-first", False), slow("node-first", True)],
)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_step_takes_the_tables_that_were_predicted(event, monkeypatch, flags, order, keeps_layers):
    most = 2**27 if keeps_layers else 0
    monkeypatch.setattr(memory, "MOST_BYTES_OF_LAYERS", most)
    monkeypatch.setattr(stages, "MOST_BYTES_OF_LAYERS", most)
    flags = {"hidden": 32, "graph_iters": 4, "order": order, **flags}

    def step(world):
        part = event.part(world.transport, event.grouping("ranges", 1))
        model = InteractionNetwork(3, event.graph.edge_features.shape[1], **flags)
        sink, live = GradientSink(model), LiveBytes(monkeypatch)
        logits = model(part.graph, part.halo)
        logits.backward(torch.ones_like(logits))
        sink.reduce(world.transport)
        sizes = part.graph.plan.num_local, part.graph.num_edges, len(part.graph.tiles.pair_rows)
        return live.most, int(model.size.bytes_of(*sizes)) - memory.data_bytes(*sizes[:2])

    ((taken, predicted),) = run_ranks(step, 1)
    assert 1 <= predicted / taken < 1.08


@pytest.mark.parametrize("edges_per_node", [1.2, 10])
@pytest.mark.parametrize("flags", [{}, {"graph_iters": 1}, {"layers": 3}, {"products": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_scoring_takes_the_tables_that_were_predicted(monkeypatch, order, flags, edges_per_node):
    num_edges = 12_000
    num_nodes = int(num_edges / edges_per_node)
    event = TiledEvent.of(random_event(3, num_nodes, num_edges), np.arange(num_nodes) * 8 // num_nodes, 8)

    def score(world):
        part = event.part(world.transport, event.grouping("ranges", 1))
        flags_of_model = {"hidden": 32, "graph_iters": 4, "order": order, **flags}
        model = InteractionNetwork(3, event.graph.edge_features.shape[1], **flags_of_model)
        live = LiveBytes(monkeypatch)
        with torch.no_grad():
            model(part.graph, part.halo)
        nodes, edges = part.graph.plan.num_local, part.graph.num_edges
        said = replace(model.size, trains=False).bytes_of(nodes, edges, len(part.graph.tiles.pair_rows))
        return live.most, int(said) - memory.LOADING_BYTES * (nodes + edges)

    ((taken, predicted),) = run_ranks(score, 1)
    assert 0.98 < predicted / taken < 1.08


def test_predicted_memory_is_that_of_what_is_kept(monkeypatch):
    """Of 8 iterations all; of segments 3 + 3 + 2, in the second: the input of the first, and three.

    Less one where the first iteration begins with features, and a gradient besides.
    """
    monkeypatch.setattr(memory, "MOST_BYTES_OF_LAYERS", 0)

    def tables(**changed):
        return ModelSize(graph_iters=8, **changed).bytes_of(0, 1000) - 72_000

    assert tables() == (8 - 1 + 1) * 64 * 4 * 1000
    assert tables(node_first=True) == (8 + 1) * 64 * 4 * 1000
    assert tables(recompute_every=3) == (1 + 3 - 1 + 1) * 64 * 4 * 1000
    assert tables(recompute_every=1) == tables()
    assert tables(edge_item_bytes=2) == tables() / 2
    assert tables(readouts=5) == tables() + 2 * (5 - 1) * 4 * 1000
    more = ModelSize().bytes_of(100, 1000, 700) - ModelSize().bytes_of(100, 1000)
    assert more == 600 * 64 * 4


@pytest.mark.parametrize(
    ("graph_iters", "readouts", "grad_edges"),
    [
        (1, 1, ["eih"]),
        (2, 1, ["ei", "ih"]),
        (4, 1, ["ei", "i", "i", "ih"]),
        (2, 2, ["eih", "ih"]),
        (4, 4, ["eih", "ih", "ih", "ih"]),
    ],
    ids=str,
)
def test_layers_that_stages_keep_are_counted_as_long_as_they_are_few(monkeypatch, graph_iters, readouts, grad_edges):
    """Of encoder, iterations and head on edges, some of them in one stage, each of 3 layers, and the head's last."""
    num_edges, num_nodes = np.array([100, 1000]), np.array([50, 100])
    grad_edges = [len(which) * 3 * (64 + 1) + which.count("h") * (16 + 1) for which in grad_edges]
    sizes = {"graph_iters": graph_iters, "readouts": readouts, "layers": 3}

    def bytes_of(most, **changed):
        monkeypatch.setattr(memory, "MOST_BYTES_OF_LAYERS", most)
        return ModelSize(**sizes, **changed).bytes_of(num_nodes, num_edges)

    def layers_within(most, **changed):
        return (bytes_of(most, **changed) - bytes_of(0, **changed)).tolist()

    grad_nodes = graph_iters * 3 * (64 + 1)
    assert layers_within(10**9) == [4 * (sum(grad_edges) * e + grad_nodes * n) for e, n in ((100, 50), (1000, 100))]
    smallest = min(grad_edges)
    expected = 4 * (smallest * 1000 * grad_edges.count(smallest) + grad_nodes * 100)
    assert layers_within(4 * smallest * 1000)[1] == expected
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
