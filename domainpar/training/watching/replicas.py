"""Replicas: every rank holds the same parameters and the same state of the optimiser, to the last bit. Checked."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from domainpar.parallel.digests import what_differs
from domainpar.parallel.world import World
from domainpar.training.watching.failing import StepFailed, fail_alike

HINT = (
    "replicas were equal at the last checkpoint: go on from there with --resume; if it happens again on the same rank, "
    "look at its machine (memory, another kind of processor, another library)"
)


def replicated(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What every rank should hold alike: parameters and buffers, and the optimiser's state of each parameter."""
    found = {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[f"{key} of {name.removeprefix('module.')}"] = value
    return found


def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Compare what every rank holds by its checksum. *Collective*.

    Raises:
        StepFailed: If ranks differ, on the first of those that differ from the most; names them and the first tensor.
        RanksFailed: Then, on all other ranks.
    """
    found = what_differs(replicated(model, optimizer), world.transport)
    if found is not None:
        what, strays = found
        fail_alike(world, StepFailed(what, HINT), strays[0])
