"""Functions that torch runs out of sight of the watch, run as they are written: scripted, checkpointed, compiled.

Torch calls of a scripted function happen in its own interpreter, those of a checkpointed one once more in backward, and
a compiled one is traced. While a watch is on in this thread, the function that the user wrote is called instead: the
same numbers. What a checkpointed one makes is still computed again in backward, from the watch's tape; what a compiled
one would have saved is lost. Elsewhere nothing changes.

The places in torch where this is decided are not public: see the list in `domainpar.nn.adapt`.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch.utils import checkpoint

from domainpar.nn.adapt.rows import NotExact

_LOCK = threading.Lock()
_taken: set[str] = set()


def run_as_written(watching: Callable[[], Any]) -> None:
    """Make torch ask, from now on, whether a watch is on before it transforms a function.

    Args:
        watching: Gives the watch that is on in this thread, or None.
    """
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.jit.ScriptFunction, "__call__", _source),
        (checkpoint.CheckpointFunction, "apply", _written_down),
        (checkpoint, "_checkpoint_without_reentrant_generator", _writing_down),
        (torch, "compile", partial(_compiling, watching)),
        (sys.modules.get("torch._dynamo.eval_frame"), "_callback_from_stance", _eager),  # there once something compiled
    ]
    with _LOCK:  # ranks may be threads, and a place that is taken twice would ask twice
        for owner, name, instead in places:
            if owner is not None and name not in _taken:
                _taken.add(name)
                setattr(owner, name, _asking(watching, getattr(owner, name), instead))


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
            f"{function.name} is a traced or loaded function (torch.jit), and torch tells nothing of what runs inside; "
            "call the function that it was made from."
        )
    return original(*args, **kwargs)


def _written_down(watch: Any, usual: Any, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    with watch.tape.piece():
        return function(*args)


def _writing_down(watch: Any, usual: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    with watch.tape.piece():
        yield


def _compiling(watching: Callable[[], Any], watch: Any, usual: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that is compiled in a forward pass: maybe the first one, which brings the compiler."""
    compiled = usual(*args, **kwargs)
    run_as_written(watching)
    return compiled


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
    if _COMPILED not in _said and watch.part.part == 0:
        _said.add(_COMPILED)
        warnings.warn(_COMPILED, stacklevel=3)
