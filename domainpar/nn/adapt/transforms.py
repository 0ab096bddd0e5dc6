"""Scripted, checkpointed and compiled functions of torch, run as ordinary Python under a watch.

Without this, a scripted function would make its torch calls in an interpreter of its own, a checkpointed one would make
them again in backward, and a compiled one would be traced: the watch would see none of these. So while a watch is on in
this thread the function that the user wrote is called instead, with the same numbers. What is checkpointed is still
computed again in backward, by `recomputation`; the gain of compiling is lost. Other threads do not change, and after
the last watched pass torch is as before.

The places in torch where this is decided are not public: see the list in `domainpar.nn.adapt`.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils import checkpoint

from domainpar.nn.adapt.rows import NotExact

_LOCK = threading.Lock()  # ranks may be threads, whose passes overlap
_running = 0  # passes of this process
_usual: dict[tuple[Any, str], Any] = {}  # what the places hold themselves: `_INHERITED` where an owner holds nothing
_INHERITED = object()


@contextmanager
def run_as_written(watching: Callable[[], Any]) -> Iterator[None]:
    """Inside, torch asks whether a watch is on before it transforms a function.

    Args:
        watching: Gives the watch that is on in this thread, or None.
    """
    global _running
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.jit.ScriptFunction, "__call__", _source),
        (checkpoint.CheckpointFunction, "apply", _written_down),
        (checkpoint, "_checkpoint_without_reentrant_generator", _writing_down),
        (torch, "compile", _left_as_written),
        (sys.modules.get("torch._dynamo.eval_frame"), "_callback_from_stance", _eager),  # there once something compiled
    ]
    with _LOCK:
        new = [place for place in places if place[0] is not None and place[:2] not in _usual]
        # All are looked up before one is changed: a torch that lacks one is left as it is.
        asking = [_asking(watching, getattr(owner, name), instead) for owner, name, instead in new]
        _running += 1
        for (owner, name, _), ask in zip(new, asking):
            _usual[owner, name] = vars(owner).get(name, _INHERITED)
            setattr(owner, name, ask)
    try:
        yield
    finally:
        with _LOCK:
            _running -= 1
            while _usual and not _running:
                (owner, name), usual = _usual.popitem()
                delattr(owner, name) if usual is _INHERITED else setattr(owner, name, usual)


def _asking(watching: Callable[[], Any], usual: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(usual)
    def ask(*args: Any, **kwargs: Any) -> Any:
        watch = watching()
        return usual(*args, **kwargs) if watch is None else instead(watch, usual, *args, **kwargs)

    return ask


def _source(watch: Any, usual: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """The source of a scripted function. A traced function has none: sizes may be constants in it."""
    original: Callable[..., Any] | None = getattr(function, "_torchdynamo_inline", None)
    if original is None or torch.jit._state._try_get_jit_cached_function(original) is None:
        raise NotExact(
            f"{function.name} is a traced or loaded function (torch.jit), and calls inside of it cannot be watched; "
            "call the function that it was made from."
        )
    return original(*args, **kwargs)


def _written_down(watch: Any, usual: Any, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    with watch.recomputation.piece():
        return function(*args)


def _writing_down(watch: Any, usual: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    with watch.recomputation.piece():
        yield


def _left_as_written(watch: Any, usual: Any, model: Any = None, **options: Any) -> Any:
    """`torch.compile` in a forward pass, called or as a decorator with options."""
    _say_compiled(watch)
    return (lambda function: function) if model is None else model


def _eager(watch: Any, usual: Any, callback: Any) -> Any:
    if callback in (None, False):
        return usual(callback)
    _say_compiled(watch)
    return None  # as with torch.compiler.set_stance("force_eager"), for this thread only


_COMPILED = (
    "torch.compile in the model: on a split graph its functions run eagerly, as they are written. The results are the "
    "same, to rounding."
)
_said: set[str] = set()


def _say_compiled(watch: Any) -> None:
    """Say once in a process what the user's model does not get, on the first rank."""
    if _COMPILED not in _said and watch.part.index == 0:
        _said.add(_COMPILED)
        warnings.warn(_COMPILED, stacklevel=3)
