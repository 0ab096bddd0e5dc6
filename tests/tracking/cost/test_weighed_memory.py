"""The memory of a step on a part of any size is known from two small pieces of an event."""

import weakref

import numpy as np
import pytest
import torch
from marks import slow
from random_events import random_event
from random_store import write_graph

from domainpar.measure import forecast
from domainpar.measure.forecast import PartMemory, PerRow, Piece, TensorMeter
from domainpar.nn import stages
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.uncompiled import pass_back
from domainpar.parallel.tables import BlockPool
from domainpar.testing import run_ranks
from domainpar.tracking.cost import event_pieces as pieces
from domainpar.tracking.events.store import EventStore, write_manifest
from domainpar.tracking.part_loading import load_part


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


def store_of(directory, num_nodes, num_edges, num_tiles=8, **kinds):
    """One event of random edges: a sector of its tiles has far fewer edges a node than the whole."""
    tiles = np.arange(num_nodes) * num_tiles // num_nodes
    record = write_graph(directory, random_event(3, num_nodes, num_edges, **kinds), tiles, num_tiles, "train")
    write_manifest(directory, [record], {})
    return EventStore(directory)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Of few nodes, so that edges decide."""
    return store_of(tmp_path_factory.mktemp("store"), 400, 16_000)


def network(store, **flags):
    return InteractionNetwork(
        len(store.feature_names), len(store.edge_feature_names), **{"hidden": 32, "graph_iters": 4, **flags}
    )


def weight_of(store, model, **how):
    return pieces.weighed(model, store, store.events()[0], **{"every": model.recompute_every, **how})


def keep_layers_up_to(monkeypatch, most):
    monkeypatch.setattr(forecast, "MOST_BYTES_OF_LAYERS", most)
    monkeypatch.setattr(stages, "MOST_BYTES_OF_LAYERS", most)


def taken(world, store, model, counting, trains=True, grouping="contiguous"):
    """The most bytes of a step on this rank's part of the event, and the sizes of the part."""
    with store.open(store.events()[0]) as event:
        part = load_part(event, world.domain, grouping=grouping)
    sizes = part.graph.num_owned, part.graph.plan.num_ghosts, part.graph.num_edges, len(part.graph.tiles.pair_rows)
    gradients = model.gradients()
    with counting() as counted, torch.set_grad_enabled(trains):
        tensors = model.read(part.graph, part.halo, 1 if trains else None).tensors
        if trains:
            pass_back(tensors, [torch.ones_like(tensor) for tensor in tensors])
    del gradients
    return counted.peak, sizes


class Tables:
    """Around a step: `peak` is the most bytes of its tables."""

    def __init__(self, monkeypatch):
        self._patch = monkeypatch

    def __enter__(self):
        self._live = LiveBytes(self._patch)
        return self

    def __exit__(self, *_):
        self.peak = self._live.most


FLAGS = [
    *({}, {"layers": 1}, {"layers": 3}, {"graph_iters": 2, "residual": False}, {"aggregate": "sum"}),
    *({"recompute_every": 2}, {"products": torch.bfloat16}, {"readouts": "all"}),
]


@pytest.mark.parametrize(
    ("order", "keeps_layers"),
    [("edge-first", True), ("node-first", False), slow("edge-first", False), slow("node-first", True)],
)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_step_takes_the_tables_that_pieces_told(store, monkeypatch, flags, order, keeps_layers):
    keep_layers_up_to(monkeypatch, 2**27 if keeps_layers else 0)
    weight = weight_of(store, network(store, order=order, **flags))
    ((held, sizes),) = run_ranks(taken, 1, store, network(store, order=order, **flags), lambda: Tables(monkeypatch))
    assert 0.98 < (weight.of(*sizes) - weight.fixed) / held < 1.08, "weights are no tables"


