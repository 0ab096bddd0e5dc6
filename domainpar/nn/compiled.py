"""numba's compiler as kernels use it: without the GIL, and kept on disk until any of their sources changes.

numba keeps what it compiled beside a function's file and looks at that file alone. Kernels call each other across
files, so what is kept could be yesterday's: other bits on one rank than on the next, or a table of another size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit


def _stamp_of_sources() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_STAMP = _stamp_of_sources()


def compiled(function: Callable[..., Any]) -> Any:
    """A function for arrays as machine code, made at its first call or taken from disk."""
    made = njit(nogil=True, cache=True, error_model="numpy")(function)
    made._cache._cache_file._source_stamp = _STAMP  # type: ignore[attr-defined]
    return made
