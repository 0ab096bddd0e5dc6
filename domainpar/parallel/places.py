"""Where the user's program is: the line of theirs that called, and which call of ours it is in, in their words."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_NOT_THEIRS = (
    _PACKAGE,
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{sysconfig.get_paths()['stdlib']}{os.sep}importlib",
    contextlib.__file__,
    runpy.__file__,
    threading.__file__,
    "<frozen ",
)
_CALLS = {
    "Parallel.forward": "model(...)",
    "Parallel.run": "model(...)",
    "Parallel.sum_gradients": "model.sum_gradients()",
    "GraphPart.sum": "part.sum(...)",
    "GraphPart.mean_loss": "part.mean_loss(...)",
    "World.close": "world.close()",
    "World.__exit__": "world.close()",
    "World.session": "world.close()",
}


def place_of_caller() -> str:
    """The line of the user's program that this thread is in, `train.py:41`; empty where all frames are ours."""
    return _place(next(_theirs(sys._getframe()), None))


def here_in_words(frame: FrameType | None) -> str:
    """Which call a thread is in and where, `model(...) at train.py:41`; empty where all frames are ours.

    Args:
        frame: The innermost frame of the thread.
    """
    theirs = next(_theirs(frame), None)
    if theirs is None:
        return ""
    called = frame
    inner: FrameType | None = None  # the frame of ours that theirs called
    while called is not None and called is not theirs:
        if called.f_code.co_filename.startswith(_PACKAGE):
            inner = called
        called = called.f_back
    return _place(theirs) if inner is None else f"{_name(inner)} at {_place(theirs)}"


def is_a_command() -> bool:
    """Whether the program is a command of this package, so that its flags are what a user can set."""
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    return os.path.abspath(main).startswith(_PACKAGE)


def _name(frame: FrameType) -> str:
    code = frame.f_code
    name = code.co_qualname if hasattr(code, "co_qualname") else code.co_name
    if code.co_name == "backward":
        return "backward()"
    return _CALLS.get(name, f"{name.removeprefix('GraphPart.').removeprefix('World.')}(...)")


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.f_lineno}"


def _theirs(frame: FrameType | None) -> Iterator[FrameType]:
    """The user's frames, the innermost first."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THEIRS):
            yield frame
        frame = frame.f_back
