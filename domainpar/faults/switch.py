"""The switch: which rank does what, where; and doing it."""

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
"""What an exchange is called in each phase; in other phases it is no place of its own."""


@dataclass
class Fault:
    """One fault on purpose.

    Attributes:
        rank: Which rank fails.
        at: Where, one of `POINTS`.
        do: What happens, one of `ACTIONS`.
        argument: What the action takes: seconds, or the name of a signal.
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
            Problem: If something is missing or unknown.
        """
        hint = f"write {SWITCH}=rank=2,at=halo_bwd:1,step=3,do=kill (docs/faults.md lists places and actions)"
        given = dict(word.split("=", 1) for word in text.split(",") if "=" in word)
        if set(given) - {"step"} != {"rank", "at", "do"} or len(given) != text.count(",") + 1:
            raise Problem(f"{SWITCH} is {text!r}: it needs rank, at and do", hint)
        place, index = given["at"], None
        if found := re.fullmatch(r"(halo_fwd|halo_bwd):L?(\d+)", place):
            place, index = found[1], int(found[2])
        do, _, argument = given["do"].partition(":")
        for name, value, known in (("at", place, POINTS), ("do", do, ACTIONS)):
            if value not in known:
                raise Problem(f"{SWITCH} has {name}={value}; known: {', '.join(known)}", hint)
        if (do in OF_PLANS) != (place == "plan") and do not in ("kill", "raise", "sleep", "exit"):
            raise Problem(f"{SWITCH}: do={do} does not go with at={place}", hint)
        try:
            step = int(given["step"]) if "step" in given else None
            return cls(int(given["rank"]), place, do, argument, step, index)
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
        """Let the fault happen if this is its place and its step; what is at hand comes back, spoilt or as it was."""
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
    """Pass one of `POINTS`, or an `exchange`; returns what is at hand there, spoilt if that is the fault."""
    if _armed is None:
        return at_hand
    changed: T = _armed.reach(point, at_hand)
    return changed


def _happen(fault: Fault, at_hand: Any) -> Any:
    said = f"domainpar: fault on purpose: rank {fault.rank} does {fault.do} at {fault.at}, time {time.time():.3f}\n"
    os.write(2, said.encode())
    if fault.do in OF_PLANS:
        from domainpar.faults.plans import PLAN_FAULTS

        return PLAN_FAULTS[fault.do](at_hand)
    if fault.do in ("nan", "flip"):
        return _spoil(fault.do, at_hand)
    if fault.do == "kill":
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
        _ask_for_too_much()
    else:
        raise RuntimeError(f"fault on purpose at {fault.at}")
    return at_hand


def _ask_for_too_much() -> None:
    """More memory than any machine has, from the allocator that real work would ask."""
    torch = sys.modules.get("torch")  # not imported here: rooms without torch have places too
    if torch is None:
        bytearray(2**60)
    else:
        torch.empty(2**60, dtype=torch.uint8)


def _spoil(do: str, tensor: Any) -> Any:
    """The tensor (on the host) with its first value NaN, or with the lowest bit of that flipped; in place."""
    first = tensor.detach().view(-1)[:1].numpy()
    if do == "nan":
        first[:] = float("nan")
    else:
        bits = first.view(f"i{first.itemsize}")
        bits ^= 1
    return tensor
