"""What models of others do, each written anew as a small module with the same calls: exact, whole against split.

A name is the repository and the model in which the pattern was met.
"""

import itertools

import einops
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import DeepGCNLayer, GCNConv, GENConv, MessagePassing, SAGEConv
from torch_geometric.nn.models.schnet import InteractionBlock
from torch_geometric.utils import mask_select, scatter, softmax
from whole_and_split import cases, check, covering, sample

# Every node has an edge that ends there, so that a size taken from edge_index is theirs.
COVERED = sample(12, 40, edges=covering(12, 40))


def mlp(*sizes: int) -> nn.Sequential:
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.LayerNorm(b), nn.Tanh())]
    return nn.Sequential(*layers)


# --- scripted functions: gnn_tracking, schnetpack -------------------------------------------------------------------


@torch.jit.script
def convex_combination(delta: Tensor, residue: Tensor, alpha: float) -> Tensor:
    return alpha * residue + (1 - alpha) * F.relu(delta)


@torch.jit.script
def scripted_scatter(x: Tensor, index: Tensor, size: int) -> Tensor:
    return torch.zeros([size, x.size(1)], dtype=x.dtype).index_add(0, index, x)


class InteractionNetwork(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.relational, self.object = mlp(12, 8, 4), mlp(8, 8, 4)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e), self.kept

    def message(self, x_i, x_j, e):
        self.kept = self.relational(torch.cat([x_i, x_j, e], 1))
        return self.kept

    def update(self, aggregated, x):
        return self.object(torch.cat([x, aggregated], 1))


class Resin(nn.Module):
    """Interaction networks with residues, by a scripted convex combination."""

    def __init__(self, layers=2, skip=1):
        super().__init__()
        self.layers, self.skip = nn.ModuleList(InteractionNetwork() for _ in range(layers)), skip

    def forward(self, x, edge_index, e):
        kept = [x]
        for layer in self.layers:
            delta, e = layer(kept[-1], edge_index, e)
            kept.append(convex_combination(delta, kept[-min(self.skip, len(kept))], 0.5))
        return kept[-1], e


