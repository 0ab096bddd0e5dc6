"""The GPU engine's kernels in Triton's interpreter: formulas, and one hash on any number of parts."""

import inspect
import itertools
import re
import threading

import networks
import numpy as np
import pytest
import test_gates
import torch
from marks import slow
from one_mlp import an_mlp
from pretended_gpu.mended_interpreter import mend
from random_events import random_event
from tiled import TiledEvent, sha
from torch.utils._pytree import tree_leaves

from domainpar.nn import fused, selftest, stages
from domainpar.nn.gradients import GradientSink
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.on_stages import OnStages
from domainpar.nn.stages import EdgeStage
from domainpar.parallel.integer_sums import MOST_UNCARRIED, IntegerSums
from domainpar.testing import run_ranks
from domainpar.tracking.training.loss import edge_loss

pytest.importorskip("triton")
calls = pytest.importorskip("domainpar.nn.fused.calls")
fused_mlp = pytest.importorskip("domainpar.nn.fused.fused_mlp")
arithmetic, launching = fused_mlp.arithmetic, fused_mlp.launching
interpreter = pytest.importorskip("triton.runtime.interpreter")
mend(interpreter)

KEY = 77
BOUND = 1e-5
"""Of max |difference| / max |value| between float32 and the formulas in float64."""


def tiled_event(num_edges=90, num_edge_features=6):
    """An event with self-loops, duplicate edges, isolated nodes and two tiles without any node.

    Small, and of few tiles: the interpreter takes some 0.1 s for a block of a layer.
    """
    graph = random_event(2, 30, num_edges, num_edge_features=num_edge_features, reach=2)
    tiles = np.sort(np.random.default_rng(2).choice([0, 2, 4], 30))
    return TiledEvent.of(graph, tiles, 5, tiny=num_edges <= 1)


@pytest.fixture
def by_kernels(monkeypatch):
    """Compute with the GPU's kernels although nothing lies on a GPU; their launches, one at a time, are listed.

    Tables that begin anywhere would have a kernel compiled a second time; that of losses is compiled for any.
    """
    launches, lock, plain = [], threading.Lock(), launching.launch

    def launch(kernel, grid, *arguments, **constants):
        with lock:  # the interpreter takes one thread at a time
            launches.append((kernel.fn.__name__, constants))
            tables = tree_leaves(arguments) if kernel.fn.__name__ != "edge_losses" else []
            tables = [each for each in tables if isinstance(each, torch.Tensor) and each.is_floating_point()]
            assert not any(table.data_ptr() % calls.ALIGNED for table in tables), kernel.fn.__name__
            plain(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(stages, "TILES", stages.Engine(calls.FusedNodes, calls.FusedEdges))
    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setattr(launching, "PROGRAMS", 2)
    return launches


def on_ranks(event, num_ranks, **how):
    return networks.on_ranks(event, num_ranks, dtype=torch.float32, key=KEY, timeout=200.0, **how)


NETWORKS = {
    "edge-first": {"order": "edge-first", "dropout": 0.3},
    "node-first": {"order": "node-first", "dropout": 0.3, "residual": False, "aggregate": "mean"},
    "deep supervision": {"order": "edge-first", "recompute_every": 1, "activation": "silu", "readouts": "all"},
    "one layer": {"order": "node-first", "shared_weights": True, "layers": 1, "activation": "tanh"},
    "agnn": {"published": "agnn"},
    "mpnn": {"published": "mpnn"},
    "acorn": {"published": "acorn"},
}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("edge-first", (1, 3)),
        *(slow(name, (1, 3)) for name in ("node-first", "agnn", "deep supervision", "one layer", "mpnn", "acorn")),
        slow("edge-first", (2, 8)),
    ],
)
def test_each_network_is_its_formula_and_has_one_hash_on_any_number_of_parts(by_kernels, name, parts):
    event, flags = tiled_event(), {"graph_iters": 2, **NETWORKS[name]}
    found = [on_ranks(event, ranks, **flags) for ranks in parts]
    assert networks.distance(found[0], networks.by_formula(event, KEY, **flags)) <= BOUND
    assert len({answer.sha for answer in found}) == 1
    assert {called for called, _ in by_kernels} >= {"rows_forward", "rows_backward", "sums_at_ends"}


