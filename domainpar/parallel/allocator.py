"""What the C library does with large blocks of memory that a rank frees: set up once, when a command starts.

glibc returns such blocks to the system. A training step frees tensors of many megabytes and asks for as many again, and
gets zeroed pages, with a page fault for each: a step of plain PyG then takes three times as long. If freed blocks are
kept instead, they cost no time from the second step on, but more memory: torch asks for aligned blocks, and glibc
(2.36) does not put one into the gap that another one of the same size has left. Recomputation would then save little
memory, so for it blocks are returned at once, which takes time. Stages keep their tables apart (`tables`) and do not
depend on this.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import c_char_p, c_void_p

# Numbers of glibc's malloc.h. One arena, for a thread's own cannot hold a block above 64 MiB and so keeps none.
# Huge pages (torch's THP_MEM_ALLOC_ENABLE) save nothing with memory that is kept, and their alignment leaves larger
# gaps; with memory that is given back they leave the zeroing, which costs as much as the faults.
_KEEP = {"no mmap": (-4, 0), "no trim": (-1, -1), "one arena": (-8, 1)}
_PROBE = 2**24  # bytes; nobody writes to them, so that they cost nothing
_LEAN = {"mmap from 1 MiB": (-3, 2**20)}


def set_up_allocator(how: str = "keep") -> str:
    """Say what becomes of the memory that this process frees, if its C library can and nobody else has decided on it.

    Call it first: blocks that were taken before are still given back, and threads that took one go on as they did. It
    changes the whole process and never fails.

    Args:
        how: `keep` it, which is `auto`, too; `lean`, to give large blocks back at once, so that there are no gaps
            between those that stay; `system`, to change nothing.

    Returns:
        The change in words, or why nothing was changed.
    """
    if how == "system":
        return "the C library's own way (--allocator system)"
    library = _glibc()
    if library is None:
        return "left as it is: this C library is not glibc"
    if reason := _set_by_others(library, os.environ):
        return f"left as it is: {reason}"
    if how == "lean":
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it once: huge pages, so that few are faults
    wanted = _LEAN if how == "lean" else _KEEP
    done = [name for name, (parameter, value) in wanted.items() if library.mallopt(parameter, value) == 1]
    if len(done) < len(wanted):
        return f"set up in part ({_version(library)}: {', '.join(done) or 'nothing'})"
    what = "kept for the next step" if wanted is _KEEP else "given back at once"
    return f"freed memory is {what} ({_version(library)}: {', '.join(done)})"


def give_back_freed() -> None:
    """Give all memory that was freed so far back to the system, kept or not; on glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(ctypes.c_size_t(0))


_COUNTERS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class _InUse(ctypes.Structure):
    """`struct mallinfo2` of glibc's malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTERS]


class _InUseBefore(ctypes.Structure):
    """`struct mallinfo`, the same of before glibc 2.33; its numbers start anew at 4 GiB."""

    _fields_ = [(name, ctypes.c_uint) for name in _COUNTERS]


def bytes_in_use() -> int | None:
    """What this process has asked the C library for and not given back yet; None where it does not tell (glibc 2.33).

    What is freed and kept for the next step does not count, unlike in the memory that the system sees.
    """
    library = _glibc()
    if library is None or not hasattr(library, "mallinfo2"):
        return None
    return _counted(library)


def _counted(library: ctypes.CDLL) -> int:
    """Bytes in use by glibc's own counters; before glibc 2.33 modulo 4 GiB."""
    count, kind = (library.mallinfo2, _InUse) if hasattr(library, "mallinfo2") else (library.mallinfo, _InUseBefore)
    count.restype = kind
    found = count()
    return int(found.uordblks) + int(found.hblkhd)


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, if it is glibc."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None  # musl and macOS have none


def _version(library: ctypes.CDLL) -> str:
    library.gnu_get_libc_version.restype = c_char_p
    return f"glibc {library.gnu_get_libc_version().decode()}"


def _set_by_others(library: ctypes.CDLL, environ: Mapping[str, str]) -> str | None:
    """Who has decided on the allocator of this process already; None if nobody has."""
    own = [name for name in sorted(environ) if name.startswith("MALLOC_")]
    if "glibc.malloc." in environ.get("GLIBC_TUNABLES", ""):
        own.append("GLIBC_TUNABLES")
    if own:
        return f"{', '.join(own)} set in the environment"
    if _serves(library):
        return None
    return f"malloc is that of {os.path.basename(_file_of(library, 'malloc'))}"


def _serves(library: ctypes.CDLL) -> bool:
    """Whether it is glibc that gives this process its memory: its counters see a block that is taken.

    Whose symbol `malloc` is does not tell: in a Python that lies at a fixed address, as Debian's own, it is a stub of
    the program, and a library that only counts may stand before glibc's.
    """
    library.malloc.restype = c_void_p
    for _ in range(3):  # another thread may take or free memory in between
        before = _counted(library)
        block = library.malloc(ctypes.c_size_t(_PROBE))
        taken = _counted(library) - before
        library.free(c_void_p(block))
        if _PROBE <= taken % 2**32 < 2 * _PROBE:
            return True
    return False


class _Symbol(ctypes.Structure):
    """glibc's Dl_info."""

    _fields_ = (("file", c_char_p), ("base", c_void_p), ("name", c_char_p), ("address", c_void_p))


def _file_of(library: ctypes.CDLL, function: str) -> str:
    """The file from which this process takes a function; empty if that cannot be said."""
    symbol = _Symbol()
    described = hasattr(library, "dladdr") and library.dladdr(getattr(library, function), ctypes.byref(symbol))
    return os.fsdecode(symbol.file) if described else ""
