"""Between the placed tensors of a module and the plain ones of the trainer, of which each rank has its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from domainpar.parallel.integer_sums import sum_exactly
from domainpar.parallel.transport import Transport
from domainpar.placed.moves import whole_local
from domainpar.placed.parameter_gradients import share_of
from domainpar.placed.ranks import GraphRanks, NotExact, ranks_of
from domainpar.placed.tensor import Placed, is_rows, settle
from domainpar.plan import IntArray, PartitionPlan


def numbered(plan: PartitionPlan, transport: Transport) -> PartitionPlan:
    """The plan of an event, or of a sector of it, whose nodes and edges get the numbers 0, 1, ... *Collective*."""
    mine = plan.edge_ids[plan.edge_owned]
    totals, ends = (torch.tensor([count(plan.owned_ids), count(mine)]) for count in (len, _end))
    transport.all_reduce(totals)
    transport.all_reduce(ends, "max")
    if torch.equal(totals, ends):
        return plan
    nodes, edges = (
        torch.cat(ranks_of(transport).gathered_rows(torch.from_numpy(ids))).sort().values.numpy()
        for ids in (plan.owned_ids, mine)
    )
    return replace(
        plan,
        owned_ids=np.searchsorted(nodes, plan.owned_ids),
        ghost_ids=np.searchsorted(nodes, plan.ghost_ids),
        edge_ids=np.searchsorted(edges, plan.edge_ids),
    )


def _end(ids: IntArray) -> int:
    return int(ids[-1]) + 1 if len(ids) else 0


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Around a pass: what it puts in the place of a buffer is written into that, where the end of a step looks for it.

    Raises:
        NotExact: If that has rows and belongs to the module's state.
    """
    before = [(path, child, dict(child._buffers)) for path, child in module.named_modules()]
    yield
    for path, child, buffers in before:
        for name, buffer in buffers.items():
            now = child._buffers[name]
            if is_rows(now) and name not in child._non_persistent_buffers_set:
                raise NotExact(
                    f"the buffer {f'{path}.' * bool(path)}{name} holds rows of this rank's part of a graph, which mean "
                    "nothing in a state: keep them as a plain attribute, or register it with persistent=False"
                )
            if now is not None and now is not buffer and not is_rows(now):
                now = whole_local(now).detach()
                keeps = not isinstance(buffer, Placed | None) and buffer.shape == now.shape
                child._buffers[name] = buffer.copy_(now) if keeps else now


def here(results: Sequence[Tensor], module: nn.Module, ranks: GraphRanks) -> tuple[Tensor, ...]:
    """What this rank holds of placed results, as plain tensors: its own rows, or all of what has no rows."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return _Here.apply(results, ranks, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class _Here(torch.autograd.Function):
    """Placed results as plain tensors. Backward leaves this rank's shares of gradients in the parameters."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[Tensor], ranks: GraphRanks, *parameters: Tensor) -> tuple[Tensor, ...]:
        settled = [settle(result) if isinstance(result, Placed) else Placed(result, ranks.same) for result in results]
        ctx.results, ctx.ranks, ctx.parameters = results, ranks, parameters
        ctx.places = [result.place for result in settled]
        return tuple(result.local.detach() for result in settled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        learned = [at for at, result in enumerate(ctx.results) if result.requires_grad]
        if not learned:
            return None, None, *(None for _ in ctx.parameters)
        results, of_results = zip(*((ctx.results[at], Placed(grads[at], ctx.places[at])) for at in learned))
        with ctx.ranks.backward():
            gradients = torch.autograd.grad(results, ctx.parameters, of_results, allow_unused=True)
        return None, None, *(None if gradient is None else share_of(gradient, ctx.ranks) for gradient in gradients)


class GradientShares:
    """Gradients of a module's parameters of which backward passes leave one rank's shares.

    Args:
        module: Its parameters that require a gradient, in order, are summed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def rejected_now(self) -> Tensor:
        """0: what is not finite is found in `reduce`."""
        return torch.zeros((), dtype=torch.int64, device="cpu")

    def expect_last_pass(self, transport: Transport) -> None:
        """Nothing starts before `reduce`: sums are scaled by the largest gradient of a parameter on all ranks."""

    def reduce(self, transport: Transport) -> Tensor:
        """Sum over ranks, and leave the result in each parameter's `grad`. *Collective*.

        Where no rank has a gradient it stays None, so that optimisers pass over it as on one rank.

        Returns:
            0; or, if a gradient of some rank or a sum is not finite, a larger number, and the gradients mean nothing;
            int64 [].
        """
        exist = transport.all_gather(bytes(parameter.grad is not None for parameter in self._parameters))
        exists = map(max, zip(*exist, strict=True))
        trained = [parameter for parameter, has_gradient in zip(self._parameters, exists) if has_gradient]
        sums = sum_exactly([torch.zeros_like(p) if p.grad is None else p.grad for p in trained], transport)
        if sums is None:
            return torch.ones((), dtype=torch.int64, device="cpu")
        for parameter, total in zip(trained, sums):
            # Rounded to the parameter's type, in which a finite sum may have become infinite.
            parameter.grad = total.to(parameter.dtype)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None and parameter.numel()]
        if not gradients:
            return self.rejected_now()
        return (~torch.stack(list(torch._foreach_norm(gradients, float("inf")))).isfinite()).sum()
