"""What a pass leaves behind in a model, compared: gradients of its parameters, and its buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from domainpar.nn.adapt.verifying.differences import FLOOR, gap, largest
from domainpar.nn.adapt.verifying.loss import weighted_sum
from domainpar.nn.adapt.verifying.report import Worst
from domainpar.nn.adapt.verifying.running import Run
from domainpar.nn.adapt.verifying.seeing import Seen, as_numbers


def compare_gradients(whole: Run, split: Run, result: Sequence[Seen]) -> Worst | None:
    """Gradients of all parameters: the whole's against the sum over ranks.

    Args:
        whole: The run on the whole graph; its backward pass runs here if it did not yet.
        split: The run on ranks, which got to its end.
        result: What it returned, merged.
    """
    bare = whole.ranks[0]
    if any(one.problem for one in result) or len(bare.recorder.result()) != len(result):
        return None
    if not whole.backward_done:
        loss = weighted_sum(bare.result, result)
        if loss is None:
            return None
        loss.backward()
    theirs = _gradients(bare.module)
    ours = [_gradients(rank.module) for rank in split.ranks]
    return _worst((name, torch.stack([one[name] for one in ours]).sum(0), theirs[name]) for name in theirs)


def compare_buffers(whole: Run, split: Run) -> Worst | None:
    """All buffers: the whole's against those of each rank."""
    theirs = _buffers(whole.ranks[0].module)
    ours = [_buffers(rank.module) for rank in split.ranks]
    return _worst((name, one[name], theirs[name]) for one in ours for name in theirs)


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(one) if one.grad is None else as_numbers(one.grad)
        for name, one in module.named_parameters()
        if one.requires_grad
    }


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: as_numbers(one) for name, one in module.named_buffers()}


def _worst(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> Worst | None:
    found = [(name, gap(ours, theirs), largest(theirs)) for name, ours, theirs in pairs]
    floor = FLOOR * max((size for *_, size in found), default=0.0)
    return max((Worst(difference / (max(size, floor) or 1.0), name) for name, difference, size in found), default=None)
