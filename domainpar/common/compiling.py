"""numba's compiler as all kernels use it: without the GIL, kept on disk, and watched.

A kernel is compiled at its first call ever and kept on disk; later processes load it. numba keeps it until the file of
the function changes. But kernels call functions and use constants of other files, so a kept kernel could be out of
date: other bits on one rank than on the next, or tracks of an old version. Here a kernel is kept until its file, or a
file that this one imports, changes (`files_of`).

Ranks reach a new kernel together. A rank that does not find it on disk takes a lock of this machine and looks again, so
one rank compiles it and the others load it. Compiling is reported, and its time is not counted. Where nothing can be
kept, kernels are compiled at every start, with a warning.

In a kernel, a record (`table[i]` of a structured array) does not keep its array alive. So tables of records are
arguments, owned by the caller: numba frees a table made in a kernel once the last record is taken out of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import caching, event

from domainpar.common import timeouts
from domainpar.common.words import PROGRESS_LOG, several

ELSEWHERE = "NUMBA_CACHE_DIR=DIR, a directory of yours on a local disk"
"""The remedy where compiled kernels cannot be kept."""

ROOM = 8 * 2**20
"""Bytes that the kernels of a training and of tracks take on disk."""


def compiled(function: Callable[..., Any]) -> Any:
    """A function for arrays as machine code, made at its first call or taken from disk. Division by 0 is no error."""
    kernel = njit(nogil=True, error_model="numpy")(function)
    try:
        kernel._cache = _CachedKernels(function)  # type: ignore[attr-defined]
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        _WATCH.keeps_nothing(why_not_kept(None))
    return kernel


def place_of_kernels() -> Path | None:
    """A directory where kernels of this package are kept; None if there is none that can be written to."""
    try:
        return Path(_Places(compiled).locator.get_cache_path())
    except RuntimeError:
        return None


def why_not_kept(place: Path | None) -> str:
    """Why kernels cannot be kept in a directory, or at all if there is none; empty where they can."""
    if place is None:
        return "neither the package nor the home directory can be written to"
    try:
        with tempfile.TemporaryFile(dir=place) as file:  # tried: an empty file fits on a full disk
            file.write(bytes(ROOM))
        return ""
    except OSError as error:
        return f"{place}: {error.strerror}"


class _Places(caching.CompileResultCacheImpl):
    """Where numba keeps a kernel: beside its file, or else at home."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not os.path.isabs(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~")):
            # For a user without a home numba would make a directory "~" in the current one.
            self._locator_classes = [kind for kind in self._locator_classes if kind is not caching.UserWideCacheLocator]
        super().__init__(function)  # type: ignore[no-untyped-call]


class _KernelFiles(caching.IndexDataCacheFile):
    """The files of a kernel: a list, and machine code for each type of arguments and values that it closes over.

    Each file names its kernel, and counts as missing if the list names another one. numba takes the number of a file
    from the list that it read last, and writes the list first. So two processes without a lock may give one number to
    two kernels, and a process that reads before the file is written, or after a writer was killed, would load an older
    file: code of another type or version.
    """

    def save(self, key: Any, data: Any) -> None:
        """Keep the machine code of a kernel."""
        super().save(key, (self._source_stamp, key, data))  # type: ignore[no-untyped-call]

    def load(self, key: Any) -> Any:
        """The kept code of a kernel; None if there is none, or the file is another kernel's."""
        of = self._source_stamp, key
        kept = super().load(key)  # type: ignore[no-untyped-call]
        return kept[2] if kept is not None and kept[:2] == of else None


class _CachedKernels(caching.FunctionCache):
    """What numba keeps on disk of one kernel, while no file changes that it may be made of.

    These are private names of numba: `domainpar.nn.lanes` says what breaks without them.
    """

    _impl_class = _Places

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        if not hasattr(self._cache_file, "_source_stamp"):
            raise RuntimeError("this numba knows no stamp of sources: kernels on disk would outlive them.")
        # Its stamp is set at the first use.
        self._cache_file = _KernelFiles(self.cache_path, self._impl.filename_base, "")  # type: ignore[no-untyped-call]
        _hash_of(function.__code__.co_filename)  # the file as it is while it is imported, which numba reads too

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The kernel kept on disk, also once another process has compiled it; None if this one is to compile it."""
        # Not earlier: while a file is imported, what stands further down in it does not exist yet.
        sources = "\n".join(map(_hash_of, sorted(files_of(self._py_func))))
        self._cache_file._source_stamp = hashlib.sha256(sources.encode()).hexdigest()
        kernel = self._load(signature, context)
        if kernel is None:
            if not _WATCH.looked:  # once, so that the message about it is right from the start
                _WATCH.looked = True
                if why := why_not_kept(Path(self.cache_path)):
                    _WATCH.keeps_nothing(why)
            kernel = self._load(signature, context) if _WATCH.lock() else None
        _WATCH.ready += kernel is not None
        return kernel

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a kernel that was compiled, or say once why it is not kept."""
        try:
            super().save_overload(signature, result)  # type: ignore[no-untyped-call]
        except OSError as error:
            _WATCH.keeps_nothing(f"{error.filename or self.cache_path}: {error.strerror}")

    def _load(self, signature: Any, context: Any) -> Any:
        try:
            return super().load_overload(signature, context)  # type: ignore[no-untyped-call]
        except OSError:  # for example another user's; whether it can be written is reported when it is
            return None
        except Exception:  # left by a machine that crashed: unpickling may raise anything
            with suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None


