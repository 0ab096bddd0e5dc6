"""What is read out of states: of edges in the pass that makes them, or after every iteration, and of nodes."""

import itertools

import dense
import networks
import pytest
import torch
from marks import slow
from one_mlp import an_mlp
from tiled import sha

from domainpar.nn import interaction
from domainpar.nn.gradients import GradientSink
from domainpar.nn.stages import EdgeStage, NodeStage, run_chain
from domainpar.testing import run_ranks

KEY, WIDTH, COLUMNS = 7, 16, 6
RESULTS = ("edges", "sums", "readout")
USED = [used for count in (1, 2, 3) for used in itertools.combinations(RESULTS, count)]

HEADS = {
    # Whether it takes node states, and the widths of its layers.
    "of edges": (False, (16, 1)),
    "of nodes and edges": (True, (32, 16, 3)),
    "of a block of columns": (True, (16, 16)),
    "of one layer": (False, (5,)),
}


@pytest.fixture(scope="module")
def event():
    return networks.tiled_event(90, 500)


def chain(head, dtype, products=None):
    """Two stages that make states, and one that reads them out; the same weights every time."""
    generator = torch.Generator().manual_seed(4)
    takes_nodes, widths = HEADS[head]
    made = [
        EdgeStage(an_mlp(2 * WIDTH + COLUMNS, (WIDTH, WIDTH), generator), products),
        EdgeStage(an_mlp(3 * WIDTH, (32, WIDTH), generator, last_activation="none"), products, True, "root"),
        EdgeStage(an_mlp(3 * WIDTH if takes_nodes else WIDTH, widths, generator, readout=True), products),
    ]
    return torch.nn.ModuleList(made).to(dtype)


