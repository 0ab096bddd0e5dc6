"""The network of a run, built on stages or a user's own: it scores the edges of a part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from domainpar.nn.heads import EDGE, Head, Readings
from domainpar.parallel.halo import CompleteHalo
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World


class Exactness(NamedTuple):
    """What holds for a network on any number of ranks: the same bits, or results to rounding.

    Attributes:
        bitwise: Whether it is built for the same bits on this device; else its results are the same to rounding.
        problem: Why its bits depend on the ranks nevertheless; None if no reason is known.
    """

    bitwise: bool
    problem: str | None = None


class Differs(ValueError):
    """A network gives different results whole and split. The text names the first layer that differs."""


class Gradients(Protocol):
    """The gradients of a network's parameters, to be summed over tiles and ranks."""

    def rejected_now(self) -> Tensor:
        """Partial gradients so far that were not finite or too large, on this rank; int64 [] on their device."""

    def expect_last_pass(self, transport: Transport) -> None:
        """Announce that the next backward pass is the last before `reduce`, on all ranks of a domain group."""

    def reduce(self, transport: Transport) -> Tensor:
        """Sum over ranks into each parameter's `grad`; returns the invalid partials of all ranks. *Collective*."""


class EdgeClassifier(nn.Module, ABC):
    """Scores the local edges of parts of events; the same parameters on every rank.

    Attributes:
        heads: Its outputs.
        sums: Sums over all ranks in the last forward pass.
        recompute_every: Iterations in a segment that backward computes again; None: all are kept.
        products: Type of products of matrices, if not that of the parameters.
        ways_to_recompute: Possible values of that, from least to most recomputation.
    """

    heads: Sequence[Head] = (EDGE,)
    sums: int = 0
    recompute_every: int | None = None
    products: torch.dtype | None = None

    @property
    def ways_to_recompute(self) -> Sequence[int | None]:
        return (None,)

    def recompute(self, every: int | None) -> None:
        """Keep the input of every K-th iteration, and compute those between again in backward; None: keep all.

        The same bits, and nothing is exchanged twice.

        Raises:
            ValueError: If K is below 1.
        """
        if every is not None and every < 1:
            raise ValueError(f"recompute_every {every} must be at least 1, or None to keep all iterations.")
        self.recompute_every = every

    @property
    def changing(self) -> list[Tensor]:
        """Tensors besides the parameters that a forward pass may change, such as running means."""
        return []

    @abstractmethod
    def forward(self, graph: LocalGraph, halo: CompleteHalo, key: int | None = None) -> Tensor:
        """Logits of all local edges, [num_edges]. *Collective*, forward and backward.

        Args:
            graph: The part.
            halo: Joins the parts.
            key: Of the random numbers of this call, the same on every rank, for training; None: nothing is dropped.
                With one, a network may give the logits of several readouts, [readouts, num_edges], the last one last.
        """

    def read(self, graph: LocalGraph, halo: CompleteHalo, key: int | None = None) -> Readings:
        """The outputs of all heads; arguments are those of `forward`. *Collective*, forward and backward."""
        return Readings(self(graph, halo, key))

    @property
    @abstractmethod
    def layers(self) -> nn.Module:
        """The module whose layers have the names that their author gave them."""

    @property
    def computed(self) -> nn.Module:
        """The module whose layers a forward pass calls."""
        return self.layers

    @abstractmethod
    def gradients(self, over_ranks: bool = False) -> Gradients:
        """The sums of gradients that backward passes fill; made once, before the first of them.

        Args:
            over_ranks: For several ranks: complete sums may be summed over ranks while backward goes on.
        """

    @abstractmethod
    def exactness(self, transport: Transport) -> Exactness:
        """What holds for this network on this machine, the same on every rank. *Collective*."""

    @abstractmethod
    def take_from_root(self, world: World) -> None:
        """Give every rank the tensors of rank 0, if ranks may have made different ones. *Collective*."""

    @abstractmethod
    def verify(self, edge_index: Tensor, x: Tensor, edge_attr: Tensor) -> str:
        """Compare the network whole and split on a small graph.

        Args:
            edge_index: `src` and `dst` of each edge, int64 [2, E].
            x: Node features, float64 [N, node features].
            edge_attr: Edge features, float64 [E, edge features].

        Returns:
            The conclusion, for the user.

        Raises:
            Differs: If the results do, with the first layer.
        """
