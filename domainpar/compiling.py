"""numba's compiler, watched: what it compiles is said, compiled once on a machine, and no time of the work.

A kernel is compiled at its first call ever and kept on disk; later processes load it. Ranks reach a new kernel
together. Who does not find it on disk takes a lock of this machine and looks again, so that one rank compiles it and
the others load it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba.core import caching, event
from tqdm import tqdm

from domainpar import timeouts


class _Watch(event.Listener):
    """Holds the lock of this machine while numba compiles, and measures how long that takes, with loading."""

    def __init__(self) -> None:
        self.talks, self._said, self._alone = False, False, False
        self._mutex, self._file, self._depth = threading.Lock(), -1, 0
        self._began = self._seconds = 0.0

    def clock(self) -> float:
        """Seconds of this process, those spent here left out."""
        with self._mutex:
            return (self._began if self._depth else time.perf_counter()) - self._seconds

    def on_start(self, started: event.Event) -> None:
        if started.kind == "numba:compile":
            return self._say()
        with self._mutex:
            self._depth += 1  # kernels that call each other are compiled within each other
            if self._depth == 1:
                self._began = time.perf_counter()
        return None

    def on_end(self, ended: event.Event) -> None:
        if ended.kind == "numba:compile":
            return
        with self._mutex:
            self._depth -= 1
            if self._depth == 0:
                if self._file >= 0:
                    os.close(self._file)  # which gives the lock back
                    self._file = -1
                self._seconds += time.perf_counter() - self._began

    def lock(self) -> bool:
        """Wait until no other process of this user compiles; returns whether that was new. Kept until numba is done."""
        # Without locks every rank compiles for itself, and keeps the same machine code: slower, and nothing else.
        with self._mutex, suppress(OSError):
            if self._depth == 0 or self._file >= 0 or self._alone:
                return False
            self._file = os.open(_lock_file(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            came = time.perf_counter()
            while (waited := time.perf_counter() - came) < timeouts.COMPILING:  # its owner may be frozen
                with suppress(BlockingIOError):
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                if waited > timeouts.COMPILING_SILENCE:
                    self._say()
                time.sleep(0.01)
            self._alone = True
        return False

    def _say(self) -> None:
        if self.talks and not self._said:
            self._said = True
            tqdm.write("compiling: kernels for this machine (numba), once: later runs load them", file=sys.stderr)


def _lock_file() -> Path:
    """One for each user, copy of the package and machine: file systems that machines share may know no locks."""
    package = hashlib.sha256(str(Path(__file__).resolve().parent).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"domainpar-compiling-{os.getuid()}-{package}"


def _load(cache: caching.Cache, signature: Any, context: Any) -> Any:
    """The kernel kept on disk, also once another process has compiled it; None if this one is to compile it."""
    kernel = _LOAD(cache, signature, context)
    return _LOAD(cache, signature, context) if kernel is None and _WATCH.lock() else kernel


_LOAD: Callable[[caching.Cache, Any, Any], Any] = caching.Cache.load_overload
_WATCH = _Watch()


def watch_compiling(talks: bool) -> None:
    """Compile each kernel on one process of this machine at a time, and let `clock` stand still meanwhile.

    Args:
        talks: Whether this process says so, once, when it compiles or waits for a process that does.
    """
    _WATCH.talks = talks
    if caching.Cache.load_overload is not _load:
        caching.Cache.load_overload = _load  # type: ignore[method-assign]
        for kind in ("numba:compiler_lock", "numba:compile"):
            event.register(kind, _WATCH)  # type: ignore[no-untyped-call]


def clock() -> float:
    """Seconds, for the difference of two: those that numba took to load or compile kernels are not in them."""
    return _WATCH.clock()
