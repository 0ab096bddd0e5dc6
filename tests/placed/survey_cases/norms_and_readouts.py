"""Cases of norms, of pooling, and of aggregations as readouts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch_geometric.nn as pyg
from survey_layers import mlp
from survey_samples import EDGE_FEATURES, FEATURES, HIDDEN, NUM_GRAPHS, NUM_TYPES, Sample
from torch import Tensor, nn
from torch_geometric.nn import aggr as pyg_aggr
from torch_geometric.nn import norm as pyg_norm

from survey_cases.case import (
    Case,
    Module,
    batched,
    case,
    degrees,
    edges_only,
    nodes_only,
    one_event,
)


def norms() -> Iterable[Case]:
    """Norms of nodes, of events and of graphs in a batch."""
    f = FEATURES
    yield case("BatchNorm", "", lambda: pyg_norm.BatchNorm(f), nodes_only)
    yield case("BatchNorm", "eval", lambda: pyg_norm.BatchNorm(f).eval(), nodes_only)
    untracked = functools.partial(pyg_norm.BatchNorm, f, affine=False, track_running_stats=False)
    yield case("BatchNorm", "untracked, not affine", untracked, nodes_only)
    yield case("BatchNorm", "one row allowed", lambda: pyg_norm.BatchNorm(f, allow_single_element=True), nodes_only)
    yield case("BatchNorm", "edges", lambda: pyg_norm.BatchNorm(EDGE_FEATURES), edges_only)
    yield case("BatchNorm1d", "torch's", lambda: nn.BatchNorm1d(f), nodes_only)
    yield case("BatchNorm1d", "torch's, of all so far", lambda: nn.BatchNorm1d(f, momentum=None), nodes_only)
    yield case("LayerNorm", "torch's", lambda: nn.LayerNorm(f), nodes_only)
    yield case("HeteroBatchNorm", "", lambda: pyg_norm.HeteroBatchNorm(f, NUM_TYPES), _by_node_type)
    yield case("HeteroBatchNorm", "eval", lambda: pyg_norm.HeteroBatchNorm(f, NUM_TYPES).eval(), _by_node_type)
    yield case("HeteroLayerNorm", "", lambda: pyg_norm.HeteroLayerNorm(f, NUM_TYPES), _by_node_type)
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
        yield case(name, f"{also}no batch vector", make, nodes_only)
        yield case(name, f"{also}one event", make, one_event)
        yield case(name, f"{also}three graphs", make, batched)
    for learned in (False, True):
        make_scaled = functools.partial(pyg_norm.MessageNorm, learn_scale=learned)
        yield case("MessageNorm", "learned" if learned else "", make_scaled, _message_and_x)
    yield case("DiffGroupNorm", "", lambda: pyg_norm.DiffGroupNorm(f, groups=3), nodes_only)


def _by_node_type(m: Module, s: Sample) -> Any:
    return m(s.x, s.node_type)


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


def pools() -> Iterable[Case]:
    """The three pooling functions."""
    for pool in (pyg.global_add_pool, pyg.global_mean_pool, pyg.global_max_pool):
        make = functools.partial(Pooled, pool)
        name = pool.__name__
        yield case(name, "no batch vector", make, nodes_only)
        yield case(name, "one event", make, one_event)
        yield case(name, "three graphs", make, batched)
        yield case(name, "three graphs, number given", make, _number_known)
        yield case(name, "edges", functools.partial(Pooled, pool, EDGE_FEATURES), edges_only)
        of_edges = functools.partial(Pooled, pool, EDGE_FEATURES)
        yield case(name, "edges of three graphs", of_edges, _edges_of_graphs)


def readouts() -> Iterable[Case]:
    """Aggregations over the nodes of an event, or of each of three graphs."""
    f, h = FEATURES, HIDDEN
    scalers = ["identity", "amplification", "inverse_linear"]
    plain: list[tuple[str, str, Callable[[], Module]]] = [
        ("SumAggregation", "", pyg_aggr.SumAggregation),
        ("MeanAggregation", "", pyg_aggr.MeanAggregation),
        ("MaxAggregation", "", pyg_aggr.MaxAggregation),
        ("MinAggregation", "", pyg_aggr.MinAggregation),
        ("MulAggregation", "", pyg_aggr.MulAggregation),
        ("VarAggregation", "", pyg_aggr.VarAggregation),
        ("VarAggregation", "semi-gradient", lambda: pyg_aggr.VarAggregation(semi_grad=True)),
        ("StdAggregation", "", pyg_aggr.StdAggregation),
        ("SoftmaxAggregation", "", lambda: pyg_aggr.SoftmaxAggregation(learn=True, channels=f)),
        ("SoftmaxAggregation", "semi-gradient", lambda: pyg_aggr.SoftmaxAggregation(t=0.5, semi_grad=True)),
        ("PowerMeanAggregation", "", lambda: pyg_aggr.PowerMeanAggregation(p=2.0, learn=True)),
        ("MedianAggregation", "", pyg_aggr.MedianAggregation),
        ("QuantileAggregation", "", lambda: pyg_aggr.QuantileAggregation([0.25, 0.7])),
        ("MultiAggregation", "", lambda: pyg_aggr.MultiAggregation(["mean", "max", "std"])),
        ("DegreeScalerAggregation", "", lambda: pyg_aggr.DegreeScalerAggregation(["mean"], scalers, degrees())),
        ("VariancePreservingAggregation", "", pyg_aggr.VariancePreservingAggregation),
        ("AttentionalAggregation", "", lambda: pyg_aggr.AttentionalAggregation(mlp(f, 1), mlp())),
        ("DeepSetsAggregation", "", lambda: pyg_aggr.DeepSetsAggregation(mlp(), mlp())),
        ("Set2Set", "", lambda: pyg_aggr.Set2Set(f, processing_steps=3)),
    ]
    for name, variant, make in plain:
        also = f"{variant}, " if variant else ""
        yield case(name, f"{also}one event", make, one_event)
        yield case(name, f"{also}three graphs", make, batched)
    equilibrium = functools.partial(pyg_aggr.EquilibriumAggregation, f, h, [8], grad_iter=2)
    yield case("EquilibriumAggregation", "one event", equilibrium, one_event, single=True)
    yield case("EquilibriumAggregation", "three graphs", equilibrium, batched, single=True)
    longest = 60
    dense: list[tuple[str, Callable[[], Module]]] = [
        ("LSTMAggregation", lambda: pyg_aggr.LSTMAggregation(f, h)),
        ("GRUAggregation", lambda: pyg_aggr.GRUAggregation(f, h)),
        ("MLPAggregation", lambda: pyg_aggr.MLPAggregation(f, h, longest, num_layers=1)),
        ("LCMAggregation", lambda: pyg_aggr.LCMAggregation(f, h)),
        ("PatchTransformerAggregation", lambda: pyg_aggr.PatchTransformerAggregation(f, h, 4, 8)),
        ("SortAggregation", lambda: pyg_aggr.SortAggregation(k=5)),
        ("SetTransformerAggregation", lambda: pyg_aggr.SetTransformerAggregation(f, heads=2)),
        ("GraphMultisetTransformer", lambda: pyg_aggr.GraphMultisetTransformer(f, k=3, heads=2)),
    ]
    for name, make in dense:
        yield case(name, "one event", make, one_event)
        yield case(name, "three graphs", make, batched)
