"""The bitwise rules, each with the plain code that one would write without it, put in its place for a while.

Only the benchmark does this. The numbers of the rules are those in the docstrings of `domainpar.nn.stages` and
`domainpar.parallel.integer_sums`, and of the design behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from domainpar.nn import gradients, mlp, stages
from domainpar.parallel.local import EdgeTile, LocalGraph, NodeTile
from domainpar.parallel.transport import Transport
from domainpar.training import loop, loss


class FloatSums:
    """Takes the place of `IntegerSums`: partials are added in the precision they come in, over ranks as well."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros(size, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, partials: Tensor, start: int = 0) -> None:
        if self._sums.dtype != partials.dtype:
            self._sums = self._sums.to(partials.dtype)
        self._sums[start : start + partials.numel()] += partials.detach().flatten()

    def reduce(self, transport: Transport) -> None:
        # No transport adds floats, so they are gathered and added here, rank after rank.
        if transport.size == 1:
            return
        gathered = transport.all_gather(self._sums.numpy().tobytes())
        self._sums = sum(torch.frombuffer(bytearray(part), dtype=self._sums.dtype) for part in gathered)  # type: ignore

    def total(self) -> Tensor:
        return self._sums.to(torch.float64)

    @property
    def rejected(self) -> int:
        return int((~torch.isfinite(self._sums)).sum())

    def clear(self) -> None:
        self._sums.zero_()


class DirectSums:
    """Takes the place of `_EndSums`: edge rows are added to their `src` one by one, without partials of tiles."""

    def __init__(self, graph: LocalGraph, width: int, like: Tensor) -> None:
        self._graph = graph
        self._at_dst = like.new_zeros(graph.plan.num_local, width)
        self._at_src = like.new_zeros(graph.plan.num_local, width)

    def add(self, tile: EdgeTile, at_dst: Tensor, at_src: Tensor) -> None:
        if self._at_dst.shape[1] == 0:
            return
        if tile.owned:
            self._at_dst.index_add_(0, self._graph.dst[tile.edges], at_dst)
        self._at_src.index_add_(0, self._graph.src[tile.edges], at_src)

    def finish(self) -> tuple[Tensor, Tensor]:
        return self._at_dst, self._at_src


def plain_edge_block(nodes: Tensor, edges: Tensor, graph: LocalGraph, tile: EdgeTile) -> Tensor:
    """One tile's edge inputs, unpadded; a view of the table where it is the only one."""
    if nodes.shape[1] == 0:
        return edges.detach()[tile.edges]
    ends = [nodes.index_select(0, graph.src[tile.edges]), nodes.index_select(0, graph.dst[tile.edges])]
    return torch.cat([*ends, edges[tile.edges]], dim=1)


def plain_node_block(tables: Sequence[Tensor], tile: NodeTile) -> Tensor:
    """One tile's node inputs, unpadded; a view of the table where it is the only one."""
    if len(tables) == 1:
        return tables[0].detach()[tile.rows]
    return torch.cat([table[tile.rows] for table in tables], dim=1)


def plain_loss(logits: Tensor, graph: LocalGraph, weights: Tensor, step_weight: float, loss_sum: Any) -> Tensor:
    """Cross-entropy and its gradient on the whole table at once."""
    assert graph.label is not None
    z, y = logits.detach(), graph.label.to(logits.dtype)
    owned = torch.from_numpy(graph.plan.edge_owned).to(z.dtype)
    terms = F.binary_cross_entropy_with_logits(z, y, reduction="none") * weights * owned
    loss_sum.add(terms.sum().reshape(1) / step_weight)
    return (torch.sigmoid(z) - y) * weights / step_weight


def _float_sums() -> list[Any]:
    return [patch.object(gradients, "IntegerSums", FloatSums), patch.object(loop, "IntegerSums", FloatSums)]


def _no_padding() -> list[Any]:
    return [
        *(patch.object(module, "ROWS", 1) for module in (mlp, stages, loss)),
        *(patch.object(module, "COLUMNS", 1) for module in (mlp, stages)),
        patch.object(stages, "_edge_block", plain_edge_block),
        patch.object(stages, "_node_block", plain_node_block),
    ]


def _direct_sums() -> list[Any]:
    return [patch.object(stages, "_EndSums", DirectSums)]


def _whole_loss() -> list[Any]:
    return [patch.object(loop, "edge_loss", plain_loss)]


RULES: dict[str, Callable[[], list[Any]]] = {
    "integer sums": _float_sums,
    "padded blocks": _no_padding,
    "partials at src": _direct_sums,
    "loss by tiles": _whole_loss,
}
"""What can be switched off, and how."""


@contextmanager
def without(rules: Sequence[str]) -> Iterator[None]:
    """Inside, the package computes without these rules, in all threads. Networks and trainers must be made inside."""
    # patch.object raises where the package has changed and there is nothing of that name left to replace.
    with ExitStack() as replaced:
        for rule in rules:
            for replacement in RULES[rule]():
                replaced.enter_context(replacement)
        yield
