"""Standardisation of input features by constants that belong to a network."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from domainpar.nn.standard import Standard
from domainpar.parallel.local import LocalGraph

MOST_DEVIATIONS = 5.0
"""Standardised features are cut off here, so that one outlier does not dominate."""


class Standardise(nn.Module):
    """Features as (feature - mean) / scale within -5 and 5, of owned nodes, ghosts and edges alike.

    Each number is computed alone, in the type of the parameters, so that no bit depends on where its row is. The
    constants are buffers: a checkpoint holds them.
    """

    node_mean: Tensor
    node_scale: Tensor
    edge_mean: Tensor
    edge_scale: Tensor

    def __init__(self, standard: Standard) -> None:
        super().__init__()
        for name, constants in standard._asdict().items():
            self.register_buffer(name, torch.tensor(constants, dtype=torch.float64))

    def forward(self, graph: LocalGraph) -> LocalGraph:
        """The part with its features standardised."""
        return replace(
            graph,
            features=standardised(graph.features, self.node_mean, self.node_scale),
            edge_features=standardised(graph.edge_features, self.edge_mean, self.edge_scale),
        )


def standardised(features: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Features by these constants, each number alone."""
    return torch.clamp((features - mean) / scale, -MOST_DEVIATIONS, MOST_DEVIATIONS)
