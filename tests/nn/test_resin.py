"""Residual interaction networks are their definition."""

import pytest
import torch
from test_agnn import (
    assert_gives,
    assert_is,
    assert_survives,
    assert_watchable,
    assert_weights_are_a_function_of_the_seed,
    at_nodes,
    by_sines,
    event,
    linear,
    num_parameters,
    total,
)

from domainpar.nn.resin import ResidualInteractionNetwork

VARIANTS = {
    "as published": {},
    "the residual from the top": {"residual": "skip_top"},
    "the residual from the encoder": {"residual": "skip_top", "connect_to": 0},
    "the last edge states alone": {"use_intermediate_edge_embeddings": False},
    "no node states in the head": {"use_node_embedding": False},
    "edge states alone, the last": {"use_node_embedding": False, "use_intermediate_edge_embeddings": False},
    "another share of the residual": {"alpha": 0.2},
    "hidden layers of one width": {"hidden": 6},
    "squashed": {"squash": True},
}


def make(**flags):
    return ResidualInteractionNetwork(5, 2, **{"node_dim": 4, "edge_dim": 3, **flags})


def three_layers(net, *columns):
    parameters = iter(list(net.parameters()))
    rows = linear(parameters, torch.cat(columns, 1)).relu()
    return linear(parameters, linear(parameters, rows).relu())


def definition(
    residual="skip1",
    connect_to=1,
    use_intermediate_edge_embeddings=True,
    use_node_embedding=True,
    alpha=0.5,
    squash=False,
    hidden=None,
):
    def network(model, x, src, dst, edge_attr):
        first, second = model.node_encoder.parameters()
        xs = [((x @ first.T).relu() @ second.T).relu()]
        first, second = model.edge_encoder.parameters()
        es = [((edge_attr @ first.T).relu() @ second.T).relu()]
        for k in range(3):
            x, e = (xs[k], es[k]) if k == 0 else (xs[k].relu(), es[k].relu())
            es.append(three_layers(model.edge_networks[k], x[dst], x[src], e))
            y = three_layers(model.node_networks[k], x, at_nodes(total, es[k + 1], dst, len(x)))
            if residual == "skip1":
                y = alpha**0.5 * xs[k] + (1 - alpha) ** 0.5 * y
            elif k >= connect_to:
                y = alpha**0.5 * xs[connect_to] + (1 - alpha) ** 0.5 * y
            xs.append(y)
        of_nodes = [xs[3][src], xs[3][dst]] if use_node_embedding else []
        of_edges = es if use_intermediate_edge_embeddings else es[3:]
        logit = three_layers(model.head, *of_nodes, *of_edges)[:, 0]
        return 0.001 + 0.998 / (1 + torch.exp(-logit)) if squash else logit

    return network


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_it_is_its_definition_forward_and_backward(flags):
    assert_is(definition(**flags), make(**flags), 5, 2)


def test_it_gives_these_logits():
    assert_gives(GOLDEN_SKIP1, make(), 5, 2)
    assert_gives(GOLDEN_SKIP_TOP, make(residual="skip_top"), 5, 2)


def test_hidden_layers_are_as_wide_as_the_larger_side_unless_a_width_is_given():
    assert [layer.out_features for layer in make().head[::2]] == [20, 20, 1]
    assert [layer.out_features for layer in make(hidden=7).head[::2]] == [7, 7, 1]
    assert [layer.out_features for layer in make(hidden=7).node_encoder[::2]] == [7, 4]


def test_the_last_node_net_is_kept_but_neither_computed_nor_given_a_gradient_where_it_reaches_no_logit():
    model = by_sines(make(use_node_embedding=False))
    model.node_networks[2].register_forward_hook(lambda *_: pytest.fail("it was computed"))
    model(*event(5, 2)).sum().backward()
    assert all(parameter.grad is None for parameter in model.node_networks[2].parameters())
    assert num_parameters(model.node_networks[2]) == num_parameters(make().node_networks[2])


@pytest.mark.parametrize(("edges", "num_nodes"), [([], 1), ([], 5), ([(0, 0)], 1)])
def test_events_without_edges_and_of_one_node_have_logits_and_gradients(edges, num_nodes):
    assert_survives(make(), edges, num_nodes, 5, 2)


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_only_calls_that_parts_can_do_are_made(flags):
    assert_watchable(make(**flags), 5, 2)


def test_weights_are_a_function_of_the_seed():
    assert_weights_are_a_function_of_the_seed(make)
    assert next(make(dtype=torch.float64).parameters()).dtype == torch.float64


@pytest.mark.parametrize("size", ["node_features", "edge_features", "node_dim", "edge_dim", "hidden", "layers"])
def test_sizes_below_1_are_refused_by_name(size):
    with pytest.raises(ValueError, match=f"{size} is 0; it must be at least 1"):
        ResidualInteractionNetwork(**{"node_features": 3, "edge_features": 2, size: 0})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"alpha": 1.5}, "alpha 1.5 is not in"),
        ({"residual": "skip2"}, "unknown residual 'skip2'; take skip1 or skip_top"),
        ({"connect_to": 4}, "connect_to 4 is no state of 3 layers"),
    ],
)
def test_what_has_no_meaning_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        make(**flags)


def test_missing_edge_features_are_refused():
    x, edge_index, _ = event(5)
    with pytest.raises(ValueError, match="needs edge features and got None"):
        make().double()(x, edge_index)


GOLDEN_SKIP1 = """
    -4.8031356401 -8.57209028591 -1.05691893739 -17.3161530811 -6.69456654526 -10.3884368825 -9.01559639096
    -7.36720401105 -4.60452831646 -6.94692065957 -6.94692065957 -12.0536245385 -11.7865078204
"""
GOLDEN_SKIP_TOP = """
    -6.46291443846 -15.2521396177 -6.44989484382 -26.9005623529 -15.3118239574 -20.7192972476 -13.0950491442
    -13.3073349255 -7.0060411662 -25.0018222136 -25.0018222136 -50.0322566869 -49.5969427362
"""
