"""Sums over ranks with a gradient: backward adds up the gradients that all ranks have of the sum."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce, wraps
from typing import Any

import torch
from torch import Tensor

from domainpar.parallel.transport import OfThisProcess, Transport


def payload_of(tensor: Tensor) -> bytes:
    """The bits of a tensor, to be sent."""
    payload: bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return payload


def tensor_of(payload: bytes, like: Tensor) -> Tensor:
    """A tensor from the bits that were sent, of the type of another one and on its device, in one dimension."""
    if not payload:  # of which torch makes no tensor
        return torch.empty(0, dtype=like.dtype, device=like.device)
    return torch.frombuffer(bytearray(payload), dtype=like.dtype).to(like.device)


def shape_and_type(tensor: Tensor) -> str:
    """In words, as messages about ranks say it."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


_NUMBERS = itertools.count()


class GroupRank(OfThisProcess):
    """One of the ranks that share a graph, and its communication with the others.

    Args:
        transport: Joins the ranks.

    Attributes:
        index: Number of this rank among them.
        number: A number that tells this object from all others of its class in the process.
        num_parts: Number of ranks that share the graph.
        num_exchanges: How often ghost rows were fetched in forward passes.
        num_sums: How often something was summed or compared over ranks in forward passes.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.index, self.num_parts, self.number = transport.rank, transport.size, next(_NUMBERS)
        self.num_exchanges = self.num_sums = 0

    def gather(self, local: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of one shape and type. *Collective*."""
        if self.num_parts == 1:
            return [local]
        payloads = self.transport.all_gather(payload_of(local))
        return [tensor_of(payload, local).view(local.shape) for payload in payloads]

    def sum_over_ranks(self, local: Tensor) -> Tensor:
        """The sum over ranks, added in their order, so the same bits on every rank. *Collective*."""
        total, *others = self.gather(local)
        for tensor in others:
            total = total + tensor
        return total


def summed(local: Tensor, part: GroupRank) -> Tensor:
    """The sum of every rank's tensor, the same on all. *Collective*, forward and backward."""
    if part.num_parts == 1:
        return local
    part.num_sums += 1
    total: Tensor = _SumOverRanks.apply(local, part)  # type: ignore[no-untyped-call]
    return total


def largest(local: Tensor, part: GroupRank) -> Tensor:
    """The elementwise maximum over ranks, without gradient. *Collective*."""
    part.num_sums += 1
    return torch.stack(part.gather(local.detach())).amax(0)


def multiplied(local: Tensor, part: GroupRank) -> Tensor:
    """The product of every rank's tensor, in their order. *Collective*, forward and backward."""
    if part.num_parts == 1:
        return local
    # A sum that gathers every rank's factor, so that autograd knows of each: gradients of any order are exact.
    nothing = torch.zeros_like(local, requires_grad=False)
    mine = torch.stack([local if rank == part.index else nothing for rank in range(part.num_parts)])
    return reduce(torch.mul, summed(mine, part).unbind())


def shared_by(value: Tensor, mine: Tensor, chosen: Tensor, dims: tuple[int, ...], part: GroupRank) -> Tensor:
    """A value of the whole graph whose gradient the numbers that were chosen share. *Collective*, forward and backward.

    Args:
        value: The same on every rank; it is kept as it is.
        mine: Numbers of this rank.
        chosen: Which of them, bool.
        dims: Dimensions of them that `value` has with length 1.
        part: This rank.
    """
    ties = summed(chosen.to(mine.dtype).sum(dims, keepdim=True), part)
    return with_gradient_of(value, summed(torch.where(chosen, mine, 0.0).sum(dims, keepdim=True), part) / ties)


def with_gradient_of(value: Tensor, carrier: Tensor) -> Tensor:
    """A value whose gradient goes to another tensor of its shape, even where that is infinite."""
    result: Tensor = _WithGradientOf.apply(value.detach(), carrier)  # type: ignore[no-untyped-call]
    return result


def counted_once(result: Tensor, part: GroupRank) -> Tensor:
    """A result that every rank has. Its gradient is taken from rank 0, so that gradients may be summed over ranks."""
    if part.num_parts == 1:
        return result
    kept: Tensor = _CountedOnce.apply(result, part.index == 0)  # type: ignore[no-untyped-call]
    return kept


def once_differentiable(name: str, instead: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the backward of a Function one whose gradients have no gradient, and say so where one is asked for.

    As torch's decorator, with words for the user: all ranks come to the same place, so all are refused.

    Args:
        name: What was called, for the message.
        instead: What to do.
    """
    refusal = f"a gradient of a gradient through {name} has no form here; {instead}."

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def once(ctx: Any, *grads: Tensor) -> Any:
            with torch.no_grad():
                results = backward(ctx, *grads)
            # Of all that they were made from: `autograd.grad` passes over what leads to no tensor that it was given.
            of = (*grads, *ctx.saved_tensors)
            return tuple(None if it is None else _Last.apply(refusal, it, *of) for it in results)  # type: ignore[no-untyped-call]

        return once

    return decorate


class _SumOverRanks(torch.autograd.Function):
    """Its own adjoint: what all ranks make of a sum comes back to every summand."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, part: GroupRank) -> Tensor:
        ctx.part = part
        return part.sum_over_ranks(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grads[0], ctx.part), None  # type: ignore[no-untyped-call]


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, carrier: Tensor) -> Tensor:
        return value.clone()  # autograd lets nobody write into a view that a Function returned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


class _Last(torch.autograd.Function):
    """A gradient that has none."""

    @staticmethod
    def forward(ctx: Any, refusal: str, gradient: Tensor, *of: Tensor | None) -> Tensor:
        ctx.refusal = refusal
        return gradient

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(ctx.refusal)


class _CountedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = grads
        # Not new zeros: of these the gradient is asked for on every rank, whoever counts.
        others = torch.zeros((), dtype=torch.bool, device=gradient.device)
        return gradient if ctx.counts else torch.where(others, gradient, 0.0), None
