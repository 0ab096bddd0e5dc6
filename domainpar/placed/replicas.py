"""What every rank holds alike: the tensors of a module, taken from one rank, and its buffers, changed by all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from domainpar.common.agreement import agree_on
from domainpar.parallel.integer_sums import sum_exactly
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.placed.input_log import shape_and_type
from domainpar.placed.ranks import payload_of, tensor_of


def check_sizes(module: nn.Module) -> None:
    """Refuse parameters and buffers that have no size yet, or that are sharded over ranks.

    Raises:
        ValueError: If there are any.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if hasattr(tensor, "device_mesh"):
            raise ValueError(
                f"{name} is sharded over ranks (FSDP, DTensor); each rank is to hold all of it: leave fully_shard out."
            )
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ValueError(
                f"the size of {name} is not known yet (-1 channels, a lazy layer); run the module once on a small "
                "graph or give the sizes, so that every rank begins with the same weights."
            )


def take_from_root(tensors: Mapping[str, Tensor], world: World) -> None:
    """Give tensors, such as parameters and buffers, their values on rank 0. *Collective*.

    Raises:
        Refused: On all ranks alike, if a name, a shape or a type differs between ranks.
    """
    agree_on(
        world.transport,
        {f"the module's {name}": shape_and_type(tensor) for name, tensor in tensors.items()},
        "build the same module on every rank",
    )
    with torch.no_grad():
        for _, tensor in sorted(tensors.items()):
            payload = world.transport.broadcast(payload_of(tensor) if world.is_root else None)
            if not world.is_root:
                tensor.copy_(tensor_of(payload, tensor).view(tensor.shape))


class StepBuffers:
    """Makes the change of a module's buffers in one step independent of which ranks compute which samples.

    Each sample starts from the buffers as they were at the beginning of the step. At the end a buffer of floats has
    changed by the mean of the changes of all samples, one of integers by their sum. With one sample this is what torch
    does.

    Args:
        buffers: The buffers of the module that may change, as they are at the beginning of the step.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = list(buffers)
        self._before = [buffer.clone() for buffer in self._buffers]
        self._changes = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in self._buffers]

    @contextmanager
    def sample(self, counts: bool) -> Iterator[None]:
        """A context around one sample. `counts`: whether this rank is the one, of those that share it, to count it."""
        yield
        with torch.no_grad():
            for buffer, before, change in zip(self._buffers, self._before, self._changes):
                if counts:
                    # Not a plain difference: that of two infinities is NaN.
                    same = (buffer == before) | (buffer.isnan() & before.isnan())
                    change += torch.where(same, 0.0, buffer.double() - before.double())
                buffer.copy_(before)

    def end(self, transport: Transport, num_samples: int) -> None:
        """Set the buffers to the result of the whole step. *Collective*.

        Args:
            transport: Joins all ranks.
            num_samples: Samples of the step, on all ranks together.

        Raises:
            RuntimeError: On all ranks alike, if a buffer became infinite or NaN.
        """
        if not self._buffers:
            return
        totals = sum_exactly(self._changes, transport)
        if totals is None:
            raise RuntimeError(
                "a buffer of the model (running means, say) became infinite or NaN in this step; look at its inputs."
            )
        with torch.no_grad():
            for buffer, before, total in zip(self._buffers, self._before, totals):
                change = total / num_samples if buffer.is_floating_point() else total.round()
                buffer.copy_(torch.where(change == 0, before.double(), before.double() + change))
