"""Cases of convolutions that make a message of each edge and aggregate them at its `dst`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch_geometric.nn as pyg
from survey_layers import EdgeUpdates, Messages, Neighbours, mlp
from survey_samples import EDGE_FEATURES, FEATURES, HIDDEN, Sample, mesh, sorted_by_dst
from torch import nn

from survey_cases.case import Case, Module, attributed, case, degrees, weighted

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


def user_layers() -> Iterable[Case]:
    """Those that users write, with every aggregation."""
    for aggregation, options in _AGGREGATIONS:
        yield case(
            "MessagePassing", f"aggr {aggregation}", functools.partial(Messages, aggregation, **options), attributed
        )
    lstm = {"in_channels": HIDDEN, "out_channels": HIDDEN}
    yield case(
        "MessagePassing", "aggr lstm", lambda: Messages("lstm", aggr_kwargs=lstm), attributed, graph=sorted_by_dst
    )
    several = ["sum", "max", "std"]
    yield case("MessagePassing", "aggr sum, max, std", lambda: Messages(several, 3 * HIDDEN), attributed)
    yield case("MessagePassing", "bare", Neighbours)
    yield case("MessagePassing", "target to source", lambda: Messages(flow="target_to_source"), attributed)
    yield case("MessagePassing", "edge updater", EdgeUpdates)
    yield case("MessagePassing", "node dimension 0", lambda: Neighbours(node_dim=0), _with_heads)


def _with_heads(m: Module, s: Sample) -> Any:
    return m(s.x.view(s.x.size(0), 2, -1), s.edge_index)


def of_pyg() -> Iterable[Case]:
    """Those of torch_geometric."""
    f, h, g = FEATURES, HIDDEN, EDGE_FEATURES
    for aggregation in ("mean", "max", "std", "sum", "median"):
        yield case("SAGEConv", f"aggr {aggregation}", functools.partial(pyg.SAGEConv, f, h, aggregation))
    yield case("SAGEConv", "aggr mean, max, std", lambda: pyg.SAGEConv(f, h, ["mean", "max", "std"]))
    yield case("SAGEConv", "aggr softmax", lambda: pyg.SAGEConv(f, h, "softmax", aggr_kwargs={"learn": True}))
    yield case("SAGEConv", "aggr lstm", lambda: pyg.SAGEConv(f, h, "lstm"), graph=sorted_by_dst)
    yield case("SAGEConv", "normalize", lambda: pyg.SAGEConv(f, h, normalize=True))
    yield case("SAGEConv", "project", lambda: pyg.SAGEConv(f, h, project=True))
    yield case("SAGEConv", "no root weight", lambda: pyg.SAGEConv(f, h, root_weight=False))
    for aggregation in ("add", "mean", "max"):
        yield case("GraphConv", f"aggr {aggregation}", functools.partial(pyg.GraphConv, f, h, aggregation), weighted)
    yield case("GatedGraphConv", "layers 3", lambda: pyg.GatedGraphConv(h, 3), weighted)
    yield case("GatedGraphConv", "layers 2, max", lambda: pyg.GatedGraphConv(h, 2, "max"))
    yield case("ResGatedGraphConv", "", lambda: pyg.ResGatedGraphConv(f, h))
    yield case("ResGatedGraphConv", "edge_dim", lambda: pyg.ResGatedGraphConv(f, h, edge_dim=g), attributed)
    yield case("GINConv", "", lambda: pyg.GINConv(mlp(), train_eps=True))
    yield case("GINConv", "batch norm", lambda: pyg.GINConv(_normed_mlp()))
    yield case("GINEConv", "", lambda: pyg.GINEConv(mlp(), train_eps=True, edge_dim=g), attributed)
    yield case("GINEConv", "aggr mean", lambda: pyg.GINEConv(mlp(), edge_dim=g, aggr="mean"), attributed)
    yield case("MFConv", "", lambda: pyg.MFConv(f, h, max_degree=4))
    yield case("LEConv", "", lambda: pyg.LEConv(f, h), weighted)
    yield case("EdgeConv", "max", lambda: pyg.EdgeConv(mlp(2 * f)))
    yield case("EdgeConv", "mean", lambda: pyg.EdgeConv(mlp(2 * f), "mean"))
    yield case("NNConv", "", lambda: pyg.NNConv(f, h, mlp(g, f * h)), attributed)
    yield case("NNConv", "mean", lambda: pyg.NNConv(f, h, mlp(g, f * h), "mean"), attributed)
    yield case("CGConv", "", lambda: pyg.CGConv(f, g), attributed)
    yield case("CGConv", "batch norm", lambda: pyg.CGConv(f, g, batch_norm=True), attributed)
    yield case("CGConv", "max, no edge features", lambda: pyg.CGConv(f, aggr="max"))
    pna = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]}
    yield case("PNAConv", "", lambda: pyg.PNAConv(f, h, deg=degrees(), **pna))
    yield case(
        "PNAConv",
        "edge_dim, towers, divided",
        lambda: pyg.PNAConv(f, h, deg=degrees(), edge_dim=g, towers=4, divide_input=True, pre_layers=2, **pna),
        attributed,
    )
    linear = {"aggregators": ["sum", "var"], "scalers": ["linear", "inverse_linear"]}
    yield case(
        "PNAConv", "linear scalers, trained", lambda: pyg.PNAConv(f, h, deg=degrees(), train_norm=True, **linear)
    )
    for aggregation in ("softmax", "softmax_sg", "powermean", "add"):
        options = {"learn_t": aggregation == "softmax", "learn_p": aggregation == "powermean", "norm": "layer"}
        yield case("GENConv", f"aggr {aggregation}", functools.partial(pyg.GENConv, f, h, aggregation, **options))
    yield case(
        "GENConv", "edge_dim, msg_norm", lambda: pyg.GENConv(f, h, msg_norm=True, edge_dim=g, norm="layer"), attributed
    )
    yield case("GENConv", "batch norm", lambda: pyg.GENConv(f, h, edge_dim=g), attributed)
    yield case("GeneralConv", "", lambda: pyg.GeneralConv(f, h))
    yield case(
        "GeneralConv", "edge features, both ends", lambda: pyg.GeneralConv(f, h, g, directed_msg=False), attributed
    )
    for kind in ("additive", "dot_product"):
        options = {"attention": True, "attention_type": kind, "heads": 2, "l2_normalize": True, "skip_linear": True}
        yield case(
            "GeneralConv", f"attention {kind}", functools.partial(pyg.GeneralConv, f, h, g, **options), attributed
        )
    yield case("GMMConv", "", lambda: pyg.GMMConv(f, h, dim=3, kernel_size=4), _pseudo)
    yield case("GMMConv", "separate", lambda: pyg.GMMConv(f, h, 3, 4, separate_gaussians=True), _pseudo)
    yield case("FeaStConv", "heads 2", lambda: pyg.FeaStConv(f, h, heads=2))
    yield case("FeaStConv", "self loops off", lambda: pyg.FeaStConv(f, h, heads=2, add_self_loops=False))
    yield case("PointNetConv", "", lambda: pyg.PointNetConv(mlp(f + 3), mlp()), _points)
    yield case("PointNetConv", "self loops off", lambda: pyg.PointNetConv(mlp(f + 3), add_self_loops=False), _points)
    yield case("PPFConv", "", lambda: pyg.PPFConv(mlp(f + 4), mlp()), _oriented_points)
    yield case("PointTransformerConv", "", lambda: pyg.PointTransformerConv(f, h), _points)
    yield case("PointTransformerConv", "nets", lambda: pyg.PointTransformerConv(f, h, mlp(3), mlp()), _points)
    yield case("PointGNNConv", "", lambda: pyg.PointGNNConv(mlp(f, 3), mlp(f + 3), mlp()), _points)
    yield case("MeshCNNConv", "", lambda: pyg.MeshCNNConv(f, h), graph=mesh, single=True)


def _normed_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))


def _pseudo(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.pseudo)


def _points(m: Module, s: Sample) -> Any:
    return m(s.x, s.pos, s.edge_index)


def _oriented_points(m: Module, s: Sample) -> Any:
    return m(s.x, s.pos, s.normal, s.edge_index)
