"""Replicas: every rank holds the same parameters and the same state of the optimiser, to the last bit. Checked."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.training.watching.failing import StepFailed, fail_alike

HINT = (
    "replicas were equal at the last checkpoint: go on from there with --resume; if it happens again on the same rank, "
    "look at its machine (memory, another kind of processor, another library)"
)


def digest(tensors: Mapping[str, Tensor]) -> int:
    """A checksum of the bits of some tensors, in the order of their names; one flipped bit changes it."""
    checksum = 0
    for name in sorted(tensors):
        if tensors[name].numel():
            checksum = zlib.crc32(_bytes_of(tensors[name]), checksum)
    return checksum


def _bytes_of(tensor: Tensor) -> Any:
    """The bits of a tensor as they lie in the host's memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


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
    ours = replicated(model, optimizer)
    if len(set(world.transport.all_gather(digest(ours).to_bytes(4, "little")))) > 1:
        _stop(ours, world)


def _stop(ours: Mapping[str, Tensor], world: World) -> None:
    """Find the tensors that differ, and the ranks that differ from the majority. *Collective*."""
    checksums = _of_all_ranks(ours, world.transport)
    differing = [name for name in checksums[0] if len({one.get(name) for one in checksums}) > 1]
    if not differing:  # a rank that lacks tensors has others than rank 0
        differing = sorted({name for one in checksums for name in one} - set(checksums[0]))
    strays = strays_among([json.dumps(one, sort_keys=True) for one in checksums])
    others = "the others" if 2 * len(strays) < world.size else "rank 0"
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    what = (
        f"{world.transport.name_ranks(strays)} no longer {'holds' if len(strays) == 1 else 'hold'} what {others} "
        f"{'hold' if others == 'the others' else 'holds'}: {differing[0]}{more} of {len(checksums[0])} tensors differ"
    )
    fail_alike(world, StepFailed(what, HINT), strays[0])


def _of_all_ranks(ours: Mapping[str, Tensor], transport: Transport) -> list[dict[str, int]]:
    mine = {name: digest({name: tensor}) for name, tensor in ours.items()}
    return [json.loads(text) for text in transport.all_gather(json.dumps(mine).encode())]


def strays_among(held: Sequence[str]) -> list[int]:
    """Ranks that hold something else than most do; without a majority, something else than rank 0 does."""
    (commonest, count), *_ = Counter(held).most_common()
    most = commonest if 2 * count > len(held) else held[0]
    return [rank for rank, one in enumerate(held) if one != most]
