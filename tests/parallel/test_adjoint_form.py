"""A PyG model wrapped by hand in the adjoint form: one process' outputs, gradients and training, to rounding."""

import copy

import numpy as np
import pytest
import torch
from proving import check_no_rank_holds_all
from random_events import random_assignment, random_event

from domainpar.parallel.halo import AdjointHalo
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.plan import build_plans
from domainpar.testing import run_ranks

pyg = pytest.importorskip("torch_geometric.nn")

NUM_STEPS = 20


class Wrapped(torch.nn.Module):
    """Two convolutions with edge attributes and a residual; ghosts are refreshed before each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.Linear(3, 8)
        self.convolutions = torch.nn.ModuleList(
            [
                pyg.GINEConv(torch.nn.Linear(8, 8), edge_dim=6),
                pyg.SAGEConv(8, 8, aggr="max"),
                pyg.GATv2Conv(8, 8, edge_dim=6),
            ]
        )
        self.head = torch.nn.Linear(8, 1)
        self.double()

    def forward(self, x, edge_rows, edge_features, halo):
        x = torch.tanh(self.encoder(x))
        for convolution in self.convolutions:
            local = halo.extend(x)
            edges = () if isinstance(convolution, pyg.SAGEConv) else (edge_features,)
            x = x + torch.tanh(convolution(local, edge_rows, *edges))[: len(x)]
        return self.head(x)


def _train(world, initial, graph, assignment, policy):
    plan = build_plans(graph.edge_index, assignment, world.size, policy)[world.rank]
    halo = AdjointHalo(plan, world.transport)
    x = torch.from_numpy(graph.features[plan.owned_ids]).double()
    edge_rows = torch.from_numpy(plan.edge_rows)
    edge_features = torch.from_numpy(graph.edge_features[plan.edge_ids]).double()
    model = copy.deepcopy(initial)  # torch's generator is shared by threads: made once, copied
    sizes = [parameter.numel() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        out = model(x, edge_rows, edge_features, halo)
        out.backward(2 * (out.detach() - 1) / graph.num_nodes)
        sums = IntegerSums(sum(sizes))
        sums.add(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        sums.reduce(world.transport)  # gradients are summed over ranks, not averaged
        for parameter, gradient in zip(model.parameters(), sums.total().split(sizes)):
            parameter.grad = gradient.view_as(parameter)
        history.append((plan.owned_ids, out.detach(), sums.total()))
        optimizer.step()
    return history, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _whole(found, graph, step):
    out = torch.empty(graph.num_nodes, 1, dtype=torch.float64)
    for history, _ in found:
        ids, rows, _ = history[step]
        out[torch.from_numpy(ids)] = rows
    return out, found[0][0][step][2]


def _difference(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("policy", ["incoming", "incident"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_model_wrapped_by_hand_learns_what_one_process_learns(policy, num_ranks):
    graph, parts = random_event(5, 60, 400, reach=2), np.sort(random_assignment(5, 60, num_ranks))
    check_no_rank_holds_all(graph.edge_index, parts, num_ranks, policy)
    initial = Wrapped()
    alone = run_ranks(_train, 1, initial, graph, random_assignment(5, 60, 1), policy)
    found = run_ranks(_train, num_ranks, initial, graph, parts, policy)
    for step, tolerance in ((0, 1e-12), (NUM_STEPS - 1, 1e-10)):
        for ours, theirs in zip(_whole(found, graph, step), _whole(alone, graph, step)):
            assert _difference(ours, theirs) <= tolerance
    for _, parameters in found:
        assert torch.equal(parameters, found[0][1])
        assert _difference(parameters, alone[0][1]) <= 1e-10