# --- what a kernel is made of ----------------------------------------------------------------------------------------

_IMPORTS = re.compile(r"^\s*(?:from ([\w.]+) )?import (\([^)]*\)|.*)", re.MULTILINE)


@cache
def _hash_of(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def files_of(function: Callable[..., Any]) -> set[str]:
    """The file of a kernel, and those of its package and of ours that this one imports, directly or not.

    Files, not functions, as in numba's own stamp: what runs at import counts, such as adding operators to a type.
    """
    packages = {function.__module__.partition(".")[0], __name__.partition(".")[0]}
    files: set[str] = set()
    left = [function.__code__.co_filename]
    while left:
        if (file := left.pop()) not in files:
            files.add(file)
            left += [imported for package, imported in _imported_by(file) if package in packages]
    return files


@cache
def _imported_by(file: str) -> list[tuple[str, str]]:
    """Package and file of each module that a file imports, for modules in packages."""
    found = []
    for source, names in _IMPORTS.findall(Path(file).read_text(encoding="utf-8")):
        for module in {source, *(f"{source}.{name}".strip(".") for name in re.findall(r"[\w.]+", names))}:
            package, *inner = module.split(".")
            for folder in getattr(sys.modules.get(package), "__path__", ()):
                path = Path(folder).joinpath(*inner)
                places = (path.with_suffix(".py"), path / "__init__.py")
                found += [(package, str(place)) for place in places if place.is_file()]
    return found


# --- the watch -------------------------------------------------------------------------------------------------------


class _CompileTimer(event.Listener):
    """Holds the lock of this machine while numba compiles, and measures how long that takes, with loading."""

    def __init__(self) -> None:
        self.talks, self.listens, self._alone, self._last_text, self._why_not = False, False, False, "", ""
        self.looked = False  # whether kernels can be kept
        self._mutex, self._file, self._depth = threading.Lock(), -1, 0
        self._began = self._seconds = 0.0
        self.ready = 0  # kernels compiled, or taken from disk

    def clock(self) -> float:
        """Seconds of this process, without those spent here."""
        with self._mutex:
            return (self._began if self._depth else time.perf_counter()) - self._seconds

    def on_start(self, started: event.Event) -> None:
        if started.kind == "numba:compile":
            PROGRESS_LOG.begin(self._far)
            return self._say()
        with self._mutex:
            self._depth += 1  # kernels that call each other are compiled within each other
            if self._depth == 1:
                self._began = time.perf_counter()
        return None

    def on_end(self, ended: event.Event) -> None:
        if ended.kind == "numba:compile":
            self.ready += 1
            return PROGRESS_LOG.end(self._far)
        with self._mutex:
            self._depth -= 1
            if self._depth == 0:
                if self._file >= 0:
                    os.close(self._file)  # which gives the lock back
                    self._file = -1
                self._seconds += time.perf_counter() - self._began
        return None

    def lock(self) -> bool:
        """Take the lock, waiting for other compiling processes of this user; returns whether it took it now."""
        # Without locks every rank compiles for itself, which is only slower.
        with self._mutex, suppress(OSError), ExitStack() as stack:
            if self._depth == 0 or self._file >= 0 or self._alone:
                return False
            self._file = os.open(_lock_file(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            came = time.perf_counter()
            PROGRESS_LOG.begin(self._far)
            stack.callback(PROGRESS_LOG.end, self._far)
            while (waited := time.perf_counter() - came) < timeouts.COMPILING:  # its owner may be frozen
                with suppress(BlockingIOError):
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                if waited > timeouts.COMPILING_SILENCE:
                    self._say()
                time.sleep(0.01)
            self._alone = True
        return False

    def keeps_nothing(self, why: str) -> None:
        """Compile without waiting for others, which find nothing on disk either, and print why kernels are not kept."""
        self._alone, self._why_not = True, self._why_not or why
        if self._last_text:
            self._say()

    def _say(self) -> None:
        anew = f"at every start: they cannot be kept, {self._why_not}; {ELSEWHERE}, helps"
        text = f"compiling: kernels for this machine (numba), {anew if self._why_not else 'once: later runs load them'}"
        if self.talks and text != self._last_text:
            self._last_text = text
            PROGRESS_LOG.say(text, sys.stderr)

    def _far(self) -> str:
        return f"compiling: {several(self.ready, 'kernel')} compiled or loaded so far"


def _lock_file() -> Path:
    """A lock for each user, copy of the package and machine: shared file systems may have no locks."""
    package = hashlib.sha256(str(Path(__file__).resolve().parents[1]).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"domainpar-compiling-{os.getuid()}-{package}"


_WATCH = _CompileTimer()


def watch_compiling(talks: bool) -> None:
    """Compile each kernel on one process of this machine at a time, and let `clock` stand still meanwhile.

    A process that prints reports once when it compiles or waits for a process that does.
    """
    _WATCH.talks = talks
    if not _WATCH.listens:
        _WATCH.listens = True
        for kind in ("numba:compiler_lock", "numba:compile"):
            event.register(kind, _WATCH)  # type: ignore[no-untyped-call]


def clock() -> float:
    """A clock in seconds that stands still while numba loads or compiles kernels."""
    return _WATCH.clock()
