"""The programs of the recipes for your own model run as they are printed, on three ranks with the results of one."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

import domainpar
from domainpar.placed.moves import whole
from domainpar.testing import run_ranks

RECIPES = Path(__file__).parents[2] / "docs/recipes"
NUM_NODES, NUM_EDGES = 24, 90
COMPARED = "loss accuracy confusion averaged scores energy force stress state out".split()
PAGES = {
    "model_losses": 4,
    "model_steps": 3,
    "model_forces": 2,
    "model_refused": 1,
    "model_domains": 1,
    "model_kinds": 3,
}


RELATIONS = ("author", "writes", "paper"), ("paper", "of", "author"), ("paper", "cites", "paper")
GRIDS = ("grid", "to", "mesh"), ("mesh", "near", "mesh"), ("mesh", "to", "grid")


def programs(page):
    return re.findall(r"```python\n(.*?)```", (RECIPES / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)


class Network(nn.Module):
    """One round of sums over neighbours, with weights of a generator of their own: threads share torch's."""

    def __init__(self, width=4, outputs=3):
        super().__init__()
        self.first, self.last = nn.Linear(width, 8), nn.Linear(8, outputs)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.double().parameters():
                parameter.uniform_(-0.5, 0.5, generator=draw)

    def forward(self, x, edge_index):
        x = self.first(x).tanh()
        return self.last(x + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]))


class OfGraphs(Network):
    def forward(self, x, edge_index):
        nodes = super().forward(x, edge_index)
        return nodes, nodes.mean(0)


class OfKinds(nn.Module):
    """A network of two kinds of nodes."""

    def __init__(self):
        super().__init__()
        convs = {kind: SAGEConv((4, 4), 3) for kind in RELATIONS}
        self.conv = HeteroConv(convs)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.double().parameters():
                parameter.uniform_(-0.5, 0.5, generator=draw)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def names_of_kinds(world, drawn, draw):
    """What the programs about several kinds of nodes use."""

    def edges(num_src, num_dst, count):
        return torch.stack([torch.randint(n, (count,), generator=draw) for n in (num_src, num_dst)])

    data = HeteroData()
    data["paper"].x, data["author"].x = drawn(NUM_NODES, 4), drawn(9, 4)
    data["paper"].y, data["paper"].train_mask = torch.arange(NUM_NODES) % 3, torch.arange(NUM_NODES) > 8
    for kind in RELATIONS:
        data[kind].edge_index = edges(len(data[kind[0]].x), len(data[kind[2]].x), 40)
    grid_to_mesh, mesh_edges, mesh_to_grid = edges(NUM_NODES, 7, 40), edges(7, 7, 12), edges(7, NUM_NODES, 50)
    weights = [(kind, drawn(count, 1)) for kind, count in zip(GRIDS, (40, 12, 50))]
    return {
        "data": data, "hetero_model": domainpar.parallelize(OfKinds(), world), "positions": drawn(NUM_NODES, 3),
        "grid_to_mesh": grid_to_mesh, "mesh_edges": mesh_edges, "mesh_to_grid": mesh_to_grid, "weights": dict(weights),
        "weather": drawn(NUM_NODES, 4), "mesh_features": drawn(7, 4),
        "step_model": domainpar.parallelize(Row(4, 4), world), "arm_model": domainpar.parallelize(Row(3, 3), world),
    }  # fmt: skip


class Row(nn.Linear):
    """Of each row by itself."""

    def __init__(self, width, outputs):
        super().__init__(width, outputs, dtype=torch.float64)
        with torch.no_grad():
            self.weight.copy_(torch.arange(1.0, 1 + self.weight.numel()).sin().view_as(self.weight))
            self.bias.fill_(0.1)


