"""The networks of HEP.TrkX are their definitions, and what all networks in plain torch have in common."""

import threading

import drawn
import pytest
import torch
from torch.overrides import TorchFunctionMode

from domainpar.nn.agnn import AttentionNetwork, MessagePassingNetwork

EDGES = [*drawn.EDGES, (8, 8)]  # of duplicate edges, also a self-loop
NUM_NODES = 11  # the last two have no edges
TOLERANCE = 1e-12
CALLS = {
    *("__getitem__", "new_zeros", "size", "cat", "chunk", "squeeze", "unsqueeze", "expand_as"),
    *("index_add", "scatter_reduce", "linear", "layer_norm", "batch_norm", "ones_like", "to"),
    *("add", "__rsub__", "sub", "mul", "__rmul__", "div", "clamp", "sqrt", "rsqrt", "masked_fill", "ne", "le"),
    *("relu", "silu", "tanh", "sigmoid"),
    *("__get__", "dim"),  # of dtype and such
}


def by_sines(model):
    """The model with weights that follow from their position alone, in float64."""
    position = 0
    with torch.no_grad():
        for name, parameter in model.double().named_parameters():
            scales = name.endswith("weight") and parameter.dim() == 1  # of a norm
            parameter.copy_(scales + 0.7 * sines(parameter.numel(), position).view_as(parameter))
            position += parameter.numel()
    return model


def sines(count, first=0):
    """Numbers in [-1, 1] that look drawn; of squares, as sines of a line make matrices of rank 2."""
    return torch.sin(torch.arange(first, first + count, dtype=torch.float64).square())


def event(node_features, edge_features=0, edges=EDGES, num_nodes=NUM_NODES):
    """Node features, edge index and edge features of a small event."""
    x = sines(num_nodes * node_features, first=1).view(num_nodes, node_features)
    edge_attr = sines(len(edges) * edge_features, first=2).view(len(edges), edge_features)
    edge_index = torch.tensor(edges, dtype=torch.int64).view(-1, 2).t()
    return x.requires_grad_(), edge_index, edge_attr.requires_grad_()


def assert_is(definition, model, node_features, edge_features=0):
    """The model has the logits and gradients of its definition, a function of (model, x, src, dst, edge_attr)."""
    by_sines(model)
    x, edge_index, edge_attr = event(node_features, edge_features)
    ours = model(x, edge_index, edge_attr)
    src, dst = edge_index.tolist()
    expected = definition(model, x, src, dst, edge_attr)
    upstream = sines(ours.numel(), first=3).view_as(expected)
    sources = {"x": x, "edge_attr": edge_attr, **dict(model.named_parameters())}
    found, wanted = (
        torch.autograd.grad(out, list(sources.values()), upstream, allow_unused=True, materialize_grads=True)
        for out in (ours, expected)
    )
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()
    # The gradient of a bias before a BatchNorm is rounding alone: there is no relative difference to speak of.
    least = 0.01 * max(gradient.abs().max() for gradient in wanted if gradient.numel())
    for name, one, other in zip(sources, found, wanted, strict=True):
        if one.numel():
            assert (one - other).abs().max() <= TOLERANCE * max(other.abs().max(), least), name


