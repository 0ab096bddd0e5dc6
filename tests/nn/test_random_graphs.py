"""One step on hundreds of random directed graphs: the same bits on any number of ranks, whatever the graph looks like.

Among them: empty parts and tiles, isolated nodes, self-loops, duplicate edges, no edges, no nodes, values that are
not finite.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow
from random_events import tiled_events
from tiled import TiledEvent

from domainpar.nn.gradients import GradientSink
from domainpar.nn.interaction import InteractionNetwork
from domainpar.testing import run_ranks


def _spoilt(graph, spoilt_ids, value):
    """The local graph with one feature of some nodes replaced, owned or ghost alike."""
    if value is None:
        return graph
    features = graph.features.clone()
    rows = np.flatnonzero(np.isin(graph.plan.local_ids, spoilt_ids))
    features[torch.from_numpy(rows), 0] = value
    return replace(graph, features=features)


def _one_step(world, event, part_of_tile, order, dtype, spoilt_ids, value):
    part = event.part(world.transport, part_of_tile, dtype)
    graph = _spoilt(part.graph, spoilt_ids, value)
    num_edge_features = graph.edge_features.shape[1]
    model = InteractionNetwork(3, num_edge_features, hidden=16, graph_iters=2, order=order, dtype=dtype, layers=1)
    sink = GradientSink(model)
    logits = model(graph, part.halo)
    logits.backward(torch.tanh(logits.detach()) + 0.1)
    rejected = int(sink.reduce(world.transport))
    owned = graph.plan.edge_owned
    scores = dict(zip(graph.plan.edge_ids[owned].tolist(), logits.detach().numpy()[owned].view(f"u{logits.itemsize}")))
    return rejected, b"".join(p.grad.numpy().tobytes() for p in model.parameters()), scores


def _on(num_ranks, event, kind, *args):
    found = run_ranks(_one_step, num_ranks, event, event.grouping(kind, num_ranks, seed=num_ranks), *args)
    assert len({(rejected, gradients) for rejected, gradients, _ in found}) == 1, "ranks hold different gradients"
    scores = {}
    for _, _, own in found:
        assert not scores.keys() & own.keys()
        scores |= own
    return found[0][0], found[0][1], [scores[edge] for edge in sorted(scores)]


DRAWN = {
    "tiled": tiled_events(max_nodes=30, max_edges=90),
    "num_ranks": st.integers(2, 5),
    "kind": st.sampled_from(["ranges", "random", "one part"]),
    "order": st.sampled_from(["edge-first", "node-first"]),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "value": st.sampled_from([None, None, None, float("nan"), float("inf")]),
}


@pytest.mark.parametrize("examples", [100, slow(500)])
def test_one_step_is_the_same_bits_on_any_ranks(examples):
    settings(max_examples=examples)(given(**DRAWN)(_same_bits))()


def _same_bits(tiled, num_ranks, kind, order, dtype, value):
    graph, assignment, num_tiles = tiled
    event = TiledEvent.of(graph, assignment, num_tiles, tiny=True)
    spoilt_ids = np.arange(0, graph.num_nodes, 11) if value is not None else np.zeros(0, int)
    alone = _on(1, event, "ranges", order, dtype, spoilt_ids, value)
    together = _on(num_ranks, event, kind, order, dtype, spoilt_ids, value)
    assert len(alone[2]) == graph.num_edges
    assert together[0] == alone[0], "partials that are not finite"
    if alone[0] == 0:
        assert together == alone
    else:
        assert value is not None