def names_of(world, page):
    """What the programs of a page use, before the first of them."""
    draw = torch.Generator().manual_seed(1)

    def drawn(*size):
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    edge_index = torch.randint(NUM_NODES, (2, NUM_EDGES), generator=draw)
    owner = np.zeros(NUM_NODES, np.int64) if world.size == 1 else np.arange(NUM_NODES) % world.size
    part = domainpar.split_graph(edge_index, NUM_NODES, world, partitioner=owner)
    model, outputs = Network(), 4 if page == "model_forces" else 3
    classes = torch.randint(3, (NUM_NODES,), generator=draw)
    names = {
        "torch": torch, "nn": nn, "domainpar": domainpar, "checkpoint": checkpoint, "world": world, "part": part,
        "model": domainpar.parallelize(model, world), "Network": Network, "num_nodes": NUM_NODES,
        "AveragedModel": torch.optim.swa_utils.AveragedModel,
        "x": drawn(NUM_NODES, 4), "edge_index": edge_index, "y": classes, "classes": 3, "steps": 3, "dt": 0.1,
        "train_mask": torch.arange(NUM_NODES) < 11, "test_mask": torch.arange(NUM_NODES) > 15,
        "train_idx": torch.tensor([5, 3, 20, 8]), "class_weights": torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64),
        "weight": torch.arange(NUM_NODES) / 10.0, "pairs": torch.randint(NUM_NODES, (2, 30), generator=draw),
        "is_link": (torch.arange(30) % 2).double(), "of_nodes": drawn(NUM_NODES, 3), "of_graph": drawn(3),
        "model_of_graphs": domainpar.parallelize(OfGraphs(), world), "layer": model,
        "print": lambda *values: None,
        **{name: getattr(F, name) for name in ("cross_entropy", "mse_loss", "binary_cross_entropy_with_logits")},
    }  # fmt: skip
    if page == "model_kinds":
        names |= names_of_kinds(world, drawn, draw)
        names["edge_index"] = edge_index[:, edge_index[0] != edge_index[1]]  # an arm has a direction
    names["optimizer"] = torch.optim.Adam(model.parameters(), lr=0.01)
    if page == "model_forces":
        names |= {"pos": drawn(NUM_NODES, 3), "forces": drawn(NUM_NODES, 3), "of_graph": drawn(())}
        names |= {"step_model": domainpar.parallelize(Network(outputs=outputs), world), "y": drawn(NUM_NODES, 4)}
    if page == "model_domains":
        names |= domain_of(world, edge_index, names["x"])
    if page == "model_steps":
        targets = drawn(NUM_NODES, 3)
        names |= {"accumulated": [(names["x"], targets), (2 * names["x"], targets)], "h": part.nodes(names["x"])}
        names["schedule"] = torch.optim.lr_scheduler.ReduceLROnPlateau(names["optimizer"])
        loss_of = lambda x: F.mse_loss(names["model"](part.nodes(x), part.edge_index), targets)  # noqa: E731
        names["loss_of_validation"] = lambda: loss_of(names["x"])
        names["train_one_step"] = lambda x, y: (loss_of(x).backward(), names["optimizer"].step())
        names["steps"] = names["accumulated"]
    return names


class OfVectors(nn.Module):
    def forward(self, kind, edge_index, vectors):
        src, dst = edge_index
        return (vectors.tanh().sum(1) * (1 + kind[src] + 2 * kind[dst])).square().sum()


