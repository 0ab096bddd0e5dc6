"""Interaction networks with norms over all rows: the formulas of the stages, and one result on any number of ranks."""

import itertools

import numpy as np
import pytest
import torch
from random_events import random_event
from test_heads import EVERYTHING, read, whole
from tiled import TiledEvent
from torch import nn

from domainpar.nn.heads import EDGE, Head
from domainpar.nn.normed import EventNorm, InteractionOfRows
from domainpar.nn.options import NetworkOptions
from domainpar.nn.standard import Standard
from domainpar.testing import run_ranks
from domainpar.tracking.networks.catalogue import ORDERS, build_model
from domainpar.tracking.networks.on_events import OnEvents

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
def test_with_norms_that_stages_have_it_is_the_network_of_stages(event, name, form, norm):
    options = NetworkOptions(**SIZES, dtype=torch.float64, norm=norm, heads=EVERYTHING, **form)
    stages, order = build_model(name, 3, 6, options), ORDERS[name]
    plain = InteractionOfRows(3, 6, norm, order=order, heads=EVERYTHING, **SIZES, **form).double()
    take(plain, stages)
    results = [
        whole(run_ranks(read, 1, event, lambda made=made: made, "ranges", 5))
        for made in (stages, OnEvents(plain, heads=EVERYTHING))
    ]
    for name_, table in results[0][0].items():
        torch.testing.assert_close(results[1][0][name_], table, rtol=1e-9, atol=1e-10)


def take(plain, stages):
    """Give the plain network the weights of the stages, perceptron by perceptron."""
    for ours, theirs in itertools.chain(
        [
            (plain.node_encoder, stages.node_encoder),
            (plain.edge_encoder, stages.edge_encoder),
            (plain.head, stages.head),
        ],
        zip(plain.edge_networks, stages.edge_stages),
        zip(plain.node_networks, stages.node_stages),
        zip(plain.other_heads.values(), stages.other_heads.values()),
    ):
        linears = [module for module in ours if isinstance(module, nn.Linear)]
        norms = [module for module in ours if isinstance(module, nn.LayerNorm)]
        with torch.no_grad():
            for mine, layer in itertools.chain(
                zip(linears, theirs.mlp.linears, strict=True), zip(norms, theirs.mlp.norms, strict=True)
            ):
                mine.weight.copy_(layer.weight)
                mine.bias.copy_(layer.bias)


@pytest.mark.parametrize("norm", ["batch", "graph"])
@pytest.mark.parametrize("name", ORDERS)
def test_norms_over_rows_are_the_same_on_any_number_of_ranks_to_rounding(event, name, norm):
    heads = (EDGE, Head("kinds", "node", 4), Head("jet", "graph", 3, 70.0))
    results = []
    for ranks in (1, 2, 3, 8):

        def make():
            options = NetworkOptions(**SIZES, dtype=torch.float64, norm=norm, heads=heads, dropout=0.2)
            return build_model(name, 3, 6, options)

        tables, gradients = whole(run_ranks(read, ranks, event, make, "random", 3))
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


def test_what_stages_alone_can_do_is_refused():
    with pytest.raises(ValueError, match="--norm batch has no --precision bf16"):
        build_model("interaction", 3, 6, NetworkOptions(**SIZES, norm="batch", products=torch.bfloat16))
    with pytest.raises(ValueError, match="--model gcn has no --norm"):
        build_model("gcn", 3, 6, NetworkOptions(**SIZES, norm="batch"))
