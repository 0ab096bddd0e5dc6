"""What the C library does with large freed blocks of memory: set once, when a command starts.

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
import re

# Numbers of glibc's malloc.h. One arena, for a thread's own cannot hold a block above 64 MiB and so keeps none.
# Huge pages (torch's THP_MEM_ALLOC_ENABLE) save nothing with memory that is kept, and their alignment leaves larger
# gaps; with memory that is given back they leave the zeroing, which costs as much as the faults.
_KEEP = {"no mmap": (-4, 0), "no trim": (-1, -1), "one arena": (-8, 1)}
_LEAN = {"mmap from 1 MiB": (-3, 2**20)}


def set_up_allocator(how: str = "keep") -> str:
    """Set what the C library does with freed memory, if it can and the user has not set it.

    Call it first: blocks taken before are still returned to the system, and threads that took one do not change. It
    changes the whole process and never fails.

    Args:
        how: `keep` it, which is `auto`, too; `lean`, to give large blocks back at once, so that there are no gaps
            between those that stay; `system`, to change nothing. Returned is the change in words, or why there is none.
    """
    if how == "system":
        return "the C library's own way (--allocator system)"
    library = _glibc()
    if library is None:
        return "left as it is: this C library is not glibc"
    own = [name for name in sorted(os.environ) if name.startswith("MALLOC_")]
    own += ["GLIBC_TUNABLES"] * ("glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""))
    own += ["LD_PRELOAD"] * bool(re.search(r"malloc[^/: ]*(?:[: ]|$)", os.environ.get("LD_PRELOAD", "")))  # jemalloc
    if own:
        return f"left as it is: {', '.join(own)} set in the environment"
    if how == "lean":
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it once: huge pages, so that few are faults
    wanted = _LEAN if how == "lean" else _KEEP
    library.gnu_get_libc_version.restype = ctypes.c_char_p
    version = f"glibc {library.gnu_get_libc_version().decode()}"
    done = [name for name, (parameter, value) in wanted.items() if library.mallopt(parameter, value) == 1]
    if len(done) < len(wanted):
        return f"set up in part ({version}: {', '.join(done) or 'nothing'})"
    what = "kept for the next step" if wanted is _KEEP else "given back at once"
    return f"freed memory is {what} ({version}: {', '.join(done)})"


def give_back_freed() -> None:
    """Give all memory that was freed so far back to the system, kept or not; on glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(ctypes.c_size_t(0))


def bytes_in_use() -> int | None:
    """Bytes that this process has allocated from the C library; None where that cannot be read (before glibc 2.33).

    Freed memory that is kept for the next step does not count, unlike in the memory that the system reports.
    """
    library = _glibc()
    if library is None or not hasattr(library, "mallinfo2"):
        return None
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    counters = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    library.mallinfo2.restype = counters
    found = library.mallinfo2()
    return int(found.uordblks) + int(found.hblkhd)


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, if it is glibc."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None  # musl and macOS have none
