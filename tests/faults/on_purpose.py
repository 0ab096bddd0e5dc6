"""Faults on purpose: what the file that DOMAINPAR_FAULT names does when one rank reaches one place.

    export DOMAINPAR_FAULT="tests/faults/on_purpose.py rank=2,at=halo_bwd:1,step=3,do=kill"
    mpiexec -n 4 python -m domainpar.train

`switch` makes that text. docs/reference/fault_switch.md has the tables of places and actions, too.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from domainpar.common.faults import SWITCH
from domainpar.common.problems import Problem

POINTS: dict[str, str] = {
    "init": "before the ranks meet",
    "joined": "after the ranks have met",
    "load": "a rank reads its part of an event",
    "plan": "before the plans of all ranks are compared",
    "forward": "before the forward pass of an event",
    "halo_fwd": "an exchange of the forward pass; `halo_fwd:1` is its second one",
    "loss": "the logits of an event are computed",
    "backward": "before the backward pass of an event",
    "halo_bwd": "an exchange of the backward pass; `halo_bwd:1` is its second one",
    "reduce": "before gradients are summed over the ranks",
    "optimizer": "before the optimiser changes parameters",
    "stepped": "after the optimiser has changed parameters",
    "boundary": "where ranks agree whether to go on",
    "evaluate": "before a validation event",
    "save": "a checkpoint is about to be written",
    "save:files": "after some of a checkpoint's files are written",
    "save:rename": "the files are there, but not under their name",
    "save:pointer": "the checkpoint is there, but nothing points to it",
    "save:drop": "before old checkpoints are removed",
    "score": "infer: before the scores of an event are gathered",
    "tracks": "infer: before tracks are built",
    "write": "infer: before the files of an event are written",
    "close": "the work is done, the ranks are about to part",
}  # fmt: skip
"""The places, by the name that `at=` takes."""

ACTIONS: dict[str, str] = {
    "kill": "the process ends as by kill -9",
    "raise": "an exception",
    "exit": "the process leaves with exit code 3, without a message",
    "sleep": "nothing happens for some seconds: `sleep:30`",
    "freeze": "the whole process stops, as by kill -STOP",
    "signal": "the process sends itself a signal: `signal:USR1`",
    "oom": "more memory is asked for than there is",
    "full": "the disk is full",
    "nan": "the first value of the tensor at hand becomes NaN (`loss`, `optimizer`, `stepped`)",
    "flip": "the lowest bit of the first value at hand flips (`optimizer`, `stepped`)",
    "short": "one row fewer is sent than was agreed (`plan`)",
    "long": "one row more is sent than was agreed (`plan`)",
    "swap": "two rows are sent in the wrong order (`plan`)",
    "peer": "rows go to the wrong rank (`plan`)",
    "stale": "the plan is that of another event (`plan`)",
    "id": "one row is that of another node (`plan`)",
}
"""The actions, by the name that `do=` takes."""

OF_PLANS = ("short", "long", "swap", "peer", "stale", "id")
"""Actions that spoil a plan on one rank only: gloo and MPI would exchange its rows without an error."""

_EXCHANGES = {"forward": "halo_fwd", "backward": "halo_bwd"}
"""Name of an exchange in each phase; in other phases it is no place of its own."""


@dataclass
class Fault:
    """One fault on purpose, and how far its rank has come.

    Attributes:
        rank: The rank that fails.
        at: The place, one of `POINTS`.
        do: The action, one of `ACTIONS`.
        argument: Argument of the action: seconds, or the name of a signal.
        step: Only at this step; None: the first time the place is reached.
        index: Only at this exchange of the phase, from 0; None: the first.
        phase: The phase that the rank is in.
        current_step: The step of that phase.
        exchanges: Exchanges of that phase so far.
        happened: Whether it has happened: it does so once.
    """

    rank: int
    at: str
    do: str
    argument: str = ""
    step: int | None = None
    index: int | None = None
    phase: str = field(default="", init=False)
    current_step: int = field(default=-1, init=False)
    exchanges: int = field(default=0, init=False)
    happened: bool = field(default=False, init=False)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read `rank=2,at=halo_bwd:1,step=3,do=sleep:30`.

        Raises:
            Problem: If a key is missing, or a key or value unknown.
        """
        example = switch("rank=2,at=halo_bwd:1,step=3,do=kill")
        hint = f"write {SWITCH}='{example}' (docs/reference/fault_switch.md lists them)"
        values = dict(word.split("=", 1) for word in text.split(",") if "=" in word)
        if set(values) - {"step"} != {"rank", "at", "do"} or len(values) != text.count(",") + 1:
            raise Problem(f"{SWITCH} is {text!r}: it needs rank, at and do", hint)
        place, index = values["at"], None
        if exchange := re.fullmatch(r"(halo_fwd|halo_bwd):L?(\d+)", place):
            place, index = exchange[1], int(exchange[2])
        do, _, argument = values["do"].partition(":")
        for name, value, allowed in (("at", place, POINTS), ("do", do, ACTIONS)):
            if value not in allowed:
                raise Problem(f"{SWITCH} has {name}={value}; known: {', '.join(allowed)}", hint)
        if (do in OF_PLANS) != (place == "plan") and do not in ("kill", "raise", "sleep", "exit"):
            raise Problem(f"{SWITCH}: do={do} does not go with at={place}", hint)
        try:
            step = int(values["step"]) if "step" in values else None
            return cls(int(values["rank"]), place, do, argument, step, index)
        except ValueError as error:
            raise Problem(f"{SWITCH} is {text!r}: rank and step are whole numbers", hint) from error

    def begin(self, phase: str, step: int) -> None:
        """A phase of a step begins."""
        self.phase, self.current_step, self.exchanges = phase, step, 0

    def reach(self, point: str, at_hand: Any) -> Any:
        """Let the fault happen if this is its place and its step; returns what is at hand, as `_happen` does."""
        index = 0
        if point == "exchange":
            index, self.exchanges = self.exchanges, self.exchanges + 1
            point = _EXCHANGES.get(self.phase, "")
        here = point == self.at and self.step in (None, self.current_step) and self.index in (None, index)
        if self.happened or not here:
            return at_hand
        self.happened = True
        return _happen(self, at_hand)


