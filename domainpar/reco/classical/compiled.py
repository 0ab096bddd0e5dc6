"""numba's compiler for this room, whose kernels call each other across files.

numba keeps what it compiled beside a function's file and looks at that file alone; here it looks at the whole room.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

_STAMP = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def compiled(function: Callable[..., Any]) -> Any:
    """A function for arrays as machine code, made at its first call or taken from disk. Division by 0 is no error."""
    made = njit(nogil=True, cache=True, error_model="numpy")(function)
    made._cache._cache_file._source_stamp = _STAMP  # type: ignore[attr-defined]
    return made