def test_each_program_has_memory_of_its_own_whoever_asks_for_more_meanwhile(by_kernels, monkeypatch):
    asked, launches, kernels = itertools.count(1), [], launching.launch

    def launch(kernel, grid, *arguments, **constants):
        if (name := kernel.fn.__name__) in ("rows_forward", "rows_backward", "node_products_back"):
            parameters = list(inspect.signature(kernel.fn).parameters)
            launches.append((name, grid[0], len(arguments[parameters.index("memory")])))
        kernels(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.delattr(launching, "PROGRAMS")
    monkeypatch.setattr(launching, "__getattr__", lambda name: next(asked), raising=False)  # at each look one more
    on_ranks(tiled_event(), 1, graph_iters=2, order="node-first")
    assert {name for name, _, _ in launches} == {"rows_forward", "rows_backward", "node_products_back"}
    assert all(programs <= memory for _, programs, memory in launches)


@pytest.mark.slow
@pytest.mark.parametrize("kind", test_gates.KINDS)
def test_gated_sums_are_their_formula_with_all_gradients_and_have_one_hash(by_kernels, kind):
    """With layers of two widths, and gradients of features."""
    graph = random_event(2, 70, 60, num_edge_features=test_gates.WIDTH, reach=2)
    event = TiledEvent.of(graph, np.sort(np.random.default_rng(2).choice([0, 2, 3], 70)), 5)
    how = {"dropout": 0.3, "key": KEY}
    found = [test_gates.on_ranks(event, ranks, kind, dtype=torch.float32, **how) for ranks in (1, 3)]
    assert networks.distance(found[0], test_gates.by_formula(event, kind, **how)) <= BOUND
    assert found[0].sha == found[1].sha


@pytest.mark.parametrize(
    ("shape", "flags"),
    [
        ({"num_edge_features": 0}, {}),
        ({"num_edges": 0}, {}),
        ({"num_edges": 1, "num_edge_features": 1}, {}),
        ({}, {"layers": 3, "order": "node-first"}),
    ],
    ids=["no edge features", "no edges", "one edge", "three layers, node-first"],
)
def test_networks_of_other_shapes_and_events_with_little_in_them(by_kernels, shape, flags):
    event, flags = tiled_event(**shape), {"graph_iters": 2, **flags}
    assert networks.distance(on_ranks(event, 3, **flags), networks.by_formula(event, KEY, **flags)) <= BOUND


def test_widths_that_are_no_powers_of_two_and_tiles_of_several_chunks(by_kernels, monkeypatch):
    monkeypatch.setattr(fused_mlp, "CHUNK", 16)
    monkeypatch.setattr(fused_mlp, "CHUNKS_AT_ONCE", 3)
    monkeypatch.setattr(fused_mlp, "ROWS_AT_MOST", 16)
    monkeypatch.setattr(networks, "network", _wide)
    event = tiled_event(60)
    found = [on_ranks(event, ranks, graph_iters=1) for ranks in (1, 3)]
    assert networks.distance(found[0], networks.by_formula(event, KEY, graph_iters=1)) <= BOUND
    assert found[0].sha == found[1].sha


def _wide(event, dtype=torch.float64, **flags):
    return InteractionNetwork(3, event.graph.edge_features.shape[1], hidden=48, dtype=dtype, **flags)


def test_what_is_frozen_gets_no_gradient_and_all_else_has_its_own(by_kernels):
    """A whole MLP, the weight of one layer, and the norms of another fused_mlp."""
    event, frozen = tiled_event(), ("edge_encoder", "head.mlp.linears.0.weight", "node_stages.0.mlp.norms")
    expected = networks.by_formula(event, graph_iters=2).gradients
    for found in run_ranks(_with_frozen, 2, event, frozen, timeout=200.0):
        assert {one for one in frozen for name in found if name.startswith(one)} == set(frozen)
        for name, gradient in found.items():
            if name.startswith(frozen):
                assert gradient is None, name
            else:
                torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-4, atol=1e-5, msg=name)


