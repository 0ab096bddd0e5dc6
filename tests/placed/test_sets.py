"""Graphs of several kinds of nodes and edges, and edges that join edges: networks on them, and what a rank holds."""

import copy
import threading

import pytest
import torch
from marks import slow
from proving import check_no_rank_holds_all
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, HeteroConv, HGTConv, RGCNConv, SAGEConv, to_hetero
from torch_geometric.nn.models import dimenet

from domainpar import World, parallelize, split_graph, verify
from domainpar.common.agreement import Refused
from domainpar.placed.sets import numbered_as_one
from domainpar.placed.tensor import Placed
from domainpar.testing import run_ranks

NODES = {"grid": 61, "mesh": 23, "sun": 1, "none": 0}
WIDTHS = {"grid": 4, "mesh": 3, "sun": 2, "none": 5}
NUM_EDGES = {
    ("grid", "to", "mesh"): 121,
    ("mesh", "to", "mesh"): 97,
    ("mesh", "to", "grid"): 131,
    ("sun", "shines", "grid"): 59,
    ("mesh", "sees", "sun"): 29,
    ("grid", "of", "none"): 0,
}
ENCODE, PROCESS, DECODE = list(NUM_EDGES)[:3]
ATOMS = 31
BOND = ("atom", "bond", "atom")
ANGLE = (BOND, "meets", BOND)
TURN = (ANGLE, "turns", ANGLE)