class Classifier(nn.Module):
    """Edges scored, the graph cut by a threshold with `mask_select`, orphans masked, a second network on the rest."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.score = Resin(), Resin(), nn.Linear(12, 1)

    def forward(self, x, edge_index, e):
        h, f = self.first(x, edge_index, e)
        ends = torch.cat([h[edge_index[0]], h[edge_index[1]], f], 1)
        weight = torch.sigmoid(self.score(ends)).squeeze(-1)
        kept = weight > 0.5
        inside = mask_select(edge_index, 1, kept)
        connected = torch.zeros(x.size(0), dtype=torch.bool).index_fill(0, inside[1], True)
        h, _ = self.second(h, inside, f[kept])
        return weight, h * connected.view(-1, 1)


class Layerwise(nn.Module):
    """Another encoder for hits of some detector layers."""

    def __init__(self):
        super().__init__()
        self.pixel, self.strip = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, x, batch):
        pixel = torch.isin(batch, torch.tensor([0, 2]))
        return torch.where(pixel.view(-1, 1), self.pixel(x), F.pad(self.strip(x[:, :2])[:, :3], (0, 1)))


def schnetpack(x, src, dst, w, net):
    idx_i, idx_j = dst, src
    filters = net[0](torch.exp(-w.view(-1, 1) * torch.arange(1.0, 5.0, dtype=w.dtype)))
    return scripted_scatter(convex_combination(net[1](x)[idx_j], filters, 0.3), idx_i, x.size(0))


# --- checkpointing: acorn, Exa.TrkX, physicsnemo, graph_weather, DeepGCN --------------------------------------------


class Acorn(nn.Module):
    """An interaction network that asks for gradients of its input and always checkpoints its steps."""

    def __init__(self, aggregations=("add",), undirected=False):
        super().__init__()
        self.aggregations, self.undirected = aggregations, undirected
        width = 4 + 8 * len(aggregations)
        self.node_encoder, self.edge_encoder = mlp(4, 4), mlp(8, 4)
        self.node_network, self.edge_network, self.output = mlp(width, 4), mlp(12, 4), nn.Linear(12, 1)

    def step(self, x, e, start, end):
        sums = [scatter(e, index, 0, x.shape[0], how) for how in self.aggregations for index in (end, start)]
        x = self.node_network(torch.cat([x, *sums], dim=-1)) + x
        return x, self.edge_network(torch.cat([x[start], x[end], e], dim=-1)) + e

    def forward(self, x, edge_index):
        x.requires_grad = True
        if self.undirected:
            edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=-1)
        start, end = edge_index
        x = checkpoint(self.node_encoder, x, use_reentrant=False)
        e = checkpoint(self.edge_encoder, torch.cat([x[start], x[end]], dim=1), use_reentrant=False)
        for _ in range(2):
            x, e = checkpoint(self.step, x, e, start, end, use_reentrant=False)
        scores = checkpoint(self.output, torch.cat([x[start], x[end], e], dim=1), use_reentrant=True).squeeze(-1)
        return scores.view(2, -1).mean(0) if self.undirected else scores


class Attention(nn.Module):
    """Both-end sums by edge weights, an MLP checkpointed the old way."""

    def __init__(self):
        super().__init__()
        self.edge, self.node = mlp(8, 1), mlp(12, 4)

    def forward(self, x, edge_index):
        start, end = edge_index
        weight = checkpoint(self.edge, torch.cat([x[start], x[end]], 1), use_reentrant=True).sigmoid()
        into = scatter(weight * x[start], end, 0, x.size(0))
        outof = scatter(weight * x[end], start, 0, x.size(0))
        return checkpoint(self.node, torch.cat([into, outof, x], 1), use_reentrant=True)


class MeshBlock(nn.Module):
    """An edge block and a node block, each checkpointed; the first layer said by its parts, compiled."""

    def __init__(self, compiled=False):
        super().__init__()
        self.src, self.dst, self.edge = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.node, self.compiled = mlp(8, 4), compiled

    def edges(self, x, e, src, dst):
        parts = (self.src(x), self.dst(x), self.edge(e), src, dst)
        return e + (compiled_sum(*parts) if self.compiled else plain_sum(*parts)).tanh()

    def nodes(self, x, e, dst):
        return x + self.node(torch.cat([x, torch.zeros_like(x).index_add(0, dst, e)], 1))

    def forward(self, x, src, dst, e):
        for _ in range(2):
            e = checkpoint(self.edges, x, e, src, dst, use_reentrant=False)
            x = checkpoint(self.nodes, x, e, dst, use_reentrant=False)
        return x, e


def plain_sum(of_src, of_dst, of_edge, src, dst):
    return of_edge + of_src[src] + of_dst[dst]


compiled_sum = torch.compile(plain_sum, backend="eager")


def deep_gcn():
    conv = GENConv(4, 4, aggr="softmax", learn_t=True, norm="layer")
    return DeepGCNLayer(conv, nn.LayerNorm(4), nn.ReLU(), block="res+", ckpt_grad=True)


# --- sizes, shapes and places: EggNet, HEPT, DIFFormer, lucidrains, HydraGNN, ogb, neural-lam -----------------------


def eggnet(x, dst, src, w, net):
    pulled = softmax(net(x[src]).squeeze(-1) * w, dst)
    return scatter(pulled.view(-1, 1) * x[src], dst, dim=0, dim_size=len(x)) / len(x)


class GatedGlobal(nn.Module):
    """A global state given to every node, every edge and back."""

    def __init__(self):
        super().__init__()
        self.net, self.u = mlp(8, 4), nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x, edge_index):
        h = self.net(torch.cat([x, self.u.unsqueeze(0).repeat(x.size(0), 1)], dim=1))
        edge = self.net(torch.cat([h[edge_index[0]], self.u[None].repeat_interleave(edge_index.size(1), 0)], dim=1))
        return scatter(edge, edge_index[1], 0, x.shape[0])


def linear_attention(x, net):
    """Sums over all nodes, then each node by itself: attention without pairs."""
    queries, keys, values = (layer(x).view(x.size(0), 2, 2) for layer in net)
    kvs = torch.einsum("nhm,nhd->hmd", keys, values)
    ones = torch.ones([keys.shape[0]], dtype=x.dtype)
    numerator = torch.einsum("nhm,hmd->nhd", queries, kvs) + values.sum(0).unsqueeze(0).repeat(x.shape[0], 1, 1)
    denominator = torch.einsum("nhm,hm->nh", queries, torch.einsum("nhm,n->hm", keys, ones)) + x.shape[0]
    return (numerator / (denominator.unsqueeze(-1).abs() + x.shape[0])).mean(1)


def equivariant(x, edge_index, e, net):
    coordinates, features = x[:, :3], einops.rearrange(x, "n (h d) -> n h d", h=2)
    apart = coordinates[edge_index[0]] - coordinates[edge_index[1]]
    distance = einops.reduce(apart**2, "e d -> e 1", "sum")
    message = net(torch.cat([einops.rearrange(features, "n h d -> n (h d)")[edge_index[0]], distance, e], -1))
    return scatter(message, edge_index[1], 0, dim_size=x.size(0))


def normed(x, edge_index):
    apart = x[edge_index.t()[:, 0]] - x[edge_index.t()[:, 1]]
    return apart / (torch.linalg.norm(apart, dim=1, keepdim=True) + 1)


def painn(x, edge_index, w):
    ends = edge_index.t()
    filters = torch.sin(w.view(-1, 1) * torch.arange(1.0, 5.0, dtype=w.dtype)) / w.view(-1, 1)
    return torch.zeros_like(x).index_add_(0, ends[:, 1], filters * x[ends[:, 0]])


def virtual_node(x, edge_index, batch, net):
    state = net.token(torch.zeros(batch[-1].item() + 1).long())
    for _ in range(2):
        x = net.conv(x + state[batch], edge_index)
        state = state + scatter(x, batch, 0, state.size(0))
    return x


class Token(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.conv = nn.Embedding(1, 4), SAGEConv(4, 4)


class FixedReceivers(nn.Module):
    """Some nodes, by a list that the model keeps, are what the others send to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("receivers", torch.tensor([0, 3, 5]))
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        return self.net(x).sum(0) + self.net(x[self.receivers])


