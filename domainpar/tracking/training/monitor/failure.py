"""The failure of a step: one rank says what happened, all end alike.

Where memory runs out the layer is read off the frames of the error, so that an ordinary step keeps no note of it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from domainpar.common.problems import Problem
from domainpar.common.words import byte_size
from domainpar.nn.classifier import EdgeClassifier
from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.gpus import free_memory
from domainpar.parallel.world import World
from domainpar.tracking.training.parts import LabelledPart

PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
"""The words of torch's allocators and CUDA's libraries, where they have no exception of their own for it."""


class StepFailed(Problem, RuntimeError):
    """A step of training went wrong; names the event and says what to do. No checkpoint holds its results."""


def fail_alike(world: World, failed: Problem, spokesman: int) -> NoReturn:
    """End all ranks with one error; called by all of them with the same arguments.

    Args:
        spokesman: The rank that it happened on, which says so.

    Raises:
        Problem: `failed`, on the spokesman.
        RanksFailed: On all others.
    """
    raise failed if world.rank == spokesman else RanksFailed(f"{world.transport.name_ranks([spokesman])}: {failed}")


@dataclass
class Now:
    """Where this rank is in its step: for the other ranks, and for the explanation of a failure."""

    world: World  # the ranks
    phase: str = ""  # `load`, `forward`, `backward`, `reduce`, `optimizer` or `evaluate`
    event: str | None = None  # the sample at hand, if there is one
    part: LabelledPart | None = None  # this rank's part of it, once it is loaded
    listener: Callable[[str], None] | None = None  # called at the begin of each phase

    def begin(self, phase: str, step: int, event: str | None = None, part: LabelledPart | None = None) -> None:
        """A phase of a step begins."""
        self.phase, self.part = phase, part
        self.event = event if part is None else part.name
        self.world.mark(phase, step, self.event)
        if self.listener is not None:
            self.listener(phase)


# --- out of memory ---------------------------------------------------------------------------------------------------


@contextmanager
def memory_explained(now: Now, model: EdgeClassifier) -> Iterator[None]:
    """Around a step: if this rank runs out of memory, the error names the layer and the way out.

    Raises:
        StepFailed: In place of the allocator's error. Other errors pass.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        layer = layer_of(error, model.computed)
        where = f"out of memory in {now.phase}" if layer is None else f"out of memory in {layer} ({now.phase})"
        place, free = free_memory(now.world.device)
        facts = []
        if now.part is not None:
            graph = now.part.graph
            nodes = f"{graph.num_owned:,} owned + {graph.plan.num_ghosts:,} ghost nodes"
            facts.append(f"{nodes}, {graph.num_edges:,} local edges")
        if (requested := requested_memory(str(error))) is not None:
            facts.append(f"{requested} asked for")
        facts.append(f"{byte_size(free)} free on {place}")
        recompute = "--recompute-every auto, " if model.recompute_every is None and model.ways_to_recompute[1:] else ""
        hint = f"try {recompute}more ranks on more machines, or a smaller --hidden"
        raise StepFailed(f"{where}: {'; '.join(facts)}", hint, event=now.event) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was refused, on the host or on a GPU."""
    # Our own errors may quote such words without being one.
    if isinstance(error, (Problem, RanksFailed)):
        return False
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(phrase in str(error) for phrase in PHRASES)


def requested_memory(text: str) -> str | None:
    """The amount of memory that was requested, by the words of an allocator."""
    if num_bytes := re.search(r"allocate (\d+) bytes", text):
        return byte_size(int(num_bytes[1]))
    amount = re.search(r"allocate ([\d.]+ [KMGTPE]?i?B)", text)
    return amount[1] if amount else None


def layer_of(error: BaseException, layers: nn.Module) -> str | None:
    """The innermost layer of a network that was at work when an error was raised; None if that cannot be seen.

    All layers, where several are computed in one pass.
    """
    names = {id(module): name for name, module in layers.named_modules() if name}
    at_work: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        values = trace.tb_frame.f_locals
        # A frame works for its `self`, for who takes its gradients, or, where autograd calls stages, for those.
        call = values.get("call") or getattr(values.get("ctx"), "call", None)
        of_chain = [link.grad_sink for link in getattr(call, "chain", ())]
        for modules in ([values.get("stage")], [getattr(call, "grad_sink", None)], of_chain, [values.get("self")],
                        [values.get("grad_sink")]):  # fmt: skip
            at_work = [names[id(module)] for module in modules if id(module) in names] or at_work
        trace = trace.tb_next
    return f"layer{'s' * (len(at_work) > 1)} {' and '.join(at_work)}" if at_work else None
