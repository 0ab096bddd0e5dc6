"""The networks of acorn, with their options, are their definitions."""

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
    layer_norm,
    linear,
    num_parameters,
    total,
)

from domainpar.nn.acorn import InteractionGNN, InteractionGNN2

ALL = ["sum", "mean", "max", "std"]
NODE_FIRST = {
    "Example_3": {},
    "Examples 1 and 2": {"aggregations": ALL, "undirected": True},
    "one aggregation": {"aggregations": ["mean"]},
    "aggregations in another order": {"aggregations": ["std", "max"]},
    "nodes' own weights": {"node_net_recurrent": False},
    "edges' own weights": {"edge_net_recurrent": False},
    "columns normed": {"layernorm": False, "batchnorm": True},
    "rows and columns normed": {"batchnorm": True, "undirected": True},
    "nothing normed": {"layernorm": False},
    "no output activation": {"output_activation": None},
    "other activations": {"hidden_activation": "Tanh", "output_activation": "ReLU"},
    "deeper edges": {"edge_layers": 3},
    "deeper nodes": {"node_layers": 3},
}
EDGE_FIRST = {
    "CTD_2023": {},
    "edges encoded from their ends": {"edge_features": 0},
    "no concatenation": {"concat": False},
    "both aggregates added": {"in_out_diff_agg": False},
    "both added, no concatenation": {"in_out_diff_agg": False, "concat": False},
    "means": {"aggregations": ["mean"]},
    "all aggregations": {"aggregations": ALL},
    "nodes' weights shared": {"node_net_recurrent": True},
    "edges' weights shared": {"edge_net_recurrent": True},
    "rows normed": {"layernorm": True, "batchnorm": False},
    "other activations": {"hidden_activation": "SiLU", "output_activation": None},
    "deeper edges": {"edge_layers": 3},
    "deeper nodes": {"node_layers": 3},
    "deeper decoder": {"decoder_layers": 3},
}
ITERATIONS = 3


def node_first(**flags):
    return InteractionGNN(4, hidden=5, graph_iters=ITERATIONS, **flags)


def edge_first(**flags):
    depths = {"node_layers": 2, "edge_layers": 2, "decoder_layers": 2}
    flags = {"edge_features": 2, **depths, **flags}
    return InteractionGNN2(4, hidden=5, graph_iters=ITERATIONS, **flags)


ACTIVATIONS = {
    "ReLU": lambda rows: rows.clamp(min=0),
    "SiLU": lambda rows: rows / (1 + torch.exp(-rows)),
    "Tanh": torch.tanh,
    None: lambda rows: rows,
}


def mlp(net, rows, layers, flags, last):
    """`layers` hidden layers, and a last one with the activation `last`."""
    parameters = iter(list(net.parameters()))
    for _ in range(layers):
        rows = linear(parameters, rows)
        if flags["layernorm"]:
            rows = layer_norm(rows)
        if flags["batchnorm"]:
            centred = rows - rows.mean(0)
            rows = centred / (centred.square().mean(0) + 6e-5).sqrt() * next(parameters) + next(parameters)
        rows = ACTIVATIONS[flags["hidden_activation"]](rows)
    rows = ACTIVATIONS[last](linear(parameters, rows))
    assert next(parameters, None) is None
    return rows


def std(rows):
    variance = rows.square().mean(0) - rows.mean(0).square()
    return torch.where(variance > 1e-5, variance.clamp(min=1e-5).sqrt(), 0.0)


REDUCE = {"sum": total, "mean": lambda rows: rows.mean(0), "max": lambda rows: rows.amax(0), "std": std}


def aggregates(e, ends, num_nodes, kinds):
    return torch.cat([at_nodes(REDUCE[kind], e, ends, num_nodes) for kind in kinds], 1)


