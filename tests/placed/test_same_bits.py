"""The same bits for any module: `parallelize(module, world, same_bits=True)`, one hash on any number of ranks."""

import functools
import hashlib
import math

import numpy as np
import pytest
import torch
from marks import slow
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, silu
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATv2Conv, GCNConv, GINConv, PNAConv, SAGEConv, TransformerConv, global_mean_pool
from whole_and_split import threads

from domainpar import NotExact, World, in_blocks, kept_ghosts, parallelize, rule, split_graph
from domainpar.common.agreement import Refused
from domainpar.testing import run_ranks

NODES, EDGES, WIDTH = 701, 3100, 16  # numbers of edges are more than torch leaves to one thread
FEW, MORE = (1, 3), (2, 5)  # of three ranks, with parts that are drawn, one owns nothing
SIZES = (*FEW, *MORE)


def graph():
    """Edges between near nodes, with self-loops, a node without edges and a hub; rows of very different sizes."""
    draw = torch.Generator().manual_seed(3)
    src = torch.randint(0, NODES - 1, (EDGES,), generator=draw)
    dst = (src + torch.randint(-9, 10, (EDGES,), generator=draw)) % (NODES - 1)
    dst[::10] = 5
    x = torch.randn(NODES, WIDTH, generator=draw) * torch.randn(NODES, 1, generator=draw).mul(2).exp()
    return torch.stack([src, dst]), x, torch.randn(NODES, 3, generator=draw)


EDGE_INDEX, X, Y = graph()
DEGREES = torch.bincount(torch.bincount(EDGE_INDEX[1], minlength=NODES))


def owners(size, how):
    """The part of each node: ranges, or drawn; drawn on several ranks, the last one owns nothing."""
    if how == "contiguous":
        return np.arange(NODES) * size // NODES
    return np.random.default_rng(size).integers(0, max(1, size - 1), NODES)


class Net(nn.Module):
    def __init__(self, convs, norm=nn.Identity):
        super().__init__()
        self.convs, self.norms = nn.ModuleList(convs), nn.ModuleList(norm(WIDTH) for _ in convs)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index):
        for conv, norm in zip(self.convs, self.norms):
            x = silu(norm(conv(x, edge_index)))
        return self.head(x)


class Forces(nn.Module):
    """As PaiNN: messages with vectors between near nodes, energies of nodes, and forces inside of forward."""

    def __init__(self, recompute=None):
        super().__init__()
        self.embed, self.recompute = nn.Linear(WIDTH, WIDTH), recompute
        self.message, self.filter = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(8, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.update, self.energy = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 1)

    def layer(self, s, v, apart, src, dst):
        length = (apart.square().sum(1, keepdim=True) + 0.1).sqrt()
        waves = (length * torch.arange(1.0, 9.0, dtype=s.dtype)).sin() / length
        passed = self.message(silu(s))[src] * self.filter(waves)
        of_s, of_v, along = passed.split(WIDTH, -1)
        vectors = v[src] * of_v.unsqueeze(1) + along.unsqueeze(1) * (apart / length).unsqueeze(2)
        s = s + torch.zeros_like(s).index_add(0, dst, of_s)
        v = v + torch.zeros_like(v).index_add(0, dst, vectors)
        one, other = self.mix(v).split(WIDTH, -1)
        scale, gate = self.update(torch.cat([s, (one.square().sum(1) + 1e-3).sqrt()], 1)).split(WIDTH, -1)
        return s + scale * (one * other).sum(1), v + other * gate.tanh().unsqueeze(1)

    def forward(self, x, edge_index):
        src, dst = edge_index
        with torch.enable_grad():
            pos = x[:, :3].detach().tanh().requires_grad_()
            s, v = self.embed(x.tanh()), x.new_zeros(x.size(0), 3, WIDTH)
            for _ in range(2):
                given = s, v, pos[src] - pos[dst], src, dst
                s, v = self.layer(*given) if self.recompute is None else self.recompute(self.layer, *given)
            energies = self.energy(silu(s))
            (slope,) = torch.autograd.grad(energies.sum(), pos, create_graph=True)
        return energies + -slope


