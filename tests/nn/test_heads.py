"""Heads of nodes and of the graph: the same bits on any number of ranks, and what the formulas say."""

from __future__ import annotations

import copy

import dense
import networks
import pytest
import torch
from marks import slow
from tiled import sha
from torch import nn

from domainpar.nn.heads import EDGE, Head, pooled
from domainpar.nn.options import NetworkOptions
from domainpar.testing import run_ranks
from domainpar.tracking.networks.catalogue import build_model
from domainpar.tracking.networks.on_events import OnEvents

KINDS, ENERGY, JET = Head("kinds", "node", 4), Head("energy", "node"), Head("jet", "graph", 3, usual_nodes=70.0)
EVERYTHING = (EDGE, KINDS, ENERGY, JET)
ORDERS = ("interaction", "interaction-node-first")


@pytest.fixture(scope="module")
def event():
    return networks.tiled_event(90, 500)


def network(name, heads=EVERYTHING, dtype=torch.float32, **options):
    options = NetworkOptions(hidden=16, graph_iters=3, seed=5, dtype=dtype, heads=heads, **options)
    return build_model(name, 3, 6, options)


def upstream(heads, event, dtype):
    """The gradient of what each head says of the whole event, in stored order."""
    generator = torch.Generator().manual_seed(8)
    sizes = {"edge": (event.graph.num_edges,), "node": (event.graph.num_nodes,), "graph": ()}
    shapes = {head.name: (*sizes[head.of], *([] if head.of == "edge" else [head.columns])) for head in heads}
    return {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def read(world, event, make, grouping="random", key=None):
    """Readings of this part with the global ids of their rows, and gradients of all parameters."""
    model = make()
    dtype = next(model.parameters()).dtype
    part = event.part(world.transport, event.grouping(grouping, world.size, seed=world.size), dtype)
    gradients, plan = model.gradients(), part.graph.plan
    readings = model.read(part.graph, part.halo, key)
    given = upstream(model.heads, event, dtype)
    ids = {"node": torch.from_numpy(plan.owned_ids), "edge": torch.from_numpy(plan.edge_ids)}
    outputs = {} if readings.edges is None else {EDGE.name: readings.edges}
    outputs |= readings.others
    assert list(outputs) == [head.name for head in model.heads]
    of = {head.name: head.of for head in model.heads}
    wanted = {name: given[name] if of[name] == "graph" else given[name][ids[of[name]]] for name in outputs}
    torch.autograd.backward(readings.tensors, [wanted[name].expand_as(outputs[name]) for name in outputs])
    assert gradients.reduce(world.transport) == 0
    owned = torch.from_numpy(plan.edge_owned)
    rows = {
        name: (ids["edge"][owned], torch.atleast_2d(table.detach())[-1][owned])
        if of[name] == "edge"
        else (ids["node"] if of[name] == "node" else None, table.detach())
        for name, table in outputs.items()
    }
    return rows, [parameter.grad.clone() for parameter in model.layers.parameters() if parameter.grad is not None]


def whole(answers):
    """Readings of the whole event, in stored order, and gradients; the same on all ranks."""
    tables = {}
    for name, (ids, _) in answers[0][0].items():
        parts = [answer[0][name] for answer in answers]
        if ids is None:
            assert len({sha(table) for _, table in parts}) == 1
            tables[name] = parts[0][1]
            continue
        all_ids = torch.cat([ids for ids, _ in parts])
        assert sorted(all_ids.tolist()) == list(range(len(all_ids)))
        tables[name] = torch.cat([table for _, table in parts])[all_ids.argsort()]
    assert len({sha(*gradients) for _, gradients in answers}) == 1
    return tables, answers[0][1]


@pytest.mark.parametrize("heads", [EVERYTHING, (KINDS,), (JET,), (EDGE, ENERGY)], ids=lambda heads: heads[0].name)
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("ranks", [(1, 2, 3), slow((2, 8))], ids=str)
def test_each_head_has_the_same_bits_on_any_number_of_ranks(event, name, heads, ranks):
    hashes = set()
    for on, grouping in (*((each, "random") for each in ranks), (2, "one part")):
        answers = run_ranks(read, on, event, lambda: network(name, heads, dropout=0.2), grouping, 11)
        tables, gradients = whole(answers)
        hashes.add(sha(*tables.values(), *gradients))
    assert len(hashes) == 1


@pytest.mark.parametrize("name", ORDERS)
def test_each_head_is_its_formula(event, name):
    (answer,) = run_ranks(read, 1, event, lambda: network(name, dtype=torch.float64))
    tables, gradients = whole([answer])
    model = network(name, dtype=torch.float64)
    order = event.order
    x0 = torch.from_numpy(event.graph.features[order.original_row]).double()
    e0 = torch.from_numpy(event.graph.edge_features[order.original_position]).double()
    src, dst = (torch.from_numpy(end) for end in (order.src, order.dst))
    logits, x = dense.interaction_network(model, x0, e0, src, dst, gives_nodes=True)
    rows = {name.removeprefix("of_"): dense.mlp(head.mlp, x) for name, head in model.other_heads.items()}
    expected = {"edge": logits, "kinds": rows["kinds"], "energy": rows["energy"]}
    expected["jet"] = rows["jet"][:, :3].mean(0) + rows["jet"][:, 3:].sum(0) / 70.0
    given = upstream(EVERYTHING, event, torch.float64)
    sum((expected[name] * given[name]).sum() for name in expected).backward()
    for name, table in tables.items():
        torch.testing.assert_close(table, expected[name].detach(), rtol=1e-11, atol=1e-11)
    wanted = [parameter.grad for parameter in model.layers.parameters()]
    assert len(wanted) == len(gradients)
    for gradient, of_formula in zip(gradients, wanted):
        torch.testing.assert_close(gradient, of_formula, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ORDERS)
def test_iterations_computed_again_change_no_bit(event, name):
    hashes = set()
    for every in (None, 1, 2):
        tables, gradients = whole(run_ranks(read, 2, event, lambda every=every: network(name, recompute_every=every)))
        hashes.add(sha(*tables.values(), *gradients))
    assert len(hashes) == 1


def test_other_heads_leave_the_first_weights_of_all_else_as_they_were():
    alone, beside = (network("interaction", heads).state_dict() for heads in ((EDGE,), EVERYTHING))
    more = set(beside) - set(alone)
    # One more update of nodes is drawn before the head of edges.
    assert all(name.startswith(("other_heads.", "node_stages.2.")) for name in more)
    assert all(torch.equal(alone[name], beside[name]) for name in alone if not name.startswith("head."))


def test_a_network_without_a_head_of_edges_says_so(event):
    def ask(world):
        part = event.part(world.transport, event.grouping("ranges", world.size))
        with pytest.raises(ValueError, match="no head of edges; ask it with read"):
            network("interaction", (KINDS,))(part.graph, part.halo)

    run_ranks(ask, 1)


def test_networks_of_the_field_have_a_head_of_edges_alone():
    with pytest.raises(ValueError, match="--model acorn2 has no head of kinds; interaction and"):
        build_model("acorn2", 3, 6, NetworkOptions(hidden=16, graph_iters=2, heads=(EDGE, KINDS)))


def test_pooling_is_of_all_nodes_also_where_ranks_own_none_and_shows_what_is_not_finite():
    rows = torch.arange(24.0).reshape(6, 4)

    def of_graph(world, table):
        own = table[:0] if world.rank == 1 else table[:4] if world.rank == 0 else table[4:]
        own = own.clone().requires_grad_()
        result = pooled(own, 3.0, world.transport)
        result.backward(torch.tensor([6.0, 12.0]))
        return result.detach(), own.grad

    for result, gradient in run_ranks(of_graph, 3, rows):
        assert torch.equal(result, rows[:, :2].mean(0) + rows[:, 2:].sum(0) / 3)
        assert torch.equal(gradient, torch.tensor([1.0, 2.0, 2.0, 4.0]).expand(len(gradient), 4))
    spoilt = rows.clone()
    spoilt[5, 0] = torch.inf
    assert all(result.isnan().all() for result, _ in run_ranks(of_graph, 3, spoilt))


class OfEverything(nn.Module):
    """A user's network with several results, a pooled one among them."""

    def __init__(self, node_features, edge_features, outputs):
        super().__init__()
        self.first = nn.Linear(node_features, 8)
        self.message = nn.Linear(16 + edge_features, 8)
        self.grad_edges = nn.Linear(8, outputs["edge"])
        self.grad_nodes = nn.Linear(8, outputs["kinds"])
        self.of_graph = nn.Linear(8, outputs["jet"])

    def forward(self, x, edge_index, edge_attr):
        src, dst = edge_index
        x = torch.tanh(self.first(x))
        messages = torch.tanh(self.message(torch.cat([x[src], x[dst], edge_attr], 1)))
        x = x + torch.zeros_like(x).index_add(0, dst, messages)
        return {"edge": self.grad_edges(messages), "kinds": self.grad_nodes(x), "jet": self.of_graph(x.mean(0))}


def own(event):
    heads = (EDGE, KINDS, JET)
    torch.manual_seed(3)
    module = OfEverything(3, 6, {head.name: head.columns for head in heads}).double()
    return lambda: OnEvents(copy.deepcopy(module), heads=heads)  # ranks are threads


def test_results_of_a_users_network_are_those_of_one_rank_to_rounding(event):
    results = []
    for ranks in (1, 2, 3, 8):
        (tables, gradients) = whole(run_ranks(read, ranks, event, own(event)))
        results.append([*tables.values(), *gradients])
    for other in results[1:]:
        for one, two in zip(results[0], other):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        (lambda x: x[:, 0], "the model returned Tensor; return a dictionary of tensors named edge, kinds"),
        (
            lambda x: {"edge": x[:, 0]},
            "the model returned one with edge; return a dictionary of tensors named edge, kin",
        ),
        (lambda x: {"edge": x[:, 0], "kinds": x}, "with rows of nodes; return one logit for each edge"),
    ],
)
def test_results_that_are_not_those_of_the_heads_are_refused(event, returns, said):
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return returns(x * self.weight)

    def ask(world):
        part = event.part(world.transport, event.grouping("ranges", world.size))
        with pytest.raises(ValueError, match=said):
            OnEvents(Wrong(), heads=(EDGE, Head("kinds", "node", 3))).read(part.graph, part.halo)

    run_ranks(ask, 2)