def maxima(x, src, dst, net):
    """As torch_scatter's scatter_max and scatter_softmax are made."""
    edge = net(x[src])
    index = dst.view(-1, 1).expand_as(edge)
    top = edge.new_zeros(x.size(0), 4).scatter_reduce(0, index, edge, "amax", include_self=False)
    apart = (edge - top.gather(0, index)).exp()
    total = torch.zeros_like(x).scatter_add(0, index, apart)
    return x.new_zeros(x.size(0), 4).scatter_add(0, index, edge * apart / total.gather(0, index)), top


# --- a Data as the result: GraphGPS and all of GraphGym -------------------------------------------------------------


class GymLayer(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv, self.norm, self.feed = conv, nn.BatchNorm1d(4), mlp(4, 8, 4)

    def forward(self, data):
        data.x = self.norm(data.x + self.conv(data.x, data.edge_index))
        data.x = data.x + self.feed(data.x)
        return data


def through_data(x, edge_index, net):
    data = net(Data(x=x, edge_index=edge_index))
    return data.x, data.edge_index


# --- convolutions along time: STConv --------------------------------------------------------------------------------


def temporal(vectors, edge_index, net):
    """[N, C, T] seen as [1, C, T, N], convolved along time only."""
    series = net[0](vectors.permute(1, 2, 0).unsqueeze(0)).squeeze(0)
    return net[1](series.mean(1).t(), edge_index)


PATTERNS = {
    "gnn_tracking InteractionNetwork": (
        lambda x, edge_index, e, net: net(x, edge_index, e),
        {"net": InteractionNetwork},
    ),
    "gnn_tracking ResIN skip1": (lambda x, edge_index, e, net: net(x, edge_index, e), {"net": Resin}),
    "gnn_tracking ResIN skip2": (lambda x, edge_index, e, net: net(x, edge_index, e), {"net": lambda: Resin(3, 2)}),
    "gnn_tracking ResIN skip_top": (lambda x, edge_index, e, net: net(x, edge_index, e), {"net": lambda: Resin(3, 9)}),
    "gnn_tracking ECForGraphTCN, GraphTCN": (lambda x, edge_index, e, net: net(x, edge_index, e), {"net": Classifier}),
    "gnn_tracking HeterogeneousResFCNN": (lambda x, batch, net: net(x, batch), {"net": Layerwise}),
    "schnetpack SchNet, PaiNN": (schnetpack, {"net": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))}),
    "acorn InteractionGNN, InteractionGNN2": (
        lambda x, edge_index, net: net(x.detach(), edge_index),
        {"net": Acorn},
    ),
    "acorn InteractionGNN max,std": (
        lambda x, edge_index, net: net(x.detach(), edge_index),
        {"net": lambda: Acorn(("add", "max", "mean"))},
    ),
    "acorn InteractionGNN undirected": (
        lambda x, edge_index, net: net(x.detach(), edge_index),
        {"net": lambda: Acorn(undirected=True)},
    ),
    "Exa.TrkX CheckpointedResAGNN, InteractionGNN": (
        lambda x, edge_index, net: net(x, edge_index),
        {"net": Attention},
    ),
    "physicsnemo MGN checkpointed, graph_weather": (
        lambda x, src, dst, e, net: net(x, src, dst, e),
        {"net": MeshBlock},
    ),
    "physicsnemo MGN concat trick": (
        lambda x, src, dst, e, net: net(x, src, dst, e),
        {"net": lambda: MeshBlock(compiled=True)},
    ),
    "PyG DeepGCNLayer, GENConv": (lambda x, edge_index, net: net(x, edge_index), {"net": deep_gcn}),
    "EggNet": (eggnet, {"net": lambda: nn.Linear(4, 1), "sample": COVERED}),
    "HEPT gatedgnn": (lambda x, edge_index, net: net(x, edge_index), {"net": GatedGlobal}),
    "DIFFormer attention": (linear_attention, {"net": lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(3))}),
    "lucidrains EGNN_Sparse": (equivariant, {"net": lambda: nn.Linear(9, 4)}),
    "HydraGNN E_GCL": normed,
    "HydraGNN Painn": painn,
    "ogb gin virtual node": (virtual_node, {"net": Token}),
    "neural-lam InteractionNet": (lambda x, net: net(x), {"net": FixedReceivers}),
    "deep_gcns GENConv softmax, MRConv": (maxima, {"net": lambda: nn.Linear(4, 4)}),
    "GraphGPS GatedGCN, GINE, PNA, GENConv": (through_data, {"net": lambda: GymLayer(SAGEConv(4, 4))}),
    "GraphGPS with a convolution of degrees": (through_data, {"net": lambda: GymLayer(GCNConv(4, 4))}),
    "PyG-temporal STConv": (
        temporal,
        {"net": lambda: nn.ModuleList([nn.Conv2d(3, 3, (2, 1)), GCNConv(3, 4)])},
    ),
    "PyG SchNet with its own edges": (
        lambda x, edge_index, w, e, net: net(x, edge_index, w, e),
        {"net": lambda: InteractionBlock(4, 4, 4, 10.0)},
    ),
    "CGCNN, neighbours by a table of ends": lambda x, edge_index: x[edge_index].flatten(2).prod(0),
}


