"""Cases of convolutions that tell types of nodes or edges apart."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch_geometric.nn as pyg
from survey_samples import EDGE_FEATURES, FEATURES, HIDDEN, NUM_TYPES, Sample
from torch import nn

from survey_cases.case import Case, Module, case, typed

_HIT = "hit"
_FORTH, _BACK = (_HIT, "to", _HIT), (_HIT, "from", _HIT)
_METADATA = ([_HIT], [_FORTH, _BACK])


def cases() -> Iterable[Case]:
    """A case for every way to build and to call one of them."""
    f, h, g, r = FEATURES, HIDDEN, EDGE_FEATURES, NUM_TYPES
    for name, conv in (("RGCNConv", pyg.RGCNConv), ("FastRGCNConv", pyg.FastRGCNConv)):
        yield case(name, "", functools.partial(conv, f, h, r), typed)
        yield case(name, "bases", functools.partial(conv, f, h, r, num_bases=2), typed)
        yield case(name, "blocks, sum", functools.partial(conv, f, h, r, num_blocks=4, aggr="sum"), typed)
    yield case("RGCNConv", "max", lambda: pyg.RGCNConv(f, h, r, aggr="max", root_weight=False), typed)
    for mechanism in ("across-relation", "within-relation"):
        make = functools.partial(_rgat, attention_mechanism=mechanism, heads=2)
        yield case("RGATConv", mechanism, make, typed)
    for mod in ("additive", "scaled", "f-additive", "f-scaled"):
        yield case("RGATConv", f"mod {mod}", functools.partial(_rgat, mod=mod), typed)
    many = {"attention_mode": "multiplicative-self-attention", "dim": 2, "heads": 2, "edge_dim": g, "num_bases": 2}
    yield case("RGATConv", "multiplicative, edge_dim, bases", lambda: _rgat(**many), _typed_attributed)
    yield case("FiLMConv", "one relation", lambda: pyg.FiLMConv(f, h))
    yield case("FiLMConv", "relations", lambda: pyg.FiLMConv(f, h, r), typed)
    yield case("SignedConv", "first", lambda: pyg.SignedConv(f, h, first_aggr=True), _signed)
    yield case("SignedConv", "later", lambda: pyg.SignedConv(f // 2, h, first_aggr=False), _signed)
    sizes = {"edge_type_emb_dim": 5, "edge_dim": g, "edge_attr_emb_dim": 6}
    yield case("HEATConv", "", lambda: pyg.HEATConv(f, h, r, r, heads=2, **sizes), _node_and_edge_typed)
    yield case(
        "HEATConv",
        "concat off",
        lambda: pyg.HEATConv(f, h, r, r, 5, g, 6, 2, False),
        _node_and_edge_typed,
    )
    yield case("HGTConv", "", lambda: pyg.HGTConv(f, h, _METADATA, heads=2), _both_ways)
    yield case("HANConv", "", lambda: pyg.HANConv(f, h, _METADATA, heads=2), _both_ways)
    for aggregation in ("sum", "mean", "max", "cat"):
        yield case("HeteroConv", f"SAGE and GATv2, {aggregation}", functools.partial(_hetero, aggregation), _both_ways)
    yield case("HeteroConv", "edges by type", _hetero, _of_types)
    yield case("WLConv", "", pyg.WLConv, _coloured)


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


def _both_ways(m: Module, s: Sample) -> Any:
    """A homogeneous graph as a heterogeneous one: one type of nodes, and each edge again backwards as a second type."""
    return m({_HIT: s.x}, {_FORTH: s.edge_index, _BACK: s.edge_index.flip(0)})[_HIT]


def _of_types(m: Module, s: Sample) -> Any:
    masks = {_FORTH: s.edge_type == 0, _BACK: s.edge_type > 0}
    return m({_HIT: s.x}, {kind: s.edge_index[:, mask] for kind, mask in masks.items()})[_HIT]


def _typed_attributed(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.edge_type, s.edge_attr)


def _signed(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index[:, s.edge_type == 0], s.edge_index[:, s.edge_type > 0])


def _node_and_edge_typed(m: Module, s: Sample) -> Any:
    return m(s.x, s.edge_index, s.node_type, s.edge_type, s.edge_attr)


def _coloured(m: Module, s: Sample) -> Any:
    return m(s.node_type, s.edge_index)