def ring(of_src, of_dst, count, draw):
    """Edges between nodes with neighbouring places in their sets, each set laid around one ring."""
    if not count:
        return torch.zeros(2, 0, dtype=torch.int64)
    at = torch.arange(count) % of_dst
    near = torch.randint(-1, 2, (count,), generator=draw)
    return torch.stack([(at * of_src // of_dst + near) % of_src, at])


def earth():
    """A graph of all kinds, one of them a single node and one without nodes, with features, targets and a mask."""
    draw, data = torch.Generator().manual_seed(0), HeteroData()
    for kind, count in NODES.items():
        data[kind].x = torch.randn(count, WIDTHS[kind], generator=draw, dtype=torch.float64)
    data["grid"].y = torch.randn(NODES["grid"], 2, generator=draw, dtype=torch.float64)
    data["grid"].mask = torch.arange(NODES["grid"]) % 3 > 0
    for kind, count in NUM_EDGES.items():
        data[kind].edge_index = ring(NODES[kind[0]], NODES[kind[2]], count, draw)
        data[kind].edge_attr = torch.randn(count, 2, generator=draw, dtype=torch.float64)
    return data


def owners(size, nodes):
    """Blocks of each kind; of three ranks the second owns nothing."""
    parts = torch.tensor([0, 2] if size == 3 else list(range(size)))
    return {kind: parts[torch.arange(n) * len(parts) // max(1, n)] for kind, n in nodes.items()}


def mlp(width, out):
    return nn.Sequential(nn.Linear(width, 8), nn.SiLU(), nn.Linear(8, out), nn.LayerNorm(out))


class Interaction(nn.Module):
    """New states of the nodes where edges end, from those edges and their ends."""

    def __init__(self):
        super().__init__()
        self.of_edges, self.of_nodes = mlp(8 + 8 + 4, 4), mlp(8 + 4, 8)

    def forward(self, x_src, x_dst, edge_index, e):
        e = e + self.of_edges(torch.cat([x_src[edge_index[0]], x_dst[edge_index[1]], e], 1))
        sums = e.new_zeros(x_dst.size(0), 4).index_add(0, edge_index[1], e)
        return x_dst + self.of_nodes(torch.cat([x_dst, sums], 1)), e


class Weather(nn.Module):
    """As GraphCast: from the grid to the mesh, rounds on the mesh, and back to the grid."""

    def __init__(self):
        super().__init__()
        self.grid, self.mesh = mlp(WIDTHS["grid"], 8), mlp(WIDTHS["mesh"], 8)
        self.edges = nn.ModuleList([mlp(2, 4) for _ in range(3)])
        self.steps = nn.ModuleList([Interaction() for _ in range(4)])
        self.out = nn.Linear(8, 2)

    def forward(self, x, edge_index, edge_attr):
        grid, mesh = self.grid(x["grid"]), self.mesh(x["mesh"])
        e = [layer(edge_attr[kind]) for layer, kind in zip(self.edges, (ENCODE, PROCESS, DECODE))]
        mesh, _ = self.steps[0](grid, mesh, edge_index[ENCODE], e[0])
        for step in self.steps[1:3]:
            mesh, e[1] = step(mesh, mesh, edge_index[PROCESS], e[1])
        grid, _ = self.steps[3](mesh, grid, edge_index[DECODE], e[2])
        return self.out(grid)


class Convolutions(nn.Module):
    """`HeteroConv` of SAGEConv and GATConv, two rounds."""

    def __init__(self):
        super().__init__()
        widths, self.rounds = WIDTHS, nn.ModuleList()
        for _ in range(2):
            convs = {kind: SAGEConv((widths[kind[0]], widths[kind[2]]), 8) for kind in NUM_EDGES}
            for kind in (ENCODE, DECODE):
                convs[kind] = GATConv((widths[kind[0]], widths[kind[2]]), 8, edge_dim=2, add_self_loops=False)
            self.rounds.append(HeteroConv(convs, aggr="mean"))
            widths = dict.fromkeys(NODES, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x, edge_index, edge_attr):
        some = {kind: edge_attr[kind] for kind in (ENCODE, DECODE)}
        for convs in self.rounds:
            x = {kind: h.relu() for kind, h in convs(x, edge_index, edge_attr_dict=some).items()}
        return self.out(x["grid"])


class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = SAGEConv(8, 8), SAGEConv(8, 8)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


class Joined(nn.Module):
    """All kinds laid behind each other in the forward pass, as one graph with types of edges."""

    def __init__(self, make):
        super().__init__()
        self.make, self.lin = make, nn.ModuleDict({kind: nn.Linear(width, 8) for kind, width in WIDTHS.items()})
        self.conv, self.out = make(), nn.Linear(8, 2)

    def forward(self, x, edge_index, edge_attr):
        x = {kind: self.lin[kind](h).tanh() for kind, h in x.items()}
        if self.make is not rgcn:
            return self.out(self.conv(x, edge_index)["grid"])
        starts = dict(zip(x, torch.tensor([0, *(h.size(0) for h in x.values())]).cumsum(0).tolist()))
        ends = [torch.stack([e[0] + starts[kind[0]], e[1] + starts[kind[2]]]) for kind, e in edge_index.items()]
        types = [torch.full_like(e[0], number) for number, e in enumerate(edge_index.values())]
        h = self.conv(torch.cat(list(x.values())), torch.cat(ends, 1), torch.cat(types))
        return self.out(h[: x["grid"].size(0)])


def rgcn():
    return RGCNConv(8, 8, len(NUM_EDGES))


def hgt():
    return HGTConv(8, 8, earth().metadata(), heads=2)


def transformed():
    kinds = [kind for kind in NUM_EDGES if kind[2] != "none"], [kind for kind in NODES if kind != "none"]
    return to_hetero(Sage(), (kinds[1], kinds[0]))


NETWORKS = {
    "GraphCast": Weather,
    "HeteroConv": Convolutions,
    "to_hetero": lambda: Joined(transformed),
    "RGCN": lambda: Joined(rgcn),
    "HGT": lambda: Joined(hgt),
}


class Counting(TorchDispatchMode):
    """The lengths of tables of floats that this rank computes, below placed tensors."""

    def __init__(self):
        super().__init__()
        self.lengths = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if Placed in types:
            with self:
                return Placed.__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            table = isinstance(one, torch.Tensor) and one.is_floating_point() and one.dim() > 1
            if table and one.stride(0) and one.device.type != "meta":  # else one row, repeated, or none
                self.lengths.add(len(one))
        return out


def learn(model, data):
    out = model(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
    loss = (out - data["grid"].y)[data["grid"].mask].square().mean()
    loss.backward()
    return loss.item()


def gradients(model, whole=lambda x: x):
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def on_rank(world, models, partitioners):
    """The loss, gradients, rows of each kind and the lengths of tables of a rank, for each network and partitioner."""
    found = []
    for partitioner in partitioners:
        if partitioner == "given":
            partitioner = owners(world.size, NODES)
        part = split_graph(earth(), world=world, partitioner=partitioner)
        held = {kind: axis.length + axis.num_ghosts for kind, axis in part.axes.items()}
        for of_ranks in models:
            model, counting = parallelize(of_ranks[world.rank], world), Counting()
            model.zero_grad()
            placed = part.place(earth())
            with counting:
                loss = learn(model, placed)
            found.append((loss, gradients(model, part.whole), held, counting.lengths))
    return found


def copies(name, size):
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    return [copy.deepcopy(model) for _ in range(size)]


def check_alike(found, model, loss):
    """A rank has the loss and the gradients of the whole graph."""
    expected = gradients(model)
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad.numel())
    assert abs(found[0] - loss) <= 1e-12 * abs(loss)
    assert largest > 0
    assert found[1].keys() >= expected.keys()
    for name, grad in found[1].items():
        other = expected.get(name, torch.zeros_like(grad))
        assert not grad.numel() or float((grad - other).abs().max()) <= 1e-12 * largest, name


def test_the_split_of_these_tests_proves_something():
    data = earth()
    _, edges, homes = numbered_as_one(data.edge_index_dict, NODES)
    for size in (2, 3):
        check_no_rank_holds_all(edges, torch.cat(list(owners(size, NODES).values()))[homes], size, "incoming")


@pytest.mark.parametrize("size", [1, slow(2), 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_on_several_kinds_are_exact(name, size):
    (model,) = copies(name, 1)
    loss = learn(model, earth())
    ways = ["given", "metis", "contiguous"]
    for of_rank in run_ranks(on_rank, size, [copies(name, size)], ways):
        for found in of_rank:
            check_alike(found, model, loss)


def test_networks_on_several_kinds_are_exact_on_processes():
    models = [copies(name, 1)[0] for name in NETWORKS]
    losses = [learn(model, earth()) for model in models]
    for of_rank in run_ranks(on_rank, 3, [copies(name, 3) for name in NETWORKS], ["given"], transport="gloo"):
        for found, model, loss in zip(of_rank, models, losses, strict=True):
            check_alike(found, model, loss)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "HGT"])
def test_a_rank_computes_its_own_rows_of_each_kind_and_ghosts(name):
    totals = {kind: total for kind, total in (NODES | NUM_EDGES).items() if total > 1 and kind[-1] != "sun"}
    for ((_, _, held, lengths),) in run_ranks(on_rank, 2, [copies(name, 2)], ["given"]):
        joined = sum(held[kind] for kind in NUM_EDGES) if name == "RGCN" else 0
        assert all(held[kind] < total for kind, total in totals.items())
        assert not set(totals.values()) & {*held.values(), joined}, "lengths that say nothing"
        assert lengths.isdisjoint(totals.values())
        assert max(held[kind] for kind in (ENCODE, PROCESS, DECODE)) in lengths | {joined}
        assert max(lengths) <= max(joined, *held.values())


def test_verify_compares_networks_on_several_kinds_whole_and_split():
    data, model = earth(), copies("GraphCast", 1)[0]

    def inputs(part):
        placed = part.place(data)
        return placed.x_dict, placed.edge_index_dict, placed.edge_attr_dict

    found = verify(model, (data.edge_index_dict, NODES), inputs=inputs)
    assert found.exact
    assert found.exchanges > 0
    model.out.register_forward_hook(lambda _, __, out: out * len(out.local) if isinstance(out, Placed) else out * 61)
    assert not verify(model, (data.edge_index_dict, NODES), inputs=inputs).exact


# Edges that join edges.


def molecule():
    """Positions and kinds of N atoms, bonds, and each pair of a bond that ends where the other one begins."""
    draw = torch.Generator().manual_seed(0)
    pos = torch.stack([torch.arange(1.0 * ATOMS), torch.zeros(ATOMS), torch.zeros(ATOMS)], 1).double()
    pos = pos + torch.randn(ATOMS, 3, generator=draw, dtype=torch.float64) / 2
    bonds = (torch.cdist(pos, pos) + 9 * torch.eye(ATOMS) < 2.0).nonzero().t()
    src, dst = bonds.tolist()
    pairs = [(one, two) for two in range(len(src)) for one in range(len(src)) if dst[one] == src[two]]
    pairs = [(one, two) for one, two in pairs if src[one] != dst[two]]
    return pos, torch.randint(1, 4, (ATOMS,), generator=draw), bonds, torch.tensor(pairs).t()


class Basis(nn.Module):
    """As `SphericalBasisLayer` for three orders and three roots; that one asks scipy for the roots."""

    ROOTS = ((3.14159, 6.28319, 9.42478), (4.49341, 7.72525, 10.9041), (5.76346, 9.09501, 12.3229))

    def __init__(self, num_spherical, num_radial, cutoff, envelope_exponent):
        super().__init__()
        self.cutoff, self.envelope = cutoff, dimenet.Envelope(envelope_exponent)
        self.register_buffer("roots", torch.tensor(self.ROOTS))

    def forward(self, dist, angle, idx_kj):
        dist = dist / self.cutoff
        x, cos = self.roots * dist.view(-1, 1, 1), angle.cos().view(-1, 1)
        first, second, third = x.unbind(1)
        bessel = [
            first.sin() / first,
            second.sin() / second**2 - second.cos() / second,
            (3 / third**2 - 1) * third.sin() / third - 3 * third.cos() / third**2,
        ]
        radial = self.envelope(dist).view(-1, 1, 1) * torch.stack(bessel, 1)
        legendre = torch.cat([torch.ones_like(cos), cos, (3 * cos**2 - 1) / 2], 1)
        return (radial[idx_kj] * legendre.unsqueeze(2)).flatten(1)


HERE = threading.local()  # what this rank's `triplets` gives


def dime_nets():
    """DimeNet and DimeNet++ of torch_geometric, but for the basis, which needs scipy."""
    torch.manual_seed(0)
    dimenet.SphericalBasisLayer = Basis
    same = {"num_spherical": 3, "num_radial": 3, "cutoff": 3.0, "num_blocks": 2}
    same |= {"hidden_channels": 8, "out_channels": 1}
    plain = dimenet.DimeNet(num_bilinear=4, **same)
    plus = dimenet.DimeNetPlusPlus(int_emb_size=4, basis_emb_size=4, out_emb_channels=8, **same)
    models = [plain.double(), plus.double()]
    for model in models:
        for parameter in model.parameters():  # some begin as zeros
            nn.init.uniform_(parameter, -0.5, 0.5)
    return models


def give_triplets():
    """The two functions that DimeNet calls give the edges and the pairs of edges that were put `HERE`."""

    def pairs(edge_index, num_nodes):
        (j, i), (kj, ji) = HERE.bonds, HERE.pairs
        return i, j, i[ji], j[ji], j[kj], kj, ji

    dimenet.radius_graph, dimenet.triplets = lambda *_, **__: HERE.bonds, pairs


def energy_and_forces(model, z, pos):
    pos = pos.detach().requires_grad_()
    energy = model(z, pos).sum()
    (forces,) = torch.autograd.grad(energy, pos, create_graph=True)
    (energy + forces.square().sum()).backward()
    return energy.item(), forces.detach()


def dimes_on_rank(world, models):
    """Energy and forces, gradients, rows of each kind and the lengths of tables of each model."""
    give_triplets()
    pos, z, bonds, pairs = molecule()
    parts = owners(world.size, {"atom": ATOMS})
    part = split_graph({BOND: bonds, ANGLE: pairs}, {"atom": ATOMS}, world, partitioner=parts)
    held = {kind: axis.length + axis.num_ghosts for kind, axis in part.axes.items()}
    HERE.bonds, HERE.pairs = part.edge_index[BOND], part.edge_index[ANGLE]
    found, z, pos = [], part.nodes(z), part.nodes(pos)
    for model in models[world.rank]:
        model, counting = parallelize(model, world), Counting()
        with counting:
            energy, forces = energy_and_forces(model, z, pos)
        found.append((energy, gradients(model, part.whole) | {"forces": part.whole(forces)}, held, counting.lengths))
    return found


@pytest.mark.parametrize(("size", "transport"), [(1, "threads"), (2, "threads"), (3, "threads"), slow(3, "gloo")])
def test_dimenet_of_torch_geometric_is_exact_on_given_triplets(size, transport):
    give_triplets()
    pos, z, HERE.bonds, HERE.pairs = molecule()
    totals = {"atom": ATOMS, BOND: HERE.bonds.size(1), ANGLE: HERE.pairs.size(1)}
    expected = []
    for model in dime_nets():
        energy, forces = energy_and_forces(model, z, pos)
        expected.append((energy, gradients(model) | {"forces": forces}))
    for of_rank in run_ranks(dimes_on_rank, size, [dime_nets() for _ in range(size)], transport=transport):
        for (energy, found, held, lengths), (of_whole, grads) in zip(of_rank, expected, strict=True):
            assert abs(energy - of_whole) <= 1e-12 * abs(of_whole)
            assert found.keys() == grads.keys()
            for name, grad in grads.items():
                assert float((found[name] - grad).abs().max()) <= 1e-12 * float(grad.abs().max()), name
            if size > 1:
                assert all(held[kind] < total for kind, total in totals.items())
                assert not set(held.values()) & set(totals.values()), "lengths that say nothing"
                # Not of atoms: the gradient of a sum over them is one row for all, which every rank multiplies.
                assert lengths.isdisjoint({totals[BOND], totals[ANGLE]})
                assert not held[ANGLE] or held[ANGLE] in lengths


# Rows of each kind.

RELATIONS = {("a", "to", "b"): torch.tensor([[0, 4, 2, 2], [2, 0, 1, 1]]), ("b", "to", "a"): torch.tensor([[2], [3]])}
PAIRS = {BOND: torch.tensor([[0, 1, 2, 3, 1], [1, 2, 3, 0, 3]]), ANGLE: torch.tensor([[0, 1, 2, 0], [1, 2, 3, 4]])}
PAIRS[TURN] = torch.tensor([[0, 1], [1, 2]])


def rows_of_kinds(world, edges, nodes, partitioner, position):
    part = split_graph(edges, nodes, world, partitioner=partitioner, position=position)
    found = {}
    for kind, count in nodes.items():
        x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
        found[kind] = part.axes[kind].ids.tolist(), torch.equal(part.whole(part.nodes(x, kind)), x)
    for kind, ends in edges.items():
        e = torch.arange(3.0 * ends.size(1)).view(3, -1)
        back = torch.equal(part.whole(part.edges(e, kind, dim=1)), e)
        found[kind] = part.axes[kind].ids.tolist(), back and torch.equal(part.whole(part.edge_index[kind]), ends)
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("partitioner", ["metis", "contiguous", "random", "phi", "given"])
@pytest.mark.parametrize(("edges", "nodes"), [(RELATIONS, {"a": 5, "b": 3}), (PAIRS, {"atom": 4})])
def test_each_row_of_each_kind_is_owned_once_where_it_ends_and_comes_back(edges, nodes, partitioner, size):
    position = None
    if partitioner == "given":
        partitioner = {kind: torch.arange(count) % size for kind, count in nodes.items()}
    if partitioner == "phi":
        position = {kind: torch.eye(max(count, 3))[:count, :3] for kind, count in nodes.items()}
    ranks = run_ranks(rows_of_kinds, size, edges, nodes, partitioner, position)
    for kind, total in (nodes | {kind: ends.size(1) for kind, ends in edges.items()}).items():
        assert sorted(row for found in ranks for row in found[kind][0]) == list(range(total))
        assert all(found[kind][1] for found in ranks)
    for kind, ends in edges.items():
        for found in ranks:
            assert set(ends[1, found[kind][0]].tolist()) <= set(found[kind[2]][0])
    if partitioner == "contiguous" and size == 2:
        assert all(found[kind][0] for found in ranks for kind in nodes)


def test_rows_that_several_relations_read_are_fetched_once_and_nobody_is_asked_for_them():
    def work(world):
        data = earth()
        part = split_graph(data, world=world, partitioner=owners(world.size, NODES))
        mesh = part.nodes(data["mesh"].x, "mesh")
        before = world.transport.num_calls, part.ranks.num_exchanges
        first = mesh[part.edge_index[PROCESS][0]]
        after = world.transport.num_calls
        second = mesh[part.edge_index[DECODE][0]]
        alone = world.transport.num_calls == after > before[0]
        whole = [part.whole(x) for x in (first, second)]
        return alone, part.ranks.num_exchanges - before[1], whole

    data = earth()
    for alone, exchanges, rows in run_ranks(work, 3):
        assert alone
        assert exchanges == 1
        for kind, read in zip((PROCESS, DECODE), rows, strict=True):
            assert torch.equal(read, data["mesh"].x[data[kind].edge_index[0]])


def test_a_data_object_is_placed_field_by_field():
    data = Data(edge_index=RELATIONS["a", "to", "b"], x=torch.randn(5, 2), e=torch.randn(4, 3), name="it", num_nodes=5)
    data.of_graph = torch.randn(1, 7)

    def work(world):
        part = split_graph(data, world=world, partitioner=torch.arange(5) % world.size)
        placed = part.place(data)
        sums = torch.zeros_like(placed.x[:, :1]).index_add(0, placed.edge_index[1], placed.e[:, :1])
        same = placed.of_graph is data.of_graph and placed.name == "it" and not isinstance(data.x, Placed)
        return part.whole(sums), [placed.x.place.axis, placed.e.place.axis] == [part.node_axis, part.edge_axis], same

    expected = torch.zeros(5, 1).index_add(0, data.edge_index[1], data.e[:, :1])
    for sums, by_axis, same in run_ranks(work, 3):
        torch.testing.assert_close(sums, expected)
        assert by_axis
        assert same


WRONG = {
    "node": ({"edge_index": {("a", "to", "b"): torch.tensor([[0], [3]])}}, "names b 3, of which there are 3"),
    "negative": ({"edge_index": {("a", "to", "b"): torch.tensor([[-1], [0]])}}, "edge 0 of a-to-b names a -1"),
    "edge": ({"edge_index": PAIRS | {ANGLE: torch.tensor([[5], [0]])}, "num_nodes": {"atom": 4}}, "bond-atom 5, of"),
    "shape": ({"edge_index": {("a", "to", "b"): torch.ones(3, 2)}}, r"a-to-b has shape \(3, 2\) and dtype float32"),
    "unknown": ({"edge_index": {("a", "to", "c"): torch.zeros(2, 1, dtype=torch.int64)}}, "joins c, of which num_no"),
    "no kind": ({"edge_index": {"to": torch.zeros(2, 1, dtype=torch.int64)}}, "'to' is no kind of edges"),
    "number": ({"num_nodes": 8}, "so num_nodes is a dictionary, too, not 8"),
    "count": ({"num_nodes": {"a": 5, "b": -1}}, "num_nodes of 'b' is -1"),
    "both": ({"num_nodes": {"a": 5, "b": 3, ("a", "to", "b"): 4}}, "a-to-b is a kind of edges"),
    "parts": ({"partitioner": torch.zeros(8, dtype=torch.int64)}, "the partitioner of a graph of several kinds is a"),
    "lacking": ({"partitioner": {"a": torch.zeros(5, dtype=torch.int64)}}, "is a dictionary with"),
    "short": ({"partitioner": {"a": torch.zeros(4), "b": torch.zeros(3)}}, "of 'a' has 4 rows where there are 5"),
    "range": ({"partitioner": {"a": torch.full((5,), 9), "b": torch.full((3,), 0)}}, "blocks run from 0 to"),
    "twice": ({"edge_index": earth()}, "give none beside it"),
    "empty": ({"edge_index": HeteroData(), "num_nodes": None}, "no edge_index of any kind"),
    "none": ({"edge_index": Data(x=torch.ones(3, 1)), "num_nodes": None}, "no edge_index of edges"),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", WRONG)
def test_sets_that_do_not_fit_are_refused_on_all_ranks(name, size):
    change, text = WRONG[name]

    def work(world):
        with pytest.raises(Refused, match=text):
            split_graph(**{"edge_index": RELATIONS, "num_nodes": {"a": 5, "b": 3}} | change, world=world)

    run_ranks(work, size)


def test_ranks_with_different_sets_are_refused():
    def work(world):
        nodes = {"a": 5, "b": 3} if world.rank else {"a": 6, "b": 2}
        with pytest.raises(Refused, match="number of nodes"):
            split_graph({("a", "to", "a"): torch.tensor([[0], [1]])}, nodes, world)

    run_ranks(work, 3)


def test_what_names_no_kind_is_refused_where_there_are_several():
    part = split_graph(RELATIONS, {"a": 5, "b": 3}, World.alone())
    of_one = split_graph(RELATIONS["a", "to", "b"], 5, World.alone())
    for call in (lambda: part.nodes(torch.ones(5)), lambda: part.nodes(torch.ones(5), "c"), lambda: part.node_axis):
        with pytest.raises(ValueError, match="needs a kind, one of 'a', 'b'"):
            call()
    with pytest.raises(ValueError, match=r"one of \('a', 'to', 'b'\), \('b', 'to', 'a'\)"):
        part.edges(torch.ones(4))
    with pytest.raises(ValueError, match="5 a of the whole graph"):
        part.nodes(torch.ones(3), "a")
    with pytest.raises(ValueError, match="for a graph of one kind"):
        part.nodes_from_local(torch.ones(5))
    with pytest.raises(ValueError, match=r"an edge_index \[2, 1\] where the part has"):
        of_one.place(Data(edge_index=torch.tensor([[0], [1]]), num_nodes=5))
    with pytest.raises(TypeError, match="needs the ranks"):
        split_graph(RELATIONS, {"a": 5, "b": 3})
