"""The nine rules of bitwise training, one test each: with the rule one hash, without it several.

A rule is switched off by putting what one would write without it in the place of the code that keeps it.
"""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from random_events import random_event
from random_store import write_random_store
from tiled import TiledEvent, sha
from torch import nn

from domainpar.config import TrainConfig
from domainpar.nn import mlp, stages
from domainpar.nn.gradients import GradientSink, TakesGradients
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.mlp import MLP
from domainpar.parallel import halo as halo_module
from domainpar.parallel.halo import CompleteHalo, Halo
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.testing import run_ranks
from domainpar.training.checkpoint import Checkpoints, TrainingState
from domainpar.training.run import train
from domainpar.training.sampler import Sample, steps_of_epoch

NUM_TILES = 12
RANKS = (1, 2, 3, 5)


@pytest.fixture(scope="module")
def event():
    graph = random_event(3, 400, 4000)
    return TiledEvent.of(graph, np.arange(400) * NUM_TILES // 400, NUM_TILES)


def _train(world, event, grouping, dtype=torch.float32, num_steps=2, order="edge-first", hidden=16):
    """Some steps of the network with a simple loss; the hash of all parameters and of the scores of owned edges."""
    part = event.part(world.transport, event.grouping(grouping, world.size), dtype)
    model = InteractionNetwork(3, 6, hidden=hidden, graph_iters=2, order=order, dtype=dtype)
    sink = GradientSink(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        logits = model(part.graph, part.halo)
        logits.backward(torch.tanh(logits.detach()) / event.graph.num_edges)
        assert sink.reduce(world.transport) == 0
        optimizer.step()
    owned = torch.from_numpy(part.graph.plan.edge_owned)
    return sha(*model.parameters()), part.graph.plan.edge_ids[owned].tolist(), logits.detach()[owned].tolist()


def _hashes(event, **flags):
    """What 1, 2, 3 and 5 ranks end with, in ranges and dealt at random: parameters, and scores in global order."""
    hashes = set()
    for num_ranks in RANKS:
        for grouping in ("ranges", "random"):
            found = run_ranks(_with_flags, num_ranks, event, grouping, flags)
            scores = {edge: logit for _, ids, logits in found for edge, logit in zip(ids, logits)}
            hashes.add((frozenset(parameters for parameters, _, _ in found), tuple(scores[i] for i in sorted(scores))))
    return hashes


def _with_flags(world, event, grouping, flags):
    return _train(world, event, grouping, **flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_all_rules_there_is_one_hash(event, dtype):
    assert len(_hashes(event, dtype=dtype)) == 1


def test_rule_1_without_padded_blocks_rows_depend_on_their_company(event, monkeypatch):
    monkeypatch.setattr(stages, "ROWS", 1)
    assert len(_hashes(event, dtype=torch.float64)) > 1


class _SumsInLocalOrder(stages._EndSums):
    """Without rule 2: one running sum over the local edges at `src`, whatever tiles they lie in."""

    def add(self, tile, at_dst, at_src):
        if self._at_dst.shape[1]:
            super().add(tile, at_dst, at_src)
            self._at_src.index_add_(0, self._graph.src[tile.edges], at_src)

    def __init__(self, graph, width, like):
        super().__init__(graph, width, like)
        self._graph = graph

    def finish(self):
        own = self._at_src.clone()
        own[self._graph.num_owned :] = 0
        return self._at_dst, own


def test_rule_2_a_running_sum_over_tiles_in_reverse_is_another_sum(event, monkeypatch):
    """Sums by (tile, node) partials let tiles run in any order; a running sum does not."""

    def reversed_tiles(world, event, running):
        part = event.part(world.transport, event.grouping("ranges", world.size))
        sums = _SumsInLocalOrder if running else stages._EndSums
        found = []
        for tiles in (part.graph.tiles.edges, part.graph.tiles.edges[::-1]):
            ends = sums(part.graph, 5, part.graph.features)
            rows = torch.randn(part.graph.num_edges, 5, generator=torch.Generator().manual_seed(1))
            for tile in tiles:
                ends.add(tile, rows[tile.edges], rows[tile.edges])
            found.append(sha(*ends.finish()))
        return len(set(found))

    assert run_ranks(reversed_tiles, 1, event, False) == [1]
    assert run_ranks(reversed_tiles, 1, event, True) == [2]


class _SummedAcrossRanks(torch.autograd.Function):
    """Without rule 3: ghosts return partial gradients and owners add them up, in the order of ranks."""

    @staticmethod
    def forward(ctx, owned, halo):
        ctx.halo = halo
        return halo._extend(owned)

    @staticmethod
    def backward(ctx, *grads):
        num_owned = ctx.halo.plan.num_owned
        return grads[0][:num_owned] + ctx.halo.sum_to_owners(grads[0][num_owned:]), None


class _OwnSumsOnly(torch.autograd.Function):
    """Without rule 3: nothing is handed out, ghosts' aggregates have no gradient."""

    @staticmethod
    def forward(ctx, local, halo):
        ctx.num_local = len(local)
        return local[: halo.plan.num_owned].clone()

    @staticmethod
    def backward(ctx, *grads):
        padding = grads[0].new_zeros(ctx.num_local - len(grads[0]), grads[0].shape[1])
        return torch.cat([grads[0], padding]), None


def test_rule_3_gradients_added_across_ranks_depend_on_the_ranks(event, monkeypatch):
    monkeypatch.setattr(halo_module, "_ExtendComplete", _SummedAcrossRanks)
    monkeypatch.setattr(halo_module, "_HandOutAggregates", _OwnSumsOnly)
    assert len(_hashes(event)) > 1


class _FloatSums(IntegerSums):
    """Without rule 4: partials are added as floats, on each rank and then over ranks."""

    def __init__(self, size, device="cpu"):
        super().__init__(size, device)
        self._floats = torch.zeros(size, dtype=torch.float64)

    def add(self, partials, start=0):
        self._floats[start : start + partials.numel()] += partials.detach().double().flatten()

    def reduce(self, transport):
        everyone = [np.frombuffer(row) for row in transport.all_gather(self._floats.numpy().tobytes())]
        self._floats = torch.from_numpy(sum(everyone).copy())

    def total(self):
        return self._floats.clone()

    def clear(self):
        self._floats.zero_()


def test_rule_4_float_sums_over_tiles_and_ranks_depend_on_the_ranks(event, monkeypatch):
    monkeypatch.setattr("domainpar.nn.gradients.IntegerSums", _FloatSums)
    assert len(_hashes(event, dtype=torch.float64)) > 1


def _interior_first(graph):
    """The tiles in the order of overlap: those that touch no ghost run while the exchange is under way."""
    order = sorted(graph.tiles.edges, key=lambda tile: bool((graph.src[tile.edges] >= graph.num_owned).any()))
    return replace(graph, tiles=replace(graph.tiles, edges=tuple(order)))


def _tiles_under_autograd(stage, graph, nodes):
    """Without rule 5: autograd chains the tiles, and adds up what comes back to a node in its own order."""
    rows = [None] * graph.num_edges
    for tile in graph.tiles.edges:
        block = torch.cat([nodes[graph.src[tile.edges]], nodes[graph.dst[tile.edges]]], dim=1)
        padding = (0, 0, 0, mlp.padded(len(block), 32) - len(block))
        rows[tile.edges] = stage.mlp(nn.functional.pad(block, padding))[: tile.num_edges].unbind()
    return torch.stack(rows)


def _gradient_at_owned_nodes(world, event, plain):
    part = event.part(world.transport, event.grouping("ranges", world.size))
    stage = stages.EdgeStage(MLP(2 * 16, (16, 16), torch.Generator().manual_seed(0)))
    GradientSink(stage)
    generator = torch.Generator().manual_seed(1)
    nodes = torch.randn(event.graph.num_nodes, 16, generator=generator)[torch.from_numpy(part.graph.plan.local_ids)]
    weights = torch.randn(event.graph.num_edges, 16, generator=generator)[torch.from_numpy(part.graph.plan.edge_ids)]
    graph = _interior_first(part.graph)
    nodes.requires_grad_()
    if plain:
        new_edges = _tiles_under_autograd(stage, graph, nodes)
    else:
        new_edges, _ = stage(nodes, None, graph, sums=False)
    new_edges.backward(weights)
    return nodes.grad[: graph.num_owned].numpy().tobytes()


def test_rule_5_autograd_adds_what_comes_back_in_the_order_of_its_graph_which_overlap_changes(event):
    def num_hashes(plain):
        return len({b"".join(run_ranks(_gradient_at_owned_nodes, ranks, event, plain)) for ranks in RANKS})

    assert num_hashes(plain=False) == 1
    assert num_hashes(plain=True) > 1


def _with_rank_many_threads(world, event):
    """Each rank computes with another number of threads inside a tile, as a user's environment may have it."""
    torch.set_num_threads(1 + 3 * (world.size > 1))
    try:
        return _train(world, event, "ranges", hidden=64)[0]
    finally:
        torch.set_num_threads(1)


def test_rule_6_threads_inside_a_tile_are_refused_since_they_change_bits(event, monkeypatch):
    with pytest.raises(RuntimeError, match="torch computes with 4 threads inside a kernel"):
        run_ranks(_with_rank_many_threads, 2, event)
    monkeypatch.setattr("domainpar.nn.gradients._check_all_in_stages", lambda model: None)
    graph = random_event(4, 3000, 30_000)
    large = TiledEvent.of(graph, np.arange(3000) * 4 // 3000, 4)  # large tiles: small ones stay on one thread anyway
    assert run_ranks(_with_rank_many_threads, 1, large)[0] != run_ranks(_with_rank_many_threads, 2, large)[0]


def test_rule_7_the_order_of_samples_is_a_function_of_seed_and_epoch():
    samples = [Sample(record=name) for name in "abcdefgh"]
    for epoch in range(3):
        assert steps_of_epoch(samples, 3, seed=5, epoch=epoch) == steps_of_epoch(samples, 3, seed=5, epoch=epoch)
    orders = {str(steps_of_epoch(samples, 3, seed, epoch)) for seed in (5, 6) for epoch in (0, 1)}
    assert len(orders) == 4


def _order_of_own(samples, per_step, seed, epoch):
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
    monkeypatch.setattr("domainpar.training.run.steps_of_epoch", _order_of_own)
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


def _fill_rounded_rows(self, owned, ghosts=None, *, plain=Halo.fill_ghosts):
    return plain(self, _rounded(owned), ghosts)


def _extend_all_rounded(self, owned, *, plain=Halo._extend):
    return plain(self, _rounded(owned))


def test_rule_9_rounding_only_what_crosses_a_border_depends_on_the_borders(event, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(CompleteHalo, "fill_ghosts", _fill_rounded_rows)
        assert len(_hashes(event)) > 1
    monkeypatch.setattr(CompleteHalo, "_extend", _extend_all_rounded)
    assert len(_hashes(event)) == 1


def test_rule_9_a_layer_outside_all_stages_is_refused_by_name():
    class WithLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = InteractionNetwork(3, hidden=16)
            self.calibration = nn.Linear(1, 1)

    with pytest.raises(ValueError, match=r"parameter calibration\.weight belongs to no stage"):
        GradientSink(WithLinear())
    assert issubclass(stages.NodeStage, TakesGradients)
