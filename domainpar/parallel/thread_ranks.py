"""Ranks as threads of this process: for verifying a model on the spot, for notebooks and for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

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

    They run in turns, each until it waits for another one. Each has a random generator of torch of its own, as
    processes have: all begin in the state of the caller's, which does not change. (Those of GPUs, of Python and of
    numpy are shared.) A rank that waits for others by other means than its world does so in `transport.elsewhere`.

    Args:
        function, num_ranks: The work of each rank, and how many there are.
        *args: Passed on, the same objects to every rank, so leave them unchanged.
        timeout: Seconds after which everything is ended; `inf` for never, which asks for a `deadline`.
        deadline: Seconds that a rank waits for others; None: as many as `timeout`.
        domain_size: Ranks that share one event, as for `World.over`.

    Raises:
        TimeoutError: If ranks were still at work after `timeout`.
        Exception: What the first failing rank raised.
    """
    switchboard, marks = Switchboard(num_ranks), SideChannel.for_threads(num_ranks)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []
    # Settings of the process, which all ranks change.
    num_threads, random_state = torch.get_num_threads(), torch.get_rng_state()

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        transport = ThreadTransport(switchboard, rank, deadline=timeout if deadline is None else deadline)
        try:
            results[rank] = function(World.over(transport, domain_size=domain_size, marks=marks), *args)
        except BaseException as error:
            errors.append(error)
            switchboard.failure = switchboard.failure or f"rank {rank} failed: {type(error).__name__}: {error}"

    ranks = [
        threading.Thread(
            target=switchboard.run, args=(rank, random_state, partial(work, rank)), daemon=True, name=f"rank {rank}"
        )
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    give_up_at = time.monotonic() + timeout + 1.0  # the transports' own deadline says more
    try:
        for thread in ranks:
            thread.join(min(max(0.0, give_up_at - time.monotonic()), threading.TIMEOUT_MAX))
        if late := [thread.name for thread in ranks if thread.is_alive()]:
            switchboard.failure = switchboard.failure or "the time for this call is over"
            raise TimeoutError(f"{', '.join(late)} still at work after {timeout:g} s")
    finally:
        torch.set_num_threads(num_threads)
        torch.set_rng_state(random_state)
    if errors:
        # Not an error raised because another rank had failed.
        raise next((error for error in errors if not isinstance(error, RanksFailed)), errors[0])
    return results
