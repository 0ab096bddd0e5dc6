"""Ranks as threads of this process: for verifying a model on the spot, for notebooks and for tests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import psutil
import torch
from torch import _ops

from domainpar.parallel.board import SideChannel
from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.threads import Switchboard, ThreadTransport
from domainpar.parallel.world import World


def run_threads(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout: float = 60.0,
    deadline: float | None = None,
    domain_size: int | None = None,
) -> list[Any]:
    """Call `function(world, *args)` on every rank, a thread each, and return what each rank returned.

    On Linux all of them stay on one core: they hold Python's lock in turns, and to hand it to another core costs more
    than the work of a small graph (eight ranks: half the processor time).

    Args:
        function: The work of each rank.
        num_ranks: Ranks to run.
        *args: Passed on, the same objects to every rank, so leave them unchanged.
        timeout: Seconds after which everything is ended; `inf` for never, which asks for a `deadline`.
        deadline: Seconds that a rank waits for others; None: as many as `timeout`.
        domain_size: Ranks that share one event, as for `World.over`.

    Raises:
        TimeoutError: If ranks were still at work after `timeout`.
        Exception: What the first failing rank raised.
    """
    _make_operations_once()
    switchboard = Switchboard(num_ranks)
    marks = SideChannel.of_threads(num_ranks)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    core = None
    if num_ranks > 1 and hasattr(os, "sched_setaffinity"):  # macOS cannot hold threads on a core
        core = psutil.Process().cpu_num()

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        if core is not None:
            os.sched_setaffinity(0, {core})  # of this thread
        transport = ThreadTransport(switchboard, rank, deadline=timeout if deadline is None else deadline)
        try:
            results[rank] = function(World.over(transport, domain_size=domain_size, marks=marks), *args)
        except BaseException as error:
            errors.append(error)
            switchboard.fail(f"rank {rank} failed: {type(error).__name__}: {error}")

    num_threads = torch.get_num_threads()
    ranks = [threading.Thread(target=work, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    give_up_at = time.monotonic() + timeout + 1.0  # the transports' own deadline says more
    try:
        for thread in ranks:
            thread.join(min(max(0.0, give_up_at - time.monotonic()), threading.TIMEOUT_MAX))
        if late := [thread.name for thread in ranks if thread.is_alive()]:
            switchboard.fail("the time for this call is over")
            raise TimeoutError(f"{', '.join(late)} still at work after {timeout:g} s")
    finally:  # the setting is that of the process, which all ranks have changed
        torch.set_num_threads(num_threads)
    if errors:
        # Not what a rank raised because another one had failed.
        raise next((error for error in errors if not isinstance(error, RanksFailed)), errors[0])
    return results


@cache
def _make_operations_once() -> None:
    """Have all threads of this process get one object for each of torch's operations.

    Torch makes that object where its operation is first asked for, such as by a dispatch mode, and without a lock: two
    threads that ask at once make two. Its C++ side keeps the address of the one that it sees first, and no reference;
    `torch.ops` keeps the one that was made last. If these differ, the one at the address is freed, and the next use of
    the operation in a dispatch mode reads freed memory: a segmentation fault in any thread, at any later time.

    So it is in torch 2.13. `_ops` and its three classes are not public: without them this raises an AttributeError.
    """
    making = threading.RLock()  # to make an operation is to ask for others
    for kind in (_ops._Ops, _ops._OpNamespace, _ops.OpOverloadPacket):
        _make_once(kind, making)


def _make_once(kind: type[Any], making: threading.RLock) -> None:
    """Have a class whose `__getattr__` makes an attribute and keeps it make each one once, with a lock."""
    make = kind.__getattr__

    def made(self: Any, name: str) -> Any:
        with making:
            # Another thread may have made it since this one did not find it.
            return vars(self)[name] if name in vars(self) else make(self, name)

    kind.__getattr__ = made
