"""Being asked to stop: a flag set by a signal, read at step boundaries, never a collective inside a handler."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@dataclass
class StopFlag:
    """Whether this process was asked to stop. Ranks agree on it at the next step boundary.

    Attributes:
        asked: Set by SIGUSR1, SIGTERM or Ctrl-C; a second Ctrl-C interrupts at once.
    """

    asked: bool = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

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
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
