"""Sums over the ranks that autograd knows of: each rank's use of a sum sends back its share of the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from domainpar.nn.adapt.part import GraphPart


def summed(local: Tensor, part: GraphPart) -> Tensor:
    """The sum of every rank's tensor, the same on all. *Collective*, forward and backward."""
    if part.num_parts == 1:
        return local
    part.num_sums += 1
    total: Tensor = _SumOverRanks.apply(local, part)  # type: ignore[no-untyped-call]
    return total


def largest(local: Tensor, part: GraphPart) -> Tensor:
    """The elementwise maximum over ranks, without gradient. *Collective*."""
    part.num_sums += 1
    return torch.stack(part.gather(local.detach())).amax(0)


def with_gradient_of(value: Tensor, carrier: Tensor) -> Tensor:
    """A value whose gradient goes to another tensor of its shape, even where that is infinite."""
    made: Tensor = _WithGradientOf.apply(value.detach(), carrier)  # type: ignore[no-untyped-call]
    return made


def counted_once(result: Tensor, part: GraphPart) -> Tensor:
    """A result that every rank has. Its gradient is taken from rank 0, so that gradients may be summed over ranks."""
    if part.num_parts == 1:
        return result
    kept: Tensor = _CountedOnce.apply(result, part.part == 0)  # type: ignore[no-untyped-call]
    return kept


class _SumOverRanks(torch.autograd.Function):
    """Its own adjoint: what all ranks make of a sum comes back to every summand."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, part: GraphPart) -> Tensor:
        ctx.part = part
        return part.sum_over_ranks(local)

    @staticmethod
    @once_differentiable  # a gradient of this gradient would not be summed over ranks
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.part.sum_over_ranks(grads[0]), None


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, carrier: Tensor) -> Tensor:
        return value.clone()  # autograd lets nobody write into a view that a Function returned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


class _CountedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] if ctx.counts else torch.zeros_like(grads[0]), None
