"""Ranks as threads of this process: for verifying a model on the spot, for notebooks and for tests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

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