@pytest.mark.parametrize("edges_per_node", [1.2, 10])
@pytest.mark.parametrize("flags", [{}, {"graph_iters": 1}, {"layers": 3}, {"products": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_scoring_takes_the_tables_that_pieces_told(tmp_path, monkeypatch, order, flags, edges_per_node):
    store = store_of(tmp_path, int(12_000 / edges_per_node), 12_000)
    weight = weight_of(store, network(store, order=order, **flags), trains=False)
    ((held, sizes),) = run_ranks(
        taken, 1, store, network(store, order=order, **flags), lambda: Tables(monkeypatch), False
    )
    assert 0.98 < (weight.of(*sizes) - weight.fixed) / held < 1.08, "weights are no tables"


@pytest.mark.parametrize("edges_per_node", [1.2, 10])
@pytest.mark.parametrize("order", ["edge-first", slow("node-first")])
@pytest.mark.parametrize("every", [None, slow(3)])
@pytest.mark.parametrize("reach", [60, slow(None)])
def test_each_rank_takes_what_its_own_part_says_however_uneven(tmp_path, order, every, reach, edges_per_node):
    """Ranks own a third to a half of the nodes, and have a tenth or, without a reach, all of the others as ghosts."""
    store = store_of(tmp_path, int(24_000 / edges_per_node), 24_000, reach=reach)
    flags = {"order": order, "recompute_every": every}
    weight = weight_of(store, network(store, **flags), ranks=2)
    run = run_ranks(taken, 3, store, network(store, **flags), lambda: TensorMeter("cpu"), True, "random")
    assert len({sizes for _, sizes in run}) > 1
    for held, sizes in run:
        ratio = weight.of(*sizes) / held
        assert 0.97 < ratio < 1.1 if reach else 0.93 < ratio < 1.2, sizes


def test_an_edge_takes_what_is_kept_of_it(store):
    """Of 8 iterations all; of segments 3 + 3 + 2, in the second: the input of the first, and three.

    Less one where the first iteration begins with features; a gradient besides, two in a segment that is not the last;
    a logit and its gradient of each readout.
    """

    def states(**changed):
        rows = weight_of(store, network(store, hidden=64, graph_iters=8, **changed)).rows
        return (rows.edge - 8) / (64 * 4)

    assert states() == pytest.approx(8 - 1 + 1, abs=0.05)
    assert states(order="node-first") == pytest.approx(8 + 1, abs=0.05)
    assert states(recompute_every=3) == pytest.approx(1 + 3 - 1 + 2, abs=0.05)
    assert states(recompute_every=1) == pytest.approx(states(), abs=0.05)
    assert states(products=torch.bfloat16) == pytest.approx((8 - 1 + 1) / 2, abs=0.05)
    assert states(readouts="all") == pytest.approx(states() + 2 * (8 - 1) / 64, abs=0.01)


@pytest.mark.parametrize(
    ("graph_iters", "readouts", "of_edges"),
    [
        (1, "last", ["eih"]),
        (2, "last", ["ei", "ih"]),
        (4, "last", ["ei", "i", "i", "ih"]),
        (2, "all", ["eih", "ih"]),
        (4, "all", ["eih", "ih", "ih", "ih"]),
    ],
    ids=str,
)
def test_layers_that_stages_keep_are_counted_as_long_as_they_are_few(
    store, monkeypatch, graph_iters, readouts, of_edges
):
    """Of encoder, iterations and head on edges, some of them in one stage, each of 3 layers, and the head's last."""
    of_edges = [4 * (len(which) * 3 * (64 + 1) + which.count("h") * (16 + 1)) for which in of_edges]
    how = {"hidden": 64, "graph_iters": graph_iters, "layers": 3, "readouts": readouts}
    layers = weight_of(store, network(store, **how)).layers
    assert sorted(of_row for is_of_edges, of_row in layers if is_of_edges) == sorted(of_edges)
    assert [of_row for is_of_edges, of_row in layers if not is_of_edges] == [4 * 3 * (64 + 1)] * graph_iters
    assert weight_of(store, network(store, recompute_every=1, **how)).layers == []

    num_edges, num_nodes = np.array([100, 1000]), np.array([50, 100])

    def layers_within(most):
        monkeypatch.setattr(forecast, "MOST_BYTES_OF_LAYERS", most)
        return PartMemory(0, PerRow(), layers).of(num_nodes, 0, num_edges).tolist()

    of_nodes = 4 * graph_iters * 3 * (64 + 1)
    assert layers_within(10**9) == [sum(of_edges) * e + of_nodes * n for e, n in ((100, 50), (1000, 100))]
    smallest = min(of_edges)
    assert layers_within(smallest * 1000)[1] == smallest * 1000 * of_edges.count(smallest) + of_nodes * 100
    assert layers_within(0) == [0, 0]


@pytest.mark.parametrize(("graph_iters", "best"), [(1, None), (2, None), (3, 2), (4, 2), (8, 3), (12, 3)])
def test_the_last_way_to_recompute_takes_least(store, graph_iters, best):
    model = network(store, graph_iters=graph_iters)
    assert model.ways_to_recompute == (None, *(range(graph_iters - 1, best - 1, -1) if best else ()))
    of_ways = {
        every: weight_of(store, network(store, graph_iters=graph_iters, recompute_every=every)).rows.edge
        for every in (None, *range(1, graph_iters + 1))
    }
    assert of_ways[best] == min(of_ways.values())


@pytest.mark.parametrize("larger", [{"hidden": 64}, {"graph_iters": 8}, {"dtype": torch.float64}], ids=str)
def test_the_memory_that_pieces_tell_grows_with_the_model(store, larger):
    how = {"dtype": larger["dtype"]} if "dtype" in larger else {}
    small = weight_of(store, network(store)).of(1000, 0, 10_000)
    assert weight_of(store, network(store, **larger), **how).of(1000, 0, 10_000) > 1.5 * small


def test_what_has_no_rows_is_a_line_through_the_pieces():
    few, many = (Piece(edges, 0, PartMemory(700 + 3 * edges, PerRow(5, 1, 10, 2))) for edges in (100, 400))
    weight = PartMemory.from_pieces([few, many])
    assert weight.of(50, 20, 1000, 60) == 700 + 50 * 5 + 20 * 1 + 1000 * 13 + 60 * 2
    assert weight.of(50, 20, 1000) == weight.of(50, 20, 1000, 70)
    more = weight.plus(9, 72, 2.0)
    assert more.of(50, 20, 1000, 60) == 9 + 2 * weight.of(50, 20, 1000, 60) + 72 * 1070
    assert PartMemory.from_pieces([many]).of(0, 0, 800) == 700 + 3 * 400 + 10 * 800, "of one nothing else grows"