def _with_frozen(world, event, frozen):
    part = event.part(world.transport, event.grouping("ranges", world.size), torch.float32)
    model = networks.network(event, torch.float32, graph_iters=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(frozen)
    sink = GradientSink(model)
    upstream = networks.upstream(event, torch.float32)
    model(part.graph, part.halo).backward(upstream[torch.from_numpy(part.graph.plan.edge_ids)])
    sink.reduce(world.transport)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture
def rounded_to_nearest(monkeypatch):
    """As cards convert to bfloat16; Triton's interpreter cuts digits off."""
    plain = interpreter._convert_float

    def converted(numbers, kind, to, mode):
        if to != interpreter.tl.bfloat16:
            return plain(numbers, kind, to, mode)
        return torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.mark.usefixtures("rounded_to_nearest")
@pytest.mark.parametrize("order", [slow("edge-first"), "node-first"])
def test_in_bf16_kernels_are_close_to_plain_torch_and_have_one_hash(by_kernels, monkeypatch, order):
    event, flags = tiled_event(), {"products": torch.bfloat16, "order": order, "graph_iters": 2}
    found = [on_ranks(event, ranks, **flags) for ranks in (1, 3)]
    assert any(
        arithmetic.BF16.value in constants["SHAPE"].kinds for name, constants in by_kernels if "SHAPE" in constants
    )
    monkeypatch.setattr(stages, "TILES", stages.BATCHES)
    expected = networks.on_ranks(event, 1, copies_agree=False, dtype=torch.float32, key=KEY, **flags)
    assert found[0].sha == found[1].sha
    assert networks.distance_of_logits(found[0], expected) <= BOUND
    assert networks.distance_of_gradients(found[0], expected) <= 0.005


def test_products_of_three_parts_are_asked_of_matrix_units_where_the_network_says_so(by_kernels, monkeypatch):
    """The interpreter makes them in float32: a card's bits are the campaign's to see."""
    monkeypatch.setattr(networks, "network", _on_matrix_units)
    found = on_ranks(tiled_event(), 1, graph_iters=1)
    assert networks.distance(found, networks.by_formula(tiled_event(), KEY, graph_iters=1)) <= BOUND
    kinds = {kind for _, constants in by_kernels for kind in getattr(constants.get("SHAPE"), "kinds", ())}
    grad_nodes = {constants["KIND"] for _, constants in by_kernels if "KIND" in constants}
    assert kinds == grad_nodes == {arithmetic.TF32X3.value}


def _on_matrix_units(event, dtype=torch.float64, **flags):
    model: OnStages = InteractionNetwork(3, event.graph.edge_features.shape[1], hidden=16, dtype=dtype, **flags)
    model.use_matrix_units()
    return model


def test_a_sum_at_a_node_runs_over_its_edges_in_global_order(by_kernels):
    event = tiled_event()
    for rank, sums, rows, graph in run_ranks(_sums, 2, event):
        expected = torch.zeros(graph.num_owned, 2 * rows.shape[1])
        for edge in range(graph.num_edges):
            for half, node in enumerate((graph.dst[edge], graph.src[edge])):
                if node < graph.num_owned:
                    expected[node].view(2, -1)[half] += rows[edge]
        assert sha(sums) == sha(expected), f"rank {rank}"


def _sums(world, event):
    graph = event.part(world.transport, event.grouping("random", world.size, seed=1), torch.float32).graph
    rows = torch.randn(graph.num_edges, 48, generator=torch.Generator().manual_seed(world.rank))
    edges = calls.FusedEdges((), graph, None, rows)
    return world.rank, edges._at_ends(rows, rows), rows, graph


# --- the loss, and sums of integers ----------------------------------------------------------------------------------


def test_the_loss_and_its_gradient_are_those_of_the_cpu(by_kernels, monkeypatch):
    event = tiled_event(200)
    monkeypatch.setattr(fused_mlp, "CHUNK", 32)
    monkeypatch.setattr(calls, "CHUNK", 32)
    for graph in run_ranks(_labelled, 2, event):
        generator = torch.Generator().manual_seed(3)
        logits, weights = 4 * torch.randn(2, graph.num_edges, generator=generator)
        expected, found = IntegerSums(1), IntegerSums(1)
        grad_logits = edge_loss(logits, graph, weights, 3.5, expected)
        gradient = torch.empty_like(logits)
        calls.edge_losses(logits, weights, graph, 3.5, found, gradient)
        torch.testing.assert_close(gradient, grad_logits, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found.total(), expected.total(), rtol=1e-12, atol=0)
        logits[3] = float("inf")
        calls.edge_losses(logits, weights, graph, 3.5, found, gradient)
        owned = bool(graph.tiles.owned[torch.searchsorted(graph.tiles.edge_ptr, torch.tensor(3), right=True) - 1])
        assert found.rejected == owned


def test_the_gradient_of_several_readouts_does_not_depend_on_how_they_lie(by_kernels):
    (graph,) = run_ranks(_labelled, 1, tiled_event())
    logits = torch.randn(graph.num_edges, 2, generator=torch.Generator().manual_seed(3)).t()
    sums = [IntegerSums(1) for _ in range(2)]
    found, expected = (
        edge_loss(one, graph, torch.ones(graph.num_edges), 9.0, own) for one, own in zip((logits, logits.clone()), sums)
    )
    assert found.is_contiguous()
    assert torch.equal(found, expected)


def _labelled(world, event):
    graph = event.part(world.transport, event.grouping("random", world.size, seed=1), torch.float32).graph
    label = torch.randint(0, 2, (graph.num_edges,), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    return type(graph)(**{**{name: getattr(graph, name) for name in graph.__dataclass_fields__}, "label": label})


def test_partials_become_the_integers_of_the_sums_and_what_is_not_finite_is_counted(by_kernels):
    values = torch.tensor([1.5, -3e-9, 2.0**25, 2.0**-40 * 3, 0.0, float("nan"), 2.0**26, float("inf"), -7e5])
    mlp = an_mlp(1, (len(values),), torch.Generator(), readout=True)
    grad_sink = EdgeStage(mlp)
    sink = GradientSink(torch.nn.ModuleList([grad_sink]))
    # A single row: the gradient of the bias is what comes back, and that of the weight the same times 1.
    only = fused_mlp.FusedMLP(
        mlp,
        fused_mlp.shape_of(mlp, [torch.ones(1, 1)], None, None),
        (torch.ones(1, 1),),
        fused_mlp.packed(mlp),
        fused_mlp.Dropout.of(None, values),
    )
    chunks = fused_mlp.chunks_of(np.array([[0, 1]]), np.ones(1, np.int64), values.device)
    only.backward(chunks, grad_sink, values[None], None, 0, [False])
    expected = IntegerSums(2 * len(values))
    expected.add(torch.cat([values, values]))
    rejected = sink.rejected_now()
    assert int(rejected) == expected.rejected == 6
    (piece,) = sink._pieces
    assert torch.equal(piece.sums.total(), expected.total())


def test_more_partials_than_a_low_limb_takes_are_refused():
    with pytest.raises(ValueError, match="at most 2048"), IntegerSums(1).room_for(MOST_UNCARRIED + 1):
        pass


# --- what is promised -------------------------------------------------------------------------------------------------


@pytest.fixture
def tried(by_kernels, monkeypatch):
    """The self-test with the GPU's kernels, which run on the CPU here; few rows, for they are slow."""
    from domainpar.nn.fused import trial

    monkeypatch.setattr(selftest, "SAMPLE_ROWS", 150)
    monkeypatch.setattr(selftest, "SUBSETS", (1, 7, 100))
    monkeypatch.setattr(selftest, "_work_on", lambda device: trial)
    return by_kernels


def _self_test(world):
    model = InteractionNetwork(3, 2, hidden=16, graph_iters=1)
    return selftest.rows_are_independent(model, world.transport)


def test_the_self_test_passes(tried):
    assert run_ranks(_self_test, 1, timeout=200.0) == [None]
    assert tried


def test_the_self_test_sees_rows_that_depend_on_where_they_are(tried, monkeypatch):
    plain = launching.launch

    def launch(kernel, grid, *arguments, **constants):
        plain(kernel, grid, *arguments, **constants)
        if kernel.fn.__name__ == "rows_forward":
            arguments[-1][64:] *= 1 + 2**-20  # `out`: a block that is not the first has other bits

    monkeypatch.setattr(launching, "launch", launch)
    (problem,) = run_ranks(_self_test, 1, timeout=200.0)
    assert "change with the other rows of the block (forward" in problem


def test_the_self_test_sees_programs_that_spoil_their_memory_from_piece_to_piece(tried, monkeypatch):
    plain = launching.launch

    def launch(kernel, grid, *arguments, **constants):
        plain(kernel, grid, *arguments, **constants)
        if kernel.fn.__name__ == "rows_backward" and grid == (1,) and arguments[1] > 1:  # one for several pieces
            arguments[-2][0] += 1  # a limb

    monkeypatch.setattr(launching, "launch", launch)
    (problem,) = run_ranks(_self_test, 1, timeout=200.0)
    assert "changes with how many programs of the GPU compute it" in problem


def _mlp(*widths, dtype=torch.float32, dropout=0.0):
    return an_mlp(3, widths, torch.Generator(), dropout=dropout).to(dtype)


@pytest.mark.parametrize(
    ("mlp", "why"),
    [
        (_mlp(16, 32), None),
        (_mlp(272), "at most 256 columns, and a layer has 272"),
        (_mlp(*[16] * 6), None),
        (_mlp(*[16] * 6, dropout=0.1), "drop in at most 4 layers, and an MLP has 6"),
        (_mlp(16, dtype=torch.float64), "compute in float32, and parameters are torch.float64"),
    ],
)
def test_which_perceptrons_the_kernels_take(mlp, why):
    found = fused.refused(mlp)
    assert found is None if why is None else re.search(why, found)


def test_the_environment_can_ask_for_plain_torch(monkeypatch):
    monkeypatch.delenv(fused.ENGINE, raising=False)
    assert fused.missing() is None
    monkeypatch.setenv(fused.ENGINE, "torch")
    assert "DOMAINPAR_GPU_ENGINE=torch" in fused.missing()
    monkeypatch.setenv(fused.ENGINE, "triton")
    monkeypatch.setattr(fused, "_has_triton", lambda: False)
    assert "triton is not installed" in fused.missing()


def test_a_perceptron_is_looked_at_once_for_each_type_and_the_machine_at_each_use(monkeypatch):
    """A stage may be copied to another machine."""
    asked, refused = [], fused.refused
    monkeypatch.setattr(fused, "refused", lambda mlp: asked.append(1) or refused(mlp))
    monkeypatch.setattr(fused, "missing", lambda: None)
    stage = EdgeStage(_mlp(16))
    assert [stage.why_in_torch() for _ in range(3)] == [None] * 3
    assert len(asked) == 1
    assert "compute in float32" in stage.to(torch.float64).why_in_torch()
    assert stage.to(torch.float32).why_in_torch() is None
    assert len(asked) == 2
    monkeypatch.setattr(fused, "missing", lambda: "no kernels on this machine")
    assert stage.why_in_torch() == "no kernels on this machine"


def test_parameters_that_are_packed_for_inference_can_be_trained_afterwards():
    mlp = _mlp(16)
    with torch.inference_mode():
        fused_mlp.packed(mlp)
    weight = mlp.layers[0].linear.weight
    assert not weight.is_inference()
    (torch.ones(1, 3) @ weight.t()).sum().backward()
    assert weight.grad is not None


def test_what_is_frozen_after_the_sink_was_made_is_asked_anew():
    grad_sink = EdgeStage(_mlp(16))
    sink, parameters = GradientSink(torch.nn.ModuleList([grad_sink])), grad_sink.mlp.all_parameters()
    with grad_sink.integer_sums(parameters, 1) as sums:
        assert torch.equal(sums.places, torch.arange(sums.num_sums))
    parameters[0].requires_grad_(False)
    with grad_sink.integer_sums(parameters, 1) as sums:
        assert (sums.places[:48] == -1).all()
        assert torch.equal(sums.places[48:], torch.arange(48, sums.num_sums))
    assert sink.rejected_now() == 0


@pytest.mark.parametrize(
    ("hip", "capability", "why"),
    [(None, (9, 0), None), ("6.4", (9, 0), "this is a torch for ROCm"), (None, (7, 5), "this GPU has 7.5")],
)
def test_which_cards_the_kernels_are_for(monkeypatch, hip, capability, why):
    monkeypatch.delenv(fused.ENGINE, raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    fused._of_card.cache_clear()
    found = fused.missing()
    fused._of_card.cache_clear()
    assert found is None if why is None else why in found


def test_packed_parameters_stay_one_piece_and_are_what_an_optimiser_changes():
    mlp = _mlp(16, 16)
    before = [parameter.clone() for parameter in mlp.all_parameters()]
    together = fused_mlp.packed(mlp)
    assert fused_mlp.packed(mlp).data_ptr() == together.data_ptr()
    assert all(map(torch.equal, before, mlp.all_parameters()))
    with torch.no_grad():
        mlp.layers[1].linear.bias += 1
    assert torch.equal(fused_mlp.packed(mlp), torch.cat([parameter.flatten() for parameter in mlp.all_parameters()]))
    mlp.layers[0].linear.weight.data = torch.zeros_like(mlp.layers[0].linear.weight)
    assert torch.equal(fused_mlp.packed(mlp)[:48], torch.zeros(48))