def definition_of_node_first(**changes):
    flags = {"aggregations": ["sum"], "undirected": False, "node_net_recurrent": True, "edge_net_recurrent": True}
    flags |= {"layernorm": True, "batchnorm": False, "hidden_activation": "SiLU", "output_activation": "Tanh"}
    flags |= {"node_layers": 2, "edge_layers": 2, **changes}

    def network(model, x, src, dst, _):
        num_edges, out = len(src), flags["output_activation"]
        if flags["undirected"]:
            src, dst = src + dst, dst + src
        x = mlp(model.node_encoder, x, flags["node_layers"] - 1, flags, out)
        e = mlp(model.edge_encoder, torch.cat([x[src], x[dst]], 1), flags["edge_layers"] - 1, flags, out)
        for step in range(ITERATIONS):
            node = model.node_networks[0 if flags["node_net_recurrent"] else step]
            edge = model.edge_networks[0 if flags["edge_net_recurrent"] else step]
            ending, starting = (aggregates(e, ends, len(x), flags["aggregations"]) for ends in (dst, src))
            x = mlp(node, torch.cat([x, ending, starting], 1), flags["node_layers"] - 1, flags, out)
            e = mlp(edge, torch.cat([x[src], x[dst], e], 1), flags["edge_layers"] - 1, flags, out)
        ends = torch.cat([x[src], x[dst], e], 1)
        logits = mlp(model.output_edge_classifier, ends, flags["edge_layers"], flags, None)[:, 0]
        return (logits[:num_edges] + logits[num_edges:]) / 2 if flags["undirected"] else logits

    return network


def definition_of_edge_first(**changes):
    flags = {"aggregations": ["sum"], "concat": True, "in_out_diff_agg": True, "edge_features": 2}
    flags |= {"node_net_recurrent": False, "edge_net_recurrent": False, "layernorm": False, "batchnorm": True}
    flags |= {"hidden_activation": "ReLU", "output_activation": "ReLU"}
    flags |= {"node_layers": 2, "edge_layers": 2, "decoder_layers": 2, **changes}

    def network(model, x, src, dst, edge_attr):
        out = flags["output_activation"]
        x = x_0 = mlp(model.node_encoder, x, flags["node_layers"] - 1, flags, out)
        given = edge_attr if flags["edge_features"] else torch.cat([x[src], x[dst]], 1)
        e = e_0 = mlp(model.edge_encoder, given, flags["edge_layers"] - 1, flags, out)
        for step in range(ITERATIONS):
            node = model.node_networks[0 if flags["node_net_recurrent"] else step]
            edge = model.edge_networks[0 if flags["edge_net_recurrent"] else step]
            if flags["concat"]:
                x, e = torch.cat([x, x_0], 1), torch.cat([e, e_0], 1)
            e = mlp(edge, torch.cat([e, x[src], x[dst]], 1), flags["edge_layers"] - 1, flags, out)
            ending, starting = (aggregates(e, ends, len(x), flags["aggregations"]) for ends in (dst, src))
            sums = [ending, starting] if flags["in_out_diff_agg"] else [ending + starting]
            x = mlp(node, torch.cat([*sums, x], 1), flags["node_layers"] - 1, flags, out)
        decoded = mlp(model.edge_decoder, e, flags["decoder_layers"] - 1, flags, out)
        return mlp(model.edge_output_transform, decoded, 1, flags, None)[:, 0]

    return network


@pytest.mark.parametrize("flags", NODE_FIRST.values(), ids=NODE_FIRST)
def test_node_first_is_its_definition_forward_and_backward(flags):
    assert_is(definition_of_node_first(**flags), node_first(**flags), 4)


@pytest.mark.parametrize("flags", EDGE_FIRST.values(), ids=EDGE_FIRST)
def test_edge_first_is_its_definition_forward_and_backward(flags):
    assert_is(definition_of_edge_first(**flags), edge_first(**flags), 4, 2)


def test_node_first_gives_these_logits():
    assert_gives(GOLDEN_EXAMPLE_3, node_first(), 4)
    assert_gives(GOLDEN_EXAMPLE_1, node_first(aggregations=ALL, undirected=True), 4)


def test_edge_first_gives_these_logits():
    assert_gives(GOLDEN_CTD_2023, edge_first(), 4, 2)


def test_the_published_sizes_have_the_published_numbers_of_parameters():
    assert num_parameters(InteractionGNN(3)) == 263_937
    assert num_parameters(InteractionGNN(3, aggregations=ALL, undirected=True)) == 362_241
    assert num_parameters(InteractionGNN2(12, 6)) == 1_985_921


def test_statistics_of_columns_are_those_of_the_event_in_evaluation_too():
    model = by_sines(edge_first())
    training = model.train()(*event(4, 2))
    assert torch.equal(training, model.eval()(*event(4, 2)))


def test_an_undirected_network_cannot_tell_an_edge_from_its_reverse():
    model = by_sines(node_first(aggregations=ALL, undirected=True))
    x, edge_index, _ = event(4)
    torch.testing.assert_close(model(x, edge_index), model(x, edge_index.flip(0)), rtol=1e-13, atol=1e-13)


