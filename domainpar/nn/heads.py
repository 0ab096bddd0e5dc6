"""The outputs of a network: scores of edges, and labels of nodes or whole graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.transport import Transport


class Head(NamedTuple):
    """One output of a network.

    Attributes:
        name: Its name.
        of: Whether it belongs to edges, to nodes or to the graph as a whole.
        columns: Number of values: the number of classes, else 1.
        usual_nodes: For the graph as a whole: the number of nodes of a typical graph, see `pooled`.
    """

    name: str
    of: Literal["edge", "node", "graph"]
    columns: int = 1
    usual_nodes: float = 1.0


EDGE = Head("edge", "edge")


class Readings(NamedTuple):
    """The outputs of a network for a part.

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


def pooled(rows: Tensor, usual_nodes: float, transport: Transport) -> Tensor:
    """Pool rows of all nodes for their graph: the mean of the first half of the columns, plus a sum of the others.

    Means suit quantities that do not grow with a graph, such as a kind of event; sums those that do, such as an energy.
    The same bits on any number of ranks. *Collective*.

    Args:
        rows: Of the nodes that this rank owns, [num_owned, 2 columns].
        usual_nodes: What sums are divided by.
        transport: Joins the ranks that share the graph.

    Returns:
        [columns], the same on every rank.
    """
    of_graph: Tensor = _Pooled.apply(rows, usual_nodes, transport)  # type: ignore[no-untyped-call]
    return of_graph


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, usual_nodes: float, transport: Transport) -> Tensor:
        sums, columns = IntegerSums(rows.shape[1] + 1, rows.device), rows.shape[1] // 2
        sums.add_rows(torch.cat([rows.to(torch.float64), rows.new_ones(len(rows), 1, dtype=torch.float64)], dim=1))
        sums.reduce(transport)
        total = sums.total()
        ctx.rows, ctx.divisors = len(rows), torch.stack([total[-1].clamp_min(1.0), total.new_full((), usual_nodes)])
        of_graph = total[:columns] / ctx.divisors[0] + total[columns:-1] / ctx.divisors[1]
        # A number that is not finite was left out of the sums, and must appear in the result.
        return torch.where(sums.rejected_now() > 0, torch.nan, of_graph).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (of_graph,) = grads
        of_row = (of_graph.to(torch.float64) / ctx.divisors[:, None]).to(of_graph.dtype).flatten()
        return of_row.expand(ctx.rows, -1).contiguous(), None, None
