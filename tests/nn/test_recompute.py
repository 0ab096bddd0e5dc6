"""Iterations computed twice: the same bits with less memory, and nothing is exchanged twice."""

import threading
import weakref
from collections import Counter

import networks
import numpy as np
import pytest
import torch
from marks import slow
from random_events import random_event
from tiled import TiledEvent, sha

from domainpar.nn import stages, tilewise
from domainpar.nn.gradients import GradientSink
from domainpar.nn.interaction import InteractionNetwork
from domainpar.parallel import tables
from domainpar.parallel.halo import CompleteHalo
from domainpar.testing import run_ranks

NUM_TILES = 12
ORDERS = ("edge-first", "node-first")
KEY = 77
EVERY = (1, 2, 3, 5)
ON = ((1, "ranges"), (2, "random"), (3, "random"), (5, "ranges"), (3, "one part"))
EVERY_PAIR = [(every, on) for every in EVERY for on in ON]
EACH_TWICE = [(every, ON[place % len(ON)]) for place, every in enumerate(2 * EVERY)]


def _event(seed):
    graph = random_event(seed, 90, 500, reach=2)
    return TiledEvent.of(graph, np.arange(90) * NUM_TILES // 90, NUM_TILES)


@pytest.fixture(scope="module")
def event():
    return _event(4)


NARROW, READ_OUT = {"dropout": 0.3, "products": torch.bfloat16}, {"dropout": 0.3, "readouts": "all"}


@pytest.mark.parametrize(
    ("order", "flags", "tried"),
    [
        pytest.param("edge-first", NARROW, EACH_TWICE, id="edge-first, dropout and bf16"),
        pytest.param("node-first", READ_OUT, EACH_TWICE, id="node-first, dropout and all readouts"),
        *(slow(order, {}, EVERY_PAIR, id=f"{order}, every pair") for order in ORDERS),
        *(slow(order, NARROW, EVERY_PAIR, id=f"{order}, dropout and bf16, every pair") for order in ORDERS),
        *(slow(order, READ_OUT, EVERY_PAIR, id=f"{order}, dropout and readouts, every pair") for order in ORDERS),
    ],
)
def test_bits_are_those_of_a_network_that_keeps_everything(event, order, flags, tried):
    """On any number of ranks, also where one part has it all and the other ranks own nothing."""
    how = {"key": KEY, "dtype": torch.float32, "order": order, "graph_iters": 4, **flags}
    expected = networks.on_ranks(event, 1, **how).sha
    for every, (num_ranks, grouping) in tried:
        found = networks.on_ranks(event, num_ranks, grouping=grouping, recompute_every=every, timeout=20, **how)
        assert found.sha == expected, f"every {every} on {num_ranks} ranks, {grouping}"


@pytest.mark.parametrize("order", ORDERS)
def test_shared_weights_take_the_gradients_of_every_iteration_once(event, order):
    how = {"order": order, "graph_iters": 4, "shared_weights": True}
    found = networks.on_ranks(event, 2, recompute_every=2, **how)
    assert found.sha == networks.on_ranks(event, 2, **how).sha


def _exchanges(world, event, grouping, flags):
    """How often this rank started to exchange rows, forward and backward, and how many bytes it sent."""
    part = event.part(world.transport, event.grouping(grouping, world.size, seed=world.size))
    started, start = [], world.transport.start
    world.transport.start = lambda *rows: started.append(1) or start(*rows)
    model = networks.network(event, torch.float32, **flags)
    GradientSink(model)
    world.take_counters()
    logits = model(part.graph, part.halo)
    in_forward = len(started)
    logits.sum().backward()
    return in_forward, len(started) - in_forward, world.take_counters().bytes_sent


@pytest.mark.parametrize("grouping", ["random", "one part"])
@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_exchanged_twice(event, order, grouping):
    flags = {"order": order, "graph_iters": 5}
    expected = run_ranks(_exchanges, 3, event, grouping, flags)
    in_forward, in_backward, num_bytes = expected[0]
    assert (in_forward, in_backward) == ((4, 4) if order == "edge-first" else (5, 5))
    assert (num_bytes > 0) == (grouping == "random")
    for every in (1, 3):
        assert run_ranks(_exchanges, 3, event, grouping, {**flags, "recompute_every": every}) == expected


class Kept:
    """Watches which tables that stages made, or that rows were spread into, are still held by someone."""

    def __init__(self):
        self._kinds = {}

    def note(self, kind, table):
        if table.numel():
            self._kinds.setdefault(kind, []).append(weakref.ref(table.untyped_storage()))

    def count(self, kind):
        return sum(held() is not None for held in self._kinds.get(kind, []))

    def num_bytes(self):
        held = {one().data_ptr(): one().nbytes() for refs in self._kinds.values() for one in refs if one() is not None}
        return sum(held.values())


class WatchedEdges(tilewise.EdgeTiles):
    """Stages note what they make, and in backward what is held."""

    def forward(self, *given):
        results, layers = super().forward(*given)
        if results.edges is not None:
            self.graph.kept.note("edges", results.edges)
        self.graph.kept.note("sums", results.sums)
        for table in layers:
            self.graph.kept.note("layers", table)
        return results, layers

    def backward(self, *given):
        self.graph.kept_in_backward.append(self.graph.kept.count("edges"))
        return super().backward(*given)


of_this_rank = threading.local()


class WatchedNodes(tilewise.NodeTiles):
    def forward(self, *given):
        nodes, layers = super().forward(*given)
        of_this_rank.kept.note("nodes", nodes)
        for table in layers:
            of_this_rank.kept.note("layers", table)
        return nodes, layers


class WatchedHalo(CompleteHalo):
    """Notes its tables of local rows; where there is no ghost they are the owned rows themselves."""

    def _with_room(self, owned):
        rows = super()._with_room(owned)
        self.kept.note("local", rows.local)
        return rows


def _kept(world, event, flags):
    """How many tables of each kind, and bytes, are held after forward; tables of edges held before each backward."""
    part = event.part(world.transport, event.grouping("random", world.size, seed=1), halo=WatchedHalo)
    graph, halo, kept, in_backward = part.graph, part.halo, Kept(), []
    halo.kept = of_this_rank.kept = kept
    vars(graph).update(kept=kept, kept_in_backward=in_backward)
    model = networks.network(event, torch.float32, **flags)
    GradientSink(model)
    logits = model(graph, halo)
    after_forward = {kind: kept.count(kind) for kind in ("edges", "sums", "local", "layers")} | {
        "bytes": kept.num_bytes()
    }
    logits.sum().backward()
    del logits
    assert kept.num_bytes() == 0, "something is held after backward"
    return after_forward, in_backward


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(stages, "NodeTiles", WatchedNodes)
    monkeypatch.setattr(stages, "EdgeTiles", WatchedEdges)


# With 6 iterations: after forward, then before the backward of the last iteration with its head, the one before, ... .
# The first states of edges are made, with the first iteration, in one pass; nodes come in between if they are first.
EDGE_TABLES = {
    "edge-first": {
        None: [5, 5, 4, 3, 2, 1, 0],
        1: [5, 5, 4, 3, 2, 1, 0],
        2: [3, 3, 2, 2, 1, 1, 0],
        3: [3, 3, 2, 1, 2, 1, 0],
        4: [2, 2, 1, 3, 2, 1, 0],
        6: [5, 5, 4, 3, 2, 1, 0],
    },
    "node-first": {
        None: [6, 6, 5, 4, 3, 2, 1, 0],
        1: [6, 6, 5, 4, 3, 2, 1, 0],
        2: [4, 4, 3, 3, 2, 2, 1, 0],
        3: [4, 4, 3, 2, 3, 2, 1, 0],
        4: [3, 3, 2, 4, 3, 2, 1, 0],
        6: [6, 6, 5, 4, 3, 2, 1, 0],
    },
}


@pytest.mark.parametrize("num_ranks", [1, slow(3)])
@pytest.mark.parametrize("order", ORDERS)
def test_only_the_first_states_of_every_k_iterations_wait_for_backward(watched, event, order, num_ranks, monkeypatch):
    monkeypatch.setattr(stages, "MOST_BYTES_OF_LAYERS", 0)
    num_bytes = {}
    for every, expected in EDGE_TABLES[order].items():
        flags = {"order": order, "graph_iters": 6, "recompute_every": every}
        found = run_ranks(_kept, num_ranks, event, flags)
        assert [[held["edges"], *in_backward] for held, in_backward in found] == [expected] * num_ranks, every
        num_bytes[every] = sum(held["bytes"] for held, _ in found)
    assert num_bytes[4] < num_bytes[2] < 0.8 * num_bytes[None]
    assert num_bytes[6] == num_bytes[None]


@pytest.mark.parametrize("order", ORDERS)
def test_layers_are_kept_where_they_are_few_and_no_iteration_is_computed_again(watched, event, order, monkeypatch):
    """Tables of rows and of deviations, of: encoders, nets of iterations, and the head with one layer more."""
    flags = {"order": order, "graph_iters": 3}
    num_layers = 2 * 2 + 2 * (3 + 3 - (order == "edge-first")) + 3

    def held(**changed):
        return [found["layers"] for found, _ in run_ranks(_kept, 2, event, flags | changed)]

    assert held() == [2 * num_layers] * 2
    assert held(recompute_every=3) == [0, 0]
    grad_nodes = 2 * (2 + 2 * (3 - (order == "edge-first")))
    with monkeypatch.context() as limited:
        limited.setattr(stages, "MOST_BYTES_OF_LAYERS", 90 * 32 * 8)  # of nodes, but not of edges
        assert held() == [grad_nodes] * 2
    assert run_ranks(_kept_without_gradients, 1, event, flags) == [0]


def _kept_without_gradients(world, event, flags):
    part = event.part(world.transport, event.grouping("random", world.size, seed=1), halo=WatchedHalo)
    part.halo.kept = of_this_rank.kept = kept = Kept()
    vars(part.graph).update(kept=kept, kept_in_backward=[])
    with torch.no_grad():
        logits = networks.network(event, torch.float32, **flags)(part.graph, part.halo)
    assert not logits.requires_grad
    return kept.count("layers")


class Lent:
    """The bytes of the tables that are there, and the most that ever were, by rank."""

    def __init__(self):
        self.now, self.most = Counter(), Counter()

    def lend(self, size):
        rank, block = threading.get_ident(), np.empty(size, np.uint8)
        self.now[rank] += size
        self.most[rank] = max(self.now[rank], self.most[rank])
        weakref.finalize(block, self.now.subtract, {rank: size})
        return block


def _bytes_without_gradients(world, event, lent, flags):
    """The most bytes of tables in a pass, and those still there after it; sizes of the part."""
    part = event.part(world.transport, event.grouping("random", world.size, seed=1), torch.float32)
    plan, pairs = part.graph.plan, len(part.graph.tiles.pair_rows)
    model = networks.network(event, torch.float32, **flags)
    with torch.no_grad():
        logits = model(part.graph, part.halo)
    rank = threading.get_ident()
    sizes = plan.num_local, plan.num_owned, plan.num_edges, pairs
    return lent.most[rank], lent.now[rank] - logits.nbytes, sizes


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize(("order", "taking"), [("edge-first", 2), ("node-first", 1)])
def test_without_a_backward_pass_no_state_is_held_that_has_been_replaced(
    event, order, taking, every, num_ranks, monkeypatch
):
    """At most: states of edges and of nodes, products of the latter, sums at nodes, and partial sums of pairs.

    Edge-first, two MLPs take node states in the first pass; node-first in the last one, which makes logits
    instead of sums.
    """
    lent = Lent()
    monkeypatch.setattr(tables, "_kept", lent)
    flags = {"order": order, "graph_iters": 4, "recompute_every": every}
    for most, after, sizes in run_ranks(_bytes_without_gradients, num_ranks, event, lent, flags):
        local, owned, edges, pairs = sizes
        with_sums = 4 * 16 * ((1 + 2 * taking) * local + 2 * owned + edges + pairs)
        with_logits = 4 * 16 * ((1 + 2 * 2) * local + edges) + 4 * edges if order == "node-first" else 0
        expected = max(with_sums, with_logits)
        assert expected <= most <= expected + 10 * tables.ALIGNMENT
        assert after <= tables.ALIGNMENT


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"dropout": 0.3, "products": torch.bfloat16},
        {"residual": True, "activation": "silu", "aggregate": "root"},
        {"layers": 1, "activation": "tanh"},
        {"layers": 3, "shared_weights": True},
        {"readouts": "all"},
    ],
    ids=[
        *("plain", "dropout and bf16", "residual, silu and root", "one layer", "shared weights, three layers"),
        "all readouts",
    ],
)
@pytest.mark.parametrize("order", ["edge-first", slow("node-first")])
def test_layers_that_are_kept_change_no_bit(event, order, flags, monkeypatch):
    """Of a stage and of all, on any number of ranks, of which some keep and some do not."""
    how = {"key": KEY, "dtype": torch.float32, "order": order, "graph_iters": 3, **flags}
    plain, made = stages._keeps_layers, []
    monkeypatch.setattr(tilewise, "keep_of", lambda *given, plain=tilewise.keep_of: made.append(1) or plain(*given))
    with monkeypatch.context() as limited:
        limited.setattr(stages, "MOST_BYTES_OF_LAYERS", 0)
        expected = networks.on_ranks(event, 1, **how).sha
        assert not made
    for num_ranks, grouping in ((1, "ranges"), (3, "random"), (3, "one part")):
        assert networks.on_ranks(event, num_ranks, grouping=grouping, **how).sha == expected
    assert made

    def of_odd_ranks(*given):
        return plain(*given) and threading.current_thread().name[-1] in "13"

    made.clear()
    monkeypatch.setattr(stages, "_keeps_layers", of_odd_ranks)
    assert networks.on_ranks(event, 4, **how).sha == expected
    assert made


