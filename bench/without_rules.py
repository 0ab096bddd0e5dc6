"""The bitwise rules, each with the plain code that one would write without it, put in its place for a while.

Only the benchmark does this. The rules are those that the docstrings of `domainpar.nn.microkernel`,
`domainpar.nn.tilewise` and `domainpar.parallel.integer_sums` speak of. Tables are of float32 or float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from domainpar.nn import blocks, gradients, tilewise
from domainpar.nn.kernels import Ends, FloatTable, Sums
from domainpar.parallel.local import EdgeTile, LocalGraph
from domainpar.parallel.transport import Transport
from domainpar.training import loop, record


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

    def add_rows(self, partials: Tensor, start: int = 0) -> None:
        self.add(partials.sum(0), start)

    def reduce(self, transport: Transport) -> None:
        # No transport adds floats, so they are gathered and added here, rank after rank.
        if transport.size == 1:
            return
        gathered = transport.all_gather(self._sums.numpy().tobytes())
        self._sums = sum(torch.frombuffer(bytearray(part), dtype=self._sums.dtype) for part in gathered)  # type: ignore

    def total(self) -> Tensor:
        return self._sums.to(torch.float64, copy=True)  # `clear` is called while gradients are views of it

    @property
    def rejected(self) -> int:
        return int((~torch.isfinite(self._sums)).sum())

    def clear(self) -> None:
        self._sums.zero_()


def library_multiply(
    rows: FloatTable, first: int, count: int, weight: FloatTable, out: FloatTable, out_first: int, add: bool
) -> None:
    """Takes the place of `multiply`: a library's product, whose order of sums may depend on the number of rows."""
    into = torch.from_numpy(out[out_first : out_first + count])
    left = torch.from_numpy(rows[first : first + count])
    torch.addmm(into, left, torch.from_numpy(weight), beta=int(add), out=into)


def library_outer(
    rows: FloatTable, first: int, gradient: FloatTable, gradient_first: int, count: int, out: FloatTable
) -> None:
    """Takes the place of `outer`, likewise."""
    left, right = rows[first : first + count].T, gradient[gradient_first : gradient_first + count]
    into = torch.from_numpy(out)
    torch.addmm(into, torch.from_numpy(left), torch.from_numpy(right), out=into)


class DirectSums(tilewise._AtEnds):
    """Edge rows are added to their `src` one by one, in the order in which tiles are computed, without partials."""

    def __init__(self, graph: LocalGraph, width: int, dtype: torch.dtype) -> None:
        super().__init__(graph, width, dtype)
        self._pair_rows = torch.arange(graph.num_owned)
        self._at_pairs = torch.zeros(graph.num_owned if width else 0, width, dtype=dtype)
        self._sums = Sums(self._at_ends.numpy(), self._at_pairs.numpy())

    def of(self, tile: EdgeTile) -> Sums:
        return self._sums if self._at_ends.shape[1] else self._none


def ends_without_pairs(graph: LocalGraph) -> Ends:
    """An edge's pair is its `src` itself."""
    src = graph.src.numpy()
    return Ends(src, graph.dst.numpy(), np.where(src < graph.num_owned, src, -1), graph.num_owned)


def plain_loss(logits: Tensor, graph: LocalGraph, weights: Tensor, step_weight: float, loss_sum: Any) -> Tensor:
    """Cross-entropy and its gradient on the whole table at once."""
    assert graph.label is not None
    z, y = logits.detach(), graph.label.to(logits.dtype)
    owned = torch.from_numpy(graph.plan.edge_owned).to(z.dtype)
    terms = F.binary_cross_entropy_with_logits(z, y, reduction="none") * weights * owned
    loss_sum.add(terms.sum().reshape(1) / step_weight)
    return (torch.sigmoid(z) - y) * weights / step_weight


RULES: dict[str, list[tuple[Any, str, Any]]] = {
    "integer sums": [(gradients, "IntegerSums", FloatSums), (record, "IntegerSums", FloatSums)],
    "own products": [
        *((module, "multiply", library_multiply) for module in (blocks, tilewise)),
        *((module, "outer", library_outer) for module in (blocks, tilewise)),
    ],
    "partials at src": [(tilewise, "_AtEnds", DirectSums), (tilewise, "_ends", ends_without_pairs)],
    "loss by tiles": [(loop, "edge_loss", plain_loss)],
}
"""The rules that can be switched off: where, which name, and its replacement."""


@contextmanager
def without(rules: Sequence[str]) -> Iterator[None]:
    """Inside, the package computes without these rules, in all threads. Networks and trainers must be made inside."""
    # patch.object raises where the package has changed and there is nothing of that name left to replace.
    with ExitStack() as replaced:
        for rule in rules:
            for replacement in RULES[rule]:
                replaced.enter_context(patch.object(*replacement))
        yield
