"""numba's compiler as kernels use it: without the GIL, and kept on disk until any source of their room changes.

numba keeps what it compiled beside a function's file and looks at that file alone. Kernels call each other across
files, so what is kept could be yesterday's: other bits on one rank than on the next, or a table of another size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Any:
    """A function for arrays as machine code, made at its first call or taken from disk. Division by 0 is no error."""
    kernel = njit(nogil=True, cache=True, error_model="numpy")(function)
    stamp = _stamp_of_room(Path(function.__code__.co_filename).parent)
    # numba compares a stamp of the source with the one it kept; this one changes with every file of the room. A private
    # name: `lanes` says what breaks without it.
    kernel._cache._cache_file._source_stamp = stamp  # type: ignore[attr-defined]
    return kernel


@cache
def _stamp_of_room(directory: Path) -> str:
    files = sorted(directory.glob("*.py"))  # sorted: directories list their files in any order
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
