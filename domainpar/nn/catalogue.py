"""The built-in networks by the name they have on the command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from domainpar.nn.interaction import InteractionNetwork

BUILT_IN: dict[str, Callable[..., InteractionNetwork]] = {
    "interaction": partial(InteractionNetwork, order="edge-first"),
    "interaction-node-first": partial(InteractionNetwork, order="node-first"),
}


def build_model(
    name: str,
    node_features: int,
    edge_features: int,
    *,
    hidden: int,
    graph_iters: int,
    shared_weights: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    products: torch.dtype | None = None,
    recompute_every: int | None = None,
    dropout: float = 0.0,
) -> InteractionNetwork:
    """Build a network; the same bits on every rank.

    Raises:
        ValueError: If there is no network of this name, or it cannot have these sizes.
    """
    if name not in BUILT_IN:
        raise ValueError(f"unknown model {name!r}; built in are {', '.join(BUILT_IN)}.")
    return BUILT_IN[name](
        node_features,
        edge_features,
        hidden=hidden,
        graph_iters=graph_iters,
        shared_weights=shared_weights,
        seed=seed,
        dtype=dtype,
        products=products,
        recompute_every=recompute_every,
        dropout=dropout,
    )
