"""The nine rules of bitwise training, one test each: with the rule one hash, without it several.

A rule is switched off by putting what one would write without it in the place of the code that keeps it.
"""

import json
import threading
from dataclasses import replace

import dense
import numpy as np
import pytest
import torch
from one_mlp import an_mlp
from one_operation import in_python, multiply, table_at
from random_events import random_event
from random_store import write_random_store
from tiled import TiledEvent, sha
from torch import nn

from domainpar.nn import blocks, operations, program, tilewise
from domainpar.nn.gradients import GradientSink, GradSink
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.kernels import EPS, NUM_CONSTANTS, SCALE, SHIFT
from domainpar.nn.mlp import padded
from domainpar.nn.program import set_threads
from domainpar.nn.stages import EdgeStage, NodeStage, run_chain
from domainpar.parallel import local
from domainpar.parallel.halo import CompleteHalo, Halo, HaloRows, _Adjoint
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.local import EDGES, HAS_GHOSTS, OWNED, PAIRS
from domainpar.runs.checkpoint import Checkpoints, TrainingState
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.training.sampler import Sample, steps_of_epoch
from domainpar.train import train

NUM_TILES = 12
RANKS = (1, 2, 3, 5)


@pytest.fixture(scope="module")
def event():
    graph = random_event(3, 400, 4000, reach=8)
    return TiledEvent.of(graph, np.arange(400) * NUM_TILES // 400, NUM_TILES)


@pytest.fixture(scope="module")
def ring():
    """Edges between near nodes only: most tiles of a part need no ghost, and need not wait for one."""
    graph = random_event(3, 400, 4000)
    rng = np.random.default_rng(3)
    src = rng.integers(0, 400, graph.num_edges)
    near = np.stack([src, (src + rng.integers(-60, 61, graph.num_edges)) % 400])
    return TiledEvent.of(replace(graph, edge_index=near), np.arange(400) * NUM_TILES // 400, NUM_TILES)


def _train(
    world, event, grouping, *, dtype=torch.float32, num_steps=2, order="edge-first", hidden=16, cut_twice=True, **flags
):
    """Some steps of the network with a simple loss; the hash of all parameters and of the scores of owned edges.

    Both copies of a cut edge have the gradient of its loss, or with `cut_twice=False` only that of its owner.
    """
    part = event.part(world.transport, event.grouping(grouping, world.size), dtype)
    model = InteractionNetwork(3, 6, hidden=hidden, graph_iters=2, order=order, dtype=dtype, **flags)
    sink = GradientSink(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    owned = torch.from_numpy(part.graph.plan.edge_owned)
    for _ in range(num_steps):
        logits = model(part.graph, part.halo)
        upstream = torch.tanh(logits.detach()) / event.graph.num_edges
        logits.backward(upstream if cut_twice else upstream * owned)
        assert sink.reduce(world.transport) == 0
        optimizer.step()
    return sha(*model.parameters()), part.graph.plan.edge_ids[owned].tolist(), logits.detach()[owned].tolist()


def _hashes(event, **flags):
    """What 1, 2, 3 and 5 ranks end with, in ranges or dealt at random: parameters, and scores in global order."""
    hashes = set()
    for num_ranks, grouping in zip(RANKS, ("ranges", "random", "ranges", "random")):
        found = run_ranks(_with_flags, num_ranks, event, grouping, flags)
        scores = {edge: logit for _, ids, logits in found for edge, logit in zip(ids, logits)}
        hashes.add((frozenset(parameters for parameters, _, _ in found), tuple(scores[i] for i in sorted(scores))))
    return hashes


def _with_flags(world, event, grouping, flags):
    return _train(world, event, grouping, **flags)


@pytest.mark.parametrize("order", ["edge-first", "node-first"])
@pytest.mark.parametrize(
    "flags",
    [{"dtype": torch.float32}, {"dtype": torch.float64}, {"products": torch.bfloat16}],
    ids=["float32", "float64", "bfloat16 edges"],
)
def test_with_all_rules_there_is_one_hash(event, flags, order):
    assert len(_hashes(event, order=order, **flags)) == 1


def _by_the_library(kind, out_kind):
    """Without rule 1: the product of a library, which takes another order of sums for another number of rows."""

    def multiply_rows(arguments, first, count):
        inputs, outputs, add = arguments[1], arguments[4], arguments[5]
        rows, weight = table_at(arguments[0], count, inputs, kind), table_at(arguments[2], inputs, outputs, kind)
        out = table_at(arguments[3], count, outputs, out_kind)
        product = torch.mm(torch.from_numpy(rows), torch.from_numpy(weight)).numpy()
        out[:] = out + product if add else product

    return in_python(multiply_rows)


def _in_halves(kind, out_kind):
    """Without rule 1: a product that takes many rows in another order of sums, as libraries do on some processors."""

    def multiply_rows(arguments, first, count):
        inputs, outputs, add = arguments[1], arguments[4], arguments[5]
        rows, weight = table_at(arguments[0], count, inputs, kind), table_at(arguments[2], inputs, outputs, kind)
        out = table_at(arguments[3], count, outputs, out_kind)
        middle = inputs // 2 if count > 50 else inputs
        parts = [(rows[:, part], weight[part]) for part in (slice(0, middle), slice(middle, None))]
        product = sum(np.einsum("ik,kj->ij", *part) for part in parts)
        out[:] = out + product if add else product

    return in_python(multiply_rows)


def _counts_that_change_a_row():
    """In strips of how many rows, of those up to 100, the first one has other bits than alone."""
    rows, weight = (np.random.default_rng(seed).random((size, 64)) for seed, size in ((0, 100), (1, 64)))
    products = np.empty((101, 100, 64))
    for count in range(1, 101):
        multiply(rows, count, weight, products[count], False)
    return [count for count in range(1, 101) if (products[count, 0] != products[1, 0]).any()]


@pytest.mark.parametrize("product", [_by_the_library, _in_halves])
def test_rule_1_with_the_products_of_a_library_rows_depend_on_their_company(event, monkeypatch, product):
    assert not _counts_that_change_a_row()
    monkeypatch.setattr(operations, "multiply_rows", product)
    if not _counts_that_change_a_row() and product is _by_the_library:
        pytest.skip("the library's products keep rows apart on this processor, so that nothing can be shown with them")
    assert len(_hashes(event, dtype=torch.float64)) > 1


class _ClearedBefore(tilewise._TileSums):
    """Sums that are 0 before the first tile, also those that no tile clears."""

    def __init__(self, graph, width, dtype):
        super().__init__(graph, width, dtype)
        self.at_ends.zero_()
        self._at_pairs.zero_()


def _with_running_sums(graph):
    """Without rule 2: all edges that begin at a node are one pair, which no tile clears, whatever tiles they lie in."""
    at_src = torch.where(graph.src < graph.num_owned, graph.src, -1)
    edges = graph.tiles.edges.copy()
    edges[:, PAIRS] = 0
    tiles = replace(graph.tiles, edges=edges, pair_of_edge=at_src, pair_rows=torch.arange(graph.num_owned))
    return replace(graph, tiles=tiles)


def _sums_of_tiles_in_both_orders(world, event, running):
    part = event.part(world.transport, event.grouping("ranges", world.size))
    graph = _with_running_sums(part.graph) if running else part.graph
    stage = EdgeStage(an_mlp(12, (16,), torch.Generator().manual_seed(0)))
    found = []
    for tiles in (graph.tiles.edges, graph.tiles.edges[::-1]):
        nodes = part.halo.spread(graph.features[: graph.num_owned])
        _, sums = stage(nodes, graph.edge_features, replace(graph, tiles=replace(graph.tiles, edges=tiles)))
        found.append(sums)
    return found


def test_rule_2_a_running_sum_over_tiles_in_reverse_is_another_sum(event, monkeypatch):
    """Sums by (tile, node) partials let tiles run in any order; a running sum does not."""
    ((partials, of_reverse),) = run_ranks(_sums_of_tiles_in_both_orders, 1, event, False)
    assert sha(partials) == sha(of_reverse)
    monkeypatch.setattr(tilewise, "_TileSums", _ClearedBefore)
    ((running, of_reverse),) = run_ranks(_sums_of_tiles_in_both_orders, 1, event, True)
    assert sha(running) != sha(of_reverse)
    torch.testing.assert_close(running, partials)  # a sum all the same


def _sums_of_one_stage(world, event, running):
    part = event.part(world.transport, event.grouping("ranges", world.size))
    graph = _with_running_sums(part.graph) if running else part.graph
    stage = EdgeStage(an_mlp(12, (16,), torch.Generator().manual_seed(0)))
    nodes = part.halo.spread(graph.features[: graph.num_owned])
    return stage(nodes, graph.edge_features, graph)[1].detach()


def test_rule_2_a_running_sum_depends_on_which_tiles_wait_for_ghosts(ring, monkeypatch):
    def num_hashes(running):
        return len({sha(*run_ranks(_sums_of_one_stage, num_ranks, ring, running)) for num_ranks in RANKS})

    assert num_hashes(running=False) == 1
    monkeypatch.setattr(tilewise, "_TileSums", _ClearedBefore)
    assert num_hashes(running=True) > 1


class _NoHalo:
    """Spreads rows to nobody: a stage takes all local rows for owned ones."""

    def __init__(self, plan):
        self.plan = plan

    def spread(self, rows):
        return HaloRows(self, rows, rows.detach().contiguous())


def _as_if_all_were_owned(graph):
    """The local graph as an event of its own, ghosts and edges of foreign tiles included."""
    plan = graph.plan
    nothing, everything = np.empty(0, np.int64), np.ones(plan.num_edges, bool)
    whole = replace(plan, owned_ids=plan.local_ids, ghost_ids=nothing, edge_owned=everything)
    nodes, edges = graph.tiles.ranges_of_nodes, graph.tiles.edges.copy()
    pair_rows, pair_of_edge, first = local._pairs(whole, *edges[:, EDGES].T)
    edges[:, PAIRS] = np.stack([first[:-1], first[1:]], 1)
    edges[:, OWNED], edges[:, HAS_GHOSTS] = 1, 0
    tiles = local.Tiles(nodes, edges, torch.from_numpy(pair_of_edge), torch.from_numpy(pair_rows))
    with_ghosts = np.append(nodes, [[plan.num_owned, plan.num_local]] if plan.num_ghosts else nodes[:0], axis=0)
    tiles_with_ghosts = replace(tiles, ranges_of_nodes=with_ghosts)
    # Ghosts are no tile without edges: their sums would be cleared when it has its turn.
    vars(tiles_with_ghosts)["ranges_of_edges"] = tiles.ranges_of_edges
    return replace(graph, plan=whole, tiles=tiles_with_ghosts)


def _summed_across_ranks(stages, nodes, edges, graph, plain=run_chain, **how):
    """Without rule 3: ghosts return partial gradients and owners add them up, in the order of ranks."""
    whole = _as_if_all_were_owned(graph)
    nodes.finish()
    rows = _Adjoint.apply(nodes.owned, nodes.halo, False)
    results = plain(stages, _NoHalo(whole.plan).spread(rows), edges, whole, **how)
    return results._replace(sums=results.sums[: graph.num_owned], nodes=nodes)


def test_rule_3_gradients_added_across_ranks_depend_on_the_ranks(event, monkeypatch):
    with_rule = run_ranks(_with_flags, 3, event, "ranges", {"dtype": torch.float64})[0]
    monkeypatch.setattr("domainpar.nn.interaction.run_chain", _summed_across_ranks)
    monkeypatch.setattr(tilewise, "_TileSums", _ClearedBefore)
    without = run_ranks(_with_flags, 3, event, "ranges", {"dtype": torch.float64, "cut_twice": False})[0]
    assert without[1] == with_rule[1]
    np.testing.assert_allclose(without[2], with_rule[2], rtol=1e-9)  # right to rounding all the same
    assert len(_hashes(event, cut_twice=False)) > 1


class _FloatSums(IntegerSums):
    """Without rule 4: partials are added as floats, on each rank and then over ranks."""

    def __init__(self, size, device="cpu"):
        super().__init__(size, device)
        self._floats = torch.zeros(size, dtype=torch.float64)

    def add(self, partials, start=0):
        self._floats[start : start + partials.numel()] += partials.detach().double().flatten()

    def add_limbs(self, limbs, rejected, start=0):
        self.add(torch.from_numpy(limbs[0].copy().view(np.float64)), start)

    def reduce(self, transport):
        everyone = [np.frombuffer(row) for row in transport.all_gather(self._floats.numpy().tobytes())]
        self._floats = torch.from_numpy(sum(everyone).copy())

    def total(self):
        return self._floats.clone()

    def clear(self):
        self._floats.zero_()


def _added_as_floats(kind):
    """In the place of high limbs, sums of the floats that are split."""

    def split(arguments, first, count):
        sums = table_at(arguments[2], 1, arguments[1], torch.float64)
        sums += table_at(arguments[0], 1, arguments[1], kind)

    return in_python(split)


def test_rule_4_float_sums_over_tiles_and_ranks_depend_on_the_ranks(event, monkeypatch):
    monkeypatch.setattr("domainpar.nn.gradients.IntegerSums", _FloatSums)
    monkeypatch.setattr(operations, "split", _added_as_floats)
    assert len(_hashes(event, dtype=torch.float64)) > 1


def _tiles_under_autograd(stage, graph, nodes):
    """Without rule 5: autograd chains the tiles, and adds up what comes back to a node in its own order."""
    rows, tiles = [None] * graph.num_edges, graph.tiles.edges
    # As they run while ghosts are on their way.
    for start, stop in tiles[np.argsort(tiles[:, HAS_GHOSTS], kind="stable"), EDGES].tolist():
        block = torch.cat([nodes[graph.src[start:stop]], nodes[graph.dst[start:stop]]], dim=1)
        padding = (0, 0, 0, padded(len(block), 32) - len(block))  # so that rows keep their bits as far as may be
        rows[start:stop] = dense.mlp(stage.mlp, nn.functional.pad(block, padding))[: stop - start].unbind()
    return torch.stack(rows)


def _gradient_at_owned_nodes(world, event, plain):
    part = event.part(world.transport, event.grouping("ranges", world.size))
    graph, plan = part.graph, part.graph.plan
    stage = EdgeStage(an_mlp(2 * 16, (16, 16), torch.Generator().manual_seed(0)))
    GradientSink(stage)
    generator = torch.Generator().manual_seed(1)
    nodes = torch.randn(event.graph.num_nodes, 16, generator=generator)
    weights = torch.randn(event.graph.num_edges, 16, generator=generator)[torch.from_numpy(plan.edge_ids)]
    if plain:
        nodes = nodes[torch.from_numpy(plan.local_ids)].requires_grad_()
        new_edges = _tiles_under_autograd(stage, graph, nodes)
    else:
        nodes = nodes[torch.from_numpy(plan.owned_ids)].requires_grad_()
        new_edges, _ = stage(part.halo.spread(nodes), None, graph, sums=False)
    new_edges.backward(weights)
    return nodes.grad[: graph.num_owned].numpy().tobytes()


def test_rule_5_autograd_adds_what_comes_back_in_the_order_of_its_graph_which_overlap_changes(ring):
    def num_hashes(plain):
        return len({b"".join(run_ranks(_gradient_at_owned_nodes, ranks, ring, plain)) for ranks in RANKS})

    assert num_hashes(plain=False) == 1
    assert num_hashes(plain=True) > 1


def _with_rank_many_threads(world, event, num_threads):
    """Each rank computes with another number of threads inside a tile, as a user's environment may have it."""
    torch.set_num_threads(num_threads)
    try:
        return _train(world, event, "ranges", hidden=64)[0]
    finally:
        torch.set_num_threads(1)


def _through_torchs_norm(width, kind, *kinds):
    """Without rule 6: LayerNorm and ReLU of a tile by torch, which shares its rows among threads."""

    def layer_backward(arguments, first, count):
        constants = torch.from_numpy(table_at(arguments[0], NUM_CONSTANTS, width, kind))
        rows, gradient, out = (torch.from_numpy(table_at(arguments[i], count, width, kind)) for i in (6, 17, 19))
        inverse = torch.from_numpy(table_at(arguments[7], count, 1, kind))
        given = [one.clone().requires_grad_() for one in (rows / inverse, constants[SCALE], constants[SHIFT])]
        with torch.enable_grad():
            normed = torch.relu(nn.functional.layer_norm(given[0], (width,), *given[1:], float(constants[EPS, 0])))
        grad_rows, *of_norm = torch.autograd.grad(normed, given, gradient)
        grad_constants = torch.from_numpy(table_at(arguments[20], 3, width, kind))
        grad_constants += torch.stack([grad_rows.sum(dim=0), *of_norm])
        out.copy_(grad_rows)

    return in_python(layer_backward)


def _gradients_of_a_node_stage(world, event, num_threads):
    torch.set_num_threads(num_threads)
    try:
        graph = event.part(world.transport, event.grouping("ranges", world.size)).graph
        stage = NodeStage(an_mlp(3, (64, 64), torch.Generator().manual_seed(0)))
        sink = GradientSink(stage)
        out = stage([graph.features], graph)
        out.backward(torch.tanh(out.detach()))
        sink.reduce(world.transport)
        return torch.cat([parameter.grad.flatten() for parameter in stage.parameters()])
    finally:
        torch.set_num_threads(1)


def test_rule_6_threads_inside_a_tile_are_refused_since_they_change_bits(event, monkeypatch):
    with pytest.raises(RuntimeError, match="torch computes with 4 threads inside a kernel"):
        run_ranks(_with_rank_many_threads, 2, event, 4)
    monkeypatch.setattr("domainpar.nn.gradients._check_all_in_stages", lambda model: None)
    graph = random_event(4, 30_000, 0)
    large = TiledEvent.of(graph, np.arange(30_000) * 4 // 30_000, 4)  # small tiles stay on one thread anyway
    (ours,) = run_ranks(_gradients_of_a_node_stage, 1, large, 1)
    monkeypatch.setattr(operations, "layer_backward", _through_torchs_norm)
    for module in (blocks, program):
        monkeypatch.setattr(module, "STRIP", 30_000 // 4)  # a tile at once
    one, four = (run_ranks(_gradients_of_a_node_stage, 1, large, threads)[0] for threads in (1, 4))
    torch.testing.assert_close(one, ours, rtol=1e-3, atol=1e-3)  # the same but for rounding
    assert sha(one) != sha(four)


def test_rule_6_threads_over_tiles_change_no_bit(event):
    found = [run_ranks(_on_a_team, num_ranks, event, threads) for num_ranks in (1, 2) for threads in (1, 2, 4)]
    assert len(set().union(*found)) == 1


def _on_a_team(world, event, num_threads):
    set_threads(num_threads)
    return _train(world, event, "ranges")[0]


def test_rule_7_the_order_of_samples_is_a_function_of_seed_and_epoch():
    samples = [Sample(record=name) for name in "abcdefgh"]
    for epoch in range(3):
        assert steps_of_epoch(samples, 3, seed=5, epoch=epoch) == steps_of_epoch(samples, 3, seed=5, epoch=epoch)
    orders = {str(steps_of_epoch(samples, 3, seed, epoch)) for seed in (5, 6) for epoch in (0, 1)}
    assert len(orders) == 4


def _order_of_own(samples, per_step, seed, epoch, *_):
    """Without rule 7: every rank draws the order from a generator of its own."""
    rank = int(threading.current_thread().name.removeprefix("rank "))
    order = np.random.default_rng([seed, epoch, rank]).permutation(len(samples))
    return [[samples[index] for index in order[first : first + per_step]] for first in range(0, len(order), per_step)]


def _parameters_after_training(world, store, out):
    flags = {"hidden": 16, "graph_iters": 1, "epochs": 1, "events_per_step": 2, "overwrite": True}
    run = train(TrainConfig(**flags, out=str(out)), store, world)
    return sha(*run.trainer.model.parameters())


def test_rule_7_an_order_that_each_rank_draws_for_itself_gives_other_bits_or_is_refused(tmp_path, monkeypatch):
    store = write_random_store(tmp_path / "store", num_train=4, num_val=0)

    def hashes():
        """Of one rank, and of two and three that take different events."""
        found = [run_ranks(_parameters_after_training, n, store, tmp_path / "run", domain_size=1) for n in (1, 2, 3)]
        return set().union(*found)

    assert len(hashes()) == 1
    monkeypatch.setattr("domainpar.tracking.training.inputs.steps_of_epoch", _order_of_own)
    assert len(hashes()) > 1
    with pytest.raises((RuntimeError, ValueError), match="node|plan|edge|tile"):  # two ranks open different events
        run_ranks(_parameters_after_training, 2, store, tmp_path / "run", domain_size=2, timeout=10)


def _save(world, directory, model, with_rank):
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(step=3, dataset=f"on {world.size} ranks" if with_rank else "abc")
    saved = Checkpoints(directory / str(world.size)).save(model, optimizer, state, best=True) if world.is_root else None
    return saved and {path.name: path.read_bytes() for path in saved.iterdir()}


def test_rule_8_anything_of_the_ranks_in_a_checkpoint_changes_its_bytes(tmp_path):
    model = InteractionNetwork(3, 6, hidden=16)
    files = [run_ranks(_save, num_ranks, tmp_path, model, False)[0] for num_ranks in (1, 4)]
    assert files[0] == files[1]
    assert sorted(files[0]) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert list(json.loads(files[0]["state.json"])) == sorted(json.loads(files[0]["state.json"]))
    with_ranks = [run_ranks(_save, num_ranks, tmp_path, model, True)[0] for num_ranks in (1, 4)]
    assert with_ranks[0] != with_ranks[1]


def _rounded(rows):
    return rows.to(torch.bfloat16).to(rows.dtype)


def _start_to_fill_with_rounded_rows(self, owned, ghosts=None, *, plain=Halo.start_fill):
    return plain(self, _rounded(owned), ghosts)


def _spread_all_rounded(self, owned, *, plain=CompleteHalo.spread):
    return plain(self, _rounded(owned))


def test_rule_9_rounding_only_what_crosses_a_border_depends_on_the_borders(event, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(CompleteHalo, "start_fill", _start_to_fill_with_rounded_rows)
        assert len(_hashes(event)) > 1
    monkeypatch.setattr(CompleteHalo, "spread", _spread_all_rounded)
    assert len(_hashes(event)) == 1


def test_rule_9_a_layer_outside_all_stages_is_refused_by_name():
    class WithLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = InteractionNetwork(3, hidden=16)
            self.calibration = nn.Linear(1, 1)

    with pytest.raises(ValueError, match=r"parameter calibration\.weight belongs to no stage"):
        GradientSink(WithLinear())
    assert issubclass(NodeStage, GradSink)
