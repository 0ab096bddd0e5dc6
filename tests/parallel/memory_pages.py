"""Pages of memory that a process touches for the first time; imports nothing that takes memory or time itself."""

from __future__ import annotations

import ctypes
import os
import resource
import threading

MIB = 2**20
BLOCK, PAGES = 64 * MIB, 64 * MIB // os.sysconf("SC_PAGE_SIZE")


def use_a_block():
    """Take a block of memory, write to all of it, and free it."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    block = ctypes.c_void_p(library.malloc(ctypes.c_size_t(BLOCK)))
    ctypes.memset(block, 1, BLOCK)
    library.free(block)


def new_pages(in_thread=False):
    """Pages that the second use of a block of `PAGES` pages touches for the first time."""
    counted = []

    def count():
        use_a_block()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        use_a_block()
        counted.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    thread = threading.Thread(target=count)
    (thread.start if in_thread else count)()
    if in_thread:
        thread.join()
    return counted[0]
