"""Cases of torch_geometric's models, and of modules that are made of layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch_geometric.nn as pyg
from survey_layers import Corrected, EdgeClassifier, Jumping, Propagated, SharedLayer, VirtualNode
from survey_samples import EDGE_FEATURES, FEATURES, HIDDEN, Sample
from torch import nn
from torch_geometric.nn import norm as pyg_norm
from torch_geometric.nn.models.schnet import InteractionBlock

from survey_cases.case import (
    DEGREES,
    Case,
    Module,
    attributed,
    batched,
    case,
    nodes_only,
    weighted,
    with_edge_attr,
)

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
            "deg": torch.tensor(DEGREES),
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


def basic_gnns() -> Iterable[Case]:
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
            # Of a bias before a norm that subtracts means: 1.2e-12 was seen on an AMD Zen 4.
            cancels = 4.0 if norm_name == "mean subtraction" else 1.0
            yield case(name, variant, make, random=dropped > 0, cancels=cancels)


def _basic_gnn(
    model: Callable[..., Module], jump: str | None, norm: str | Callable[[], Module] | None, **options: Any
) -> nn.Module:
    gnn: nn.Module = model(FEATURES, HIDDEN, 3, jk=jump, norm=norm() if callable(norm) else norm, **options)
    return gnn


def _weighted_by_name(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, edge_weight=s.edge_weight)


def _three_graphs(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, batch=s.batch)


def other_gnns() -> Iterable[Case]:
    """Edge weights and features, other widths, and norms of three graphs."""
    f, h = FEATURES, HIDDEN
    yield case("GCN", "edge weights, out_channels", lambda: pyg.GCN(f, h, 3, 5), _weighted_by_name)
    yield case("GAT", "edge_dim", lambda: pyg.GAT(f, h, 3, edge_dim=EDGE_FEATURES), with_edge_attr)
    pna = dict(_KINDS[5][2], edge_dim=EDGE_FEATURES)
    yield case("PNA", "edge_dim", lambda: pyg.PNA(f, h, 3, **pna), with_edge_attr)
    first = functools.partial(pyg.GraphSAGE, f, h, 3, norm="batch_norm", act_first=True)
    yield case("GraphSAGE", "activation before the norm", first)
    yield case("GraphSAGE", "norm batch, eval", lambda: first().eval())
    for norm in ("graph_norm", "layer_norm", "pair_norm"):
        yield case("GIN", f"norm {norm}, three graphs", functools.partial(pyg.GIN, f, h, 3, norm=norm), _three_graphs)


def with_shapes_of_their_own() -> Iterable[Case]:
    """Models that pool, keep a row for each node, or attend over all of them."""
    f, h = FEATURES, HIDDEN
    yield case("LINKX", "", lambda: pyg.LINKX(60, f, h, 5, 2))
    yield case(
        "SchNet's InteractionBlock", "given edges", lambda: InteractionBlock(f, EDGE_FEATURES, f, 10.0), _by_distance
    )
    yield case("AttentiveFP", "", lambda: pyg.AttentiveFP(f, h, 5, EDGE_FEATURES, 2, 2), _attentive)
    yield case("GraphUNet", "", lambda: pyg.GraphUNet(f, h, 5, 2))
    yield case("LabelPropagation", "", Propagated, _of_known)
    yield case("LabelPropagation", "edge weights", Propagated, _of_known_weighted)
    yield case("CorrectAndSmooth", "", Corrected, _of_known)
    yield case("CorrectAndSmooth", "scale not found", functools.partial(Corrected, False), _of_known)


def _of_known(m: Module, s: Sample) -> Any:
    return m(s.x, s.node_type < 2, s.edge_index)


def _of_known_weighted(m: Module, s: Sample) -> Any:
    return m(s.x, s.node_type < 2, s.edge_index, s.edge_weight / 10)


def _by_distance(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.edge_weight, s.edge_attr)


def _attentive(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.edge_attr, s.batch)


def made_of_layers() -> Iterable[Case]:
    """What is built of layers otherwise, of torch_geometric and as users write it."""
    f, h = FEATURES, HIDDEN
    yield case("Sequential", "", _sequential, weighted)
    yield case("Sequential", "to the event's score", _sequential_readout, _plain_batched)
    for mode in ("cat", "max", "lstm"):
        yield case("JumpingKnowledge", mode, functools.partial(Jumping, mode))
    for block in ("res+", "res", "dense", "plain"):
        yield case("DeepGCNLayer", block, functools.partial(_deep, block, _node_norm))
    yield case("DeepGCNLayer", "res+, batch norm", lambda: _deep("res+", lambda: nn.BatchNorm1d(f)))
    yield case("SharedLayer", "", SharedLayer)
    yield case("VirtualNode", "", VirtualNode, _with_event)
    yield case("EdgeClassifier", "", EdgeClassifier, attributed)
    yield case("MLP", "norm batch", lambda: pyg.MLP([f, h, 5], norm="batch_norm"), nodes_only)
    yield case("MLP", "norm graph", lambda: pyg.MLP([f, h, 5], norm="graph_norm"), batched)


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
