"""Where the time of programs goes: seconds and calls of each of their operations, in the compiled loop over tiles."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from llvmlite import ir
from numba import njit
from numba import types as numba_types
from numba.core import cgutils
from numba.extending import intrinsic
from torch.profiler import record_function

from domainpar.nn import operations, program
from domainpar.nn.program import MOST_OPERANDS, team

PRODUCTS = ("multiply_rows", "outer_of_rows")
OPERATIONS = (*PRODUCTS, "layer_forward", "layer_backward", "copy_columns", "clear_bytes", "split", "sum_pairs")
LOOP = "tiles, strips and operands"


@intrinsic
def _cycles(typing: Any) -> Any:
    """The processor's counter of cycles."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return numba_types.int64(), generate


_plain_operate = program._operate


@njit(nogil=True)
def _counted(kernels: Any, addresses: Any, row_bytes: Any, op: int, first: int, count: int, arguments: Any) -> None:
    """Do an operation, and count behind the operands its calls and cycles."""
    began = _cycles()
    _plain_operate(kernels, addresses, row_bytes, op, first, count, arguments)
    arguments[MOST_OPERANDS + 2 * op] += 1
    arguments[MOST_OPERANDS + 2 * op + 1] += _cycles() - began


@njit
def _now() -> int:
    return _cycles()


class Spent(NamedTuple):
    """Calls of an operation, and seconds in it."""

    calls: int = 0
    seconds: float = 0.0


class OperationClock:
    """What programs spent: of all threads, divided by their number.

    Attributes:
        spent: Of each operation, by name and what it was made for; and of what is around them, `LOOP`.
    """

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()
        # The loop as it is, but for the function that does one operation.
        plain = program._run.py_func
        counted = types.FunctionType(plain.__code__, {**vars(program), "_operate": _counted})
        self._run = njit(nogil=True, error_model="numpy")(counted)
        self._seconds_of_cycle, self._threads = _seconds_of_cycle(), team().size

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, all programs are timed; the profiler of torch sees their loops by the name `LOOP`."""
        with ExitStack() as replaced:
            for name in OPERATIONS:
                replaced.enter_context(patch.object(operations, name, self._named(name)))
            replaced.enter_context(patch.object(program, "_run", self._timed))
            yield

    def _named(self, name: str) -> Callable[..., int]:
        plain = getattr(operations, name)

        def named(*made_for: Any) -> int:
            address: int = plain(*made_for)
            self._names[address] = " ".join([name, *(str(what).removeprefix("torch.") for what in made_for)])
            return address

        return named

    def _timed(self, kernels: Any, whens: Any, addresses: Any, *rest: Any) -> bool:
        arguments = np.zeros(MOST_OPERANDS + 2 * len(kernels), np.int64)
        began = time.perf_counter()
        with record_function(LOOP):
            more: bool = self._run(kernels, whens, addresses, *rest[:-1], arguments)
        around = time.perf_counter() - began
        counts = arguments[MOST_OPERANDS:].reshape(-1, 2).tolist()
        for kernel, operands, (calls, cycles) in zip(kernels.tolist(), addresses, counts):
            name = self._names[kernel]
            if name.startswith(PRODUCTS):
                name += f", {operands[1]} x {operands[4 if name.startswith(PRODUCTS[0]) else 3]}"
            around -= cycles * self._seconds_of_cycle
            self._add(name, calls, cycles * self._seconds_of_cycle)
        self._add(LOOP, 1, around)
        return more

    def _add(self, name: str, calls: int, seconds: float) -> None:
        with self._lock:
            before = self.spent.get(name, Spent())
            self.spent[name] = Spent(before.calls + calls, before.seconds + seconds / self._threads)


def _seconds_of_cycle() -> float:
    """By the clock; processors count cycles of one length, whatever their frequency."""
    _now()
    began, cycles = time.perf_counter(), _now()
    time.sleep(0.05)
    return (time.perf_counter() - began) / (_now() - cycles)
