"""What the survey of PyG's modules runs: a case for every way a layer may be built and called.

A case is a module and a call of it on the whole graph. It knows nothing of ranks: the survey gives the same case a
whole `Sample` and a part of one, and compares. Calls use fields of the sample only, take every row count from
`s.x.size(0)`, and return one tensor. torch_geometric takes seconds to import, so nothing that starts a command imports
this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import aggr as pyg_aggr
from torch_geometric.nn import norm as pyg_norm

from domainpar.nn.adapt.survey_layers import (
    EdgeClassifier,
    EdgeUpdates,
    Jumping,
    Messages,
    Neighbours,
    SharedLayer,
    VirtualNode,
    mlp,
)
from domainpar.nn.adapt.survey_samples import (
    EDGE_FEATURES,
    FEATURES,
    HIDDEN,
    NUM_GRAPHS,
    NUM_TYPES,
    Sample,
    mesh,
    sample,
    sorted_by_dst,
    undirected,
)

TOLERANCE = 1e-12
"""How far a result may be off and still be called exact, relative to the largest number of its kind; in float64."""

Module = Any  # what a case makes: torch.nn.Module says nothing of how it is called
Call = Callable[[Module, Sample], Tensor]
Order = Literal["nodes", "edges"]


@dataclass(frozen=True, eq=False)
class Case:
    """One way to build a module and to call it.

    Attributes:
        name: The class.
        make: Builds it in torch's default dtype, in the mode to survey it in, with the same weights each time: none of
            them zero, so that no term hides. Take it to the sample's dtype with `.double()`.
        call: Calls it with fields of a sample. Returns one tensor.
        variant: How it differs from other cases of this class.
        rows: What the rows of the result are.
        graph: Makes the graph this case is defined on.
        order: Whether the result depends on how nodes are numbered, or on the order of edges.
        needs_sorted: What must be sorted: `edges` by `dst`, or the sample's `batch`.
        random: Whether the result is drawn from torch's global generator.
        single: Whether some of the work is done in float32 whatever the dtype.
        note: What is odd about it.
    """

    name: str
    make: Callable[[], nn.Module]
    call: Call
    variant: str = ""
    rows: Literal["nodes", "edges", "graph"] = "nodes"
    graph: Callable[[], Sample] = sample
    order: frozenset[Order] = frozenset()
    needs_sorted: Literal["", "edges", "batch"] = ""
    random: bool = False
    single: bool = False
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.variant})" if self.variant else self.name


def _plain(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index)


def _weighted(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.edge_weight)


def _attributed(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.edge_attr)


def _typed(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.edge_type)


def _nodes_only(m: Module, s: Sample) -> Any:
    return m(s.x)


def _batched(m: Module, s: Sample) -> Any:
    return m(s.x, s.batch)


def _one_event(m: Module, s: Sample) -> Any:
    return m(s.x, s.event)


def _by_node_type(m: Module, s: Sample) -> Any:
    return m(s.x, s.node_type)


def _case(
    name: str, variant: str, make: Callable[[], Module], call: Callable[[Module, Sample], Any] = _plain, **options: Any
) -> Case:
    return Case(name, functools.partial(_same_weights, make), call, variant, **options)


def _same_weights(make: Callable[[], Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed writes down its whole stack for each device it lacks
        module: nn.Module = make()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return module


def _by_name(cases: Iterable[Case]) -> dict[str, list[Case]]:
    named: dict[str, list[Case]] = {}
    for case in cases:
        named.setdefault(case.name, []).append(case)
    return named


_DEGREES = (7, 3, 8, 9, 10, 9, 6, 4, 2, 1, 1)  # nodes with 0, 1, 2 ... incoming edges, as PNA wants to know them
_NODES: frozenset[Order] = frozenset({"nodes"})
_EDGES: frozenset[Order] = frozenset({"edges"})
_DENSE: dict[str, Any] = {"graph": sorted_by_dst, "needs_sorted": "edges"}


def _degrees() -> Tensor:
    return torch.tensor(_DEGREES)


# Convolutions ========================================================================================================

_HIT = "hit"
_FORTH, _BACK = (_HIT, "to", _HIT), (_HIT, "from", _HIT)
_METADATA = ([_HIT], [_FORTH, _BACK])


def _both_ways(m: Module, s: Sample) -> Any:
    """A homogeneous graph as a heterogeneous one: one type of nodes, and each edge again backwards as a second type."""
    return m({_HIT: s.x}, {_FORTH: s.edge_index, _BACK: s.edge_index.flip(0)})[_HIT]


def _of_types(m: Module, s: Sample) -> Any:
    masks = {_FORTH: s.edge_type == 0, _BACK: s.edge_type > 0}
    return m({_HIT: s.x}, {kind: s.edge_index[:, mask] for kind, mask in masks.items()})[_HIT]


def _layers_of_states(m: Module, s: Sample) -> Any:
    return m(torch.stack([s.x, s.x.flip(-1)], dim=1), s.edge_index)


def _neighbourhoods(m: Module, s: Sample) -> Any:
    """Edges as an incidence: node `src` belongs to the hyperedge numbered `dst`."""
    return m(s.x, s.edge_index, num_edges=s.x.size(0))


def _attention_loss(m: Module, s: Sample) -> Any:
    m(s.x, s.edge_index, neg_edge_index=s.edge_index.flip(0))
    return m.get_attention_loss()


_AGGREGATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sum", {}),
    ("mean", {}),
    ("max", {}),
    ("min", {}),
    ("mul", {}),
    ("std", {}),
    ("var", {}),
    ("softmax", {"aggr_kwargs": {"t": 0.5, "learn": True}}),
    ("powermean", {"aggr_kwargs": {"p": 2.0, "learn": True}}),
    ("median", {}),
)


def _user_layers() -> Iterable[Case]:
    for aggregation, options in _AGGREGATIONS:
        yield _case(
            "MessagePassing", f"aggr {aggregation}", functools.partial(Messages, aggregation, **options), _attributed
        )
    lstm = {"in_channels": HIDDEN, "out_channels": HIDDEN}
    yield _case(
        "MessagePassing", "aggr lstm", lambda: Messages("lstm", aggr_kwargs=lstm), _attributed, order=_EDGES, **_DENSE
    )
    several = ["sum", "max", "std"]
    yield _case("MessagePassing", "aggr sum, max, std", lambda: Messages(several, 3 * HIDDEN), _attributed)
    yield _case("MessagePassing", "bare", Neighbours)
    yield _case("MessagePassing", "target to source", lambda: Messages(flow="target_to_source"), _attributed)
    yield _case("MessagePassing", "edge updater", EdgeUpdates)
    yield _case("MessagePassing", "node dimension 0", lambda: Neighbours(node_dim=0), _with_heads)


def _with_heads(m: Module, s: Sample) -> Any:
    return m(s.x.view(s.x.size(0), 2, -1), s.edge_index)


def _gcn_family() -> Iterable[Case]:
    f, h = FEATURES, HIDDEN
    yield _case("SimpleConv", "", pyg.SimpleConv, _weighted)
    yield _case("SimpleConv", "mean, self loop", lambda: pyg.SimpleConv("mean", combine_root="self_loop"), _weighted)
    yield _case("SimpleConv", "max, cat", lambda: pyg.SimpleConv("max", combine_root="cat"))
    yield _case("GCNConv", "", lambda: pyg.GCNConv(f, h))
    yield _case("GCNConv", "edge weights", lambda: pyg.GCNConv(f, h), _weighted)
    yield _case("GCNConv", "improved, edge weights", lambda: pyg.GCNConv(f, h, improved=True), _weighted)
    yield _case("GCNConv", "self loops off", lambda: pyg.GCNConv(f, h, add_self_loops=False), _weighted)
    yield _case("GCNConv", "normalize off", lambda: pyg.GCNConv(f, h, normalize=False), _weighted)
    yield _case("GCNConv", "cached", lambda: pyg.GCNConv(f, h, cached=True), note="normalises once, at the first call")
    yield _case("GCNConv", "target to source", lambda: pyg.GCNConv(f, h, flow="target_to_source"), _weighted)
    yield _case("GCNConv", "decomposed", lambda: pyg.GCNConv(f, h, decomposed_layers=2))
    yield _case("GCNConv", "symmetric graph", lambda: pyg.GCNConv(f, h), _weighted, graph=undirected)
    widest = "divides by the largest entry of the whole Laplacian, so all edges share one number"
    for normalization in ("sym", "rw"):
        make = functools.partial(pyg.ChebConv, f, h, 3, normalization)
        yield _case("ChebConv", f"K 3, {normalization}", make, _weighted, note=widest)
    yield _case("ChebConv", "K 3, no normalization", lambda: pyg.ChebConv(f, h, 3, None), _cheb_scaled)
    yield _case("ChebConv", "K 1", lambda: pyg.ChebConv(f, h, 1), _weighted)
    yield _case(
        "ChebConv", "K 3, symmetric graph", lambda: pyg.ChebConv(f, h, 3), _weighted, graph=undirected, note=widest
    )
    yield _case("ChebConv", "K 3, lambda_max per graph", lambda: pyg.ChebConv(f, h, 3), _cheb_batched)
    yield _case("TAGConv", "", lambda: pyg.TAGConv(f, h), _weighted)
    yield _case("TAGConv", "normalize off", lambda: pyg.TAGConv(f, h, K=2, normalize=False), _weighted)
    yield _case("ARMAConv", "", lambda: pyg.ARMAConv(f, h), _weighted)
    yield _case("ARMAConv", "stacks 2, layers 3", lambda: pyg.ARMAConv(f, h, 2, 3), _weighted)
    yield _case("ARMAConv", "shared weights", lambda: pyg.ARMAConv(f, h, 2, 3, shared_weights=True), _weighted)
    yield _case("ARMAConv", "dropout", lambda: pyg.ARMAConv(f, h, 2, 2, dropout=0.5), _weighted, random=True)
    yield _case("SGConv", "K 2", lambda: pyg.SGConv(f, h, K=2), _weighted)
    yield _case("SGConv", "K 2, cached", lambda: pyg.SGConv(f, h, K=2, cached=True), note="keeps x of the first call")
    yield _case("SSGConv", "K 3", lambda: pyg.SSGConv(f, h, alpha=0.1, K=3), _weighted)
    yield _case("APPNP", "K 5", lambda: pyg.APPNP(5, 0.1), _weighted)
    yield _case("APPNP", "K 5, normalize off", lambda: pyg.APPNP(5, 0.1, normalize=False), _weighted)
    yield _case("APPNP", "K 5, dropout", lambda: pyg.APPNP(5, 0.1, dropout=0.5), random=True, note="drops edges")
    yield _case("LGConv", "", pyg.LGConv, _weighted)
    yield _case("LGConv", "normalize off", lambda: pyg.LGConv(normalize=False), _weighted)
    yield _case("GCN2Conv", "", lambda: pyg.GCN2Conv(f, 0.1, 0.5, 2), _with_start_weighted)
    yield _case("GCN2Conv", "two weights", lambda: pyg.GCN2Conv(f, 0.1, 0.5, 2, shared_weights=False), _with_start)
    yield _case("FAConv", "", lambda: pyg.FAConv(f), _with_start)
    yield _case("FAConv", "normalize off", lambda: pyg.FAConv(f, normalize=False), _with_start_weighted)
    yield _case("MixHopConv", "", lambda: pyg.MixHopConv(f, h, powers=[0, 1, 2]), _weighted)
    looped = "adds a vector of N values to the entries of its edges that are loops: fails unless each node has just one"
    yield _case("ClusterGCNConv", "", lambda: pyg.ClusterGCNConv(f, h, diag_lambda=0.1), single=True, note=looped)
    yield _case("ClusterGCNConv", "no lambda", lambda: pyg.ClusterGCNConv(f, h), single=True, note=looped)
    yield _case("PDNConv", "", lambda: pyg.PDNConv(f, h, EDGE_FEATURES, 8), _attributed)
    yield _case("PDNConv", "normalize off", lambda: pyg.PDNConv(f, h, EDGE_FEATURES, 8, normalize=False), _attributed)
    yield _case("WLConvContinuous", "", pyg.WLConvContinuous, _weighted)
    yield _case("AntiSymmetricConv", "GCN inside", lambda: pyg.AntiSymmetricConv(f, num_iters=2))
    yield _case(
        "AntiSymmetricConv", "SAGE inside", lambda: pyg.AntiSymmetricConv(f, phi=pyg.SAGEConv(f, f), num_iters=2)
    )
    for inside, conv in (("GCN", pyg.GCNConv), ("SAGE", pyg.SAGEConv), ("GATv2", pyg.GATv2Conv)):
        yield _case("DirGNNConv", f"{inside} inside", functools.partial(_both_directions, conv))
    heads = {"num_heads": 4, "num_bases": 2}
    yield _case("EGConv", "symnorm", lambda: pyg.EGConv(f, h, **heads))
    yield _case("EGConv", "symnorm, max, std", lambda: pyg.EGConv(f, h, ["symnorm", "max", "std"], **heads))
    guess = "adds self-loops without the number of nodes: those numbered above the last node with an edge get none"
    yield _case("EGConv", "mean, min", lambda: pyg.EGConv(f, h, ["mean", "min"], **heads), order=_NODES, note=guess)
    off = {**heads, "add_self_loops": False}
    yield _case("EGConv", "sum, var, self loops off", lambda: pyg.EGConv(f, h, ["sum", "var"], **off))


def _both_directions(conv: Callable[..., Module]) -> nn.Module:
    layer: nn.Module = pyg.DirGNNConv(conv(FEATURES, HIDDEN))
    return layer


def _cheb_scaled(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.edge_weight, lambda_max=4.0)


def _cheb_batched(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.edge_weight, s.batch, torch.tensor([1.8, 2.0, 2.2], dtype=s.x.dtype))


def _with_start(m: Module, s: Sample) -> Any:
    return m(s.x, s.x.flip(-1), s.edge_index)


def _with_start_weighted(m: Module, s: Sample) -> Any:
    return m(s.x, s.x.flip(-1), s.edge_index, s.edge_weight)


def _sums() -> Iterable[Case]:
    f, h, g = FEATURES, HIDDEN, EDGE_FEATURES
    for aggregation in ("mean", "max", "std", "sum", "median"):
        yield _case("SAGEConv", f"aggr {aggregation}", functools.partial(pyg.SAGEConv, f, h, aggregation))
    yield _case("SAGEConv", "aggr mean, max, std", lambda: pyg.SAGEConv(f, h, ["mean", "max", "std"]))
    yield _case("SAGEConv", "aggr softmax", lambda: pyg.SAGEConv(f, h, "softmax", aggr_kwargs={"learn": True}))
    yield _case("SAGEConv", "aggr lstm", lambda: pyg.SAGEConv(f, h, "lstm"), order=_EDGES, **_DENSE)
    yield _case("SAGEConv", "normalize", lambda: pyg.SAGEConv(f, h, normalize=True))
    yield _case("SAGEConv", "project", lambda: pyg.SAGEConv(f, h, project=True))
    yield _case("SAGEConv", "no root weight", lambda: pyg.SAGEConv(f, h, root_weight=False))
    for aggregation in ("add", "mean", "max"):
        yield _case("GraphConv", f"aggr {aggregation}", functools.partial(pyg.GraphConv, f, h, aggregation), _weighted)
    yield _case("GatedGraphConv", "layers 3", lambda: pyg.GatedGraphConv(h, 3), _weighted)
    yield _case("GatedGraphConv", "layers 2, max", lambda: pyg.GatedGraphConv(h, 2, "max"))
    yield _case("ResGatedGraphConv", "", lambda: pyg.ResGatedGraphConv(f, h))
    yield _case("ResGatedGraphConv", "edge_dim", lambda: pyg.ResGatedGraphConv(f, h, edge_dim=g), _attributed)
    yield _case("GINConv", "", lambda: pyg.GINConv(mlp(), train_eps=True))
    batch_norm = "BatchNorm1d inside: means and variances of all nodes"
    yield _case("GINConv", "batch norm", lambda: pyg.GINConv(_normed_mlp()), note=batch_norm)
    yield _case("GINEConv", "", lambda: pyg.GINEConv(mlp(), train_eps=True, edge_dim=g), _attributed)
    yield _case("GINEConv", "aggr mean", lambda: pyg.GINEConv(mlp(), edge_dim=g, aggr="mean"), _attributed)
    yield _case("MFConv", "", lambda: pyg.MFConv(f, h, max_degree=4), note="picks the nodes of each degree")
    yield _case("LEConv", "", lambda: pyg.LEConv(f, h), _weighted)
    yield _case("EdgeConv", "max", lambda: pyg.EdgeConv(mlp(2 * f)))
    yield _case("EdgeConv", "mean", lambda: pyg.EdgeConv(mlp(2 * f), "mean"))
    yield _case("NNConv", "", lambda: pyg.NNConv(f, h, mlp(g, f * h)), _attributed)
    yield _case("NNConv", "mean", lambda: pyg.NNConv(f, h, mlp(g, f * h), "mean"), _attributed)
    yield _case("CGConv", "", lambda: pyg.CGConv(f, g), _attributed)
    yield _case("CGConv", "batch norm", lambda: pyg.CGConv(f, g, batch_norm=True), _attributed, note=batch_norm)
    yield _case("CGConv", "max, no edge features", lambda: pyg.CGConv(f, aggr="max"))
    pna = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]}
    yield _case("PNAConv", "", lambda: pyg.PNAConv(f, h, deg=_degrees(), **pna))
    yield _case(
        "PNAConv",
        "edge_dim, towers, divided",
        lambda: pyg.PNAConv(f, h, deg=_degrees(), edge_dim=g, towers=4, divide_input=True, pre_layers=2, **pna),
        _attributed,
    )
    linear = {"aggregators": ["sum", "var"], "scalers": ["linear", "inverse_linear"]}
    yield _case(
        "PNAConv", "linear scalers, trained", lambda: pyg.PNAConv(f, h, deg=_degrees(), train_norm=True, **linear)
    )
    for aggregation in ("softmax", "softmax_sg", "powermean", "add"):
        options = {"learn_t": aggregation == "softmax", "learn_p": aggregation == "powermean", "norm": "layer"}
        yield _case("GENConv", f"aggr {aggregation}", functools.partial(pyg.GENConv, f, h, aggregation, **options))
    yield _case(
        "GENConv", "edge_dim, msg_norm", lambda: pyg.GENConv(f, h, msg_norm=True, edge_dim=g, norm="layer"), _attributed
    )
    yield _case("GENConv", "batch norm", lambda: pyg.GENConv(f, h, edge_dim=g), _attributed, note=batch_norm)
    yield _case("GeneralConv", "", lambda: pyg.GeneralConv(f, h))
    yield _case(
        "GeneralConv", "edge features, both ends", lambda: pyg.GeneralConv(f, h, g, directed_msg=False), _attributed
    )
    for kind in ("additive", "dot_product"):
        options = {"attention": True, "attention_type": kind, "heads": 2, "l2_normalize": True, "skip_linear": True}
        yield _case(
            "GeneralConv", f"attention {kind}", functools.partial(pyg.GeneralConv, f, h, g, **options), _attributed
        )
    yield _case("GMMConv", "", lambda: pyg.GMMConv(f, h, dim=3, kernel_size=4), _pseudo)
    yield _case("GMMConv", "separate", lambda: pyg.GMMConv(f, h, 3, 4, separate_gaussians=True), _pseudo)
    yield _case("FeaStConv", "heads 2", lambda: pyg.FeaStConv(f, h, heads=2))
    yield _case("FeaStConv", "self loops off", lambda: pyg.FeaStConv(f, h, heads=2, add_self_loops=False))
    yield _case("PointNetConv", "", lambda: pyg.PointNetConv(mlp(f + 3), mlp()), _points)
    yield _case("PointNetConv", "self loops off", lambda: pyg.PointNetConv(mlp(f + 3), add_self_loops=False), _points)
    yield _case("PPFConv", "", lambda: pyg.PPFConv(mlp(f + 4), mlp()), _oriented_points)
    yield _case("PointTransformerConv", "", lambda: pyg.PointTransformerConv(f, h), _points)
    yield _case("PointTransformerConv", "nets", lambda: pyg.PointTransformerConv(f, h, mlp(3), mlp()), _points)
    yield _case("PointGNNConv", "", lambda: pyg.PointGNNConv(mlp(f, 3), mlp(f + 3), mlp()), _points)
    by_four = "takes every fourth message, and fills an empty float32 tensor with results"
    yield _case("MeshCNNConv", "", lambda: pyg.MeshCNNConv(f, h), graph=mesh, order=_EDGES, single=True, note=by_four)


def _normed_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))


def _pseudo(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.pseudo)


def _points(m: Module, s: Sample) -> Any:
    return m(s.x, s.pos, s.edge_index)


def _oriented_points(m: Module, s: Sample) -> Any:
    return m(s.x, s.pos, s.normal, s.edge_index)


def _attention() -> Iterable[Case]:
    f, h, g = FEATURES, HIDDEN, EDGE_FEATURES
    options: dict[str, Any]
    for name, conv in (("GATConv", pyg.GATConv), ("GATv2Conv", pyg.GATv2Conv)):
        for variant, options in (
            ("", {}),
            ("heads 4", {"heads": 4}),
            ("heads 2, concat off", {"heads": 2, "concat": False}),
            ("self loops off", {"heads": 2, "add_self_loops": False}),
            ("residual", {"residual": True}),
        ):
            yield _case(name, variant, functools.partial(conv, f, h, **options))
        for fill in ("mean", "max", 0.5):
            make = functools.partial(conv, f, h, edge_dim=g, fill_value=fill)
            yield _case(name, f"edge_dim, loops filled with {fill}", make, _attributed)
        bare = functools.partial(conv, f, h, edge_dim=g, add_self_loops=False)
        yield _case(name, "edge_dim, self loops off", bare, _attributed)
        yield _case(name, "dropout", functools.partial(conv, f, h, dropout=0.5), random=True)
        yield _case(
            name, "attention of edges", functools.partial(conv, f, h, add_self_loops=False), _alpha, rows="edges"
        )
    yield _case("GATv2Conv", "shared weights", lambda: pyg.GATv2Conv(f, h, share_weights=True))
    for variant, options in (
        ("", {}),
        ("heads 4, beta", {"heads": 4, "beta": True}),
        ("heads 2, concat off", {"heads": 2, "concat": False}),
        ("no root weight", {"root_weight": False}),
    ):
        yield _case("TransformerConv", variant, functools.partial(pyg.TransformerConv, f, h, **options))
    edged = functools.partial(pyg.TransformerConv, f, h, 2, edge_dim=g)
    yield _case("TransformerConv", "edge_dim", edged, _attributed)
    yield _case("TransformerConv", "dropout", lambda: pyg.TransformerConv(f, h, dropout=0.5), random=True)
    yield _case("AGNNConv", "", pyg.AGNNConv)
    yield _case("AGNNConv", "self loops off", lambda: pyg.AGNNConv(add_self_loops=False))
    for kind in ("MX", "SD"):
        make = functools.partial(pyg.SuperGATConv, f, h, heads=2, attention_type=kind)
        yield _case("SuperGATConv", f"{kind}, eval", functools.partial(_evaluating, make))
        sampled = "draws negative edges for its loss; the result itself does not depend on them"
        yield _case("SuperGATConv", f"{kind}, training", make, note=sampled)
        yield _case("SuperGATConv", f"{kind}, loss of given edges", make, _attention_loss, rows="graph")
    wholly = "attends between all pairs of nodes"
    for variant, options in (
        ("GINE inside, norm off", {"norm": None}),
        ("GINE inside, layer norm", {"norm": "layer_norm", "heads": 4}),
        ("GINE inside, batch norm", {}),
        ("GINE inside, performer", {"norm": None, "attn_type": "performer"}),
    ):
        yield _case("GPSConv", variant, functools.partial(_gps, **options), _with_edge_attr, note=wholly)
    yield _case("GPSConv", "three graphs", _gps, _gps_batched, needs_sorted="batch", note=wholly)
    yield _case("DNAConv", "", lambda: pyg.DNAConv(f, heads=2, groups=2), _layers_of_states)
    yield _case("HypergraphConv", "", lambda: pyg.HypergraphConv(f, h), _neighbourhoods)
    counted = "numbers hyperedges up to the largest one it sees"
    yield _case("HypergraphConv", "number left open", lambda: pyg.HypergraphConv(f, h), note=counted)
    for mode in ("node", "edge"):
        attended = functools.partial(pyg.HypergraphConv, f, h, use_attention=True, attention_mode=mode, heads=2)
        yield _case("HypergraphConv", f"attention {mode}", attended, _hyperedges)


def _evaluating(make: Callable[[], Module]) -> nn.Module:
    module: nn.Module = make().eval()
    return module


def _alpha(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, return_attention_weights=True)[1][1]


def _gps(**options: Any) -> nn.Module:
    inside = pyg.GINEConv(mlp(), edge_dim=EDGE_FEATURES)
    layer: nn.Module = pyg.GPSConv(FEATURES, inside, **options)
    return layer


def _with_edge_attr(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, edge_attr=s.edge_attr)


def _gps_batched(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.batch, edge_attr=s.edge_attr)


def _hyperedges(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.edge_weight.new_ones(s.x.size(0)), s.x.flip(-1), s.x.size(0))


def _relations() -> Iterable[Case]:
    f, h, g, r = FEATURES, HIDDEN, EDGE_FEATURES, NUM_TYPES
    for name, conv in (("RGCNConv", pyg.RGCNConv), ("FastRGCNConv", pyg.FastRGCNConv)):
        yield _case(name, "", functools.partial(conv, f, h, r), _typed)
        yield _case(name, "bases", functools.partial(conv, f, h, r, num_bases=2), _typed)
        yield _case(name, "blocks, sum", functools.partial(conv, f, h, r, num_blocks=4, aggr="sum"), _typed)
    yield _case("RGCNConv", "max", lambda: pyg.RGCNConv(f, h, r, aggr="max", root_weight=False), _typed)
    alone = "a softmax over the edges of each type, as wide as the largest `dst` among them"
    for mechanism, note in (("across-relation", ""), ("within-relation", alone)):
        make = functools.partial(_rgat, attention_mechanism=mechanism, heads=2)
        yield _case("RGATConv", mechanism, make, _typed, note=note)
    for mod in ("additive", "scaled", "f-additive", "f-scaled"):
        yield _case("RGATConv", f"mod {mod}", functools.partial(_rgat, mod=mod), _typed)
    many = {"attention_mode": "multiplicative-self-attention", "dim": 2, "heads": 2, "edge_dim": g, "num_bases": 2}
    yield _case("RGATConv", "multiplicative, edge_dim, bases", lambda: _rgat(**many), _typed_attributed)
    yield _case("FiLMConv", "one relation", lambda: pyg.FiLMConv(f, h))
    yield _case("FiLMConv", "relations", lambda: pyg.FiLMConv(f, h, r), _typed)
    yield _case("SignedConv", "first", lambda: pyg.SignedConv(f, h, first_aggr=True), _signed)
    yield _case("SignedConv", "later", lambda: pyg.SignedConv(f // 2, h, first_aggr=False), _signed)
    by_type = "sorts nodes by type, where they are not"
    sizes = {"edge_type_emb_dim": 5, "edge_dim": g, "edge_attr_emb_dim": 6}
    yield _case("HEATConv", "", lambda: pyg.HEATConv(f, h, r, r, heads=2, **sizes), _node_and_edge_typed, note=by_type)
    yield _case(
        "HEATConv",
        "concat off",
        lambda: pyg.HEATConv(f, h, r, r, 5, g, 6, 2, False),
        _node_and_edge_typed,
        note=by_type,
    )
    yield _case("HGTConv", "", lambda: pyg.HGTConv(f, h, _METADATA, heads=2), _both_ways)
    meant = "weighs kinds of edges by a mean over all nodes"
    yield _case("HANConv", "", lambda: pyg.HANConv(f, h, _METADATA, heads=2), _both_ways, note=meant)
    for aggregation in ("sum", "mean", "max", "cat"):
        yield _case("HeteroConv", f"SAGE and GATv2, {aggregation}", functools.partial(_hetero, aggregation), _both_ways)
    yield _case("HeteroConv", "edges by type", _hetero, _of_types)
    new_names = "names colours by the order in which it meets them, with Python's hash, node by node"
    yield _case("WLConv", "", pyg.WLConv, _coloured, order=_NODES, note=new_names)


def _rgat(**options: Any) -> nn.Module:
    layer = pyg.RGATConv(FEATURES, HIDDEN, NUM_TYPES, **options)
    with torch.no_grad():
        layer.l2.fill_(1 / HIDDEN)  # PyG means to, and leaves memory as it found it
    module: nn.Module = layer
    return module


def _hetero(aggregation: str = "sum") -> nn.Module:
    convs = {
        _FORTH: pyg.SAGEConv(FEATURES, HIDDEN),
        _BACK: pyg.GATv2Conv(FEATURES, HIDDEN, add_self_loops=False),
    }
    layer: nn.Module = pyg.HeteroConv(convs, aggr=aggregation)
    return layer


def _typed_attributed(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.edge_type, s.edge_attr)


def _signed(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index[:, s.edge_type == 0], s.edge_index[:, s.edge_type > 0])


def _node_and_edge_typed(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.node_type, s.edge_type, s.edge_attr)


def _coloured(m: Module, s: Sample) -> Any:
    return m(s.node_type, s.edge_index)


CONVOLUTIONS: dict[str, list[Case]] = _by_name(
    [*_user_layers(), *_gcn_family(), *_sums(), *_attention(), *_relations()]
)
"""Cases of each convolution of torch_geometric that can be run here, by class."""

_KNN = "finds its own edges with pyg-lib (>= 0.6), which has no wheel among our dependencies"
CANNOT_RUN: dict[str, str] = {
    "CuGraphSAGEConv": "needs pylibcugraphops, on a GPU only",
    "CuGraphGATConv": "needs pylibcugraphops, on a GPU only",
    "CuGraphRGCNConv": "needs pylibcugraphops, on a GPU only",
    "FusedGATConv": "needs dgNN, on a GPU only",
    "DynamicEdgeConv": _KNN,
    "GravNetConv": _KNN,
    "XConv": _KNN,
    "SplineConv": "needs the spline kernels of pyg-lib (>= 0.6)",
    "PANConv": "multiplies sparse matrices of torch-sparse",
}
"""Why a convolution has no case."""

# Models ==============================================================================================================

_KINDS: tuple[tuple[str, Callable[..., Module], dict[str, Any]], ...] = (
    ("GCN", pyg.GCN, {}),
    ("GraphSAGE", pyg.GraphSAGE, {}),
    ("GIN", pyg.GIN, {}),
    ("GAT", pyg.GAT, {"heads": 2}),
    ("GAT", pyg.GAT, {"heads": 2, "v2": True}),
    (
        "PNA",
        pyg.PNA,
        {
            "aggregators": ["mean", "max", "std"],
            "scalers": ["identity", "amplification"],
            "deg": torch.tensor(_DEGREES),
        },
    ),
    ("EdgeCNN", pyg.EdgeCNN, {}),
)
_JUMPS = (None, "last", "cat", "max", "lstm")
_NORMS: tuple[tuple[str, str | Callable[[], Module] | None, dict[str, Any]], ...] = (
    ("none", None, {}),
    ("batch", "batch_norm", {}),
    ("layer of a graph", "layer_norm", {}),
    ("layer of a node", "layer_norm", {"mode": "node"}),
    ("instance", "instance_norm", {}),
    ("graph", "graph_norm", {}),
    ("pair", "pair_norm", {}),
    ("mean subtraction", pyg_norm.MeanSubtractionNorm, {}),  # these two cannot be built by name
    ("diff group", "diff_group_norm", {"groups": 3}),
    ("graph size", pyg_norm.GraphSizeNorm, {}),
)


def _basic_gnns() -> Iterable[Case]:
    """Every norm with every jumping-knowledge mode, every kind of layer with every mode, both dropouts with each."""
    for i, (norm_name, norm, norm_options) in enumerate(_NORMS):
        for j, jump in enumerate(_JUMPS):
            name, model, options = _KINDS[(i + j) % len(_KINDS)]
            dropped = 0.5 if (i // 2 + j) % 2 else 0.0
            make = functools.partial(
                _basic_gnn, model, jump, norm, norm_kwargs=norm_options, dropout=dropped, **options
            )
            version = "v2, " if options.get("v2") else ""
            variant = f"{version}jk {jump}, norm {norm_name}, dropout {dropped}"
            yield _case(name, variant, make, random=dropped > 0)


def _basic_gnn(
    model: Callable[..., Module], jump: str | None, norm: str | Callable[[], Module] | None, **options: Any
) -> nn.Module:
    gnn: nn.Module = model(FEATURES, HIDDEN, 3, jk=jump, norm=norm() if callable(norm) else norm, **options)
    return gnn


def _weighted_by_name(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, edge_weight=s.edge_weight)


def _three_graphs(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, batch=s.batch)


def _other_gnns() -> Iterable[Case]:
    f, h = FEATURES, HIDDEN
    yield _case("GCN", "edge weights, out_channels", lambda: pyg.GCN(f, h, 3, 5), _weighted_by_name)
    yield _case("GAT", "edge_dim", lambda: pyg.GAT(f, h, 3, edge_dim=EDGE_FEATURES), _with_edge_attr)
    pna = dict(_KINDS[5][2], edge_dim=EDGE_FEATURES)
    yield _case("PNA", "edge_dim", lambda: pyg.PNA(f, h, 3, **pna), _with_edge_attr)
    first = functools.partial(pyg.GraphSAGE, f, h, 3, norm="batch_norm", act_first=True)
    yield _case("GraphSAGE", "activation before the norm", first)
    yield _case("GraphSAGE", "norm batch, eval", lambda: first().eval())
    for norm in ("graph_norm", "layer_norm", "pair_norm"):
        yield _case("GIN", f"norm {norm}, three graphs", functools.partial(pyg.GIN, f, h, 3, norm=norm), _three_graphs)


MODELS: list[Case] = [*_basic_gnns(), *_other_gnns()]
"""Models of torch_geometric's BasicGNN family: 3 layers, hidden 16."""

