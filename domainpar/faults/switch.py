"""The switch: parses the environment variable, and lets its fault happen at its place."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from domainpar.faults.points import ACTIONS, OF_PLANS, POINTS
from domainpar.problems import Problem

T = TypeVar("T")

SWITCH = "DOMAINPAR_FAULT"

_EXCHANGES = {"forward": "halo_fwd", "backward": "halo_bwd"}
"""Name of an exchange in each phase; in other phases it is no place of its own."""


@dataclass
class Fault:
    """One fault on purpose.

    Attributes:
        rank: The rank that fails.
        at: The place, one of `POINTS`.
        do: The action, one of `ACTIONS`.
        argument: Argument of the action: seconds, or the name of a signal.
        step: Only at this step; None: the first time the place is reached.
        index: Only at this exchange of the phase, from 0; None: the first.
    """

    rank: int
    at: str
    do: str
    argument: str = ""
    step: int | None = None
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read `rank=2,at=halo_bwd:1,step=3,do=sleep:30`.

        Raises:
            Problem: If a key is missing, or a key or value unknown.
        """
        hint = f"write {SWITCH}=rank=2,at=halo_bwd:1,step=3,do=kill (docs/faults.md lists places and actions)"
        values = dict(word.split("=", 1) for word in text.split(",") if "=" in word)
        if set(values) - {"step"} != {"rank", "at", "do"} or len(values) != text.count(",") + 1:
            raise Problem(f"{SWITCH} is {text!r}: it needs rank, at and do", hint)
        place, index = values["at"], None
        if exchange := re.fullmatch(r"(halo_fwd|halo_bwd):L?(\d+)", place):
            place, index = exchange[1], int(exchange[2])
        do, _, argument = values["do"].partition(":")
        for name, value, known in (("at", place, POINTS), ("do", do, ACTIONS)):
            if value not in known:
                raise Problem(f"{SWITCH} has {name}={value}; known: {', '.join(known)}", hint)
        if (do in OF_PLANS) != (place == "plan") and do not in ("kill", "raise", "sleep", "exit"):
            raise Problem(f"{SWITCH}: do={do} does not go with at={place}", hint)
        try:
            step = int(values["step"]) if "step" in values else None
            return cls(int(values["rank"]), place, do, argument, step, index)
        except ValueError as error:
            raise Problem(f"{SWITCH} is {text!r}: rank and step are whole numbers", hint) from error


class _Armed:
    """A fault waiting for its moment on its rank."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.phase, self.step, self.exchanges, self.done = "", -1, 0, False

    def enter(self, phase: str, step: int) -> None:
        self.phase, self.step, self.exchanges = phase, step, 0

    def reach(self, point: str, at_hand: Any) -> Any:
        """Let the fault happen if this is its place and its step; returns what is at hand, as `_happen` does."""
        index = 0
        if point == "exchange":
            index, self.exchanges = self.exchanges, self.exchanges + 1
            point = _EXCHANGES.get(self.phase, "")
        fault = self.fault
        here = point == fault.at and fault.step in (None, self.step) and (fault.index is None or fault.index == index)
        if self.done or not here:
            return at_hand
        self.done = True
        return _happen(fault, at_hand)


_armed: _Armed | None = None


def arm(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Read the switch, once this process knows its rank. Unset, or meant for another rank, it does nothing.

    Raises:
        Problem: If the switch cannot be understood, on every rank alike.
    """
    global _armed
    text = environ.get(SWITCH)
    fault = None if not text else Fault.parse(text)
    _armed = _Armed(fault) if fault is not None and fault.rank == rank else None


def at(phase: str, step: int) -> None:
    """Tell the switch which phase of which step begins."""
    if _armed is not None:
        _armed.enter(phase, step)


def reach(point: str, at_hand: T = None) -> T:  # type: ignore[assignment]
    """Pass one of `POINTS`, or an `exchange`.

    Args:
        point: Name of the place.
        at_hand: A tensor, which is spoilt in place, or a plan, which is frozen.

    Returns:
        What is at hand: the same object, but for a spoilt plan.
    """
    if _armed is None:
        return at_hand
    changed: T = _armed.reach(point, at_hand)
    return changed


def _happen(fault: Fault, at_hand: Any) -> Any:
    line = f"domainpar: fault on purpose: rank {fault.rank} does {fault.do} at {fault.at}, time {time.time():.3f}\n"
    os.write(2, line.encode())
    if fault.do in OF_PLANS:
        from domainpar.faults.plans import PLAN_FAULTS

        return PLAN_FAULTS[fault.do](at_hand)
    if fault.do in ("nan", "flip"):
        _spoil(fault.do, at_hand)
    elif fault.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.do == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.do == "signal":
        os.kill(os.getpid(), signal.Signals[f"SIG{fault.argument}"])
    elif fault.do == "exit":
        os._exit(3)
    elif fault.do == "sleep":
        time.sleep(float(fault.argument))
    elif fault.do == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif fault.do == "oom":
        torch = sys.modules.get("torch")  # not imported: rooms without torch have places too
        bytearray(2**60) if torch is None else torch.empty(2**60, dtype=torch.uint8)
    else:
        raise RuntimeError(f"fault on purpose at {fault.at}")
    return at_hand


def _spoil(do: str, tensor: Any) -> None:
    """Make the first value of a tensor on the host NaN, or flip its lowest bit; in place."""
    first = tensor.detach().view(-1)[:1].numpy()
    if do == "nan":
        first[:] = float("nan")
    else:
        bits = first.view(f"i{first.itemsize}")
        bits ^= 1
