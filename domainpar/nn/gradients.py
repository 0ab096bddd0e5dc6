"""Sums of parameter gradients: a float partial per owned tile, added as integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.transport import Pending, Transport
from domainpar.plan import IntArray


class GradientSink:
    """Takes each owned tile's share of the parameter gradients; the sum over all tiles and ranks is exact.

    Every rank reduces every parameter of the model, whatever it computed itself. Making a sink attaches it to the
    model's stages.

    Args:
        model: Its parameters, in order, are what is summed.
        early: Modules of it whose stages are called once in a forward pass. When all of these have ended the last
            backward pass of a step, their sums over ranks start, while the others compute; see `expect_last_pass`.

    Raises:
        ValueError: If a parameter lies outside all stages, where its gradient would be one rank's share only, or if two
            stages share some of their parameters but not all.
        RuntimeError: If torch computes with several threads on CPU: their number would change the bits.
    """

    def __init__(self, model: nn.Module, early: Sequence[nn.Module] = ()) -> None:
        _check_all_in_stages(model)
        first = [stage for module in early for stage in module.modules() if isinstance(stage, GradSink)]
        of_first = {id(parameter) for stage in first for parameter in stage.parameters()}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        pieces = [[p for p in trained if id(p) in of_first], [p for p in trained if id(p) not in of_first]]
        self._pieces = [_Bucket(piece) for piece in pieces if piece] or [_Bucket([])]
        # By identity: torch compares tensors number by number. Models keep their parameters for as long as they live.
        self._place = {id(p): (piece, start) for piece in self._pieces for p, start in piece.starts()}
        self._early = {id(stage) for stage in first if GradSink.trainable(stage)}
        self._due: set[int] = set()
        self._sums_over: Transport | None = None
        for name, module in model.named_modules():
            if isinstance(module, GradSink):
                # A tile's gradients are added as one piece, so a stage's parameters have to follow each other.
                parameters = GradSink.trainable(module)  # by its modules, which may be others by now
                places = [self._place[id(parameter)] for parameter in parameters]
                after = [(piece, start + own.numel()) for own, (piece, start) in zip(parameters, places)]
                if any(here != there for here, there in zip(after, places[1:])):
                    raise ValueError(
                        f"stage {name} shares some of its parameters with another one; share a whole stage or MLP, or "
                        "nothing."
                    )
                module.sink = self

    def add_limbs(self, parameters: Sequence[nn.Parameter], limbs: IntArray, rejected: int, largest: float) -> None:
        """Add the sums of all owned tiles, which are integers already.

        Args:
            parameters: Parameters that are trained and lie one behind the other in the model's order.
            limbs: The sums of their gradients, int64 [2, numbers], see `IntegerSums.add_limbs`.
            rejected: Partials that were left out, for they were not finite or too large.
            largest: The largest of them.
        """
        piece, start = self._place[id(parameters[0])]
        piece.sums.add_limbs(limbs, rejected, start)

    def expect_last_pass(self, transport: Transport) -> None:
        """Announce that the next backward pass is the last before `reduce`: sums over ranks start as it completes them.

        Every rank of a domain group calls it before the same pass. On ranks without one the sums start in `reduce`.
        """
        self._sums_over, self._due = transport, set(self._early)

    def finished(self, stage: GradSink) -> None:
        """Note that a stage has ended its backward pass. *Collective*, if all `early` ones have ended the last."""
        if self._sums_over is not None and id(stage) in self._due:
            self._due.remove(id(stage))
            if not self._due:
                self._pieces[0].start(self._sums_over, early=True)

    def reduce(self, transport: Transport) -> Tensor:
        """Sum over ranks, and leave the result in each parameter's `grad`. *Collective*.

        Returns:
            The number of partials, over all ranks, that were not finite or too large, int64 []; unless 0, gradients
            mean nothing.
        """
        self._sums_over = None
        for piece in self._pieces:
            piece.start(transport)
        return torch.stack([piece.finish() for piece in self._pieces]).sum()

    def rejected_now(self) -> Tensor:
        """Partials so far that were not finite or too large, on this rank, int64 []."""
        return torch.stack([piece.rejected_now() for piece in self._pieces]).sum()


class _Bucket:
    """Parameters whose gradients are summed over ranks in one call."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.sums = IntegerSums(sum(parameter.numel() for parameter in parameters))
        self._under_way: Pending | None = None
        self._rejected = torch.zeros((), dtype=torch.int64)

    def starts(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Each parameter, and the sum of its first number."""
        start = 0
        for parameter in self._parameters:
            yield parameter, start
            start += parameter.numel()

    def start(self, transport: Transport, early: bool = False) -> None:
        """Start the sums over ranks, unless they have started. *Collective*."""
        if self._under_way is None:
            if early:  # else nothing else happens before they are over
                self._rejected = self.sums.rejected_now()
            # One name for it on all ranks: some are in backward, those without an event are not.
            doing, transport.doing = transport.doing, "the sums of gradients"
            try:
                self._under_way = self.sums.start_reduce(transport)
            finally:
                transport.doing = doing

    def finish(self) -> Tensor:
        """Wait for the sums and put them into `grad`; returns the number of partials left out on all ranks."""
        assert self._under_way is not None
        self._under_way.finish()
        self._under_way = None
        total = self.sums.total()
        rounded = {kind: total.to(kind) for kind in {parameter.dtype for parameter in self._parameters}}
        for parameter, start in self.starts():
            # Rounded once, from the exact sum.
            parameter.grad = rounded[parameter.dtype][start : start + parameter.numel()].view_as(parameter)
        rejected = self.sums.rejected_now()  # clearing sets it to 0
        self.sums.clear()
        return rejected

    def rejected_now(self) -> Tensor:
        """Partials left out on this rank so far."""
        return self.sums.rejected_now() if self._under_way is None else self._rejected


class GradSink(nn.Module):
    """A module whose parameter gradients go to a sink instead of `grad`."""

    sink: GradientSink | None = None

    def trainable(self) -> list[nn.Parameter]:
        """The parameters it sums gradients for, in the model's order."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def add_limbs(self, parameters: Sequence[nn.Parameter], limbs: IntArray, rejected: int, largest: float) -> None:
        """Add the sums of all owned tiles to the sink; arguments are those of `GradientSink.add_limbs`."""
        if self.sink is None:
            raise RuntimeError("no gradient sink; make GradientSink(model) before the first backward pass.")
        if parameters:
            self.sink.add_limbs(parameters, limbs, rejected, largest)

    def finished(self) -> None:
        """Note that its backward pass has ended."""
        if self.sink is not None:
            self.sink.finished(self)


def _check_all_in_stages(model: nn.Module) -> None:
    staged = {id(p) for module in model.modules() if isinstance(module, GradSink) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in staged:
            raise ValueError(
                f"parameter {name} belongs to no stage, so its gradient would be this rank's share only; put its layer "
                "into an EdgeStage or NodeStage, or use the adjoint form of the halo for the whole model."
            )
    if torch.get_num_threads() != 1:
        raise RuntimeError(
            f"torch computes with {torch.get_num_threads()} threads inside a kernel, and their number changes the "
            "bits; call torch.set_num_threads(1) first. Ranks are the parallelism."
        )
