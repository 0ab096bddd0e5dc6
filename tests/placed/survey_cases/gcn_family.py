"""Cases of convolutions like GCN: messages are states with a weight, mostly from the degrees of both ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch_geometric.nn as pyg
from survey_samples import EDGE_FEATURES, FEATURES, HIDDEN, Sample, undirected
from torch import nn

from survey_cases.case import Case, Module, attributed, case, weighted


def cases() -> Iterable[Case]:
    """A case for every way to build and to call one of them."""
    f, h = FEATURES, HIDDEN
    yield case("SimpleConv", "", pyg.SimpleConv, weighted)
    yield case("SimpleConv", "mean, self loop", lambda: pyg.SimpleConv("mean", combine_root="self_loop"), weighted)
    yield case("SimpleConv", "max, cat", lambda: pyg.SimpleConv("max", combine_root="cat"))
    yield case("GCNConv", "", lambda: pyg.GCNConv(f, h))
    yield case("GCNConv", "edge weights", lambda: pyg.GCNConv(f, h), weighted)
    yield case("GCNConv", "improved, edge weights", lambda: pyg.GCNConv(f, h, improved=True), weighted)
    yield case("GCNConv", "self loops off", lambda: pyg.GCNConv(f, h, add_self_loops=False), weighted)
    yield case("GCNConv", "normalize off", lambda: pyg.GCNConv(f, h, normalize=False), weighted)
    yield case("GCNConv", "cached", lambda: pyg.GCNConv(f, h, cached=True))
    yield case("GCNConv", "target to source", lambda: pyg.GCNConv(f, h, flow="target_to_source"), weighted)
    yield case("GCNConv", "decomposed", lambda: pyg.GCNConv(f, h, decomposed_layers=2))
    yield case("GCNConv", "symmetric graph", lambda: pyg.GCNConv(f, h), weighted, graph=undirected)
    for normalization in ("sym", "rw"):
        make = functools.partial(pyg.ChebConv, f, h, 3, normalization)
        yield case("ChebConv", f"K 3, {normalization}", make, weighted)
    yield case("ChebConv", "K 3, no normalization", lambda: pyg.ChebConv(f, h, 3, None), _cheb_scaled)
    yield case("ChebConv", "K 1", lambda: pyg.ChebConv(f, h, 1), weighted)
    yield case("ChebConv", "K 3, symmetric graph", lambda: pyg.ChebConv(f, h, 3), weighted, graph=undirected)
    yield case("ChebConv", "K 3, lambda_max per graph", lambda: pyg.ChebConv(f, h, 3), _cheb_batched)
    yield case("TAGConv", "", lambda: pyg.TAGConv(f, h), weighted)
    yield case("TAGConv", "normalize off", lambda: pyg.TAGConv(f, h, K=2, normalize=False), weighted)
    yield case("ARMAConv", "", lambda: pyg.ARMAConv(f, h), weighted)
    yield case("ARMAConv", "stacks 2, layers 3", lambda: pyg.ARMAConv(f, h, 2, 3), weighted)
    yield case("ARMAConv", "shared weights", lambda: pyg.ARMAConv(f, h, 2, 3, shared_weights=True), weighted)
    yield case("ARMAConv", "dropout", lambda: pyg.ARMAConv(f, h, 2, 2, dropout=0.5), weighted, random=True)
    yield case("SGConv", "K 2", lambda: pyg.SGConv(f, h, K=2), weighted)
    yield case("SGConv", "K 2, cached", lambda: pyg.SGConv(f, h, K=2, cached=True))
    yield case("SSGConv", "K 3", lambda: pyg.SSGConv(f, h, alpha=0.1, K=3), weighted)
    yield case("APPNP", "K 5", lambda: pyg.APPNP(5, 0.1), weighted)
    yield case("APPNP", "K 5, normalize off", lambda: pyg.APPNP(5, 0.1, normalize=False), weighted)
    yield case("APPNP", "K 5, dropout", lambda: pyg.APPNP(5, 0.1, dropout=0.5), random=True)
    yield case("LGConv", "", pyg.LGConv, weighted)
    yield case("LGConv", "normalize off", lambda: pyg.LGConv(normalize=False), weighted)
    yield case("GCN2Conv", "", lambda: pyg.GCN2Conv(f, 0.1, 0.5, 2), _with_start_weighted)
    yield case("GCN2Conv", "two weights", lambda: pyg.GCN2Conv(f, 0.1, 0.5, 2, shared_weights=False), _with_start)
    yield case("FAConv", "", lambda: pyg.FAConv(f), _with_start)
    yield case("FAConv", "normalize off", lambda: pyg.FAConv(f, normalize=False), _with_start_weighted)
    yield case("MixHopConv", "", lambda: pyg.MixHopConv(f, h, powers=[0, 1, 2]), weighted)
    yield case("ClusterGCNConv", "", lambda: pyg.ClusterGCNConv(f, h, diag_lambda=0.1), single=True)
    yield case("ClusterGCNConv", "no lambda", lambda: pyg.ClusterGCNConv(f, h), single=True)
    yield case("PDNConv", "", lambda: pyg.PDNConv(f, h, EDGE_FEATURES, 8), attributed)
    yield case("PDNConv", "normalize off", lambda: pyg.PDNConv(f, h, EDGE_FEATURES, 8, normalize=False), attributed)
    yield case("WLConvContinuous", "", pyg.WLConvContinuous, weighted)
    yield case("AntiSymmetricConv", "GCN inside", lambda: pyg.AntiSymmetricConv(f, num_iters=2))
    yield case(
        "AntiSymmetricConv", "SAGE inside", lambda: pyg.AntiSymmetricConv(f, phi=pyg.SAGEConv(f, f), num_iters=2)
    )
    for inside, conv in (("GCN", pyg.GCNConv), ("SAGE", pyg.SAGEConv), ("GATv2", pyg.GATv2Conv)):
        yield case("DirGNNConv", f"{inside} inside", functools.partial(_both_directions, conv))
    heads = {"num_heads": 4, "num_bases": 2}
    yield case("EGConv", "symnorm", lambda: pyg.EGConv(f, h, **heads))
    yield case("EGConv", "symnorm, max, std", lambda: pyg.EGConv(f, h, ["symnorm", "max", "std"], **heads))
    yield case("EGConv", "mean, min", lambda: pyg.EGConv(f, h, ["mean", "min"], **heads))
    off = {**heads, "add_self_loops": False}
    yield case("EGConv", "sum, var, self loops off", lambda: pyg.EGConv(f, h, ["sum", "var"], **off))


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
