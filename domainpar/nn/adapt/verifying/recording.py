"""What every layer of a model was given and made, in the order of events."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from domainpar.nn.adapt.data import is_data
from domainpar.nn.adapt.rows import unwatched
from domainpar.nn.adapt.verifying.seeing import Seen, see
from domainpar.nn.adapt.watch import watching

When = Literal["given", "made", "left"]


class Layer(NamedTuple):
    """One call of a layer."""

    name: str
    number: int


class Moment(NamedTuple):
    """What was seen when a layer was called, had made its result, or left its arguments behind."""

    layer: Layer
    when: When
    inside: Layer | None
    seen: list[Seen]


class Recorder:
    """Writes down what all layers of a module are given and make.

    Attributes:
        kinds: The class of each layer, by its name.
        moments: What was written down.
        running: The calls that have begun and not ended, inner ones last.
    """

    def __init__(self, module: nn.Module) -> None:
        self.kinds = {name: type(child).__name__ for name, child in module.named_modules()}
        self.moments: list[Moment] = []
        self.running: list[Layer] = []
        self._calls: Counter[str] = Counter()
        self._hooks = []
        for name, child in module.named_modules():
            self._hooks.append(child.register_forward_pre_hook(partial(self._called, name), with_kwargs=True))
            self._hooks.append(child.register_forward_hook(partial(self._returns, name), with_kwargs=True))

    def stop(self) -> None:
        """Write down no more: what is recomputed in backward was seen before."""
        for hook in self._hooks:
            hook.remove()

    def result(self) -> list[Seen]:
        """What the module itself made."""
        return next(moment.seen for moment in self.moments if moment.layer.name == "" and moment.when == "made")

    def _called(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls[name] += 1
        inside = self.running[-1] if self.running else None
        self.running.append(Layer(name, self._calls[name]))
        self._write("given", inside, (args, kwargs))

    def _returns(self, name: str, _: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        while self.running[-1].name != name:  # one whose error its caller caught
            self.running.pop()
        inside = self.running[-2] if len(self.running) > 1 else None
        self._write("made", inside, result)
        self._write("left", inside, (args, kwargs))
        self.running.pop()

    def _write(self, when: When, inside: Layer | None, value: Any) -> None:
        watch = watching()
        with unwatched(), torch.no_grad():
            seen = [see(tensor, watch) for tensor in tensors(value)]
        self.moments.append(Moment(self.running[-1], when, inside, seen))


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in anything that layers hand each other, always in the same order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Mapping):
        yield from tensors(tuple(value.values()))
    elif is_data(value):
        yield from tensors(value.to_dict())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors(tuple(getattr(value, one.name) for one in dataclasses.fields(value)))
