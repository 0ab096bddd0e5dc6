"""Published networks, here and in the examples, are their definitions, written once more with loops and matrices."""

import threading

import drawn
import pytest
import torch
from torch.overrides import TorchFunctionMode

from domainpar.nn.published import OF_THE_FIELD, InteractionGNN, InteractionGNN2
from domainpar.tracking.config.train import IN_EXAMPLES
from domainpar.tracking.networks.on_events import wanted_arguments
from examples import networks as examples

EDGES = [*drawn.EDGES, (8, 8)]  # of duplicate edges, also a self-loop
NUM_NODES = 11  # the last two have no edges
TOLERANCE = 1e-12
CALLS = {
    *("__getitem__", "new_zeros", "size", "cat", "squeeze", "unsqueeze", "index_add", "to", "unbind"),
    *("linear", "layer_norm", "batch_norm", "relu", "silu", "tanh", "sigmoid"),
    *("add", "mul", "__rmul__", "rsqrt", "ne"),
    *("__get__", "dim"),  # of dtype and such
}
NODE_FEATURES, EDGE_FEATURES, HIDDEN, ITERATIONS = 3, 2, 5, 3


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


def logits_of(model, x, edge_index, edge_attr):
    """Edge features are given to those that take them."""
    return model(x, edge_index, edge_attr) if "edge_attr" in wanted_arguments(model) else model(x, edge_index)