# Other modules =======================================================================================================


def _norms() -> Iterable[Case]:
    f = FEATURES
    yield _case("BatchNorm", "", lambda: pyg_norm.BatchNorm(f), _nodes_only)
    yield _case("BatchNorm", "eval", lambda: pyg_norm.BatchNorm(f).eval(), _nodes_only)
    untracked = functools.partial(pyg_norm.BatchNorm, f, affine=False, track_running_stats=False)
    yield _case("BatchNorm", "untracked, not affine", untracked, _nodes_only)
    yield _case("BatchNorm", "one row allowed", lambda: pyg_norm.BatchNorm(f, allow_single_element=True), _nodes_only)
    yield _case("BatchNorm", "edges", lambda: pyg_norm.BatchNorm(EDGE_FEATURES), _edges_only, rows="edges")
    yield _case("BatchNorm1d", "torch's", lambda: nn.BatchNorm1d(f), _nodes_only)
    yield _case("BatchNorm1d", "torch's, of all so far", lambda: nn.BatchNorm1d(f, momentum=None), _nodes_only)
    yield _case("LayerNorm", "torch's", lambda: nn.LayerNorm(f), _nodes_only)
    yield _case("HeteroBatchNorm", "", lambda: pyg_norm.HeteroBatchNorm(f, NUM_TYPES), _by_node_type)
    yield _case("HeteroBatchNorm", "eval", lambda: pyg_norm.HeteroBatchNorm(f, NUM_TYPES).eval(), _by_node_type)
    yield _case("HeteroLayerNorm", "", lambda: pyg_norm.HeteroLayerNorm(f, NUM_TYPES), _by_node_type)
    for name, variant, make in (
        ("InstanceNorm", "", lambda: pyg_norm.InstanceNorm(f)),
        ("InstanceNorm", "tracked, affine", lambda: pyg_norm.InstanceNorm(f, affine=True, track_running_stats=True)),
        ("LayerNorm", "of a graph", lambda: pyg_norm.LayerNorm(f)),
        ("LayerNorm", "of a node", lambda: pyg_norm.LayerNorm(f, mode="node")),
        ("GraphNorm", "", lambda: pyg_norm.GraphNorm(f)),
        ("GraphSizeNorm", "", pyg_norm.GraphSizeNorm),
        ("PairNorm", "", pyg_norm.PairNorm),
        ("PairNorm", "individually", lambda: pyg_norm.PairNorm(scale_individually=True)),
        ("MeanSubtractionNorm", "", pyg_norm.MeanSubtractionNorm),
    ):
        also = f"{variant}, " if variant else ""
        yield _case(name, f"{also}no batch vector", make, _nodes_only)
        yield _case(name, f"{also}one event", make, _one_event)
        yield _case(name, f"{also}three graphs", make, _batched)
    for learned in (False, True):
        make_scaled = functools.partial(pyg_norm.MessageNorm, learn_scale=learned)
        yield _case("MessageNorm", "learned" if learned else "", make_scaled, _message_and_x)
    yield _case("DiffGroupNorm", "", lambda: pyg_norm.DiffGroupNorm(f, groups=3), _nodes_only)