@pytest.mark.parametrize(("order", "expected"), [("edge-first", (1, 4)), ("node-first", (4, 5))])
def test_of_what_lies_between_kept_iterations_only_the_rows_of_ghosts_are_held(watched, event, order, expected):
    """With 6 iterations, every second kept, the last two whole; edge-first, no iteration takes sums of another."""
    flags = {"order": order, "graph_iters": 6, "recompute_every": 2}
    for held, _ in run_ranks(_kept, 3, event, flags):
        assert (held["sums"], held["local"]) == expected


def _backward_in_order(world, events, orders, flags):
    """Two events through one network, then backward in one order or another."""
    parts = [one.part(world.transport, one.grouping("random", world.size, seed=2)) for one in events]
    model = networks.network(events[0], torch.float32, **flags)
    sink = GradientSink(model)
    found = []
    for backward in orders:
        first, second = (model(part.graph, part.halo).sum() for part in parts)
        backward(first, second)
        sink.reduce(world.transport)
        found.append(sha(*(parameter.grad for parameter in model.parameters())))
    return found


def _one_after_the_other(first, second):
    first.backward()
    second.backward()


def _the_last_first(first, second):
    second.backward()
    first.backward()


def _both_at_once(first, second):
    (first + second).backward()


def _both_at_once_the_other_way(first, second):
    torch.autograd.backward([second, first])


