"""How many functions some work calls: Python that grows with the tiles of an event shows as more of them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import domainpar

PACKAGE = Path(domainpar.__file__).parent
BY_CHANCE = {"__hash__", "__eq__"}  # a dictionary asks as often as its keys happen to collide


def calls_of(work: Callable[[], object], room: str = "") -> int:
    """Functions of Python and of C that this thread calls; if a room is named, those called by its functions only.

    Garbage is collected before and not meanwhile: what others left behind calls functions as it goes.
    """
    folder, count = f"{PACKAGE / room}/", 0

    def note(frame: FrameType, kind: str, what: Any) -> None:
        nonlocal count
        caller = frame.f_back if kind == "call" else frame  # kernels have none
        ours = not room or (caller is not None and caller.f_code.co_filename.startswith(folder))
        by_chance = kind == "call" and frame.f_code.co_name in BY_CHANCE
        count += kind in ("call", "c_call") and ours and not by_chance

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