def test_the_last_node_net_of_edge_first_is_kept_but_neither_computed_nor_given_a_gradient():
    model = by_sines(edge_first())
    model.node_networks[2].register_forward_hook(lambda *_: pytest.fail("it was computed"))
    model(*event(4, 2)).sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in model.named_parameters() if name.startswith("node_networks.2.")} != set()


ODD = [([], 1), ([], 5), ([(0, 0)], 1)]


@pytest.mark.parametrize("flags", [{}, {"aggregations": ALL, "undirected": True}])
@pytest.mark.parametrize(("edges", "num_nodes"), ODD)
def test_events_without_edges_and_of_one_node_have_logits_and_gradients_node_first(flags, edges, num_nodes):
    assert_survives(node_first(**flags), edges, num_nodes, 4)


@pytest.mark.parametrize("flags", [{}, {"aggregations": ALL, "edge_features": 0}])
@pytest.mark.parametrize(("edges", "num_nodes"), ODD)
def test_events_without_edges_and_of_one_node_have_logits_and_gradients_edge_first(flags, edges, num_nodes):
    assert_survives(edge_first(batchnorm=False, **flags), edges, num_nodes, 4, 2)


def test_columns_can_be_normed_without_edges_but_not_over_one_row():
    assert_survives(edge_first(), [], 5, 4, 2)
    for edges, num_nodes in ([], 1), ([(0, 1)], 5):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            assert_survives(edge_first(), edges, num_nodes, 4, 2)


@pytest.mark.parametrize("flags", NODE_FIRST.values(), ids=NODE_FIRST)
def test_only_calls_that_parts_can_do_are_made_node_first(flags):
    assert_watchable(node_first(**flags), 4)


@pytest.mark.parametrize("flags", EDGE_FIRST.values(), ids=EDGE_FIRST)
def test_only_calls_that_parts_can_do_are_made_edge_first(flags):
    assert_watchable(edge_first(**flags), 4, 2)


@pytest.mark.parametrize("make", [node_first, edge_first])
def test_weights_are_a_function_of_the_seed(make):
    assert_weights_are_a_function_of_the_seed(make)
    assert next(make(dtype=torch.float64).parameters()).dtype == torch.float64


@pytest.mark.parametrize("size", ["node_features", "hidden", "graph_iters", "node_layers", "edge_layers"])
@pytest.mark.parametrize("network", [InteractionGNN, InteractionGNN2])
def test_sizes_below_1_are_refused_by_name(network, size):
    with pytest.raises(ValueError, match=f"{size} is 0; it must be at least 1"):
        network(**{"node_features": 3, "hidden": 4, size: 0})


@pytest.mark.parametrize("make", [node_first, edge_first])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"aggregations": ["sum", "median"]}, "'median'.* are not a list of one or more of sum, mean, max, std"),
        ({"aggregations": []}, "are not a list of one or more"),
        ({"aggregations": "sum"}, "are not a list of one or more"),
        ({"hidden_activation": "relu"}, "unknown activation 'relu'; take a class of torch.nn"),
        ({"output_activation": "Sequential"}, "unknown activation 'Sequential'"),
    ],
)
def test_what_is_not_known_is_refused(make, flags, message):
    with pytest.raises(ValueError, match=message):
        make(**flags)


def test_missing_edge_features_are_refused():
    x, edge_index, _ = event(4)
    with pytest.raises(ValueError, match="needs 2 edge features and got None"):
        edge_first().double()(x, edge_index)
    with pytest.raises(ValueError, match="edge_features is -1; it must be at least 0"):
        edge_first(edge_features=-1)


GOLDEN_EXAMPLE_3 = """
    1.54009154597 1.52718198083 1.50721021127 1.49741225181 1.49889039013 1.53035960096 1.49916521623
    1.49998230134 1.47768892542 1.4982896205 1.4982896205 1.49682517595 1.49682517595
"""
GOLDEN_EXAMPLE_1 = """
    -1.74350629872 -1.73989785157 -1.74519852752 -1.73822119997 -1.73940671238 -1.74145953832 -1.74006953485
    -1.74353079919 -1.74672078604 -1.7512455216 -1.7512455216 -1.75183363439 -1.75183363439
"""
GOLDEN_CTD_2023 = """
    -0.23417130575 -0.545691630654 -0.800553579112 -4.62104606467 -0.362725274105 -0.142900364463 -4.03859691873
    -0.254840616758 -0.212318344749 -0.325743776714 -0.325320213117 -0.221297407492 -0.113608248595
"""