def switch(text: str) -> str:
    """The value of the variable that makes a fault happen: this file and its words."""
    return f"{__file__} {text}"


def listener(rank: int, words: str) -> Fault | None:
    """The fault, on its rank.

    Raises:
        Problem: If the words cannot be understood, on every rank alike: they are read before ranks are told apart.
    """
    fault = Fault.parse(words)
    return fault if fault.rank == rank else None


def _happen(fault: Fault, at_hand: Any) -> Any:
    # Written before it happens, past all buffers: a test measures the time from here to the end of the last rank.
    line = f"domainpar: fault on purpose: rank {fault.rank} does {fault.do} at {fault.at}, time {time.time():.3f}\n"
    os.write(2, line.encode())
    if fault.do in OF_PLANS:
        return spoilt_plan(at_hand, fault.do)
    if fault.do in ("nan", "flip"):
        spoil_tensor(at_hand, fault.do)
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
        if torch is None:
            bytearray(2**60)
        else:
            torch.empty(2**60, dtype=torch.uint8, device="cuda" if torch.cuda.is_initialized() else "cpu")
    else:
        raise RuntimeError(f"fault on purpose at {fault.at}")
    return at_hand


def spoil_tensor(tensor: Any, how: str) -> None:
    """Make the first value of a tensor NaN (`nan`), or flip its lowest bit (`flip`); in place, on any device."""
    torch = sys.modules["torch"]  # whose tensor it is
    first = tensor.data.view(-1)[:1]  # `data`: autograd must not notice, as with a broken memory
    if how == "nan":
        first.fill_(float("nan"))
    else:
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        first.view(integers[first.element_size()]).bitwise_xor_(1)


def spoilt_plan(plan: Any, how: str) -> Any:
    """A `PartitionPlan` as one of `OF_PLANS` changes it, of the rows for the first receiver that has enough of them."""
    import numpy as np  # here: places in commands that have not loaded it yet

    if how == "stale":
        return replace(plan, owned_ids=plan.owned_ids + 1, ghost_ids=plan.ghost_ids + 1)
    blocks = np.split(np.array(plan.send_rows), np.cumsum(plan.send_counts)[:-1])
    least = 2 if how == "swap" else 1
    peer = next((peer for peer, block in enumerate(blocks) if len(block) >= least), None)
    if peer is None:
        raise RuntimeError(f"a fault on purpose needs a rank that sends {least} rows to another; take another rank.")
    rows = blocks[peer]
    if how == "short":
        blocks[peer] = rows[:-1]
    elif how == "long":
        blocks[peer] = np.append(rows, rows[-1])
    elif how == "swap":
        rows[:2] = rows[1::-1]
    elif how == "id":
        rows[0] = (rows[0] + 1) % plan.num_owned
    else:
        others = [rank for rank in range(len(blocks)) if rank not in (peer, plan.part)]
        if not others:
            raise RuntimeError("a fault on purpose: rows for the wrong rank need at least 3 ranks.")
        blocks[peer], blocks[others[0]] = blocks[others[0]], rows
    return replace(plan, send_rows=np.concatenate(blocks), send_counts=np.array([len(block) for block in blocks]))