def inputs(event, head, dtype):
    """States of all nodes and edges, and the gradient of each of the three results."""
    generator = torch.Generator().manual_seed(5)
    nodes, edges = 90, event.graph.num_edges
    shapes = [(nodes, WIDTH), (edges, COLUMNS), (edges, WIDTH), (nodes, 2 * WIDTH), (edges, HEADS[head][1][-1])]
    return [torch.rand(*shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def in_one_pass(world, event, head, used, dtype, keeps_layers, products=None, grouping="random"):
    """Ids, and of this part the three results and the gradients of what goes in; gradients of the parameters."""
    part = event.part(world.transport, event.grouping(grouping, world.size, seed=world.size), dtype)
    made, plan = chain(head, dtype, products), part.graph.plan
    for stage in made:
        stage.keeps_layers = keeps_layers
    sink, (nodes, edges, *upstream) = GradientSink(made), inputs(event, head, dtype)
    ids = {"edges": torch.from_numpy(plan.edge_ids), "nodes": torch.from_numpy(plan.owned_ids)}
    nodes, edges = nodes[ids["nodes"]].requires_grad_(), edges[ids["edges"]].requires_grad_()
    results = run_chain(list(made), part.halo.spread(nodes), edges, part.graph, sums=True, keys=[None] * 3)
    places = dict(zip(RESULTS, ("edges", "nodes", "edges")))
    losses = [
        (result * gradient[ids[places[name]]]).sum()
        for name, result, gradient in zip(RESULTS, results, upstream)
        if name in used
    ]
    sum(losses).backward()
    assert sink.reduce(world.transport) == 0
    owned = torch.from_numpy(plan.edge_owned)
    tables = {name: (places[name], result.detach().to(dtype)) for name, result in zip(RESULTS, results)}
    tables |= {"of nodes": ("nodes", nodes.grad), "of input": ("edges", edges.grad)}
    of_part = {
        name: (ids[place][owned], rows[owned]) if place == "edges" else (ids[place], rows)
        for name, (place, rows) in tables.items()
    }
    return of_part, [parameter.grad for parameter in made.parameters()]


def of_all(event, found):
    """Each table over all ranks, in global order, and the gradients that all of them have."""
    tables = {}
    for of_part, gradients in found:
        assert sha(*gradients) == sha(*found[0][1]), "gradients of two ranks"
        for name, (ids, rows) in of_part.items():
            count = 90 if name in ("sums", "of nodes", "states") else event.graph.num_edges
            whole = tables.setdefault(name, torch.full((count, rows.shape[1]), torch.nan, dtype=rows.dtype))
            whole[ids] = rows
    return [*tables.values(), *found[0][1]]


def by_formula(event, head, used):
    """The same from plain torch on the whole event."""
    made, (nodes, edges, *upstream) = chain(head, torch.float64), inputs(event, head, torch.float64)
    nodes, edges, (*_, src, dst) = nodes.requires_grad_(), edges.requires_grad_(), networks.tables(event)
    first, *_ = dense.edge_stage(made[0], nodes, edges, src, dst)
    second, *at_ends = dense.edge_stage(made[1], nodes, first, src, dst)
    takes_nodes, _ = HEADS[head]
    readout = dense.mlp(made[2].mlp, torch.cat([nodes[src], nodes[dst], second], dim=1) if takes_nodes else second)
    results = [second, torch.cat(at_ends, dim=1), readout]
    sum((rows * up).sum() for name, rows, up in zip(RESULTS, results, upstream) if name in used).backward()
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in made.parameters()]
    return [*(one.detach() for one in results), nodes.grad, edges.grad, *gradients]


def assert_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-11 * theirs.abs().max()


@pytest.mark.parametrize(
    ("head", "used", "keeps_layers"),
    [
        (pytest.param if number % 2 != keeps else slow)(head, used, keeps, id=f"{head}-{'-'.join(used)}-{keeps}")
        for number, (head, used) in enumerate(itertools.product(HEADS, USED))
        for keeps in (True, False)
    ],
)
def test_states_sums_and_a_readout_of_one_pass_are_their_formulas_with_all_gradients(event, head, used, keeps_layers):
    found = run_ranks(in_one_pass, 3, event, head, used, torch.float64, keeps_layers)
    assert_close(of_all(event, found), by_formula(event, head, used))


@pytest.mark.parametrize("products", [None, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("head", HEADS)
def test_they_have_one_hash_on_any_number_of_ranks(event, head, products):
    hashes = set()
    on = ((1, "ranges", True), (1, "ranges", False), (2, "random", True), (3, "random", False), (3, "ranges", True))
    for ranks, grouping, keeps_layers in on:
        found = run_ranks(in_one_pass, ranks, event, head, RESULTS, torch.float32, keeps_layers, products, grouping)
        hashes.add(sha(*of_all(event, found)))
    assert len(hashes) == 1


# --- after every iteration -------------------------------------------------------------------------------------------


def _readouts(world, event, flags):
    """Logits in training and without a key, and how many passes over the edges had a readout in each."""
    part = event.part(world.transport, event.grouping("ranges", world.size), torch.float32)
    model = networks.network(event, torch.float32, readouts="all", **flags)
    read, plain = [], interaction.run_chain
    interaction.run_chain = lambda made, *rest, **how: read.append(made[-1] is model.head) or plain(made, *rest, **how)
    try:
        logits = [model(part.graph, part.halo, key).detach() for key in (KEY, None)]
    finally:
        interaction.run_chain = plain
    fewer = []
    for count in range(1, 5):
        small = networks.network(event, torch.float32, **flags | {"graph_iters": count})
        small.load_state_dict({name: model.state_dict()[name] for name in small.state_dict()})
        fewer.append(small(part.graph, part.halo).detach())
    return logits, read, fewer


@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_in_training_each_iteration_is_read_out_as_if_it_were_the_last_and_else_the_last_alone(event, order):
    ((of_training, grad_scores), read, fewer), *_ = run_ranks(_readouts, 1, event, {"order": order, "graph_iters": 4})
    assert of_training.shape == (4, event.graph.num_edges)
    assert torch.equal(grad_scores, of_training[-1])
    passes = 4 + (order == "node-first")
    assert read == [False] * (passes - 4) + [True] * 4 + [False] * (passes - 1) + [True]
    for ours, theirs in zip(of_training, fewer, strict=True):
        assert torch.equal(ours, theirs)
    assert len({sha(rows) for rows in of_training}) == 4


def test_of_one_iteration_there_is_one_readout(event):
    found = networks.on_ranks(event, 1, key=KEY, graph_iters=1, readouts="all")
    assert found.sha == networks.on_ranks(event, 1, key=KEY, graph_iters=1).sha


# --- of nodes --------------------------------------------------------------------------------------------------------


def network_of_nodes(widths, dtype):
    """An encoder, one iteration and a readout of node states."""
    generator = torch.Generator().manual_seed(4)
    made = [
        NodeStage(an_mlp(3, (16,), generator)),
        EdgeStage(an_mlp(2 * 16 + 6, (16, 16), generator), aggregate="mean"),
        NodeStage(an_mlp(3 * 16, (16, 16), generator), residual=True),
        NodeStage(an_mlp(16 + 3, widths, generator, readout=True)),
    ]
    return torch.nn.ModuleList(made).to(dtype)


def upstream_of_nodes(widths, dtype):
    return torch.rand(90, widths[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(5)).to(dtype)


def _nodes(world, event, widths, dtype, keeps_layers=True):
    part = event.part(world.transport, event.grouping("random", world.size, seed=world.size), dtype)
    made, graph, ids = network_of_nodes(widths, dtype), part.graph, torch.from_numpy(part.graph.plan.owned_ids)
    for stage in made:
        stage.keeps_layers = keeps_layers
    sink, features = GradientSink(made), graph.features[: graph.num_owned].clone().requires_grad_()
    first = made[0]([features], graph)
    _, sums = made[1](part.halo.spread(first), graph.edge_features, graph)
    readout = made[3]([made[2]([first, sums], graph), features], graph)
    readout.backward(upstream_of_nodes(widths, dtype)[ids])
    assert sink.reduce(world.transport) == 0
    of_part = {"states": (ids, readout.detach()), "of nodes": (ids, features.grad)}
    return of_part, [parameter.grad for parameter in made.parameters()]


def nodes_by_formula(event, widths):
    made = network_of_nodes(widths, torch.float64)
    features, edge_features, src, dst = networks.tables(event)
    features.requires_grad_()
    first = dense.node_stage(made[0], [features])
    _, *at_ends = dense.edge_stage(made[1], first, edge_features, src, dst)
    readout = dense.node_stage(made[3], [dense.node_stage(made[2], [first, *at_ends]), features])
    readout.backward(upstream_of_nodes(widths, torch.float64))
    return [readout.detach(), features.grad, *(parameter.grad for parameter in made.parameters())]


WIDTHS = [(1,), (5,), (16, 1), (32, 3), (16, 16), (16, 32, 20)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_a_readout_of_nodes_is_its_formula_with_all_gradients(event, widths):
    expected = nodes_by_formula(event, widths)
    for ranks, keeps_layers in ((1, True), (3, True), (3, False)):
        found = run_ranks(_nodes, ranks, event, widths, torch.float64, keeps_layers)
        assert_close(of_all(event, found), expected)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_a_readout_of_nodes_has_one_hash_on_any_number_of_ranks(event, widths):
    found = [run_ranks(_nodes, ranks, event, widths, torch.float32, keeps) for ranks in (1, 2, 3) for keeps in (1, 0)]
    assert len({sha(*of_all(event, of_ranks)) for of_ranks in found}) == 1
