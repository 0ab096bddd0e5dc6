"""Sums of parameter gradients: a float partial per owned tile, added as integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.transport import Transport
from domainpar.plan import IntArray


class GradientSink:
    """Takes each owned tile's share of the parameter gradients; the sum over all tiles and ranks is exact.

    Every rank reduces every parameter of the model, whatever it computed itself. Making a sink attaches it to the
    model's stages.

    Args:
        model: Its parameters, in order, are what is summed.

    Raises:
        ValueError: If a parameter lies outside all stages, where its gradient would be one rank's share only, or if two
            stages share some of their parameters but not all.
        RuntimeError: If torch computes with several threads on CPU: their number would change the bits.
    """

    def __init__(self, model: nn.Module) -> None:
        _check_all_in_stages(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        sizes = [parameter.numel() for parameter in self._parameters]
        # By identity: torch compares tensors number by number. Models keep their parameters for as long as they live.
        self._start = {id(p): sum(sizes[:i]) for i, p in enumerate(self._parameters)}
        device = self._parameters[0].device if self._parameters else "cpu"
        self._sums = IntegerSums(sum(sizes), device)
        self._places_of: dict[tuple[tuple[int, bool], ...], Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, TakesGradients):
                self._check_in_one_piece(name, module)
                module.sink = self

    def _check_in_one_piece(self, name: str, stage: TakesGradients) -> None:
        """A tile's gradients are added as one piece, so a stage's parameters have to follow each other."""
        parameters = TakesGradients.trainable(stage)  # by its modules, which may be others by now
        starts = [self._start[id(parameter)] for parameter in parameters]
        if any(start + own.numel() != after for own, start, after in zip(parameters, starts, starts[1:])):
            raise ValueError(
                f"stage {name} shares some of its parameters with another one; share a whole stage or MLP, or nothing."
            )

    def add(self, parameters: Sequence[nn.Parameter], partials: Sequence[Tensor]) -> None:
        """Add one tile's gradient of some parameters that lie one behind the other in the model's order."""
        # In one piece: each call takes a lock, and threads of this rank give at the same time.
        self._sums.add(torch.cat([partial.flatten() for partial in partials]), self._start[id(parameters[0])])

    def add_limbs(self, parameters: Sequence[nn.Parameter], limbs: IntArray, rejected: int, largest: float) -> None:
        """Add what many tiles have, summed as integers already.

        Args:
            parameters: Parameters that are trained and lie one behind the other in the model's order.
            limbs: Of the sums of their gradients, int64 [2, numbers], see `IntegerSums.add_limbs`.
            rejected: Partials that were left out, for they were not finite or too large.
            largest: The largest of them.
        """
        self._sums.add_limbs(limbs, rejected, self._start[id(parameters[0])])

    @contextmanager
    def integer_sums(self, parameters: Sequence[nn.Parameter], count: int) -> Iterator[IntegersOnDevice]:
        """The integers to which a kernel adds `count` partials of each number of some parameters.

        Those that are frozen have no place among them.
        """
        with self._sums.room_for(count) as limbs:
            yield IntegersOnDevice(self._places(tuple(parameters)), limbs, len(self._sums))

    def _places(self, parameters: tuple[nn.Parameter, ...]) -> Tensor:
        """The sum of each number of some parameters, int64; -1 where there is none."""
        key = tuple((id(parameter), parameter.requires_grad) for parameter in parameters)
        if key not in self._places_of:
            starts = [self._start[id(parameter)] if parameter.requires_grad else -1 for parameter in parameters]
            pieces = [
                torch.arange(parameter.numel()) + start if start >= 0 else torch.full((parameter.numel(),), -1)
                for parameter, start in zip(parameters, starts)
            ]
            self._places_of[key] = torch.cat(pieces).to(parameters[0].device)
        return self._places_of[key]

    def reduce(self, transport: Transport) -> Tensor:
        """Sum over ranks, and leave the result in each parameter's `grad`. *Collective*.

        Returns:
            The number of partials, over all ranks, that were not finite or too large, int64 [] on their device; unless
            0, gradients mean nothing.
        """
        self._sums.reduce(transport)
        total = self._sums.total()
        rounded = {kind: total.to(kind) for kind in {parameter.dtype for parameter in self._parameters}}
        for parameter in self._parameters:
            start = self._start[id(parameter)]
            # Rounded once, from the exact sum; in one piece, for on a GPU each piece is a launch.
            parameter.grad = rounded[parameter.dtype][start : start + parameter.numel()].view_as(parameter)
        rejected = self.rejected_now()  # clearing sets it to 0
        self._sums.clear()
        return rejected

    def rejected_now(self) -> Tensor:
        """Partials so far that were not finite or too large, on this rank, int64 [] on their device."""
        return self._sums.rejected_now()


class IntegersOnDevice(NamedTuple):
    """Sums of integers as kernels on a GPU add to them.

    Attributes:
        places: The sum of each number of some parameters, int64; -1: none.
        limbs: High limbs, low limbs, partials rejected, int64 [2 num_sums + 1]: see `parallel.integer_sums`.
        num_sums: How many sums there are.
    """

    places: Tensor
    limbs: Tensor
    num_sums: int


class TakesGradients(nn.Module):
    """A module whose parameter gradients go to a sink instead of `grad`."""

    sink: GradientSink | None = None

    def trainable(self) -> list[nn.Parameter]:
        """The parameters it sums gradients for, in the model's order."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def give(self, parameters: Sequence[nn.Parameter], partials: Sequence[Tensor]) -> None:
        """Hand one owned tile's gradients of some parameters to the sink; those that are frozen are left out.

        Args:
            parameters: Parameters of this stage that follow each other in the model's order.
            partials: The gradient of each, in its shape.
        """
        pairs = [pair for pair in zip(parameters, partials) if pair[0].requires_grad]
        if pairs:
            self._attached.add([parameter for parameter, _ in pairs], [partial for _, partial in pairs])

    def give_limbs(self, parameters: Sequence[nn.Parameter], limbs: IntArray, rejected: int, largest: float) -> None:
        """Hand the sums of all owned tiles to the sink; arguments are those of `GradientSink.add_limbs`."""
        if parameters:
            self._attached.add_limbs(parameters, limbs, rejected, largest)

    @contextmanager
    def integer_sums(self, parameters: Sequence[nn.Parameter], count: int) -> Iterator[IntegersOnDevice]:
        """Where a kernel adds partials of some parameters; arguments are those of `GradientSink.integer_sums`."""
        if not any(parameter.requires_grad for parameter in parameters):
            count, device = sum(parameter.numel() for parameter in parameters), parameters[0].device
            nowhere = torch.full((count,), -1, device=device)
            yield IntegersOnDevice(nowhere, torch.zeros(1, dtype=torch.int64, device=device), 0)
            return
        with self._attached.integer_sums(parameters, count) as sums:
            yield sums

    @property
    def _attached(self) -> GradientSink:
        if self.sink is None:
            raise RuntimeError("no gradient sink; make GradientSink(model) before the first backward pass.")
        return self.sink


def _check_all_in_stages(model: nn.Module) -> None:
    staged = {id(p) for module in model.modules() if isinstance(module, TakesGradients) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in staged:
            raise ValueError(
                f"parameter {name} belongs to no stage, so its gradient would be this rank's share only; put its layer "
                "into an EdgeStage or NodeStage, or use the adjoint form of the halo for the whole model."
            )
        if parameter.device.type == "cpu" and torch.get_num_threads() != 1:
            raise RuntimeError(
                f"torch computes with {torch.get_num_threads()} threads inside a kernel, and their number changes the "
                "bits; call torch.set_num_threads(1) first. Ranks are the parallelism."
            )
