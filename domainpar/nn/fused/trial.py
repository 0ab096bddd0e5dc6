"""Rows through the GPU kernels, for the self-test: a row's bits must not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from domainpar.nn.fused import launching
from domainpar.nn.fused.fused_mlp import Dropout, FusedMLP, blocks_of, chunks_of, multiply_nodes, packed, shape_of
from domainpar.nn.gradients import GradSink, IntegersOnDevice
from domainpar.nn.kernels import BOTH_ENDS
from domainpar.nn.mlp import MLP


class _Limbs(GradSink):
    """Takes gradients into sums of its own."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.limbs, self._size = torch.zeros(2 * size + 1, dtype=torch.int64, device=device), size

    @contextmanager
    def integer_sums(self, parameters: Sequence[nn.Parameter], count: int) -> Iterator[IntegersOnDevice]:
        yield IntegersOnDevice(torch.arange(self._size, device=self.limbs.device), self.limbs, self._size)


def products_of_nodes(mlp: MLP, node_width: int, tables: Sequence[Tensor], rows: slice) -> tuple[Tensor, ...]:
    """Products of node states with a first layer's weight."""
    parameters = packed(mlp)
    states = tables[0].to(parameters.device)
    out = states.new_zeros(len(states), 2 * mlp.layers[0].linear.out_features)
    multiply_nodes(states, rows, parameters, mlp, (node_width, 0), out)
    return (out[rows].cpu(),)


PIECES = 5
"""Into which rows are cut, as if they belonged to so many tiles."""


def block_by_one_program(*given: Any) -> tuple[Tensor, ...]:
    """`block` by a program that goes through all pieces in one memory; else one for each works beside the others."""
    return block(*given, programs=1)


def block(
    mlp: MLP,
    products: torch.dtype | None,
    at_nodes: Tensor,
    grad_sums: Tensor,
    tables: Sequence[Tensor],
    rows: slice,
    *,
    programs: int | None = None,
) -> tuple[Tensor, ...]:
    """Forward and backward through rows of edges, or of nodes; and the sums of the parameters' gradients.

    Args:
        mlp: The MLP.
        products: As in `EdgeStage`.
        at_nodes: Products of node states, [nodes, 2 width], or nothing.
        grad_sums: Gradient of sums at nodes, [nodes, 2 out], or nothing.
        tables: Its row tables, `src` and `dst` of each row, and the gradient of its results.
        rows: Which of them.
        programs: Of a launch, at most; None: as always.
    """
    parameters = packed(mlp)
    device = parameters.device
    *operands, src, dst, upstream = (table.to(device) for table in tables)
    shape = shape_of(mlp, operands, None, products)
    gathers = at_nodes[:, : 2 * shape.widths[0]].contiguous().to(device) if len(at_nodes) else None
    given = (mlp, shape, tuple(operands), parameters, Dropout.of(None, parameters), gathers, (dst, src))
    fused_mlp = FusedMLP(*given, programs or launching.PROGRAMS)
    cuts = np.linspace(rows.start, rows.stop, PIECES + 1).astype(np.int64)
    ranges = np.column_stack([cuts[:-1], cuts[1:]])
    out = torch.zeros_like(upstream)
    fused_mlp.forward(blocks_of(ranges, shape.block, device), out)
    grad_sink = _Limbs(shape.size, device)
    chunks = chunks_of(ranges, np.ones(PIECES, np.int64), device)
    sums = grad_sums.to(device) if len(grad_sums) else None
    grad_tables, grad_product = fused_mlp.backward(chunks, grad_sink, upstream, sums, BOTH_ENDS, [True] * len(operands))
    grad_rows = [each[rows].float().cpu() for each in (*([grad_product] if gathers is not None else []), *grad_tables)]
    return out[rows].cpu(), torch.cat(grad_rows, dim=1), grad_sink.limbs.cpu()