def _edges_only(m: Module, s: Sample) -> Any:
    return m(s.edge_attr)


def _message_and_x(m: Module, s: Sample) -> Any:
    return m(s.x, torch.tanh(s.x.flip(-1)))


class Pooled(nn.Module):
    """A pooling function behind a linear layer, as at the end of a model."""

    def __init__(self, pool: Callable[..., Tensor], width: int = FEATURES) -> None:
        super().__init__()
        self.before = nn.Linear(width, HIDDEN)
        self.pool = pool

    def forward(self, rows: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
        return self.pool(torch.tanh(self.before(rows)), batch, size)


def _number_known(m: Module, s: Sample) -> Any:
    return m(s.x, s.batch, NUM_GRAPHS)


def _edges_of_graphs(m: Module, s: Sample) -> Any:
    return m(s.edge_attr, s.batch[s.edge_index[1]], NUM_GRAPHS)


def _pools() -> Iterable[Case]:
    for pool in (pyg.global_add_pool, pyg.global_mean_pool, pyg.global_max_pool):
        make = functools.partial(Pooled, pool)
        name = pool.__name__
        yield _case(name, "no batch vector", make, _nodes_only, rows="graph")
        yield _case(name, "one event", make, _one_event, rows="graph")
        yield _case(name, "three graphs", make, _batched, rows="graph")
        yield _case(name, "three graphs, number given", make, _number_known, rows="graph")
        yield _case(name, "edges", functools.partial(Pooled, pool, EDGE_FEATURES), _edges_only, rows="graph")
        of_edges = functools.partial(Pooled, pool, EDGE_FEATURES)
        yield _case(name, "edges of three graphs", of_edges, _edges_of_graphs, rows="graph")


def _readouts() -> Iterable[Case]:
    f, h = FEATURES, HIDDEN
    by_value = "sorts all values"
    in_order = "reads the nodes of a graph one after another"
    wide = "makes a dense tensor as long as the largest graph"
    scalers = ["identity", "amplification", "inverse_linear"]
    plain: list[tuple[str, str, Callable[[], Module], str]] = [
        ("SumAggregation", "", pyg_aggr.SumAggregation, ""),
        ("MeanAggregation", "", pyg_aggr.MeanAggregation, ""),
        ("MaxAggregation", "", pyg_aggr.MaxAggregation, ""),
        ("MinAggregation", "", pyg_aggr.MinAggregation, ""),
        ("MulAggregation", "", pyg_aggr.MulAggregation, ""),
        ("VarAggregation", "", pyg_aggr.VarAggregation, ""),
        ("VarAggregation", "semi-gradient", lambda: pyg_aggr.VarAggregation(semi_grad=True), ""),
        ("StdAggregation", "", pyg_aggr.StdAggregation, ""),
        ("SoftmaxAggregation", "", lambda: pyg_aggr.SoftmaxAggregation(learn=True, channels=f), ""),
        ("SoftmaxAggregation", "semi-gradient", lambda: pyg_aggr.SoftmaxAggregation(t=0.5, semi_grad=True), ""),
        ("PowerMeanAggregation", "", lambda: pyg_aggr.PowerMeanAggregation(p=2.0, learn=True), ""),
        ("MedianAggregation", "", pyg_aggr.MedianAggregation, by_value),
        ("QuantileAggregation", "", lambda: pyg_aggr.QuantileAggregation([0.25, 0.7]), by_value),
        ("MultiAggregation", "", lambda: pyg_aggr.MultiAggregation(["mean", "max", "std"]), ""),
        ("DegreeScalerAggregation", "", lambda: pyg_aggr.DegreeScalerAggregation(["mean"], scalers, _degrees()), ""),
        ("VariancePreservingAggregation", "", pyg_aggr.VariancePreservingAggregation, ""),
        ("AttentionalAggregation", "", lambda: pyg_aggr.AttentionalAggregation(mlp(f, 1), mlp()), ""),
        ("DeepSetsAggregation", "", lambda: pyg_aggr.DeepSetsAggregation(mlp(), mlp()), ""),
        ("Set2Set", "", lambda: pyg_aggr.Set2Set(f, processing_steps=3), ""),
    ]
    for name, variant, make, note in plain:
        also = f"{variant}, " if variant else ""
        yield _case(name, f"{also}one event", make, _one_event, rows="graph", note=note)
        yield _case(name, f"{also}three graphs", make, _batched, rows="graph", note=note)
    energy = "differentiates inside its forward pass, from a float32 start"
    equilibrium = functools.partial(pyg_aggr.EquilibriumAggregation, f, h, [8], grad_iter=2)
    yield _case("EquilibriumAggregation", "one event", equilibrium, _one_event, rows="graph", single=True, note=energy)
    yield _case("EquilibriumAggregation", "three graphs", equilibrium, _batched, rows="graph", single=True, note=energy)
    longest = 60
    dense: list[tuple[str, Callable[[], Module], bool, str]] = [
        ("LSTMAggregation", lambda: pyg_aggr.LSTMAggregation(f, h), True, in_order),
        ("GRUAggregation", lambda: pyg_aggr.GRUAggregation(f, h), True, in_order),
        ("MLPAggregation", lambda: pyg_aggr.MLPAggregation(f, h, longest, num_layers=1), True, in_order),
        ("LCMAggregation", lambda: pyg_aggr.LCMAggregation(f, h), True, in_order),
        ("PatchTransformerAggregation", lambda: pyg_aggr.PatchTransformerAggregation(f, h, 4, 8), True, in_order),
        ("SortAggregation", lambda: pyg_aggr.SortAggregation(k=5), False, by_value),
        ("SetTransformerAggregation", lambda: pyg_aggr.SetTransformerAggregation(f, heads=2), False, wide),
        ("GraphMultisetTransformer", lambda: pyg_aggr.GraphMultisetTransformer(f, k=3, heads=2), False, wide),
    ]
    for name, make, ordered, note in dense:
        order = _NODES if ordered else frozenset()
        options: dict[str, Any] = {"rows": "graph", "order": order, "needs_sorted": "batch", "note": note}
        yield _case(name, "one event", make, _one_event, **options)
        yield _case(name, "three graphs", make, _batched, **options)


def _made_of_layers() -> Iterable[Case]:
    f, h = FEATURES, HIDDEN
    yield _case("Sequential", "", _sequential, _weighted)
    yield _case("Sequential", "to the event's score", _sequential_readout, _plain_batched, rows="graph")
    for mode in ("cat", "max", "lstm"):
        yield _case("JumpingKnowledge", mode, functools.partial(Jumping, mode))
    for block in ("res+", "res", "dense", "plain"):
        yield _case("DeepGCNLayer", block, functools.partial(_deep, block, _node_norm))
    yield _case("DeepGCNLayer", "res+, batch norm", lambda: _deep("res+", lambda: nn.BatchNorm1d(f)))
    yield _case("SharedLayer", "", SharedLayer)
    yield _case("VirtualNode", "", VirtualNode, _with_event)
    yield _case("EdgeClassifier", "", EdgeClassifier, _attributed, rows="edges")
    yield _case("MLP", "norm batch", lambda: pyg.MLP([f, h, 5], norm="batch_norm"), _nodes_only)
    yield _case("MLP", "norm graph", lambda: pyg.MLP([f, h, 5], norm="graph_norm"), _batched)


def _sequential() -> nn.Module:
    steps = [
        (pyg.GCNConv(FEATURES, HIDDEN), "x, edge_index, edge_weight -> x1"),
        nn.ReLU(),
        (pyg.SAGEConv(HIDDEN, HIDDEN), "x1, edge_index -> x2"),
        (lambda x, x2: torch.cat([x, x2], dim=-1), "x, x2 -> x"),
        nn.Linear(FEATURES + HIDDEN, HIDDEN),
    ]
    model: nn.Module = pyg.Sequential("x, edge_index, edge_weight", steps)
    return model


def _sequential_readout() -> nn.Module:
    steps = [
        (pyg.GATv2Conv(FEATURES, HIDDEN), "x, edge_index -> x"),
        nn.Tanh(),
        (pyg.global_mean_pool, "x, batch -> x"),
        nn.Linear(HIDDEN, 1),
    ]
    model: nn.Module = pyg.Sequential("x, edge_index, batch", steps)
    return model


def _deep(block: str, norm: Callable[[], nn.Module]) -> nn.Module:
    layer: nn.Module = pyg.DeepGCNLayer(pyg.GENConv(FEATURES, FEATURES, norm="layer"), norm(), nn.ReLU(), block=block)
    return layer


def _node_norm() -> nn.Module:
    norm: nn.Module = pyg_norm.LayerNorm(FEATURES, mode="node")
    return norm


def _plain_batched(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.batch)


def _with_event(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.event)


MODULES: list[Case] = [*_norms(), *_pools(), *_readouts(), *_made_of_layers()]
"""Norms, pooling, readouts and modules made of layers; classes of this file stand for what users write."""
