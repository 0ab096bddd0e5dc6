"""Interaction networks in plain torch: the definition of those on stages; with norms over all rows, on any ranks."""

import copy

import numpy as np
import pytest
import torch
from marks import slow
from random_events import random_event
from test_heads import EVERYTHING, read, whole
from tiled import TiledEvent, sha

from domainpar.nn.heads import EDGE, Head
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.interaction_module import EventNorm
from domainpar.nn.options import NetworkOptions
from domainpar.nn.standard import Standard
from domainpar.runs.checkpoint import parameters_sha256
from domainpar.testing import run_ranks
from domainpar.tracking.networks.catalogue import ORDERS, build_model
from domainpar.tracking.networks.on_events import OnEvents, on_device

FORMS = {
    "default": {},
    "replaced, means, tanh": {"residual": False, "aggregate": "mean", "activation": "tanh"},
    "sums, shared, silu": {"aggregate": "sum", "shared_weights": True, "activation": "silu"},
    "deep": {"readouts": "all"},
    "standardised": {"standard": Standard((0.1,) * 3, (2.0,) * 3, (0.2,) * 6, (0.5,) * 6)},
}
SIZES = {"hidden": 16, "graph_iters": 3, "seed": 2}


@pytest.fixture(scope="module")
def event():
    return TiledEvent.of(random_event(2, 90, 500, reach=2), np.arange(90) * 7 // 90, 7)


@pytest.mark.parametrize("norm", ["none", "layer"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", ORDERS)
def test_stages_compute_what_the_definition_says(event, name, form, norm):
    options = NetworkOptions(**SIZES, dtype=torch.float64, norm=norm, heads=EVERYTHING, **form)
    stages = build_model(name, 3, 6, options)
    results = [
        whole(run_ranks(read, 1, event, lambda made=made: made, "ranges", 5))
        for made in (stages, OnEvents(stages.plain, heads=EVERYTHING))
    ]
    for name_, table in results[0][0].items():
        torch.testing.assert_close(results[1][0][name_], table, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_parameters_and_constants_of_stages_are_those_of_the_definition_wherever_they_go(form):
    model = InteractionNetwork(3, 6, **SIZES, **form, heads=EVERYTHING)
    moved = copy.deepcopy(model).to(torch.float64)
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(moved.state_dict(), assign=True)
    for made, dtype in ((model, torch.float32), (moved, torch.float64), (loaded, torch.float64)):
        assert set(made.parameters()) == set(made.plain.parameters())
        assert [id(it) for it in made.buffers()] == [id(it) for it in made.plain.buffers()]
        assert {it.dtype for it in made.plain.state_dict().values()} == {dtype}
        assert len(list(made.plain.buffers())) == (4 if "standard" in form else 0)
    assert not set(model.parameters()) & set(moved.parameters())


WEIGHTS = {
    "": ({}, "cb8c4b7b5fb3b7cd"),
    "node first": ({"order": "node-first"}, "e0da9d959b60518b"),
    "shared": ({"shared_weights": True, "layers": 3}, "8165a2758e12282f"),
    "heads": ({"heads": EVERYTHING, "order": "node-first"}, "1768b661246c00a0"),
    "no norm": ({"norm": "none", "dtype": torch.float64, "dropout": 0.1}, "e4b769bf39271a00"),
    "standardised": ({"standard": FORMS["standardised"]["standard"], "readouts": "all"}, "63da5ab23959be19"),
}


@pytest.mark.parametrize(("options", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_the_first_weights_of_a_seed_and_their_names_are_those_of_checkpoints_that_exist(options, expected):
    assert parameters_sha256(InteractionNetwork(3, 6, **SIZES, **options))[:16] == expected


@pytest.mark.parametrize("ranks", [(1, 3), slow((1, 2, 8))], ids=str)
@pytest.mark.parametrize("norm", ["batch", "graph"])
@pytest.mark.parametrize("name", ORDERS)
def test_norms_over_rows_are_the_same_on_any_number_of_ranks_to_rounding(event, name, norm, ranks):
    heads = (EDGE, Head("kinds", "node", 4), Head("jet", "graph", 3, 70.0))
    results = []
    for on in ranks:

        def make():
            options = NetworkOptions(**SIZES, dtype=torch.float64, norm=norm, heads=heads, dropout=0.2)
            return build_model(name, 3, 6, options)

        tables, gradients = whole(run_ranks(read, on, event, make, "random", 3))
        results.append([*tables.values(), *gradients])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_the_norm_of_an_event_is_its_formula():
    norm, rows = EventNorm(3).double(), torch.randn(7, 3, dtype=torch.float64)
    with torch.no_grad():
        norm.mean_scale.copy_(torch.tensor([1.0, 0.5, 0.0]))
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        norm.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    centred = rows - rows.mean(0) * torch.tensor([1.0, 0.5, 0.0])
    expected = centred / (centred.square().mean(0) + 1e-5).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(rows), expected)
    torch.testing.assert_close(
        norm(rows)[:, 0].std(correction=0), torch.tensor(1.0, dtype=torch.float64), rtol=1e-4, atol=0
    )


def test_the_definition_is_in_training_or_evaluation_as_its_network_is():
    network = InteractionNetwork(3, 0, **SIZES, dropout=0.5, readouts="all")
    for mode in (False, True):
        network.train(mode)
        assert {module.training for module in network.plain.modules()} == {mode}


def as_on_gpus(name, **options):
    """A network on stages as GPUs compute it."""
    options = NetworkOptions(**SIZES, **options)
    return on_device(build_model(name, 3, 6, options), torch.device("cpu"), as_on_gpus=True)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", [*ORDERS, "acorn"])
def test_gpus_compute_the_same_network_whatever_is_computed_twice(event, name, form):
    form = {**form, "heads": EVERYTHING} if name in ORDERS else {}
    stages = build_model(name, 3, 6, NetworkOptions(**SIZES, dtype=torch.float64, **form))
    expected, gradients = whole(run_ranks(read, 1, event, lambda: stages, "ranges", 5))
    for every in (None, 1, 2):
        made = as_on_gpus(name, dtype=torch.float64, recompute_every=every, **form)
        assert list(made.state_dict()) == list(stages.state_dict())
        found, theirs = whole(run_ranks(read, 3, event, lambda made=made: copy.deepcopy(made), "random", 5))
        for table, other in zip([*found.values(), *theirs], [*expected.values(), *gradients], strict=True):
            torch.testing.assert_close(table, other, rtol=1e-8, atol=1e-9)


def test_nothing_is_exchanged_twice_and_dropout_is_that_of_the_first_time(event):
    def step(world, every):
        part = event.part(world.transport, event.grouping("random", world.size, seed=1))
        made = as_on_gpus("interaction", recompute_every=every, dropout=0.3)
        gradients = made.gradients()
        before = world.transport.num_exchanges
        loss = made(part.graph, part.halo, 7).sum()
        forward = world.transport.num_exchanges - before
        loss.backward()
        backward = world.transport.num_exchanges - before - forward
        gradients.reduce(world.transport)
        return forward, backward, sha(*(it.grad for it in made.parameters()))

    (plain, back, of_plain), *others = (run_ranks(step, 3, every)[0] for every in (None, 1, 2))
    for forward, again, gradients in others:
        assert (forward, gradients) == (plain, of_plain)
        # First states of nodes are used before the first segment and in it: two shares of a gradient, each of its own.
        assert again - back <= 2 < plain


def test_a_checkpoint_of_stages_goes_on_on_a_gpu_with_its_constants(event):
    stages = build_model("interaction", 3, 6, NetworkOptions(**{**SIZES, "seed": 9}, **FORMS["standardised"]))
    other = as_on_gpus("interaction", standard=Standard.neutral(3, 6))
    other.load_state_dict(stages.state_dict())
    found, expected = (whole(run_ranks(read, 1, event, lambda made=made: made))[0]["edge"] for made in (other, stages))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert parameters_sha256(other) == parameters_sha256(stages)


def test_in_bf16_products_alone_are_rounded(event):
    tables = {}
    for kind in (None, torch.bfloat16):
        for of, made in (("gpu", as_on_gpus("interaction", products=kind)), ("own", with_norm("graph", kind))):
            tables[of, kind] = whole(run_ranks(read, 2, event, lambda made=made: copy.deepcopy(made), "random", 5))[0]
    for of in ("gpu", "own"):
        exact, rounded = tables[of, None]["edge"], tables[of, torch.bfloat16]["edge"]
        assert rounded.dtype == exact.dtype
        assert 0 < (rounded - exact).abs().max() < 0.05 * exact.abs().max()


def with_norm(norm, products=None):
    """A network that stages do not have."""
    return build_model("interaction", 3, 6, NetworkOptions(**SIZES, norm=norm, products=products))


def test_running_means_are_not_updated_twice():
    assert with_norm("graph").ways_to_recompute == (None, 1)
    with pytest.raises(ValueError, match="--recompute-every 1 .*--norm batch"):
        build_model("interaction", 3, 6, NetworkOptions(**SIZES, norm="batch", recompute_every=1))


def test_what_stages_alone_can_do_is_refused():
    with pytest.raises(ValueError, match="--model acorn2 has no --norm"):
        build_model("acorn2", 3, 6, NetworkOptions(**SIZES, norm="batch"))


@pytest.mark.parametrize("wrong", [{"activation": "gelu"}, {"norm": "group"}], ids=str)
def test_an_activation_or_norm_that_is_not_there_is_refused(wrong):
    with pytest.raises(ValueError, match="relu, silu, tanh, .*layer, batch, graph or"):
        InteractionNetwork(3, 6, **SIZES, **wrong)


def test_a_norm_over_rows_is_refused_on_stages():
    with pytest.raises(ValueError, match="module 1 of an MLP is BatchNorm1d"):
        InteractionNetwork(3, 6, **SIZES, norm="batch")
