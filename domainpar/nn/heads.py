"""What a network is read for: scores of edges, and numbers of nodes and of whole graphs beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.transport import Transport


class Head(NamedTuple):
    """One thing that a network is read for.

    Attributes:
        name: Its name.
        of: Whether edges, nodes or the graph as a whole have it.
        columns: Numbers of each: one for each class, else 1.
    """

    name: str
    of: Literal["edge", "node", "graph"]
    columns: int = 1


EDGE = Head("edge", "edge")


class Readings(NamedTuple):
    """What a network says of a part.

    Attributes:
        edges: Logits of its local edges, [num_edges] or those of several readouts, [readouts, num_edges]; None if it
            has no head of edges.
        others: By the name of a head: of nodes [num_owned, columns], of the graph [columns], the same on every rank
            that shares it; there a gradient counts once, and is to be the same on every rank.
    """

    edges: Tensor | None
    others: Mapping[str, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*([] if self.edges is None else [self.edges]), *self.others.values()]


def mean_over_nodes(rows: Tensor, transport: Transport) -> Tensor:
    """The mean of rows of all nodes of a graph, [columns]: the same bits on any number of ranks. *Collective*.

    Args:
        rows: Of the nodes that this rank owns, [num_owned, columns].
        transport: Joins the ranks that share the graph.
    """
    mean: Tensor = _MeanOverNodes.apply(rows, transport)  # type: ignore[no-untyped-call]
    return mean


class _MeanOverNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transport: Transport) -> Tensor:
        sums = IntegerSums(rows.shape[1] + 1, rows.device)
        sums.add_rows(torch.cat([rows.to(torch.float64), rows.new_ones(len(rows), 1, dtype=torch.float64)], dim=1))
        sums.reduce(transport)
        *_, count = total = sums.total()
        ctx.rows, ctx.count = len(rows), count.clamp_min(1.0)
        mean = total[:-1] / ctx.count
        # A number that is not finite was left out of the sums, and must be seen.
        return torch.where(sums.rejected_now() > 0, torch.nan, mean).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (of_mean,) = grads
        return (of_mean.to(torch.float64) / ctx.count).to(of_mean.dtype).expand(ctx.rows, -1).contiguous(), None
