"""The graph convolutional network is its definition by dense matrices."""

import pytest
import torch
from test_agnn import (
    EDGES,
    assert_gives,
    assert_is,
    assert_survives,
    assert_watchable,
    assert_weights_are_a_function_of_the_seed,
    event,
    linear,
)

from domainpar.nn.gcn import GraphConvolutionalNetwork


def convolutions(model, x, src, dst, of):
    """D^-1/2 A D^-1/2 in every layer; a row of A counts the edges from other nodes, and itself once."""
    adjacency = torch.eye(len(x), dtype=x.dtype)
    for start, end in zip(src, dst):
        if start != end:
            adjacency[end, start] += 1
    degree = adjacency.sum(1)
    normalised = torch.diag(degree**-0.5) @ adjacency @ torch.diag(degree**-0.5)
    parameters = iter(list(model.parameters()))
    for position in range(3):
        x = linear(parameters, normalised @ x)
        if of == "edges" or position < 2:
            x = x.relu()
    if of == "nodes":
        return x
    return linear(parameters, linear(parameters, torch.cat([x[src], x[dst]], 1)).relu())


def of_edges(model, x, src, dst, _):
    return convolutions(model, x, src, dst, "edges")


def of_nodes(model, x, src, dst, _):
    return convolutions(model, x, src, dst, "nodes")


def make(**flags):
    return GraphConvolutionalNetwork(3, **{"hidden": 5, **flags})


def squeezed(definition):
    return lambda *args: definition(*args)[:, 0]


@pytest.mark.parametrize(("of", "definition"), [("edges", of_edges), ("nodes", of_nodes)])
def test_it_is_its_definition_forward_and_backward(of, definition):
    assert_is(squeezed(definition), make(of=of), 3)
    assert_is(definition, make(of=of, out_features=4), 3)


def test_it_gives_these_logits():
    assert_gives(GOLDEN_OF_EDGES, make(), 3)
    assert_gives(GOLDEN_OF_NODES, make(of="nodes"), 3)


def test_duplicate_edges_count_each_and_own_self_loops_not_at_all():
    model = make(of="nodes", dtype=torch.float64)
    x, edge_index, _ = event(3)
    no_loops = torch.tensor([edge for edge in EDGES if edge != (8, 8)]).t()
    no_duplicates = torch.tensor(list(dict.fromkeys(EDGES))).t()
    assert torch.equal(model(x, edge_index), model(x, no_loops))
    assert not torch.allclose(model(x, edge_index), model(x, no_duplicates))


@pytest.mark.parametrize("of", ["edges", "nodes"])
@pytest.mark.parametrize(("edges", "num_nodes"), [([], 1), ([], 5), ([(0, 0)], 1)])
def test_events_without_edges_and_of_one_node_have_logits_and_gradients(of, edges, num_nodes):
    assert_survives(make(of=of), edges, num_nodes, 3, rows=num_nodes if of == "nodes" else None)


@pytest.mark.parametrize("of", ["edges", "nodes"])
def test_only_calls_that_parts_can_do_are_made(of):
    assert_watchable(make(of=of), 3)


def test_weights_are_a_function_of_the_seed():
    assert_weights_are_a_function_of_the_seed(make)
    assert next(make(dtype=torch.float64).parameters()).dtype == torch.float64


@pytest.mark.parametrize("size", ["node_features", "hidden", "layers", "out_features"])
def test_sizes_below_1_are_refused_by_name(size):
    with pytest.raises(ValueError, match=f"{size} is 0; it must be at least 1"):
        GraphConvolutionalNetwork(**{"node_features": 3, size: 0})


def test_only_edges_and_nodes_can_be_scored():
    with pytest.raises(ValueError, match="cannot score 'graphs'; take edges or nodes"):
        make(of="graphs")


GOLDEN_OF_EDGES = """
    -0.0121027941395 -0.00941149227376 -0.0199158754252 0.133402852652 0.237491126937 0.243181692009 0.0933923941105
    0.271702160524 0.261811506124 0.259089964584 0.259089964584 0.273408102765 0.273408102765
"""
GOLDEN_OF_NODES = """
    0.316680052697 0.321799464092 0.326123160545 0.216540530804 0.190532794415 0.239199867606
    0.179904600021 0.196875316689 0.192814501835 0.262524566823 0.282157934647
"""