ALONE = {"against": "alone"}  # torch draws other numbers


def attention_in_time(series, net):
    """Attention among the steps of each node, which is the batch."""
    return net(series, series, series)[0]


def bins(v):
    return torch.bincount(torch.bucketize(v, torch.linspace(-1, 1, 5, dtype=v.dtype)), minlength=6) * v[0]


IDIOMS = {
    "two types of each node": lambda x, batch, table: x + table[torch.stack([batch, 2 - batch], 1)].sum(1),
    "attention in time": (attention_in_time, {"net": lambda: nn.MultiheadAttention(3, 1)}),
    "noise": (lambda x: x + 0.1 * torch.randn_like(x) + torch.empty_like(x).normal_(0, 0.1), ALONE),
    "edges dropped": (lambda e: e[torch.rand(e.size(0)) > 0.3].sum(0), ALONE),
    "nodes dropped": (lambda x: x * torch.bernoulli(torch.full_like(x[:, :1], 0.7)), ALONE),
    "sizes as values": lambda x: x / torch.tensor(x.size(0)) * x.new_tensor(2.0),
    "readouts": lambda x, mask: x.logsumexp(0) * (x.softmax(0) * x).sum(0) / x.norm(dim=0) * mask.any(),
    "bins": bins,
    "some of the first nodes": lambda x: x[:5] * 2,
    "an entry for each node": lambda x, batch: x.log_softmax(1)[torch.arange(x.size(0)), batch],
    "a table by the types of both ends": lambda table, batch, src, dst: table[batch[src], batch[dst]],
    "heads": lambda x: x.unflatten(1, (2, 2)).select(1, 0) + x.narrow(1, 0, 2),
}


@cases(PATTERNS)
def test_what_models_of_others_do_is_exact(function, more):
    check(function, **more)


@cases(IDIOMS)
def test_idioms_are_exact(function, more):
    check(function, **more)


def test_both_ends_may_be_arguments_by_themselves():
    def apart(x, src, dst):  # as schnetpack's and DGL's models have them
        idx_i, idx_j = dst, src
        return torch.zeros_like(x).index_add(0, idx_i, x[idx_j]), x[idx_i] - x[idx_j]

    check(apart)
