"""Functions that torch runs out of sight of the watch, run as they are written: scripted, checkpointed, compiled.

Torch calls of a scripted function happen in its own interpreter, those of a checkpointed one once more in backward, and
a compiled one is traced. While a watch is on in this thread, the function that the user wrote is called instead: the
same numbers, without what the transformation would have saved. Elsewhere nothing changes.

The three places are torch's own and not public: see the list in `domainpar.nn.adapt`.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint

from domainpar.nn.adapt.rows import NotExact

Watching = Callable[[], Any]

_LOCK = threading.Lock()
_done: set[str] = set()


def run_as_written(watching: Watching) -> None:
    """Make torch ask, from now on, whether a watch is on before it transforms a function.

    Args:
        watching: Gives the watch that is on in this thread, or None.
    """
    with _LOCK:
        for name, replace in _PLACES.items():
            if name not in _done and replace(watching):
                _done.add(name)


def _scripted(watching: Watching) -> bool:
    kind = torch.jit.ScriptFunction
    call = kind.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = watching()
        return call(self, *args, **kwargs) if watch is None else _original(self)(*args, **kwargs)

    kind.__call__ = __call__  # type: ignore[method-assign]
    return True


def _original(function: Any) -> Callable[..., Any]:
    """The source of a scripted function. A traced function has none: sizes may be constants in it."""
    original: Callable[..., Any] | None = getattr(function, "_torchdynamo_inline", None)
    if original is None or torch.jit._state._try_get_jit_cached_function(original) is None:
        raise NotExact(
            f"{function.name} is a traced or loaded function (torch.jit), and torch tells nothing of what runs inside; "
            "call the function that it was made from."
        )
    return original


def _checkpointed(watching: Watching) -> bool:
    apply: Callable[..., Any] = checkpoint.CheckpointFunction.apply
    generator = checkpoint._checkpoint_without_reentrant_generator

    def plain(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if (watch := watching()) is None:
            return apply(function, preserve, *args)
        _say(watch, "checkpointed")
        return function(*args)

    def unwrapped(*args: Any, **kwargs: Any) -> Iterator[None]:
        if (watch := watching()) is None:
            yield from generator(*args, **kwargs)
        else:
            _say(watch, "checkpointed")
            yield

    checkpoint.CheckpointFunction.apply = plain  # type: ignore[method-assign]
    checkpoint._checkpoint_without_reentrant_generator = unwrapped
    return True


def _compiled(watching: Watching) -> bool:
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # there as soon as something was compiled
    if frames is None:
        return False
    ask = frames._callback_from_stance

    def _callback_from_stance(callback: Any) -> Any:
        if callback in (None, False) or (watch := watching()) is None:
            return ask(callback)
        _say(watch, "compiled")
        return None  # as with torch.compiler.set_stance("force_eager"), for this thread only

    frames._callback_from_stance = _callback_from_stance
    return True


_PLACES: dict[str, Callable[[Watching], bool]] = {
    "scripted": _scripted,
    "checkpointed": _checkpointed,
    "compiled": _compiled,
}
_SAID = {
    "checkpointed": "activation checkpointing (torch.utils.checkpoint) in the model: on a split graph its functions "
    "are called as they are and nothing is computed again, so that it saves no memory here. The results are the same.",
    "compiled": "torch.compile in the model: on a split graph its functions run eagerly, as they are written. The "
    "results are the same, to rounding.",
}
_said: set[str] = set()


def _say(watch: Any, what: str) -> None:
    """Say once in a process what the user's model does not get, on the first rank."""
    if what not in _said and watch.part.part == 0:
        _said.add(what)
        warnings.warn(_SAID[what], stacklevel=3)
