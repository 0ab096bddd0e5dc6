"""Where in the user's program a rank is: the line of the program that called, and the call of this package it is in."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import sysconfig
import threading
import traceback
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

Whose = Literal["ours", "theirs", "nobody's"]
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = (
    *(f"{sysconfig.get_paths()[name]}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
    f"{Path(torch.__file__).parent}{os.sep}",
    *(str(module.__file__) for module in (contextlib, runpy, threading)),
    "<frozen ",
)
"""Frames that are neither ours nor the user's: those of Python, torch and whatever is installed beside them."""

_CALLS = {
    "World.__exit__": "world.close()",
    "World.close": "world.close()",
    "World.session": "world.close()",
}


def where(frame: FrameType | None = None) -> tuple[str, str]:
    """The call of this package that the user's program is in, and its line: `("model(...)", "train.py:41")`.

    The call is empty outside of this package; both are empty without a frame of the user, as in our commands. `frame`:
    the innermost of a thread; by default that of the caller.
    """
    theirs: FrameType | None = None
    frames = [outer for outer, _ in traceback.walk_stack(frame or sys._getframe(1))]
    for outer in reversed(frames):  # the outermost call is the one they know
        whose = _whose(outer.f_code.co_filename)
        if whose == "theirs":
            theirs = outer
        elif whose == "ours" and theirs is not None:
            return _call(outer), _place(theirs)
    return "", "" if theirs is None else _place(theirs)


def line_of_user(frame: FrameType | None = None, whose: Whose = "theirs") -> str:
    """The innermost line of the user's program, or of this package, of a thread, `net.py:12`; empty if there is none.

    `frame`: the innermost of a thread; by default that of the caller.
    """
    frames = (outer for outer, _ in traceback.walk_stack(frame or sys._getframe(1)))
    return next((_place(outer) for outer in frames if _whose(outer.f_code.co_filename) == whose), "")


def in_words(call: str, place: str) -> str:
    """The output of `where` as `model(...) at train.py:41`; empty if that is empty."""
    return f"{call} at {place}" if call else place


def is_a_command() -> bool:
    """Whether the program is a command of this package, so that its flags are what a user can set."""
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    return os.path.abspath(main).startswith(_PACKAGE)


@cache
def _whose(name: str) -> Whose:
    """Who wrote a file."""
    if name.startswith(_PACKAGE):
        return "ours"
    return "nobody's" if name.startswith(_LIBRARIES) else "theirs"


def _call(frame: FrameType) -> str:
    if frame.f_code.co_name == "backward":
        return "backward()"
    if (packet := getattr(frame.f_locals.get("func"), "overloadpacket", None)) is not None:
        return f"{packet}(...)".replace("aten.", "torch.")  # of placed tensors
    name = frame.f_code.co_qualname
    short = name.replace("GraphPart.", "part.").replace("World.", "world.").replace(".__init__", "")
    return _CALLS.get(name, f"{short.removeprefix('_')}(...)")


def _place(frame: FrameType) -> str:
    return f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"


@cache
def _shown(name: str) -> str:
    path, here = Path(name), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
