"""Cases of convolutions with attention, and of those on hyperedges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch_geometric.nn as pyg
from survey_layers import mlp
from survey_samples import EDGE_FEATURES, FEATURES, HIDDEN, Sample
from torch import nn

from survey_cases.case import Case, Module, attributed, case, with_edge_attr


def cases() -> Iterable[Case]:
    """A case for every way to build and to call one of them."""
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
            yield case(name, variant, functools.partial(conv, f, h, **options))
        for fill in ("mean", "max", 0.5):
            make = functools.partial(conv, f, h, edge_dim=g, fill_value=fill)
            yield case(name, f"edge_dim, loops filled with {fill}", make, attributed)
        bare = functools.partial(conv, f, h, edge_dim=g, add_self_loops=False)
        yield case(name, "edge_dim, self loops off", bare, attributed)
        yield case(name, "dropout", functools.partial(conv, f, h, dropout=0.5), random=True)
        yield case(name, "attention of edges", functools.partial(conv, f, h, add_self_loops=False), _alpha)
    yield case("GATv2Conv", "shared weights", lambda: pyg.GATv2Conv(f, h, share_weights=True))
    for variant, options in (
        ("", {}),
        ("heads 4, beta", {"heads": 4, "beta": True}),
        ("heads 2, concat off", {"heads": 2, "concat": False}),
        ("no root weight", {"root_weight": False}),
    ):
        yield case("TransformerConv", variant, functools.partial(pyg.TransformerConv, f, h, **options))
    edged = functools.partial(pyg.TransformerConv, f, h, 2, edge_dim=g)
    yield case("TransformerConv", "edge_dim", edged, attributed)
    yield case("TransformerConv", "dropout", lambda: pyg.TransformerConv(f, h, dropout=0.5), random=True)
    yield case("AGNNConv", "", pyg.AGNNConv)
    yield case("AGNNConv", "self loops off", lambda: pyg.AGNNConv(add_self_loops=False))
    for kind in ("MX", "SD"):
        make = functools.partial(pyg.SuperGATConv, f, h, heads=2, attention_type=kind)
        yield case("SuperGATConv", f"{kind}, eval", functools.partial(_evaluating, make))
        yield case("SuperGATConv", f"{kind}, training", make)
        yield case("SuperGATConv", f"{kind}, loss of given edges", make, _attention_loss)
    for variant, options in (
        ("GINE inside, norm off", {"norm": None}),
        ("GINE inside, layer norm", {"norm": "layer_norm", "heads": 4}),
        ("GINE inside, batch norm", {}),
        ("GINE inside, performer", {"norm": None, "attn_type": "performer"}),
    ):
        yield case("GPSConv", variant, functools.partial(_gps, **options), with_edge_attr)
    yield case("GPSConv", "three graphs", _gps, _gps_batched)
    yield case("DNAConv", "", lambda: pyg.DNAConv(f, heads=2, groups=2), _layers_of_states)
    yield case("HypergraphConv", "", lambda: pyg.HypergraphConv(f, h), _neighbourhoods)
    yield case("HypergraphConv", "number left open", lambda: pyg.HypergraphConv(f, h))
    for mode in ("node", "edge"):
        attended = functools.partial(pyg.HypergraphConv, f, h, use_attention=True, attention_mode=mode, heads=2)
        yield case("HypergraphConv", f"attention {mode}", attended, _hyperedges)


def _evaluating(make: Callable[[], Module]) -> nn.Module:
    module: nn.Module = make().eval()
    return module


def _alpha(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, return_attention_weights=True)[1][1]


def _gps(**options: Any) -> nn.Module:
    inside = pyg.GINEConv(mlp(), edge_dim=EDGE_FEATURES)
    layer: nn.Module = pyg.GPSConv(FEATURES, inside, **options)
    return layer


def _gps_batched(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.batch, edge_attr=s.edge_attr)


def _layers_of_states(m: Module, s: Sample) -> Any:
    return m(torch.stack([s.x, s.x.flip(-1)], dim=1), s.edge_index)


def _neighbourhoods(m: Module, s: Sample) -> Any:
    """Edges as an incidence: node `src` belongs to the hyperedge numbered `dst`."""
    return m(s.x, s.edge_index, num_edges=s.x.size(0))


def _attention_loss(m: Module, s: Sample) -> Any:
    m(s.x, s.edge_index, neg_edge_index=s.edge_index.flip(0))
    return m.get_attention_loss()


def _hyperedges(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.edge_weight.new_ones(s.x.size(0)), s.x.flip(-1), s.x.size(0))
