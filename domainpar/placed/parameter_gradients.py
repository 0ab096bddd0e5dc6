"""Gradients of parameters become whole at the end of each backward pass: one exact sum over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from domainpar.parallel.digests import digest, what_differs
from domainpar.parallel.errors import RanksDiffer
from domainpar.parallel.integer_sums import start_sum_exactly
from domainpar.parallel.world import World
from domainpar.placed.dispatch import writable
from domainpar.placed.moves import whole_local
from domainpar.placed.ranks import GraphRanks, Sum, ranks_of
from domainpar.placed.replicas import StepBuffers
from domainpar.placed.tensor import Placed, settle

BUCKET = 2**20  # numbers, whose sum is started while backward goes on
_HOOKS = WeakIdKeyDictionary()  # those that `WholeGradients` put on a parameter


class WholeGradients:
    """Makes gradients whole that backward passes leave in some parameters.

    If groups of ranks have different graphs, the gradients of all groups are added up. A buffer of floats changes by
    the mean of the groups' changes, one of integers by their sum.

    Args:
        parameters: The parameters by name, the same on every rank.
        world: The ranks.
        buffers: The buffers beside them.
    """

    def __init__(self, parameters: Mapping[str, Tensor], world: World, buffers: Sequence[Tensor] = ()) -> None:
        self._named, self._parameters, self._world = dict(parameters), list(parameters.values()), world
        self._several = world.num_data_groups > 1
        self._buffers = list(buffers) if self._several else []
        self._step = StepBuffers(self._buffers)
        self._waiting: dict[int, Tensor] = {}
        self._started: list[tuple[Any, Callable[[], list[Tensor] | None]]] = []
        self._size = 0  # of gradients that wait and were not started
        self._earlier: dict[int, Tensor] = {}  # of earlier passes, whole already
        for parameter in self._parameters:
            for earlier in _HOOKS.pop(parameter, ()):  # of an earlier world
                earlier.remove()
            hooks = [parameter.register_post_accumulate_grad_hook(self._arrived)]
            if world.size > 1:
                hooks.append(parameter.register_hook(lambda gradient, of=parameter: self._arrives(of, gradient)))
            _HOOKS[parameter] = hooks

    def _arrives(self, parameter: Tensor, gradient: Tensor) -> None:
        if isinstance(gradient, Placed) and not gradient.ranks.same_bits:  # then it is whole at once
            self._as_share(parameter, gradient.ranks)

    def _as_share(self, parameter: Tensor, ranks: GraphRanks) -> None:
        """Add the gradient of earlier passes to the share of one rank, so that hooks see it in the sum."""
        earlier = parameter.grad
        if earlier is not None and not isinstance(earlier, Placed):
            self._earlier[id(parameter)] = earlier
            share = earlier.clone() if self._world.rank == 0 else torch.zeros_like(earlier)
            parameter.grad = Placed(share, ranks.total)

    def _arrived(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if self._world.size == 1:
            if isinstance(gradient, Placed) and not gradient.requires_grad:
                parameter.grad = writable(settle(gradient).local)
            return
        if not isinstance(gradient, Placed):  # of a loss that has nothing to do with the graph
            return
        self._waiting[id(parameter)] = parameter
        if not gradient.ranks.at_backward:
            self._finish()
            return
        gradient.ranks.after_backward[id(self)] = self._finish
        self._size += parameter.numel()
        if self._size < BUCKET or self._several:
            return
        gradient.ranks.log.compare()  # the sum of the shares that are there starts while backward goes on
        self._size = 0
        shares: list[Any] = [(p, p.grad) for p in self._waiting.values() if _is_share(p.grad)]
        if shares:
            finish = start_sum_exactly([share.local for _, share in shares], self._world.transport)
            self._started.append(([(p, share, share.memory.generation) for p, share in shares], finish))
        for parameter, _ in shares:
            del self._waiting[id(parameter)]

    def _finish(self) -> None:
        """Sum the gradients that wait. *Collective*."""
        started, self._started, self._size = self._started, [], 0
        for shares, finish in started:
            totals: Sequence[Tensor | None] = finish() or [None] * len(shares)
            for (parameter, share, generation), total in zip(shares, totals):
                unchanged = parameter.grad is share and _is_share(share) and share.memory.generation == generation
                if total is not None and unchanged:
                    self._set(parameter, total)
                else:  # not finite, or changed by a hook since
                    self._waiting[id(parameter)] = parameter
        waiting, self._waiting = [p for p in self._waiting.values() if isinstance(p.grad, Placed)], {}
        if not waiting:
            self._earlier.clear()
            return
        ranks: GraphRanks = waiting[0].grad.ranks  # type: ignore[union-attr]
        ranks.log.compare()
        if self._several:
            waiting = self._in_any_group(waiting)
            for parameter in waiting:
                self._as_share(parameter, ranks)
        summed = []
        for parameter in waiting:
            gradient: Any = parameter.grad
            if isinstance(gradient, Placed) and gradient.requires_grad:  # with a history of its own
                settle(gradient)
            elif self._several or type(gradient.place) is Sum:
                summed.append(parameter)
            else:
                self._set(parameter, writable(whole_local(gradient)))
        shares = [torch.zeros_like(p) if p.grad is None else share_of(p.grad, ranks) for p in summed]
        if shares:  # one exact sum for all of them; numbers that are not finite are seen as on one rank
            sums: Any = start_sum_exactly(shares, self._world.transport)()
            all_ranks = ranks_of(self._world.transport)
            totals = [torch.stack(all_ranks.gathered(share)).sum(0) for share in shares] if sums is None else sums
            for parameter, total in zip(summed, totals):
                self._set(parameter, total)
        self._earlier.clear()

    def _set(self, parameter: Tensor, gradient: Tensor) -> None:
        """Give a parameter its whole gradient, in the memory of that of earlier passes."""
        earlier = self._earlier.pop(id(parameter), None)
        parameter.grad = gradient.to(parameter.dtype) if earlier is None else earlier.copy_(gradient)

    def _in_any_group(self, waiting: list[Tensor]) -> list[Tensor]:
        """Parameters that have a gradient in any group; all groups hold one model. *Collective*.

        Raises:
            RanksDiffer: On all ranks alike, if parameters differ.
        """
        mine, transport = {id(parameter) for parameter in waiting}, self._world.transport
        flags = bytes(id(parameter) in mine for parameter in self._parameters)
        of_ranks = transport.all_gather(digest(self._named).to_bytes(4, "little") + flags)
        if len({of_rank[:4] for of_rank in of_ranks}) > 1:
            differing = what_differs(self._named, transport)
            raise RanksDiffer(str(differing and differing[0]), "change parameters on every rank alike")
        with self._step.sample(counts=self._world.rank == self._world.groups[self._world.data_group][0]):
            pass  # it was before this
        self._step.end(transport, self._world.num_data_groups)
        self._step = StepBuffers(self._buffers)
        any_has = map(max, zip(*(of_rank[4:] for of_rank in of_ranks)))
        return [parameter for parameter, has in zip(self._parameters, any_has) if has]


def _is_share(gradient: Any) -> bool:
    return isinstance(gradient, Placed) and type(gradient.place) is Sum and not gradient.requires_grad


def share_of(gradient: Tensor, ranks: GraphRanks) -> Tensor:
    """This rank's share of a gradient; the gradient is the sum of all shares. *Collective* if it has rows."""
    if isinstance(gradient, Placed) and type(gradient.place) is Sum:
        return gradient.local
    whole = whole_local(gradient)
    return whole if ranks.rank == 0 else torch.zeros_like(whole)