class Hard(nn.Module):
    """What few networks have: sums at graphs and at both ends, dropout, noise, a softmax over rows, rows as batches."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.table = (
            nn.Linear(WIDTH, WIDTH),
            nn.GroupNorm(4, WIDTH),
            nn.Embedding(7, 6),
        )
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(WIDTH + 6, 3)

    def forward(self, x, edge_index):
        src, dst = edge_index
        h = self.norm(self.first(x)).tanh() + 0.1 * torch.randn_like(x)
        h = h + torch.zeros_like(h).index_add(0, src, self.dropout(h[dst] * h[src]).exp())
        graphs = torch.arange(x.size(0)) // 100
        h = h * (global_mean_pool(h, graphs)[graphs] + h.softmax(0)) + h.std(0) + h.norm() + h.logsumexp(0)
        square = h.view(-1, 4, 4)
        h = (square @ square.mT).softmax(-1).reshape(-1, WIDTH) * h.cumsum(1)
        h = torch.cat([h, self.table((graphs * 3) % 7)], 1)
        return self.last(h / (1 + h.abs().amax(0)))


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def plain_checkpoint(layer, *args):
    return checkpoint(layer, *args, use_reentrant=False, context_fn=kept_ghosts)


PNA = (["mean", "max", "std", "sum"], ["identity", "amplification", "attenuation"])
NETWORKS = {
    "GCN": lambda: Net([GCNConv(WIDTH, WIDTH), GCNConv(WIDTH, WIDTH)]),
    "SAGE": lambda: Net([SAGEConv(WIDTH, WIDTH), SAGEConv(WIDTH, WIDTH)], nn.BatchNorm1d),
    "GIN": lambda: Net([GINConv(mlp()), GINConv(mlp())], nn.LayerNorm),
    "GATv2": lambda: Net([GATv2Conv(WIDTH, 8, heads=2), GATv2Conv(WIDTH, 8, heads=2)]),
    "PNA": lambda: Net([PNAConv(WIDTH, WIDTH, *PNA, deg=DEGREES)]),
    "Transformer": lambda: Net([TransformerConv(WIDTH, 8, heads=2, dropout=0.1) for _ in range(2)], nn.LayerNorm),
    "PaiNN with forces": Forces,
    "forces, checkpointed": functools.partial(Forces, plain_checkpoint),
    "hard": Hard,
}


def train(world, name, how, dtype, same_bits, steps=3, spoil=None):
    """The hash of all losses, outputs, gradients and parameters of some steps; the last output."""
    part = split_graph(EDGE_INDEX, NODES, world, partitioner=owners(world.size, how).astype(np.int32))
    torch.manual_seed(0)
    net = parallelize(NETWORKS[name]().to(dtype), world, same_bits=same_bits)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    x, found = X.to(dtype).clone(), hashlib.sha256()
    if spoil is not None:
        x[11, 2] = spoil
    x, y = part.nodes(x), part.nodes(Y.to(dtype))
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        out = net(x, part.edge_index)
        loss = mse_loss(out, y) + cross_entropy(out, Y.argmax(1))
        loss.backward()
        optimizer.step()
        whole = part.whole(out.detach())
        tensors = [
            loss.detach().double().view(1).clone(),
            whole,
            *(p.grad for p in net.parameters()),
            *net.parameters(),
        ]
        for one in [*tensors, *net.buffers()]:
            found.update(torch.where(one.isnan(), math.nan, one.detach()).numpy().tobytes())
    return found.hexdigest(), whole, [p.grad for p in net.parameters()]


def hashes(name, dtype=torch.float32, same_bits=True, sizes=SIZES, **more):
    """Hashes of runs on several numbers of ranks, with both kinds of parts; all ranks have one."""
    found = {}
    for size in sizes:
        for how in ("contiguous", "drawn")[: 1 if size == 1 else 2]:
            of_ranks = {one[0] for one in run_ranks(train, size, name, how, dtype, same_bits, timeout=240, **more)}
            assert len(of_ranks) == 1
            found[size, how] = of_ranks.pop()
    return found


@pytest.mark.parametrize(
    ("dtype", "sizes", "counts"),
    [
        pytest.param(torch.float32, FEW, [4], id="single"),
        slow(torch.float32, (1, *MORE), [2], id="single, more ranks"),
        slow(torch.float64, SIZES, [2, 4], id="double"),
    ],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_training_has_one_hash_on_any_number_of_ranks_and_threads(name, dtype, sizes, counts):
    found = hashes(name, dtype, sizes=sizes)
    for count in counts:
        with threads(count):
            found[count, "threads"] = train(World.alone(), name, "contiguous", dtype, True)[0]
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("name", [slow(name) for name in NETWORKS if name != "hard"] + ["SAGE"])
def test_without_it_bits_depend_on_the_number_of_ranks(name):
    assert len(set(hashes(name, same_bits=False, sizes=(1, 2, 3)).values())) > 1


def trainings(world, names, steps):
    return [train(world, name, how, torch.float32, True, steps)[0] for name in names for how in ("contiguous", "drawn")]


@pytest.mark.parametrize("transport", ["gloo", slow("mpi")])
def test_between_processes_the_hash_is_that_of_threads(transport):
    names = ["SAGE", "PaiNN with forces"] if transport == "gloo" else list(NETWORKS)
    (alone,) = run_ranks(trainings, 1, names, 3, timeout=240)
    for found in run_ranks(trainings, 3, names, 3, transport=transport, timeout=400):
        assert found == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_twenty_steps_have_one_hash(name):
    assert (
        len({run_ranks(train, size, name, "drawn", torch.float32, True, 20, timeout=400)[0][0] for size in SIZES}) == 1
    )


@pytest.mark.parametrize("name", ["SAGE", "GATv2", "PNA", "PaiNN with forces"])
def test_results_are_as_near_to_those_of_double_precision_as_torch_s_own(name):
    (_, right, gradients), *_ = run_ranks(train, 1, name, "contiguous", torch.float64, False, 1, timeout=240)

    largest = max(float(one.abs().max()) for one in gradients)

    def off(dtype, same_bits):
        (_, whole, found), *_ = run_ranks(train, 2, name, "drawn", dtype, same_bits, 1, timeout=240)
        return max(gap(whole, right), *(gap(*pair, largest) for pair in zip(found, gradients)))

    def gap(ours, theirs, least=0.0):
        return float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), least)

    assert off(torch.float64, True) < 1e-11
    assert off(torch.float32, True) < 3 * off(torch.float32, False)


@pytest.mark.parametrize("spoil", [math.nan, math.inf, -math.inf, 3e38])
def test_numbers_that_are_not_finite_arrive_and_have_one_hash(spoil):
    for name in ("GIN", "PNA"):
        runs = [one for size in (1, 3) for one in run_ranks(train, size, name, "drawn", torch.float32, True, 1, spoil)]
        _, whole, gradients = runs[-1]
        assert len({hashed for hashed, _, _ in runs}) == 1
        assert not whole[11].isfinite().any(), whole[11]
        assert not any(one.isfinite().all() for one in gradients[-2:])
        assert whole[11 + 200].isfinite().all()  # no neighbour of a neighbour: its column alone does not spoil it


def sums_of(world, table):
    part = split_graph(EDGE_INDEX, NODES, world, partitioner=owners(world.size, "drawn").astype(np.int32))
    parallelize(nn.Linear(1, 1), world, same_bits=True)
    rows, (src, dst) = part.nodes(table), part.edge_index
    at_src = torch.zeros_like(rows).index_add(0, src, rows[dst])
    product = rows.t() @ torch.ones_like(rows)[:, :1]
    at_graphs = torch.zeros(3, rows.size(1)).index_add(0, torch.arange(NODES) % 3, rows)
    return [part.whole(one) for one in (rows.sum(0), rows.mean(0), product, at_src, at_graphs)]


def test_sums_are_not_finite_where_torch_s_are():
    table = torch.randn(NODES, 6)
    table[5, 0], table[7, 1], table[8, 2], table[9, 3] = math.nan, math.inf, -math.inf, math.inf
    table[600, 3], table[4, 5] = -math.inf, 1e9
    src, dst = EDGE_INDEX
    at_src = torch.zeros_like(table).index_add(0, src, table[dst])
    at_graphs = torch.zeros(3, 6).index_add(0, torch.arange(NODES) % 3, table)
    right = [table.sum(0), table.mean(0), table.t() @ torch.ones(NODES, 1), at_src, at_graphs]
    for size in (1, 4):
        for found in run_ranks(sums_of, size, table):
            for ours, theirs in zip(found, right):
                assert torch.equal(ours.isnan(), theirs.isnan())
                assert torch.equal(ours[ours.isinf()], theirs[theirs.isinf()])
                torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-5, atol=1e-5)


def after_a_run_without(world):
    part = split_graph(EDGE_INDEX, NODES, world, partitioner=owners(world.size, "drawn").astype(np.int32))
    torch.manual_seed(0)
    net = parallelize(NETWORKS["GCN"](), world)

    def step():
        net.zero_grad()
        mse_loss(net(part.nodes(X), part.edge_index), part.nodes(Y)).backward()
        return [p.grad.numpy().tobytes() for p in net.parameters()]

    before = step(), step()
    parallelize(net, world, same_bits=True)
    return before[0], step()


def test_calls_that_were_decided_before_are_thought_of_again():
    off, on = zip(*(run_ranks(after_a_run_without, size)[0] for size in (1, 3)))
    assert on[0] == on[1]
    assert off[0] != off[1]


def accumulating(world):
    part = split_graph(EDGE_INDEX, NODES, world, partitioner=owners(world.size, "drawn").astype(np.int32))
    torch.manual_seed(0)
    net = parallelize(NETWORKS["GIN"](), world, same_bits=True)
    for scale in (1.0, 1e-9):
        mse_loss(net(part.nodes(X), part.edge_index) * scale, part.nodes(Y)).backward()
    return [p.grad.numpy().tobytes() for p in net.parameters()]


def test_gradients_of_several_passes_add_up_to_the_same_bits():
    (alone,) = run_ranks(accumulating, 1)
    assert all(found == alone for found in run_ranks(accumulating, 3))


@functools.cache
def _own_operator():
    @torch.library.custom_op("tests_of_domainpar::doubled_of_bits", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x + x

    rule(doubled, "e -> e")
    return doubled


def own_operator(x):
    return _own_operator()(x.detach())


REFUSED = {
    "a product over rows": (lambda x, src, dst: x.prod(0), "torch.prod"),
    "products at rows": (
        lambda x, src, dst: x.new_ones(x.shape).scatter_reduce(0, src.view(-1, 1).expand(-1, WIDTH), x[dst], "prod"),
        "a product of rows",
    ),
    "a convolution": (
        lambda x, src, dst: nn.functional.conv1d(x.unsqueeze(1), torch.ones(1, 1, 3)),
        "torch.convolution",
    ),
    "attention": (
        lambda x, src, dst: nn.functional.scaled_dot_product_attention(*[x.view(-1, 1, 4, 4)] * 3),
        "attention",
    ),
    "complex sums": (lambda x, src, dst: torch.complex(x, x).sum(0), "complex"),
    "complex products": (lambda x, src, dst: torch.complex(x, x) @ torch.ones(WIDTH, 2).to(torch.complex64), "complex"),
    "an operator of one's own": (lambda x, src, dst: own_operator(x), "doubled_of_bits, an operator"),
    "blocks": (lambda x, src, dst: in_blocks(Messages(), 100)(x, dst), "in_blocks"),
}


class Messages(nn.Module):
    def forward(self, x, dst):
        return x[dst]


def refusal(world, name):
    part = split_graph(EDGE_INDEX, NODES, world, partitioner=owners(world.size, "drawn").astype(np.int32))
    parallelize(nn.Linear(1, 1), world, same_bits=True)
    call, _ = REFUSED[name]
    before = world.transport.num_calls
    try:
        call(part.nodes(X).requires_grad_(), *part.edge_index)
    except NotExact as refused:
        return str(refused), world.transport.num_calls - before
    return "nothing", 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_hold_is_refused_by_name_on_one_rank_too(name):
    for size in (1, 3):
        found = run_ranks(refusal, size, name)
        assert all(REFUSED[name][1] in text for text, _ in found), found
        assert len({calls for _, calls in found}) == 1


def differing(world):
    parallelize(nn.Linear(1, 1), world, same_bits=world.rank == 1)


def test_ranks_that_ask_for_different_things_stop():
    with pytest.raises(Refused, match="same_bits is True on rank 1"):
        run_ranks(differing, 3)