def domain_of(world, edge_index, x):
    """What a host has of a block of nodes; two nodes are its ghosts twice, and rows travel over the world."""
    low, high = (NUM_NODES * (world.rank + more) // world.size for more in (0, 1))
    edges = (edge_index[1] >= low) & (edge_index[1] < high)
    src, dst = edge_index[:, edges]
    ghosts = torch.cat([src.unique(), src.unique()])
    at = torch.searchsorted(src.unique(), src)
    rows = high - low + at + len(ghosts) // 2 * (src % 2)
    module = domainpar.parallelize(OfVectors(), world)
    return {
        "part_of_domain": lambda *given, exchange: domainpar.part_of_domain(*given),
        "forward": None, "reverse": None, "model": module, "place": x[low:high], "kind": torch.arange(low, high),
        "edge_index": torch.stack([rows, dst - low]), "owned_ids": torch.arange(low, high), "ghost_ids": ghosts,
        "shift": src[:, None] * 0.1, "whole_edges": edge_index,
    }  # fmt: skip


def results_of(world, page):
    """What the programs of a page leave, and the gradients of its models, whole."""
    torch.set_num_threads(1)
    names, left = names_of(world, page), {}
    for number, program in enumerate(programs(page)):
        if page == "model_forces" and number == 0:
            define, program = program.split("\n\n", 1)
            exec(define, names)
            potential = names["Potential"]()
            potential.energies = Network(3, 1)
            names["potential"] = domainpar.parallelize(potential, world)
        if page != "model_refused" or world.size == 1:  # verify starts ranks of its own
            exec(program, names)
        left |= {f"{name} {number}": names[name] for name in COMPARED if name in names}
    models = {name: value for name, value in names.items() if isinstance(value, nn.Module)}
    for name, model in models.items():
        left |= {f"{name} {key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {
        name: whole(value.detach()).double() if isinstance(value, torch.Tensor) else torch.tensor(value).double()
        for name, value in left.items()
    }


@pytest.mark.parametrize("page", PAGES)
def test_programs_of_a_recipe_give_on_three_ranks_what_they_give_on_one(page):
    assert len(programs(page)) == PAGES[page]
    (alone,) = run_ranks(results_of, 1, page)
    assert alone or page == "model_refused"
    for found in run_ranks(results_of, 3, page):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


def in_groups(world):
    """The gradient after the program with groups of ranks."""
    (program,) = [program for program in programs("model_graphs") if "domain_size" in program]
    body = re.sub(r"(?m)^    ", "", program.split("\n", 1)[1])
    draw = torch.Generator().manual_seed(2)
    graphs = [
        (
            torch.randn(20 + 9 * group, 4, generator=draw, dtype=torch.float64),
            torch.randn(20 + 9 * group, 3, generator=draw, dtype=torch.float64),
            torch.randint(20, (2, 70), generator=draw),
        )
        for group in range(2)
    ]
    names = {
        "world": world, "parallelize": domainpar.parallelize, "split_graph": domainpar.split_graph,
        "Network": Network, "mse_loss": F.mse_loss, "graph_of": lambda group: graphs[group],
    }  # fmt: skip
    if world.size == 1:
        network = Network()
        sum(F.mse_loss(network(x, edge_index), y) / 2 for x, y, edge_index in graphs).backward()
    else:
        exec(body, names)
        network = names["model"]
    return torch.cat([parameter.grad.flatten() for parameter in network.parameters()])


def test_groups_of_ranks_have_the_mean_of_the_gradients_of_their_graphs():
    (alone,) = run_ranks(in_groups, 1)
    for found in run_ranks(in_groups, 4, domain_size=2):
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14)


def test_the_recipe_of_domains_gives_what_plain_torch_gives():
    def work(world):
        names = names_of(world, "model_domains")
        given = {name: names[name] for name in ("x", "whole_edges")}
        exec(programs("model_domains")[0], names)
        return given, names["energy"].item(), names["of_host"]

    of_ranks = run_ranks(work, 3)
    x, edges = (of_ranks[0][0][name] for name in ("x", "whole_edges"))
    x.requires_grad_()
    energy = OfVectors()(torch.arange(NUM_NODES), edges, x[edges[1]] - x[edges[0]] - edges[0][:, None] * 0.1)
    energy.backward()
    assert [found for _, found, _ in of_ranks] == pytest.approx([energy.item()] * 3, rel=1e-12)
    torch.testing.assert_close(torch.cat([force for *_, force in of_ranks]), -x.grad)
