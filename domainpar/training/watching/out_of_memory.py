"""Out of memory: on which rank, in which layer, for how large a part, and what to try.

The layer is read off the frames of the error, so that nothing has to be written down while all is well.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from domainpar.nn.interaction import InteractionNetwork
from domainpar.parallel.transport import RanksFailed
from domainpar.problems import Problem
from domainpar.training.memory import byte_size, free_memory
from domainpar.training.watching.failing import StepFailed
from domainpar.training.watching.now import Now

PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
"""How torch's allocators and CUDA's libraries say it, where they have no exception of their own for it."""


@contextmanager
def memory_explained(now: Now, model: nn.Module) -> Iterator[None]:
    """Around a step: if this rank runs out of memory, the error says where, and what to try.

    Raises:
        StepFailed: In place of what the allocator raised. Other errors pass.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise explained(error, now, model) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was refused, on the host or on a GPU."""
    if isinstance(error, (Problem, RanksFailed)):
        return False
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(one in str(error) for one in PHRASES)


def explained(error: BaseException, now: Now, model: nn.Module) -> StepFailed:
    """The error that tells a user what to do."""
    layer = layer_of(error, model)
    where = f"out of memory in {now.phase}" if layer is None else f"out of memory in {layer} ({now.phase})"
    asked = asked_for(str(error))
    place, free = free_memory(now.world.device)
    facts = [
        *([] if now.part is None else [_size_of_part(now)]),
        *([] if asked is None else [f"{asked} asked for"]),
        f"{byte_size(free)} free on {place}",
    ]
    return StepFailed(f"{where}: {'; '.join(facts)}", ways_to_save(model), event=now.event)


def _size_of_part(now: Now) -> str:
    assert now.part is not None
    graph = now.part.part.graph
    return f"{graph.num_owned:,} owned + {graph.plan.num_ghosts:,} ghost nodes, {graph.num_edges:,} local edges"


def ways_to_save(model: nn.Module) -> str:
    """What lets a step take less memory on each rank."""
    ways = ["more ranks on more machines"]
    if isinstance(model, InteractionNetwork) and model.recompute_every is None and len(model.edge_stages) > 1:
        ways.insert(0, "--recompute-every 2")
    return f"try {', '.join(ways)}, or a smaller --hidden"


def asked_for(text: str) -> str | None:
    """How much memory an allocator says it was asked for."""
    if found := re.search(r"allocate (\d+) bytes", text):
        return byte_size(int(found[1]))
    found = re.search(r"allocate ([\d.]+ [KMGTPE]?i?B)", text)
    return found[1] if found else None


def layer_of(error: BaseException, model: nn.Module) -> str | None:
    """The innermost layer of a model that was at work when an error was raised; None if that cannot be seen."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found = None
    trace = error.__traceback__
    while trace is not None:
        for module in _modules_in(trace.tb_frame):
            found = names.get(id(module), found)
        trace = trace.tb_next
    return None if found is None else f"layer {found.removeprefix('module.')}"


def _modules_in(frame: FrameType) -> Iterator[Any]:
    """Modules a frame works for: its `self`, or, where autograd calls a stage, that stage."""
    values = frame.f_locals
    yield values.get("stage")
    yield getattr(values.get("ctx"), "stage", None)
    yield values.get("self")