def assert_is(definition, model, node_features, edge_features=0):
    """The model has the logits and gradients of its definition, a function of (model, x, src, dst, edge_attr)."""
    by_sines(model)
    x, edge_index, edge_attr = event(node_features, edge_features)
    ours = logits_of(model, x, edge_index, edge_attr)
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
        found = logits_of(by_sines(model).eval(), *event(node_features, edge_features))
    numbers = [float(number) for number in expected.split()]
    torch.testing.assert_close(found, torch.tensor(numbers, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def assert_survives(model, edges, num_nodes, node_features, edge_features=0):
    """The model has finite logits and gradients on an odd event; of each edge."""
    x, edge_index, edge_attr = event(node_features, edge_features, edges, num_nodes)
    logits = logits_of(model.double(), x, edge_index, edge_attr)
    assert len(logits) == len(edges)
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
            if function is torch.cat:
                assert (kwargs or {}).get("dim") == -1 or args[0][0].dim() == 1, "rows of a table are joined"
            return function(*args, **(kwargs or {}))

    model, inputs = model.double(), event(node_features, edge_features)
    with Watch():
        logits_of(model, *inputs)
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


def layers(net, rows, activations, norms=None):
    """Linear layers with an activation each; `norms` holds a function for each layer, of its rows and what is left."""
    parameters = iter(list(net.parameters()))
    bias = net[0].bias is not None
    for position, activation in enumerate(activations):
        rows = linear(parameters, rows) if bias else rows @ next(parameters).T
        if norms is not None and norms[position] is not None:
            rows = norms[position](rows, parameters)
        rows = rows if activation is None else activation(rows)
    assert next(parameters, None) is None
    return rows


def silu(rows):
    return rows / (1 + torch.exp(-rows))


def plain_norm(rows, parameters):
    return layer_norm(rows)


def scaled_norm(rows, parameters):
    return layer_norm(rows) * next(parameters) + next(parameters)


def column_norm(rows, parameters):
    centred = rows - rows.mean(0)
    return centred / (centred.square().mean(0) + 6e-5).sqrt() * next(parameters) + next(parameters)


def acorn(model, x, src, dst, _):
    def net(module, *tables):
        return layers(module, torch.cat(tables, 1), [silu, torch.tanh], [plain_norm, None])

    x = net(model.node_encoder, x)
    e = net(model.edge_encoder, x[src], x[dst])
    for _ in range(ITERATIONS):
        x = net(model.node_networks[0], x, *(at_nodes(total, e, ends, len(x)) for ends in (dst, src)))
        e = net(model.edge_networks[0], x[src], x[dst], e)
    columns = torch.cat([x[src], x[dst], e], 1)
    return layers(model.output_edge_classifier, columns, [silu, silu, None], [plain_norm, plain_norm, None])[:, 0]


def acorn2(model, x, src, dst, edge_attr):
    def net(module, *tables):
        return layers(module, torch.cat(tables, 1), 3 * [torch.relu], [column_norm, column_norm, None])

    x = x_0 = net(model.node_encoder, x)
    e = e_0 = net(model.edge_encoder, *([edge_attr] if edge_attr.shape[1] else [x[src], x[dst]]))
    for edge, node in zip(model.edge_networks, model.node_networks, strict=True):
        x, e = torch.cat([x, x_0], 1), torch.cat([e, e_0], 1)
        e = net(edge, e, x[src], x[dst])
        x = net(node, *(at_nodes(total, e, ends, len(x)) for ends in (dst, src)), x)
    decoded = net(model.edge_decoder, e)
    return layers(model.edge_output_transform, decoded, [torch.relu, None], [column_norm, None])[:, 0]


def agnn(model, x, src, dst, _):
    def score():
        return layers(
            model.edge_network, torch.cat([x[src], x[dst]], 1), [*3 * [torch.tanh], None], [*3 * [scaled_norm], None]
        )

    x = layers(model.input_network, x, [torch.tanh], [scaled_norm])
    for _ in range(ITERATIONS):
        a = 1 / (1 + torch.exp(-score()))
        m_in, m_out = at_nodes(total, a * x[src], dst, len(x)), at_nodes(total, a * x[dst], src, len(x))
        x = x + layers(model.node_network, torch.cat([m_in, m_out, x], 1), 4 * [torch.tanh], 4 * [scaled_norm])
    return score()[:, 0]


def mpnn(model, x, src, dst, _):
    def net(module, *tables):
        return layers(module, torch.cat(tables, 1), 4 * [torch.relu], 4 * [scaled_norm])

    x = layers(model.node_encoder, x, 2 * [torch.relu])
    for _ in range(ITERATIONS):
        messages = net(model.edge_network, x[src + dst], x[dst + src])
        x = x + net(model.node_network, x, at_nodes(total, messages, dst + src, len(x)))
    return layers(model.edge_classifier, torch.cat([x[src], x[dst]], 1), [torch.relu, None])[:, 0]


def gcn(model, x, src, dst, _):
    """D^-1/2 A D^-1/2 in every layer; a row of A counts the edges from other nodes, and itself once."""
    adjacency = torch.eye(len(x), dtype=x.dtype)
    for start, end in zip(src, dst):
        if start != end:
            adjacency[end, start] += 1
    degree = adjacency.sum(1)
    normalised = torch.diag(degree**-0.5) @ adjacency @ torch.diag(degree**-0.5)
    for layer in model.layers:
        x = (normalised @ x @ layer.weight.T + layer.bias).relu()
    return layers(model.head, torch.cat([x[src], x[dst]], 1), [torch.relu, None])[:, 0]


def resin(model, x, src, dst, edge_attr):
    relu = torch.relu
    x = layers(model.node_encoder, x, [relu, relu])
    es = [layers(model.edge_encoder, edge_attr, [relu, relu])]
    for k, (edge, node) in enumerate(zip(model.edge_networks, model.node_networks, strict=True)):
        a, e = (x, es[0]) if k == 0 else (x.relu(), es[-1].relu())
        es.append(layers(edge, torch.cat([a[dst], a[src], e], 1), [relu, relu, None]))
        y = layers(node, torch.cat([a, at_nodes(total, es[-1], dst, len(x))], 1), [relu, relu, None])
        x = 0.5**0.5 * x + 0.5**0.5 * y
    return layers(model.head, torch.cat([x[src], x[dst], *es], 1), [relu, relu, None])[:, 0]


def graphnets(model, x, src, dst, edge_attr):
    """A graph of twice as many edges, as its authors have it; in training the scores of both directions, each time."""

    def net(module, *tables):
        return layers(module, torch.cat(tables, 1), 2 * [torch.relu])

    sender, receiver = src + dst, dst + src
    x = x_0 = net(model.node_encoder, x)
    e = e_0 = net(model.edge_encoder, torch.cat([edge_attr, edge_attr]))
    scores = []
    for _ in range(ITERATIONS):
        e = net(model.edge_network, e_0, e, x_0[receiver], x[receiver], x_0[sender], x[sender])
        x = net(model.node_network, at_nodes(total, e, receiver, len(x)), x_0, x)
        score = layers(model.edge_output, net(model.edge_decoder, e), [torch.relu, None])[:, 0]
        scores += [score[len(src) :], score[: len(src)]]
    return torch.stack(scores, 1) if model.training else scores[-1]


def made(name, edge_features=None, seed=0):
    """A small network; of those in the examples torch's own generator draws the weights."""
    sizes = {"hidden": HIDDEN, "graph_iters": ITERATIONS}
    if name in OF_THE_FIELD:
        features = NODE_FEATURES, features_of(name) if edge_features is None else edge_features
        return OF_THE_FIELD[name](*features, **sizes, seed=seed)
    features = [NODE_FEATURES, EDGE_FEATURES][: 1 + (features_of(name) > 0)]
    return getattr(examples, IN_EXAMPLES[name].removeprefix("examples.networks:"))(*features, **sizes)


def features_of(name):
    return EDGE_FEATURES if name in ("acorn2", "resin", "graphnets") else 0


NAMES = (*OF_THE_FIELD, *IN_EXAMPLES)
EACH = pytest.mark.parametrize("name", NAMES)
DEFINITIONS = {"acorn": acorn, "acorn2": acorn2, "agnn": agnn, "mpnn": mpnn, "gcn": gcn, "resin": resin}
DEFINITIONS["graphnets"] = graphnets


@EACH
def test_each_is_its_definition_forward_and_backward(name):
    assert_is(DEFINITIONS[name], made(name), NODE_FEATURES, features_of(name))


def test_acorn2_encodes_edges_from_their_ends_if_they_have_no_features():
    assert_is(acorn2, made("acorn2", 0), NODE_FEATURES)


def test_graphnets_is_its_definition_in_evaluation_too():
    assert_is(graphnets, made("graphnets").eval(), NODE_FEATURES, EDGE_FEATURES)


@EACH
def test_each_gives_these_logits(name):
    assert_gives(GOLDEN[name], made(name), NODE_FEATURES, features_of(name))


PUBLISHED = {
    "acorn": (InteractionGNN, (3,), 128, 263_937),
    "acorn2": (InteractionGNN2, (12, 6), 128, 1_985_921),
    "agnn": (examples.AttentionNetwork, (3,), 64, 42_753),
    "mpnn": (examples.MessagePassingNetwork, (3,), 64, 55_233),
    "graphnets": (examples.GraphNetsNetwork, (3, 4), 128, 264_577),
}


@pytest.mark.parametrize(("network", "features", "hidden", "count"), PUBLISHED.values(), ids=PUBLISHED)
def test_the_published_sizes_have_the_published_numbers_of_parameters(network, features, hidden, count):
    assert num_parameters(network(*features, hidden=hidden, graph_iters=8)) == count


def test_statistics_of_columns_are_those_of_the_event_in_evaluation_too():
    model = by_sines(made("acorn2"))
    training = model.train()(*event(NODE_FEATURES, EDGE_FEATURES))
    assert torch.equal(training, model.eval()(*event(NODE_FEATURES, EDGE_FEATURES)))


def test_the_last_node_net_of_acorn2_is_kept_but_neither_computed_nor_given_a_gradient():
    model = by_sines(made("acorn2"))
    model.node_networks[2].register_forward_hook(lambda *_: pytest.fail("it was computed"))
    model(*event(NODE_FEATURES, EDGE_FEATURES)).sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in model.named_parameters() if name.startswith("node_networks.2.")} != set()


def test_duplicate_edges_count_each_and_own_self_loops_not_at_all_in_gcn():
    model, (x, edge_index, _) = made("gcn").double(), event(NODE_FEATURES)
    others = [position for position, edge in enumerate(EDGES) if edge != (8, 8)]
    firsts = [EDGES.index(edge) for edge in dict.fromkeys(EDGES)]
    logits = model(x, edge_index)
    assert torch.equal(logits[others], model(x, edge_index[:, others]))
    assert not torch.allclose(logits[firsts], model(x, edge_index[:, firsts]))


def test_hidden_layers_of_resin_are_as_wide_as_the_larger_side():
    model = examples.ResidualInteractionNetwork(7, EDGE_FEATURES, hidden=HIDDEN, graph_iters=ITERATIONS)
    assert [layer.out_features for layer in model.head[::2]] == [6 * HIDDEN, 6 * HIDDEN, 1]
    assert [layer.out_features for layer in model.node_encoder[::2]] == [7, HIDDEN]
    assert [layer.out_features for layer in model.edge_encoder[::2]] == [HIDDEN, HIDDEN]


ODD = [(name, edges, count) for name in NAMES for edges, count in [([], 1), ([], 5), ([(0, 0)], 1)]]


@pytest.mark.parametrize(("name", "edges", "num_nodes"), [odd for odd in ODD if odd[0] != "acorn2" or odd[2] > 1])
def test_events_without_edges_and_of_one_node_have_logits_and_gradients(name, edges, num_nodes):
    assert_survives(made(name), edges, num_nodes, NODE_FEATURES, features_of(name))


@pytest.mark.parametrize(("edges", "num_nodes"), [([], 1), ([(0, 1)], 5)])
def test_columns_cannot_be_normed_over_one_row(edges, num_nodes):
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        assert_survives(made("acorn2"), edges, num_nodes, NODE_FEATURES, EDGE_FEATURES)


@EACH
def test_only_calls_that_parts_can_do_are_made(name):
    assert_watchable(made(name), NODE_FEATURES, features_of(name))


@pytest.mark.parametrize("name", OF_THE_FIELD)
def test_weights_are_a_function_of_the_seed(name):
    assert_weights_are_a_function_of_the_seed(lambda seed: made(name, seed=seed))


@pytest.mark.parametrize("size", ["node_features", "hidden", "graph_iters"])
@pytest.mark.parametrize("name", OF_THE_FIELD)
def test_sizes_below_1_are_refused_by_name(name, size):
    sizes = {"node_features": 3, "edge_features": 2, "hidden": 4, "graph_iters": 2, size: 0}
    with pytest.raises(ValueError, match=f"{size} is 0; it must be at least 1"):
        OF_THE_FIELD[name](**sizes)


def test_missing_edge_features_are_refused():
    x, edge_index, _ = event(NODE_FEATURES)
    with pytest.raises(ValueError, match="2 edge features .*None; pass edge_attr"):
        made("acorn2").double()(x, edge_index)


GOLDEN = {
    "acorn": """
        1.06197461427 1.13513795249 0.435142375271 1.12894298472 1.04136425149 0.294215273198 0.966965956923
        0.43070438208 0.392684356556 1.08759622941 1.08759622941 1.06757597258 1.06757597258
    """,
    "acorn2": """
        1.30972078627 1.65902666387 0.856325392511 1.20368402724 0.622266469791 0.52144888341 0.931785934383
        0.512369491061 0.888720964264 0.687869370004 0.425897577758 1.40649976637 1.4362042979
    """,
    "agnn": """
        -0.53692368066 -0.34456134972 -0.550639669236 -0.441162090202 -0.415378825103 -0.395094718207
        -0.352244855177 -0.229238292666 -0.533761583349 -0.102143047487 -0.102143047487 -0.346256301742
        -0.346256301742
    """,
    "mpnn": """
        -0.176525844119 -0.394285226737 -0.189318370761 -0.387858181856 -0.148950345609 -0.410919783618
        -0.461399372874 -0.260216010359 -0.129399660681 -0.369564630142 -0.369564630142 -0.246447708242
        -0.246447708242
    """,
    "gcn": """
        -0.0121027941395 -0.00941149227376 -0.0199158754252 0.133402852652 0.237491126937 0.243181692009
        0.0933923941105 0.271702160524 0.261811506124 0.259089964584 0.259089964584 0.273408102765
        0.273408102765
    """,
    "resin": """
        -18.8882764762 -17.0367833051 -8.40637722893 12.8793160389 -3.68188717333 36.7234864662 -3.12642254897
        5.72888795298 9.71988107219 -5.23664058837 -7.49918898377 -7.62756567222 -6.34979840089
    """,
    "graphnets": """
        1.31429087341 1.30438017345 1.3368905755 1.30912392576 1.31803917037 1.28699977277 1.2816264494
        1.30391010947 1.34387816136 1.55591950003 1.44178247247 1.60265280845 1.55703259273
    """,
}


@pytest.mark.parametrize("name", OF_THE_FIELD)
@pytest.mark.parametrize("edge_features", [0, EDGE_FEATURES])
def test_a_network_takes_edge_features_if_its_logits_depend_on_them(name, edge_features):
    model = by_sines(OF_THE_FIELD[name](NODE_FEATURES, edge_features, hidden=HIDDEN, graph_iters=ITERATIONS)).eval()
    x, edge_index, edge_attr = event(NODE_FEATURES, edge_features)
    logits, others = model(x, edge_index, edge_attr), model(x, edge_index, 2 * edge_attr - 1)
    assert model.takes_edge_features == (not torch.equal(logits, others))
    if not model.takes_edge_features:
        assert torch.equal(model(x, edge_index), logits)
