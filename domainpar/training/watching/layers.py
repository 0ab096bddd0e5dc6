"""The first layer that makes something not finite, on this rank: hooks for one pass forward and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from domainpar.nn.adapt.nested import every_tensor
from domainpar.nn.adapt.on_events import OnEvents
from domainpar.nn.adapt.rows import Rows, rows_of, unwatched
from domainpar.nn.gradients import GradientSink, TakesGradients
from domainpar.parallel.integer_sums import LARGEST_PARTIAL

Hook = Any


class Spoilt(NamedTuple):
    """What was not as it should be.

    Attributes:
        position: Its place in the order of the pass; the same layer has the same on every rank.
        what: `layer edge_stages.2`.
        largest: The largest magnitude, if that is what is wrong; None for numbers that are not finite.
    """

    position: int
    what: str
    largest: float | None = None


def is_finite(tensor: Tensor) -> bool:
    """Whether all its numbers are; those that are no floats are."""
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor).all())


class LayerWatch:
    """Looks at what every layer of a model makes, and at what gradients come back to it.

    Made before the forward pass and left after the backward one (`watching`).

    Attributes:
        forward: The first layer whose result is not finite; None if all are.
        gradients: Layers that got a gradient that is not finite or too large, in no order.
    """

    def __init__(self, model: nn.Module) -> None:
        self._root = model.module if isinstance(model, OnEvents) else model
        self.forward: Spoilt | None = None
        self.gradients: list[Spoilt] = []
        self._num_calls = 0
        self._last_call: dict[str, int] = {}
        self._times: dict[str, int] = {}

    @contextmanager
    def watching(self) -> Iterator[LayerWatch]:
        """Around one pass forward and back."""
        hooks = [*self._hooks_on_results(), *self._hooks_on_gradients()]
        stages = [(name, one) for name, one in self._root.named_modules() if isinstance(one, TakesGradients)]
        sinks = [stage.sink for _, stage in stages]
        for name, stage in stages:
            stage.sink = cast(GradientSink, _Looking(partial(self._gradient, name, largest=LARGEST_PARTIAL)))
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
            for (_, stage), sink in zip(stages, sinks):
                stage.sink = sink

    @property
    def backward(self) -> Spoilt | None:
        """Of the layers in `gradients` the first on the way back."""
        return min(self.gradients, default=None)

    def _hooks_on_results(self) -> Iterator[Hook]:
        for name, module in self._root.named_modules():
            yield module.register_forward_hook(partial(self._made, name))

    def _hooks_on_gradients(self) -> Iterator[Hook]:
        """Of layers that leave gradients in their parameters."""
        given = {id(p) for one in self._root.modules() if isinstance(one, TakesGradients) for p in one.parameters()}
        for name, parameter in self._root.named_parameters():
            if parameter.requires_grad and id(parameter) not in given:
                layer = name.rpartition(".")[0]
                yield parameter.register_hook(partial(_look, partial(self._gradient, layer)))

    def _made(self, name: str, module: nn.Module, given: Any, made: Any) -> None:
        with unwatched(), torch.no_grad():
            self._num_calls += 1
            self._times[name] = self._times.get(name, 0) + 1
            self._last_call[name] = self._num_calls
            if self.forward is None and not all(is_finite(_counted(one)) for one in every_tensor(made)):
                again = f", call {self._times[name]}" if self._times[name] > 1 else ""
                self.forward = Spoilt(self._num_calls, _in_words(name) + again)

    def _gradient(self, name: str, gradients: Sequence[Tensor], largest: float | None = None) -> None:
        """May be called by several threads."""
        position = -self._last_call.get(name, 0)  # what came last is the first on the way back
        for gradient in gradients:
            if not is_finite(gradient):
                self.gradients.append(Spoilt(position, _in_words(name)))
            elif largest is not None and gradient.numel() and (found := float(gradient.abs().max())) >= largest:
                self.gradients.append(Spoilt(position, _in_words(name), found))


class _Looking:
    """Stands in for a `GradientSink`: looks at what is given, and adds nothing."""

    def __init__(self, look: Any) -> None:
        self._look = look

    def add(self, parameters: Sequence[nn.Parameter], partials: Sequence[Tensor]) -> None:
        self._look(partials)


def _look(look: Any, gradient: Tensor) -> None:
    look([gradient])


def _in_words(name: str) -> str:
    return f"layer {name}" if name else "the logits"


def _counted(tensor: Tensor) -> Tensor:
    """Without rows of ghosts, which may be out of date."""
    rows = rows_of(tensor)
    if isinstance(rows, Rows):
        return tensor.narrow(rows.dim, 0, min(rows.axis.length, tensor.size(rows.dim)))
    return tensor