@pytest.mark.parametrize("num_ranks", [slow(1), slow(2), 3])
@pytest.mark.parametrize("order", ORDERS)
def test_autograd_may_come_back_in_any_order_and_no_rank_waits_for_ever(event, order, num_ranks):
    orders = (_one_after_the_other, _the_last_first, _both_at_once, _both_at_once_the_other_way)
    flags = {"order": order, "graph_iters": 4, "recompute_every": 2}
    found = run_ranks(_backward_in_order, num_ranks, (event, _event(5)), orders, flags, timeout=20)
    assert len({digest for ranks in found for digest in ranks}) == 1


def _backward_twice(world, event, flags):
    part = event.part(world.transport, event.grouping("random", world.size, seed=2))
    model = networks.network(event, torch.float32, **flags)
    sink = GradientSink(model)
    loss = model(part.graph, part.halo).sum()
    found = []
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        sink.reduce(world.transport)
        found.append(sha(*(parameter.grad for parameter in model.parameters())))
    return found


def test_a_graph_that_is_retained_is_computed_again_once_more(event):
    found = run_ranks(_backward_twice, 2, event, {"graph_iters": 4, "recompute_every": 2}, timeout=20)
    assert len({digest for ranks in found for digest in ranks}) == 1


@pytest.mark.parametrize("every", [0, -1])
def test_an_interval_below_one_iteration_is_refused(every):
    with pytest.raises(ValueError, match=f"recompute_every {every} must be at least 1"):
        InteractionNetwork(3, recompute_every=every)
