"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from domainpar.testing import patient


def wait_until(there: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something is there; a test that comes to the end of `seconds`, longer on a busy machine, fails."""
    seconds = patient(seconds)
    give_up_at = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < give_up_at, f"not so far after {seconds:g} s"
        time.sleep(0.01)


def has_ended(process: int) -> bool:
    """Whether a process is gone, or nobody has asked yet how it ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    return True
