"""The options of a network in one record, from flags or from a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from domainpar.nn.heads import EDGE, Head
from domainpar.nn.standard import Standard

Aggregate = Literal["sum", "mean", "root"]
"""Sums at nodes as they are, divided by the number of edges, or by its square root."""

Order = Literal["edge-first", "node-first"]
Activation = Literal["relu", "silu", "tanh"]
Norm = Literal["layer", "batch", "graph", "none"]
Readouts = Literal["last", "all"]


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The options of a network. Interaction networks have all of them, published ones and users' own have few.

    Attributes:
        hidden: Width of states; on stages a multiple of 16.
        graph_iters: Iterations or layers, at least 1.
        order: `edge-first` or `node-first`: what an iteration updates first.
        shared_weights: One edge and one node net for all iterations, instead of one each.
        layers: Layers of each MLP, without the head's last.
        seed: Seed of the initial weights: a function of it alone, on every rank.
        dtype: Type of the parameters, float32 or float64.
        products: Type of edge states and of the products that make them, if not that of the parameters: torch.bfloat16.
            Node states, norms and sums keep the parameters' type.
        recompute_every: Keep the states of every K-th iteration only, and compute those between again in backward;
            None: keep all.
        dropout: Probability with which each number of a hidden layer is dropped in training.
        residual: Update states instead of replacing them.
        aggregate: How sums at nodes are scaled: `sum` not at all, `mean` by 1 / degree, `root` by 1 / sqrt(degree).
        activation: Of hidden layers: `relu`, `silu` or `tanh`.
        norm: Before each activation. `layer`: over the columns of a row. `batch`: over the rows of an event in
            training, by running means else. `graph`: over those of the event. `none`.
        readouts: In training, logits of edges after the `last` iteration, or after `all` of them.
        heads: What it is read for.
        standard: Constants that standardise features; None: features are taken as they are.
    """

    hidden: int = 64
    graph_iters: int = 3
    order: Order = "edge-first"
    shared_weights: bool = False
    layers: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.float32
    products: torch.dtype | None = None
    recompute_every: int | None = None
    dropout: float = 0.0
    residual: bool = True
    aggregate: Aggregate = "root"
    activation: Activation = "relu"
    norm: Norm = "layer"
    readouts: Readouts = "last"
    heads: tuple[Head, ...] = (EDGE,)
    standard: Standard | None = None


DEFAULTS = NetworkOptions()