def assert_gives(expected, model, node_features, edge_features=0):
    """The model with weights by sines gives these numbers."""
    with torch.no_grad():
        found = by_sines(model)(*event(node_features, edge_features))
    numbers = [float(number) for number in expected.split()]
    torch.testing.assert_close(found, torch.tensor(numbers, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def assert_survives(model, edges, num_nodes, node_features, edge_features=0, rows=None):
    """The model has finite logits and gradients on an odd event; one of each edge, if not another number of rows."""
    x, edge_index, edge_attr = event(node_features, edge_features, edges, num_nodes)
    logits = model.double()(x, edge_index, edge_attr)
    assert logits.shape == (len(edges) if rows is None else rows,)
    assert logits.isfinite().all()
    logits.sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


def assert_watchable(model, node_features, edge_features=0):
    """The model makes only calls that can be done on a part of an event."""
    seen = set()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.add(function.__name__)
            if function.__name__ in ("cat", "chunk"):
                (table, *_) = args[0] if function is torch.cat else args
                assert kwargs["dim"] == -1 or table.dim() == 1, "rows of a table are joined or split"
            return function(*args, **(kwargs or {}))

    model, inputs = model.double(), event(node_features, edge_features)
    with Watch():
        model(*inputs)
    assert seen <= CALLS


def assert_weights_are_a_function_of_the_seed(make):
    """Also where several threads build at once; torch's own generator stays as it is."""
    before, made = torch.random.get_rng_state(), {}

    def build(thread):
        made[thread] = torch.nn.utils.parameters_to_vector(make(seed=3).parameters())

    threads = [threading.Thread(target=build, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    assert not torch.equal(made[0], torch.nn.utils.parameters_to_vector(make(seed=4).parameters()))
    assert torch.equal(before, torch.random.get_rng_state())


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def linear(parameters, rows):
    """The next layer of an iterator over parameters."""
    return rows @ next(parameters).T + next(parameters)


def layer_norm(rows):
    """Rows of mean 0 and variance 1."""
    centred = rows - rows.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()


def at_nodes(reduce, values, ends, num_nodes):
    """For each node, in turn, what `reduce` makes of the rows of its edges; zeros without any."""
    edges_of = [[edge for edge, end in enumerate(ends) if end == node] for node in range(num_nodes)]
    nothing = torch.zeros(values.shape[1], dtype=values.dtype)
    return torch.stack([reduce(values[edges]) if edges else nothing for edges in edges_of])


def total(rows):
    return rows.sum(0)


def normed_layers(parameters, rows, count, activation):
    for _ in range(count):
        rows = activation(layer_norm(linear(parameters, rows)) * next(parameters) + next(parameters))
    return rows


def attention_network(model, x, src, dst, _):
    def score():
        edge = iter(list(model.edge_network.parameters()))
        return linear(edge, normed_layers(edge, torch.cat([x[src], x[dst]], 1), 3, torch.tanh))

    x = normed_layers(iter(list(model.input_network.parameters())), x, 1, torch.tanh)
    for _ in range(3):
        a, node = 1 / (1 + torch.exp(-score())), iter(list(model.node_network.parameters()))
        m_in, m_out = at_nodes(total, a * x[src], dst, len(x)), at_nodes(total, a * x[dst], src, len(x))
        x = x + normed_layers(node, torch.cat([m_in, m_out, x], 1), 2, torch.tanh)
    return score()[:, 0]


def message_passing_network(model, x, src, dst, _):
    encoder, head = iter(list(model.node_encoder.parameters())), iter(list(model.edge_classifier.parameters()))
    x = linear(encoder, linear(encoder, x).relu()).relu()
    for _ in range(2):
        edge, node = iter(list(model.edge_network.parameters())), iter(list(model.node_network.parameters()))
        both_ways = torch.cat([x[src + dst], x[dst + src]], 1)
        received = at_nodes(total, normed_layers(edge, both_ways, 3, torch.relu), dst + src, len(x))
        x = x + normed_layers(node, torch.cat([x, received], 1), 4, torch.relu)
    return linear(head, linear(head, torch.cat([x[src], x[dst]], 1)).relu())[:, 0]


def attention(**flags):
    return AttentionNetwork(3, hidden=5, graph_iters=3, node_layers=2, **flags)


def message_passing(**flags):
    return MessagePassingNetwork(3, hidden=5, graph_iters=2, edge_layers=3, **flags)


def test_the_attention_network_is_its_definition_forward_and_backward():
    assert_is(attention_network, attention(), 3)


def test_the_message_passing_network_is_its_definition_forward_and_backward():
    assert_is(message_passing_network, message_passing(), 3)


def test_the_attention_network_gives_these_logits():
    assert_gives(GOLDEN_ATTENTION, attention(), 3)


def test_the_message_passing_network_gives_these_logits():
    assert_gives(GOLDEN_MESSAGE_PASSING, message_passing(), 3)


@pytest.mark.parametrize(("network", "count"), [(AttentionNetwork, 42_753), (MessagePassingNetwork, 55_233)])
def test_the_published_size_has_the_published_number_of_parameters(network, count):
    assert num_parameters(network(3)) == count


@pytest.mark.parametrize("make", [attention, message_passing])
@pytest.mark.parametrize(("edges", "num_nodes"), [([], 1), ([], 5), ([(0, 0)], 1)])
def test_events_without_edges_and_of_one_node_have_logits_and_gradients(make, edges, num_nodes):
    assert_survives(make(), edges, num_nodes, 3)


@pytest.mark.parametrize("make", [attention, message_passing])
def test_only_calls_that_parts_can_do_are_made(make):
    assert_watchable(make(), 3)


@pytest.mark.parametrize("make", [attention, message_passing])
def test_weights_are_a_function_of_the_seed(make):
    assert_weights_are_a_function_of_the_seed(make)
    assert next(make(dtype=torch.float64).parameters()).dtype == torch.float64


@pytest.mark.parametrize("size", ["node_features", "hidden", "graph_iters", "edge_layers", "node_layers"])
@pytest.mark.parametrize("network", [AttentionNetwork, MessagePassingNetwork])
def test_sizes_below_1_are_refused_by_name(network, size):
    with pytest.raises(ValueError, match=f"{size} is 0; it must be at least 1"):
        network(**{"node_features": 3, size: 0})


GOLDEN_ATTENTION = """
    -0.612391776026 -0.429951253833 -0.378694154045 -0.319391667837 -0.621567598657 -0.291045542204 -0.547924504313
    -0.14935930437 -0.570587842245 -0.0761939100801 -0.0761939100801 -0.525359919762 -0.525359919762
"""
GOLDEN_MESSAGE_PASSING = """
    1.15778260523 1.08642397503 1.19011821415 1.14262259728 1.20506073696 1.1467609332 1.09764191562
    1.1255352063 1.23011179583 1.1342819473 1.1342819473 1.18076056851 1.18076056851
"""
