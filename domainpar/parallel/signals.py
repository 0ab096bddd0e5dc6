"""Requests to stop: a signal sets a flag that is read at step boundaries. No handler makes a collective call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from domainpar.parallel.launcher import started_as_root

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@dataclass
class StopFlag:
    """A request to stop this process. Ranks agree on it at the next step boundary."""

    requested: bool = False  # by SIGUSR1, SIGTERM or Ctrl-C; a second Ctrl-C interrupts at once
    by: int | None = None  # the first signal

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self.by = True, number
            if started_as_root():
                # Not `print`, which the signal may have interrupted: its buffer takes no second call.
                os.write(
                    2,
                    b"\nstopping at the next step, with a checkpoint, if there is time; Ctrl-C (again) ends at once\n",
                )

    @classmethod
    @contextmanager
    def listening(cls) -> Iterator[StopFlag]:
        """Listen to the signals while the block runs. Does nothing outside a program's main thread."""
        flag = cls()
        if threading.current_thread() is not threading.main_thread():
            yield flag
            return
        before = {number: signal.signal(number, flag._handle) for number in STOP_SIGNALS}
        try:
            yield flag
        finally:  # the program around may have handlers of its own
            for number, handler in before.items():
                signal.signal(number, handler)
